"""Pieces of one file on their way down: in the caller's thread, or several at once in threads of the sink.

Between the writers, which decide offsets, and `transfer`. Invariant: each piece that is put is let go of
exactly once, written or not, and never while the kernel may still read it. That is why no wait here has a
limit of its own: giving up on a stuck write would hand out a buffer that is still being read.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.errors import StorageError
from penstock.storage.files.transfer import OpenFile, write_whole

if TYPE_CHECKING:
    from penstock.storage.base import Release


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes for one offset; `payload_bytes` of them are the caller's, the rest is padding."""

    offset: int
    buffer: memoryview
    payload_bytes: int
    release: Release | None

    def let_go(self) -> None:
        """Tell the owner that the buffer is free again."""
        if self.release is not None:
            self.release()


class Writes(Protocol):
    """Where a writer puts its pieces; used by one thread."""

    def put(self, piece: Piece) -> None:
        """Write `piece` now or soon; raises the failure of this or an earlier one."""

    def drain(self) -> None:
        """Return when everything is written; raises the first failure."""

    def give_up(self) -> None:
        """Return when nothing is in flight, written or not. Safe twice, raises nothing."""


def start_writes(file: OpenFile, num_in_flight: int, step_bytes: int) -> Writes:
    """The kind of `Writes` that `num_in_flight` asks for; `step_bytes` as in `write_whole`."""
    if num_in_flight == 1:
        return InlineWrites(file, step_bytes)
    return ThreadedWrites(file, step_bytes, num_in_flight)


def _write(file: OpenFile, piece: Piece, step_bytes: int) -> None:
    write_whole(file, piece.buffer, piece.offset, step_bytes=step_bytes)
    file.counters.add(written_bytes=piece.payload_bytes)


class InlineWrites:
    """One piece at a time, in the thread that puts it."""

    def __init__(self, file: OpenFile, step_bytes: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._failure: StorageError | None = None

    def put(self, piece: Piece) -> None:
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


class ThreadedWrites:
    """Up to `num_in_flight` pieces at a time, each in a thread that pwrite lets run without the GIL."""

    def __init__(self, file: OpenFile, step_bytes: int, num_in_flight: int) -> None:
        self._file = file
        self._step_bytes = step_bytes
        self._threads = ThreadPoolExecutor(num_in_flight, thread_name_prefix="penstock-write")
        self._free_slots = threading.Semaphore(num_in_flight)
        self._pending: deque[Future[None]] = deque()
        self._stopped = threading.Event()

    def put(self, piece: Piece) -> None:
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

    def _write(self, piece: Piece) -> None:
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
