"""How far the values of one figure lie apart: mean, deviations, interval of confidence, outliers and why.

Pure. Invariant: nothing here is estimated that few values cannot give; one value has a mean and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from penstock.submission.metrics import deviation, mean

CONFIDENCE: Final = 0.95
MOST_SCORE: Final = 3.5
"""A modified z-score beyond this makes an outlier (Iglewicz and Hoaglin, 1993)."""
OF_MEDIAN_DEVIATION: Final = 1.4826
OF_MEAN_DEVIATION: Final = 1.2533
"""What makes either deviation from the median comparable with a standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A run that lies apart from the others; `rule` says by which reckoning."""

    run: str
    value: float
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """`deviation` is the population's, as reports state it; the interval is Student's t of the sample.

    The interval is None below two values.
    """

    num: int
    mean: float
    deviation: float
    interval: tuple[float, float] | None
    outliers: tuple[Outlier, ...]


def spread(values: Mapping[str, float]) -> Spread:
    """The spread of a figure by run; there is at least one."""
    numbers = tuple(values.values())
    return Spread(
        num=len(numbers),
        mean=mean(numbers),
        deviation=deviation(numbers),
        interval=_interval(numbers),
        outliers=tuple(_outliers(values)),
    )


def student_quantile(share: float, degrees: int) -> float:
    """The t that |T| stays below with probability `share`, for a whole number of degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(200):  # halves the angle's range until no double lies inside
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _share_within(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return math.tan(high) * math.sqrt(degrees)


def _share_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) as a finite sum, where the angle is arctan(t / sqrt(degrees))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 if not is_odd else 3, degrees - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _interval(numbers: tuple[float, ...]) -> tuple[float, float] | None:
    num = len(numbers)
    if num < 2:
        return None
    of_sample = deviation(numbers) * math.sqrt(num / (num - 1))
    reach = student_quantile(CONFIDENCE, num - 1) * of_sample / math.sqrt(num)
    return mean(numbers) - reach, mean(numbers) + reach


def _outliers(values: Mapping[str, float]) -> list[Outlier]:
    middle = median(values.values())
    apart = {run: abs(value - middle) for run, value in values.items()}
    scale, name = OF_MEDIAN_DEVIATION * median(apart.values()), "median absolute deviation"
    if scale == 0:  # more than half of the runs are equal to the last digit
        scale, name = OF_MEAN_DEVIATION * mean(tuple(apart.values())), "mean absolute deviation"
    if scale == 0:
        return []
    return [
        Outlier(
            run=run,
            value=values[run],
            rule=f"{distance / scale:.1f} > {MOST_SCORE} deviations from the median {middle:,.6g} ({name})",
        )
        for run, distance in apart.items()
        if distance / scale > MOST_SCORE
    ]
