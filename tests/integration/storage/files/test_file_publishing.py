"""When a file gets its name, what is on disk before, and what failing system calls leave behind."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.file_faults import (
    Call,
    CallFault,
    CallLog,
    FailFileCall,
    KillAtFileCall,
    ShortTransfers,
    faulty_calls,
)
from tests.support.open_files import open_below

from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    OutOfSpace,
    ShortTransfer,
    StorageError,
    StorageTimeout,
    Unavailable,
)
from penstock.storage.files.file_storage import DirectOptions, FileOptions, FileStorage
from penstock.storage.files.system_calls import REAL_CALLS
from penstock.storage.protocol import exists, read_object, write_object
from penstock.storage.uri import Location, open_storage
from penstock.testing.storage_contract import ReleaseLedger, arbitrary_bytes, assert_same_bytes

BUFFERED = FileOptions()
CONTENT = arbitrary_bytes(20_000)


def files(root: Path, *faults: CallFault, options: FileOptions = BUFFERED) -> FileStorage:
    """File storage below `root` whose system calls have `faults`."""
    scheme = "direct" if isinstance(options, DirectOptions) else "file"
    return FileStorage(Location(scheme, str(root)), options, calls=faulty_calls(*faults))


ALL_OPTIONS = [
    pytest.param(BUFFERED, id="buffered"),
    pytest.param(FileOptions(writes_in_flight=3), id="buffered-threads"),
    pytest.param(DirectOptions(bounce_bytes=8192), id="direct"),
    pytest.param(DirectOptions(bounce_bytes=8192, writes_in_flight=3), id="direct-threads"),
]


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_the_root_is_made_by_the_first_write_and_not_before(tmp_path: Path) -> None:
    root = tmp_path / "not" / "yet"
    storage = files(root)
    assert not root.exists()
    write_object(storage, "a/b", [b"x"])
    assert names_below(root) == ["a/b"]


@pytest.mark.parametrize("verb", ["list", "sync", "open", "stat", "delete"])
def test_a_root_that_was_never_made_is_an_error_that_names_it(tmp_path: Path, verb: str) -> None:
    storage = files(tmp_path / "mistyped")
    with pytest.raises(ObjectNotFound, match="mistyped") as caught:
        getattr(storage, verb)("key")
    assert caught.value.errno == errno.ENOENT


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ObjectNotFound, match="not a folder"):
        files(tmp_path / "file").list()
    with pytest.raises(
        StorageError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        files(tmp_path / "file").create("key")


def test_the_root_of_the_file_system_works_as_a_root(tmp_path: Path) -> None:
    storage = open_storage("file:///", {})
    key = str(tmp_path / "deep" / "key").removeprefix("/")
    write_object(storage, key, [b"x"])
    assert read_object(storage, key) == b"x"
    assert [info.key for info in storage.list(key.removesuffix("/deep/key"))] == [key]
    storage.sync(key.removesuffix("/key"))


def test_an_unfinished_object_has_a_hidden_name_that_no_verb_accepts(tmp_path: Path) -> None:
    storage = files(tmp_path)
    sink = storage.create("key")
    sink.submit(memoryview(CONTENT))
    (hidden,) = names_below(tmp_path)
    assert hidden.startswith(".penstock-")
    assert list(storage.list()) == []
    storage.sync()
    for verb in (storage.open, storage.stat, storage.delete, storage.create):
        with pytest.raises(AccessRefused, match="unfinished"):
            verb(hidden)
    sink.finish()
    assert names_below(tmp_path) == ["key"]


def test_in_place_writes_under_the_final_name_and_abort_removes_it(tmp_path: Path) -> None:
    storage = files(tmp_path, options=FileOptions(publish="in_place"))
    sink = storage.create("key", 8)
    sink.submit(memoryview(b"1234"))
    assert names_below(tmp_path) == ["key"]
    sink.submit(memoryview(b"5678"))
    sink.finish()
    sink.abort()
    assert read_object(storage, "key") == b"12345678"
    sink = storage.create("key")
    sink.abort()
    assert names_below(tmp_path) == []


def test_in_place_leaves_nothing_of_a_longer_object_before_it(tmp_path: Path) -> None:
    storage = files(tmp_path, options=FileOptions(publish="in_place"))
    write_object(storage, "key", [bytes(10_000)])
    write_object(storage, "key", [b"short"])
    assert read_object(storage, "key") == b"short"


def test_a_finished_object_keeps_the_users_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_object(files(tmp_path), "key", [b"x"])
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_bytes_are_safe_before_the_name_and_the_name_before_finish_returns(
    tmp_path: Path, options: FileOptions
) -> None:
    log = CallLog()
    storage = files(tmp_path, log, options=options)
    sink = storage.create("key", len(CONTENT))
    sink.submit(memoryview(CONTENT))
    log.names.clear()
    sink.finish()
    ending = [name for name in log.names if name != "pwrite"]
    assert ending[-6:] == ["fsync", "close", "rename", "open", "fsync", "close"]
    assert "pwrite" not in log.names[log.names.index("fsync") :]


def test_each_new_folder_is_made_durable_in_its_parent_once(tmp_path: Path) -> None:
    log = CallLog()
    storage = files(tmp_path / "root", log)
    write_object(storage, "a/b/one", [b"x"])
    # Root into its parent, a into the root, b into a; then the file and its folder.
    assert (log.names.count("mkdir"), log.names.count("fsync")) == (3, 5)
    log.names.clear()
    write_object(storage, "a/b/two", [b"x"])
    assert (log.names.count("mkdir"), log.names.count("fsync")) == (0, 2)


def test_without_fsync_only_a_new_root_is_made_durable(tmp_path: Path) -> None:
    log = CallLog()
    storage = files(tmp_path / "root", log, options=FileOptions(fsync=False))
    write_object(storage, "a/one", [b"x"])
    assert log.names.count("fsync") == 1
    log.names.clear()
    storage.sync("a")
    assert log.names.count("fsync") == 3


def test_sync_reaches_every_file_and_folder_but_no_unfinished_one(tmp_path: Path) -> None:
    log = CallLog()
    storage = files(tmp_path, log, options=FileOptions(fsync=False))
    for key in ("a/1", "a/b/2", "c/3"):
        write_object(storage, key, [b"x"])
    sink = storage.create("a/4")
    log.names.clear()
    storage.sync()
    assert log.names.count("fsync") == 3 + 3 + 1
    sink.abort()


def test_a_folder_that_was_removed_behind_our_back_is_made_again(tmp_path: Path) -> None:
    storage = files(tmp_path / "root")
    write_object(storage, "a/one", [b"x"])
    storage.delete("a/one")
    (tmp_path / "root" / "a").rmdir()
    (tmp_path / "root").rmdir()
    write_object(storage, "a/two", [b"y"])
    assert read_object(storage, "a/two") == b"y"


def test_a_known_size_is_set_aside_first_and_a_full_disk_fails_early(tmp_path: Path) -> None:
    storage = files(tmp_path, FailFileCall("fallocate", 1, errno.ENOSPC))
    with pytest.raises(OutOfSpace, match="Allocating 20000 bytes") as caught:
        storage.create("key", 20_000)
    assert caught.value.errno == errno.ENOSPC
    assert names_below(tmp_path) == []
    sink = storage.create("key", 20_000)
    (hidden,) = names_below(tmp_path)
    assert (tmp_path / hidden).stat().st_blocks * 512 >= 20_000
    sink.abort()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_fallocate_is_not_an_error(tmp_path: Path, number: int) -> None:
    storage = files(tmp_path, FailFileCall("fallocate", 1, number))
    write_object(storage, "key", [CONTENT], size_bytes=len(CONTENT))
    assert_same_bytes(read_object(storage, "key"), CONTENT)


@pytest.mark.parametrize("options", ALL_OPTIONS)
@pytest.mark.parametrize("most_bytes", [4096, 4608])
def test_short_transfers_are_completed(tmp_path: Path, options: FileOptions, most_bytes: int) -> None:
    storage = files(tmp_path, ShortTransfers(most_bytes), options=options)
    write_object(storage, "key", [CONTENT[:15_000], CONTENT[15_000:]])
    assert_same_bytes(read_object(storage, "key"), CONTENT)
    assert (tmp_path / "key").read_bytes() == CONTENT


def test_short_transfers_below_a_block_end_direct_access_with_an_error(tmp_path: Path) -> None:
    storage = files(tmp_path, ShortTransfers(512), options=DirectOptions())
    with pytest.raises(ShortTransfer) as caught:
        write_object(storage, "key", [CONTENT])
    # How much is written at once depends on where in memory the content begins.
    assert caught.value.actual_bytes == 512
    assert names_below(tmp_path) == []


class _MakesThenRefuses:
    """A kernel that makes a file and then finds that it cannot be opened past the page cache."""

    def around(self, name: str, call: Call) -> Call:
        def opened(path: str, flags: int, mode: int) -> int:
            if flags & os.O_CREAT and flags & os.O_DIRECT:
                os.close(call(path, flags, mode))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return int(call(path, flags, mode))

        return opened if name == "open" else call


@pytest.mark.parametrize("fault", [_MakesThenRefuses(), FailFileCall("open", 1, errno.EINVAL)])
def test_a_file_system_without_direct_io_is_an_error_and_nothing_is_left(
    tmp_path: Path, fault: CallFault
) -> None:
    storage = files(tmp_path, fault, options=DirectOptions())
    with pytest.raises(Unavailable, match="does not support O_DIRECT"):
        storage.create("key")
    assert names_below(tmp_path) == []


def test_blocks_cannot_be_set_aside_for_a_file_that_is_not_open() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        REAL_CALLS.fallocate(2**20, 4096)
    assert caught.value.errno == errno.EBADF


def test_a_transfer_of_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    storage = files(tmp_path, ShortTransfers(0))
    with pytest.raises(ShortTransfer, match="Only 0 of 20000 bytes were transferred"):
        write_object(storage, "key", [CONTENT])


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write_object(storage, "key", [CONTENT])
    with closing(storage.open("key")) as source:
        os.truncate(tmp_path / "key", 5000)
        with pytest.raises(ShortTransfer) as caught:
            source.read_into(1000, memoryview(bytearray(10_000)))
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (10_000, 4000)


def test_a_file_that_another_process_lengthens_meanwhile_is_not_published(tmp_path: Path) -> None:
    storage = files(tmp_path)
    sink = storage.create("key")
    sink.submit(memoryview(b"1234"))
    (hidden,) = names_below(tmp_path)
    with (tmp_path / hidden).open("ab") as stranger:
        stranger.write(b"more")
    with pytest.raises(ShortTransfer, match="8 stored") as caught:
        sink.finish()
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (4, 8)
    sink.abort()
    assert names_below(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EACCES, AccessRefused),
        (errno.EPERM, AccessRefused),
        (errno.EROFS, AccessRefused),
        (errno.ETIMEDOUT, StorageTimeout),
        (errno.EIO, StorageError),
        (errno.EMFILE, StorageError),
        (errno.ENAMETOOLONG, StorageError),
        (errno.EXDEV, StorageError),
    ],
)
def test_the_systems_errors_become_ours_with_their_number_a_place_and_a_fix(
    tmp_path: Path, number: int, kind: type[StorageError]
) -> None:
    storage = files(tmp_path, FailFileCall("pwrite", 1, number))
    with pytest.raises(StorageError) as caught:
        write_object(storage, "folder/key", [b"x"])
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert str(tmp_path / "folder" / "key") in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert caught.value.fix
    assert storage.counters.errors == 1


@pytest.mark.parametrize("name", ["open", "fstat", "pread_into"])
def test_a_failing_read_has_the_systems_errno(tmp_path: Path, name: str) -> None:
    write_object(files(tmp_path), "key", [b"x"])
    storage = files(tmp_path, FailFileCall(name, 1, errno.EIO))
    with pytest.raises(StorageError) as caught:
        read_object(storage, "key")
    assert caught.value.errno == errno.EIO
    assert read_object(storage, "key") == b"x"


@pytest.mark.parametrize(("verb", "name"), [("stat", "lstat"), ("delete", "unlink"), ("sync", "fsync")])
def test_a_failing_method_has_the_systems_errno(tmp_path: Path, verb: str, name: str) -> None:
    write_object(files(tmp_path), "folder/key", [b"x"])
    storage = files(tmp_path, FailFileCall(name, 1, errno.EIO))
    with pytest.raises(StorageError) as caught:
        getattr(storage, verb)("folder" if verb == "sync" else "folder/key")
    assert caught.value.errno == errno.EIO
    assert exists(storage, "folder/key")


def test_a_listing_that_fails_is_an_error_and_not_a_short_list(tmp_path: Path) -> None:
    write_object(files(tmp_path), "folder/key", [b"x"])
    storage = files(tmp_path, FailFileCall("scandir", 2, errno.EACCES))
    with pytest.raises(AccessRefused, match="Listing failed"):
        list(storage.list())


def count_calls(root: Path, options: FileOptions) -> int:
    log = CallLog()
    storage = files(root, log, options=options)
    write_object(storage, "folder/key", [CONTENT[:9000], CONTENT[9000:]], size_bytes=len(CONTENT))
    return len(log.names)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", ALL_OPTIONS)
@pytest.mark.parametrize("for_good", [False, True])
def test_whichever_call_fails_the_old_object_or_the_new_is_there_whole(
    tmp_path: Path, options: FileOptions, every: int, *, for_good: bool
) -> None:
    make_fault = FailFileCall.and_all_after if for_good else FailFileCall
    numbers = range(count_calls(tmp_path / "counted", options), 0, -every)
    num_failed = 0
    for number in numbers:
        root = tmp_path / str(number)
        write_object(files(root), "folder/key", [b"old"])
        storage, ledger = files(root, make_fault(None, number, errno.EIO), options=options), ReleaseLedger()
        num_failed += not written(storage, ledger)
        assert open_below(tmp_path) == []
        ledger.assert_each_released_once()
        assert (root / "folder" / "key").read_bytes() in (b"old", CONTENT)
        if not for_good:
            assert [info.key for info in files(root).list()] == ["folder/key"]
    assert num_failed >= max(1, len(numbers) - 4)


def written(storage: FileStorage, ledger: ReleaseLedger) -> bool:
    """Whether CONTENT was written; if not, the sink was aborted."""
    try:
        sink = storage.create("folder/key", len(CONTENT))
    except StorageError:
        return False
    try:
        for part in (CONTENT[:9000], CONTENT[9000:]):
            buffer = bytearray(part)
            sink.submit(memoryview(buffer), ledger.issue(buffer))
        sink.finish()
    except StorageError:
        sink.abort()
        return False
    return True


KILLED_WRITER = """
import sys
from pathlib import Path
from penstock.storage.files.file_storage import FileOptions, FileStorage
from penstock.storage.uri import Location
from penstock.storage.protocol import write_object
from tests.support.file_faults import KillAtFileCall, faulty_calls
root, number = sys.argv[1], int(sys.argv[2])
calls = faulty_calls(KillAtFileCall(number))
storage = FileStorage(Location("file", root), FileOptions(), calls=calls)
write_object(storage, "folder/key", [b"new" * 3000, b"er" * 1000], size_bytes=11_000)
"""


def killed_at(root: Path, number: int) -> bool:
    command = [sys.executable, "-c", KILLED_WRITER, str(root), str(number)]
    code = subprocess.run(command, timeout=120, check=False).returncode
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("number", [1, 4, 6, 9, 11, 12, 14])
def test_killed_at_a_call_the_old_object_or_the_new_is_there_whole(tmp_path: Path, number: int) -> None:
    assert_whole_after_kill(tmp_path, number)


@pytest.mark.slow
def test_killed_at_any_call_the_old_object_or_the_new_is_there_whole(tmp_path: Path) -> None:
    number = 1
    while assert_whole_after_kill(tmp_path / str(number), number):
        number += 1
    assert number > 10


def assert_whole_after_kill(root: Path, number: int) -> bool:
    storage = files(root)
    write_object(storage, "folder/key", [b"old"])
    was_killed = killed_at(root, number)
    assert read_object(storage, "folder/key") in (b"old", b"new" * 3000 + b"er" * 1000)
    assert [info.key for info in storage.list()] == ["folder/key"]
    return was_killed


def test_the_kill_strikes_in_this_process_too(tmp_path: Path) -> None:
    log = CallLog()
    calls = faulty_calls(log, KillAtFileCall(10**9))
    storage = FileStorage(Location("file", str(tmp_path)), BUFFERED, calls=calls)
    write_object(storage, "key", [b"x"])
    assert log.names[-1] == "close"


def test_a_failed_write_is_raised_again_by_every_later_call(tmp_path: Path) -> None:
    for options in (BUFFERED, FileOptions(writes_in_flight=2)):
        storage = files(tmp_path, FailFileCall("pwrite", 1, errno.ENOSPC), options=options)
        sink, ledger = storage.create("key"), ReleaseLedger()
        num_raised = 0
        for _ in range(20):
            buffer = bytearray(100)
            try:
                sink.submit(memoryview(buffer), ledger.issue(buffer))
            except OutOfSpace:
                num_raised += 1
        assert num_raised > 10
        with pytest.raises(OutOfSpace):
            sink.finish()
        ledger.assert_each_released_once()
        sink.abort()
        assert names_below(tmp_path) == []


@pytest.mark.parametrize("end", ["finish", "abort"])
def test_submitting_after_the_end_is_an_error_that_releases(tmp_path: Path, end: str) -> None:
    sink, ledger, buffer = files(tmp_path).create("key"), ReleaseLedger(), bytearray(5)
    getattr(sink, end)()
    with pytest.raises(StorageError, match="finished or aborted"):
        sink.submit(memoryview(buffer), ledger.issue(buffer))
    with pytest.raises(StorageError, match="finished or aborted"):
        sink.submit(memoryview(buffer))
    with pytest.raises(StorageError, match="finished or aborted"):
        sink.finish()
    ledger.assert_each_released_once()


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_after_a_finish_that_failed_only_abort_is_left(tmp_path: Path, options: FileOptions) -> None:
    sink, ledger = files(tmp_path, options=options).create("key", 10), ReleaseLedger()
    with pytest.raises(ShortTransfer):
        sink.finish()
    buffer = bytearray(10)
    with pytest.raises(StorageError, match="finished or aborted"):
        sink.submit(memoryview(buffer), ledger.issue(buffer))
    with pytest.raises(StorageError, match="finished or aborted"):
        sink.finish()
    sink.abort()
    ledger.assert_each_released_once()
    assert names_below(tmp_path) == []


def test_abort_logs_what_it_could_not_remove(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = files(tmp_path, FailFileCall("unlink", 1, errno.EIO)).create("key")
    with caplog.at_level(logging.WARNING):
        sink.abort()
    (hidden,) = names_below(tmp_path)
    assert hidden in caplog.text
    assert list(files(tmp_path).list()) == []


def test_abort_is_content_when_the_file_is_already_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = files(tmp_path).create("key")
    (tmp_path / names_below(tmp_path)[0]).unlink()
    with caplog.at_level(logging.WARNING):
        sink.abort()
    assert caplog.text == ""


def test_a_name_cannot_be_an_object_and_a_folder(tmp_path: Path) -> None:
    storage = files(tmp_path)
    write_object(storage, "object", [b"x"])
    write_object(storage, "folder/object", [b"x"])
    with pytest.raises(
        StorageError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        storage.create("object/below")
    with pytest.raises(
        StorageError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        storage.create("object/far/below")
    with pytest.raises(
        StorageError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        write_object(storage, "folder", [b"x"])
    in_place = files(tmp_path, options=FileOptions(publish="in_place"))
    with pytest.raises(
        StorageError, match=r"Part of this path is a file: give a folder|A file and a folder cannot"
    ):
        in_place.create("folder")
    assert names_below(tmp_path) == ["folder/object", "object"]


def test_only_so_many_writes_are_in_flight_as_the_options_say(tmp_path: Path) -> None:
    gauge = _Gauge()
    storage = files(tmp_path, gauge, options=FileOptions(writes_in_flight=3))
    write_object(storage, "key", [bytes([number]) * 1000 for number in range(40)])
    assert 1 < gauge.most <= 3
    assert read_object(storage, "key") == b"".join(bytes([number]) * 1000 for number in range(40))


class _Gauge:
    """Counts the writes under way; the first ones wait a moment for company."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._company = threading.Event()

    def around(self, name: str, call: Call) -> Call:
        if name != "pwrite":
            return call

        def gauged(*arguments: object) -> object:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
                if self._now > 1:
                    self._company.set()
            self._company.wait(timeout=5)
            moved = call(*arguments)
            with self._lock:
                self._now -= 1
            return moved

        return gauged


def test_an_alarm_that_interrupts_writes_spoils_nothing(tmp_path: Path) -> None:
    num_alarms = 0

    def count(_signal: int, _frame: object) -> None:
        nonlocal num_alarms
        num_alarms += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        storage = files(tmp_path, options=FileOptions(fsync=False))
        for _ in range(5):
            write_object(storage, "key", [CONTENT] * 200)
            assert_same_bytes(read_object(storage, "key"), CONTENT * 200)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_alarms > 0
