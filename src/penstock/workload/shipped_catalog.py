"""The shipped workloads (families, with a variant for each accelerator) and the shipped model cards.

A family's file holds `about`, `workload` (what all accelerators share, in DLIO's keys) and `accelerators`
(what each of them changes). A model card holds the sections of a workload and, next to them, `about`,
`ranks`, `aliases`, and `files` if the checkpoint's files are known individually.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import UsageError
from penstock.workload.strict_yaml import parse_yaml

Family = Mapping[str, Any]


@cache
def families() -> Mapping[str, Family]:
    """Map each family's name to the content of its file, in catalog order."""
    return {name: {"accelerators": {}, **tree} for name, tree in _read_folder("catalog") if name != "dlio"}


def full_names(name: str) -> tuple[str, ...]:
    """Return the names that `workload=` accepts for a family's members."""
    return tuple(f"{name}_{accelerator}" for accelerator in families()[name]["accelerators"]) or (name,)


@cache
def dlio_workloads() -> Mapping[str, Mapping[str, Any]]:
    """Return the workloads that only DLIO ships, under its names."""
    return dict(_read_folder("catalog"))["dlio"]


def _read_folder(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and content of each YAML file in a shipped folder."""
    entries = sorted((resources.files("penstock.workload") / folder).iterdir(), key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.endswith(".yaml"):
            yield entry.name.removesuffix(".yaml"), parse_yaml(entry.read_text(), source=entry.name)


CARD_KEYS: Final = ("about", "ranks", "aliases", "files")
"""The keys of a card that are not sections of its workload."""


class FileRule(BaseModel):
    """Files of one kind: `count` of them on each `every`-th rank, numbered by `{index}`.

    `name` may contain `{epoch}`, `{step}`, `{rank}` and `{index}`; a file's size is the sum of its `parts`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    parts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)] = 1
    every: Annotated[int, Field(ge=1)] = 1


class ModelCard(BaseModel):
    """A card that describes one model.

    If `ranks` is None, the number of ranks follows from the model's own parallelism.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    about: str = ""
    ranks: Annotated[int, Field(ge=1)] | None = None
    aliases: list[str] = []
    files: list[FileRule] = []
    sections: dict[str, Any] = {}


@cache
def cards() -> Mapping[str, ModelCard]:
    """Return all shipped cards by name, in catalog order."""
    files = _read_folder("catalog/models")
    return {name: read_card(tree, name=name, source=f"{name}.yaml") for name, tree in files}


def shipped_card(name: str) -> ModelCard | None:
    """Return the card with this name or alias, or None if there is none."""
    return cards().get(name) or next((card for card in cards().values() if name in card.aliases), None)


def read_card(tree: Mapping[str, Any], *, name: str, source: str) -> ModelCard:
    """Read a card from a file's content: first its own keys; the rest are the sections of a workload."""
    about = {key: tree[key] for key in CARD_KEYS if key in tree}
    sections = {key: value for key, value in tree.items() if key not in CARD_KEYS}
    if set(sections) == {"workload"}:
        sections = sections["workload"]
    try:
        return ModelCard.model_validate({**about, "name": name, "sections": sections})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        is_rule = place.startswith("files")
        raise UsageError(
            f"{place} is not understood: {first['msg']}",
            where=source,
            fix=f"A rule of files has the keys {', '.join(FileRule.model_fields)}."
            if is_rule
            else "See `penstock docs checkpointing`.",
        ) from error
