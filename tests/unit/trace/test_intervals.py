"""Unions and overlaps against counting every microsecond, in numpy and in SQL."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trace.intervals import (
    concurrency_steps,
    measures_sql,
    merged,
    overlap_us,
    union_us,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)
KEYED = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=20)


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for start, length in spans for moment in range(start, start + length)}


def edges(spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    return starts, starts + np.array([length for _, length in spans], dtype=np.int64)


@given(SPANS)
@settings(max_examples=50)
def test_a_union_counts_each_microsecond_once(spans: list[tuple[int, int]]) -> None:
    assert union_us(*edges(spans)) == len(covered(spans))


@given(SPANS)
@settings(max_examples=50)
def test_merged_intervals_are_disjoint_and_cover_the_same(spans: list[tuple[int, int]]) -> None:
    starts, ends = merged(*edges(spans))
    assert set().union(*(range(a, b) for a, b in zip(starts, ends, strict=True))) == covered(spans)
    assert all(starts[1:] > ends[:-1])


@given(SPANS, SPANS)
@settings(max_examples=50)
def test_an_overlap_is_what_both_cover(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    assert overlap_us(edges(one), edges(other)) == len(covered(one) & covered(other))


@given(SPANS)
@settings(max_examples=50)
def test_the_sweep_line_integrates_to_the_sum_of_durations(spans: list[tuple[int, int]]) -> None:
    times, under_way = concurrency_steps(*edges(spans))
    assert int((np.diff(times) * under_way[:-1]).sum()) == sum(length for _, length in spans)
    assert not len(under_way) or under_way[-1] == 0


@given(st.lists(KEYED, min_size=1, max_size=1))
@settings(max_examples=25)
def test_sql_measures_each_group_as_counting_does(batches: list[list[tuple[int, int, int]]]) -> None:
    rows = batches[0]
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
        found = connection.execute(measures_sql("events", ["pid"]) + " ORDER BY pid").fetchall()
    expected = []
    for pid in sorted({pid for pid, _, _ in rows}):
        spans = [(start, length) for key, start, length in rows if key == pid]
        total, union = sum(length for _, length in spans), len(covered(spans))
        expected.append((pid, len(spans), total, union, total / union if union else None))
    assert found == expected
