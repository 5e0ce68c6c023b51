"""When the next checkpoint is due: by steps, seconds, what saving may cost, or how often things fail.

Pure: what was measured goes in, yes or no comes out. All ranks must decide alike, so one rank asks the clock
and tells the others. Invariant: without a measured cost the first checkpoint is due at once, so that there is
one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is known when asked. `blocked_s` is what a save costs the training; None: not yet known."""

    step: int
    since_last_s: float
    blocked_s: float | None


class Policy(Protocol):
    """A way to decide."""

    def is_due(self, measured: Measured) -> bool:
        """Whether to save now."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """After every so many steps."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"a checkpoint every {self.steps} steps", fix="Give 1 or more.")

    def is_due(self, measured: Measured) -> bool:
        """Whether the step is a multiple."""
        return measured.step % self.steps == 0


EVERY_STEP = EverySteps(1)


@dataclass(frozen=True, slots=True)
class EverySeconds:
    """When so many seconds have passed since the last one."""

    seconds: float

    def __post_init__(self) -> None:
        _require_positive("an interval", self.seconds)

    def is_due(self, measured: Measured) -> bool:
        """Whether they have passed."""
        return measured.since_last_s >= self.seconds


@dataclass(frozen=True, slots=True)
class Overhead:
    """As often as keeps saving below `percent` of the time."""

    percent: float

    def __post_init__(self) -> None:
        _require_positive("an overhead", self.percent)

    def is_due(self, measured: Measured) -> bool:
        """Whether a save now would stay below."""
        if measured.blocked_s is None:
            return True
        return measured.since_last_s * self.percent / 100 >= measured.blocked_s


@dataclass(frozen=True, slots=True)
class Daly:
    """At the interval that loses the least time to saving and to failures, `mtbf_s` apart on average."""

    mtbf_s: float

    def __post_init__(self) -> None:
        _require_positive("a mean time between failures", self.mtbf_s)

    def is_due(self, measured: Measured) -> bool:
        """Whether that interval has passed."""
        if measured.blocked_s is None:
            return True
        return measured.since_last_s >= daly_interval_s(measured.blocked_s, self.mtbf_s)


NUM_REMEMBERED = 9
"""Saves whose cost is remembered: the first ones touch new memory, and are no measure for the others."""


@dataclass(slots=True)
class Pacer:
    """Remembers what saves cost and when the last one was, and asks the policy."""

    policy: Policy
    clock: Callable[[], float] = time.monotonic
    _since_s: float = field(init=False)
    _blocked_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED), init=False)

    def __post_init__(self) -> None:
        self._since_s = self.clock()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time what training waits for in one save."""
        began_s = self.clock()
        yield
        self._since_s = self.clock()
        self._blocked_s.append(self._since_s - began_s)

    def is_due(self, step: int) -> bool:
        """Whether to save now."""
        blocked_s = median(self._blocked_s) if self._blocked_s else None
        since_s = self.clock() - self._since_s
        return self.policy.is_due(Measured(step=step, since_last_s=since_s, blocked_s=blocked_s))


def young_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Young's optimum of 1974: the first order, good while saving is much shorter than failures are apart."""
    return math.sqrt(2 * blocked_s * mtbf_s)


def daly_interval_s(blocked_s: float, mtbf_s: float) -> float:
    """Daly's optimum of 2006, of higher order: work between two checkpoints, their own time not counted."""
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    share = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - blocked_s


def _require_positive(what: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{what} of {value}", fix="Give a number above 0.")
