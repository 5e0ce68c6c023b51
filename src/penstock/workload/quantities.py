"""Quantities of a workload, read from text: sizes and times with units, element types, durations.

Text that cannot be read raises `UsageError`; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import UsageError
from penstock.units import SIZE_LIMITS, TIME_LIMITS, parse_bytes, parse_seconds

if TYPE_CHECKING:
    import numpy as np


class Distribution(StrEnum):
    """The distributions that DLIO supports, and a fixed time."""

    FIXED = "fixed"
    NORMAL = "normal"
    UNIFORM = "uniform"
    GAMMA = "gamma"
    EXPONENTIAL = "exponential"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """A time in seconds under one `law`, which uses only its own fields; a drawn time is never negative.

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

    @property
    def is_zero(self) -> bool:
        """True if every draw is 0."""
        return self.law is Distribution.FIXED and self.mean_s == 0

    @property
    def expected_s(self) -> float:
        """The mean of the times that `draw` returns; exact for a fixed time."""
        _, expected, _ = _LAWS[self.law]
        return expected(self)

    def draw(self, generator: np.random.Generator) -> float:
        """Draw a time in seconds from the caller's generator. Equal generators give equal times."""
        _, _, draw = _LAWS[self.law]
        return float(draw(self, generator))


_Mean = Callable[[Duration], float]
_Draw = Callable[[Duration, "np.random.Generator"], float]


def _mean_of_folded_normal(time: Duration) -> float:
    mean, stdev = time.mean_s, time.stdev_s
    if stdev == 0:
        return abs(mean)
    ratio = mean / stdev
    tail = math.exp(-ratio * ratio / 2)
    return stdev * math.sqrt(2 / math.pi) * tail + mean * math.erf(ratio / math.sqrt(2))


_LAWS: Final[Mapping[Distribution, tuple[Mapping[str, str], _Mean, _Draw]]] = {
    Distribution.FIXED: ({"mean": "mean_s"}, lambda time: time.mean_s, lambda time, _: time.mean_s),
    Distribution.NORMAL: (
        {"mean": "mean_s", "stdev": "stdev_s"},
        _mean_of_folded_normal,
        lambda time, generator: abs(generator.normal(time.mean_s, time.stdev_s)),
    ),
    Distribution.UNIFORM: (
        {"min": "min_s", "max": "max_s"},
        lambda time: (time.min_s + time.max_s) / 2,
        lambda time, generator: generator.uniform(time.min_s, time.max_s),
    ),
    Distribution.GAMMA: (
        {"shape": "shape", "scale": "scale_s"},
        lambda time: time.shape * time.scale_s,
        lambda time, generator: generator.gamma(time.shape, time.scale_s),
    ),
    Distribution.EXPONENTIAL: (
        {"scale": "scale_s"},
        lambda time: time.scale_s,
        lambda time, generator: generator.exponential(time.scale_s),
    ),
    Distribution.POISSON: (
        {"lam": "expected_events"},
        lambda time: time.expected_events,
        lambda time, generator: generator.poisson(time.expected_events),
    ),
}
"""For each distribution: parameters in DLIO's words, with their fields of `Duration`; the mean; a draw."""


LARGEST: Final = parse_bytes(SIZE_LIMITS[1])
"""The largest size, and the largest whole number."""
TIMES: Final = tuple(map(parse_seconds, TIME_LIMITS))
_BYTE_TYPES: Final = ("string", "binary")


def read_bytes(value: Any) -> Any:
    """Convert text with a unit to whole bytes; return anything else unchanged, for the type to check."""
    if isinstance(value, str):
        return parse_bytes(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_exact_bytes(value: Any) -> Fraction:
    """Read a size that may include a fraction of a byte, taken literally: 114660.07 is 11466007/100."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Fraction):
        raise UsageError(f"{value!r} is not a size", fix="Write bytes, or a size such as 4MiB.")
    if isinstance(value, str) and not value.replace("_", "").replace(".", "", 1).isdecimal():
        return Fraction(parse_bytes(value))
    try:
        return Fraction(str(value).replace("_", ""))
    except ValueError as error:
        raise UsageError(f"{value!r} is not a size", fix="Write bytes, or a size such as 4MiB.") from error


def read_seconds(value: Any) -> Any:
    """Convert text with a unit to seconds; return anything else unchanged, for the type to check."""
    return parse_seconds(value) if isinstance(value, str) else value


def require_limits(smallest: float, largest: float) -> Callable[[Any], Any]:
    """Return a check that accepts, besides 0, only numbers between these limits."""

    def check(value: Any) -> Any:
        if value and not smallest <= value <= largest:  # as for NaN
            raise UsageError("it is out of range", fix=f"Write {smallest:g} to {largest:g}, or 0 if allowed.")
        return value

    return check


def read_element_type(name: str) -> str:
    """Return `name` if numpy supports it or it is one of Parquet's own types."""
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
    """Return the size of one element of a type that `read_element_type` accepts."""
    import numpy as np  # noqa: PLC0415 - see above

    return 1 if name in _BYTE_TYPES else np.dtype(name).itemsize


def read_duration(value: Any) -> Duration:
    """Read a time: a number of seconds, `250ms`, or a mapping that names a distribution and its values."""
    if isinstance(value, Duration):
        return value
    if not isinstance(value, Mapping):
        return Duration(mean_s=_non_negative("it", value))
    # Without a type, a spread implies a normal distribution, as in DLIO.
    named = value.get("type", Distribution.NORMAL if "stdev" in value else Distribution.FIXED)
    try:
        law = Distribution(named)
    except ValueError as error:
        raise UsageError(
            f"{named!r} is not a distribution",
            fix=f"Choose one of {', '.join(law.value for law in Distribution)}.",
        ) from error
    known, _, _ = _LAWS[law]
    given = {key: entry for key, entry in value.items() if key != "type"}
    wrong = [f"{key} is missing" for key in sorted(known.keys() - given.keys())]
    wrong += [f"{key} is not one of its values" for key in sorted(given.keys() - known.keys())]
    if wrong:
        raise UsageError(
            f"A {law.value} time is invalid: {', '.join(wrong)}",
            fix=f"It takes {', '.join(sorted(known))}.",
        )
    values = {known[key]: _non_negative(key, entry) for key, entry in given.items()}
    if law is Distribution.UNIFORM and values["min_s"] > values["max_s"]:
        raise UsageError(f"min {values['min_s']:g} is above max {values['max_s']:g}", fix="Swap them.")
    return Duration(law=law, **values)


def write_duration(duration: Duration) -> float | dict[str, str | float]:
    """Return what `read_duration` reads as `duration`; a fixed time becomes a bare number."""
    if duration.law is Distribution.FIXED:
        return duration.mean_s
    known, _, _ = _LAWS[duration.law]
    return {"type": duration.law.value, **{key: getattr(duration, name) for key, name in known.items()}}


def _non_negative(key: str, value: Any) -> float:
    seconds = read_seconds(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise UsageError(f"{key} is {value!r}, which is not a duration", fix="Write seconds, or 250ms.")
    return float(require_limits(*TIMES)(seconds))
