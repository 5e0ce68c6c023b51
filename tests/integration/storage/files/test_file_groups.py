"""Small files that are made durable together, or before they are published."""

import ctypes
import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.file_faults import CallFault, CallLog, FailFileCall, ShortTransfers, faulty_calls
from tests.support.open_files import open_below

from penstock.errors import StorageError
from penstock.storage.capabilities import submit_or_run
from penstock.storage.files import system_calls
from penstock.storage.files.file_storage import DirectOptions, FileOptions, FileStorage
from penstock.storage.files.system_calls import REAL_CALLS
from penstock.storage.uri import Location
from penstock.testing.storage_contract import arbitrary_bytes

CONTENT = arbitrary_bytes(20_000)
BUFFERED, DIRECT, IN_PLACE = FileOptions(), DirectOptions(bounce_bytes=8192), FileOptions(publish="in_place")


def files(root: Path, *faults: CallFault, options: FileOptions) -> FileStorage:
    """File storage below `root` whose system calls have `faults`."""
    calls = faulty_calls(*faults)
    scheme = "direct" if isinstance(options, DirectOptions) else "file"
    return FileStorage(Location(scheme, str(root)), options, calls=calls)


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def together(count: int = 5) -> dict[str, bytes]:
    """Small objects of different sizes in two folders, one of them empty."""
    return {f"{'ab'[number % 2]}/{number}": CONTENT[: 4000 * number] for number in range(count)}


def through_one_buffer(objects: dict[str, bytes]) -> Iterator[tuple[str, memoryview]]:
    buffer = memoryview(bytearray(len(CONTENT)))
    for key, content in objects.items():
        buffer[: len(content)] = content
        yield key, buffer[: len(content)]


@pytest.mark.parametrize("options", [BUFFERED, DIRECT, IN_PLACE], ids=["buffered", "direct", "in-place"])
def test_objects_that_are_written_together_come_back_as_written(tmp_path: Path, options: FileOptions) -> None:
    storage = files(tmp_path, ShortTransfers(4096), options=options)
    storage.write_at_once(through_one_buffer(together()))
    assert {name: (tmp_path / name).read_bytes() for name in names_below(tmp_path)} == together()
    assert storage.counters.written_bytes == 40_000


def test_all_bytes_are_on_their_way_before_the_first_sync_and_each_is_synced_before_its_name(
    tmp_path: Path,
) -> None:
    log = CallLog()
    storage = files(tmp_path, log, options=BUFFERED)
    storage.tree.make("a")
    storage.tree.make("b")
    storage.write_at_once(through_one_buffer(together()))
    log.names.clear()
    storage.write_at_once(through_one_buffer(together()))
    begun = log.names.index("await_writeback")
    assert log.names[:begun].count("start_writeback") == 5
    assert log.names[begun : begun + 5] == ["await_writeback"] * 5
    assert log.names[begun + 5 :] == ["fsync", "close"] * 5 + ["rename"] * 5 + ["open", "fsync", "close"] * 2


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", [FileOptions(), DirectOptions(bounce_bytes=8192)], ids=["buffered", "direct"]
)
def test_whichever_call_fails_objects_written_together_are_whole_or_not_there(
    tmp_path: Path, options: FileOptions, every: int
) -> None:
    log = CallLog()
    files(tmp_path / "counted", log, options=options).write_at_once(through_one_buffer(together()))
    for number in range(len(log.names), 0, -every):
        root = tmp_path / str(number)
        storage = files(root, FailFileCall(None, number, errno.EIO), options=options)
        with suppress(StorageError):
            storage.write_at_once(through_one_buffer(together()))
        assert open_below(tmp_path) == []
        for name in names_below(root):
            assert (root / name).read_bytes() == together()[name]


def test_objects_that_cannot_all_be_made_leave_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, memoryview]]:
        yield from through_one_buffer(together(3))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files(tmp_path, options=BUFFERED).write_at_once(interrupted())
    assert names_below(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL])
def test_a_system_that_cannot_start_writing_early_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class _Library:
        def sync_file_range(self, *_arguments: object) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(system_calls, "libc", _Library)
    for call in (REAL_CALLS.start_writeback, REAL_CALLS.await_writeback):
        call(-1)
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        REAL_CALLS.await_writeback(-1)


def test_what_no_thread_can_wait_for_is_waited_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def fail() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    with ThreadPoolExecutor(1) as threads:
        assert submit_or_run(threads, divmod, 7, 2).result() == (3, 1)
        with pytest.raises(OSError, match="no disk"):
            submit_or_run(threads, fail).result()
