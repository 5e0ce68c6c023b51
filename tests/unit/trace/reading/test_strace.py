"""Lines of strace alone: descriptors, processes, interrupted calls, escapes."""

from typing import Any

import pytest

from penstock.trace.event_schema import LineFate
from penstock.trace.reading.strace import Strace
from penstock.trace.reading.trace_files import STRACE_LINE


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
    assert '"errno":"EACCES"' in failed["args"]
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


def test_folder_that_strace_names_makes_relative_names_whole() -> None:
    calls = [
        'openat(AT_FDCWD</home/u>, "data/x", O_RDONLY) = 3</home/u/data/x> <0.000001>',
        "read(3</home/u/data/x>, 5) = 5 <0.000001>",
        'unlink("data/x") = 0 <0.000001>',
        'newfstatat(AT_FDCWD</srv/y>, "z", {st_mode=S_IFREG|0644}, 0) = 0 <0.000001>',
        "utimensat(AT_FDCWD</srv/y>, NULL, NULL, 0) = 0 <0.000001>",
    ]
    assert paths(*calls) == ["/home/u/data/x"] * 3 + ["/srv/y/z", "/srv/y"]


def test_opened_link_has_the_name_that_its_descriptor_has() -> None:
    calls = ['openat(AT_FDCWD</d>, "link", O_RDONLY) = 3</d/file> <0.000001>', "close(3</d/file>) = 0"]
    assert paths(*calls) == ["/d/file", "/d/file"]


@pytest.mark.parametrize(
    ("call", "offset"),
    [
        ('preadv2(3, [{iov_base="abcd", iov_len=4}], 1, 7, 0) = 4', 7),
        ('pwritev2(3, [{iov_base="a", iov_len=1}, {iov_base="b", iov_len=1}], 2, 10, RWF_DSYNC) = 2', 10),
        ('pwritev2(3, [{iov_base="a", iov_len=1}], 1, -1, 0) = 1', None),
        ('pwritev(3, [{iov_base="a", iov_len=1}], 1, 4096) = 1', 4096),
        ('pwrite64(3, "a", 1, 12) = 1', 12),
        ('write(3, "a", 1) = 1', None),
    ],
)
def test_offset_is_the_argument_before_the_flags(call: str, offset: int | None) -> None:
    assert rows(call)[0]["offset"] == offset


@pytest.mark.parametrize(
    ("shown", "path"),
    [
        (r"/d/na\303\257ve \"q\" \\ x\74y\76.txt", '/d/naïve "q" \\ x<y>.txt'),
        ("TCP:[127.0.0.1:80->127.0.0.1:90]", "TCP:[127.0.0.1:80->127.0.0.1:90]"),
        ("TCPv6:[[::1]:33->[::1]:44]", "TCPv6:[[::1]:33->[::1]:44]"),
        ("/dev/null<char 1:3>", "/dev/null<char 1:3>"),
        ("/d/minus-", "/d/minus-"),
    ],
)
def test_name_of_a_descriptor_is_unescaped(shown: str, path: str) -> None:
    assert paths(f'write(3<{shown}>, "->", 2) = 2 <0.000001>') == [path]


def test_removed_file_keeps_its_name() -> None:
    calls = [
        'write(3</d/gone>(deleted), "12", 2) = 2',
        'openat(4</d>(deleted), "x", O_RDONLY) = -1 ENOENT (No)',
    ]
    assert paths(*calls) == ["/d/gone", "/d/x"]


@pytest.mark.parametrize(
    "call",
    [
        'getrandom("\\xa7\\x01", 8, GRND_NONBLOCK) = 8', 'memfd_create("buffer", MFD_CLOEXEC) = 9',
        'prctl(PR_SET_NAME, "worker") = 0', 'sethostname("h", 1) = 0',
    ],
)  # fmt: skip
def test_text_that_is_no_name_gives_no_path(call: str) -> None:
    assert paths(call) == [None]


