"""What of a checkpoint is converted: tensors by number, and the values that are no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.checkpoint.patterns import matches
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.opened import Opened
    from penstock.checkpoint.pieces import StoredObject


@dataclass(frozen=True, slots=True)
class Selection:
    """Tensors by their numbers in the contents, and objects."""

    tensors: tuple[int, ...]
    objects: tuple[StoredObject, ...]

    def num_bytes(self, opened: Opened) -> int:
        """Of all chosen tensors."""
        return sum(opened.contents.tensors[number].size_bytes for number in self.tensors)


def select(opened: Opened, only: Sequence[str]) -> Selection:
    """What matches one of the patterns; all without patterns. Nothing at all is a `UsageError`."""

    def is_chosen(name: str) -> bool:
        return not only or matches(name, only)

    contents = opened.contents
    chosen = Selection(
        tuple(number for number, facts in enumerate(contents.tensors) if is_chosen(facts.name)),
        tuple(one for one in contents.objects if is_chosen(one.name)),
    )
    if only and not (chosen.tensors or chosen.objects):
        raise UsageError(
            f"No name in {opened.uri} matches {' or '.join(only)}",
            fix="`penstock checkpoint show` lists the names.",
        )
    return chosen
