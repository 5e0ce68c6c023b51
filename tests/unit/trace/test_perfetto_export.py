"""Exports are valid JSON of complete events, for any path."""

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.support.trace_events import events_table

from penstock.errors import StorageError
from penstock.progress import Progress
from penstock.trace.dimensions import Dimensions, view_events
from penstock.trace.perfetto_export import export_perfetto

ROWS = [
    {"name": "write", "ts_us": 5, "dur_us": 3, "pid": 1, "tid": 7, "rank": 0, "host": "a", "size_bytes": 9,
     "path": '/d/"quoted"\n\x01', "args": '{"flags": 66}', "run": "r"},
    {"name": "read", "ts_us": 8, "dur_us": 1, "pid": 1, "tid": 7, "rank": 1, "host": "b", "run": "r"},
]  # fmt: skip


def exported(rows: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        events = view_events(connection, "events", Dimensions())
        assert export_perfetto(events, path, progress=Progress()) == len(rows)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document: dict[str, Any] = json.loads(raw)
    return document


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_events_keep_times_sizes_and_arguments(tmp_path: Path, name: str) -> None:
    events = exported(ROWS, tmp_path / name)["traceEvents"]
    write = next(each for each in events if each["name"] == "write")
    assert (write["ph"], write["ts"], write["dur"], write["tid"]) == ("X", 5, 3, 7)
    assert write["args"] == {"flags": 66, "path": '/d/"quoted"\n\x01', "size_bytes": 9}


def test_the_same_pid_on_two_hosts_is_two_processes_with_names(tmp_path: Path) -> None:
    events = exported(ROWS, tmp_path / "t.json")["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    assert sorted(names.values()) == ["r rank 0 on a", "r rank 1 on b"]
    assert {each["pid"] for each in events if each["ph"] == "X"} == set(names)


def test_a_trace_without_events_is_still_a_document(tmp_path: Path) -> None:
    assert exported([], tmp_path / "t.json") == {"displayTimeUnit": "ms", "traceEvents": []}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match="taken"):
        exported(ROWS, tmp_path / "taken" / "t.json")
