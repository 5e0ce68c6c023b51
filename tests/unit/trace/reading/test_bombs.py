"""Traces made to cost memory or time: small files that unpack to much, and lines that take long to search."""

import gzip
import os
import tracemalloc
from pathlib import Path

import pytest

from penstock.trace.event_schema import FileAccount, TraceFile
from penstock.trace.reading.json_lines import parse_line
from penstock.trace.reading.strace import find_makers, find_task
from penstock.trace.trace_set import read_trace_file

MIB = 1 << 20
GZIP_HEAD = b"\x1f\x8b\x08" + bytes(6) + b"\x03"
EVENT = b'{"name":"read","cat":"POSIX","pid":1,"tid":1,"ts":1,"dur":1,"ph":"X","args":{}},\n'


def account_of(path: Path, content: bytes) -> FileAccount:
    path.write_bytes(gzip.compress(content, 9) if path.suffix == ".gz" else content)
    reading = read_trace_file(TraceFile(path=path))
    for _ in reading.batches:
        pass
    return reading.account


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"schemaVersion":1,' + b" " * 20 * MIB, id="no array of events"),
        pytest.param(b'{"traceEvents":[]' + b" " * 20 * MIB, id="behind the array"),
        pytest.param(b"[\n" + b"\n" * 20 * MIB, id="blank lines"),
        pytest.param(b'{"id":1,"name":"' + b"x" * 20 * MIB, id="one line"),
    ],
)
def test_a_file_that_unpacks_to_much_more_than_a_trace_is_read_in_part(
    tmp_path: Path, content: bytes
) -> None:
    account = account_of(tmp_path / "x.json.gz", content)
    assert account.faults[0] == "unpacks to over 100 times its size: the rest was not read"


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(GZIP_HEAD + b"\x07", id="of no type"),
        pytest.param(GZIP_HEAD + b"\x00\xff\xff\x00\x00", id="that go on into the next ones"),
        pytest.param(gzip.compress(b"") + b"x", id="with something between them"),
    ],
)
def test_gzip_members_are_not_looked_for_from_each_of_very_many_damaged_ones(
    tmp_path: Path, member: bytes
) -> None:
    (tmp_path / "x.pfw.gz").write_bytes(member * (2 * MIB // len(member)))
    num_read = 0

    def count(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    reading = read_trace_file(TraceFile(path=tmp_path / "x.pfw.gz"), count)
    assert list(reading.batches) == []
    assert num_read < 80 * MIB  # without a limit, tens of GB
    assert any("too many gzip members are damaged" in fault for fault in reading.account.faults)


def test_a_pipe_in_place_of_the_count_of_events_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pfw.count")
    assert account_of(tmp_path / "x.pfw", b"[\n" + EVENT).announced_events is None


def test_a_head_without_events_is_not_kept_whole(tmp_path: Path) -> None:
    account = account_of(tmp_path / "x.json", b'{"schemaVersion":1,' + b" " * 20 * MIB)
    assert "it is JSON, but has no array of events" in account.faults


def test_spans_that_never_end_are_dropped_beyond_a_limit(tmp_path: Path) -> None:
    begin = b'{"ph":"B","pid":1,"tid":1,"ts":1,"name":"x"},\n'
    account = account_of(tmp_path / "x.json", b'{"traceEvents":[\n' + begin * ((1 << 16) + 3))
    assert account.dropped_reasons == {"too many spans are open": 3}


def test_a_document_of_damaged_objects_is_given_up(tmp_path: Path) -> None:
    account = account_of(tmp_path / "x.json", b'{"traceEvents":[\n' + b'{"' * 2 * MIB)
    assert "too many objects are damaged: the rest was not read" in account.faults


def test_an_array_of_lines_of_which_one_is_nested_too_deeply_is_a_trace(tmp_path: Path) -> None:
    account = account_of(tmp_path / "x.pfw", b"[\n" + b'{"a":' * 100_000 + b"\n" + EVENT)
    assert account.dropped > 0


def test_calls_that_stay_unfinished_are_dropped_beyond_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.strace"
    with path.open("w") as file:
        for number in range((1 << 16) + 3):
            file.write(f"{number + 1} 1700000000.000001 read(3,  <unfinished ...>\n")
    reading = read_trace_file(TraceFile(path=path))
    assert sum(batch.num_rows for batch in reading.batches) == 1 << 16
    assert reading.account.dropped_reasons == {"too many calls or tasks are unfinished": 3}


def test_lines_after_very_many_unfinished_calls_are_counted_but_not_parsed(tmp_path: Path) -> None:
    path, more = tmp_path / "x.strace", b"1 1700000000.000001 close(3) = 0 <0.000001>\n" * 30_000
    unfinished = (b"%d 1700000000.000001 read(3,  <unfinished ...>\n" % (one + 1) for one in range(3 << 16))
    path.write_bytes(b"".join(unfinished) + more)
    reading = read_trace_file(TraceFile(path=path))
    assert sum(batch.num_rows for batch in reading.batches) == 1 << 16
    account = reading.account
    assert account.lines == account.salvaged + account.dropped == (3 << 16) + 30_000


def test_a_process_with_many_files_that_forks_often_does_not_fill_the_memory(tmp_path: Path) -> None:
    path, line = tmp_path / "x.strace", "1 1700000000.000001 {} <0.000001>\n"
    with path.open("w") as file:
        file.writelines(line.format(f'open("/d", O_RDONLY) = {number}') for number in range(5000))
        file.writelines(line.format(f"fork() = {number}") for number in range(2, 5000))
    tracemalloc.start()
    reading = read_trace_file(TraceFile(path=path))
    assert sum(batch.num_rows for batch in reading.batches) == 9998
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200 * MIB  # with a copy of the table for each, 1.5 GB


@pytest.mark.parametrize("token", [b'\\"', b'"name":"', b'"name" : ', b'{"', b"[", b", ", b'"'])
@pytest.mark.parametrize("opening", [b"", b'{"', b'{"name":"'])
def test_a_line_is_searched_once_and_not_from_each_of_its_places(opening: bytes, token: bytes) -> None:
    line = opening + token * (MIB // len(token))
    assert parse_line(line, str, 1000).row is None  # by the square of its length, it would take hours


def test_a_line_of_strace_is_searched_once_and_not_from_each_of_its_places(tmp_path: Path) -> None:
    begin, calls = b"1700000000.000001 ", MIB // 8
    for text in (b" " * MIB + b"x", b"clone(" * calls, b"clone(" + b"CLONE_THREAD" * calls, b"fork(" * calls):
        (tmp_path / "t.1").write_bytes(begin + b"getpid() = 1 <0.000001>\n" + begin + text + b"\n")
        reading = read_trace_file(TraceFile(path=tmp_path / "t.1"))
        assert sum(batch.num_rows for batch in reading.batches) == 1
        assert find_task(tmp_path / "t.2", begin) == (2, 2)
        assert find_makers({tmp_path / "t.1": 1}) == {}
        (tmp_path / "t.1").unlink()
