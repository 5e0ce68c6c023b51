"""Memory for stages, kept warm between saves, and never more of it than was allowed.

Invariant: what all lent memories and all idle ones take together stays within the budget.
"""

from __future__ import annotations

import threading
import time

from penstock.checkpoint.pipe.memory import WarmMemory
from penstock.errors import UsageError, WaitTimeout
from penstock.storage.aligned import PAGE_BYTES, round_up


class StagingMemory:
    """Lends memory to saves, from any thread. Whoever borrows gives back."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._idle: list[WarmMemory] = []
        self._lent_bytes = 0
        self._changed = threading.Condition()

    def borrow(self, size_bytes: int, timeout_s: float) -> WarmMemory:
        """At least `size_bytes`, warm if somebody had it before; waits for earlier saves."""
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        if size_bytes > self.budget_bytes:
            raise UsageError(
                f"{size_bytes} bytes do not fit into staging_bytes={self.budget_bytes}",
                fix="Raise staging_bytes, or have fewer writers.",
            )
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (memory := self._find(size_bytes)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise WaitTimeout("an earlier save to give back its staging memory", timeout_s)
            self._lent_bytes += memory.size_bytes
            return memory

    def give_back(self, memory: WarmMemory) -> None:
        """Others may have it now; its content stays what it was."""
        with self._changed:
            self._lent_bytes -= memory.size_bytes
            self._idle.append(memory)
            self._changed.notify_all()

    def clear(self) -> None:
        """Let go of everything that is idle."""
        with self._changed:
            self._idle.clear()

    def _find(self, size_bytes: int) -> WarmMemory | None:
        fitting = [each for each in self._idle if each.size_bytes >= size_bytes]
        if fitting:
            best = min(fitting, key=lambda each: each.size_bytes)
            self._idle.remove(best)
            return best
        if self._lent_bytes + size_bytes > self.budget_bytes:
            return None
        # None is large enough: the cold ones make room for one that is.
        while self._lent_bytes + self._idle_bytes() + size_bytes > self.budget_bytes:
            self._idle.pop(0)
        return WarmMemory(size_bytes)

    def _idle_bytes(self) -> int:
        return sum(each.size_bytes for each in self._idle)
