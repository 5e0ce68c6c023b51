"""The shipped workloads (families, with a variant for each accelerator) and the shipped model cards.

A family's file holds `about`, `workload` (what all accelerators share, in DLIO's keys) and `accelerators`
(what each of them changes). A model card holds the sections of a workload and, beside them, `about`, `ranks`,
`aliases`, and `files` where the checkpoint's files are known one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import UsageError
from penstock.workload.strict_yaml import parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFamily:
    """One file of the catalog. `variants` is empty where the workload names no accelerator."""

    name: str
    about: str
    shared: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]

    def full_names(self) -> tuple[str, ...]:
        """What `workload=` may call its members."""
        return tuple(f"{self.name}_{accelerator}" for accelerator in self.variants) or (self.name,)


@cache
def families() -> Mapping[str, WorkloadFamily]:
    """All families by name, in order."""
    folder = resources.files("penstock.workload") / "catalog"
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    shipped = (
        _family(entry.name, entry.read_text())
        for entry in entries
        if entry.name.endswith(".yaml") and entry.name != "dlio.yaml"
    )
    return {family.name: family for family in shipped}


def _family(file_name: str, text: str) -> WorkloadFamily:
    tree = parse_yaml(text, source=file_name)
    return WorkloadFamily(
        name=file_name.removesuffix(".yaml"),
        about=tree["about"],
        shared=tree["workload"],
        variants=tree.get("accelerators", {}),
    )


@cache
def dlio_workloads() -> Mapping[str, Mapping[str, Any]]:
    """The workloads that DLIO ships under names of its own, beside those of the families."""
    folder = resources.files("penstock.workload") / "catalog" / "dlio.yaml"
    named: Mapping[str, Mapping[str, Any]] = parse_yaml(folder.read_text(), source="dlio.yaml")
    return named


CARD_KEYS: Final = ("about", "ranks", "aliases", "files")
"""What a card has beside the sections of its workload."""


class FileRule(BaseModel):
    """Files of one kind: on each `every`-th rank; `count` of them on each, numbered by `{index}`.

    `name` may hold `{epoch}`, `{step}`, `{rank}` and `{index}`; a file's bytes are the sum of its `parts`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    parts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)] = 1
    every: Annotated[int, Field(ge=1)] = 1


class ModelCard(BaseModel):
    """One model. `ranks` of None leaves their number to the model's own parallelism."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    about: str = ""
    ranks: Annotated[int, Field(ge=1)] | None = None
    aliases: list[str] = []
    files: list[FileRule] = []
    sections: dict[str, Any] = {}


@cache
def cards() -> Mapping[str, ModelCard]:
    """All shipped cards by name, in order."""
    folder = resources.files("penstock.workload") / "catalog" / "models"
    entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    found = (
        read_card(
            parse_yaml(entry.read_text(), source=entry.name),
            name=entry.name.removesuffix(".yaml"),
            source=entry.name,
        )
        for entry in entries
        if entry.name.endswith(".yaml")
    )
    return {card.name: card for card in found}


def shipped_card(name: str) -> ModelCard | None:
    """The card of this name, or of which this is DLIO's name."""
    return cards().get(name) or next((card for card in cards().values() if name in card.aliases), None)


def read_card(tree: Mapping[str, Any], *, name: str, source: str) -> ModelCard:
    """A card from a file's content: its own keys apart, the rest being the sections of a workload."""
    about = {key: tree[key] for key in CARD_KEYS if key in tree}
    sections = {key: value for key, value in tree.items() if key not in CARD_KEYS}
    if set(sections) == {"workload"}:
        sections = sections["workload"]
    try:
        return ModelCard.model_validate({**about, "name": name, "sections": sections})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        known = ", ".join(FileRule.model_fields)
        fix = "See `penstock docs checkpointing`."
        if place.startswith("files"):
            fix = f"A rule of files has: {known}."
        raise UsageError(f"{place} is not understood: {first['msg']}", where=source, fix=fix) from error
