from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.trace.event_table import sorted_tables
from penstock.trace.reading.event_batch import BATCH_SCHEMA, EventOrigin, FileContext, build_batch

if TYPE_CHECKING:
    import pyarrow as pa

ORIGIN = EventOrigin("r", "f")


def batches(times: list[int], size: int) -> list[pa.RecordBatch]:
    rows = [
        {
            "ts_us": ts,
            "dur_us": 1,
            "name": "read",
            "cat": "POSIX",
            "pid": 1,
            "tid": 1,
            "args": "{}",
            "ret": number,
        }
        for number, ts in enumerate(times)
    ]
    return [build_batch(rows[at : at + size], ORIGIN, FileContext()) for at in range(0, len(rows), size)]


@pytest.mark.parametrize("limit", [7, 40, 1000])
@pytest.mark.parametrize(
    "shape", ["in order", "nearly in order", "one late", "at random", "backwards", "at once"]
)
def test_events_come_in_the_order_of_time_and_ties_in_that_of_lines(
    shape: str, limit: int, tmp_path: Path
) -> None:
    draw = random.Random(5)
    times = {
        "in order": list(range(300)),
        "nearly in order": [number + draw.randrange(6) for number in range(300)],
        "one late": [*range(1, 300), 0],
        "at random": [draw.randrange(100) for _ in range(300)],
        "backwards": list(range(300, 0, -1)),
        "at once": [5] * 300,
    }[shape]
    tables = list(sorted_tables(iter(batches(times, 13)), tmp_path, limit))
    rows = [row for table in tables for row in table.to_pylist()]
    assert [(row["ts_us"], row["ret"]) for row in rows] == sorted(
        (ts, number) for number, ts in enumerate(times)
    )
    assert {row["op"] for row in rows} == {"read"}
    assert list(tmp_path.glob("run-*")) == []


def test_a_file_without_events_has_no_table(tmp_path: Path) -> None:
    assert list(sorted_tables(iter([]), tmp_path, 10)) == []


def test_batches_have_the_columns_of_events() -> None:
    assert batches([1], 1)[0].schema.equals(BATCH_SCHEMA)
