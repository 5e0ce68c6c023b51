"""Free space is checked before the first byte, on file systems only, and a folder has one writer."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import OutOfSpace, UsageError
from penstock.storage.capabilities import find_local_root
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.volumes import locked_folder, nearest_folder, require_free_space


def test_what_fits_is_silent_and_what_does_not_names_the_place_and_the_way_out(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    require_free_space(root, 1, what="This", fix="write less")
    with pytest.raises(OutOfSpace, match=r"This takes 1 EiB, but only .* are free") as caught:
        require_free_space(root, 1 << 60, what="This", fix="write less")
    assert caught.value.where == str(tmp_path)
    assert caught.value.fix == "Make room, or write less."


def test_where_no_file_can_be_written_that_is_said_instead() -> None:
    with pytest.raises(OutOfSpace, match=r"This cannot be written here: .* has no room for files") as caught:
        require_free_space(Path("/proc/x"), 1, what="This", fix="write less")
    assert caught.value.where == "/proc"
    assert caught.value.fix == "Name a folder in which you may write, on a disk or another storage system."


def test_a_storage_without_a_folder_is_not_checked() -> None:
    require_free_space(find_local_root(MemoryStorage()), 1 << 60, what="This", fix="write less")


def test_the_nearest_folder_is_the_innermost_that_exists(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path) == tmp_path
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path


HOLDER = """
import os, sys
from pathlib import Path
from penstock.storage.volumes import locked_folder
with locked_folder(Path(sys.argv[1]), alone=sys.argv[2] == "alone"):
    if "forks" in sys.argv:
        os.fork()
    if "strange" in sys.argv:
        Path("/proc/self/comm").write_bytes(b"\\xffx")
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has locked the folder, until it is killed or the block ends."""
    command = [sys.executable, "-c", HOLDER, str(folder), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(1 + ("forks" in words)):
            process.stdout.readline()
        yield process


def test_a_locked_folder_names_its_process_until_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with held(folder, "alone") as process:
        for alone in (True, False):
            with pytest.raises(UsageError) as caught, locked_folder(folder, alone=alone):
                pass
            assert caught.value.what == f"Process {process.pid} (python) is using this folder"
            assert caught.value.where == str(folder)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked_folder(folder):
            assert list(folder.iterdir()) == []


def test_a_process_whose_name_is_no_text_is_named_too(tmp_path: Path) -> None:
    with (
        held(tmp_path, "alone", "strange") as process,
        pytest.raises(UsageError, match=f"Process {process.pid} .* is using this folder"),
        locked_folder(tmp_path),
    ):
        pass


def test_a_lock_leaves_no_folder_behind_that_it_made_and_nobody_used(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    with locked_folder(folder):
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    with locked_folder(folder):
        (folder / "result").touch()
    (folder / "result").unlink()
    with locked_folder(folder):
        pass
    assert folder.is_dir()


def test_processes_that_change_nothing_share_a_folder(tmp_path: Path) -> None:
    with held(tmp_path, "shared"):
        with locked_folder(tmp_path, alone=False):
            pass
        with pytest.raises(UsageError, match="is using this folder"), locked_folder(tmp_path):
            pass
    with locked_folder(tmp_path / "none", alone=False):
        assert not (tmp_path / "none").exists()


def test_a_process_may_lock_a_folder_within_its_own_lock(tmp_path: Path) -> None:
    with locked_folder(tmp_path), locked_folder(tmp_path), locked_folder(tmp_path, alone=False):
        pass


def test_a_child_that_a_killed_process_leaves_is_told_of(tmp_path: Path) -> None:
    with held(tmp_path, "alone", "forks") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(UsageError) as caught, locked_folder(tmp_path):
            pass
        assert caught.value.what == f"A child of process {process.pid}, which has ended, is using this folder"


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_where_no_folder_can_be_locked_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_folder(tmp_path), locked_folder(None):
        pass
