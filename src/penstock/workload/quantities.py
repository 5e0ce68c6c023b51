"""Quantities of a workload, and how they are read: sizes and times with units, element types, durations.

What does not fit is a UsageError; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.errors import UsageError
from penstock.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    import numpy as np


class Distribution(StrEnum):
    """The distributions that DLIO knows, and a fixed time."""

    FIXED = "fixed"
    NORMAL = "normal"
    UNIFORM = "uniform"
    GAMMA = "gamma"
    EXPONENTIAL = "exponential"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A time in seconds under one `law`, which reads only its own fields; a draw is never negative.

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
        """Whether every draw is 0."""
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


_BYTE_TYPES: Final = ("string", "binary")

_LAW_FIELDS: Final = {
    Distribution.FIXED: {"mean": "mean_s"},
    Distribution.NORMAL: {"mean": "mean_s", "stdev": "stdev_s"},
    Distribution.UNIFORM: {"min": "min_s", "max": "max_s"},
    Distribution.GAMMA: {"shape": "shape", "scale": "scale_s"},
    Distribution.EXPONENTIAL: {"scale": "scale_s"},
    Distribution.POISSON: {"lam": "expected_events"},
}
"""The parameters of each distribution, in DLIO's words, and the fields of a `Duration`."""


def read_bytes(value: Any) -> Any:
    """Text with a unit as whole bytes; anything else unchanged, for the type to check."""
    if isinstance(value, str):
        return parse_bytes(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_exact_bytes(value: Any) -> Fraction:
    """A size that may have a fraction of a byte, taken as written: 114660.07 is 11466007/100."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Fraction):
        raise UsageError(f"{value!r} is not a size", fix="Write bytes, or a size such as 4MiB.")
    if isinstance(value, str) and not _is_number(value):
        return Fraction(parse_bytes(value))
    try:
        return Fraction(str(value).replace("_", ""))
    except ValueError as error:
        raise UsageError(f"{value!r} is not a size", fix="Write bytes, or a size such as 4MiB.") from error


def _is_number(text: str) -> bool:
    return text.replace("_", "").replace(".", "", 1).isdecimal()


def read_seconds(value: Any) -> Any:
    """Text with a unit as seconds; anything else unchanged, for the type to check."""
    return parse_seconds(value) if isinstance(value, str) else value


def read_element_type(name: str) -> str:
    """`name`, if numpy knows it or it is one of Parquet's own."""
    import numpy as np  # noqa: PLC0415 - only element types need it

    if name in _BYTE_TYPES:
        return name
    try:
        np.dtype(name)
    except TypeError as error:
        raise UsageError(
            f"{name!r} is not an element type", fix="Use numpy's names, such as float32."
        ) from error
    return name


def element_bytes(name: str) -> int:
    """Bytes of one element of a type that `read_element_type` accepts."""
    import numpy as np  # noqa: PLC0415 - see above

    return 1 if name in _BYTE_TYPES else np.dtype(name).itemsize


def read_duration(value: Any) -> Duration:
    """A time: a number of seconds, `250ms`, or a mapping that names a distribution and its values."""
    if isinstance(value, Duration):
        return value
    if not isinstance(value, Mapping):
        return Duration.fixed(_non_negative("it", value))
    law = _law_of(value)
    known = _LAW_FIELDS[law]
    given = {key: entry for key, entry in value.items() if key != "type"}
    _compare_keys(law, known=set(known), given=set(given))
    values = {known[key]: _non_negative(key, entry) for key, entry in given.items()}
    if law is Distribution.UNIFORM and values["min_s"] > values["max_s"]:
        raise UsageError(f"min {values['min_s']:g} is above max {values['max_s']:g}", fix="Swap them.")
    return Duration(law=law, **values)


def write_duration(duration: Duration) -> float | dict[str, str | float]:
    """The inverse of `read_duration`: a bare number for a fixed time."""
    if duration.law is Distribution.FIXED:
        return duration.mean_s
    known = _LAW_FIELDS[duration.law]
    return {"type": duration.law.value, **{key: getattr(duration, name) for key, name in known.items()}}


def _law_of(value: Mapping[str, Any]) -> Distribution:
    """The law by its `type`; without one a spread means a normal distribution, as in DLIO."""
    named = value.get("type", Distribution.NORMAL if "stdev" in value else Distribution.FIXED)
    try:
        return Distribution(named)
    except ValueError as error:
        raise UsageError(
            f"{named!r} is not a distribution",
            fix=f"Choose one of {', '.join(law.value for law in Distribution)}.",
        ) from error


def _compare_keys(law: Distribution, *, known: set[str], given: set[str]) -> None:
    if given == known:
        return
    wrong = [f"{key} is missing" for key in sorted(known - given)]
    wrong += [f"{key} is not one of its values" for key in sorted(given - known)]
    raise UsageError(
        f"A {law.value} time is given wrongly: {', '.join(wrong)}",
        fix=f"It takes {', '.join(sorted(known))}.",
    )


def _non_negative(key: str, value: Any) -> float:
    seconds = read_seconds(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise UsageError(f"{key} is {value!r}, which is not a duration", fix="Write seconds, or 250ms.")
    return float(seconds)
