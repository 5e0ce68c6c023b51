from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.support.trace_files import Writing, write_trace

from penstock.errors import UsageError
from penstock.trace.reading.event_batch import BATCH_SCHEMA
from penstock.trace.reading.event_filter import ALL_EVENTS, NO_PREFILTER, EventFilter
from penstock.trace.reading.trace_file import TraceFile, read_matching_events

if TYPE_CHECKING:
    from penstock.trace.event_schema import FileAccount


def read(path: Path, selection: EventFilter) -> tuple[list[dict[str, Any]], FileAccount]:
    """Read a file with either scanner, which must keep and skip the same lines."""
    plain, account = read_once(path, selection, is_large=False)
    compiled, other = read_once(path, selection, is_large=True)
    assert sorted(compiled, key=str) == sorted(plain, key=str)
    assert other.document() == account.document()
    return plain, account


def read_once(
    path: Path, selection: EventFilter, *, is_large: bool
) -> tuple[list[dict[str, Any]], FileAccount]:
    with selection.open() as batch_filter:
        reading = read_matching_events(TraceFile(path=path), selection, batch_filter, is_large=is_large)
        rows = pa.Table.from_batches(list(reading.batches), BATCH_SCHEMA).to_pylist()
    account = reading.account
    taken = account.events + account.salvaged
    assert account.lines == taken + account.metadata + account.blank + account.dropped + account.skipped
    assert len(rows) == taken - account.unwanted
    return rows, account


@pytest.mark.parametrize(
    ("where", "holds", "is_searched"),
    [
        ("path LIKE '%/checkpoints/%'", lambda row: "/checkpoints/" in (row["path"] or ""), True),
        ("contains(path, 'img_000010')", lambda row: "img_000010" in (row["path"] or ""), True),
        (
            "op IN ('open', 'write') AND starts_with(path, '/p/lustre2')",
            lambda row: row["op"] in ("open", "write"),
            True,
        ),
        (
            "name = 'lseek64' AND dur_us > 20",
            lambda row: row["name"] == "lseek64" and row["dur_us"] > 20,
            True,
        ),
        ("cat = 'reader'", lambda row: row["cat"] == "reader", True),
        ("op = 'write' OR dur_us > 3000", lambda row: row["op"] == "write" or row["dur_us"] > 3000, False),
        ("NOT op = 'write'", lambda row: row["op"] != "write", False),
        ("path IS NULL", lambda row: row["path"] is None, False),
    ],
)
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_a_selection_is_what_the_expression_leaves_of_everything(
    where: str, holds: Any, generation: int, *, is_searched: bool, tmp_path: Path
) -> None:
    path = write_trace(tmp_path, Writing(generation=generation, events=2000))
    everything, _ = read(path, ALL_EVENTS)
    selection = EventFilter(where=where)
    rows, account = read(path, selection)
    assert rows == [row for row in everything if holds(row)]
    assert rows
    assert (selection.prefilter() != NO_PREFILTER) is is_searched
    assert (account.skipped > 0) is is_searched


def test_an_escape_does_not_hide_a_wanted_event(tmp_path: Path) -> None:
    path = tmp_path / "a.pfw"
    event = '{"name":"open","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{"fname":"%s"}}\n'
    path.write_text(event % "/a/\\u0063heckpoint" + event % "/b")
    rows, _ = read(path, EventFilter(where="path LIKE '%checkpoint%'"))
    assert [row["path"] for row in rows] == ["/a/checkpoint"]


def test_a_hash_explained_after_its_event_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "a.pfw"
    event = '{"name":"open","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":1,"args":{"fhash":"0a1b"}}\n'
    told = '{"name":"FH","cat":"dftracer","pid":1,"ph":4,"args":{"name":"/a/checkpoint","value":"0a1b"}}\n'
    path.write_text(event + told)
    rows, _ = read(path, EventFilter(where="path LIKE '%checkpoint%'"))
    assert [row["path"] for row in rows] == ["/a/checkpoint"]


def test_an_expression_that_duckdb_cannot_apply_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="paht"):
        EventFilter(where="paht = 'x'")
