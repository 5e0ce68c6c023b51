"""The system calls of file storage, as one object that tests replace, and the errors that they become.

Invariant: every call that a crash or a full disk can interfere with goes through `FileCalls`. No signal
interrupts a call that creates, writes or publishes a file: Python repeats calls on descriptors, and
`call_uninterrupted` makes those of libc and those on names. Some file systems (FUSE, Lustre) interrupt the
latter, and Python does not repeat them, because the server may have done what they ask for.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from penstock.errors import (
    AccessRefused,
    AlreadyThere,
    ObjectNotFound,
    OutOfSpace,
    StorageError,
    StorageTimeout,
    UsageError,
)


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, loaded so that `raise_on_failure` can read errno."""
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(descriptor: int, size_bytes: int) -> None:
    """Call fallocate(2) itself: where it is unsupported, posix_fallocate would write into every block."""
    raise_on_failure(
        call_uninterrupted(libc().fallocate, descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
    )


def _sync_range(descriptor: int, *, flags: int) -> None:
    """Call sync_file_range(2) on a whole file: its bytes move sooner, but only fsync makes them durable."""
    everything = ctypes.c_int64(0)
    result = call_uninterrupted(libc().sync_file_range, descriptor, everything, everything, flags)
    if result and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        raise_on_failure(result)


def _rename_exchange(one: str, other: str) -> None:
    """Call renameat2(2) with RENAME_EXCHANGE, which swaps both names atomically.

    Fails with ENOSYS if libc lacks it.
    """
    if not hasattr(libc(), "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    at_cwd, exchange = -100, 2
    raise_on_failure(
        call_uninterrupted(libc().renameat2, at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange)
    )


Result = TypeVar("Result")
_set_mask = ctypes.PyDLL(None).pthread_sigmask
"""Unlike Python's `signal.pthread_sigmask`, it takes only microseconds and leaves errno alone."""
_EVERY_SIGNAL = b"\xff" * 128
"""A `sigset_t` of libc, with all bits set."""


def call_uninterrupted(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function while no signal can reach this thread, so that it never fails with EINTR.

    Repeating the call would not be enough: tmpfs and FUSE undo what fallocate has done, and under a
    profiler's signals no attempt would ever finish.
    """
    before = ctypes.create_string_buffer(128)
    try:
        # Handlers of signals that have arrived run after each call, and may raise.
        _set_mask(signal.SIG_BLOCK, _EVERY_SIGNAL, before)
        return function(*arguments)
    finally:
        _set_mask(signal.SIG_SETMASK, before, None)


def raise_on_failure(result: int) -> None:
    """Raise `OSError` with a C function's errno unless it returned 0; its library must use `use_errno`."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCalls:
    """The system calls of file storage. By default, each field is the real call."""

    open: Callable[[str, int, int], int] = os.open
    close: Callable[[int], None] = os.close
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    pread_into: Callable[[int, memoryview, int], int] = lambda file, buffer, at: os.preadv(file, [buffer], at)
    start_writeback: Callable[[int], None] = partial(_sync_range, flags=2)
    """Start writing out the bytes of a whole file, without waiting."""
    await_writeback: Callable[[int], None] = partial(_sync_range, flags=4)
    """Wait until the bytes are written out. Errors reported here are not reported again by fsync."""
    fsync: Callable[[int], None] = os.fsync
    ftruncate: Callable[[int, int], None] = os.ftruncate
    fallocate: Callable[[int, int], None] = _fallocate
    fstat: Callable[[int], os.stat_result] = os.fstat
    lstat: Callable[[str], os.stat_result] = os.lstat
    scandir: Callable[[str], os._ScandirIterator[str]] = os.scandir
    mkdir: Callable[[str], None] = partial(call_uninterrupted, os.mkdir)
    rename: Callable[[str, str], None] = partial(call_uninterrupted, os.rename)
    exchange: Callable[[str, str], None] = _rename_exchange
    unlink: Callable[[str], None] = partial(call_uninterrupted, os.unlink)
    rmdir: Callable[[str], None] = partial(call_uninterrupted, os.rmdir)


REAL_CALLS = FileCalls()


def close_after_reading(calls: FileCalls, descriptor: int) -> None:
    """Close a file that was only read: a failure loses nothing, and Linux closes the file anyway."""
    with suppress(OSError):
        calls.close(descriptor)


_FIXES: dict[type[StorageError], str] = {
    ObjectNotFound: "Check the name, and that its writer has finished.",
    AccessRefused: "Check owner and mode of the file and of all folders above it.",
    AlreadyThere: "Choose another name, or remove what has this one (it may be a dangling link).",
    OutOfSpace: "Free some space or quota there, or use another file system.",
    StorageTimeout: "Check the file server and the network to it.",
}

_KINDS: dict[int, type[StorageError]] = {
    errno.ENOENT: ObjectNotFound,
    errno.ENOTDIR: ObjectNotFound,
    errno.EISDIR: ObjectNotFound,
    errno.EACCES: AccessRefused,
    errno.EPERM: AccessRefused,
    errno.EROFS: AccessRefused,
    errno.ELOOP: AccessRefused,
    errno.EEXIST: AlreadyThere,
    errno.ENOSPC: OutOfSpace,
    errno.EDQUOT: OutOfSpace,
    errno.ETIMEDOUT: StorageTimeout,
}

_FIXES_BY_NUMBER = {
    errno.ENOTDIR: "Part of this path is a file: give a folder.",
    errno.EISDIR: "This is a folder: give a file.",
    errno.EROFS: "It is mounted read-only: use another file system, or mount it for writing.",
    errno.EIO: "Look at the kernel log (dmesg): the device or the server reported an error.",
    errno.EXDEV: "Nothing can be renamed in lower layers of an overlay (container images): use a volume.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), or keep fewer objects open.",
    errno.ELOOP: "It is a link that leads back to itself, or is not followed here: remove it.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or use a file system that allows larger files.",
    errno.ENAMETOOLONG: "Use shorter names: most file systems allow 255 bytes a name.",
    errno.EINVAL: "With direct I/O, raise alignment_bytes to the block size of the device, or use file://.",
}


def map_os_error(error: OSError, doing: str, uri: str) -> StorageError:
    """Convert `error` to a `StorageError` with its errno; `doing` names the attempt, such as "Writing"."""
    number = error.errno or 0
    kind = _KINDS.get(number, StorageError)
    fix = _FIXES_BY_NUMBER.get(number) or _FIXES.get(kind, "Look at the kernel log (dmesg) for the cause.")
    return kind(f"{doing} failed: {error.strerror or error}", uri=uri, fix=fix, errno=number)


def require_writable(folder: str | os.PathLike[str]) -> None:
    """Raise `AccessRefused` if this process cannot create files in an existing folder."""
    if not os.access(folder, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_read_only else errno.EACCES
        raise map_os_error(OSError(number, os.strerror(number)), "Creating files", os.fspath(folder))


@contextmanager
def translate_os_errors(doing: str, uri: str) -> Iterator[None]:
    """Convert OSErrors in the block to `StorageError`s; too slow to use for every buffer."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise map_os_error(error, doing, uri) from error


def map_name_clash(error: OSError, uri: str) -> StorageError:
    """Return the error for a name that cannot be created because an object or a folder has it.

    Usually the path of a command is of the wrong kind, hence exit code 2.
    """
    if error.errno not in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return map_os_error(error, "Creating", uri)
    fix = "A file and a folder cannot have the same name: choose another."
    if error.errno == errno.ENOTDIR:
        fix = _FIXES_BY_NUMBER[errno.ENOTDIR]
    clash = StorageError(f"Creating failed: {error.strerror}", uri=uri, fix=fix, errno=error.errno)
    clash.exit_code = UsageError.exit_code
    return clash
