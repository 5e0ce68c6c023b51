"""Emulated computation: how long each step computes, and a wait of exactly that long.

The same (seed, phase, rank, epoch, step) computes equally long in every run, however ranks are placed and
wherever a run resumes.
"""

import os
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.results.step_events import StepPhase
from penstock.workload.quantities import Distribution, Duration

_PREPROCESSING: Final = 1  # keeps its draws apart from those of computation

_Key = NDArray[np.uint64]

SPIN_NS: Final = 200_000
"""Sleep until this long before the end, then watch the clock: a sleep wakes up 50 to 150 us late."""


class SystemClock:
    """The machine's monotonic clock, and two ways to wait on it; tests replace them."""

    def now_ns(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Sleep without the GIL, rather longer than `seconds`."""
        time.sleep(seconds)

    def give_way(self) -> None:
        """Yield the core and the GIL, so that loader threads run while this one watches the clock."""
        os.sched_yield()


def compute_until(end_ns: int, clock: SystemClock) -> int:
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
class _DrawnTimes:
    """Times of one rank in one phase, drawn for each epoch and step by a counter-based generator."""

    duration: Duration
    seed: int
    phase: StepPhase
    rank: int

    def _make_key(self, *purpose: int) -> _Key:
        sequence = np.random.SeedSequence((self.seed, int(self.phase), self.rank, *purpose))
        return sequence.generate_state(4).view(np.uint64)

    def _draw_ns(self, key: _Key, epoch: int, step: int, num_draws: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, epoch]))
        return [round(self.duration.draw(generator) * 1e9) for _ in range(num_draws)]


class ComputeTimes(_DrawnTimes):
    """The computation times of one rank's steps in one phase."""

    def of_epoch(self, epoch: int, num_steps: int) -> list[int]:
        """Nanoseconds for the steps 1 to `num_steps`; drawn before the epoch, so that no step waits."""
        if self.duration.law is Distribution.FIXED:
            return [round(self.duration.mean_s * 1e9)] * num_steps
        key = self._make_key()
        return [self._draw_ns(key, epoch, step, 1)[0] for step in range(1, num_steps + 1)]


class PreprocessTimes(_DrawnTimes):
    """The preprocessing times of one rank's samples."""

    def of_batch(self, epoch: int, step: int, num_samples: int) -> tuple[int, ...]:
        """Nanoseconds for each sample of a step's batch; none where samples are taken as they are."""
        if self.duration.is_zero:
            return ()
        return tuple(self._draw_ns(self._make_key(_PREPROCESSING), epoch, step, num_samples))
