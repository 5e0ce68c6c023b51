"""The timed loops of a load: threads over any storage, or one thread over io_uring for files past the cache.

Both take operations in the order of the schedule, as soon as one is due and a slot is free, and note when it
was due, a slot was free, it began and it ended. Without a schedule the next one is due when a slot is free: a
closed loop, which finds out how fast a storage answers at most.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol, cast

import numpy as np

from penstock.bench.probe.io_uring import READ, WRITE, RequestRing
from penstock.bench.probe.load_plan import NS, LoadShape, OperationTimes
from penstock.bench.probe.timed_streams import Blocks, StreamStopped
from penstock.errors import ShortTransfer
from penstock.storage import Storage
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import map_os_error, translate_os_errors
from penstock.storage.protocol import write_object

_PATTERN: Final = 1 << 14
"""So many operations are chosen in advance, then again from the first."""
_SEED: Final = 18


@dataclass(frozen=True, slots=True)
class Operations:
    """What the operations of a load are, one after the other, again and again: where, and whether writes."""

    offsets: Sequence[int]
    writes: Sequence[bool]

    @classmethod
    def of(cls, shape: LoadShape, size_bytes: int, rank: int) -> Operations:
        """Blocks of one object, each once before any comes again, with writes spread evenly among reads."""
        blocks = max(1, size_bytes // shape.block_bytes)
        random = np.random.Generator(np.random.SFC64(_SEED + rank))
        order = np.arange(blocks) if shape.is_sequential else random.permutation(blocks)
        # Writes in exact proportion and random order: shuffled within each hundred.
        hundred = np.arange(100) >= shape.read_percent
        writes = np.concatenate([random.permutation(hundred) for _ in range(-(-_PATTERN // 100))])
        return cls((order * shape.block_bytes).tolist(), writes.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One load of this rank: due times in nanoseconds from the start, or None for a closed loop."""

    operations: Operations
    due_ns: Sequence[int] | None
    seconds: float
    first: int = 0
    """Where in the operations to begin, so that a second run does not repeat the first."""
    start: Callable[[], None] = lambda: None
    """Returns once all ranks are ready."""

    @property
    def stop_ns(self) -> int:
        """When to give up what has not begun: a little after the end, so that what is late may still come."""
        grace_s = min(1.0, 0.25 * self.seconds) if self.due_ns is not None else 0.0
        return round((self.seconds + grace_s) * NS)


class LoadLoop(Protocol):
    """A way to keep operations in flight."""

    name: str

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load and return when everything that began has ended."""


class LoadTarget(Protocol):
    """What threads operate on; a thread has its slot's number, and its block of memory."""

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a block."""

    def write(self, offset: int, buffer: memoryview, slot: int) -> None:
        """Write a block."""

    def close(self) -> None:
        """Release what is open."""


class ObjectTarget:
    """Ranges of one object are read; a write is a whole new object of one block, in place of an older one."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._source = storage.open(key)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a block from the object."""
        self._source.read_into(offset, buffer)

    def write(self, offset: int, buffer: memoryview, slot: int) -> None:  # noqa: ARG002 - objects have none
        """Write an object of one block, durable on return."""
        write_object(self._storage, slot_key(self._key, slot), [buffer], size_bytes=buffer.nbytes)

    def close(self) -> None:
        """Close the object."""
        self._source.close()


def slot_key(key: str, slot: int) -> str:
    """The object that writes of one slot replace, on storages without writes in place."""
    return f"{key}-write{slot}"


