"""A data set that others made, listed once into one file that every process of a node maps into memory.

Names are sorted, so two listings of one set are equal whatever order a storage gave them in, and a name is
found by halving. Invariant: a record is checked whenever it is read; damage is an error, never a wrong name.

Version 1, little-endian:
    head     64 bytes: magic, version, checksum of the head, number of files, bytes of all names; zeros
    names    in UTF-8, without separators, sorted by their bytes
    records  20 bytes each: where the name ends in `names`, the file's size, and the CRC-32 of the file's
             number, these two, and the name
    tail     16 bytes, the fingerprint of the set: BLAKE2b over each file's size (8 bytes), length of its name
             (4 bytes), and name
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Final, Self

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files.calls import explaining

VERSION: Final = 1
MAGIC: Final = b"penslist"
HEAD: Final = struct.Struct("<8sIIQQ32x")
RECORD: Final = struct.Struct("<QQI")
FINGERPRINT_BYTES: Final = 16

_NUMBERS: Final = struct.Struct("<QQQ")
_IDENTITY: Final = struct.Struct("<QI")
_MAKE_AGAIN: Final = "Delete the file; the next run lists the data set again."


def encoded(name: str) -> bytes:
    """A name as a listing keeps it; names that are no text in their file system survive."""
    return name.encode("utf-8", "surrogateescape")


def head(num_files: int, names_bytes: int) -> bytes:
    """The first bytes of a listing."""
    unsigned = HEAD.pack(MAGIC, VERSION, 0, num_files, names_bytes)
    return HEAD.pack(MAGIC, VERSION, zlib.crc32(unsigned), num_files, names_bytes)


def record(index: int, end: int, size_bytes: int, name: bytes) -> bytes:
    """The record of file `index`."""
    return RECORD.pack(end, size_bytes, _checksum(index, end, size_bytes, name))


def add_to_fingerprint(fingerprint: blake2b, size_bytes: int, name: bytes) -> None:
    """Take one more file into the fingerprint of a set."""
    fingerprint.update(_IDENTITY.pack(size_bytes, len(name)))
    fingerprint.update(name)


def _checksum(index: int, end: int, size_bytes: int, name: bytes) -> int:
    return zlib.crc32(name, zlib.crc32(_NUMBERS.pack(index, end, size_bytes)))


class Listing:
    """A `Namespace` that knows sizes. Any thread may ask; in another process it opens its file again.

    Raises `StorageError` when opened on anything but a whole listing, `ShortTransfer` if it was cut.
    """

    __slots__ = ("_bytes", "_names_bytes", "_num_files", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        with explaining("Opening a listing", str(path)):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._num_files, self._names_bytes = self._read_head(descriptor)
                self._bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)

    def __len__(self) -> int:
        return self._num_files

    def name(self, index: int) -> str:
        """The key of file `index`."""
        return self._record(index)[0].decode("utf-8", "surrogateescape")

    def size_bytes(self, index: int) -> int:
        """The size of file `index` when it was listed."""
        return self._record(index)[1]

    def index(self, name: str) -> int | None:
        """Which file has this key, in about log2(n) looks."""
        wanted = encoded(name)
        low, high = 0, self._num_files
        while low < high:
            middle = (low + high) // 2
            if self._record(middle)[0] < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < self._num_files and self._record(low)[0] == wanted else None

    @property
    def fingerprint(self) -> str:
        """The same for two listings exactly if their names and sizes are: what ranks compare."""
        return self._bytes[-FINGERPRINT_BYTES:].hex()

    def verify(self) -> None:
        """Read all of it; `StorageError` names the first damaged record."""
        fingerprint = blake2b(digest_size=FINGERPRINT_BYTES)
        for index in range(self._num_files):
            name, size_bytes = self._record(index)
            add_to_fingerprint(fingerprint, size_bytes, name)
        if fingerprint.hexdigest() != self.fingerprint:
            raise self._damaged("its records are not those of its fingerprint")

    def close(self) -> None:
        """Let go of the file. Safe twice."""
        self._bytes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.path,)

    def _read_head(self, descriptor: int) -> tuple[int, int]:
        found = os.pread(descriptor, HEAD.size, 0)
        if len(found) < HEAD.size or found[: len(MAGIC)] != MAGIC:
            raise StorageError(
                "This is no listing of a data set", uri=str(self.path), fix="Check the path that was given."
            )
        _, version, _, num_files, names_bytes = HEAD.unpack(found)
        if version != VERSION:
            raise StorageError(
                f"This listing has version {version}, and only version {VERSION} can be read",
                uri=str(self.path),
                fix="Use the Penstock that wrote it, or list the data set again.",
            )
        if found != head(num_files, names_bytes):
            raise self._damaged("its head does not have its checksum")
        expected_bytes = HEAD.size + names_bytes + num_files * RECORD.size + FINGERPRINT_BYTES
        actual_bytes = os.fstat(descriptor).st_size
        if actual_bytes != expected_bytes:
            raise ShortTransfer(
                f"The listing of {num_files} files has {actual_bytes} of {expected_bytes} bytes",
                uri=str(self.path),
                expected_bytes=expected_bytes,
                actual_bytes=actual_bytes,
                fix=_MAKE_AGAIN,
            )
        return num_files, names_bytes

    def _record(self, index: int) -> tuple[bytes, int]:
        if not 0 <= index < self._num_files:
            raise IndexError(f"file {index} of {self._num_files}")
        at = HEAD.size + self._names_bytes + index * RECORD.size
        start = RECORD.unpack_from(self._bytes, at - RECORD.size)[0] if index else 0
        end, size_bytes, checksum = RECORD.unpack_from(self._bytes, at)
        if not start <= end <= self._names_bytes:
            raise self._damaged(f"file {index} has no name")
        name = self._bytes[HEAD.size + start : HEAD.size + end]
        if _checksum(index, end, size_bytes, name) != checksum:
            raise self._damaged(f"the record of file {index} does not have its checksum")
        return name, size_bytes

    def _damaged(self, how: str) -> StorageError:
        return StorageError(f"This listing is damaged: {how}", uri=str(self.path), fix=_MAKE_AGAIN)
