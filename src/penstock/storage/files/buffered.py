"""Access through the page cache: any offset, any buffer, no copy of ours.

One of the two kinds of `FileAccess`. Invariant: a buffer goes to the kernel as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.storage.aligned import flat
from penstock.storage.files.in_flight import Piece, Writes, start_writes
from penstock.storage.files.transfer import OpenFile, read_whole

if TYPE_CHECKING:
    from penstock.storage.base import Release


class BufferedAccess:
    """Opens files plainly and moves bytes as they are."""

    name = "buffered"
    open_flags = 0

    def start_writer(self, file: OpenFile, num_in_flight: int) -> BufferedWriter:
        """Begin appending to an empty file."""
        return BufferedWriter(start_writes(file, num_in_flight, step_bytes=1))

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the caller has checked that the file is long enough."""
        read_whole(file, buffer, offset, needed_bytes=len(buffer))


class BufferedWriter:
    """Appends buffers to one file."""

    padding_bytes = 0

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self.size_bytes = 0

    def append(self, buffer: memoryview, release: Release | None) -> None:
        """Write `buffer` at the end."""
        piece = Piece(self.size_bytes, flat(buffer), buffer.nbytes, release)
        self.size_bytes += buffer.nbytes
        self._writes.put(piece)

    def complete(self) -> None:
        """Wait until the kernel has everything."""
        self._writes.drain()

    def give_up(self) -> None:
        """Wait until the kernel wants nothing more of any buffer."""
        self._writes.give_up()
