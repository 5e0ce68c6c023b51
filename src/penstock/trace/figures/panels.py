"""Panels: drawings that stretch with the page, an SVG path for each look, with ticks as text beside them.

A panel is `WIDTH` units wide and as many pixels high as it says; the page stretches it sideways only, so
texts keep their size on a phone. Colours are the page's: hues are runs, tones are kinds of calls.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.figures.ticks import Tick, time_ticks

WIDTH: Final = 1000
NUM_LEVELS: Final = 8
"""Tones of a heat map."""

NUM_HUES: Final = 10
"""Runs that have a hue of their own on a page; further ones begin again, and have their names."""

Row = Mapping[str, Any]
"""A row of an answer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Shapes of one look, as an SVG path; `look` is a CSS class."""

    look: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One drawing. `run` is the number of its run, which is its hue. The macro `panel` draws it."""

    title: str
    run: int
    height: int
    shapes: Sequence[Shape]
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    x_title: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value is between 0 and `length`, of values from 0 to `end`."""

    end: float
    length: float

    def place(self, value: float) -> float:
        """The place of `value`, within the scale."""
        return min(max(value / self.end, 0.0), 1.0) * self.length if self.end else 0.0


@dataclass(frozen=True, slots=True)
class Sheet:
    """What the panels of a page share: the span of their axis of time, and the hue of each run."""

    span_us: int
    hues: Mapping[str, int]

    @classmethod
    def of_runs(cls, runs: Sequence[str], span_us: int) -> Sheet:
        """A sheet on which runs have hues in their order."""
        return cls(span_us, {run: number % NUM_HUES for number, run in enumerate(runs)})

    def by_run(self, rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
        """Each run's rows, in the order of runs."""
        grouped = group_rows(rows, "run")
        return [(run, grouped[run]) for run in self.hues if run in grouped]

    def across(self) -> Scale:
        """The scale of time."""
        return Scale(self.span_us, WIDTH)

    def time_ticks(self) -> tuple[list[Tick], str]:
        """The ticks of time, and the unit they are in."""
        return time_ticks(self.span_us)


def rectangle(left: float, right: float, top: float, bottom: float) -> str:
    """A rectangle of a path."""
    return f"M{_short(left)} {_short(top)}H{_short(right)}V{_short(bottom)}H{_short(left)}z"


def bars_path(bars: Iterable[tuple[float, float, float, float]]) -> str:
    """Rectangles of left, right, top, bottom; thin ones are widened, so that they can be seen."""
    return "".join(
        rectangle(left, max(right, min(left + 1, WIDTH)), top, bottom) for left, right, top, bottom in bars
    )


def steps_path(values: Iterable[tuple[float, float, float]], base: float) -> str:
    """An area over `base` of left, right, height: neighbours share an edge, and gaps stay open."""
    path: list[str] = []
    end: float | None = None
    for left, right, height in values:
        if end is None or left > end + 1e-6:
            path.append(f"{'' if end is None else f'V{_short(base)}z'}M{_short(left)} {_short(base)}")
        path.append(f"V{_short(height)}H{_short(right)}")
        end = right
    return "".join([*path, f"V{_short(base)}z"]) if path else ""


def heat_shapes(cells: Iterable[tuple[float, float, float, float, float]], largest: float) -> list[Shape]:
    """Cells of left, right, top, bottom, value; each above zero has one of the tones, in equal steps."""
    paths: dict[int, list[str]] = {}
    for left, right, top, bottom, value in cells:
        if value > 0 and largest > 0:
            level = min(NUM_LEVELS, max(1, math.ceil(NUM_LEVELS * value / largest)))
            paths.setdefault(level, []).append(rectangle(left, right, top, bottom))
    return [Shape(f"level-{level}", "".join(parts)) for level, parts in sorted(paths.items())]


def _short(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def group_rows(rows: Iterable[Row], column: str) -> dict[Any, list[Row]]:
    """Rows by the value of a column, in the order in which values come."""
    grouped: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        grouped[row[column]].append(row)
    return grouped
