"""How long something takes: a fixed time, or one drawn from a distribution each time.

For computation, preprocessing and evaluation. A draw is never negative: its absolute value counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np


class Distribution(StrEnum):
    """The distributions that DLIO knows, and none at all."""

    FIXED = "fixed"
    NORMAL = "normal"
    UNIFORM = "uniform"
    GAMMA = "gamma"
    EXPONENTIAL = "exponential"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A time in seconds under one `law`, which reads only its own fields.

    fixed: `mean_s`. normal: `mean_s`, `stdev_s`. uniform: `min_s`, `max_s`. gamma: `shape`, `scale_s`.
    exponential: `scale_s`. poisson: `expected_events`, a whole number of seconds.
    """

    law: Distribution = Distribution.FIXED
    mean_s: float = 0.0
    stdev_s: float = 0.0
    min_s: float = 0.0
    max_s: float = 0.0
    shape: float = 0.0
    scale_s: float = 0.0
    expected_events: float = 0.0

    @classmethod
    def fixed(cls, seconds: float) -> Self:
        """Always `seconds`."""
        return cls(mean_s=seconds)

    @property
    def is_zero(self) -> bool:
        """Whether every draw is nothing at all."""
        return self.law is Distribution.FIXED and self.mean_s == 0

    @property
    def expected_s(self) -> float:
        """The mean of what `draw` returns; exact for a fixed time."""
        match self.law:
            case Distribution.FIXED:
                return self.mean_s
            case Distribution.NORMAL:
                return _mean_of_folded_normal(self.mean_s, self.stdev_s)
            case Distribution.UNIFORM:
                return (self.min_s + self.max_s) / 2
            case Distribution.GAMMA:
                return self.shape * self.scale_s
            case Distribution.EXPONENTIAL:
                return self.scale_s
            case Distribution.POISSON:
                return self.expected_events

    def draw(self, generator: np.random.Generator) -> float:
        """One time in seconds, from the caller's generator: the same generator, the same times."""
        match self.law:
            case Distribution.FIXED:
                return self.mean_s
            case Distribution.NORMAL:
                return abs(generator.normal(self.mean_s, self.stdev_s))
            case Distribution.UNIFORM:
                return generator.uniform(self.min_s, self.max_s)
            case Distribution.GAMMA:
                return generator.gamma(self.shape, self.scale_s)
            case Distribution.EXPONENTIAL:
                return generator.exponential(self.scale_s)
            case Distribution.POISSON:
                return float(generator.poisson(self.expected_events))


def _mean_of_folded_normal(mean: float, stdev: float) -> float:
    if stdev == 0:
        return abs(mean)
    tail = math.exp(-(mean**2) / (2 * stdev**2))
    return stdev * math.sqrt(2 / math.pi) * tail + mean * math.erf(mean / (stdev * math.sqrt(2)))
