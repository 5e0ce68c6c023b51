"""Executes planned operations on storage: N streams, objects in chunks, two chunks of memory per stream.

Operations begin in the plan's order, and each waits for earlier operations on the same object, so that
streams cannot reorder operations that depend on each other. A stream is the right to have an object in
flight. If objects are large and fit into a chunk, two workers share each stream: while one worker's object is
in flight, the other generates or verifies the content of its own object. A measured time covers only what the
storage took. Data counts only after it has been verified; anything else is a miss of a named kind.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.errors import ObjectNotFound, StorageError
from penstock.kvcache import entries
from penstock.kvcache.entries import EntryLayout, EntryOutcome
from penstock.kvcache.io_plan import Op, Operations
from penstock.storage import Counters, Source, Storage, capabilities, residency
from penstock.storage.aligned import aligned_buffer
from penstock.transfer.buffers import HUGE_PAGE_BYTES, WarmMemory

_WORTH_PREPARING_BYTES: Final = 1 << 20
"""Generating less content than this takes less time than handing an object from one thread to another."""

TIMED: Final = np.dtype(
    [("begin_ns", "<i8"), ("busy_ns", "<i8"), ("end_ns", "<i8"), ("lag_ns", "<i8"), ("outcome", "u1")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the engine.

    Closed loop: each stream has an operation in flight. Open loop (`speedup` above 0): each operation begins
    at the workload's time divided by `speedup`, or later, by a lag, if all streams are busy. After
    `duration_s`, no more operations begin. At most `most_writers` operations write or delete at a time; 0
    means no limit.
    """

    streams: int = 8
    chunk_bytes: int = 32 << 20
    speedup: float = 0.0
    duration_s: float | None = None
    seed: int = 42
    most_writers: int = 0


def count_requests(storage: Storage) -> Counters:
    """Count the requests to `storage` so far, including those with which an engine wrote entries."""
    written = capabilities.defer_sync(storage, "names").counters
    mine = storage.counters.snapshot()
    return mine if written is storage.counters else mine + written.snapshot()


