"""Plots as text: every dot is at its place on the axis, and texts are escaped."""

import re
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment, PackageLoader

from penstock.reports.plots import plan_dot_plot
from penstock.reports.ticks import choose_ticks

PARTS = (
    Environment(loader=PackageLoader("penstock.reports"), autoescape=True).get_template("parts.html").module
)


def draw(values: dict[str, float], *, title: str = "throughput", outliers: tuple[str, ...] = ()) -> str:
    mean = sum(values.values()) / len(values)
    plot = plan_dot_plot(
        values, title=title, unit="samples/s", mean=mean, interval=(mean, mean), outliers=outliers
    )
    return str(PARTS.dot_plot(plot))  # type: ignore[attr-defined] # a macro


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    found = choose_ticks(low, high)
    margin = 1e-9 * max(abs(low), abs(high), 1)
    assert 1 <= len(found) <= 6
    assert all(low - margin <= tick <= high + margin for tick in found)


@given(numbers=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=8))
def test_every_value_is_a_dot_inside_of_the_drawing(numbers: list[float]) -> None:
    drawing = draw({f"run{position}": number for position, number in enumerate(numbers)})
    root = ET.fromstring(drawing)
    width, height = map(float, root.find("svg").get("viewBox").split()[2:])  # type: ignore[union-attr]
    circles = list(root.iter("circle"))
    assert len(circles) == len(numbers)
    for circle in circles:
        assert 0 <= float(circle.get("cx", "-1")) <= width
        assert 0 <= float(circle.get("cy", "-1")) <= height
    (band,) = root.iter("rect")
    assert float(band.get("width", "0")) >= 1


def test_a_larger_value_stands_further_to_the_right_and_an_outlier_in_another_colour() -> None:
    drawing = draw({"a": 1.0, "b": 1.01, "c": 0.99, "d": 1.005, "e": 2.0}, outliers=("e",))
    found = re.findall(r'class="(point|outlier)" cx="([\d.]+)"', drawing)
    places = [float(place) for _, place in found]
    assert [kind for kind, _ in found] == ["point"] * 4 + ["outlier"]
    assert places[2] < places[0] < places[3] < places[1] < places[4]


def test_a_long_name_keeps_its_end_beside_the_dot_and_is_whole_in_the_tooltip() -> None:
    drawing = draw({"a-run-with-a-very-long-name-20260102": 1.0})
    assert "…ong-name-20260102<" in drawing
    assert "<title>a-run-with-a-very-long-name-20260102: 1 samples/s</title>" in drawing


def test_names_of_strangers_cannot_become_markup() -> None:
    drawing = draw({'<b>"&': 1.0}, title="<i>")
    ET.fromstring(drawing)
    assert "<b>" not in drawing
    assert "<i>" not in drawing