class FileTarget:
    """Blocks of one file in place: past the page cache, or through it, durable and never out of memory."""

    def __init__(self, storage: SupportsLocalPaths, key: str, uri: str, *, is_sequential: bool) -> None:
        self._uri = f"{uri}/{key}"
        self._is_buffered = storage.uses_page_cache
        flags = os.O_RDWR | (os.O_DSYNC if self._is_buffered else os.O_DIRECT)
        with translate_os_errors("Opening", self._uri):
            self.descriptor = os.open(storage.local_path(key), flags)
        if not is_sequential:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a block; the page cache does not keep it for the next time."""
        try:
            moved = os.preadv(self.descriptor, (buffer,), offset)
            if self._is_buffered:
                os.posix_fadvise(self.descriptor, offset, buffer.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise map_os_error(error, "Reading", self._uri) from error
        self._check(moved, buffer.nbytes)

    def write(self, offset: int, buffer: memoryview, slot: int) -> None:  # noqa: ARG002 - one file for all
        """Write a block over the one that is there."""
        try:
            moved = os.pwritev(self.descriptor, (buffer,), offset)
        except OSError as error:
            raise map_os_error(error, "Writing", self._uri) from error
        self._check(moved, buffer.nbytes)

    def _check(self, moved: int, wanted: int) -> None:
        if moved != wanted:
            raise ShortTransfer(
                f"Only {moved} of {wanted} bytes moved",
                uri=self._uri,
                expected_bytes=wanted,
                actual_bytes=moved,
                fix="Check that nothing truncates the file meanwhile.",
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


class ThreadLoop:
    """A thread for each slot: works on every storage."""

    name = "threads"

    def __init__(self, target: LoadTarget, blocks: Blocks) -> None:
        self._target = target
        self._blocks = blocks

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load; the first failure of a thread stops all and is raised."""
        slots = len(self._blocks)
        state = _ThreadsState(run, threading.Barrier(slots + 1))
        with ThreadPoolExecutor(slots, thread_name_prefix="penstock-load") as pool, ExitStack() as undo:
            undo.callback(state.stop.set)
            undo.callback(state.ready.abort)
            futures = [pool.submit(self._serve, state, slot) for slot in range(slots)]
            with suppress(threading.BrokenBarrierError):  # the thread that broke it carries the reason
                state.ready.wait()
                run.start()
                state.start_ns = time.monotonic_ns()
                state.ready.wait()
            failures = [error for future in futures if (error := future.exception()) is not None]
            causes = [error for error in failures if not isinstance(error, StreamStopped)]
            if failures:
                raise (causes or failures)[0]
            rows = [row for future in futures for row in future.result()]
        return _as_times(rows, run)

    def _serve(self, state: _ThreadsState, slot: int) -> list[_Row]:
        with _stops_others(state):
            return list(self._operate(state, slot))

    def _operate(self, state: _ThreadsState, slot: int) -> Iterator[_Row]:
        run, clock = state.run, time.monotonic_ns
        offsets, writes, due = run.operations.offsets, run.operations.writes, run.due_ns
        target, blocks = self._target, self._blocks
        _wake_up_on_time()
        state.ready.wait()
        state.ready.wait()
        start_ns = state.start_ns
        for number in state.numbers:
            if due is not None and number >= len(due):
                return
            free_ns = clock() - start_ns
            if free_ns >= run.stop_ns:
                return
            due_ns = free_ns if due is None else due[number]
            if due_ns > free_ns:
                _sleep_until(start_ns + due_ns, state.stop)
            elif state.stop.is_set():
                raise StreamStopped
            at = run.first + number
            offset, is_write = offsets[at % len(offsets)], writes[at % len(writes)]
            buffer = blocks.renew(slot) if is_write else blocks.view(slot)
            begun_ns = clock() - start_ns
            if is_write:
                target.write(offset, buffer, slot)
            else:
                target.read(offset, buffer)
            yield number, due_ns, free_ns, begun_ns, clock() - start_ns


_Row = tuple[int, int, int, int, int]
"""One operation: its number, and when it was due, a slot was free, it began, it ended."""
_COLUMNS: Final = 5


@dataclass(slots=True)
class _ThreadsState:
    """What the threads of one run share; the next of `numbers` is the next operation."""

    run: LoadRun
    ready: threading.Barrier
    stop: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=count)  # its next() is atomic
    start_ns: int = 0