class IoEngine:
    """One rank's executor of a list of operations; `timed` has a row for each operation afterwards.

    Operations begin in order, so those that have begun are the first `num_begun`.
    `resident` counts the bytes of reads that were in the page cache before and after eviction, and all bytes
    of reads.
    """

    def __init__(
        self,
        storage: Storage,
        operations: Operations,
        layout: EntryLayout,
        settings: EngineSettings,
        *,
        advance: Callable[[float], None] = lambda _amount: None,
    ) -> None:
        self.timed: NDArray[np.void] = np.zeros(len(operations), TIMED)
        self.resident = np.zeros(3, np.int64)
        self._storage = storage
        # A name lost in a power cut only causes a miss, whereas data must never be wrong: only bytes are
        # synced.
        self._written = capabilities.defer_sync(storage, "names")
        self._operations = operations
        self._objects = operations["entry"] * layout.parts + operations["part"]
        self._layout = layout
        self._settings = settings
        self._advance = advance
        self._stopped = threading.Event()
        self._all_started = threading.Event()
        # Guarded by `_changed`: the place of the next operation, and the operations that use each object.
        self.num_begun = 0
        self._writing: set[int] = set()
        self._readers: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._free_streams = threading.Semaphore(max(1, settings.streams))
        self._start_ns = 0
        self._paths = capabilities.find_local_paths(storage)
        if self._paths is not None and not self._paths.uses_page_cache:
            self._paths = None

    def run(self, wait_for_start: Callable[[], None] = lambda: None) -> None:
        """Execute everything; the first error of the storage other than a miss ends the run and is raised."""
        warm = Content(self._settings.seed, 0)
        if not self._layout.footer_bytes:
            warm.prepare_verification()
        # The memory of each worker: one chunk if two workers share a stream, otherwise up to two.
        sizes = self._operations["bytes"][self._operations["op"] != Op.DELETE]
        largest, chunk_bytes = int(sizes.max(initial=1)), self._settings.chunk_bytes
        is_shared = _WORTH_PREPARING_BYTES <= largest <= chunk_bytes
        workers = max(1, min(self._settings.streams * (2 if is_shared else 1), len(self._operations)))
        buffers = [
            _Buffers(min(chunk_bytes, largest), self._layout.footer_bytes, most=1 if is_shared else 2)
            for _ in range(workers)
        ]
        wait_for_start()
        self._start_ns = time.monotonic_ns()
        with ThreadPoolExecutor(len(buffers), "kvcache") as pool, ExitStack() as undo:
            # Ctrl-C arrives here, in the thread that waits for the workers, and not in theirs.
            undo.callback(self._stop)
            futures = [pool.submit(self._run_worker, own) for own in buffers]
            self._all_started.set()
            for future in futures:
                future.result()

    def _run_worker(self, buffers: _Buffers) -> None:
        # The pool does not know a thread that was being started when Ctrl-C arrived, so it must not work.
        self._all_started.wait()
        with suppress(_Stopped), ExitStack() as undo:
            # A worker that fails stops the others, which would otherwise wait for what it was to write.
            undo.callback(self._stop)
            while (place := self._take()) is not None:
                try:
                    self._execute(place, buffers)
                finally:
                    self._done(place)
                self._advance(1)
            undo.pop_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopped.set()
            self._all_started.set()
            self._changed.notify_all()

    def _take(self) -> int | None:
        """Wait until the next operation conflicts with none in progress; return it, or None at the end.

        Operations begin in order: none overtakes one that waits, so every operation that is waited for has
        begun.
        """
        limit = self._settings.most_writers
        with self._changed:
            while not self._stopped.is_set() and self.num_begun < len(self._operations):
                place = self.num_begun
                if self._is_over(place):
                    break
                target, is_read = int(self._objects[place]), self._operations["op"][place] == Op.READ
                is_full = limit and len(self._writing) >= limit
                if target not in self._writing and (is_read or not (self._readers[target] or is_full)):
                    self.num_begun += 1
                    if is_read:
                        self._readers[target] += 1
                    else:
                        self._writing.add(target)
                    # Each worker that takes an operation wakes the one that may take the next.
                    self._changed.notify()
                    return place
                self._changed.wait()
            self._changed.notify()
        return None

    def _is_over(self, place: int) -> bool:
        """Return True if the run has ended, or ends before this operation is due."""
        limit_s, speedup = self._settings.duration_s, self._settings.speedup
        if limit_s is None:
            return False
        due_s = float(self._operations["time_s"][place]) / speedup if speedup else 0.0
        return max(due_s, (time.monotonic_ns() - self._start_ns) / 1e9) > limit_s

    def _done(self, place: int) -> None:
        target = int(self._objects[place])
        with self._changed:
            if target in self._writing:
                self._writing.remove(target)
            else:
                self._readers[target] -= 1
            self._changed.notify()

    def _execute(self, place: int, buffers: _Buffers) -> None:
        operation, row = self._operations[place], self.timed[place]
        key = self._layout.key(int(operation["entry"]), int(operation["part"]))
        turn = _Turn(
            self._free_streams,
            lambda: self._wait_until_due(float(operation["time_s"])),
            self._stopped,
        )
        with closing(turn):
            if operation["op"] == Op.READ:
                outcome = self._read(key, int(operation["bytes"]), buffers, turn)
            elif operation["op"] == Op.WRITE:
                outcome = self._write(key, int(operation["bytes"]), buffers, turn)
            else:
                outcome = EntryOutcome.DONE
                turn.begin()
                try:
                    with turn.storage():
                        self._storage.delete(key)
                except ObjectNotFound:
                    outcome = EntryOutcome.MISSING
        row["begin_ns"], row["end_ns"] = turn.begin_ns - self._start_ns, turn.end_ns - self._start_ns
        row["busy_ns"], row["outcome"] = turn.busy_ns, outcome
        row["lag_ns"] = 0 if turn.due_ns is None else turn.begin_ns - turn.due_ns

    def _wait_until_due(self, time_s: float) -> int | None:
        if not self._settings.speedup:
            return None
        due_ns = self._start_ns + int(time_s / self._settings.speedup * 1e9)
        while (left_ns := due_ns - time.monotonic_ns()) > 0 and not self._stopped.is_set():
            self._stopped.wait(min(left_ns / 1e9, 60))
        return due_ns

    def _read(self, key: str, size_bytes: int, buffers: _Buffers, turn: _Turn) -> EntryOutcome:
        if self._paths is not None:
            with suppress(ObjectNotFound):  # the read finds out, and counts the miss
                drop = residency.evict_file(self._paths.local_path(key))
                before, after = drop.before.resident_bytes, drop.after.resident_bytes
                with self._changed:
                    self.resident += (before, after, drop.after.total_bytes)
        turn.begin()
        try:
            with turn.storage():
                source = self._storage.open(key)
            with closing(source):
                expected_bytes = size_bytes + self._layout.footer_bytes
                if source.size_bytes != expected_bytes:
                    is_short = source.size_bytes < expected_bytes
                    return EntryOutcome.TRUNCATED if is_short else EntryOutcome.FOREIGN
                return self._read_payload(source, key, size_bytes, buffers.first, turn)
        except ObjectNotFound:
            return EntryOutcome.MISSING
        except StorageError:
            return EntryOutcome.UNREADABLE

    def _read_payload(
        self, source: Source, key: str, size_bytes: int, buffer: memoryview, turn: _Turn
    ) -> EntryOutcome:
        """Read all chunks, then the footer, and verify each; the last is verified once the stream is free."""
        footer_bytes, chunk_bytes = self._layout.footer_bytes, len(buffer) - self._layout.footer_bytes
        digest, content = xxhash.xxh3_128(), None
        if not footer_bytes:
            content = Content(self._settings.seed, key)
        for offset in range(0, size_bytes, chunk_bytes):
            payload = buffer[: min(chunk_bytes, size_bytes - offset)]
            is_last = offset + len(payload) == size_bytes
            whole = buffer[: len(payload) + footer_bytes] if is_last else payload
            with turn.storage():
                source.read_into(offset, whole)
            if is_last:
                turn.close()
            if content is None:
                digest.update(payload)
            elif content.verify(payload, offset) is not None:
                return EntryOutcome.TORN if entries.has_zero_page(payload) else EntryOutcome.FLIPPED
            if is_last and content is None:
                judged = entries.judge_footer(whole[len(payload) :], key, size_bytes, digest.digest())
                if judged is EntryOutcome.FLIPPED and entries.has_zero_page(payload):
                    return EntryOutcome.TORN
                return judged
        return EntryOutcome.DONE

    def _write(self, key: str, size_bytes: int, buffers: _Buffers, turn: _Turn) -> EntryOutcome:
        footer_bytes, sink = self._layout.footer_bytes, None
        content, digest = Content(self._settings.seed, key), xxhash.xxh3_128()
        with ExitStack() as undo:
            for offset in range(0, size_bytes, buffers.chunk_bytes):
                with turn.storage():
                    buffer = buffers.take()
                payload = buffer[: min(buffers.chunk_bytes, size_bytes - offset)]
                content.fill(payload, offset)
                whole = payload
                if footer_bytes:
                    digest.update(payload)
                    if offset + len(payload) == size_bytes:
                        whole = buffer[: len(payload) + footer_bytes]
                        whole[len(payload) :] = entries.make_footer(key, size_bytes, digest.digest())
                turn.begin()
                with turn.storage():
                    if sink is None:
                        sink = self._written.create(key, size_bytes + footer_bytes)
                        undo.callback(sink.abort)
                    sink.submit(whole, partial(buffers.free.put, buffer))
            assert sink is not None, "entries are not empty"
            with turn.storage():
                sink.finish()
            undo.pop_all()
        return EntryOutcome.DONE


