"""Bytes between an open file and buffers: through the page cache, or past it (O_DIRECT).

From the bottom up: `write_whole` and `read_whole` continue short transfers and return only when every byte
has moved; write queues keep several writes of one file in flight; `BufferedAccess` and `DirectAccess` are the
two kinds of access that file storage is built on. Buffered access passes every buffer to the kernel as it is.
Direct access does so with whole aligned blocks only and copies the rest through an aligned bounce buffer,
counted as "direct-unaligned": address, offset and length of every call are aligned; a file's last block is
padded, then cut.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.aligned import BufferPool, address_of, copy_bytes, flat, round_up
from penstock.storage.files.system_calls import FileCalls, close_after_reading, map_os_error
from penstock.storage.protocol import Counters, Release


@dataclass(slots=True)
class OpenFile:
    """An open descriptor with the calls to use, the counters to count in, and the URI for errors."""

    descriptor: int
    uri: str
    calls: FileCalls
    counters: Counters


def write_whole(file: OpenFile, buffer: memoryview, offset: int, *, step_bytes: int = 1) -> None:
    """Write all of `buffer` at `offset`; a short write is continued at a multiple of `step_bytes`."""
    done = 0
    while done < len(buffer):
        try:
            moved = file.calls.pwrite(file.descriptor, buffer[done:], offset + done)
        except OSError as error:
            file.counters.add(errors=1)
            raise map_os_error(error, "Writing", file.uri) from error
        file.counters.add(requests=1)
        done += _progress(moved, step_bytes, done, len(buffer), file)


def read_whole(
    file: OpenFile, buffer: memoryview, offset: int, *, needed_bytes: int, step_bytes: int = 1
) -> None:
    """Read at least `needed_bytes` at `offset` into `buffer`, which may reach past the end of the file."""
    done = 0
    while done < needed_bytes:
        try:
            moved = file.calls.pread_into(file.descriptor, buffer[done:], offset + done)
        except OSError as error:
            file.counters.add(errors=1)
            raise map_os_error(error, "Reading", file.uri) from error
        file.counters.add(requests=1)
        done += _progress(moved, step_bytes, done, needed_bytes, file)


def _progress(moved: int, step_bytes: int, done: int, needed: int, file: OpenFile) -> int:
    if done + moved >= needed:
        return moved
    # Direct I/O must continue at an aligned offset: the rest of the last step moves again.
    whole_steps = moved - moved % step_bytes
    if whole_steps == 0:
        file.counters.add(errors=1)
        raise ShortTransfer(
            f"Only {done + moved} of {needed} bytes moved",
            uri=file.uri,
            expected_bytes=needed,
            actual_bytes=done + moved,
            fix="Check that nothing truncates the file meanwhile, and look at the kernel log (dmesg).",
        )
    return whole_steps


@dataclass(slots=True)
class QueuedWrite:
    """Bytes for one offset; `payload_bytes` of them are the caller's, the rest is padding."""

    offset: int
    buffer: memoryview
    payload_bytes: int
    release: Release | None

    def release_buffer(self) -> None:
        """Tell the owner of the buffer that it may refill it."""
        if self.release is not None:
            self.release()


def _write(file: OpenFile, piece: QueuedWrite, step_bytes: int) -> None:
    write_whole(file, piece.buffer, piece.offset, step_bytes=step_bytes)
    file.counters.add(written_bytes=piece.payload_bytes)


# Each write that is put into a queue is released exactly once, done or not, and never while the kernel may
# still read its buffer. That is why no wait of a queue has a limit: giving up on a stuck write would return a
# buffer that is still being read.


