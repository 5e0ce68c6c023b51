"""Charts become shapes at their places: to scale, inside of the drawing, little never drawn as nothing."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reports.drawing import HEIGHT, NUM_HUES, WIDTH, Drawing, assign_hues, choose_ticks, draw
from penstock.reports.report import Chart, Kind, Series, Tone, bar_chart

TONES: Sequence[Tone] = ("pale", "light", "full", "faint", "bad")
EDGES = [0.0, 1.0, 2.0, 3.0]


def drawn(chart: Chart, *, letters: int = 100) -> Drawing:
    runs = [chart.run, *(one.run for one in chart.series if one.run)]
    return draw(chart, assign_hues(runs), letters=letters)


def chart_of(kind: Kind, *series: Series, unit: str = "", names: Sequence[str] = ()) -> Chart:
    return Chart(kind=kind, title="t", run="r", series=series, unit=unit, names=names)


def boxes(path: str) -> list[tuple[float, ...]]:
    """Left, top, right, bottom of the rectangles of a path."""
    found = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+z", path)
    return [tuple(map(float, box)) for box in found]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e6), num=st.integers(2, 8))
def test_ticks_are_few_round_and_inside(low: float, width: float, num: int) -> None:
    high = low + width
    found = choose_ticks(low, high, num)
    margin = 1e-9 * max(abs(low), abs(high), 1)
    assert len(found) <= num + 1
    assert all(low - margin <= tick <= high + margin for tick in found)


def test_bars_are_as_high_as_their_values_and_little_is_not_nothing() -> None:
    found = boxes(drawn(bar_chart("t", "r", {"a": 100.0, "b": 50.0, "c": 1e-9})).shapes[0][1])
    heights = [bottom - top for _, top, _, bottom in found]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[2] == pytest.approx(1.0)
    assert [left for left, *_ in found] == sorted(left for left, *_ in found)


def test_series_of_bars_stack_and_places_without_values_are_gaps() -> None:
    read = Series(name="read", x=[0, 2], y=[1.0, 2.0])
    write = Series(name="write", x=[2], y=[2.0], tone="dark")
    below, above = (
        boxes(path) for _, path, _ in drawn(chart_of(Kind.BARS, read, write, names=["a", "b", "c"])).shapes
    )
    assert [left // (WIDTH / 3) for left, *_ in below] == [0, 2]
    assert above[0][3] == pytest.approx(below[1][1], abs=0.2)


def test_limits_stand_at_their_values_and_their_texts_apart() -> None:
    limits = {"asked 90 %": 90.0, "ceiling 91 %": 91.0}
    marks = drawn(bar_chart("t", "r", {"a": 95.0}, "%", y_end=100, limits=limits)).marks
    (asked, ceiling) = sorted(marks)
    assert asked[1] > ceiling[1]
    assert abs(asked[2] - ceiling[2]) >= 100 * 12 / HEIGHT


@pytest.mark.parametrize(
    ("unit", "value", "texts"),
    [
        ("B/s", 3 * 2.0**30, ["0", "1 GiB/s", "2 GiB/s", "3 GiB/s"]),
        ("B", 3 * 2.0**10, ["0", "1 KiB", "2 KiB", "3 KiB"]),
        ("s", 0.003, ["0", "1 ms", "2 ms", "3 ms"]),
        ("s", 300.0, ["0", "2 min", "4 min"]),
        ("%", 100.0, ["0", "50 %", "100 %"]),
        ("", 3000.0, ["0", "1,000", "2,000", "3,000"]),
        ("GiB", 30.0, ["0", "10 GiB", "20 GiB", "30 GiB"]),
    ],
)
def test_ticks_are_in_units_that_suit_the_values(unit: str, value: float, texts: list[str]) -> None:
    assert [text for text, _ in drawn(bar_chart("t", "r", {"a": value}, unit)).y_ticks] == texts


def test_names_that_would_run_into_each_other_are_thinned_out() -> None:
    names = {f"node-{number:03}": 1.0 for number in range(10)}
    assert len(drawn(bar_chart("t", "r", names), letters=30).x_ticks) <= 4
    assert len(drawn(bar_chart("t", "r", names), letters=100).x_ticks) == 10


def test_an_area_has_gaps_where_nothing_is_and_hangs_where_values_are_negative() -> None:
    up = Series(name="read", x=EDGES, y=[5.0, 0.0, 10.0])
    down = Series(name="write", x=EDGES, y=[-5.0, 0.0, 0.0], tone="dark")
    drawing = drawn(chart_of(Kind.AREA, up, down, unit="B"))
    (_, rising, _), (_, hanging, _) = drawing.shapes
    assert rising.count("M") == 2
    base = points(rising)[0][1]
    assert 0 < base < HEIGHT
    assert all(float(top) < base for top in re.findall(r"V([\d.]+)H", rising))
    assert all(float(bottom) > base for bottom in re.findall(r"V([\d.]+)H", hanging))
    assert drawing.legend == {"read": "t-full", "write": "t-dark"}
    assert drawing.x_title == "s"


def test_layers_stand_on_each_other() -> None:
    series = [Series(name=tone, x=EDGES, y=[25.0, 0.0, 50.0], tone=tone) for tone in TONES[:2]]
    lower, upper = (boxes(path) for _, path, _ in drawn(chart_of(Kind.LAYERS, *series)).shapes)
    assert [box[3] for box in upper] == [box[1] for box in lower]


def test_lines_over_names_have_dots_and_those_over_time_have_none() -> None:
    over_names = drawn(chart_of(Kind.LINES, Series(y=[1.0, 2.0]), names=["1", "2"]))
    assert [look for look, _, _ in over_names.shapes] == ["line t-full", "dots t-full"]
    over_time = drawn(chart_of(Kind.LINES, Series(x=[0.0, 1.0], y=[1.0, 2.0])))
    assert [look for look, _, _ in over_time.shapes] == ["line t-full"]


def test_a_heat_map_has_a_row_for_each_series_and_fuller_tones_for_more() -> None:
    rows = [Series(name=f"rank {rank}", x=EDGES, y=[0.0, 0.1, 1.0], tone="bad") for rank in range(3)]
    drawing = drawn(chart_of(Kind.HEAT, *rows))
    assert [text for text, _ in drawing.y_ticks] == ["rank 0", "rank 1", "rank 2"]
    assert {look for look, _, _ in drawing.shapes} == {"level-1 t-bad", "level-8 t-bad"}
    assert all(len(boxes(path)) == 3 for _, path, _ in drawing.shapes)
    assert drawing.legend == {}


@given(numbers=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=8))
def test_every_value_is_a_dot_inside_of_the_drawing(numbers: list[float]) -> None:
    mean = sum(numbers) / len(numbers)
    drawing = drawn(
        Chart(
            kind=Kind.DOTS,
            title="t",
            run="r",
            names=[f"run{number}" for number in range(len(numbers))],
            series=[Series(y=numbers)],
            limits={"mean": mean},
            interval=(mean, mean),
        )
    )
    dots = [points(path)[0] for look, path, _ in drawing.shapes if look.startswith("dots")]
    assert len(dots) == len(numbers)
    assert all(0 <= x <= WIDTH and 0 <= y <= drawing.height for x, y in dots)
    ((left, _, right, _),) = [boxes(path)[0] for look, path, _ in drawing.shapes if look == "band"]
    assert right > left


def test_a_long_name_keeps_its_end_next_to_the_dot_and_is_whole_under_the_pointer() -> None:
    name = "a-run-with-a-very-long-name-20260102"
    drawing = drawn(chart_of(Kind.DOTS, Series(y=[1.0]), unit="samples/s", names=[name]))
    assert drawing.y_ticks[0][0] == "…me-20260102"
    assert drawing.shapes[-1][2] == f"{name}: 1 samples/s"


def test_lanes_have_calls_above_the_computation_and_what_moves_nothing_at_the_foot() -> None:
    bars = {tone: Series(name=tone, x=[0.0], ends=[1.0], y=[1], tone=tone) for tone in TONES}
    drawing = drawn(chart_of(Kind.LANES, *bars.values(), names=["rank 0", "rank 1"]))
    places = {look: boxes(path)[0] for look, path, _ in drawing.shapes}
    lane = drawing.height / 2
    assert all(lane <= top < bottom <= 2 * lane for _, top, _, bottom in places.values())
    assert places["t-pale"][1] < places["t-full"][1] < places["t-light"][1]
    assert places["t-faint"][3] < places["t-bad"][1] < places["t-full"][1]


def test_spans_are_to_scale_and_short_ones_can_be_seen() -> None:
    series = Series(x=[0.0, 9.0], ends=[1e-9, 10.0], y=[0.0, 50.0], tops=[50.0, 100.0])
    (first, second) = boxes(drawn(chart_of(Kind.SPANS, series, unit="B")).shapes[0][1])
    assert first[2] - first[0] == pytest.approx(2, abs=0.1)
    assert second[3] == pytest.approx(first[1], abs=0.2)


def test_charts_that_share_axes_end_where_they_are_told() -> None:
    short = Chart(kind=Kind.AREA, title="t", run="r", series=[Series(x=[0, 1], y=[1.0])], x_end=10, y_end=10)
    (_, path, _) = drawn(short).shapes[0]
    assert float(re.findall(r"H([\d.]+)", path)[-1]) == WIDTH / 10
    assert float(re.findall(r"V([\d.]+)H", path)[0]) == pytest.approx(HEIGHT * 0.9, abs=0.1)


@given(st.lists(st.text(min_size=1), max_size=NUM_HUES, unique=True))
def test_runs_have_different_hues_that_follow_from_their_names(runs: list[str]) -> None:
    hues = assign_hues(runs)
    assert len(set(hues.values())) == len(runs)
    assert all(assign_hues([run])[run] == hues[run] for run in runs[:1])
