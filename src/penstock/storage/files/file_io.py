"""Bytes between an open file and buffers: complete transfers, and several writes of one file in flight.

`write_whole` and `read_whole` continue short transfers and return only when every byte has moved.
Invariant of the write queues: each write that is put is released exactly once, done or not, and never while
the kernel may still read it. That is why no wait here has a limit of its own: giving up on a stuck write
would hand out a buffer that is still being read.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.files.system_calls import FileCalls, map_os_error

if TYPE_CHECKING:
    from penstock.storage.counters import Counters
    from penstock.storage.protocol import Release


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open descriptor, and what is needed to use it and to speak of it."""

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
    """Bytes to move on by: all, if that is enough, else whole steps, so that direct I/O stays aligned."""
    if done + moved >= needed:
        return moved
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


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    """Bytes for one offset; `payload_bytes` of them are the caller's, the rest is padding."""

    offset: int
    buffer: memoryview
    payload_bytes: int
    release: Release | None

    def let_go(self) -> None:
        """Tell the owner that the buffer is free again."""
        if self.release is not None:
            self.release()


class WriteQueue(Protocol):
    """Where a writer puts its pieces; used by one thread."""

    def put(self, piece: QueuedWrite) -> None:
        """Write `piece` now or soon; raises the failure of this or an earlier one."""

    def drain(self) -> None:
        """Return when everything is written; raises the first failure."""

    def give_up(self) -> None:
        """Return when nothing is in flight, written or not. Safe twice, raises nothing."""


def open_write_queue(file: OpenFile, num_in_flight: int, step_bytes: int) -> WriteQueue:
    """The kind of `WriteQueue` that `num_in_flight` asks for; `step_bytes` as in `write_whole`."""
    if num_in_flight == 1:
        return InlineWriteQueue(file, step_bytes)
    return ThreadedWriteQueue(file, step_bytes, num_in_flight)


def _write(file: OpenFile, piece: QueuedWrite, step_bytes: int) -> None:
    write_whole(file, piece.buffer, piece.offset, step_bytes=step_bytes)
    file.counters.add(written_bytes=piece.payload_bytes)


class InlineWriteQueue:
    """One piece at a time, in the thread that puts it."""

    def __init__(self, file: OpenFile, step_bytes: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._failure: StorageError | None = None

    def put(self, piece: QueuedWrite) -> None:
        """Write `piece` before returning."""
        try:
            self.drain()
            _write(self._file, piece, self._step_bytes)
        except StorageError as error:
            self._failure = error
            raise
        finally:
            piece.let_go()

    def drain(self) -> None:
        """Raise what `put` raised: nothing else is left to wait for."""
        if self._failure is not None:
            raise self._failure

    def give_up(self) -> None:
        """Nothing is ever in flight between two calls."""


class ThreadedWriteQueue:
    """Up to `num_in_flight` pieces at a time, each in a thread that pwrite lets run without the GIL."""

    def __init__(self, file: OpenFile, step_bytes: int, num_in_flight: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._threads = ThreadPoolExecutor(num_in_flight, thread_name_prefix="penstock-write")
        self._free_slots = threading.Semaphore(num_in_flight)
        self._pending: deque[Future[None]] = deque()
        self._stopped = threading.Event()

    def put(self, piece: QueuedWrite) -> None:
        """Wait for a free slot and hand `piece` to a thread."""
        self._free_slots.acquire()
        try:
            self._raise_known_failure()
        except StorageError:
            self._free_slots.release()
            piece.let_go()
            raise
        self._pending.append(self._threads.submit(self._write, piece))

    def drain(self) -> None:
        """Wait for all threads."""
        self._threads.shutdown(wait=True)
        self._raise_known_failure()

    def give_up(self) -> None:
        """Let queued pieces pass unwritten and wait for those being written."""
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
            piece.let_go()

    def _raise_known_failure(self) -> None:
        """Forget finished pieces up to the first that failed; that one stays, to be raised every time."""
        while self._pending and self._pending[0].done():
            self._pending[0].result()
            self._pending.popleft()