class InlineWriteQueue:
    """Writes one piece at a time, in the thread that puts it."""

    def __init__(self, file: OpenFile, step_bytes: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._failure: StorageError | None = None

    def put(self, piece: QueuedWrite) -> None:
        """Write `piece` before returning; raises the failure of this or an earlier one."""
        try:
            self.drain()
            _write(self._file, piece, self._step_bytes)
        except StorageError as error:
            self._failure = error
            raise
        finally:
            piece.release_buffer()

    def drain(self) -> None:
        """Raise the first failure again; nothing is left to wait for."""
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Do nothing: no write is in flight between two calls."""


class ThreadedWriteQueue:
    """Writes up to `num_in_flight` pieces at a time, each in its thread; pwrite releases the GIL."""

    def __init__(self, file: OpenFile, step_bytes: int, num_in_flight: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._threads = ThreadPoolExecutor(num_in_flight, thread_name_prefix="penstock-write")
        self._free_slots = threading.Semaphore(num_in_flight)
        self._pending: deque[Future[None]] = deque()
        self._stopped = threading.Event()

    def put(self, piece: QueuedWrite) -> None:
        """Wait for a free slot and hand `piece` to a thread; raises the failure of an earlier one."""
        self._free_slots.acquire()
        try:
            self._raise_known_failure()
        except StorageError:
            self._free_slots.release()
            piece.release_buffer()
            raise
        self._pending.append(self._threads.submit(self._write, piece))

    def drain(self) -> None:
        """Return when everything is written; raises the first failure."""
        self._threads.shutdown(wait=True)
        self._raise_known_failure()

    def give_up(self) -> None:
        """Skip queued pieces and wait for those being written. Safe twice, raises nothing."""
        self._stopped.set()
        self._threads.shutdown(wait=True)

    def _write(self, piece: QueuedWrite) -> None:
        try:
            if not self._stopped.is_set():
                _write(self._file, piece, self._step_bytes)
        except StorageError:
            self._stopped.set()
            raise
        finally:
            self._free_slots.release()
            piece.release_buffer()

    def _raise_known_failure(self) -> None:
        # The first piece that failed stays in the queue, to be raised every time.
        while self._pending and self._pending[0].done():
            self._pending[0].result()
            self._pending.popleft()


WriteQueue = InlineWriteQueue | ThreadedWriteQueue


def open_write_queue(file: OpenFile, num_in_flight: int, step_bytes: int) -> WriteQueue:
    """A queue with at most `num_in_flight` writes at a time; `step_bytes` as in `write_whole`."""
    if num_in_flight == 1:
        return InlineWriteQueue(file, step_bytes)
    return ThreadedWriteQueue(file, step_bytes, num_in_flight)


class BufferedAccess:
    """Access through the page cache: bytes move as they are."""

    name = "buffered"
    open_flags = 0

    def start_writer(self, file: OpenFile, num_in_flight: int) -> BufferedWriter:
        """Begin appending to an empty file."""
        return BufferedWriter(open_write_queue(file, num_in_flight, step_bytes=1))

    def write(self, file: OpenFile, content: memoryview) -> int:
        """Write all of an empty file; by how many bytes it has become too long."""
        write_whole(file, content, 0)
        file.counters.add(written_bytes=len(content))
        return 0

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the caller has checked that the file is long enough."""
        read_whole(file, buffer, offset, needed_bytes=len(buffer))


class BufferedWriter:
    """Appends buffers to one file; used by one thread."""

    padding_bytes = 0

    def __init__(self, writes: WriteQueue) -> None:
        self._writes = writes
        self.size_bytes = 0

    def append(self, buffer: memoryview, release: Release | None) -> None:
        piece = QueuedWrite(self.size_bytes, flat(buffer), buffer.nbytes, release)
        self.size_bytes += buffer.nbytes
        self._writes.put(piece)

    def complete(self) -> None:
        self._writes.drain()

    def give_up(self) -> None:
        self._writes.give_up()


COPY_REASON = "direct-unaligned"
NUM_IDLE_BOUNCES = 16


class DirectAccess:
    """Access past the page cache, by O_DIRECT; all files of one storage share its bounce buffers."""

    name = "direct"
    open_flags = os.O_DIRECT

    def __init__(self, alignment_bytes: int, bounce_bytes: int) -> None:
        self._alignment_bytes = alignment_bytes
        self._bounces = BufferPool(bounce_bytes, NUM_IDLE_BOUNCES)

    def start_writer(self, file: OpenFile, num_in_flight: int) -> DirectWriter:
        """Begin appending to an empty file."""
        writes = open_write_queue(file, num_in_flight, self._alignment_bytes)
        return DirectWriter(writes, self._bounces, self._alignment_bytes, file.counters)

    def write(self, file: OpenFile, content: memoryview) -> int:
        """Write all of an empty file; by how many bytes it has become too long."""
        writer = self.start_writer(file, 1)
        try:
            writer.append(content, None)
            writer.complete()
        finally:
            writer.give_up()
        return writer.padding_bytes

    def read_into(self, file: OpenFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the caller has checked that the file is long enough."""
        aligned = aligned_range(buffer, offset, self._alignment_bytes)
        self._read_bounced(file, offset, buffer[: aligned.start])
        if aligned:
            read_whole(
                file,
                buffer[aligned.start : aligned.stop],
                offset + aligned.start,
                needed_bytes=len(aligned),
                step_bytes=self._alignment_bytes,
            )
        self._read_bounced(file, offset + aligned.stop, buffer[aligned.stop :])

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
    """Appends buffers to one file in aligned pieces; used by one thread."""

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
        """Write the aligned part of `buffer`; copies of the rest wait until their block is full.

        `release` is called once, even if this raises.
        """
        buffer = flat(buffer)
        aligned = aligned_range(buffer, self.size_bytes, self._alignment_bytes)
        middle_offset = self.size_bytes + aligned.start
        middle = QueuedWrite(middle_offset, buffer[aligned.start : aligned.stop], len(aligned), release)
        try:
            self._append_copied(buffer[: aligned.start])
            if aligned:
                self._put_bounce()
        except StorageError:
            middle.release_buffer()
            raise
        if not aligned:
            middle.release_buffer()
            return
        self.size_bytes += len(aligned)
        # The tail is copied before the middle is put: from then on the owner may refill the buffer.
        self._hold(buffer[aligned.stop :])
        self._writes.put(middle)

    def complete(self) -> None:
        """Write the padded last block and wait; the file then ends with `padding_bytes` to cut off."""
        self._put_bounce()
        self._writes.drain()

    def give_up(self) -> None:
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
        # A bounce buffer that is put is full, save the last one of a file: no other piece is ever padded.
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


FileAccess = BufferedAccess | DirectAccess
FileWriter = BufferedWriter | DirectWriter


class FileSource:
    """A file opened for reading; reads from any thread carry their own offsets."""

    def __init__(self, file: OpenFile, access: FileAccess, size_bytes: int) -> None:
        self._file = file
        self._access = access
        self._size_bytes = size_bytes
        self._is_open = True

    @property
    def descriptor(self) -> int:
        """The open file's."""
        return self._file.descriptor

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        wanted = flat(buffer)
        if offset + len(wanted) > self._size_bytes:
            raise ShortTransfer(
                f"{len(wanted)} bytes at offset {offset} reach past the end, {self._size_bytes}",
                uri=self._file.uri,
                expected_bytes=len(wanted),
                actual_bytes=max(0, self._size_bytes - offset),
                fix="Ask for ranges inside size_bytes.",
            )
        self._access.read_into(self._file, offset, wanted)
        self._file.counters.add(read_bytes=len(wanted))

    def close(self) -> None:
        """Close the file; no thread may be reading."""
        if self._is_open:
            self._is_open = False
            close_after_reading(self._file.calls, self._file.descriptor)


def aligned_range(buffer: memoryview, offset: int, alignment_bytes: int) -> range:
    """The part of `buffer`, whose file offset is `offset`, that needs no bounce: whole aligned blocks.

    Without such blocks the range is empty and lies at the buffer's end.
    """
    lead = -offset % alignment_bytes
    num_blocks = (len(buffer) - lead) // alignment_bytes
    if num_blocks < 1 or (address_of(buffer) + lead) % alignment_bytes:
        return range(len(buffer), len(buffer))
    return range(lead, lead + num_blocks * alignment_bytes)
