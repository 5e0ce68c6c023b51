"""The rows of every figure are what a loop over all events counts, microsecond by microsecond."""

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from tests.support.trace_studies import small_study

from penstock.trace import figures
from penstock.trace.compare.trace_study import Study
from penstock.trace.figures import TimeAxis, measure_axis, place_calls
from penstock.trace.questions.answer import Answer

READS = ("read", "pread64", "fread")
WRITES = ("write", "pwritev2", "fwrite")
METADATA = ("open64", "close", "__xstat", "lseek64", "fsync", "unlink", "mkdir", "rename", "access")
RUNS = ("base", "it's new", "none")

Event = Mapping[str, Any]


def make_events(num_events: int = 600, *, num_processes: int = 5, span_us: int = 4000) -> list[Event]:
    """I/O and computation of two runs, with the same pids on two hosts, and calls of no length or bytes."""
    draw = random.Random(20)
    events: list[Event] = []
    for _ in range(num_events):
        number = draw.randrange(num_processes)
        kind = draw.choice(("read", "write", "metadata", "compute", "app"))
        name = {
            "read": draw.choice(READS), "write": draw.choice(WRITES), "metadata": draw.choice(METADATA),
            "compute": "train.compute", "app": "reader.next",
        }[kind]  # fmt: skip
        moves = kind in ("read", "write")
        events.append(
            {
                "run": draw.choice(RUNS[:2]), "host": f"node{number % 2}", "pid": 100 + number // 2,
                "kind": kind, "tid": 100 + draw.randrange(3), "rank": number if number % 3 else None,
                "name": name,
                "cat": {"compute": "app", "app": "reader"}.get(kind, "POSIX"),
                "ts_us": 10**15 + draw.randrange(span_us), "dur_us": draw.choice((0, 1, 7, 40, 900)),
                "path": None
                if kind in ("compute", "app")
                else f"/{draw.choice(('fast', 'slow'))}/{draw.randrange(9)}",
                "size_bytes": draw.choice((0, 1, 4096, 5000, 1 << 20)) if moves else None,
                "offset": draw.choice((None, 0, 4096, 9999)) if moves else None,
            }
        )  # fmt: skip
    return events


