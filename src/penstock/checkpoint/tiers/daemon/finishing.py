"""Flushing to the end what trainers handed over and did not live to see: for those who come after a job.

Invariant: it ends when every order is over, or when nothing has moved for its time limit; what is not over
goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.tiers.daemon.flusher import Minder, states_of
from penstock.checkpoint.tiers.daemon.folder import FlushFolder
from penstock.checkpoint.tiers.daemon.journal import JournalReader

if TYPE_CHECKING:
    from penstock.checkpoint.tiers.flush import FlushState
    from penstock.progress import Progress

POLL_S: Final = 0.1

States = dict[int, "FlushState"]
"""By step."""


class _Flushing:
    """One cache that is flushed to the end."""

    def __init__(self, cache: Path) -> None:
        self._folder = FlushFolder(cache)
        self._journal = JournalReader(self._folder.journal)
        self._minder = Minder(self._folder)
        self.steps = frozenset(self._folder.orders.steps())

    def states(self) -> States:
        found = states_of(self._folder, self._journal)
        return {step: state for step, state in found.items() if step in self.steps}

    def is_over(self) -> bool:
        return not self.steps & set(self._folder.orders.steps())

    def mind(self) -> None:
        """See to it that its daemon runs, as long as there is something to do."""
        if not self.is_over():
            self._minder.mind()


def finish(
    caches: Sequence[Path],
    progress: Progress,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[Path, States]:
    """Let the daemons of these caches do what they were given; by cache, what became of each step.

    `timeout_s` is how long nothing may move: a slow flush is not ended, one that waits for other nodes is.
    """
    flushing = {cache: _Flushing(cache) for cache in caches}
    num_bytes = sum(state.size_bytes for each in flushing.values() for state in each.states().values())
    progress.begin("flush", num_bytes)
    moved_bytes, left, moved_at_s = 0, -1, clock()
    while True:
        for each in flushing.values():
            each.mind()
        # Before the states: an order goes once its outcome is in the journal.
        now_left = sum(not each.is_over() for each in flushing.values())
        found = {cache: each.states() for cache, each in flushing.items()}
        now_bytes = sum(state.copied_bytes for states in found.values() for state in states.values())
        if now_bytes != moved_bytes or now_left != left:
            progress.advance(max(now_bytes - moved_bytes, 0))
            moved_bytes, left, moved_at_s = now_bytes, now_left, clock()
        if not left or clock() - moved_at_s > timeout_s:
            return found
        sleep(POLL_S)