class _Stopped(Exception):
    """Ends a worker's operation, because another worker failed or the user stopped the run."""


class _Buffers:
    """One worker's memory: a chunk with its footer.

    There is room for a second chunk if a sink keeps the first one and `most` is 2.
    """

    def __init__(self, chunk_bytes: int, footer_bytes: int, *, most: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._size_bytes = chunk_bytes + footer_bytes
        self._num_unmade = most - 1
        self.first = _make_buffer(self._size_bytes)
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        self.free.put(self.first)

    def take(self) -> memoryview:
        """Take a buffer that no sink holds, until it is put back into `free`; wait if all are in flight."""
        if self.free.empty() and self._num_unmade:
            self._num_unmade -= 1
            return _make_buffer(self._size_bytes)
        return self.free.get()


def _make_buffer(size_bytes: int) -> memoryview:
    """Allocate memory for a chunk: in huge pages if it is large, so that direct I/O makes fewer requests."""
    if size_bytes < HUGE_PAGE_BYTES:
        return aligned_buffer(size_bytes)
    memory = WarmMemory(size_bytes)
    memory.touch()
    return memory.view[:size_bytes]


class _Turn:
    """An operation's time on a stream: when it was due, when it began, and how long the storage took.

    `begin` waits until the operation is due and a stream is free; `close` frees the stream. Both may be
    called again.
    """

    def __init__(
        self,
        streams: threading.Semaphore,
        wait_until_due: Callable[[], int | None],
        stopped: threading.Event,
    ) -> None:
        self.due_ns: int | None = None
        self.begin_ns = self.end_ns = time.monotonic_ns()
        self.busy_ns = 0
        self._streams = streams
        self._wait_until_due = wait_until_due
        self._stopped = stopped
        self._has_begun = self._has_stream = False

    def begin(self) -> None:
        """Wait until the operation is due and a stream is free, and start the clock."""
        if self._has_begun:
            return
        self.due_ns = self._wait_until_due()
        self._streams.acquire()
        self._has_begun = self._has_stream = True
        self.begin_ns = self.end_ns = time.monotonic_ns()

    def close(self) -> None:
        """Free the stream for another operation."""
        if self._has_stream:
            self._has_stream = False
            self._streams.release()

    @contextmanager
    def storage(self) -> Iterator[None]:
        """Add the time that the body takes to the storage's time, once the operation has begun."""
        if self._stopped.is_set():
            raise _Stopped
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            if self._has_begun:
                self.end_ns = time.monotonic_ns()
                self.busy_ns += self.end_ns - began_ns
