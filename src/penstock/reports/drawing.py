"""Turn charts into drawings: SVG paths grouped by look, with ticks as text next to them.

A drawing is `WIDTH` units wide, and its height is in pixels. The page stretches it only horizontally, so
text keeps its size on a phone. Looks are CSS classes: `t-TONE` for a tone, `run-N` for the hue of a run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from penstock.reports.report import Chart, Kind, Series

if TYPE_CHECKING:
    from penstock.reports.report import Values

WIDTH: Final = 1000
HEIGHT: Final = 104
NUM_HUES: Final = 10
"""The number of runs with distinct hues on a page; further runs share hues and differ by name."""
_NUM_LEVELS: Final = 8
"""The number of tones in a heat map."""
_HEADROOM: Final = 1.18
"""Leaves room above the largest value for the labels of limits."""
_MARGIN: Final = 1.03
"""Leaves room for a line that runs along the largest value."""
_LEAST: Final = 1.0
"""The smallest height of a bar, so that small values remain visible."""
_SHORTEST_S: Final = 1e-6
_LABEL_LETTERS: Final = 12

Tick = tuple[str, float]
"""A label on an axis, and its position in percent from the left or the top."""
Box = tuple[float, float, float, float]
"""Left, right, top, bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart as the template draws it."""

    title: str
    hue: int
    height: int
    shapes: Sequence[tuple[str, str, str]]
    """Look, path, and the text that appears under the pointer."""
    x_ticks: Sequence[Tick] = ()
    y_ticks: Sequence[Tick] = ()
    x_title: str = ""
    marks: Sequence[tuple[str, float, float]] = ()
    """The label of a limit, and the positions of its line and of the label in percent from the top."""
    legend: Mapping[str, str] = ()  # type: ignore[assignment] # a default that is never changed
    note: str = ""
    is_wide: bool = False


def assign_hues(runs: Iterable[str]) -> dict[str, int]:
    """Give each run a hue that is derived from its name, so that it is the same on every page.

    Only if an earlier run of the same page has taken that hue does a run get the next free one.
    """
    hues: dict[str, int] = {}
    for run in dict.fromkeys(runs):
        own = crc32(run.encode("utf-8", "surrogateescape")) % NUM_HUES
        wanted = ((own + further) % NUM_HUES for further in range(NUM_HUES))
        hues[run] = next((hue for hue in wanted if hue not in hues.values()), own)
    return hues


def draw(chart: Chart, hues: Mapping[str, int], *, letters: int) -> Drawing:
    """Draw a chart; about `letters` letters fit below it."""

    def look(series: Series) -> str:
        return f"t-{series.tone}" + (f" run-{hues[series.run]}" if series.run else "")

    legend = {one.name: look(one) for one in chart.series if one.name}
    has_legend = len(legend) > 1 and chart.kind not in (Kind.HEAT, Kind.DOTS)
    return Drawing(
        title=chart.title,
        hue=hues[chart.run],
        note=chart.note,
        is_wide=chart.is_wide,
        legend=legend if has_legend else {},
        **_PLOTS[chart.kind](chart, look, letters),
    )


# Each of the following functions plots one kind of chart: height, shapes, ticks and marks of its drawing.

Look = Callable[[Series], str]


def _bars(chart: Chart, look: Look, letters: int) -> dict[str, Any]:
    places = [[int(x) for x in one.x] or list(range(len(one.y))) for one in chart.series]
    totals: dict[int, float] = defaultdict(float)
    for one, numbers in zip(chart.series, places, strict=True):
        for number, value in zip(numbers, one.y, strict=True):
            totals[number] += value
    count = max(len(chart.names), *(number + 1 for number in totals), 1)
    top, axis = _value_axis(chart, [*totals.values()])
    width = WIDTH / count
    bottoms: dict[int, float] = defaultdict(lambda: float(HEIGHT))

    def boxes(numbers: Sequence[int], values: Values) -> Iterator[Box]:
        for number, value in zip(numbers, values, strict=True):
            if value or len(chart.series) == 1:
                bottom = bottoms[number]
                bottoms[number] = max(bottom - max(HEIGHT - top(value), _LEAST), 0.0)
                yield width * (number + 0.08), width * (number + 0.92), bottoms[number], bottom

    shapes = [
        (look(one), _boxes_path(boxes(numbers, one.y)), "")
        for one, numbers in zip(chart.series, places, strict=True)
    ]
    return {
        **axis,
        "shapes": shapes,
        "x_ticks": _name_ticks(chart.names, 12, letters),
        "x_title": chart.x_title,
    }


def _area(chart: Chart, look: Look, _: int) -> dict[str, Any]:
    across, x_axis = _time_axis(chart)
    top, axis = _value_axis(chart, [y for one in chart.series for y in one.y])
    base = top(0.0)
    if base < HEIGHT:
        base = min(max(base, _LEAST), HEIGHT - _LEAST)

    def steps(one: Series) -> Iterator[tuple[float, float, float]]:
        for begin, end, value in _intervals(one):
            if value > 0:
                yield across(begin), across(end), min(top(value), base - _LEAST)
            elif value < 0:
                yield across(begin), across(end), max(top(value), base + _LEAST)

    shapes = [(look(one), _steps_path(steps(one), base), "") for one in chart.series]
    return {**axis, **x_axis, "shapes": [shape for shape in shapes if shape[1]]}


def _layers(chart: Chart, look: Look, _: int) -> dict[str, Any]:
    across, x_axis = _time_axis(chart)
    totals: dict[float, float] = defaultdict(float)
    for one in chart.series:
        for begin, _end, value in _intervals(one):
            totals[begin] += value
    top, axis = _value_axis(chart, [*totals.values()])
    reached: dict[float, float] = defaultdict(float)

    def boxes(one: Series) -> Iterator[Box]:
        for begin, end, value in _intervals(one):
            if value > 0:
                bottom = top(reached[begin])
                reached[begin] += value
                yield across(begin), across(end), top(reached[begin]), bottom

    shapes = [(look(one), _boxes_path(boxes(one)), "") for one in chart.series]
    return {**axis, **x_axis, "shapes": [shape for shape in shapes if shape[1]]}


def _lines(chart: Chart, look: Look, letters: int) -> dict[str, Any]:
    top, axis = _value_axis(chart, [y for one in chart.series for y in one.y])
    count = len(chart.names)
    across, x_axis = _time_axis(chart)
    if count:
        x_axis = {"x_ticks": _name_ticks(chart.names, 12, letters), "x_title": chart.x_title}

    def points(one: Series) -> list[tuple[float, float]]:
        if not count:
            return [(across(x), top(y)) for x, y in zip(one.x, one.y, strict=True)]
        numbers = one.x if len(one.x) else range(len(one.y))
        return [(WIDTH * (x + 0.5) / count, top(y)) for x, y in zip(numbers, one.y, strict=True)]

    drawn = [one for one in chart.series if len(one.y)]
    shapes = [(f"line {look(one)}", _line_path(points(one)), "") for one in drawn]
    if count:
        shapes += [(f"dots {look(one)}", _dots_path(points(one)), "") for one in drawn]
    return {**axis, **x_axis, "shapes": shapes}


def _heat(chart: Chart, _: Look, _letters: int) -> dict[str, Any]:
    count = len(chart.series)
    height = 18 if count <= 4 else 14 if count <= 16 else 9 if count <= 32 else 6
    across, x_axis = _time_axis(chart)
    largest = chart.y_end or max((max(one.y) for one in chart.series if len(one.y)), default=0.0)
    paths: dict[str, list[str]] = {}
    for row, one in enumerate(chart.series):
        for begin, end, value in _intervals(one):
            if value > 0 and largest > 0:
                level = min(_NUM_LEVELS, max(1, math.ceil(_NUM_LEVELS * value / largest)))
                box = (across(begin), across(end), height * row + 0.5, height * (row + 1) - 0.5)
                paths.setdefault(f"level-{level} t-{one.tone}", []).append(_rectangle(*box))
    return {
        **x_axis,
        "height": height * count,
        "shapes": [(look, "".join(parts), "") for look, parts in sorted(paths.items())],
        "y_ticks": _name_ticks([one.name for one in chart.series], 16 if height >= 14 else 12),
    }


def _dots(chart: Chart, look: Look, _: int) -> dict[str, Any]:
    spanned = [y for one in chart.series for y in one.y]
    spanned += [*(chart.interval or ()), *chart.limits.values()]
    low, high = min(spanned), max(spanned)
    margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def across(value: float) -> float:
        return WIDTH * (value - low) / (high - low)

    row_height = 22
    height = row_height * len(chart.names)
    shapes = []
    if chart.interval:
        # An interval that is narrower than a pixel is drawn anyway.
        begin, end = map(across, chart.interval)
        shapes.append(("band", _boxes_path([(begin, max(end, begin + 1), 0, height)]), ""))
    for text, value in chart.limits.items():
        shapes.append(("line t-full", f"M{_short(across(value))} 0V{height}", text))
    for one in chart.series:
        for row, value in zip(one.x if len(one.x) else range(len(one.y)), one.y, strict=True):
            point = _dots_path([(across(value), row_height * (row + 0.5))])
            tip = f"{chart.names[int(row)]}: {value:,.6g} {chart.unit}"
            shapes.append((f"dots {look(one)}", point, tip))
    names = [
        name if len(name) <= _LABEL_LETTERS else f"…{name[1 - _LABEL_LETTERS :]}" for name in chart.names
    ]
    ticks = choose_ticks(low, high, 4)
    return {
        "height": height,
        "shapes": shapes,
        "x_ticks": [(f"{tick:,.6g}", across(tick) / WIDTH * 100) for tick in ticks],
        "y_ticks": _name_ticks(names, math.inf),
    }


_STRIP: Final = 6.0
"""The height of the strip of a lane, above its calls, that shows what the program's loop does."""
_EDGE: Final = 1.5
"""The amount by which a bar on the strip's line is shortened, so that the beginning of the next one is
visible.
"""


