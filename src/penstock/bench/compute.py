"""Emulated computation: how long each step computes, and a wait of exactly that long.

The same (seed, phase, rank, epoch, step) computes equally long in every run, however ranks are placed and
wherever a run resumes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from penstock.workload.duration import Distribution

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.results.step_events import StepPhase
    from penstock.workload.duration import Duration

_PREPROCESSING: Final = 1  # tells its draws from those of computation

SPIN_NS: Final = 200_000
"""Sleep until this long before the end, then watch the clock: a sleep wakes up 50 to 150 us late."""


class Clock(Protocol):
    """Time as a wait sees it; tests bring their own."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""

    def sleep(self, seconds: float) -> None:
        """Sleep about `seconds`, rather longer."""

    def give_way(self) -> None:
        """Let another thread or process have the core, if one wants it."""


class SystemClock:
    """The machine's own."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Sleep without the GIL."""
        time.sleep(seconds)

    def give_way(self) -> None:
        """Yield the core and the GIL: loader threads go on while this one watches the clock."""
        os.sched_yield()


def compute_until(end_ns: int, clock: Clock) -> int:
    """Return at `end_ns`, or at once if it has passed; the moment of return.

    The end is absolute, so that what the caller did before does not add to the time computed.
    """
    now_ns = clock.now_ns()
    if end_ns - now_ns > SPIN_NS:
        clock.sleep((end_ns - now_ns - SPIN_NS) / 1e9)
        now_ns = clock.now_ns()
    while now_ns < end_ns:
        clock.give_way()
        now_ns = clock.now_ns()
    return now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """How long the steps of one rank compute in one phase, keyed by epoch and step."""

    duration: Duration
    seed: int
    phase: StepPhase
    rank: int

    def of_epoch(self, epoch: int, num_steps: int) -> NDArray[np.int64]:
        """Nanoseconds for the steps 1 to `num_steps`; drawn before the epoch, so that no step waits."""
        if self.duration.law is Distribution.FIXED:
            return np.full(num_steps, round(self.duration.mean_s * 1e9), np.int64)
        key = (
            np.random.SeedSequence((self.seed, int(self.phase), self.rank)).generate_state(4).view(np.uint64)
        )
        drawn = (self._draw(key, epoch, step) for step in range(1, num_steps + 1))
        return np.fromiter((round(seconds * 1e9) for seconds in drawn), np.int64, num_steps)

    def _draw(self, key: NDArray[np.uint64], epoch: int, step: int) -> float:
        """A counter-based generator: its key says whose it is, its counter which step's."""
        philox = np.random.Philox(key=key, counter=[0, 0, step, epoch])
        return self.duration.draw(np.random.Generator(philox))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessTimes:
    """How long the samples of one rank are worked on before they are a batch, keyed by epoch and step."""

    duration: Duration
    seed: int
    phase: StepPhase
    rank: int

    def of_batch(self, epoch: int, step: int, num_samples: int) -> tuple[int, ...]:
        """Nanoseconds for each sample of a step's batch; none where samples are taken as they are."""
        if self.duration.is_zero:
            return ()
        identity = (self.seed, int(self.phase), self.rank, _PREPROCESSING)
        key = np.random.SeedSequence(identity).generate_state(4).view(np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, epoch]))
        return tuple(round(self.duration.draw(generator) * 1e9) for _ in range(num_samples))
