"""Bytes of a submitted file: of a regular file within the tree, and no more of it than a limit.

Everything that reads a submission's files opens them here, because anybody may have made them. Invariant: a
read ends, whatever lies under the name; what is no file of the tree is an `OSError` that says what it is.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Final

LEADS_OUT: Final = "a link leads out of the tree"
_KINDS: Final = (
    (stat.S_ISDIR, "Is a directory"),
    (stat.S_ISFIFO, "this is a named pipe, and not a file"),
    (stat.S_ISSOCK, "this is a socket, and not a file"),
    (stat.S_ISCHR, "this is a device, and not a file"),
    (stat.S_ISBLK, "this is a device, and not a file"),
)


def read_bytes(path: str, tree: str, max_bytes: int) -> bytes:
    """All bytes of a regular file that lies in `tree` (a real path), also if links lead to it.

    `OSError` if it is none, lies elsewhere, or has more than `max_bytes`.
    """
    return _read(path, tree, max_bytes, is_whole=True)


def read_beginning(path: str, tree: str, max_bytes: int) -> bytes:
    """The first bytes of such a file, which may have more."""
    return _read(path, tree, max_bytes, is_whole=False)


def _read(path: str, tree: str, max_bytes: int, *, is_whole: bool) -> bytes:
    # Looked at before it is opened: opening a device may act on it, and opening a pipe waits for a writer.
    status = os.stat(path)  # noqa: PTH116 - thousands of files, where a Path costs more
    if not stat.S_ISREG(status.st_mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(status.st_mode)), "this is not a file")
        raise OSError(errno.EINVAL, kind, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not f"{_real_path(descriptor, path)}/".startswith(f"{tree.rstrip('/')}/"):
            raise OSError(errno.EXDEV, LEADS_OUT, path)
        if is_whole and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than the {max_bytes:,} bytes that are read", path)
        wanted = min(status.st_size, max_bytes)
        found = os.read(descriptor, wanted)
        while len(found) < wanted and (more := os.read(descriptor, wanted - len(found))):
            found += more
    finally:
        os.close(descriptor)
    return found


def tree_of(path: Path, base: Path) -> str:
    """The tree that a file must lie in: what is checked, or its own folder if it lies beside that."""
    return os.path.realpath(base if path.is_relative_to(base) else path.parent)


def leads_out(folder: Path, tree: Path) -> bool:
    """Whether links on the way lead a folder out of `tree`."""
    return not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(tree))


def _real_path(descriptor: int, path: str) -> str:
    """Where an open file lies, whichever links led to it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as above
    except OSError:  # without /proc
        return os.path.realpath(path)
