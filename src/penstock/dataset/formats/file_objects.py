"""File objects for h5py, pyarrow and zipfile: one reads ranges of a stored file, one is in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.dataset.formats.file_writer import FormatSink

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class RangesFile(io.RawIOBase):
    """A file of `size_bytes`, whose ranges `fill(offset, buffer)` reads; no range extends beyond the file."""

    def __init__(self, size_bytes: int, fill: Callable[[int, memoryview], None]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._fill = fill
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
            self._fill(self._position, target[:wanted])
        self._position += wanted
        return wanted


class GrowingBuffer(io.RawIOBase):
    """A file that only grows; `drain` empties it into a sink."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting = bytearray()
        self._drained_bytes = 0

    def writable(self) -> bool:
        """Return True; encoders ask before they write."""
        return True

    def write(self, text: ReadableBuffer, /) -> int:
        """Keep a copy of `text` until the next `drain`."""
        view = memoryview(text)
        self._waiting += view
        return view.nbytes

    def tell(self) -> int:
        """Return the number of bytes ever written."""
        return self._drained_bytes + len(self._waiting)

    def drain(self, out: FormatSink) -> None:
        """Pass on what was written since the last `drain`."""
        waiting, self._waiting = self._waiting, bytearray()
        self._drained_bytes += len(waiting)
        out.raw(memoryview(waiting))