@pytest.mark.parametrize(
    "call",
    [
        "munmap(0x7f00, 4096) = 0", "mprotect(0x7f00, 4096, PROT_READ) = 0", "exit_group(0) = ?",
        "madvise(0, 4096, MADV_DONTNEED) = 0", "umask(022) = 0", "kill(0, SIGTERM) = 0",
        "mmap(0x7f00, 4096, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f00",
    ],
)  # fmt: skip
def test_addresses_and_other_numbers_are_no_descriptors(call: str) -> None:
    first, row = rows('open("/d/a", O_RDONLY) = 0', call)
    assert first["path"] == "/d/a"
    assert row["path"] is None
    assert "fd" not in row["args"]


def test_file_mapped_at_a_fixed_address_is_found() -> None:
    calls = ["mmap(0x7f00, 4096, PROT_READ, MAP_PRIVATE|MAP_FIXED, 3</lib/a,b.so>, 0x2000) = 0x7f00"]
    assert paths(*calls) == ["/lib/a,b.so"]
    assert rows(*calls)[0]["cat"] == "POSIX"


def test_name_behind_a_descriptor_is_below_it_only_in_calls_that_take_one() -> None:
    calls = [
        'openat(3</d>, "x", O_RDONLY) = 4</d/x>', 'statx(3</d>, "y", AT_STATX_SYNC_AS_STAT, 0, {}) = 0',
        'fgetxattr(3</d>, "user.a", 0x7f, 64) = 4', 'write(3</d/f>, "text") = 4',
    ]  # fmt: skip
    assert paths(*calls) == ["/d/x", "/d/y", "/d", "/d/f"]


@pytest.mark.parametrize(("flags", "pid"), [("CLONE_VM|CLONE_THREAD", 7), ("SIGCHLD", 8)])
def test_task_that_runs_before_its_clone_returns_is_known(flags: str, pid: int) -> None:
    listing = Strace()
    listing.parse('7 1700000000.000001 open("/d/a", O_RDONLY) = 3 <0.000001>')
    listing.parse(f"7 1700000000.000002 clone3({{flags={flags}}} <unfinished ...>")
    early = listing.parse("8 1700000000.000003 fsync(3) = 0 <0.000001>").row
    listing.parse('8 1700000000.000004 open("/d/b", O_RDONLY) = 4 <0.000001>')
    listing.parse("7 1700000000.000005 <... clone3 resumed> => {parent_tid=[8]}, 88) = 8 <0.000040>")
    later = listing.parse("8 1700000000.000006 fsync(4) = 0 <0.000001>").row
    assert early is not None
    assert later is not None
    assert (early["pid"], early["tid"], early["path"]) == (pid, 8, "/d/a")
    assert (later["pid"], later["tid"], later["path"]) == (pid, 8, "/d/b")


def test_task_taken_for_anothers_is_corrected_when_its_own_clone_returns() -> None:
    listing = Strace()
    for pid in (7, 9):
        listing.parse(f"{pid} 1700000000.000000 getpid() = {pid} <0.000001>")
    for pid in (7, 9):
        listing.parse(f"{pid} 1700000000.000001 clone3({{flags=CLONE_THREAD}} <unfinished ...>")
    early = [listing.parse(f"{tid} 1700000000.000003 gettid() = {tid} <0.000001>").row for tid in (8, 10)]
    for pid, tid in ((9, 10), (7, 8)):
        listing.parse(f"{pid} 1700000000.000005 <... clone3 resumed>, 88) = {tid} <0.000040>")
    assert [(row["pid"], row["tid"]) for row in early if row is not None] == [(7, 8), (9, 10)]


def test_number_of_an_ended_process_may_be_another_process_later() -> None:
    listing = Strace()
    listing.parse('8 1700000000.000001 open("/d/a", O_RDONLY) = 3 <0.000001>')
    assert listing.parse("8 1700000000.000002 +++ exited with 0 +++").fate is LineFate.METADATA
    row = listing.parse("8 1700000000.000003 fsync(3) = 0 <0.000001>").row
    assert row is not None
    assert row["path"] is None


def test_lines_without_a_number_belong_to_the_files_thread() -> None:
    listing = Strace((12, 10))
    row = listing.parse("1700000000.000001 fsync(3</d/a>) = 0 <0.000001>").row
    assert row is not None
    assert (row["pid"], row["tid"]) == (10, 12)