def _lanes(chart: Chart, look: Look, _: int) -> dict[str, Any]:
    across, x_axis = _time_axis(chart)
    strip = _STRIP if any(one.tone in ("bad", "doubt", "ink", "faint") for one in chart.series) else 0.0
    height = int(strip) + (14 if len(chart.names) <= 24 else 10)
    inner = {
        "pale": (0.5, height - 0.5),
        "light": (strip + (height - strip) * 0.62, height - 1.5),
        "full": (strip + 1.5, height - 1.5),
        "dark": (strip + 1.5, height - 1.5),
        "faint": (0.5, 2.0),
    }

    def boxes(one: Series) -> Iterator[Box]:
        upper, lower = inner.get(one.tone, (2.5, strip))
        shorter = _EDGE if one.tone == "faint" else 0.0
        for begin, end, lane in _intervals(one):
            yield across(begin), across(end) - shorter, height * lane + upper, height * lane + lower

    return {
        **x_axis,
        "height": height * len(chart.names),
        "shapes": [(look(one), _boxes_path(boxes(one)), "") for one in chart.series if len(one.y)],
        "y_ticks": _name_ticks(chart.names, 24 if height > 10 else 16),
    }


def _spans(chart: Chart, look: Look, _: int) -> dict[str, Any]:
    across, x_axis = _time_axis(chart)
    top, axis = _value_axis(chart, [y for one in chart.series for y in one.tops])

    def boxes(one: Series) -> Iterator[Box]:
        for (begin, end, low), high in zip(_intervals(one), one.tops, strict=True):
            left, upper = across(begin), top(high)
            yield left, max(across(end), left + 2), upper, max(top(low), upper + _LEAST)

    return {**axis, **x_axis, "shapes": [(look(one), _boxes_path(boxes(one)), "") for one in chart.series]}


