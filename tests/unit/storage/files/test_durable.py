"""Durable changes of local files, and that nothing else in the package calls fsync."""

import ast
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import penstock
from penstock.storage.files.local_files import (
    open_to_read,
    rename_durably,
    replace_durably,
    sync_file,
    sync_folder,
    sync_open_file,
    write_durably,
)

PACKAGE = Path(penstock.__file__).parent

CALLERS_OF_FSYNC = {
    "storage/files/local_files.py",
    "storage/files/system_calls.py",  # one kernel call each, which tests replace
    "storage/residency.py",  # the kernel drops only clean pages; durability is not the point
    "bench/probe/timed_streams.py",  # measures the call itself
}


class Recorder:
    """Takes the place of `os.fsync` and `os.replace`; notes what was synced, by its inode, and renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, object]] = []
        replace = os.replace

        def fsync(descriptor: int) -> None:
            self.calls.append(("fsync", os.fstat(descriptor).st_ino))

        def replacing(old: Path, new: Path) -> None:
            self.calls.append(("rename", new.name))
            replace(old, new)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replacing)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_written_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, recorder: Recorder
) -> None:
    path = tmp_path / "order.json"
    path.write_text("old")
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert recorder.calls == [("fsync", inode(path)), ("rename", "order.json"), ("fsync", inode(tmp_path))]
    assert [entry.name for entry in tmp_path.iterdir()] == ["order.json"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "order.json"
    path.write_text("old")

    def fail(_descriptor: int) -> None:
        raise OSError

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_durably(path, b"new")
    assert path.read_text() == "old"


def test_a_finished_draft_is_synced_before_it_replaces_its_target(tmp_path: Path, recorder: Recorder) -> None:
    folder = tmp_path / "drafts"
    folder.mkdir()
    (folder / "draft").write_text("new")
    target = tmp_path / "table"
    replace_durably(folder / "draft", target)
    assert target.read_text() == "new"
    assert recorder.calls == [
        ("fsync", inode(target)),
        ("rename", "table"),
        ("fsync", inode(tmp_path)),
        ("fsync", inode(folder)),
    ]


def test_renaming_a_folder_syncs_both_parents(tmp_path: Path, recorder: Recorder) -> None:
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    rename_durably(tmp_path / "a" / "x", tmp_path / "b" / "y")
    assert (tmp_path / "b" / "y").is_dir()
    assert recorder.calls[1:] == [("fsync", inode(tmp_path / "b")), ("fsync", inode(tmp_path / "a"))]


def test_an_open_file_is_flushed_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    with path.open("wb") as file:
        file.write(b"four")
        sync_open_file(file)
        sync_open_file(file.fileno())
    assert sizes == [4, 4]


def test_only_a_folder_can_be_synced_as_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    sync_file(file)
    sync_folder(tmp_path)
    with pytest.raises(NotADirectoryError):
        sync_folder(file)


@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_only_a_pipe_of_the_shell_is_read(place: str | None) -> None:
    with TemporaryDirectory(dir=place) as folder:
        os.mkfifo(Path(folder) / "pipe")
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            open_to_read(Path(folder) / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    with open_to_read(f"/dev/fd/{reading}") as file:
        assert file.read() == b"text"
    os.close(reading)


def test_fsync_is_called_nowhere_else() -> None:
    def calls_fsync(path: Path) -> bool:
        text = path.read_text(encoding="utf-8")
        return ("os.fsync" in text or "os.fdatasync" in text) and any(
            isinstance(node, ast.Attribute)
            and node.attr in ("fsync", "fdatasync")
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            for node in ast.walk(ast.parse(text))
        )

    callers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if calls_fsync(path)}
    assert callers == CALLERS_OF_FSYNC