def test_what_strace_says_about_itself_is_no_damage() -> None:
    assert Strace().parse("strace: Process 4102 attached").fate is LineFate.METADATA


@pytest.mark.parametrize(
    ("line", "ts_us", "dur_us"),
    [
        ("41 1795439412.725 read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
        ("41 1795439412.725000900 read(3, ..., 9) = 9 <0.000000200>", 1795439412_725000, 1),
        ("41 1795439412.725000 [00007f578e3a0ad7] read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
        ("41 1795439412.725000 [   0] read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
        ("41 1795439412.725000 (+     0.000012) read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
        ("41<python3> 1795439412.725000 read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
        ("[pid    41<python3>] 1795439412.725000 read(3, ..., 9) = 9 <0.000185>", 1795439412_725000, 185),
    ],
)
def test_lines_of_any_option_beside_the_time_are_calls(line: str, ts_us: int, dur_us: int) -> None:
    assert STRACE_LINE.match(line.encode())
    row = Strace().parse(line).row
    assert row is not None
    assert (row["tid"], row["ts_us"], row["dur_us"], row["size_bytes"]) == (41, ts_us, dur_us, 9)


def test_stacks_and_the_summary_behind_all_calls_are_no_damage() -> None:
    parser = Strace()
    for line in (
        " > /usr/lib/x86_64-linux-gnu/libc.so.6(read+0x13) [0x10e7d3]",
        "% time     seconds  usecs/call     calls    errors syscall",
        "------ ----------- ----------- --------- --------- ----------------",
        " 26.09    0.000012           0        83           mmap",
    ):
        assert parser.parse(line).fate is LineFate.METADATA


def test_a_call_that_strace_could_not_read_is_no_damage() -> None:
    """A thread that the end of its process meets as it makes a call."""
    parser = Strace()
    for line in (
        "41 1795435028.583113 ???( <unfinished ...>",
        "41 1795435028.583143 <... ??? resumed>) = ?",
        "42 1795435028.583150 ???() = ?",
    ):
        assert parser.parse(line).fate is LineFate.METADATA
    assert list(parser.finish()) == []


@pytest.mark.parametrize(
    ("call", "source", "target"),
    [
        ("copy_file_range(3, [5], 4, [7], 1000, 0)", ("/d/a", 5), ("/d/b", 7)),
        ("copy_file_range(3, NULL, 4, NULL, 1000, 0)", ("/d/a", None), ("/d/b", None)),
        ("sendfile(4, 3, [100] => [1100], 1000)", ("/d/a", 100), ("/d/b", None)),
        ("splice(3, NULL, 4, [9], 1000, 0)", ("/d/a", None), ("/d/b", 9)),
        ("splice(3</d/x, y>, NULL, 6<pipe:[77]>, NULL, 1000, 0)", ("/d/x, y", None), ("pipe:[77]", None)),
    ],
)
def test_copy_between_files_reads_one_and_writes_the_other(
    call: str, source: tuple[str, int | None], target: tuple[str, int | None]
) -> None:
    listing = Strace()
    for opened in ('open("/d/a", O_RDONLY) = 3', 'open("/d/b", O_WRONLY) = 4'):
        listing.parse(f"7 1700000000.000001 {opened} <0.000001>")
    parsed = listing.parse(f"7 1700000000.000100 {call} = 1000 <0.000015>")
    read, written = parsed.row, parsed.written
    assert read is not None
    assert written is not None
    assert [(row["op"], row["size_bytes"]) for row in (read, written)] == [("read", 1000), ("write", 1000)]
    assert [(row["path"], row["offset"]) for row in (read, written)] == [source, target]
    # Together they take the time of the call, one after the other.
    assert (read["dur_us"], written["dur_us"]) == (7, 8)
    assert written["ts_us"] == read["ts_us"] + 7


def test_copy_of_nothing_is_one_call() -> None:
    (row,) = rows("copy_file_range(3</d/a>, NULL, 4</d/b>, NULL, 1000, 0) = 0 <0.000001>")
    assert (row["op"], row["path"], row["size_bytes"]) == ("copy_file_range", "/d/a", 0)
