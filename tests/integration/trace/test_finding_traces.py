"""Folders with traces and other files, files that are none, clocks that do not agree: on the command line."""

import errno
import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import run_command

from penstock.cli.app import main
from penstock.errors import StorageError, UsageError
from penstock.progress import Progress
from penstock.trace.event_schema import TraceFile
from penstock.trace.reading.trace_files import find_trace_files
from penstock.trace.trace_set import open_trace_set, read_trace_file

TS_US = 1_700_000_000_000_000
EVENT = {"name": "read", "cat": "POSIX", "ts": TS_US, "dur": 5, "pid": 1, "tid": 1, "ph": "X"}
STRACE = "7 1700000000.000001 fsync(3</d/a>) = 0 <0.000001>\n"


def test_folder_has_json_and_text_that_begin_as_traces(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.pfw").write_text(json.dumps(EVENT) + "\n")
    (tmp_path / "kineto.pt.trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": [EVENT]}))
    (tmp_path / "lines.json.gz").write_bytes(gzip.compress(b"[\n" + json.dumps(EVENT).encode() + b"\n]\n"))
    (tmp_path / "listing.txt").write_text(STRACE)
    (tmp_path / "config.json").write_text('{"name": "no trace", "ts": 5}')
    (tmp_path / "notes.txt").write_text("words\n")
    with caplog.at_level(logging.WARNING):
        found = find_trace_files([str(tmp_path)])
    assert [path.name for path in found] == ["a.pfw", "kineto.pt.trace.json", "lines.json.gz", "listing.txt"]
    assert "left out, because they are not traces: config.json, notes.txt" in caplog.text


def test_our_own_export_does_not_count_beside_its_traces(tmp_path: Path) -> None:
    (tmp_path / "a.pfw").write_text(json.dumps(EVENT) + "\n")
    exported = run_command("trace", "export", str(tmp_path / "a.pfw"), "-o", str(tmp_path / "a.json.gz"))
    assert exported.returncode == 0, exported.stderr
    assert [path.name for path in find_trace_files([str(tmp_path)])] == ["a.pfw"]


