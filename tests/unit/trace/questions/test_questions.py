"""Each question on a few events with obvious answers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import duckdb
import pytest
from tests.support.trace_events import events_table

from penstock.errors import UsageError
from penstock.trace.dimensions import Dimensions, EventsView, view_events
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.answer import Answer, as_records
from penstock.trace.questions.breakdowns import (
    BREAKDOWNS,
    break_down,
    file_events,
    overlap,
    ranks,
    sizes,
    summary,
    timeline,
)

A, B = {"rank": 0, "host": "a"}, {"rank": 1, "host": "b", "pid": 2}
F, G = "/fast/f-1.pt", "/slow/g-2.pt"
ROWS: list[dict[str, Any]] = [
    {"name": "TorchFramework.compute", "cat": "ai", "ts_us": 0, "dur_us": 100, **A},
    {"name": "open64", "ts_us": 90, "dur_us": 10, "path": F, **A},
    {"name": "write", "ts_us": 100, "dur_us": 50, "path": F, "size_bytes": 1000, **A},
    {"name": "write", "ts_us": 120, "dur_us": 50, "path": F, "size_bytes": 3000, "tid": 2, **A},
    {"name": "read", "ts_us": 100, "dur_us": 400, "path": G, "size_bytes": 400, **B},
    {"name": "close", "ts_us": 500, "dur_us": 0, "path": G, **B},
]


@pytest.fixture
def events() -> Iterator[EventsView]:
    with duckdb.connect() as connection:
        connection.register("events", events_table(ROWS))
        dimensions = Dimensions(tiers={"fast": ["/fast"], "slow": ["/slow"]})
        yield view_events(connection, "events", dimensions)


@pytest.fixture
def nothing() -> Iterator[EventsView]:
    with duckdb.connect() as connection:
        connection.register("events", events_table([]))
        yield view_events(connection, "events", Dimensions())


def only_row(answer: Answer, **match: Any) -> Mapping[str, Any]:
    (row,) = [row for row in answer.records() if all(row[key] == value for key, value in match.items())]
    return row


def test_overlap_has_union_sum_concurrency_and_compute_time(events: EventsView) -> None:
    row = only_row(overlap(events), pid=1)
    assert (row["union_us"], row["sum_us"], row["concurrency"]) == (80, 110, 110 / 80)
    assert (row["compute_us"], row["overlap_us"]) == (100, 10)
    assert (row["io_alone_us"], row["compute_alone_us"]) == (70, 90)
    idle = only_row(overlap(events), pid=2)
    assert (idle["union_us"], idle["sum_us"], idle["overlap_us"], idle["io_alone_us"]) == (400, 400, 0, 400)


def test_overlap_groups_by_any_columns_of_events(events: EventsView) -> None:
    assert [row["host"] for row in overlap(events, by=("host",)).records()] == ["a", "b"]
    assert [row["tid"] for row in overlap(events, by=("pid", "tid")).records()] == [1, 2, 1]
    with pytest.raises(UsageError, match="rank"):
        overlap(events, by=("rnak",))


def test_a_phase_that_no_event_is_of_is_refused_with_those_there_are(events: EventsView) -> None:
    assert only_row(overlap(events, of="all"), pid=2)["sum_us"] == 400
    with pytest.raises(UsageError, match="Phases of these traces: compute, io"):
        overlap(events, of="i'o")


def test_process_that_only_computes_has_a_row(events: EventsView) -> None:
    events.connection.register("events", events_table(ROWS[:1]))
    answer = overlap(view_events(events.connection, "events", Dimensions()))
    (row,) = answer.records()
    assert (row["num_events"], row["union_us"], row["sum_us"], row["concurrency"]) == (0, 0, 0, None)
    assert (row["compute_us"], row["compute_alone_us"]) == (100, 100)


def test_without_io_the_spans_of_an_application_count_and_annotations_do_not(nothing: EventsView) -> None:
    rows = [
        {"name": "ProfilerStep#1", "cat": "user_annotation", "dur_us": 500},
        {"name": "NPZReader.open", "cat": "reader", "dur_us": 30},
        {"name": "gemm", "cat": "kernel", "ts_us": 20, "dur_us": 40},
    ]
    nothing.connection.register("events", events_table(rows))
    answer = overlap(view_events(nothing.connection, "events", Dimensions()))
    (row,) = answer.records()
    assert (row["num_events"], row["union_us"], row["compute_us"], row["overlap_us"]) == (1, 30, 40, 10)
    assert answer.notes == [
        "No event has the phase io: the application's own spans of I/O (app_io) count, if any."
    ]


def test_processes_without_ranks_in_one_row_are_noted(nothing: EventsView) -> None:
    nothing.connection.register("events", events_table([{"dur_us": 5, "pid": pid} for pid in (1, 2)]))
    events = view_events(nothing.connection, "events", Dimensions())
    assert overlap(events, by=("rank",)).notes == [
        "2 processes have no rank and are counted as one: --by pid shows them apart."
    ]
    assert overlap(events, by=("pid",)).notes == []


def test_the_summary_counts_and_measures(events: EventsView) -> None:
    facts, functions = summary(events)
    row = facts.records()[0]
    assert (row["num_hosts"], row["num_ranks"], row["num_files"], row["num_events"]) == (2, 2, 2, 6)
    assert (row["span_us"], row["moved_bytes"], row["compute_union_us"]) == (500, 4400, 100)
    assert (row["io_union_us"], row["io_sum_us"], row["overlap_us"]) == (410, 510, 10)
    assert "overlap over all processes s" in as_records(facts)[0]
    write = only_row(functions, op="write")
    assert (write["min_bytes"], write["median_bytes"], write["max_bytes"]) == (1000, 2000, 3000)


def test_rows_that_nobody_sees_are_only_counted(events: EventsView) -> None:
    def ask(events: EventsView) -> list[Answer]:
        return [
            break_down(events, "files", by=["path"]),
            break_down(events, "ops", by=["host", "op"]),
            summary(events)[1],
            *sizes(events, by=("size_bytes",)),
            file_events(events, F),
        ]

    for shown, whole in zip(ask(replace(events, most_rows=1)), ask(events), strict=True):
        assert (shown.rows, shown.num_left_out) == (whole.rows[:1], len(whole.rows) - 1)
        assert len(whole.rows) > 1
    limited = break_down(replace(events, most_rows=1), "ops", by=["op"], top=2)
    assert (len(limited.rows), limited.num_left_out) == (1, 1)


def test_operations_files_and_classes_have_calls_bytes_and_times(events: EventsView) -> None:
    write = only_row(break_down(events, "ops", by=["tier", "op"]), op="write")
    assert (write["tier"], write["num_events"], write["written_bytes"]) == ("fast", 2, 4000)
    assert (write["sum_us"], write["union_us"], write["max_us"]) == (100, 70, 50)
    assert [row["path"] for row in break_down(events, "files", by=["path"]).records()] == [
        "/slow/g-2.pt",
        "/fast/f-1.pt",
    ]
    assert len(break_down(events, "files", by=["path"], top=1).rows) == 1
    assert (
        only_row(break_down(events, "classes", by=["file_class", "op"]), file_class="f.pt", op="open")[
            "num_files"
        ]
        == 1
    )


def test_sizes_are_described_exactly_and_counted(events: EventsView) -> None:
    described, counted = sizes(events)
    assert only_row(described, op="write")["p25_bytes"] == 1500
    assert counted.records()[1] == {"op": "write", "size_bytes": 1000, "num_events": 1}
    assert [row["op"] for row in sizes(events, top=1)[1].records()] == ["read", "write"]


def test_a_file_is_named_by_its_end_and_its_events_come_in_order(events: EventsView) -> None:
    answer = file_events(events, "f-1.pt")
    assert answer.title == "/fast/f-1.pt"
    assert [row["name"] for row in answer.records()] == ["open64", "write", "write"]
    assert answer.records()[0]["since_start_us"] == 90


def test_a_file_that_no_event_names_gets_the_nearest_name(events: EventsView, nothing: EventsView) -> None:
    with pytest.raises(UsageError, match=r"nearest name is /fast/f-1\.pt"):
        file_events(events, "/fast/f-2.pt")
    with pytest.raises(UsageError, match="names no files"):
        file_events(nothing, "x")


def test_an_end_that_several_files_share_is_refused_with_their_names(events: EventsView) -> None:
    both = events.connection
    both.register("events", events_table([{"path": "/a/x"}, {"path": "/b/x"}]))
    with pytest.raises(UsageError, match="/a/x, /b/x"):
        file_events(view_events(both, "events", Dimensions()), "x")


def test_a_rank_that_is_busy_much_longer_than_the_median_is_a_straggler(events: EventsView) -> None:
    found = {row["rank"]: row for row in ranks(events).records()}
    assert found[1]["is_straggler"]
    assert not found[0]["is_straggler"]
    assert found[1]["to_median"] == 400 / 240


@pytest.mark.parametrize(
    ("slow_us", "work", "is_straggler"),
    [(200, 2, False), (200, 1, True), (400, 2, True), (120, 1, False), (200, 0.5, True)],
)
@pytest.mark.parametrize("name", ["write", "open64"])
def test_a_straggler_takes_longer_than_its_bytes_or_its_calls_explain(
    nothing: EventsView, name: str, slow_us: int, work: float, *, is_straggler: bool
) -> None:
    calls = [
        {"name": name, "pid": rank, "rank": rank, "ts_us": call * took, "dur_us": took,
         "size_bytes": 1000 if name == "write" else None}
        for rank in range(5)
        for number in (round(10 * (work if rank == 2 else 1)),)
        for took in ((10 * slow_us if rank == 2 else 1000) // number,)
        for call in range(number)
    ]  # fmt: skip
    nothing.connection.register("events", events_table(calls))
    found = ranks(view_events(nothing.connection, "events", Dimensions())).records()
    assert [row["is_straggler"] for row in found] == [False, False, is_straggler, False, False]
    assert found[2]["work_to_median"] == work
    assert found[2]["to_median"] == slow_us / 100


def test_sums_of_all_ranks_are_no_process_and_no_straggler(nothing: EventsView) -> None:
    """Darshan has files that ranks share as sums only, and says no rank of them."""
    calls = [
        {"pid": pid, "tid": pid, "rank": rank, "ts_us": 0, "dur_us": took}
        for pid, rank, took in ((ALL_RANKS, None, 900), (0, 0, 10), (1, 1, 12))
    ]
    nothing.connection.register("events", events_table(calls))
    events = view_events(nothing.connection, "events", Dimensions())
    found = ranks(events)
    assert [row["to_median"] for row in found.records()] == [None, 10 / 11, 12 / 11]
    assert not any(row["is_straggler"] for row in found.records())
    assert "sums over all ranks" in found.notes[-1]
    [facts] = summary(events)[0].records()
    assert (facts["num_processes"], facts["num_threads"]) == (2, 2)


def test_a_timeline_shares_long_events_out_to_their_buckets(events: EventsView) -> None:
    answer = timeline(events, bucket_us=100)
    slow = [row for row in answer.records() if row["tier"] == "slow"]
    assert [row["since_start_us"] for row in slow] == [100, 200, 300, 400, 500]
    assert [row["read_bytes"] for row in slow] == [100, 100, 100, 100, 0]
    assert [row["num_started"] for row in slow] == [1, 0, 0, 0, 1]
    fast = [row for row in answer.records() if row["tier"] == "fast"]
    assert (fast[1]["concurrency"], fast[1]["busy_share"]) == (1.0, 0.7)


def test_a_timeline_of_too_many_buckets_is_refused() -> None:
    with duckdb.connect() as connection:
        connection.register("events", events_table([{"ts_us": 0}, {"ts_us": 100_000}]))
        assert len(timeline(view_events(connection, "events", Dimensions()), bucket_us=1).rows) == 2
        connection.register("events", events_table([{"ts_us": 0}, {"ts_us": 100_001}]))
        with pytest.raises(UsageError, match="larger"):
            timeline(view_events(connection, "events", Dimensions()), bucket_us=1)


@pytest.mark.parametrize(("span_us", "width"), [(25_000, "0.0005 s"), (150_000, "0.002 s")])
def test_a_timeline_has_a_hundred_round_buckets_however_long_it_is(
    nothing: EventsView, span_us: int, width: str
) -> None:
    calls = [{"path": "/a", "ts_us": at, "dur_us": 1, "size_bytes": 1} for at in (0, span_us)]
    nothing.connection.register("events", events_table(calls))
    assert width in timeline(view_events(nothing.connection, "events", Dimensions())).notes[0]


def test_a_timeline_finds_a_round_width_for_itself(events: EventsView) -> None:
    assert "0.000005 s" in timeline(events).notes[0] or "5e-06 s" in timeline(events).notes[0]


def test_every_question_answers_a_trace_without_events(nothing: EventsView) -> None:
    answers = [
        overlap(nothing),
        *summary(nothing),
        *(break_down(nothing, name, by=["path"]) for name in BREAKDOWNS),
        ranks(nothing),
    ]
    answers += [*sizes(nothing), timeline(nothing)]
    assert [answer.rows for answer in answers if answer.name != "facts"] == [[]] * (len(answers) - 1)


def test_calls_of_mpi_do_not_count_beside_those_below_them() -> None:
    read = {"name": "read", "path": F, "size_bytes": 1000, "dur_us": 10}
    with duckdb.connect() as connection:
        connection.register("events", events_table([read, {**read, "cat": "MPIIO"}]))
        answer = break_down(view_events(connection, "events", Dimensions()), "files", by=["path"])
    assert only_row(answer, path=F)["read_bytes"] == 1000


def test_ranks_are_as_many_as_a_sum_says() -> None:
    """Darshan has files that all ranks share as one sum."""
    shared = {"pid": ALL_RANKS, "args": '{"is_sum":true,"calls":9,"num_ranks":512}'}
    with duckdb.connect() as connection:
        connection.register("events", events_table([shared, ROWS[-1]]))
        facts, _ = summary(view_events(connection, "events", Dimensions()))
    assert only_row(facts)["num_ranks"] == 512
