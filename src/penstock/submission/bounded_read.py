"""Bytes of a submitted file: of a regular file within the tree, and no more of it than a limit.

Everything that reads a submission's files opens them here, because anybody may have made them. Invariant: a
read ends, whatever lies under the name; what is no file of the tree is an `OSError` that says what it is.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

LEADS_OUT: Final = "a link leads out of the tree"
_KINDS: Final = (
    (stat.S_ISDIR, "Is a directory"),
    (stat.S_ISFIFO, "this is a named pipe, and not a file"),
    (stat.S_ISSOCK, "this is a socket, and not a file"),
    (stat.S_ISCHR, "this is a device, and not a file"),
    (stat.S_ISBLK, "this is a device, and not a file"),
)


def open_file(path: str, tree: str) -> BinaryIO:
    """Open a regular file that lies in `tree` (a real path), also if links lead to it."""
    # Looked at before it is opened: opening a device may act on it, and opening a pipe waits for a writer.
    mode = os.stat(path).st_mode  # noqa: PTH116 - thousands of files, where a Path costs more
    if not stat.S_ISREG(mode):
        kind = next((text for is_kind, text in _KINDS if is_kind(mode)), "this is not a file")
        raise OSError(errno.EINVAL, kind, path)
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    real = _real_path(stream.fileno(), path)
    if not f"{real}/".startswith(f"{tree.rstrip('/')}/"):
        stream.close()
        raise OSError(errno.EXDEV, LEADS_OUT, path)
    return stream


def read_bytes(path: str, tree: str, max_bytes: int) -> bytes:
    """All bytes of a file; `OSError` if it has more than `max_bytes`."""
    with open_file(path, tree) as stream:
        # Of a file that is much too large nothing is read.
        size = os.fstat(stream.fileno()).st_size
        found = stream.read(max_bytes + 1) if size <= max_bytes else b""
    if max(size, len(found)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than the {max_bytes:,} bytes that are read", path)
    return found


def read_beginning(path: str, tree: str, max_bytes: int) -> bytes:
    """The first bytes of a file, which may have more."""
    with open_file(path, tree) as stream:
        return stream.read(max_bytes)


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
