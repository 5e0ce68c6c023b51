"""What checkpoints are made of: bytes keyed by seed, checkpoint, file and offset, unlike any others.

Place in the flow: the pipe's `Producer` and `Verifier`. Invariant: nothing is stored to verify against; any
byte of any checkpoint follows from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.dataset.content import Content

if TYPE_CHECKING:
    from penstock.checkpoint.pipe.base import PlannedObject


class StateContent:
    """The bytes of some planned objects; made before the clock starts, used by any thread."""

    def __init__(self, seed: int, planned: Iterable[PlannedObject]) -> None:
        # A key names checkpoint, rank and file, so that no two of a run have a block in common.
        self._contents = {each.key: Content(seed, each.key) for each in planned}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite `buffer` with the object's bytes from `offset` on."""
        self._contents[planned.key].fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Where in `buffer` the first wrong byte is; None if all are right."""
        return self._contents[planned.key].verify(buffer, offset)
