"""Interval unions against counting every microsecond: the batch-wise sums, and the same in SQL."""

from collections import Counter, defaultdict
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trace_events import events_table

from penstock.trace import interval_union
from penstock.trace.dimensions import Dimensions
from penstock.trace.interval_union import (
    NO_TIME,
    UnionTimes,
    overlap_times,
    union_sql,
    union_times,
)
from penstock.trace.questions.bucket_sums import sum_buckets
from penstock.trace.questions.events_view import view_events

KEYED = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=20)

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


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("by", [(), ("pid",), ("host", "pid"), ("run", "tier", "host", "pid")])
@given(rows=ROWS)
@settings(max_examples=15)
def test_each_group_has_the_unions_of_both_sets_and_of_either(
    by: tuple[str, ...], rows: list[dict[str, Any]], *, is_ordered: bool
) -> None:
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        events = view_events(connection, "events", Dimensions(), is_ordered=is_ordered)
        unions = overlap_times(events, by, first="cat = 'POSIX'", second="cat = 'compute'")
    named = [{"run": "run", "tier": None, **row} for row in rows]
    for key in {tuple(row[name] for name in by) for row in named}:
        group = [row for row in named if tuple(row[name] for name in by) == key]
        expected = UnionTimes(
            len(covered(group, "POSIX")),
            len(covered(group, "compute")),
            len(covered(group, "POSIX", "compute")),
        )
        assert unions.get(key, NO_TIME) == expected


@pytest.mark.parametrize("is_ordered", [True, False])
@given(rows=ROWS, width_us=st.integers(1, 30))
@settings(max_examples=15)
def test_unions_by_bucket_divide_the_time_at_the_edges(
    rows: list[dict[str, Any]], width_us: int, *, is_ordered: bool
) -> None:
    origins = {0: 0, 1: -7, 2: -100, 3: 0}
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        events = view_events(connection, "events", Dimensions(), is_ordered=is_ordered)
        sums = sum_buckets(
            events, ("pid",), "cat = 'POSIX'", width_us=width_us, origin_of=lambda key: origins[key[0]]
        )
    expected: Counter[tuple[int, int]] = Counter()
    for pid, origin in origins.items():
        for moment in covered([row for row in rows if row["pid"] == pid], "POSIX"):
            expected[pid, (moment - origin) // width_us] += 1
    busy = {bucket: of_bucket.busy_us for bucket, of_bucket in sums.items() if of_bucket.busy_us}
    assert busy == expected
    counted: defaultdict[tuple[int, int], list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        if row["cat"] == "POSIX":
            begin_us, dur_us = row["ts_us"] - origins[row["pid"]], row["dur_us"]
            counted[row["pid"], begin_us // width_us][0] += 1
            share = (row["size_bytes"] or 0) / max(dur_us, 1)
            of_kind = {"read": 2, "pwrite": 3}.get(row["name"])
            for moment in range(begin_us, begin_us + max(dur_us, 1)):
                counted[row["pid"], moment // width_us][1] += min(dur_us, 1)
                if of_kind is not None:
                    counted[row["pid"], moment // width_us][of_kind] += share
    assert {
        bucket: [one.num_started, one.inside_us, one.read_bytes, one.written_bytes]
        for bucket, one in sums.items()
    } == {bucket: pytest.approx(one) for bucket, one in counted.items()}


@pytest.mark.parametrize("where", ["pid <> 1", "dur_us > 5", "cat = 'POSIX' OR rank IS NULL"])
@given(rows=ROWS)
@settings(max_examples=15)
def test_a_scan_in_order_finds_the_unions_of_chosen_events_that_sorting_finds(
    where: str, rows: list[dict[str, Any]]
) -> None:
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        results = [
            union_times(
                view_events(connection, "events", Dimensions(), is_ordered=is_ordered).only(where),
                ("rank", "tid", "op"),
                "phase = 'io'",
                "pid = 2",
            )
            for is_ordered in (True, False)
        ]
    assert results[0] == results[1]


@given(rows=ROWS, batch_rows=st.sampled_from([1, 2, 7]))
def test_unions_do_not_depend_on_how_events_are_cut_into_batches(
    rows: list[dict[str, Any]], batch_rows: int
) -> None:
    sweep = interval_union.Sweep(4, 2)
    ordered = sorted(rows, key=lambda row: row["ts_us"])
    batches = [
        (
            np.array([row["pid"] for row in batch]),
            np.array([2 + (row["cat"] == "POSIX") for row in batch]),
            np.array([row["ts_us"] for row in batch]),
            np.array([row["ts_us"] + row["dur_us"] for row in batch]),
        )
        for at in range(0, len(ordered), batch_rows)
        for batch in [ordered[at : at + batch_rows]]
    ]
    assert sweep.add_all(iter(batches))
    for pid in range(4):
        group = [row for row in rows if row["pid"] == pid]
        expected = [len(covered(group, "POSIX")), len(covered(group, "POSIX", "compute", "other"))]
        assert sweep.total[pid].tolist() == expected


def test_clocks_that_are_centuries_apart_do_not_overflow() -> None:
    sweep = interval_union.Sweep(2, 1)
    starts = np.array([-(1 << 61), 0, 5, 1 << 61], dtype=np.int64)
    sweep.add(np.array([0, 1, 0, 1]), np.ones(4, dtype=np.int64), starts, starts + 10)
    assert sweep.total.tolist() == [[20], [20]]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_events_out_of_order_are_sorted_whatever_the_view_says(*, is_ordered: bool) -> None:
    rows = [{"ts_us": start, "dur_us": 10} for start in (0, 5, 100)]
    with duckdb.connect() as connection:
        table = events_table(rows)
        connection.register("events", pa.concat_tables([table.slice(1), table.slice(0, 1)]))
        events = view_events(connection, "events", Dimensions(), is_ordered=is_ordered)
        assert union_times(events, (), "true", "dur_us > 50") == {(): (25, 0)}


def test_more_groups_than_16_bits_number() -> None:
    rows = [{"ts_us": number // 2, "dur_us": 3, "tid": number} for number in range(40_000)]
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        unions = union_times(view_events(connection, "events", Dimensions()), ("tid",), "true")
    assert unions == {(number,): (3,) for number in range(40_000)}


@given(rows=KEYED)
def test_sql_measures_each_group_as_counting_does(rows: list[tuple[int, int, int]]) -> None:
    table = pa.table(
        {
            "pid": pa.array([pid for pid, _, _ in rows], pa.int64()),
            "ts_us": pa.array([start for _, start, _ in rows], pa.int64()),
            "dur_us": pa.array([length for _, _, length in rows], pa.int64()),
            "end_us": pa.array([start + length for _, start, length in rows], pa.int64()),
        }
    )
    with duckdb.connect() as connection:
        connection.register("events", table)
        measured = connection.execute(union_sql("events", ["pid"]) + " ORDER BY pid").fetchall()
    expected = []
    for pid in sorted({pid for pid, _, _ in rows}):
        spans = [(start, length) for key, start, length in rows if key == pid]
        total = sum(length for _, length in spans)
        union = len({moment for start, length in spans for moment in range(start, start + length)})
        expected.append((pid, len(spans), total, union, total / union if union else None))
    assert measured == expected
