"""Events of several files come out in the order of time, however they came in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.trace import event_store
from penstock.trace.event_schema import ALL_COLUMNS
from penstock.trace.event_store import TABLE_SCHEMA, EventStore
from penstock.trace.reading.event_batch import BATCH_SCHEMA, EventOrigin, FileContext, build_batch

if TYPE_CHECKING:
    import pyarrow as pa


def batches(times: list[int], size: int, file: str = "f", path: str | None = None) -> list[pa.RecordBatch]:
    rows = [
        {"ts_us": ts, "dur_us": 1, "name": "read", "cat": "POSIX", "pid": 1, "tid": 1, "args": "{}",
         "ret": number, "path": path}
        for number, ts in enumerate(times)
    ]  # fmt: skip
    origin = EventOrigin("r", file)
    return [build_batch(rows[at : at + size], origin, FileContext()) for at in range(0, len(rows), size)]


def rows_of(store: EventStore, slice_rows: int = 64) -> list[dict[str, Any]]:
    tables = list(store.tables(slice_rows))
    assert all(table.schema.equals(TABLE_SCHEMA) for table in tables)
    return [row for table in tables for row in table.to_pylist()]


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
    store = EventStore(ALL_COLUMNS, tmp_path, limit)
    for batch in batches(times, 13):
        store.add(0, batch)
    assert store.is_spilled is (limit < 300)
    rows = rows_of(store)
    assert [(row["ts_us"], row["ret"]) for row in rows] == sorted(
        (ts, number) for number, ts in enumerate(times)
    )
    assert {(row["op"], row["end_us"] - row["ts_us"]) for row in rows} == {("read", 1)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [50, 1000])
def test_events_of_files_are_merged_by_time_and_ties_by_the_files_order(limit: int, tmp_path: Path) -> None:
    store = EventStore(ALL_COLUMNS, tmp_path, limit)
    parts = [
        (number, batch)
        for number in (2, 0, 1)
        for batch in batches(list(range(number, 90, 2)), 7, f"f{number}", f"/data/{number}")
    ]
    random.Random(3).shuffle(parts)
    # Batches of one file come in its order, whatever those of others do between them.
    parts.sort(key=lambda part: part[1]["ts_us"][0].as_py())
    for number, batch in parts:
        store.add(number, batch)
    rows = rows_of(store)
    assert len(rows) == len(store) == 45 + 45 + 44
    assert [(row["ts_us"], row["file"]) for row in rows] == sorted(
        (row["ts_us"], row["file"]) for row in rows
    )
    assert all(row["path"] == f"/data/{row['file'][1:]}" for row in rows)
    assert len({(row["path_id"], row["path"]) for row in rows}) == 3


def test_only_the_wanted_columns_are_kept(tmp_path: Path) -> None:
    store = EventStore(frozenset(("ts_us", "op", "end_us")), tmp_path)
    store.add(0, batches([3, 1, 2], 3)[0])
    table = store.read_all()
    assert table.column_names == ["ts_us", "end_us", "op", "kind_id"]
    assert table["end_us"].to_pylist() == [2, 3, 4]


def test_combinations_beyond_64_bits_are_numbered_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_with(most_codes: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(event_store, "_MOST_CODES", most_codes)
        store = EventStore(ALL_COLUMNS, tmp_path)
        for number, batch in enumerate(batches(list(range(300)), 150, path="/data/a")):
            store.add(number, batch)
        return rows_of(store)

    assert read_with(1) == read_with(1 << 62)


def test_a_store_without_events_has_no_rows_but_all_columns(tmp_path: Path) -> None:
    store = EventStore(ALL_COLUMNS, tmp_path)
    assert list(store.tables()) == []
    assert store.read_all().schema.equals(TABLE_SCHEMA)


def test_batches_have_the_columns_of_events() -> None:
    assert batches([1], 1)[0].schema.equals(BATCH_SCHEMA)
