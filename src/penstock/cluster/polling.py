"""Waiting with an end: poll what cannot block, first eagerly, then ever more politely.

Ranks may outnumber cores, so a waiting rank must leave its core to those it waits for. Invariant: every wait
ends, at the latest with a `WaitTimeout` that names what was awaited.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.errors import WaitTimeout

Ready = Callable[[], bool]
Clock = Callable[[], float]

EAGER_POLLS = 200
FIRST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 2e-3
SLEEP_SHARE = 0.1
"""A sleep is this part of the wait so far: what comes soon is seen soon. With doubling sleeps a barrier of 4
ranks on 2 cores was 250 times slower, because a collective only gets on while its ranks poll."""
LATE_AFTER_S = 5.0
"""A wait older than this, or than half its limit, is told to `on_late`: attendance for a later message."""


def _never_told() -> None:
    """Nobody wants to know that a wait is long."""


@dataclass(slots=True)
class PollingWait:
    """One limited wait that may consist of several steps; they share the limit. Its clock starts at once."""

    awaiting: str
    timeout_s: float
    on_late: Callable[[], None] = _never_told
    clock: Clock = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _started_s: float = field(init=False)
    _was_late: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    def until(self, ready: Ready) -> None:
        """Return once `ready()` is true; it is asked at least once, even when no time is left."""
        for _ in range(EAGER_POLLS):
            if ready():
                return
            os.sched_yield()
        while not ready():
            waited_s = self.clock() - self._started_s
            self._check(waited_s)
            self.sleep(min(max(FIRST_SLEEP_S, waited_s * SLEEP_SHARE), LONGEST_SLEEP_S))

    def _check(self, waited_s: float) -> None:
        if waited_s >= self.timeout_s:
            raise WaitTimeout(self.awaiting, self.timeout_s)
        if not self._was_late and waited_s >= min(LATE_AFTER_S, self.timeout_s / 2):
            self._was_late = True
            self.on_late()
