"""Unions of intervals against counting every microsecond."""

from collections import Counter
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trace_events import events_table

from penstock.trace.dimensions import Dimensions, EventsView, view_events
from penstock.trace.questions import breakdowns as measuring
from penstock.trace.questions.breakdowns import measure_groups, timeline, union_in_buckets, union_times

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "ts_us": st.integers(0, 60),
            "dur_us": st.integers(0, 20),
            "pid": st.integers(0, 3),
            "host": st.sampled_from(["a", "b", None]),
            "cat": st.sampled_from(["POSIX", "compute", "other"]),
            "name": st.sampled_from(["read", "pwrite", "open"]),
            "size_bytes": st.sampled_from([None, 0, 8, 4096]),
        }
    ),
    max_size=25,
)


def covered(rows: list[dict[str, Any]], *cats: str) -> set[int]:
    return {
        moment
        for row in rows
        if row["cat"] in cats
        for moment in range(row["ts_us"], row["ts_us"] + row["dur_us"])
    }


def view(
    connection: duckdb.DuckDBPyConnection, rows: list[dict[str, Any]], *, is_ordered: bool
) -> EventsView:
    table = events_table(rows)
    connection.register(
        "events", table if is_ordered else table.take(pa.array(range(len(rows))[::-1], pa.int64()))
    )
    return view_events(connection, "events", Dimensions())


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("batch_rows", [2, 7, 1000])
@pytest.mark.parametrize("by", [(), ("pid",), ("run", "tier", "host", "pid")])
@given(rows=ROWS)
@settings(max_examples=15)
def test_each_group_has_the_unions_of_both_sets_and_of_either(
    by: tuple[str, ...], batch_rows: int, rows: list[dict[str, Any]], *, is_ordered: bool
) -> None:
    sets = ("cat = 'POSIX'", "cat = 'compute'", "cat IN ('POSIX', 'compute')")
    with pytest.MonkeyPatch.context() as patch, duckdb.connect() as connection:
        patch.setattr(measuring, "_BATCH_ROWS", batch_rows)
        unions = union_times(view(connection, rows, is_ordered=is_ordered), by, *sets)
    named = [{"run": "run", "tier": None, **row} for row in rows]
    for key in {tuple(row[name] for name in by) for row in named}:
        group = [row for row in named if tuple(row[name] for name in by) == key]
        expected = (
            len(covered(group, "POSIX")),
            len(covered(group, "compute")),
            len(covered(group, "POSIX", "compute")),
        )
        assert unions.get(key, (0, 0, 0)) == expected


@given(rows=ROWS)
@settings(max_examples=15)
def test_groups_have_counts_sums_and_concurrency(rows: list[dict[str, Any]]) -> None:
    with duckdb.connect() as connection:
        measured = measure_groups(view(connection, rows, is_ordered=True), ("pid",), where="true")
    expected = []
    for pid in sorted({row["pid"] for row in rows}):
        group = [row for row in rows if row["pid"] == pid]
        total, union = sum(row["dur_us"] for row in group), len(covered(group, "POSIX", "compute", "other"))
        expected.append((pid, len(group), total, union, total / union if union else None))
    assert sorted(measured) == expected


@pytest.mark.parametrize("is_ordered", [True, False])
@given(rows=ROWS, width_us=st.integers(1, 30))
@settings(max_examples=15)
def test_unions_by_bucket_divide_the_time_at_the_edges(
    rows: list[dict[str, Any]], width_us: int, *, is_ordered: bool
) -> None:
    origins = {0: 0, 1: -7, 2: -100, 3: 0}
    with duckdb.connect() as connection:
        events = view(connection, rows, is_ordered=is_ordered)
        busy = union_in_buckets(
            events, ("pid",), "cat = 'POSIX'", width_us=width_us, origin_of=lambda key: origins[key[0]]
        )
    expected: Counter[tuple[tuple[int], int]] = Counter()
    for pid, origin in origins.items():
        for moment in covered([row for row in rows if row["pid"] == pid], "POSIX"):
            expected[(pid,), (moment - origin) // width_us] += 1
    assert {bucket: total_us for bucket, (total_us,) in busy.items()} == expected


@given(rows=ROWS, width_us=st.integers(1, 30))
@settings(max_examples=15)
def test_a_timeline_divides_bytes_and_times_at_the_edges(rows: list[dict[str, Any]], width_us: int) -> None:
    with duckdb.connect() as connection:
        found: list[Any] = timeline(view(connection, rows, is_ordered=True), bucket_us=width_us).records()
    origin = min((row["ts_us"] for row in rows), default=0)
    expected: dict[int, list[float]] = {}
    for row in rows:
        if row["cat"] != "POSIX":
            continue
        begin_us, dur_us = row["ts_us"] - origin, row["dur_us"]
        expected.setdefault(begin_us // width_us, [0, 0, 0, 0])[0] += 1
        share = (row["size_bytes"] or 0) / max(dur_us, 1)
        of_kind = {"read": 1, "pwrite": 2}.get(row["name"])
        for moment in range(begin_us, begin_us + max(dur_us, 1)):
            counted = expected.setdefault(moment // width_us, [0, 0, 0, 0])
            counted[3] += min(dur_us, 1) / width_us
            if of_kind is not None:
                counted[of_kind] += share
    assert {
        row["since_start_us"] // width_us: [
            row["num_started"], row["read_bytes"], row["written_bytes"], row["concurrency"]
        ]
        for row in found
    } == {bucket: pytest.approx(one) for bucket, one in expected.items()}  # fmt: skip


def test_clocks_that_are_centuries_apart_do_not_overflow() -> None:
    starts = (-(1 << 61), 0, 5, 1 << 61)
    rows = [{"ts_us": start, "dur_us": 10, "pid": place % 2} for place, start in enumerate(starts)]
    with duckdb.connect() as connection:
        events = view(connection, rows, is_ordered=True)
        assert union_times(events, ("pid",), "true") == {(0,): (20,), (1,): (20,)}


def test_tables_that_follow_one_another_out_of_order_are_sorted() -> None:
    table = events_table([{"ts_us": start, "dur_us": 10} for start in (0, 5, 100)])
    with duckdb.connect() as connection:
        connection.register("events", pa.concat_tables([table.slice(1), table.slice(0, 1)]))
        events = view_events(connection, "events", Dimensions())
        assert union_times(events, (), "true", "dur_us > 50") == {(): (25, 0)}


def test_more_groups_than_16_bits_number() -> None:
    rows = [{"ts_us": number // 2, "dur_us": 3, "tid": number} for number in range(40_000)]
    with duckdb.connect() as connection:
        unions = union_times(view(connection, rows, is_ordered=True), ("tid",), "true")
    assert unions == {(number,): (3,) for number in range(40_000)}
