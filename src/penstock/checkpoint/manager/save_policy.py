"""When to save: what `Manager.should_save` asks at each step.

Policies save by steps, seconds, the cost of saving, or how often the job fails. They are pure: measurements
go in, a yes or no comes out. Invariant: while the cost of a save is unknown, the first one is due at once, so
that there is a checkpoint.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from penstock.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTiming:
    """What a policy decides on. `blocked_s` is the training time that a save costs; None if not yet known."""

    step: int
    since_last_s: float
    blocked_s: float | None


class SavePolicy(Protocol):
    """Decides when to save. Rank 0's decides for all: ranks would measure different times."""

    def is_due(self, measured: SaveTiming) -> bool:
        """Whether to save now."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save every `steps` steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps must be at least 1, not {self.steps}", where="EverySteps")

    def is_due(self, measured: SaveTiming) -> bool:
        """Whether the step is a multiple of `steps`; nothing else of what was `measured` counts."""
        return measured.step % self.steps == 0


EVERY_STEP = EverySteps(1)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """Save when `seconds` have passed since the last save."""

    seconds: float

    def __post_init__(self) -> None:
        _require_positive("seconds", self.seconds)

    def is_due(self, measured: SaveTiming) -> bool:
        """Whether they have passed, by what was `measured` so far."""
        return measured.since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Overhead:
    """Save as often as possible with at most `percent` of the time spent on it."""

    percent: float

    def __post_init__(self) -> None:
        _require_positive("percent", self.percent)

    def is_due(self, measured: SaveTiming) -> bool:
        """Whether a save now would stay below that, by what was `measured` so far."""
        return measured.blocked_s is None or measured.since_last_s * self.percent / 100 >= measured.blocked_s


@dataclass(frozen=True, slots=True)
class Daly:
    """Save at the interval that loses the least time to saves and to failures, `mtbf_s` apart on average."""

    mtbf_s: float

    def __post_init__(self) -> None:
        _require_positive("mtbf_s", self.mtbf_s)

    def is_due(self, measured: SaveTiming) -> bool:
        """Whether that interval has passed, by what was `measured` so far."""
        blocked_s = measured.blocked_s
        return blocked_s is None or measured.since_last_s >= daly_interval_s(blocked_s, self.mtbf_s)


NUM_REMEMBERED = 9
"""Saves whose cost is remembered; their median counts, as the first ones touch new memory and are slower."""


@dataclass(slots=True)
class SaveScheduler:
    """Measures the cost of saves and the time since the last one, and asks the policy."""

    policy: SavePolicy
    clock: Callable[[], float] = time.monotonic
    _since_s: float = field(init=False)
    _blocked_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED), init=False)

    def __post_init__(self) -> None:
        if not hasattr(self.policy, "is_due"):
            raise UsageError(
                f"Invalid save_policy={self.policy!r}", fix="Give a policy, as pc.EverySteps(100)."
            )
        self._since_s = self.clock()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the part of one save that training waits for."""
        begin_s = self.clock()
        yield
        self._since_s = self.clock()
        self._blocked_s.append(self._since_s - begin_s)

    def is_due(self, step: int) -> bool:
        """Whether to save at this step."""
        blocked_s = median(self._blocked_s) if self._blocked_s else None
        since_s = self.clock() - self._since_s
        return self.policy.is_due(SaveTiming(step=step, since_last_s=since_s, blocked_s=blocked_s))


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum (2006): the work between two checkpoints, without the time they take."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


def _require_positive(what: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{what} must be positive, not {value}")
