"""The two ways to the bytes of a file: through the page cache, and past it (O_DIRECT).

Buffered access hands every buffer to the kernel as it came. Direct access does so with whole aligned blocks
and passes the rest through an aligned bounce buffer, counted as "direct-unaligned". Invariant of direct
access: address, offset and length of every call are aligned; a file's last block is padded, then cut.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from penstock.errors import StorageError
from penstock.storage.aligned import BufferPool, address_of, copy_bytes, flat, round_up
from penstock.storage.files.file_io import OpenFile, QueuedWrite, WriteQueue, open_write_queue, read_whole

if TYPE_CHECKING:
    from penstock.storage.counters import Counters
    from penstock.storage.protocol import Release


class BufferedAccess:
    """Opens files plainly and moves bytes as they are."""

    name = "buffered"
    open_flags = 0

    def start_writer(self, file: OpenFile, num_in_flight: int) -> BufferedWriter:
        """Begin appending to an empty file."""
        return BufferedWriter(open_write_queue(file, num_in_flight, step_bytes=1))

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the caller has checked that the file is long enough."""
        read_whole(file, buffer, offset, needed_bytes=len(buffer))


class BufferedWriter:
    """Appends buffers to one file."""

    padding_bytes = 0

    def __init__(self, writes: WriteQueue) -> None:
        self._writes = writes
        self.size_bytes = 0

    def append(self, buffer: memoryview, release: Release | None) -> None:
        """Write `buffer` at the end."""
        piece = QueuedWrite(self.size_bytes, flat(buffer), buffer.nbytes, release)
        self.size_bytes += buffer.nbytes
        self._writes.put(piece)

    def complete(self) -> None:
        """Wait until the kernel has everything."""
        self._writes.drain()

    def give_up(self) -> None:
        """Wait until the kernel wants nothing more of any buffer."""
        self._writes.give_up()


COPY_REASON = "direct-unaligned"
NUM_IDLE_BOUNCES = 16


class DirectAccess:
    """Opens files with O_DIRECT; its bounce buffers serve all files of one storage."""

    name = "direct"
    open_flags = os.O_DIRECT

    def __init__(self, alignment_bytes: int, bounce_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._bounces = BufferPool(bounce_bytes, NUM_IDLE_BOUNCES)

    def start_writer(self, file: OpenFile, num_in_flight: int) -> DirectWriter:
        """Begin appending to an empty file."""
        writes = open_write_queue(file, num_in_flight, self._alignment_bytes)
        return DirectWriter(writes, self._bounces, self._alignment_bytes, file.counters)

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the caller has checked that the file is long enough."""
        straight = aligned_range(buffer, offset, self._alignment_bytes)
        self._read_bounced(file, offset, buffer[: straight.start])
        if straight:
            read_whole(
                file,
                buffer[straight.start : straight.stop],
                offset + straight.start,
                needed_bytes=len(straight),
                step_bytes=self._alignment_bytes,
            )
        self._read_bounced(file, offset + straight.stop, buffer[straight.stop :])

    def _read_bounced(self, file: OpenFile, offset: int, target: memoryview) -> None:
        if not target:
            return
        bounce = self._bounces.take()
        try:
            while target:
                moved = self._read_window(file, offset, target, bounce)
                offset, target = offset + moved, target[moved:]
        finally:
            self._bounces.give_back(bounce)

    def _read_window(self, file: OpenFile, offset: int, target: memoryview, bounce: memoryview) -> int:
        """Copy the beginning of `target` out of the aligned window around `offset`; its length."""
        lead = offset % self._alignment_bytes
        window = bounce[: round_up(lead + len(target), self._alignment_bytes)]
        moved = min(len(target), len(window) - lead)
        read_whole(file, window, offset - lead, needed_bytes=lead + moved, step_bytes=self._alignment_bytes)
        copy_bytes(target[:moved], window[lead : lead + moved])
        file.counters.add_copy(COPY_REASON, moved)
        return moved


class DirectWriter:
    """Appends buffers to one file in aligned pieces."""

    def __init__(
        self, writes: WriteQueue, bounces: BufferPool, alignment_bytes: int, counters: Counters
    ) -> None:
        self._writes = writes
        self._bounces = bounces
        self._alignment_bytes = alignment_bytes
        self._counters = counters
        self._bounce: memoryview | None = None
        self._held_bytes = 0
        self.size_bytes = 0
        self.padding_bytes = 0

    def append(self, buffer: memoryview, release: Release | None) -> None:
        """Write what is aligned of `buffer`, keep a copy of what is not until its block is full."""
        buffer = flat(buffer)
        straight = aligned_range(buffer, self.size_bytes, self._alignment_bytes)
        middle_offset = self.size_bytes + straight.start
        middle = QueuedWrite(middle_offset, buffer[straight.start : straight.stop], len(straight), release)
        try:
            self._append_copied(buffer[: straight.start])
            if straight:
                self._put_bounce()
        except StorageError:
            middle.let_go()
            raise
        if not straight:
            middle.let_go()
            return
        self.size_bytes += len(straight)
        # The tail is copied before the middle is put: from then on the owner may refill the buffer.
        self._hold(buffer[straight.stop :])
        self._writes.put(middle)

    def complete(self) -> None:
        """Write the padded last block and wait for the device; `padding_bytes` are to be cut off then."""
        self._put_bounce()
        self._writes.drain()

    def give_up(self) -> None:
        """Wait until the device wants nothing more of any buffer."""
        self._writes.give_up()
        if self._bounce is not None:
            self._bounces.give_back(self._bounce)
            self._bounce = None

    def _append_copied(self, buffer: memoryview) -> None:
        while buffer:
            room = self._bounces.size_bytes - self._held_bytes
            self._hold(buffer[:room])
            buffer = buffer[room:]
            if self._held_bytes == self._bounces.size_bytes:
                self._put_bounce()

    def _hold(self, part: memoryview) -> None:
        """Copy `part`, which fits, behind what the bounce buffer already holds."""
        if not part:
            return
        if self._bounce is None:
            self._bounce = self._bounces.take()
        end = self._held_bytes + len(part)
        copy_bytes(self._bounce[self._held_bytes : end], part)
        self._counters.add_copy(COPY_REASON, len(part))
        self._held_bytes = end
        self.size_bytes += len(part)

    def _put_bounce(self) -> None:
        """Put what the bounce buffer holds, padded to a whole block: only the file's last piece ever is."""
        if self._bounce is None:
            return
        bounce, held = self._bounce, self._held_bytes
        padded = round_up(held, self._alignment_bytes)
        bounce[held:padded] = bytes(padded - held)
        piece = QueuedWrite(
            self.size_bytes - held, bounce[:padded], held, partial(self._bounces.give_back, bounce)
        )
        self._bounce, self._held_bytes, self.padding_bytes = None, 0, padded - held
        self._writes.put(piece)


def aligned_range(buffer: memoryview, offset: int, alignment_bytes: int) -> range:
    """The part of `buffer`, which lies at `offset` in its file, that needs no bounce: whole aligned blocks.

    Where there is none the range is empty and stands at the buffer's end.
    """
    lead = -offset % alignment_bytes
    num_blocks = (len(buffer) - lead) // alignment_bytes
    if num_blocks < 1 or (address_of(buffer) + lead) % alignment_bytes:
        return range(len(buffer), len(buffer))
    return range(lead, lead + num_blocks * alignment_bytes)