def plain(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [{key: value for key, value in event.items() if key != "kind"} for event in events]


@pytest.fixture
def events() -> list[Event]:
    return make_events()


@pytest.fixture
def study(events: list[Event]) -> Iterator[Study]:
    with small_study(plain(events), runs=RUNS) as opened:
        yield opened


@pytest.fixture
def axis(study: Study) -> TimeAxis:
    return measure_axis(study.events, study.runs)


def placed(study: Study) -> TimeAxis:
    axis = measure_axis(study.events, study.runs)
    place_calls(axis)
    return axis


def records(answer: Answer) -> list[dict[str, Any]]:
    return list(answer.records())


def largest(sums: Mapping[str, int], number: int) -> list[str]:
    return sorted(sums, key=lambda path: (-sums[path], path))[:number]


def is_io(event: Event) -> bool:
    return event["kind"] in ("read", "write", "metadata")


def since(event: Event, axis: TimeAxis) -> int:
    return int(event["ts_us"] - axis.runs[event["run"]].origin_us)


def shares(event: Event, axis: TimeAxis, width: int) -> Iterator[tuple[int, float]]:
    """Buckets that an event is in, and its share of each, microsecond by microsecond."""
    begin, dur_us = since(event, axis), event["dur_us"]
    if not dur_us:
        yield begin // width, 1.0
    for moment in range(begin, begin + dur_us):
        yield moment // width, 1 / dur_us


def busy_moments(events: Sequence[Event], axis: TimeAxis) -> set[int]:
    return {
        moment
        for event in events
        for moment in range(since(event, axis), since(event, axis) + event["dur_us"])
    }


def by_bucket(moments: set[int], width: int) -> dict[int, int]:
    counts: dict[int, int] = defaultdict(int)
    for moment in moments:
        counts[moment // width] += 1
    return counts


def test_the_axis_has_the_runs_with_events_and_the_longest_span(events: list[Event], axis: TimeAxis) -> None:
    assert list(axis.runs) == ["base", "it's new"]
    for run, extent in axis.runs.items():
        own = [event for event in events if event["run"] == run]
        origin = min(event["ts_us"] for event in own)
        assert extent.origin_us == origin
        assert extent.span_us == max(event["ts_us"] + event["dur_us"] for event in own) - origin
    assert axis.span_us == max(extent.span_us for extent in axis.runs.values())


@pytest.mark.parametrize("most", [1, 7, 150, 1000, 10**6])
def test_buckets_are_round_and_not_more_than_asked_for(axis: TimeAxis, most: int) -> None:
    width = axis.bucket_us(most)
    assert axis.span_us // width < most
    assert str(width).rstrip("0") in ("1", "2", "5")


def test_bandwidth_divides_bytes_by_the_time_in_each_bucket(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    answer = figures.bandwidth(axis)
    width = axis.bucket_us(figures.BANDWIDTH_BUCKETS)
    expected: dict[tuple[Any, ...], float] = defaultdict(float)
    for event in events:
        if event["size_bytes"]:
            column = "read_bytes" if event["kind"] == "read" else "written_bytes"
            for bucket, share in shares(event, axis, width):
                key = (event["run"], event["path"].split("/")[1], bucket * width, column)
                expected[key] += event["size_bytes"] * share
    found = {
        (row["run"], row["tier"], row["since_start_us"], column): row[column]
        for row in records(answer)
        for column in ("read_bytes", "written_bytes")
        if row[column]
    }
    assert found == pytest.approx(expected)


def test_cells_of_ranks_have_their_bytes_and_the_exact_time_they_were_busy(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    answer = figures.rank_cells(placed(study))
    width = axis.bucket_us(figures.HEAT_BUCKETS)
    for run in axis.runs:
        rows = [row for row in records(answer) if row["run"] == run]
        own = [event for event in events if event["run"] == run and is_io(event)]
        for host, pid in {(event["host"], event["pid"]) for event in own}:
            process = [event for event in own if (event["host"], event["pid"]) == (host, pid)]
            cells = {row["since_start_us"]: row for row in rows if (row["host"], row["pid"]) == (host, pid)}
            moved: dict[int, float] = defaultdict(float)
            for event in process:
                for bucket, share in shares(event, axis, width):
                    moved[bucket] += (event["size_bytes"] or 0) * share
            busy = by_bucket(busy_moments(process, axis), width)
            assert {at // width: row["busy_us"] for at, row in cells.items() if row["busy_us"]} == busy
            found = {at // width: row["read_bytes"] + row["written_bytes"] for at, row in cells.items()}
            assert found == pytest.approx(moved)


def test_many_ranks_share_rows_and_no_byte_is_lost() -> None:
    events = [
        {"run": "base", "host": "node", "pid": rank, "rank": rank, "name": "write", "path": "/fast/x",
         "ts_us": rank, "dur_us": 2, "size_bytes": 10}
        for rank in range(150)
    ]  # fmt: skip
    with small_study(events, runs=["base"]) as study:
        answer = figures.rank_cells(placed(study))
    rows = records(answer)
    assert {row["row"] for row in rows} == set(range(50))
    assert {(row["first_rank"], row["last_rank"]) for row in rows if row["row"] == 49} == {(147, 149)}
    assert sum(row["written_bytes"] for row in rows) == 1500
    assert sum(row["busy_us"] for row in rows) == 300
    assert answer.notes == ["Each row is 3 ranks, next to one another."]


def test_computation_io_and_both_are_measured_in_each_process(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    answer = figures.overlap_lanes(placed(study))
    width = axis.bucket_us(figures.OVERLAP_BUCKETS)
    for run in axis.runs:
        expected: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        own = [event for event in events if event["run"] == run and event["dur_us"]]
        own = [event for event in own if is_io(event) or event["kind"] == "compute"]
        names = {(event["host"], event["pid"] if event["rank"] is None else event["rank"]) for event in own}
        for name in names:
            process = [
                event
                for event in own
                if (event["host"], event["pid"] if event["rank"] is None else event["rank"]) == name
            ]
            compute = busy_moments([event for event in process if event["kind"] == "compute"], axis)
            moving = busy_moments([event for event in process if is_io(event)], axis)
            for place, moments in enumerate((compute, moving, compute & moving)):
                for bucket, number in by_bucket(moments, width).items():
                    expected[bucket][place] += number
        rows = [row for row in records(answer) if row["run"] == run]
        assert {row["num_processes"] for row in rows} == {len(names)}
        assert {
            row["since_start_us"] // width: [row["compute_us"], row["io_us"], row["both_us"]] for row in rows
        } == expected


def test_metadata_calls_count_where_they_begin_and_rare_ones_are_other(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    answer = figures.metadata_calls(axis)
    width = axis.bucket_us(figures.HEAT_BUCKETS)
    starts: dict[tuple[str, int], int] = defaultdict(int)
    for event in events:
        if event["kind"] == "metadata":
            starts[event["run"], since(event, axis) // width * width] += 1
    found: dict[tuple[Any, Any], int] = defaultdict(int)
    for row in records(answer):
        found[row["run"], row["since_start_us"]] += row["num_calls"]
    assert found == starts
    operations = {row["op"] for row in records(answer)}
    assert len(operations) == figures.MOST_OPERATIONS + 1
    assert "other" in operations


def test_bars_hold_every_event_within_their_ends(events: list[Event], study: Study, axis: TimeAxis) -> None:
    bars = records(figures.call_bars(placed(study)))
    drawn = [event for event in events if event["kind"] != "app"]
    assert sum(bar["num_events"] for bar in bars) == len(drawn)
    assert sum(bar["sum_us"] for bar in bars) == sum(event["dur_us"] for event in drawn)
    for event in drawn:
        lane = (event["run"], event["host"], event["pid"], event["tid"], event["kind"])
        begin = since(event, axis)
        assert any(
            (bar["run"], bar["host"], bar["pid"], bar["tid"], bar["kind"]) == lane
            and bar["since_start_us"] <= begin
            and begin + event["dur_us"] <= bar["until_us"]
            for bar in bars
        )


def test_too_many_events_become_fewer_bars_and_the_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MOST_BARS", 200)
    events = make_events(3000, span_us=400_000)
    with small_study(plain(events), runs=RUNS) as study:
        answer = figures.call_bars(placed(study))
    assert len(answer.rows) <= 200
    drawn = sum(event["kind"] != "app" for event in events)
    assert sum(row["num_events"] for row in records(answer)) == drawn
    assert "events as" in answer.notes[0]
    assert "apart share one" in answer.notes[0]


def test_each_lane_keeps_a_bar_of_each_kind_however_few_are_wanted(
    events: list[Event], study: Study, axis: TimeAxis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_BARS", 1)
    rows = records(figures.call_bars(placed(study)))
    lanes = [(row["run"], row["host"], row["pid"], row["tid"], row["kind"]) for row in rows]
    assert len(lanes) == len(set(lanes))
    assert set(lanes) == {
        (e["run"], e["host"], e["pid"], e["tid"], e["kind"]) for e in events if e["kind"] != "app"
    }


def test_more_threads_than_lanes_become_processes_and_then_the_busiest() -> None:
    def write(pid: int, tid: int, dur_us: int) -> dict[str, Any]:
        return {"run": "base", "host": "n", "pid": pid, "tid": tid, "name": "write", "path": "/fast/x",
                "ts_us": tid, "dur_us": dur_us, "size_bytes": 1}  # fmt: skip

    of_threads = [write(pid, tid, 5) for pid in range(4) for tid in range(30)]
    with small_study(of_threads, runs=["base"]) as study:
        answer = figures.call_bars(placed(study))
    assert {row["pid"] for row in records(answer)} == {0, 1, 2, 3}
    assert "4 processes" in answer.notes[0]
    of_processes = [write(pid, tid, pid) for pid in range(1, 61) for tid in range(2)]
    with small_study(of_processes, runs=["base"]) as study:
        answer = figures.call_bars(placed(study))
    assert {row["pid"] for row in records(answer)} == set(range(61 - figures.MOST_LANES, 61))
    assert f"the {figures.MOST_LANES} of 60 processes with the most I/O" in answer.notes[0]


def loop_spans(num_steps: int, step_us: int) -> list[dict[str, Any]]:
    """Steps that follow one another, each with a wait and a barrier, then a stall around a checkpoint."""
    parts = (
        ("train.step", "step", 0, step_us),
        ("train.wait", "wait", 0, step_us // 4),
        ("train.compute", "compute", step_us // 4, step_us // 2),
        ("train.barrier", "barrier", step_us * 3 // 4, step_us // 4),
    )
    end_us = num_steps * step_us
    spans = [
        *(
            (name, cat, at + begin, took)
            for at in range(0, end_us, step_us)
            for name, cat, begin, took in parts
        ),
        ("stall", "stall", end_us, 900),
        ("checkpoint.save", "checkpoint", end_us + 100, 700),
        ("epoch", "epoch", 0, end_us + 900),
        ("reader.next", "reader", 0, 5),
    ]
    return [
        {"run": "base", "host": "n", "pid": 7, "tid": 7, "rank": 0, "name": name, "cat": cat,
         "ts_us": 10**15 + begin, "dur_us": took}
        for name, cat, begin, took in spans
    ]  # fmt: skip


def test_steps_waits_barriers_and_checkpoints_of_a_loop_are_bars_of_its_thread() -> None:
    with small_study(loop_spans(10, 10_000), runs=["base"]) as study:
        rows = records(figures.call_bars(placed(study)))
    assert {row["tid"] for row in rows} == {7}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        sums[row["kind"]][0] += 1
        sums[row["kind"]][1] += row["sum_us"]
    assert sums == {
        "step": [10, 100_000], "wait": [10, 25_000], "compute": [10, 50_000], "barrier": [10, 25_000],
        "checkpoint": [1, 1600],
    }  # fmt: skip
    assert [row["since_start_us"] for row in rows if row["kind"] == "step"] == list(range(0, 100_000, 10_000))


def test_steps_too_narrow_to_be_told_apart_are_one_bar() -> None:
    with small_study(loop_spans(1000, 40), runs=["base"]) as study:
        rows = records(figures.call_bars(placed(study)))
    (steps,) = [row for row in rows if row["kind"] == "step"]
    assert (steps["num_events"], steps["sum_us"], steps["until_us"]) == (1000, 40_000, 40_000)


def test_spans_of_a_loop_are_no_calls_in_other_figures() -> None:
    with small_study(loop_spans(10, 10_000), runs=["base"]) as study:
        axis = placed(study)
        assert figures.rank_cells(axis).rows == []
        overlap = records(figures.overlap_lanes(axis))
    assert sum(row["compute_us"] for row in overlap) == 50_000
    assert sum(row["io_us"] for row in overlap) == 0


def test_offsets_of_the_busiest_files_hold_all_their_bytes(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    rows = records(figures.file_offsets(axis))
    for run in axis.runs:
        totals: dict[str, int] = defaultdict(int)
        ends: dict[str, int] = defaultdict(int)
        for event in events:
            if event["run"] == run and event["offset"] is not None and event["size_bytes"]:
                totals[event["path"]] += event["size_bytes"]
                ends[event["path"]] = max(ends[event["path"]], event["offset"] + event["size_bytes"])
        busiest = largest(totals, figures.MOST_OFFSET_FILES)
        found: dict[Any, int] = defaultdict(int)
        for row in rows:
            if row["run"] == run:
                found[row["path"]] += row["moved_bytes"]
                assert 0 <= row["from_bytes"] < row["to_bytes"] <= row["length_bytes"] == ends[row["path"]]
        assert found == {path: totals[path] for path in busiest}


def test_every_transfer_is_in_the_bin_of_its_size(events: list[Event], study: Study) -> None:
    rows = records(figures.size_bins(study.events))
    moving = [event for event in events if event["size_bytes"] is not None]
    assert sum(row["num_calls"] for row in rows) == len(moving)
    for row in rows:
        own = [
            event["size_bytes"]
            for event in moving
            if (event["run"], event["kind"]) == (row["run"], row["kind"])
            and row["from_bytes"] <= event["size_bytes"] < row["to_bytes"]
        ]
        assert (row["num_calls"], row["total_bytes"]) == (len(own), sum(own))


@pytest.mark.parametrize("power", [0, 1, 10, 20, 32, 40])
def test_a_power_of_two_begins_a_bin_and_one_byte_less_ends_the_one_before(power: int) -> None:
    sizes = [2**power - 1, 2**power]
    events = [{"run": "base", "name": "write", "path": "/fast/x", "size_bytes": size} for size in sizes]
    with small_study(events, runs=["base"]) as study:
        rows = records(figures.size_bins(study.events))
    below = 2 ** (power - 1) if power else 0
    assert [(row["from_bytes"], row["to_bytes"]) for row in rows] == [
        (below, 2**power),
        (2**power, 2 ** (power + 1)),
    ]


def test_every_call_is_in_the_bin_of_its_duration(events: list[Event], study: Study) -> None:
    rows = records(figures.latency_bins(study.events))
    timed = [event for event in events if is_io(event)]
    assert sum(row["num_calls"] for row in rows) == len(timed)
    for row in rows:
        own = [
            event["dur_us"]
            for event in timed
            if (event["run"], event["kind"]) == (row["run"], row["kind"])
            and row["from_us"] <= event["dur_us"] < row["to_us"]
        ]
        assert (row["num_calls"], row["sum_us"]) == (len(own), sum(own))


@pytest.mark.parametrize("edge", [1, 2, 5, 10, 1000, 5 * 10**5, 10**9, 2 * 10**10])
def test_durations_at_an_edge_begin_a_bin(edge: int) -> None:
    events = [{"run": "base", "name": "open", "path": "/fast/x", "dur_us": dur} for dur in (edge - 1, edge)]
    with small_study(events, runs=["base"]) as study:
        rows = records(figures.latency_bins(study.events))
    assert [row["from_us"] for row in rows][1] == edge
    assert rows[0]["to_us"] == edge


def test_files_are_those_with_most_bytes_or_time_and_their_time_is_a_union(
    events: list[Event], study: Study, axis: TimeAxis
) -> None:
    rows = records(figures.busiest_files(study.events))
    for run in axis.runs:
        moved: dict[str, int] = defaultdict(int)
        took: dict[str, int] = defaultdict(int)
        for event in events:
            if event["run"] == run and event["path"]:
                moved[event["path"]] += event["size_bytes"] or 0
                took[event["path"]] += event["dur_us"]
        most = {path for sums in (moved, took) for path in largest(sums, figures.MOST_FILES)}
        assert {row["path"] for row in rows if row["run"] == run} == most
    for row in rows:
        own = [event for event in events if (event["run"], event["path"]) == (row["run"], row["path"])]
        assert row["num_calls"] == len(own)
        assert row["read_bytes"] == sum(e["size_bytes"] for e in own if e["kind"] == "read")
        assert row["written_bytes"] == sum(e["size_bytes"] for e in own if e["kind"] == "write")
        assert row["sum_us"] == sum(event["dur_us"] for event in own)
        assert row["union_us"] == len(busy_moments(own, axis))


def test_operations_have_their_median_and_their_longest_call(events: list[Event], study: Study) -> None:
    rows = records(figures.operations(study.events))
    assert sum(row["num_calls"] for row in rows) == sum(map(is_io, events))
    (found,) = [row for row in rows if (row["run"], row["op"]) == ("base", "pwritev")]
    durations = sorted(e["dur_us"] for e in events if (e["run"], e["name"]) == ("base", "pwritev2"))
    assert found["max_us"] == durations[-1]
    assert found["kind"] == "write"


def test_runs_without_any_event_have_figures_without_rows() -> None:
    with small_study([], runs=["base"]) as study:
        axis = placed(study)
        for of_calls in (figures.rank_cells, figures.overlap_lanes, figures.call_bars):
            assert of_calls(axis).rows == []
        for ask in (figures.bandwidth, figures.metadata_calls, figures.file_offsets):
            assert ask(axis).rows == []
