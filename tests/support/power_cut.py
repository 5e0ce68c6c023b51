"""What a power cut leaves: a program's system calls are recorded and replayed up to any of them.

`OperationLog` records, `Disk` is the model: a file has the bytes of its last fsync, a folder the names of its
last fsync, and later changes may be lost. Invariant: in the model, what was not synced survives only on
request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.support.file_faults import Call

Arguments = tuple[Any, ...]
Kind = Literal["file", "folder"]
Choice = Callable[[Kind], bool]
"""Called once for each file and folder: whether its changes since its last fsync survive."""

_CHANGING = frozenset(
    "open close pwrite fsync ftruncate fallocate mkdir rename exchange unlink rmdir".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One successful call: its name, its arguments (buffers as bytes), its result."""

    name: str
    arguments: Arguments
    result: Any


@dataclass(slots=True)
class OperationLog:
    """No fault: records every call that changes something, in the order of their effects."""

    operations: list[Operation] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def around(self, name: str, call: Call) -> Call:
        """The call, recorded once it has succeeded; one at a time, so that the order is right."""
        if name not in _CHANGING:
            return call

        def recorded(*arguments: Any) -> Any:
            with self.lock:
                result = call(*arguments)
                copies = tuple(
                    bytes(value) if isinstance(value, memoryview) else value for value in arguments
                )
                self.operations.append(Operation(name, copies, result))
            return result

        return recorded


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def sync(self) -> None:
        self.synced = bytes(self.content)


@dataclass(slots=True, eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)

    def sync(self) -> None:
        self.synced = dict(self.names)


class Disk:
    """A tree of files as the kernel has it, and as a power cut would leave it."""

    def __init__(self, top: Path) -> None:
        """The files below `top`, all of them durable."""
        self._top = top
        self._root = _loaded(top)
        self._opened: dict[int, _File | _Folder] = {}

    def apply(self, operation: Operation) -> None:
        """Replay one recorded call."""
        getattr(self, f"_{operation.name}")(operation.result, *operation.arguments)

    def write_survivors(self, target: Path, survives: Choice) -> None:
        """Write what a power cut would leave to the new folder `target`.

        Changes of a file or folder since its last fsync survive where `survives` says so.
        """
        _write(self._root, target, survives)

    def _at(self, path: str) -> tuple[_Folder, str]:
        folder = self._root
        *above, name = Path(path).relative_to(self._top).parts
        for part in above:
            below = folder.names[part]
            assert isinstance(below, _Folder), f"{part} of {path} is not a folder"
            folder = below
        return folder, name

    def _find(self, path: str) -> _File | _Folder:
        if Path(path) == self._top:
            return self._root
        folder, name = self._at(path)
        return folder.names[name]

    def _open(self, descriptor: int, path: str, flags: int, _mode: int) -> None:
        if not Path(path).is_relative_to(self._top):
            return
        if flags & os.O_CREAT:
            folder, name = self._at(path)
            folder.names.setdefault(name, _File())
        found = self._find(path)
        if flags & os.O_TRUNC and isinstance(found, _File):
            found.content.clear()
        self._opened[descriptor] = found

    def _close(self, _result: None, descriptor: int) -> None:
        self._opened.pop(descriptor, None)

    def _pwrite(self, moved: int, descriptor: int, buffer: bytes, offset: int) -> None:
        content = self._file(descriptor).content
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + moved] = buffer[:moved]

    def _fsync(self, _result: None, descriptor: int) -> None:
        if descriptor in self._opened:
            self._opened[descriptor].sync()

    def _ftruncate(self, _result: None, descriptor: int, size_bytes: int) -> None:
        content = self._file(descriptor).content
        del content[size_bytes:]
        content.extend(bytes(size_bytes - len(content)))

    def _fallocate(self, _result: None, descriptor: int, size_bytes: int) -> None:
        content = self._file(descriptor).content
        content.extend(bytes(max(0, size_bytes - len(content))))

    def _mkdir(self, _result: None, path: str) -> None:
        folder, name = self._at(path)
        folder.names[name] = _Folder()

    def _rename(self, _result: None, old: str, new: str) -> None:
        (above, name), (above_new, name_new) = self._at(old), self._at(new)
        above_new.names[name_new] = above.names.pop(name)

    def _exchange(self, _result: None, one: str, other: str) -> None:
        (above, name), (above_other, name_other) = self._at(one), self._at(other)
        found, found_other = above.names[name], above_other.names[name_other]
        above.names[name], above_other.names[name_other] = found_other, found

    def _unlink(self, _result: None, path: str) -> None:
        folder, name = self._at(path)
        del folder.names[name]

    _rmdir = _unlink

    def _file(self, descriptor: int) -> _File:
        found = self._opened[descriptor]
        assert isinstance(found, _File), "a folder is not written to"
        return found


def _loaded(path: Path) -> _Folder:
    folder = _Folder()
    for below in path.iterdir():
        if below.is_dir():
            folder.names[below.name] = _loaded(below)
        else:
            content = below.read_bytes()
            folder.names[below.name] = _File(bytearray(content), content)
    folder.sync()
    return folder


def _write(folder: _Folder, target: Path, survives: Choice) -> None:
    target.mkdir()
    names = folder.names if survives("folder") else folder.synced
    for name, below in names.items():
        if isinstance(below, _Folder):
            _write(below, target / name, survives)
        else:
            (target / name).write_bytes(bytes(below.content) if survives("file") else below.synced)
