"""Plots as text: every value has its dot where the axis says, and texts cannot break out."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.submission.reports.dot_plot import dot_plot, ticks
from penstock.submission.reports.result_figures import ResultFigure, compute_spread


def figure(values: dict[str, float], name: str = "throughput") -> ResultFigure:
    return ResultFigure(name=name, unit="samples/s", values=values, spread=compute_spread(values))


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
@settings(max_examples=50)
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    found = ticks(low, high)
    margin = 1e-9 * max(abs(low), abs(high), 1)
    assert 1 <= len(found) <= 6
    assert all(low - margin <= tick <= high + margin for tick in found)


@given(numbers=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=8))
@settings(max_examples=50)
def test_every_value_is_a_dot_inside_of_the_drawing(numbers: list[float]) -> None:
    drawing = dot_plot(figure({f"run{position}": number for position, number in enumerate(numbers)}))
    root = ET.fromstring(drawing)
    width, height = map(float, root.find("svg").get("viewBox").split()[2:])  # type: ignore[union-attr]
    circles = list(root.iter("circle"))
    assert len(circles) == len(numbers)
    for circle in circles:
        assert 0 <= float(circle.get("cx", "-1")) <= width
        assert 0 <= float(circle.get("cy", "-1")) <= height


def test_a_larger_value_stands_further_to_the_right_and_an_outlier_in_another_colour() -> None:
    drawing = dot_plot(figure({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.005, "e": 2.0}))
    found = re.findall(r'class="(point|outlier)" cx="([\d.]+)"', drawing)
    places = [float(place) for _, place in found]
    assert [kind for kind, _ in found] == ["point"] * 4 + ["outlier"]
    assert places[2] < places[0] < places[3] < places[1] < places[4]


def test_names_of_strangers_cannot_become_markup() -> None:
    drawing = dot_plot(figure({'<b>"&': 1.0}, name="<i>"))
    ET.fromstring(drawing)
    assert "<b>" not in drawing
    assert "<i>" not in drawing
