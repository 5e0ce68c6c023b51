"""Charts: panels of bars, areas, lines and heat maps, from plain numbers.

An axis of values begins at zero and leaves room above the largest for texts of limits; an axis of time is as
long as what is drawn. Texts are numbers with their unit, so that a chart can be read without its page.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from penstock.reports.panels import (
    WIDTH,
    Mark,
    Panel,
    Scale,
    Shape,
    bars_path,
    dots_path,
    heat_shapes,
    line_path,
    spread_marks,
    steps_path,
)
from penstock.reports.ticks import Tick, byte_ticks, lane_ticks, time_ticks, value_ticks

HEIGHT: Final = 104
_HEADROOM: Final = 1.18
_LEAST: Final = 1.0
"""The least height of a bar, so that little is not drawn as nothing."""

Values = Sequence[float] | NDArray[np.float64]
Limits = Mapping[str, float]
"""Values that others are compared with, by what they are called."""


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """An axis of values from 0 to `end`."""

    end: float
    ticks: Sequence[Tick]

    @classmethod
    def of_rates(cls, values: Iterable[float]) -> Self:
        """Bytes a second."""
        end = _end(values)
        return cls(end, byte_ticks(end, "/s"))

    @classmethod
    def of_counts(cls, values: Iterable[float], unit: str = "") -> Self:
        """Plain numbers; `unit` is printed behind each."""
        end = _end(values)
        return cls(end, value_ticks(end, f"{{:,.6g}} {unit}".rstrip()))

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> Self:
        """Seconds, in the unit that suits the largest."""
        end = _end(values)
        step, unit = next(((step, unit) for step, unit in _TIMES if end >= 2 * step), _TIMES[-1])
        return cls(end, value_ticks(end, f"{{:,.6g}} {unit}", step=step))

    @classmethod
    def of_percent(cls) -> Self:
        """Shares of a whole."""
        return cls(100 * _HEADROOM, value_ticks(100 * _HEADROOM, "{:g} %"))

    def top(self, value: float) -> float:
        """Where a value is, in pixels from the top of a chart."""
        return HEIGHT - Scale(self.end, HEIGHT).place(value)

    def limit(self, text: str, value: float) -> Mark:
        """A line at a value, with its text."""
        return Mark(text, 100 * self.top(value) / HEIGHT)


_TIMES: Final = ((60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _end(values: Iterable[float]) -> float:
    return max(values, default=0.0) * _HEADROOM or 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: its name, its tone, and where it is."""

    name: str
    look: str
    xs: Values
    ys: Values


