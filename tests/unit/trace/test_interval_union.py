"""Interval unions against counting every microsecond: the batch-wise sums, and the same in SQL."""

from __future__ import annotations

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
from penstock.trace.interval_union import NO_TIME, UnionTimes, union_sql, union_times
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


@pytest.mark.parametrize("by", [(), ("pid",), ("host", "pid"), ("run", "tier", "host", "pid")])
@given(rows=ROWS)
@settings(max_examples=15)
def test_each_group_has_the_unions_of_both_sets_and_of_either(
    by: tuple[str, ...], rows: list[dict[str, Any]]
) -> None:
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        events = view_events(connection, "events", Dimensions())
        unions = union_times(events, by, first="cat = 'POSIX'", second="cat = 'compute'")
    named = [{"run": "run", "tier": None, **row} for row in rows]
    for key in {tuple(row[name] for name in by) for row in named}:
        group = [row for row in named if tuple(row[name] for name in by) == key]
        expected = UnionTimes(
            len(covered(group, "POSIX")),
            len(covered(group, "compute")),
            len(covered(group, "POSIX", "compute")),
        )
        assert unions.get(key, NO_TIME) == expected


@given(rows=ROWS, batch_rows=st.sampled_from([1, 2, 7]))
def test_unions_do_not_depend_on_how_events_are_cut_into_batches(
    rows: list[dict[str, Any]], batch_rows: int
) -> None:
    groups = interval_union._Groups(1)
    ordered = sorted(rows, key=lambda row: row["ts_us"])
    for at in range(0, len(ordered), batch_rows):
        batch = ordered[at : at + batch_rows]
        codes = groups.encode([pa.array([row["pid"] for row in batch])], len(batch))
        starts = np.array([row["ts_us"] for row in batch], dtype=np.int64)
        lengths = np.array([row["dur_us"] for row in batch], dtype=np.int64)
        groups.add(codes, np.array([row["cat"] == "POSIX" for row in batch]) * 1, starts, starts + lengths)
    for code in range(len(groups)):
        group = [row for row in rows if (row["pid"],) == groups.key(code)]
        expected = [len(covered(group, "POSIX")), 0, len(covered(group, "POSIX", "compute", "other"))]
        assert groups.total[code].tolist() == expected


def test_clocks_that_are_centuries_apart_do_not_overflow() -> None:
    groups = interval_union._Groups(1)
    codes = groups.encode([pa.array([0, 1, 0, 1])], 4)
    starts = np.array([-(1 << 61), 0, 5, 1 << 61], dtype=np.int64)
    groups.add(codes, np.ones(4, dtype=np.int64), starts, starts + 10)
    assert groups.total.tolist()[:2] == [[20, 0, 20], [20, 0, 20]]


def test_groups_keep_their_numbers_from_batch_to_batch_however_many_they_become() -> None:
    groups = interval_union._Groups(2)
    first = [pa.array(["x", None]), pa.array([1, 1])]
    assert groups.encode(first, 2).tolist() == [0, 1]
    many = [pa.array([f"n{number}" for number in range(100)] + ["x"]), pa.array([7] * 100 + [1])]
    codes = groups.encode(many, 101)
    assert codes.tolist() == [*range(2, 102), 0]
    assert len(groups.total) >= len(groups) == 102
    assert groups.key(1) == (None, 1)
    assert groups.key(101) == ("n99", 7)


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