@contextmanager
def _stops_others(state: _ThreadsState) -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(state.stop.set)
        undo.callback(state.ready.abort)
        try:
            yield
        except threading.BrokenBarrierError:
            raise StreamStopped from None
        undo.pop_all()


_LONGEST_SLEEP_S: Final = 0.1


def _sleep_until(moment_ns: int, stop: threading.Event) -> None:
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        if stop.is_set():
            raise StreamStopped
        time.sleep(min(left_ns / NS, _LONGEST_SLEEP_S))


_PR_SET_TIMERSLACK: Final = 29


def _wake_up_on_time() -> None:
    """Ask the kernel not to let sleeps of this thread end up to 50 us late, to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class RingLoop:
    """One thread with as many operations in flight in the kernel as there are slots."""

    name = "io_uring"

    def __init__(self, target: FileTarget, blocks: Blocks, uri: str) -> None:
        self._target = target
        self._blocks = blocks
        self._uri = uri

    def check(self) -> None:
        """Raise `Unavailable` where the kernel does not let us."""
        with self._open():
            pass

    def _open(self) -> RequestRing:
        buffers = [self._blocks.view(slot) for slot in range(len(self._blocks))]
        return RequestRing(self._target.descriptor, buffers, self._uri)

    def run(self, run: LoadRun) -> OperationTimes:
        """Perform one load."""
        _wake_up_on_time()
        with self._open() as ring:
            run.start()
            return _as_times(self._operate(ring, run), run)

    def _operate(self, ring: RequestRing, run: LoadRun) -> list[_Row]:
        offsets, writes, due = run.operations.offsets, run.operations.writes, run.due_ns
        last = len(due) if due is not None else None
        blocks, clock, stop_ns = self._blocks, time.monotonic_ns, run.stop_ns
        free = deque((slot, 0) for slot in range(len(blocks)))
        flying: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * len(blocks)
        rows: list[_Row] = []
        number = 0
        start_ns, now = clock(), 0
        while True:
            while free and number != last and now < stop_ns:
                due_ns = free[0][1] if due is None else due[number]
                if due_ns > now:
                    break
                slot, free_ns = free.popleft()
                at = run.first + number
                is_write = writes[at % len(writes)]
                if is_write:
                    blocks.renew(slot)
                ring.queue(slot, WRITE if is_write else READ, offsets[at % len(offsets)])
                flying[slot] = number, due_ns, free_ns, now
                number += 1
            is_over = number == last or now >= stop_ns
            if is_over and len(free) == len(blocks):
                return rows
            # With a slot free, the next operation may become due before anything ends.
            until_ns = None if is_over or not free or due is None else due[number] - now
            ended = ring.wait(1, until_ns)
            now = clock() - start_ns
            for slot in ended:
                rows.append((*flying[slot], now))
                free.append((slot, now))


def _as_times(rows: Sequence[_Row], run: LoadRun) -> OperationTimes:
    """The rows in the order of the schedule, and behind them what was due and never began."""
    table = np.array(rows, dtype=np.int64).reshape(-1, _COLUMNS)
    numbers, due, free, begun, ended = table[np.argsort(table[:, 0], kind="stable")].T
    if run.due_ns is not None and numbers.size < len(run.due_ns):
        missing = np.asarray(run.due_ns[numbers.size :], dtype=np.int64)
        never = np.full(missing.size, run.stop_ns, dtype=np.int64)
        numbers = np.append(numbers, np.arange(numbers.size, len(run.due_ns)))
        due, free = np.append(due, missing), np.append(free, never)
        begun, ended = np.append(begun, never), np.append(ended, never)
    writes = np.asarray(run.operations.writes)
    return OperationTimes(due, free, begun, ended, writes[(run.first + numbers) % writes.size])


def find_local_files(storage: Storage) -> SupportsLocalPaths | None:
    """The storage itself, if its blocks are reached by opening its files; a wrapper is not passed by."""
    return cast("SupportsLocalPaths", storage) if isinstance(storage, SupportsLocalPaths) else None
