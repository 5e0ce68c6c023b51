"""The listing of an external data set: sorted names in one file per node, which every rank maps.

50 million names do not fit into the memory of every rank, so one rank sorts them, and all ranks find a name
by its number in the mapped file. The file exists only while ranks start, so it has no version; its size
reveals an incomplete copy on another node.

    names    in UTF-8, without separators, sorted by their bytes
    ends     for each file, where its name ends in `names`: 8 bytes, native
    tail     the number of files, and the total length of the names in bytes: 8 bytes each, native
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import ObjectInfo

_TAIL: Final = struct.Struct("=QQ")
_END: Final = struct.Struct("=Q")


class Listing:
    """The files of a data set by number. May be used by any thread."""

    __slots__ = ("_bytes", "_names_bytes", "_num_files", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        with translate_os_errors("Opening a listing", str(path)), path.open("rb") as file:
            actual_bytes = os.fstat(file.fileno()).st_size
            if actual_bytes < _TAIL.size:
                raise self._incomplete(actual_bytes, _TAIL.size)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers: tuple[int, int] = _TAIL.unpack_from(self._bytes, actual_bytes - _TAIL.size)
        self._num_files, self._names_bytes = numbers
        expected_bytes = self._names_bytes + self._num_files * _END.size + _TAIL.size
        if actual_bytes != expected_bytes:
            self._bytes.close()
            raise self._incomplete(actual_bytes, expected_bytes)

    def __len__(self) -> int:
        return self._num_files

    def name(self, index: int) -> str:
        """Return the key of file `index`."""
        if not 0 <= index < self._num_files:
            raise IndexError(f"file {index} of {self._num_files}")
        at = self._names_bytes + index * _END.size
        begin = _END.unpack_from(self._bytes, at - _END.size)[0] if index else 0
        return self._bytes[begin : _END.unpack_from(self._bytes, at)[0]].decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Unmap the file. May be called twice."""
        self._bytes.close()

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self.path,)

    def _incomplete(self, actual_bytes: int, expected_bytes: int) -> ShortTransfer:
        return ShortTransfer(
            f"The listing of the data set has {actual_bytes} of {expected_bytes} bytes",
            uri=str(self.path),
            expected_bytes=expected_bytes,
            actual_bytes=actual_bytes,
            fix="Start the run again: it lists the data set again.",
        )


def list_files(objects: Iterable[ObjectInfo], path: Path) -> Listing:
    """Write the listing of `objects` to `path`, a local file, and open it.

    Raises `StorageError` if a name occurs twice: no storage has two objects of one name, so the stream cannot
    be a single listing.
    """
    names = sorted(found.key.encode("utf-8", "surrogateescape") for found in objects)
    for name, following in pairwise(names):
        if name == following:
            raise StorageError(
                f"{name.decode(errors='replace')!r} comes twice",
                uri=str(path),
                fix="Did something write to the data set meanwhile? List it again.",
            )
    ends = np.cumsum([len(name) for name in names], dtype=np.uint64)
    with translate_os_errors("Writing a listing", str(path)), path.open("wb") as out:
        out.writelines(names)
        out.write(ends.tobytes())
        out.write(_TAIL.pack(len(names), int(ends[-1]) if names else 0))
    return Listing(path)
