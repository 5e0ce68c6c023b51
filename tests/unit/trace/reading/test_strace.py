"""Lines of strace alone: descriptors, processes, interrupted calls, escapes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.trace.reading.event_batch import LineFate
from penstock.trace.reading.strace import Strace


def rows(*calls: str) -> list[dict[str, Any]]:
    listing = Strace()
    parsed = [listing.parse(f"7 1700000000.{number:06d} {call}") for number, call in enumerate(calls)]
    assert all(line.fate in (LineFate.EVENT, LineFate.METADATA) for line in parsed)
    return [dict(line.row) for line in parsed if line.row is not None]


def paths(*calls: str) -> list[str | None]:
    return [row["path"] for row in rows(*calls)]


def test_a_descriptor_stands_for_the_file_it_was_opened_on_until_it_is_closed() -> None:
    calls = [
        'open("/d/a", O_RDONLY) = 3 <0.000010>', 'read(3, ""..., 10) = 10 <0.000010>',
        "dup(3) = 5 <0.000001>", "close(3) = 0 <0.000001>", "fsync(3) = -1 EBADF (Bad) <0.000001>",
        "fsync(5) = 0 <0.000001>",
    ]  # fmt: skip
    assert paths(*calls) == ["/d/a", "/d/a", "/d/a", "/d/a", None, "/d/a"]


def test_a_failed_open_gives_no_descriptor() -> None:
    calls = ['open("/d/a", O_RDONLY) = -1 ENOENT (No such file) <0.000001>', "fsync(0) = 0"]
    assert paths(*calls) == ["/d/a", None]


def test_names_are_relative_to_the_folder_or_to_a_descriptor() -> None:
    calls = [
        'openat(AT_FDCWD, "rel", O_RDONLY) = 3', 'chdir("/home/u") = 0',
        'openat(AT_FDCWD, "rel", O_RDONLY) = 4',
        'openat(AT_FDCWD, "../x", O_RDONLY) = 5', 'open("/d", O_DIRECTORY) = 6',
        'openat(6, "below", O_RDONLY) = 7', 'newfstatat(6, "", 0x7f, AT_EMPTY_PATH) = 0',
        'write(6, "text", 4) = 4',
    ]  # fmt: skip
    assert paths(*calls) == [
        "rel", "/home/u", "/home/u/rel", "/home/x", "/d", "/d/below", "/d", "/d",
    ]  # fmt: skip


def test_strace_may_name_the_file_of_a_descriptor() -> None:
    assert paths('read(9</p/data>, "", 4) = 4') == ["/p/data"]


def test_a_mapped_file_is_found_by_its_descriptor_and_an_anonymous_map_has_none() -> None:
    calls = [
        'open("/d/a", O_RDONLY) = 3', "mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 3, 0) = 0x7f00",
        "mmap(NULL, 4096, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f00",
    ]  # fmt: skip
    assert paths(*calls) == ["/d/a", "/d/a", None]
    assert [row["cat"] for row in rows(*calls)] == ["POSIX", "POSIX", "SYSTEM"]


@pytest.mark.parametrize(("flags", "pid"), [("CLONE_THREAD|CLONE_VM", 7), ("SIGCHLD", 8)])
def test_threads_share_the_process_and_children_are_new_processes(flags: str, pid: int) -> None:
    listing = Strace()
    listing.parse('7 1700000000.000001 open("/d/a", O_RDONLY) = 3 <0.000001>')
    listing.parse(f"7 1700000000.000002 clone3({{flags={flags}}}, 88) = 8 <0.000001>")
    listing.parse("8 1700000000.000003 close(3) = 0 <0.000001>")
    child = listing.parse("8 1700000000.000004 getpid() = 8 <0.000001>").row
    parent = listing.parse("7 1700000000.000005 fsync(3) = 0 <0.000001>").row
    assert child is not None
    assert parent is not None
    assert (child["pid"], child["tid"]) == (pid, 8)
    assert parent["path"] == (None if pid == 7 else "/d/a")


def test_an_interrupted_call_is_one_event_that_starts_at_its_first_line() -> None:
    listing = Strace()
    assert listing.parse("7 1700000000.000100 fsync(3 <unfinished ...>").fate is LineFate.METADATA
    listing.parse("8 1700000000.000150 getpid() = 8 <0.000001>")
    row = listing.parse("7 1700000000.000900 <... fsync resumed>) = 0 <0.000800>").row
    assert row is not None
    assert (row["ts_us"], row["dur_us"], row["name"]) == (1_700_000_000_000_100, 800, "fsync")
    assert list(listing.finish()) == []


def test_a_call_that_never_returned_is_salvaged() -> None:
    listing = Strace()
    listing.parse("7 1700000000.000100 fsync(3 <unfinished ...>")
    (line,) = listing.finish()
    assert (line.fate, line.reason) == (LineFate.SALVAGED, "never returned")


def test_calls_without_durations_are_a_fault_of_the_file() -> None:
    listing = Strace()
    listing.parse("7 1700000000.000100 fsync(3) = 0")
    assert list(listing.faults()) == ["1 calls have no duration: run strace with -T"]


def test_offsets_sizes_errors_and_flags_are_kept() -> None:
    pread, failed = rows(
        'pread64(3, ""..., 4096, 8192) = 4000 <0.000002>',
        'openat(AT_FDCWD, "/x", O_RDWR|O_CREAT, 0644) = -1 EACCES (Permission denied) <0.000001>',
    )
    assert (pread["op"], pread["offset"], pread["size_bytes"], pread["ret"]) == ("pread", 8192, 4000, 4000)
    assert pread["args"] == '{"fd":3}'
    assert failed["ret"] == -1
    assert '"errno": "EACCES"' in failed["args"]
    assert "O_RDWR|O_CREAT" in failed["args"]


@pytest.mark.parametrize(
    ("escaped", "name"),
    [("a\\tb", "a\tb"), ("\\303\\257", "ï"), ("\\x41", "A"), ('q\\"', 'q"'), ("\\377", "\\xff")],
)
def test_names_are_unescaped(escaped: str, name: str) -> None:
    assert paths(f'open("/d/{escaped}", O_RDONLY) = 3') == [f"/d/{name}"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not strace", "not a line of strace"),
        ("7 1700000000.000001 fsync(3", "cut short"),
        ("7 1700000000.000001 words", "not a call"),
        ("7 1700000000.000001 <... read resumed>) = 0", "resumes a call that never began"),
    ],
)
def test_a_line_without_a_call_is_dropped_with_its_reason(line: str, reason: str) -> None:
    parsed = Strace().parse(line)
    assert (parsed.fate, parsed.reason) == (LineFate.DROPPED, reason)