def test_folder_without_traces_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No trace files in this folder"):
        find_trace_files([str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json hold no events of a trace"):
        find_trace_files([str(tmp_path)])
    (tmp_path / "recorder.mt").write_bytes(b"\0")
    with pytest.raises(UsageError, match=r"a trace of Recorder.* recorder2timeline DIR"):
        find_trace_files([str(tmp_path)])


def test_folder_that_cannot_be_read_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed = tmp_path / "traces" / "closed"
    closed.mkdir(parents=True)

    def refuse(path: Any) -> Any:
        # The tests may run as root, who is refused nothing.
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StorageError, match=r"(?s)Permission denied.*closed"):
        find_trace_files([str(closed.parent)])
    (closed.parent / "a.pfw").write_text(json.dumps(EVENT) + "\n")
    assert [path.name for path in find_trace_files([str(closed.parent)])] == ["a.pfw"]
    assert "closed: left out, because it cannot be read: Permission denied" in caplog.text


def test_processes_of_files_without_hosts_are_told_to_be_ambiguous(tmp_path: Path) -> None:
    for name in ("a.pfw", "b.pfw"):
        (tmp_path / name).write_text("".join(json.dumps({**EVENT, "pid": pid}) + "\n" for pid in (1, 2)))
    with open_trace_set({"": [str(tmp_path)]}, progress=Progress()) as traces:
        (sentence,) = [one for one in traces.mismatches() if one.startswith("Process")]
    assert sentence.startswith(
        "Process 1 occurs in a.pfw, b.pfw, which name no host, and 1 more processes do"
    )
    hosted = {**EVENT, "args": {"hostname": "node1"}}
    (tmp_path / "b.pfw").write_text(json.dumps(hosted) + "\n")
    with open_trace_set({"": [str(tmp_path)]}, progress=Progress()) as traces:
        assert not [one for one in traces.mismatches() if one.startswith("Process")]


def test_what_recorders_own_converter_writes_is_found_and_read(tmp_path: Path) -> None:
    (tmp_path / "recorder.mt").write_bytes(b"\0")
    converted = tmp_path / "_chrome" / "timeline_0.json"
    converted.parent.mkdir()
    call = (
        '{"pid":3,"tid":41,"ts":1200,"name":"%s","cat":"%s","ph":"X","dur":80,"args":" /d/a 4096 tend: 1.2"}'
    )
    calls = ",\n".join((call % ("pwrite", "POSIX"), call % ("MPI_File_write_at", "MPI I/O")))
    converted.write_text(f'{{"traceEvents": [\n{calls}],\n"displayTimeUnit": "ms", "samples": []}}\n')
    assert find_trace_files([str(tmp_path)]) == [converted]
    refused = run_command("trace", "summary", str(tmp_path / "recorder.mt"))
    assert refused.returncode == 1
    assert "a trace of Recorder" in refused.stderr
    summary = run_command("trace", "summary", str(tmp_path), "--json")
    assert summary.returncode == 0, summary.stderr
    (facts,) = json.loads(summary.stdout)["rows"]
    assert (facts["num_events"], facts["num_processes"], facts["io_union_us"]) == (2, 1, 80)


@pytest.mark.parametrize(
    ("content", "seems"),
    [
        (json.dumps(EVENT).encode("utf-16"), "text in UTF-16"),
        (b"noise\n" * 10, "text in no known dialect"),
        (gzip.compress(b"PK\x03\x04\1\2\n", mtime=0), "a zip archive"),
        (b"\x07\x99\xfe\n" * 10, "binary data"),
        (b"12:34:56 fsync(3) = 0 <0.000001>\n", "a listing of strace without the day"),
        (b"7 12:34:56.000001 fsync(3) = 0 <0.000001>\n", "a listing of strace without the day"),
        (b"7      0.000123 fsync(3) = 0 <0.000001>\n", "a listing of strace without the day"),
    ],
)
def test_file_without_one_event_is_an_error_that_says_what_it_seems_to_be(
    content: bytes, seems: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.pfw"
    path.write_bytes(content)
    ended = run_command("trace", "summary", str(path))
    assert ended.returncode == 1
    assert f"not one event: it seems to be {seems}" in ended.stderr
    assert "There is not one event in x.pfw" in ended.stderr


def test_many_files_that_are_no_traces_are_told_once(tmp_path: Path) -> None:
    for pid in range(10, 55):
        (tmp_path / f"x.strace.{pid}").write_text("12:34:56 fsync(3) = 0 <0.000001>\n")
    ended = run_command("trace", "summary", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.count("trace again with strace -f -ttt -T") == 2
    assert "x.strace.11, x.strace.12, x.strace.13 and 41 more: not one event" in ended.stderr


def test_lost_file_beside_a_whole_one_is_told_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.pfw").write_text(json.dumps(EVENT) + "\n")
    (tmp_path / "b.pfw").write_bytes(b"noise\n")
    ended = run_command("trace", "summary", str(tmp_path))
    assert ended.returncode == 0
    assert "b.pfw: not one event" in ended.stderr


_EMPTY = {
    "no byte": b"",
    "compressed nothing": gzip.compress(b"", mtime=0),
    "an opening bracket": b"[",
    "a whole list": b"[\n]\n",
}


@pytest.mark.parametrize("content", _EMPTY.values(), ids=_EMPTY)
def test_trace_without_events_is_whole_and_every_question_says_that_it_has_none(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pfw"
    path.write_bytes(content)
    reading = read_trace_file(TraceFile(path=path))
    assert list(reading.batches) == []
    assert reading.account.is_whole
    verbs = ["summary", "ops", "files", "classes", "sizes", "ranks", "timeline", "overlap"]
    for words in (*([verb] for verb in verbs), ["file", "a"], ["sql", "SELECT 1"]):
        for named in (path, tmp_path):
            assert main(["trace", *words, str(named)]) == 1, words
            assert "There is not one event in x.pfw" in capsys.readouterr().err


def test_filter_that_no_event_meets_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "x.pfw").write_text(json.dumps(EVENT) + "\n")
    assert main(["trace", "summary", str(tmp_path), "--where", "op = 'write'"]) == 0


def test_pipe_link_loop_and_dangling_link_are_named_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.pfw")
    (tmp_path / "loop.pfw").symlink_to("loop.pfw")
    (tmp_path / "dangling.pfw").symlink_to("nothing")
    for name, what, code in (
        ("pipe.pfw", "Only regular files are traces", 2),
        ("loop.pfw", "symbolic links", 1),
        ("dangling.pfw", "No such file or directory", 1),
    ):
        assert main(["trace", "summary", str(tmp_path / name)]) == code
        said = capsys.readouterr().err
        assert what in said
        assert name in said


@pytest.mark.parametrize("verb", ["summary", "load"])
def test_unreadable_trace_is_named(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pfw"
    path.write_text(json.dumps(EVENT) + "\n")
    whole_open = Path.open

    def refuse(opened: Path, *words: Any, **options: Any) -> Any:
        # The superuser may read every file.
        if opened == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(opened))
        return whole_open(opened, *words, **options)

    monkeypatch.setattr(Path, "open", refuse)
    out = ["-o", str(tmp_path / "t.events")] if verb == "load" else []
    assert main(["trace", verb, str(path), *out]) == 1
    assert f"Cannot read the trace: Permission denied ({path})" in capsys.readouterr().err


def test_byte_order_mark_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.pfw"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(EVENT).encode() + b"\n")
    reading = read_trace_file(TraceFile(path=path))
    assert sum(batch.num_rows for batch in reading.batches) == 1
    assert reading.account.is_whole
    assert (reading.account.first_us, reading.account.last_us) == (TS_US, TS_US)


def test_units_that_do_not_agree_are_in_every_answer(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "us.pfw").write_text(json.dumps(EVENT) + "\n")
    (folder / "ns.pfw").write_text(json.dumps({**EVENT, "ts": TS_US * 1000}) + "\n")
    for words in (("ops",), ("load", "-o", str(tmp_path / "t.events")), ("sql", "SELECT 1")):
        ended = run_command("trace", *words, str(folder), "--json")
        assert ended.returncode == 0, ended.stderr
        mismatches = json.loads(ended.stdout)["mismatches"]
        assert "ns.pfw look like nanoseconds" in mismatches[0]
        assert "us.pfw from 2023-11-14" in mismatches[1]
        assert all(mismatch in ended.stderr for mismatch in mismatches)
