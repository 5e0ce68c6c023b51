"""Dot plots of pages, as plain SVG.

Plots have no colours of their own: they take them from the page's CSS variables, so that they follow the
light, dark and printed palettes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.reports.ticks import choose_ticks

_WIDTH: Final = 420
_LEFT: Final = 130
_RIGHT: Final = 18
_LINE: Final = 22
_TOP: Final = 8
_BOTTOM: Final = 34
_LABEL_LETTERS: Final = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One value, at its place in the drawing. `label` fits beside it, `run` is the whole name."""

    run: str
    label: str
    value: float
    x: float
    y: float
    is_outlier: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DotPlot:
    """Values as dots, a line each, over their mean and its interval; the macro `dot_plot` draws it.

    The axis spans the values and the interval: it begins where they do, not at zero.
    """

    title: str
    unit: str
    width: float
    height: float
    top: float
    bottom: float
    label_x: float
    ticks: tuple[tuple[float, float], ...]
    """Each tick's value and place."""
    band: tuple[float, float] | None
    """Where the interval begins, and how wide it is."""
    mean_x: float
    dots: tuple[Dot, ...]


def plan_dot_plot(
    values: Mapping[str, float],
    *,
    title: str,
    unit: str,
    mean: float,
    interval: tuple[float, float] | None = None,
    outliers: Collection[str] = (),
) -> DotPlot:
    """Lay out the drawing of `values`, which are by run, in their order."""
    spanned: list[float] = [*values.values(), *(interval or ())]
    low, high = min(spanned), max(spanned)
    margin = (high - low) * 0.05 or abs(low) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    height = _TOP + _LINE * len(values) + _BOTTOM
    return DotPlot(
        title=title,
        unit=unit,
        width=_WIDTH,
        height=height,
        top=_TOP,
        bottom=height - _BOTTOM,
        label_x=_LEFT - 10,
        ticks=tuple((tick, place(tick)) for tick in choose_ticks(low, high)),
        # An interval may be narrower than a pixel; it is drawn all the same.
        band=(place(interval[0]), max(place(interval[1]) - place(interval[0]), 1.0)) if interval else None,
        mean_x=place(mean),
        dots=tuple(
            Dot(
                run=run,
                label=run if len(run) <= _LABEL_LETTERS else f"…{run[1 - _LABEL_LETTERS :]}",
                value=value,
                x=place(value),
                y=_TOP + _LINE * (line + 0.5),
                is_outlier=run in outliers,
            )
            for line, (run, value) in enumerate(values.items())
        ),
    )