_PLOTS: Final[Mapping[Kind, Callable[[Chart, Look, int], dict[str, Any]]]] = {
    Kind.BARS: _bars,
    Kind.AREA: _area,
    Kind.LAYERS: _layers,
    Kind.LINES: _lines,
    Kind.HEAT: _heat,
    Kind.DOTS: _dots,
    Kind.LANES: _lanes,
    Kind.SPANS: _spans,
}


def _intervals(one: Series) -> Iterator[tuple[float, float, float]]:
    """Yield the start, end and value of each interval. If there are no `ends`, `x` contains edges."""
    ends = one.ends if len(one.ends) else one.x[1:]
    return zip(one.x, ends, one.y, strict=False)


def _time_axis(chart: Chart) -> tuple[Callable[[float], float], dict[str, Any]]:
    """Return a function that maps a time to a horizontal position, and the axis's ticks and title."""
    ends = [float(times[-1]) for one in chart.series for times in (one.x, one.ends) if len(times)]
    ends += [float(max(one.ends)) for one in chart.series if len(one.ends)]
    end = max(chart.x_end or max(ends, default=0.0), _SHORTEST_S)
    step, unit = _readable_unit(end, "s")
    ticks = [(f"{tick:,.6g}", 100 * tick * step / end) for tick in choose_ticks(0, end / step, 8)]
    return lambda time: min(max(time / end, 0.0), 1.0) * WIDTH, {"x_ticks": ticks, "x_title": unit}


