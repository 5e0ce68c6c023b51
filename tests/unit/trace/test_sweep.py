"""The sweep over batches gives what counting every microsecond gives, for any keys and sets."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trace_events import events_table

from penstock.trace import sweep
from penstock.trace.lens import Lens
from penstock.trace.questions.base import through_lens
from penstock.trace.sweep import Unions, unions

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
        events = through_lens(connection, "events", Lens())
        found = unions(events, by, first="cat = 'POSIX'", second="cat = 'compute'")
    named = [{"run": "run", "tier": None, **row} for row in rows]
    for key in {tuple(row[name] for name in by) for row in named}:
        group = [row for row in named if tuple(row[name] for name in by) == key]
        expected = Unions(
            len(covered(group, "POSIX")),
            len(covered(group, "compute")),
            len(covered(group, "POSIX", "compute")),
        )
        assert found.get(key, sweep.NOTHING) == expected


def test_groups_keep_their_numbers_from_batch_to_batch_however_many_they_become() -> None:
    groups = sweep._Groups(2)
    first = [pa.array(["x", None]), pa.array([1, 1])]
    assert groups.codes(first, 2).tolist() == [0, 1]
    many = [pa.array([f"n{number}" for number in range(100)] + ["x"]), pa.array([7] * 100 + [1])]
    codes = groups.codes(many, 101)
    assert codes.tolist() == [*range(2, 102), 0]
    assert len(groups.total) >= len(groups) == 102
    assert groups.key(1) == (None, 1)
    assert groups.key(101) == ("n99", 7)
