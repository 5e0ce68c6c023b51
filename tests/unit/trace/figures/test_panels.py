"""Drawings: bars where values are, gaps where there are none, ticks inside of the axis."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reports.panels import (
    NUM_HUES,
    NUM_LEVELS,
    WIDTH,
    Mark,
    Shape,
    Sheet,
    assign_hues,
    bars_path,
    heat_shapes,
    spread_marks,
    steps_path,
)
from penstock.reports.ticks import Tick, byte_ticks, lane_ticks, time_ticks
from penstock.trace.figures.draw_calls import draw_calls, has_loops, looks_of
from penstock.trace.figures.draw_histograms import Bins, draw_bins, draw_rank_bars
from penstock.trace.figures.draw_over_time import draw_bandwidth, draw_overlap, draw_rank_heat
from penstock.trace.questions.answer import Answer, Unit, make_columns

SHEET = Sheet(1000, {"a": 0, "b": 1})


def rectangles(path: str) -> list[tuple[float, ...]]:
    """Left, top, right, bottom of the rectangles of a path."""
    found = re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+z", path)
    return [tuple(map(float, numbers)) for numbers in found]


def columns_of(shapes: Sequence[Shape]) -> set[int]:
    """The bins of ten in which there is any bar."""
    return {round(left / WIDTH * 10 - 0.06) for shape in shapes for left, *_ in rectangles(shape.path)}


@given(span_us=st.integers(1, 10**13))
def test_ticks_of_time_are_few_and_inside(span_us: int) -> None:
    ticks, unit = time_ticks(span_us)
    assert 1 <= len(ticks) <= 10
    assert ticks[0] == Tick("0", 0.0)
    assert all(0 <= tick.percent <= 100.001 for tick in ticks)
    assert unit in ("µs", "ms", "s", "min", "h")


@given(largest=st.floats(1, 1e15))
def test_ticks_of_bytes_are_round_in_their_unit_and_inside(largest: float) -> None:
    ticks = byte_ticks(largest, "/s")
    assert len(ticks) >= 2
    assert ticks[0] == Tick("0", 100.0)
    assert all(-0.001 <= tick.percent <= 100 for tick in ticks)
    assert all(tick.text.endswith("B/s") for tick in ticks[1:])


def test_neighbouring_steps_touch_and_others_leave_a_gap() -> None:
    path = steps_path([(0, 10, 5), (10, 20, 7), (30, 40, 6)], 88)
    assert path == "M0 88V5H10V7H20V88zM30 88V6H40V88z"
    assert steps_path([], 88) == ""


@given(runs=st.lists(st.text(), unique=True, max_size=2 * NUM_HUES))
def test_a_run_has_its_own_colour_on_every_page_and_shares_it_only_on_crowded_ones(runs: list[str]) -> None:
    hues = assign_hues(runs)
    assert len(set(hues.values())) == min(len(runs), NUM_HUES)
    for run in runs[:1]:
        assert hues[run] == assign_hues([run])[run]


@given(percents=st.lists(st.floats(0, 100), max_size=6))
def test_texts_of_marks_make_room_for_each_other_inside_of_the_drawing(percents: list[float]) -> None:
    marks = spread_marks([Mark(str(percent), percent) for percent in percents], height=100)
    assert sorted(mark.percent for mark in marks) == sorted(percents), "limits stay where they are"
    places = sorted(mark.text_percent for mark in marks if mark.text_percent is not None)
    assert len(places) == len(percents)
    assert all(after - before >= 13 - 1e-9 for before, after in pairwise(places))
    assert all(13 <= place <= 100 for place in places)


def test_a_thin_bar_is_still_seen() -> None:
    (bar,) = rectangles(bars_path([(20, 20, 0, 9)]))
    assert bar == (20, 0, 21, 9)


def test_tones_are_in_equal_steps_and_zero_has_none() -> None:
    cells = [(0, 1, 0, 1, value) for value in (0, 1, 50, 100)]
    shapes = heat_shapes(cells, 100)
    assert [shape.look for shape in shapes] == ["level-1", "level-4", f"level-{NUM_LEVELS}"]


def test_many_lanes_have_some_names_and_each_is_beside_its_lane() -> None:
    ticks = lane_ticks([f"rank {number}" for number in range(100)], 16)
    assert len(ticks) <= 16
    assert ticks[1] == Tick("rank 7", 7.5)


def test_bins_without_calls_are_gaps() -> None:
    rows = [
        {"run": "a", "kind": kind, "from_bytes": begin, "to_bytes": 2 * begin, "num_calls": number}
        for kind, begin, number in (("read", 1, 10), ("write", 1, 5), ("read", 512, 1))
    ]
    (panel,) = draw_bins(rows, SHEET, Bins("from_bytes", "to_bytes", Unit.BYTES), [("num_calls", "calls")])
    assert columns_of(panel.shapes) == {0, 9}
    reads, writes = panel.shapes
    (below, *_), (above,) = rectangles(reads.path), rectangles(writes.path)
    assert above[3] == below[1], "the writes of a bin stand on its reads"
    assert panel.x_ticks[0] == Tick("1 B", 0.0)


def test_histograms_of_all_runs_have_one_axis() -> None:
    rows = [
        {"run": run, "kind": "read", "from_us": 1, "to_us": 2, "num_calls": number}
        for run, number in (("a", 100), ("b", 50))
    ]
    panels = draw_bins(rows, SHEET, Bins("from_us", "to_us", Unit.MICROSECONDS), [("num_calls", "calls")])
    assert panels[0].y_ticks == panels[1].y_ticks
    heights = [rectangles(panel.shapes[0].path)[0] for panel in panels]
    assert heights[0][3] - heights[0][1] == 2 * (heights[1][3] - heights[1][1])


def bandwidth(*rows: tuple[object, ...]) -> Answer:
    columns = make_columns("run", "tier", "since_start_us", "bucket_us", "read_bytes", "written_bytes")
    return Answer(name="bandwidth", title="", columns=columns, rows=rows)  # type: ignore[arg-type]


def test_runs_of_one_tier_share_the_axis_of_bandwidth() -> None:
    first, second = draw_bandwidth(
        bandwidth(("a", "ssd", 0, 100, 1000, 0), ("b", "ssd", 0, 100, 500, 500)), SHEET
    )
    assert first.y_ticks == second.y_ticks
    assert (first.run, second.run) == (0, 1)
    assert [shape.look for shape in second.shapes] == ["read", "write"]
    assert first.note == "read at most 9.54 MiB/s"


def test_ticks_of_both_directions_leave_room_for_each_other() -> None:
    (reads_only,) = draw_bandwidth(bandwidth(("a", None, 0, 100, 10**9, 1)), SHEET)
    (both,) = draw_bandwidth(bandwidth(("a", None, 0, 100, 10**9, 10**9)), SHEET)
    assert [tick.text for tick in reads_only.y_ticks] == ["0", "5 TiB/s"]
    assert {tick.percent for tick in both.y_ticks if tick.text == "0"} == {50.0}
    for panel in (reads_only, both):
        places = sorted(tick.percent for tick in panel.y_ticks)
        assert all(after - before > 12 for before, after in pairwise(places))


def test_a_trickle_of_writes_is_seen_below_a_torrent_of_reads() -> None:
    (panel,) = draw_bandwidth(bandwidth(("a", None, 0, 100, 10**9, 1)), SHEET)
    writes = next(shape for shape in panel.shapes if shape.look == "write")
    numbers = list(map(float, re.findall(r"V([\d.]+)", writes.path)))
    assert max(numbers) - min(numbers) >= 1
    assert max(numbers) <= panel.height


def test_shares_of_computation_and_io_are_stacked_up_to_all_processes() -> None:
    columns = make_columns(
        "run", "since_start_us", "bucket_us", "num_processes", "compute_us", "io_us", "both_us"
    )
    rows = [("a", 0, 100, 2, 100, 140, 40)]
    (panel,) = draw_overlap(Answer(name="", title="", columns=columns, rows=rows), SHEET)
    heights = {
        shape.look: rectangles(shape.path)[0][3] - rectangles(shape.path)[0][1] for shape in panel.shapes
    }
    assert heights == pytest.approx({"compute": 21.6, "both": 14.4, "alone": 36.0})
    assert panel.note == "28.6 % of the I/O while its process computes"


def test_lanes_are_named_by_rank_or_process_and_then_by_thread() -> None:
    columns = make_columns(
        "run", "rank", "host", "pid", "tid", "kind", "since_start_us", "until_us", "num_events", "sum_us"
    )
    rows = [
        ("a", 0, "n", 1, 1, "read", 0, 10, 1, 10),
        ("a", 0, "n", 1, 2, "read", 0, 10, 1, 10),
        ("a", None, "n", 7, 7, "compute", 0, 10, 1, 10),
    ]
    answer = Answer(name="", title="", columns=columns, rows=rows, notes=["a: 3 threads", "ab: 9 threads"])
    (panel,) = draw_calls(answer, SHEET)
    assert [tick.text for tick in panel.y_ticks] == ["rank 0", "thread 2", "pid 7"]
    assert [shape.look for shape in panel.shapes] == ["compute", "read"]
    assert panel.note == "3 threads"


def test_parts_of_a_loop_have_a_strip_above_the_calls_of_their_lane() -> None:
    columns = make_columns(
        "run", "rank", "host", "pid", "tid", "kind", "since_start_us", "until_us", "num_events", "sum_us"
    )
    rows = [
        ("a", 0, "n", 1, 1, kind, begin, end, 1, end - begin)
        for kind, begin, end in (
            ("step", 0, 500), ("step", 500, 1000), ("wait", 0, 100), ("read", 0, 1000), ("compute", 100, 500),
        )
    ]  # fmt: skip
    answer = Answer(name="", title="", columns=columns, rows=rows)
    assert has_loops(answer)
    assert looks_of(answer) == ["read", "write", "metadata", "compute", "wait", "step"]
    (panel,) = draw_calls(answer, SHEET)
    bars = {shape.look: rectangles(shape.path) for shape in panel.shapes}
    assert list(bars) == ["compute", "read", "wait", "step"]
    (first, second), (wait,), (read,) = bars["step"], bars["wait"], bars["read"]
    assert first[2] < second[0], "one sees where the second step begins"
    assert first[3] <= wait[1] < wait[3] <= read[1] < read[3] <= panel.height
    calls_only = Answer(name="", title="", columns=columns, rows=rows[3:])
    assert not has_loops(calls_only)
    assert draw_calls(calls_only, SHEET)[0].height == 14


def test_a_rank_without_a_trace_is_a_gap() -> None:
    rows = [{"run": "a", "rank": rank, "union_us": 10} for rank in (0, 9)]
    (panel,) = draw_rank_bars(rows, SHEET)
    assert columns_of(panel.shapes) == {0, 9}


def test_a_rank_that_only_computes_leaves_no_row_in_a_heat_map() -> None:
    columns = make_columns(
        "run", "row", "first_rank", "last_rank", "since_start_us", "bucket_us", "busy_us"
    )  # fmt: skip
    rows = [("a", row, row, row, 0, 100, 50) for row in (0, 2)]
    answer = Answer(name="", title="", columns=columns, rows=rows)
    (panel,) = draw_rank_heat(answer, SHEET, value=lambda row: row["busy_us"], text=str)
    assert [tick.text for tick in panel.y_ticks] == ["rank 0", "rank 2"]
    bars = [bar for shape in panel.shapes for bar in rectangles(shape.path)]
    assert [(top, bottom) for _, top, _, bottom in bars] == [(0.5, 13.5), (14.5, 27.5)]
    assert panel.height == 28
