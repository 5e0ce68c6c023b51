"""The model of every report: a banner of answers, charts to highlight, and sections with the evidence.

A report is plain data. Values in charts are in base units: bytes, seconds, percent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = Sequence[float] | NDArray[np.float64]

Tone = Literal["full", "dark", "light", "pale", "bad", "doubt", "ink", "faint"]
"""A tone of a run's color (`full` to `pale`), or a color with the same meaning for all runs."""


class Look(StrEnum):
    """The color of a verdict, which always stands next to the verdict's word."""

    GOOD = "good"
    BAD = "bad"
    DOUBT = "doubt"
    PLAIN = "plain"


class Kind(StrEnum):
    """The kinds of charts, and the values that their series must have.

    Times on an x axis are in seconds. Instead of `x` and `ends` for n values, `x` alone may have n + 1 edges.
    """

    BARS = "bars"
    """Values `y` over the `names` of the chart, at the numbers `x` (default: 0, 1, ...), stacked."""
    AREA = "area"
    """Values `y` from `x` to `ends`; negative ones hang from zero. Series are drawn over each other."""
    LAYERS = "layers"
    """Like AREA, but series are stacked."""
    LINES = "lines"
    """Values `y` at times `x`. If the chart has `names`, `y` is drawn at their numbers, with dots."""
    HEAT = "heat"
    """One row for each series: values `y` from `x` to `ends` as tones; `y_end` has the full tone."""
    DOTS = "dots"
    """Values `y` along the horizontal axis, one row for each of the `names`; `x` has the rows (default: 0, 1,
    ...).
    """
    LANES = "lanes"
    """Times from `x` to `ends` in the lanes numbered `y`, which have `names`.

    `full` and `dark` fill a lane, `light` is at its bottom, and `pale` is behind both. A strip above them has
    `faint`, and below that `bad`, `doubt` and `ink`.
    """
    SPANS = "spans"
    """Rectangles from `x` to `ends` and from `y` to `tops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values under one name. `Kind` defines which of them a chart needs."""

    y: Values
    name: str = ""
    x: Values = ()
    ends: Values = ()
    tops: Values = ()
    tone: Tone = "full"
    run: str = ""
    """The run whose color the series has, if that is not the chart's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart as data."""

    kind: Kind
    title: str
    series: Sequence[Series]
    run: str
    """The name that gives the chart its color."""
    unit: str = ""
    """B/s, B, s and % are scaled to readable units; any other unit is printed after each number."""
    names: Sequence[str] = ()
    x_title: str = ""
    x_end: float = 0.0
    """The end of the axis, if several charts share one (default: the last value)."""
    y_end: float = 0.0
    y_begin: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    """Values to compare with, by the label next to their line."""
    interval: tuple[float, float] | None = None
    """In DOTS, a range of values that is shaded."""
    note: str = ""
    """The main figures, in words."""
    is_wide: bool = False
    """Give the chart the width of the page, even if others could stand next to it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with more than text.

    `value` is the length of the cell's bar in a column with bars, `link` a page next to this one or
    `#NAME` of a section, `run` the run whose color marks the text.
    """

    text: str
    look: Look = Look.PLAIN
    value: float | None = None
    link: str = ""
    run: str = ""


Row = Mapping[str, str | Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same columns.

    The numbers in the column `bars` get bars. Columns in `numbers` are aligned right (default: those in which
    every text is a number).
    """

    rows: Sequence[Row]
    title: str = ""
    bars: str = ""
    numbers: Collection[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Text, charts and tables under a heading; `why_empty` replaces them if there are none.

    A section with a `look` and without parts is a finding: a box in that color. `mark` is its verdict.
    """

    title: str = ""
    name: str = ""
    """The anchor of the section."""
    text: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    items: Sequence[str] = ()
    """A bulleted list."""
    notes: Sequence[str] = ()
    """Paragraphs in small print."""
    parts: Sequence[Section] = ()
    why_empty: str = ""
    is_folded: bool = False
    look: Look | None = None
    mark: str = ""
    aside: str = ""
    """Fainter text after the title."""
    run: str = ""
    """The run whose color marks the title and fills bars. Parts with a run stand side by side."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a run, and its remedy. `since` is when it began, if not at the start."""

    says: str
    to_do: str
    since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Banner:
    """The answers with which every page begins, each a word or a sentence."""

    verdict: str
    look: Look
    figure: str
    limited_by: str
    since: str
    to_do: str
    troubles: Sequence[str] = ()
    """Sentences about what stands out, most serious first."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Additional answers by name."""

    @property
    def answers(self) -> dict[str, str]:
        """The answers below the figure, by name."""
        fixed = {"Limited by": self.limited_by, "Since": self.since, "To do": self.to_do}
        return {**self.more, **fixed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole page."""

    title: str
    subtitle: str
    banner: Banner
    highlights: Sequence[Chart] = ()
    """Charts next to the banner, on the first screen."""
    sections: Sequence[Section] = ()
    runs: Sequence[str] = ()
    """Runs in the order in which they choose colors (default: the order of appearance)."""
    has_contents: bool = False
    """List the sections at the top, as links."""
    filters: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """Boxes that show or hide sections or findings, and whether they are initially ticked.

    The first group has the marks of sections with parts, the second those of findings in them.
    """


def table_section(name: str, title: str, rows: Sequence[Row], *, text: str = "", bars: str = "") -> Section:
    """Make a section with a table that opens with a click."""
    return Section(
        name=name,
        title=title,
        text=[text] if text else (),
        tables=[Table(rows, bars=bars)] if rows else (),
        is_folded=True,
        why_empty="None.",
    )


def bar_chart(
    title: str,
    run: str,
    bars: Mapping[str, float],
    unit: str = "",
    *,
    y_end: float = 0.0,
    limits: Mapping[str, float] | None = None,
    note: str = "",
) -> Chart:
    """Make a chart with one bar for each name."""
    return Chart(
        kind=Kind.BARS,
        title=title,
        run=run,
        unit=unit,
        names=list(bars),
        series=[Series(y=list(bars.values()))],
        y_end=y_end,
        limits=limits or {},
        note=note,
    )
