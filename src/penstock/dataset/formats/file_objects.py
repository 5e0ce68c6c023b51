"""File objects for h5py, pyarrow and zipfile: over a stored file, over the ranges read of it, or in memory.

Reading a byte that was never fetched is an error, not a zero: what decodes was all read.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.dataset.formats.file_writer import FormatSink
from penstock.dataset.formats.format_protocol import Extent, GatheredRanges
from penstock.storage import Source

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class _SeekableFile(io.RawIOBase):
    """Position and size; subclasses fetch the bytes."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        wanted = max(0, min(target.nbytes, self._size_bytes - self._position))
        if wanted:
            self._fetch(self._position, target[:wanted])
        self._position += wanted
        return wanted

    @abstractmethod
    def _fetch(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes at `offset`, all of which are inside the file."""


class RecordingFile(_SeekableFile):
    """A source as a file; `extents` keeps all that was read of it, in order."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.size_bytes)
        self.extents: list[Extent] = []
        self._source = source

    def _fetch(self, offset: int, target: memoryview) -> None:
        self._source.read_into(offset, target)
        self.extents.append(Extent(offset, bytes(target)))


class PiecesFile(_SeekableFile):
    """A file of which some pieces are here. Reading others is an `OSError`."""

    def __init__(self, size_bytes: int, pieces: Iterable[Extent]) -> None:
        super().__init__(size_bytes)
        self._gathered = GatheredRanges(pieces)

    def _fetch(self, offset: int, target: memoryview) -> None:
        target[:] = self._gathered.read(offset, target.nbytes)


class GrowingBuffer(io.RawIOBase):
    """A file that only grows; `drain` empties it into a sink."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = bytearray()
        self._drained_bytes = 0

    def writable(self) -> bool:
        """Encoders ask first."""
        return True

    def write(self, text: ReadableBuffer, /) -> int:
        """Keep a copy until the next `drain`."""
        view = memoryview(text)
        self._waiting += view
        return view.nbytes

    def tell(self) -> int:
        """Everything that was ever written."""
        return self._drained_bytes + len(self._waiting)

    def drain(self, out: FormatSink) -> None:
        """Hand over what waits."""
        waiting, self._waiting = self._waiting, bytearray()
        self._drained_bytes += len(waiting)
        out.raw(memoryview(waiting))
