"""The steps of one run: their names in storage, which of them to keep, and the pointer to the latest.

Deciding is pure (`surplus`), the rest is thin. Invariant: steps are what the storage lists as committed; the
pointer is for people and other programs, and never believed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.commit.place import open_shelf
from penstock.checkpoint.stored import Stored
from penstock.errors import UsageError
from penstock.storage.whole import write_object

if TYPE_CHECKING:
    from penstock.storage import Storage

POINTER_NAME: Final = "latest"
_STEP_NAME: Final = re.compile(r"step-(0|[1-9][0-9]*)")


def name_of(step: int) -> str:
    """What the checkpoint of a step is called."""
    if isinstance(step, bool) or step < 0:
        raise UsageError(f"{step} is no step", fix="Count steps from 0.")
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name means; None for other names."""
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


def surplus(steps: Sequence[int], keep: int | None, is_whole: Callable[[int], bool]) -> list[int]:
    """The steps to remove so that the newest `keep` remain, oldest first; None keeps all.

    If none of those is whole, the newest whole one before them stays, too. `is_whole` is asked for the newest
    first and no more often than needed.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    removed, kept = ordered[:-keep], ordered[-keep:]
    if any(is_whole(step) for step in reversed(kept)):
        return removed
    saved = next((step for step in reversed(removed) if is_whole(step)), None)
    return [step for step in removed if step != saved]


class Steps:
    """The committed steps below one root. Any rank may ask; only rank 0 changes anything."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._shelf = open_shelf(storage)

    def committed(self) -> list[int]:
        """All committed steps, ascending."""
        steps = (step_of(name) for name in self._shelf.names())
        return sorted(step for step in steps if step is not None)

    def find(self, step: int) -> Stored:
        """Where a step lies; `ObjectNotFound` where it is not committed."""
        return Stored(self.storage, self._shelf.find(name_of(step)))

    def surplus(self, keep: int | None) -> list[int]:
        """The steps to remove so that the newest `keep` remain, as `surplus` decides."""
        return surplus(self.committed(), keep, lambda step: self.find(step).is_whole())

    def remove(self, step: int) -> None:
        """Remove a step."""
        self._shelf.remove(self._shelf.find(name_of(step)))

    def point_to(self, step: int) -> None:
        """Write the pointer."""
        write_object(self.storage, POINTER_NAME, [f"{name_of(step)}\n".encode()])
