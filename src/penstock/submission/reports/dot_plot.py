"""A figure's values as dots, a line each, over the mean and its interval of confidence; an SVG that is text.

Pure. Invariant: the axis spans the values and the interval; it begins where they do, as its ticks say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.submission.reports.result_figures import ResultFigure

_WIDTH: Final = 420
_LEFT: Final = 130
_RIGHT: Final = 18
_LINE: Final = 22
_TOP: Final = 8
_BOTTOM: Final = 34
_MOST_LETTERS: Final = 18
_NUM_TICKS: Final = 4


def dot_plot(figure: ResultFigure) -> str:
    """The drawing with its caption."""
    low, high = _range(figure)
    height = _TOP + _LINE * len(figure.values) + _BOTTOM
    title = f"{figure.name}, {figure.unit}"
    return "\n".join(
        [
            f"<figure><figcaption>{escape(title)}</figcaption>",
            f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)} of each run">',
            *_axis(low, high, height),
            *_middle(figure, low, high, height),
            *_dots(figure, low, high),
            "</svg></figure>",
        ]
    )


def ticks(low: float, high: float, num: int = _NUM_TICKS) -> list[float]:
    """Round numbers from `low` to `high`, about as many as asked; `low` is below `high`."""
    raw = (high - low) / num
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def _range(figure: ResultFigure) -> tuple[float, float]:
    values = [*figure.values.values(), *(figure.spread.interval or ())]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    return low - margin, high + margin


def _x(value: float, low: float, high: float) -> float:
    return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)


def _axis(low: float, high: float, height: int) -> Iterator[str]:
    bottom = height - _BOTTOM
    for tick in ticks(low, high):
        x = _x(tick, low, high)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text class="faint" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.6g}</text>'


def _middle(figure: ResultFigure, low: float, high: float, height: int) -> Iterator[str]:
    bottom = height - _BOTTOM
    if figure.spread.interval is not None:
        left, right = (_x(edge, low, high) for edge in figure.spread.interval)
        width = max(right - left, 1.0)
        yield (f'<rect class="band" x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{bottom - _TOP}"/>')
    x = _x(figure.spread.mean, low, high)
    yield f'<line class="mean" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'


def _dots(figure: ResultFigure, low: float, high: float) -> Iterator[str]:
    apart = {outlier.run for outlier in figure.spread.outliers}
    for number, (run, value) in enumerate(figure.values.items()):
        y = _TOP + _LINE * (number + 0.5)
        kind = "outlier" if run in apart else "point"
        label = run if len(run) <= _MOST_LETTERS else f"…{run[1 - _MOST_LETTERS :]}"
        yield f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        yield (
            f'<circle class="{kind}" cx="{_x(value, low, high):.1f}" cy="{y:.1f}" r="5">'
            f"<title>{escape(run)}: {value:,.6g} {escape(figure.unit)}</title></circle>"
        )
