"""Panels: drawings that stretch with the page, an SVG path for each look, with ticks as text beside them.

A panel is `WIDTH` units wide and as many pixels high as it says; the page stretches it sideways only, so
texts keep their size on a phone. Colours are the page's: hues are runs, tones are what is drawn of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from zlib import crc32

from penstock.reports.ticks import Tick, time_ticks

WIDTH: Final = 1000
NUM_LEVELS: Final = 8
"""Tones of a heat map."""

NUM_HUES: Final = 10
"""Runs that have a hue of their own on a page; further ones share them, and have their names."""

Row = Mapping[str, Any]
"""A row of an answer."""


def assign_hues(runs: Iterable[str]) -> dict[str, int]:
    """The hue of each run, which follows from its name, so that it is the same on every page.

    Only a run whose hue an earlier one of the same page has taken gets the next free one.
    """
    hues: dict[str, int] = {}
    for run in runs:
        own = crc32(run.encode("utf-8", "surrogateescape")) % NUM_HUES
        wanted = ((own + further) % NUM_HUES for further in range(NUM_HUES))
        hues[run] = next((hue for hue in wanted if hue not in hues.values()), own)
    return hues


@dataclass(frozen=True, slots=True)
class Shape:
    """Shapes of one look, as an SVG path; `look` is a CSS class."""

    look: str
    path: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A limit: a line from side to side at a height, in percent from the top, and its text.

    `text_percent` is where the text stands, if that is not at its line.
    """

    text: str
    percent: float
    text_percent: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One drawing, by the macro `panels`; `run` is the hue of its run, `note` says in words what it shows."""

    title: str
    run: int
    height: int
    shapes: Sequence[Shape]
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    x_title: str = ""
    marks: Sequence[Mark] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    """The looks of what is drawn, by its name."""
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
        """A sheet on which each run has its own hue."""
        return cls(span_us, assign_hues(runs))

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


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """A line through points of left and top."""
    return "M" + "L".join(f"{_short(left)} {_short(top)}" for left, top in points)


def dots_path(points: Iterable[tuple[float, float]]) -> str:
    """A dot at each point: a line without length, whose round ends stay round however the page stretches."""
    return "".join(f"M{_short(left)} {_short(top)}h0" for left, top in points)


def spread_marks(marks: Iterable[Mark], height: float) -> list[Mark]:
    """Move texts that would cover each other upwards, and those that leave the drawing down again."""
    apart = 100 * 13 / height
    placed: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: -mark.percent):
        above = placed[-1].text_percent - apart if placed and placed[-1].text_percent is not None else 100.0
        placed.append(replace(mark, text_percent=min(mark.percent, above)))
    least = apart
    for number, mark in reversed(list(enumerate(placed))):
        if mark.text_percent is not None and mark.text_percent < least:
            placed[number] = replace(mark, text_percent=least)
            least += apart
    return placed


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
