"""Model cards: what a checkpoint holds and on how many ranks, shipped or in a file of somebody's own.

Place in the flow: below `loading`, which finds a card's workload by its name, and `model`, which adds the
rest. A card is a workload's sections with a few keys on top: `about`, `ranks`, `aliases`, and `files` for
layouts that are known file by file. Invariant: a card's own keys are parsed here once; its sections stay as
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files as resource_files
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import UsageError
from penstock.workload.yamlfile import parse_yaml

CARD_KEYS: Final = ("about", "ranks", "aliases", "files")
"""What a card has beside the sections of its workload."""


class FileRule(BaseModel):
    """Files of one kind: on every rank, or on every so manieth; `count` of them there, numbered by `{index}`.

    `name` may hold `{epoch}`, `{step}`, `{rank}` and `{index}`; a file's bytes are the sum of its `parts`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    parts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)] = 1
    every: Annotated[int, Field(ge=1)] = 1


class Card(BaseModel):
    """One model. `ranks` of None leaves their number to the model's own parallelism."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    about: str = ""
    ranks: Annotated[int, Field(ge=1)] | None = None
    aliases: list[str] = []
    files: list[FileRule] = []
    sections: dict[str, Any] = {}


@cache
def cards() -> Mapping[str, Card]:
    """All shipped cards by name, in order."""
    folder = resource_files("penstock.workload") / "catalog" / "models"
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


def shipped_card(name: str) -> Card | None:
    """The card of this name, or of which this is DLIO's name."""
    return cards().get(name) or next((card for card in cards().values() if name in card.aliases), None)


def read_card(tree: Mapping[str, Any], *, name: str, source: str) -> Card:
    """A card from a file's content: its own keys apart, the rest being the sections of a workload."""
    own = {key: tree[key] for key in CARD_KEYS if key in tree}
    sections = {key: value for key, value in tree.items() if key not in CARD_KEYS}
    if set(sections) == {"workload"}:
        sections = sections["workload"]
    try:
        return Card.model_validate({**own, "name": name, "sections": sections})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        known = ", ".join(FileRule.model_fields)
        fix = f"A rule of files has: {known}." if place.startswith("files") else "See docs/checkpointing.md."
        raise UsageError(f"{place} is not understood: {first['msg']}", where=source, fix=fix) from error
