"""Writes a `Listing` from a stream of objects in any order: sorted runs on disk, then one merge.

Invariant: memory is bounded whatever the number of files; the listing appears whole and durable, or not at
all; and equal sets give equal files.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, BinaryIO, Final

from penstock.dataset.listing import (
    FINGERPRINT_BYTES,
    RECORD,
    Listing,
    add_to_fingerprint,
    encoded,
    head,
    record,
)
from penstock.errors import StorageError
from penstock.storage.files.calls import explaining
from penstock.storage.posix import open_buffered
from penstock.storage.uri import Location
from penstock.storage.whole import write_object

if TYPE_CHECKING:
    from penstock.storage.base import ObjectInfo

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
    with explaining("Sorting names", str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".listing-") as folder:
            runs = _Runs(Path(folder), max_runs)
            entries = ((encoded(found.key), found.size_bytes) for found in objects)
            while batch := list(islice(entries, run_entries)):
                batch.sort()
                runs.add(batch)
            storage = open_buffered(Location("file", str(path.parent.absolute())), {}, 0)
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
