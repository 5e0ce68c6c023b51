from pathlib import Path
from typing import Any

import duckdb
import pytest
from tests.support.trace_files import Writing, write_trace

from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.trace.event_schema import FileAccount, TraceFile
from penstock.trace.trace_set import GatheredEvents, check_where, read_events


def read(path: Path, where: str) -> tuple[list[dict[str, Any]], FileAccount]:
    gathered = GatheredEvents(path.parent)
    (account,) = read_events([TraceFile(path=path)], gathered, progress=Progress(), where=where)
    with duckdb.connect() as connection:
        table: Any = connection.sql(gathered.source(connection)).to_arrow_table()
    rows = table.to_pylist()
    taken = account.events + account.salvaged
    assert account.lines == taken + account.metadata + account.blank + account.dropped
    assert len(rows) == taken - account.unwanted
    return rows, account


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("path LIKE '%/checkpoints/%'", lambda row: "/checkpoints/" in (row["path"] or "")),
        ("contains(path, 'img_000010')", lambda row: "img_000010" in (row["path"] or "")),
        (
            "op IN ('open', 'write') AND starts_with(path, '/p/lustre2')",
            lambda row: row["op"] in ("open", "write"),
        ),
        (
            "name = 'lseek64' AND dur_us > 20",
            lambda row: row["name"] == "lseek64" and row["dur_us"] > 20,
        ),
        ("cat = 'reader'", lambda row: row["cat"] == "reader"),
        ("op = 'write' OR dur_us > 3000", lambda row: row["op"] == "write" or row["dur_us"] > 3000),
        ("NOT op = 'write'", lambda row: row["op"] != "write"),
        ("path IS NULL", lambda row: row["path"] is None),
    ],
)
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_a_selection_is_what_the_expression_leaves_of_everything(
    where: str, holds: Any, generation: int, tmp_path: Path
) -> None:
    path = write_trace(tmp_path, Writing(generation=generation, events=2000))
    everything, _ = read(path, "")
    rows, _ = read(path, where)
    assert rows == [row for row in everything if holds(row)]
    assert rows


def test_an_escape_does_not_hide_a_wanted_event(tmp_path: Path) -> None:
    path = tmp_path / "a.pfw"
    event = '{"name":"open","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{"fname":"%s"}}\n'
    path.write_text(event % "/a/\\u0063heckpoint" + event % "/b")
    rows, _ = read(path, "path LIKE '%checkpoint%'")
    assert [row["path"] for row in rows] == ["/a/checkpoint"]


def test_a_hash_explained_after_its_event_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "a.pfw"
    event = '{"name":"open","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":1,"args":{"fhash":"0a1b"}}\n'
    told = '{"name":"FH","cat":"dftracer","pid":1,"ph":4,"args":{"name":"/a/checkpoint","value":"0a1b"}}\n'
    path.write_text(event + told)
    rows, _ = read(path, "path LIKE '%checkpoint%'")
    assert [row["path"] for row in rows] == ["/a/checkpoint"]


def test_an_expression_that_duckdb_cannot_apply_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="paht"):
        check_where("paht = 'x'")