def _value_axis(chart: Chart, values: Sequence[float]) -> tuple[Callable[[float], float], dict[str, Any]]:
    """Return a function that maps a value to a position from the top, and the axis's ticks and limits."""
    known = [value for value in (*values, *chart.limits.values()) if value == value]  # noqa: PLR0124 - not NaN
    low = min(chart.y_begin, 0.0, *known)
    high = chart.y_end or max(known, default=0.0) * _MARGIN
    high = max(high, 0.0) * (_HEADROOM if chart.limits else 1.0)
    if high <= low:
        high = low + 1.0

    def top(value: float) -> float:
        return HEIGHT * (high - min(max(value, low), high)) / (high - low)

    lines = [(text, 100 * top(value) / HEIGHT) for text, value in chart.limits.items()]
    ticks = _value_ticks(low, high, chart.unit)
    return top, {"height": HEIGHT, "y_ticks": ticks, "marks": _spread_marks(lines)}


def _value_ticks(low: float, high: float, unit: str) -> list[Tick]:
    """Return about four round values from `low` at the bottom to `high` at the top."""
    step, name = _readable_unit(max(high, -low), unit)
    return [
        (f"{abs(tick):,.6g} {name}".rstrip() if tick else "0", 100 * (high - tick * step) / (high - low))
        for tick in choose_ticks(low / step, high / step, 4)
    ]


_TIMES: Final = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def _readable_unit(largest: float, unit: str) -> tuple[float, str]:
    """Choose the unit that suits the largest value; return its size and its name."""
    if unit == "s":
        return next(((step, name) for step, name in _TIMES if largest >= 2 * step), _TIMES[-1])
    if unit in ("B", "B/s"):
        power = max(0, min(int(math.log2(largest) // 10), 6)) if largest > 0 else 0
        return 1024.0**power, _PREFIXES[power] + unit
    return 1.0, unit


def choose_ticks(low: float, high: float, num: int) -> list[float]:
    """Choose about `num` round numbers between `low` and `high`, which must be larger."""
    exact = (high - low) / num
    magnitude = 10.0 ** math.floor(math.log10(exact))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= exact)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _name_ticks(names: Sequence[str], most: float, letters: float = math.inf) -> list[Tick]:
    """Put names at the centers of their places, but only every second, third, ... if they would overlap.

    At most `most` names of about `letters` letters in all fit.
    """
    every = max(math.ceil(len(names) / most), math.ceil(sum(map(len, names)) / letters), 1)
    return [
        (name, 100 * (number + 0.5) / len(names)) for number, name in enumerate(names) if number % every == 0
    ]


def _spread_marks(lines: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Move labels of limits up if they would overlap, and down if they would leave the drawing."""
    apart = 100 * 13 / HEIGHT
    placed: list[tuple[str, float, float]] = []
    for text, percent in sorted(lines, key=lambda line: -line[1]):
        above = placed[-1][2] - apart if placed else 100.0
        placed.append((text, percent, min(percent, above)))
    least = apart
    for number, (text, percent, at) in reversed(list(enumerate(placed))):
        if at < least:
            placed[number] = (text, percent, least)
            least += apart
    return placed


# Paths


def _boxes_path(boxes: Iterable[Box]) -> str:
    """Draw rectangles. Thin ones are widened so that they remain visible."""
    return "".join(
        _rectangle(left, max(right, min(left + 1, WIDTH)), top, bottom) for left, right, top, bottom in boxes
    )


def _rectangle(left: float, right: float, top: float, bottom: float) -> str:
    return f"M{_short(left)} {_short(top)}H{_short(right)}V{_short(bottom)}H{_short(left)}z"


def _steps_path(steps: Iterable[tuple[float, float, float]], base: float) -> str:
    """Draw an area over `base` from (left, right, height): adjacent steps share an edge, gaps stay open."""
    path: list[str] = []
    end: float | None = None
    for left, right, height in steps:
        if end is None or left > end + 1e-6:
            path.append(f"{'' if end is None else f'V{_short(base)}z'}M{_short(left)} {_short(base)}")
        path.append(f"V{_short(height)}H{_short(right)}")
        end = right
    return "".join([*path, f"V{_short(base)}z"]) if path else ""


def _line_path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_short(left)} {_short(top)}" for left, top in points)


def _dots_path(points: Iterable[tuple[float, float]]) -> str:
    """Draw a dot at each point: a line of no length, whose round ends stay round if the page stretches."""
    return "".join(f"M{_short(left)} {_short(top)}h0" for left, top in points)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
