"""What the loops of a probe read and write by block: a file by system calls, or objects of any storage."""

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

from penstock.errors import ShortTransfer
from penstock.storage import Storage
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import write_object

Move = Callable[[int], int]
"""Moves a block at an offset; returns how many bytes it moved."""


class BlockTarget(Protocol):
    """What is read and written block by block, by threads that have one block of memory each."""

    def reader(self, buffer: memoryview) -> Move:
        """What fills this block."""

    def writer(self, buffer: memoryview, slot: int) -> Move:
        """What writes this block, that of thread `slot`."""

    def close(self) -> None:
        """Release what is open."""


class ObjectTarget:
    """Ranges of one object are read; a write is a whole new object of one block, in place of an older one."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._source = storage.open(key)

    def reader(self, buffer: memoryview) -> Move:
        """Fills a block from the object."""

        def read(offset: int) -> int:
            self._source.read_into(offset, buffer)
            return buffer.nbytes

        return read

    def writer(self, buffer: memoryview, slot: int) -> Move:
        """Writes an object of one block, durable on return."""
        key = slot_key(self._key, slot)

        def write(_offset: int) -> int:
            write_object(self._storage, key, [buffer], size_bytes=buffer.nbytes)
            return buffer.nbytes

        return write

    def close(self) -> None:
        """Close the object."""
        self._source.close()


def check_moved(moved: int, wanted: int, uri: str) -> None:
    """Raise `ShortTransfer` unless a whole block moved."""
    if moved != wanted:
        raise ShortTransfer(
            f"Only {moved} of {wanted} bytes moved",
            uri=uri,
            expected_bytes=wanted,
            actual_bytes=moved,
            fix="Check that nothing truncates the file meanwhile.",
        )


def slot_key(key: str, slot: int) -> str:
    """The object that writes of one slot replace, on storages without writes in place."""
    return f"{key}-write{slot}"


class FileTarget:
    """Blocks of one file in place: past the page cache, or through it, durable and never out of memory."""

    def __init__(self, storage: SupportsLocalPaths, key: str, uri: str, *, is_sequential: bool) -> None:
        self._is_buffered = storage.uses_page_cache
        flags = os.O_RDWR | (os.O_DSYNC if self._is_buffered else os.O_DIRECT)
        with translate_os_errors("Opening", f"{uri}/{key}"):
            self.descriptor = os.open(storage.local_path(key), flags)
        if not is_sequential:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def reader(self, buffer: memoryview) -> Move:
        """Fills a block; the page cache does not keep it for the next time."""
        read = partial(os.preadv, self.descriptor, (buffer,))
        return partial(self._read_and_forget, read) if self._is_buffered else read

    def _read_and_forget(self, read: Move, offset: int) -> int:
        moved = read(offset)
        os.posix_fadvise(self.descriptor, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def writer(self, buffer: memoryview, slot: int) -> Move:  # noqa: ARG002 - one file for all
        """Writes a block over the one that is there."""
        return partial(os.pwritev, self.descriptor, (buffer,))

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def find_local_files(storage: Storage) -> SupportsLocalPaths | None:
    """The storage itself, if its blocks are reached by opening its files; a wrapper is not passed by."""
    return cast("SupportsLocalPaths", storage) if isinstance(storage, SupportsLocalPaths) else None
