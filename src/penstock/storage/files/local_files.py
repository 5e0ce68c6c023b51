"""Penstock's own local files: changes survive a power failure, and reads have limits.

A file's bytes are durable after fsync of the file; its name is durable after fsync of the folder that holds
the name. Code outside `penstock.storage` uses these functions; file storage makes its own calls
(`FileCalls`), which tests can replace one by one. Invariants: after `write_durably` or `replace_durably`, the
target has either its old or its new content, never a part; reading a file always ends, whoever made it.
"""

import errno
import json
import os
import stat
from itertools import chain, repeat
from math import isfinite
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from penstock.environment import find_other_writer
from penstock.errors import AccessRefused
from penstock.storage.protocol import MOST_BYTES

OF_SHELL: Final = ("/dev/fd/", "/dev/std")
"""The names of files that a shell has opened for this process, such as /dev/stdout or `<(...)`, begin so."""
_NO_FILE: Final = "This is a device, a pipe or a socket, not a file"


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
    """Create a file, replacing any that exists, so that nothing is written through another user's link."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def require_own(folder: Path, notes: Path) -> None:
    """Raise `AccessRefused` if other users may write to a folder or its `notes`, or own their contents."""
    held = (path for each in (folder, notes) if each.is_dir() for path in each.iterdir())
    # What is in a folder to which only this user may write can have any mode, but not any owner.
    paths, forbidden = chain([folder, folder.resolve(), notes], held), chain([0, 0o022, 0o022], repeat(0))
    if reason := next(filter(None, map(find_other_writer, paths, forbidden)), ""):
        raise AccessRefused(
            f"Another user may have changed this folder: {reason}",
            fix="Let its owner do this, or use a folder of your own. If it is yours, remove what is not, and "
            "take the permission from others: `chmod -R go-w`.",
        )


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


def open_to_read(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file; refuse pipes, which would wait for a writer, and devices, which may never end.

    Pipes that a shell has opened are accepted.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISFIFO(mode) and str(path).startswith(OF_SHELL):
        os.set_blocking(file.fileno(), True)
    elif not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return file


def refuse_links(*paths: Path) -> None:
    """Raise `OSError` if one of these files or folders is a link."""
    for path in paths:
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path} is a link", str(path))


def open_without_links(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file in a folder that other users may have prepared: neither may be a link.

    Raises `OSError`. It can be the `opener` of `open`.
    """
    path = Path(path)
    refuse_links(path.parent, path)
    # Others may put a link there after this check.
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NO_FILE, str(path))
    return descriptor


def read_document(path: Path) -> bytes:
    """Return the content of a small file; raise `OSError` if it cannot be read or is too large."""
    with open_to_read(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"It has more than {MOST_BYTES >> 20} MiB", str(path))
    return content


def parse_json(text: str | bytes | bytearray, *, has_nan: bool = False) -> Any:
    """Return the value of a JSON document; raise `ValueError` if it is invalid or nested too deeply.

    Numbers that JSON lacks are refused, because the document could not be printed, unless it `has_nan`.
    """
    try:
        if has_nan:
            return json.loads(text)
        return json.loads(text, parse_constant=_parse_number, parse_float=_parse_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _parse_number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text:.20} is not a number in JSON")
    return number
