import json
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.trace_files import Writing, make_events, write_trace

from penstock.trace.event_schema import SCHEMA, FileAccount, TraceFile, canonical
from penstock.trace.trace_set import read_trace_file


def read(path: Path, *, query_lines: int = 0) -> tuple[pa.Table, FileAccount]:
    reading = read_trace_file(TraceFile(path=path, run="base"), query_lines=query_lines)
    table = pa.Table.from_batches(list(reading.batches))
    account = reading.account
    parts = account.events + account.salvaged + account.metadata + account.blank + account.dropped
    assert account.lines == parts
    assert table.num_rows == account.events + account.salvaged
    return table, account


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_every_generation_has_the_same_events(generation: int, *, compressed: bool, tmp_path: Path) -> None:
    writing = Writing(generation=generation, events=700, rank=11)
    table, account = read(write_trace(tmp_path, writing, compressed=compressed))
    rows = [row for row in table.to_pylist() if row["name"] != "end"]
    expected = list(make_events(writing))
    assert account.is_whole
    assert len(rows) == len(expected)
    for row, event in zip(rows, expected, strict=True):
        ret = None if generation == 3 and event.name == "open64" else event.ret
        told = (
            row["ts_us"],
            row["dur_us"],
            row["name"],
            row["cat"],
            row["path"],
            row["size_bytes"],
            row["ret"],
        )
        assert told == (event.ts_us, event.dur_us, event.name, event.cat, event.path, event.size_bytes, ret)
        assert row["end_us"] == event.ts_us + event.dur_us
        assert row["op"] == canonical(event.name)
        assert (row["step"], row["rank"], row["host"], row["run"]) == (event.step, 11, "node1", "base")
        assert json.loads(row["args"]).keys() <= {"flags", "mode", "count", "fd", "p_idx", "level"}


def test_the_columns_are_those_of_the_waist(tmp_path: Path) -> None:
    table, _ = read(write_trace(tmp_path, Writing(events=3)))
    assert table.schema.names == SCHEMA.names


def test_a_page_that_fills_every_store_loses_nothing(tmp_path: Path) -> None:
    writing = Writing(events=150_000, files=9_000)
    table, account = read(write_trace(tmp_path, writing))
    assert account.events == 150_001
    assert account.announced_events == 150_000
    assert table["path"].combine_chunks().unique().drop_null().to_pylist().__len__() <= 9_000
    assert pa.compute.sum(table["dur_us"]).as_py() == sum(event.dur_us for event in make_events(writing))
