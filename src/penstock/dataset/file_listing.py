"""The listing of an external data set: one file per node, which every process maps into memory.

Names are sorted (by an external merge sort in bounded memory), so equal data sets give equal files and a name
is found by bisection. Every record has a checksum that is verified when it is read. The file appears complete
and durable, or not at all.

Version 1, little-endian:
    head     64 bytes: magic, version, checksum of the head, number of files, bytes of all names; zeros
    names    in UTF-8, without separators, sorted by their bytes
    records  20 bytes each: where the name ends in `names`, the file's size, and the CRC-32 of the file's
             number, these two, and the name
    tail     16 bytes, the fingerprint of the set: BLAKE2b over each file's size (8 bytes), length of its name
             (4 bytes), and name
"""

from __future__ import annotations

import heapq
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final, Self

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files import file_storage, system_calls
from penstock.storage.protocol import ObjectInfo, write_object

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
    """`FileNames` that know sizes. Any thread may ask; in another process it opens its file again.

    Raises `StorageError` when opened on anything but a whole listing, `ShortTransfer` if it was cut.
    """

    __slots__ = ("_bytes", "_names_bytes", "_num_files", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        with system_calls.translate_os_errors("Opening a listing", str(path)):
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
        """The file with this key, in about log2(n) steps; None if there is none."""
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
        """Equal for two listings exactly if their names and sizes are; ranks compare it."""
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
        """Unmap the file. Safe twice."""
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
                "This is not a listing of a data set",
                uri=str(self.path),
                fix="Check the path that was given.",
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


Entry = tuple[bytes, int]
"""A name and a size."""

_RUN_ENTRIES: Final = 1 << 17
"""Names sorted in memory at once: about 30 MB of them."""
_MAX_RUNS: Final = 256
"""Runs merged at once, each an open file: with more, the runs so far become one."""
_STEP_BYTES: Final = 1 << 20
_RUN_RECORD: Final = struct.Struct("<QI")


def list_files(
    objects: Iterable[ObjectInfo], path: Path, *, run_entries: int = _RUN_ENTRIES, max_runs: int = _MAX_RUNS
) -> Listing:
    """Make `path` the listing of `objects` and open it. `path` is a local file, best on a node's own disk.

    Needs room for the names twice beside `path` while it works. A name that comes twice is a `StorageError`,
    because no storage has two objects of one name: the stream is then not one listing.
    """
    with system_calls.translate_os_errors("Sorting names", str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".listing-") as folder:
            runs = _Runs(Path(folder), max_runs)
            entries = ((encoded(found.key), found.size_bytes) for found in objects)
            while batch := list(islice(entries, run_entries)):
                batch.sort()
                runs.add(batch)
            storage = file_storage.open_local(path.parent)
            write_object(storage, path.name, _layout(runs, path))
    return Listing(path)


def _layout(runs: _Runs, path: Path) -> Iterator[bytes]:
    """The listing's bytes from first to last; records wait in a file until all names are written."""
    fingerprint = blake2b(digest_size=FINGERPRINT_BYTES)
    yield head(runs.num_entries, runs.names_bytes)
    with (runs.folder / "records").open("w+b") as records, ExitStack() as stack:
        names = bytearray()
        end, last = 0, None
        for index, (name, size_bytes) in enumerate(runs.merged(stack)):
            if name == last:
                raise StorageError(
                    f"{name.decode(errors='replace')!r} comes twice",
                    uri=str(path),
                    fix="Did something write to the data set, or were two listings joined? List it again.",
                )
            last = name
            end += len(name)
            names += name
            records.write(record(index, end, size_bytes, name))
            add_to_fingerprint(fingerprint, size_bytes, name)
            if len(names) >= _STEP_BYTES:
                yield bytes(names)
                names.clear()
        yield bytes(names)
        records.seek(0)
        while part := records.read(_STEP_BYTES // RECORD.size * RECORD.size):
            yield part
    yield fingerprint.digest()


@dataclass(slots=True)
class _Runs:
    """Sorted runs of entries, each a file in `folder`."""

    folder: Path
    max_runs: int
    num_entries: int = 0
    names_bytes: int = 0
    _num_files: int = 0
    _paths: tuple[Path, ...] = ()

    def add(self, batch: list[Entry]) -> None:
        """Keep one sorted batch."""
        if len(self._paths) >= self.max_runs:
            self._join()
        self.num_entries += len(batch)
        self.names_bytes += sum(len(name) for name, _ in batch)
        self._paths += (self._write(batch),)

    def merged(self, stack: ExitStack) -> Iterator[Entry]:
        """All entries in order; `stack` closes the files."""
        return heapq.merge(*(_read_run(stack.enter_context(path.open("rb"))) for path in self._paths))

    def _join(self) -> None:
        with ExitStack() as stack:
            joined = self._write(self.merged(stack))
        for path in self._paths:
            path.unlink()
        self._paths = (joined,)

    def _write(self, entries: Iterable[Entry]) -> Path:
        path = self.folder / f"run-{self._num_files}"
        self._num_files += 1
        with path.open("wb") as file:
            for name, size_bytes in entries:
                file.write(_RUN_RECORD.pack(size_bytes, len(name)))
                file.write(name)
        return path


def _read_run(file: BinaryIO) -> Iterator[Entry]:
    while fixed := file.read(_RUN_RECORD.size):
        size_bytes, length = _RUN_RECORD.unpack(fixed)
        yield file.read(length), size_bytes