def bar_chart(
    title: str, run: int, bars: Mapping[str, float], axis: ValueAxis, *, limits: Limits, note: str = ""
) -> Panel:
    """A bar for each name."""
    every = -(-len(bars) // _MOST_NAMES)
    return Panel(
        title=title,
        run=run,
        height=HEIGHT,
        shapes=[Shape("read", bars_path(_place_bars(bars.values(), axis)))],
        x_ticks=[
            Tick(name, 100 * (number + 0.5) / len(bars))
            for number, name in enumerate(bars)
            if number % every == 0
        ],
        y_ticks=axis.ticks,
        marks=_limit_marks(limits, axis),
        note=note,
    )


_MOST_NAMES: Final = 12


def colored_bars(
    title: str, bars: Mapping[str, float], hues: Mapping[str, int], axis: ValueAxis, *, note: str = ""
) -> Panel:
    """A bar for each run in its own colour, named by the legend."""
    places = _place_bars(bars.values(), axis)
    looks = {run: f"run-{hues[run]} read" for run in bars}
    return Panel(
        title=title,
        run=next(iter(hues.values())),
        height=HEIGHT,
        shapes=[Shape(looks[run], bars_path([place])) for run, place in zip(bars, places, strict=True)],
        y_ticks=axis.ticks,
        legend=looks,
        note=note,
    )


def _place_bars(values: Collection[float], axis: ValueAxis) -> list[tuple[float, float, float, float]]:
    width = WIDTH / max(1, len(values))
    return [
        (width * (number + 0.1), width * (number + 0.9), min(axis.top(value), HEIGHT - _LEAST), HEIGHT)
        for number, value in enumerate(values)
    ]


def area_chart(
    title: str,
    run: int,
    edges: Values,
    values: Values,
    axis: ValueAxis,
    *,
    limits: Limits | None = None,
    look: str = "read",
    note: str = "",
) -> Panel:
    """Values over time, each from one of the `edges`, in seconds, to the next."""
    across = Scale(edges[-1], WIDTH)
    steps = (
        (across.place(left), across.place(right), min(axis.top(value), HEIGHT - _LEAST))
        for left, right, value in zip(edges, edges[1:], values, strict=False)
        if value > 0
    )
    ticks, unit = time_ticks(edges[-1] * 1e6)
    return Panel(
        title=title,
        run=run,
        height=HEIGHT,
        shapes=[Shape(look, steps_path(steps, HEIGHT))],
        x_ticks=ticks,
        x_title=unit,
        y_ticks=axis.ticks,
        marks=_limit_marks(limits or {}, axis),
        note=note,
    )


def time_lines(
    title: str, run: int, end_s: float, series: Sequence[Curve], axis: ValueAxis, *, note: str = ""
) -> Panel:
    """Lines over time, whose `xs` are seconds."""
    ticks, unit = time_ticks(end_s * 1e6)
    across = Scale(end_s, WIDTH)
    panel = Panel(title=title, run=run, height=HEIGHT, shapes=(), x_ticks=ticks, x_title=unit, note=note)
    return _with_lines(panel, series, axis, across.place)


def curves(
    title: str,
    run: int,
    names: Sequence[str],
    series: Sequence[Curve],
    axis: ValueAxis,
    *,
    limits: Limits | None = None,
    note: str = "",
) -> Panel:
    """Lines with dots over named places, side by side: `xs` are the numbers of the places."""
    count = max(1, len(names))
    every = -(-sum(map(len, names)) // _LETTERS) if names else 1

    def across(x: float) -> float:
        return WIDTH * (x + 0.5) / count

    panel = Panel(
        title=title,
        run=run,
        height=HEIGHT,
        shapes=[
            Shape(f"dots {line.look}", dots_path(_points(line, axis, across)))
            for line in series
            if len(line.xs)
        ],
        x_ticks=[
            Tick(name, 100 * (number + 0.5) / count)
            for number, name in enumerate(names)
            if number % every == 0
        ],
        marks=_limit_marks(limits or {}, axis),
        note=note,
    )
    return _with_lines(panel, series, axis, across)


def distribution(title: str, run: int, series: Mapping[str, Sequence[float]], *, note: str = "") -> Panel:
    """How many percent of values, in seconds, are at most so long: a line each, on a logarithmic axis."""
    sorted_series = {name: sorted(values) for name, values in series.items() if values}
    low = min(max(values[0], _SHORTEST_S) for values in sorted_series.values())
    high = max(max(values[-1], _SHORTEST_S) for values in sorted_series.values())
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)

    def place(value: float) -> float:
        return min(max((math.log10(max(value, _SHORTEST_S)) - first) / (last - first), 0.0), 1.0)

    lines = [
        Curve(name, f"tone-{2 * (number % 2) + 1}", *_ranks(values))
        for number, (name, values) in enumerate(sorted_series.items())
    ]
    panel = Panel(
        title=title,
        run=run,
        height=HEIGHT,
        shapes=(),
        x_ticks=[Tick(_format_power(power), 100 * place(10.0**power)) for power in range(first, last + 1)],
        x_title="log",
        note=note,
    )
    return _with_lines(panel, lines, ValueAxis.of_percent(), lambda value: WIDTH * place(value))


_LETTERS: Final = 30
"""More than so many letters below a chart would run into each other."""
_SHORTEST_S: Final = 1e-6


def _with_lines(
    panel: Panel, series: Sequence[Curve], axis: ValueAxis, across: Callable[[float], float]
) -> Panel:
    lines = [
        Shape(f"line {line.look}", line_path(_points(line, axis, across))) for line in series if len(line.xs)
    ]
    legend = {line.name: line.look for line in series} if len(series) > 1 else {}
    return replace(panel, shapes=[*lines, *panel.shapes], y_ticks=axis.ticks, legend=legend)


def _points(line: Curve, axis: ValueAxis, across: Callable[[float], float]) -> list[tuple[float, float]]:
    return [(across(x), axis.top(y)) for x, y in zip(line.xs, line.ys, strict=True)]


def _ranks(values: Values) -> tuple[list[float], list[float]]:
    """At most some hundred points of a sorted list, and the percentile of each."""
    wanted = min(len(values), 200)
    places = sorted({round(number * (len(values) - 1) / max(1, wanted - 1)) for number in range(wanted)})
    return [values[place] for place in places], [100 * (place + 1) / len(values) for place in places]


def _format_power(power: int) -> str:
    value, unit = (
        (10**power, "s") if power >= 0 else (10 ** (power % 3), ("ms", "µs", "ns")[-(power // 3) - 1])
    )
    return f"{value:,} {unit}"


def heat_map(
    title: str,
    run: int,
    names: Sequence[str],
    edges: Values,
    rows: Sequence[Values] | NDArray[np.float64],
    *,
    largest: float,
    look: str = "",
    note: str = "",
) -> Panel:
    """A row for each name, a cell for each time between two of the `edges`, in seconds; `largest` is full."""
    height = 18 if len(names) <= 4 else 12 if len(names) <= 16 else 6
    across = Scale(edges[-1], WIDTH)
    cells = (
        (across.place(left), across.place(right), height * row + 0.5, height * (row + 1) - 0.5, value)
        for row, values in enumerate(rows)
        for left, right, value in zip(edges, edges[1:], values, strict=False)
    )
    shapes = [Shape(f"{shape.look} {look}".strip(), shape.path) for shape in heat_shapes(cells, largest)]
    ticks, unit = time_ticks(edges[-1] * 1e6)
    return Panel(
        title=title,
        run=run,
        height=height * len(names),
        shapes=shapes,
        x_ticks=ticks,
        x_title=unit,
        y_ticks=lane_ticks(names, 12),
        note=note,
    )


def stack_chart(title: str, run: int, parts: Mapping[str, tuple[str, float]], *, note: str = "") -> Panel:
    """One bar from side to side, whose parts are shares of the whole: each has its look and its value."""
    whole = sum(share for _, share in parts.values()) or 1.0
    shapes, left = [], 0.0
    for look, share in parts.values():
        right = left + WIDTH * share / whole
        if share > 0:
            shapes.append(Shape(look, bars_path([(left, right, 0, 24)])))
        left = right
    legend = {name: look for name, (look, _) in parts.items()}
    return Panel(title=title, run=run, height=24, shapes=shapes, legend=legend, note=note)


def _limit_marks(limits: Limits, axis: ValueAxis) -> list[Mark]:
    return spread_marks([axis.limit(text, value) for text, value in limits.items()], HEIGHT)
