"""Durable changes of local files: what survives a power cut, and in which order it must be done.

A file's bytes are durable after fsync of the file, its name after fsync of the folder that holds the name.
Everything outside `penstock.storage` that needs either does it here; object sinks have their own calls
(`files.calls`), because tests replace those one by one. Invariant: after `write_durably` or
`replace_durably` the target has its old content or its new one, never a part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def sync_open_file(file: IO[bytes] | IO[str] | int) -> None:
    """Make durable what was written to an open file, its buffer included, or to a descriptor."""
    if isinstance(file, int):
        os.fsync(file)
    else:
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes durable, whoever wrote them; a symbolic link is followed."""
    _sync_path(path, os.O_RDONLY)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable: those created, renamed and removed."""
    _sync_path(folder, os.O_RDONLY | os.O_DIRECTORY)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file so that it exists durably and completely, or keeps its former content."""
    # The number keeps processes apart that write the same file; the last rename wins.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        file.write(content)
        sync_open_file(file)
    rename_durably(draft, path)


def replace_durably(draft: Path, target: Path) -> None:
    """Let a finished file take the place of `target` in the same file system, durably."""
    # The bytes before the name: else a power cut may leave the new name on an empty file.
    sync_file(draft)
    rename_durably(draft, target)


def rename_durably(old: Path, new: Path) -> None:
    """Rename a folder, or a file whose bytes are durable already; an existing file is replaced."""
    os.replace(old, new)
    sync_folder(new.parent)
    if old.parent != new.parent:
        sync_folder(old.parent)


def _sync_path(path: str | os.PathLike[str], flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
