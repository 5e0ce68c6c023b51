"""The engine of torch's states: what saves and what loads, as one, with memory that stays warm between calls.

Between `manager`, which loads this module when it is made, and the two halves. Invariant: what one half
leaves in storage the other one takes, and so does stock torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.loading.load import Loader
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.saving import DEFAULT_STAGING_BYTES, Saver

if TYPE_CHECKING:
    from penstock.checkpoint.commit.catalog import Stored
    from penstock.checkpoint.engine import LoadChoice, SaveChoice, State
    from penstock.checkpoint.loading.load import LoadReport
    from penstock.checkpoint.members import Members
    from penstock.checkpoint.saving import Prepared
    from penstock.progress import Progress


class TorchEngine:
    """An `Engine` for nested states of tensors and other values. `staging_bytes` bounds a rank's copies."""

    def __init__(
        self, options: SaveOptions | None = None, *, staging_bytes: int = DEFAULT_STAGING_BYTES
    ) -> None:
        self._saver = Saver(options or SaveOptions(), staging_bytes=staging_bytes)
        self._loader = Loader()

    def prepare(self, state: State, members: Members, choice: SaveChoice) -> Prepared:
        """Let all ranks agree who writes what; collective."""
        return self._saver.prepare(state, members, choice)

    def load(
        self, state: State, stored: Stored, members: Members, choice: LoadChoice, progress: Progress | None
    ) -> LoadReport:
        """Fill `state` in place; collective."""
        return self._loader.load(state, stored, members, choice, progress)

    def close(self) -> None:
        """Let go of the memory of both halves."""
        self._saver.close()
        self._loader.close()
