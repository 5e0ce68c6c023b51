"""Durable changes to local files, in an order that survives a power failure.

A file's bytes are durable after fsync of the file; its name is durable after fsync of the folder that holds
the name. Code outside `penstock.storage` uses these functions; file storage makes its own calls
(`FileCalls`), which tests can replace one by one. Invariant: after `write_durably` or `replace_durably`, the
target has either its old or its new content, never a part.
"""

import os
from pathlib import Path
from typing import IO


def sync_open_file(file: IO[bytes] | IO[str] | int) -> None:
    """Make durable what was written to an open file, including its buffer, or to a descriptor."""
    if isinstance(file, int):
        os.fsync(file)
    else:
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes durable, even those that another process wrote; a symbolic link is followed."""
    _sync_path(path, os.O_RDONLY)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable: those created, renamed and removed."""
    _sync_path(folder, os.O_RDONLY | os.O_DIRECTORY)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file durably. After a failure, the file is complete or has its previous content."""
    # With the PID in the draft's name, processes that write the same file do not share it; the last rename
    # wins.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open_draft(draft) as file:
        file.write(content)
        sync_open_file(file)
    rename_durably(draft, path)


def open_draft(path: Path) -> IO[bytes]:
    """Create a file in place of any that exists, so that another user's link there is not written to."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def replace_durably(draft: Path, target: Path) -> None:
    """Replace `target` durably with a finished file in the same file system."""
    # The bytes first: otherwise, a power failure could leave an empty file under the new name.
    sync_file(draft)
    rename_durably(draft, target)


def rename_durably(old: Path, new: Path) -> None:
    """Rename a folder, or a file whose bytes are already durable, durably; an existing file is replaced."""
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
