"""Which process a file of `strace -ff` belongs to."""

import gzip
from pathlib import Path

from penstock.trace.reading.strace import find_host, find_task

HEAD = b"1700000000.000001 getpid() = 10 <0.000001>\n"


def _clone(tid: int, flags: str) -> bytes:
    return f"1700000000.000002 clone3({{flags={flags}}} => {{}}, 88) = {tid} <0.000001>\n".encode()


def _write(folder: Path) -> None:
    (folder / "t.10").write_bytes(HEAD + _clone(11, "CLONE_VM|CLONE_THREAD") + _clone(20, "SIGCHLD"))
    (folder / "t.11.gz").write_bytes(gzip.compress(HEAD + _clone(12, "CLONE_THREAD|CLONE_VM")))
    (folder / "t.12").write_bytes(HEAD)
    (folder / "t.20").write_bytes(HEAD + _clone(21, "CLONE_THREAD"))
    (folder / "other.21").write_bytes(HEAD)


def test_thread_belongs_to_the_process_that_made_its_maker(tmp_path: Path) -> None:
    _write(tmp_path)
    tasks = {name: find_task(tmp_path / name, HEAD) for name in ("t.10", "t.11.gz", "t.12", "t.20", "t.21")}
    assert tasks == {
        "t.10": (10, 10), "t.11.gz": (11, 10), "t.12": (12, 10),
        "t.20": (20, 20), "t.21": (21, 20),
    }  # fmt: skip


def test_files_of_another_recording_say_nothing(tmp_path: Path) -> None:
    _write(tmp_path)
    assert find_task(tmp_path / "other.21", HEAD) == (21, 21)


def test_listing_whose_lines_have_numbers_needs_no_name(tmp_path: Path) -> None:
    assert find_task(tmp_path / "t.10", b"7 " + HEAD) == (0, 0)
    assert find_task(tmp_path / "t.strace", HEAD) == (0, 0)


def test_threads_that_made_each_other_end_the_search(tmp_path: Path) -> None:
    (tmp_path / "t.10").write_bytes(_clone(11, "CLONE_THREAD"))
    (tmp_path / "t.11").write_bytes(_clone(10, "CLONE_THREAD"))
    assert find_task(tmp_path / "t.10", HEAD)[0] == 10


def test_name_of_a_recording_has_the_host() -> None:
    names = ("trace@node7.example.org.strace.4711", "trace@n1.strace.gz", "trace.strace.4711", "a@b.txt")
    assert [find_host(Path(name)) for name in names] == ["node7.example.org", "n1", None, None]
