"""The engine for states of torch: the saving and the loading side behind the manager's one waist.

Invariant: one save or load at a time is prepared; what was staged may still be on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.loading.load import Loader, LoadReport
from penstock.checkpoint.plan.records import SaveOptions
from penstock.checkpoint.saving import DEFAULT_STAGING_BYTES, Prepared, Saver

if TYPE_CHECKING:
    from penstock.checkpoint.engine import LoadChoice, SaveChoice, State
    from penstock.checkpoint.members import Members
    from penstock.checkpoint.stored import Stored
    from penstock.progress import Progress


class TorchEngine:
    """An `Engine`. Saves under way take at most `staging_bytes` together, beside the state itself.

    Each rank writes `writers` files side by side; names that begin with `separation_hint` go to files of
    their own.
    """

    def __init__(
        self,
        *,
        writers: int = 2,
        separation_hint: str | None = None,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        options = SaveOptions(writers=writers, separation_hint=separation_hint)
        self._saver = Saver(options, staging_bytes=staging_bytes)
        self._loader = Loader()

    def prepare(self, state: State, members: Members, choice: SaveChoice) -> Prepared:
        """Let all ranks agree who writes what; collective."""
        return self._saver.prepare(state, members, choice)

    def load(
        self,
        state: State,
        stored: Stored,
        members: Members,
        choice: LoadChoice,
        progress: Progress | None,
    ) -> LoadReport:
        """Fill `state` in place; collective."""
        return self._loader.load(state, stored, members, choice, progress)

    def close(self) -> None:
        """Let go of memory and threads."""
        self._saver.close()
        self._loader.close()
