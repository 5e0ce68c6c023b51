"""Executes planned operations on a storage: N streams, objects in chunks, 2 chunks of memory a stream.

Operations are taken in the plan's order; one waits for those before it on the same object, so that streams
cannot reorder what depends on each other. A time counts what the storage took: making and checking content
lies outside. What is read is verified before it counts; anything else is a miss with a name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.errors import ObjectNotFound, StorageError
from penstock.kvcache import entries
from penstock.kvcache.entries import EntryLayout, EntryOutcome
from penstock.kvcache.io_plan import Op, Operations
from penstock.storage import Source, Storage, capabilities, residency
from penstock.storage.aligned import aligned_buffer

TIMED: Final = np.dtype(
    [("begin_ns", "<i8"), ("busy_ns", "<i8"), ("end_ns", "<i8"), ("lag_ns", "<i8"), ("outcome", "u1")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How operations are executed.

    Closed loop: as many as there are streams are in flight. Open loop (`speedup` above 0): each begins when
    the workload's time, divided by `speedup`, has come, or later by a lag if all streams are busy. After
    `duration_s` no more operations begin. At most `most_writers` write or delete at a time; 0: no limit.
    """

    streams: int = 8
    chunk_bytes: int = 32 << 20
    speedup: float = 0.0
    duration_s: float | None = None
    seed: int = 42
    evicts: bool = True
    most_writers: int = 0


@dataclass(slots=True)
class Residue:
    """How much of what was read was in the page cache before and after its eviction."""

    before_bytes: int = 0
    after_bytes: int = 0
    total_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, eviction: residency.Eviction) -> None:
        """Count one object."""
        with self.lock:
            self.before_bytes += eviction.before.resident_bytes
            self.after_bytes += eviction.after.resident_bytes
            self.total_bytes += eviction.after.total_bytes


@dataclass(slots=True)
class _Progress:
    """Which operation is next, and what is still going on with each object; guarded by `changed`."""

    next_place: int = 0
    is_stopped: bool = False
    writing: set[int] = field(default_factory=set)
    readers: dict[int, int] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class IoEngine:
    """One rank's executor of a list of operations; `timed` has a row for each of them afterwards."""

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
        self.residue = Residue()
        self._storage = storage
        self._operations = operations
        self._objects = operations["entry"] * layout.parts + operations["part"]
        self._layout = layout
        self._settings = settings
        self._advance = advance
        self._progress = _Progress()
        self._start_ns = 0
        self._paths = capabilities.find_local_paths(storage) if settings.evicts else None
        if self._paths is not None and not self._paths.uses_page_cache:
            self._paths = None

    def run(self, wait_for_start: Callable[[], None] = lambda: None) -> None:
        """Execute everything; the first error of storage, other than a miss, ends it and is raised."""
        warm = Content(self._settings.seed, 0)
        if not self._layout.has_footer:
            warm.prepare_verification()
        streams = max(1, min(self._settings.streams, len(self._operations)))
        buffers = [self._buffers() for _ in range(streams)]
        wait_for_start()
        self._start_ns = time.monotonic_ns()
        with ThreadPoolExecutor(streams, "kvcache") as pool:
            for future in [pool.submit(self._run_stream, pair) for pair in buffers]:
                future.result()

    def _buffers(self) -> _StreamBuffers:
        sizes = self._operations["bytes"][self._operations["op"] != Op.DELETE]
        chunk = min(self._settings.chunk_bytes, int(sizes.max(initial=1)))
        return _StreamBuffers(chunk, self._layout.footer_bytes)

    def _run_stream(self, buffers: _StreamBuffers) -> None:
        with ExitStack() as undo:
            # A stream that fails stops the others, which else would wait for what it was to write.
            undo.callback(self._stop)
            while (place := self._take()) is not None:
                try:
                    self._execute(place, buffers)
                finally:
                    self._done(place)
                self._advance(1)
            undo.pop_all()

    def _stop(self) -> None:
        with self._progress.changed:
            self._progress.is_stopped = True
            self._progress.changed.notify_all()

    def _take(self) -> int | None:
        """The next operation of the plan, once nothing that is going on stands in its way; None at the end.

        Operations begin in order: none overtakes one that waits, so that what it waits for has begun.
        """
        progress = self._progress
        with progress.changed:
            while not progress.is_stopped and progress.next_place < len(self._operations):
                place = progress.next_place
                if self._is_over(place):
                    return None
                target, is_read = int(self._objects[place]), self._operations["op"][place] == Op.READ
                if self._is_free(target, is_read=is_read):
                    progress.next_place += 1
                    if is_read:
                        progress.readers[target] = progress.readers.get(target, 0) + 1
                    else:
                        progress.writing.add(target)
                    return place
                progress.changed.wait()
        return None

    def _is_free(self, target: int, *, is_read: bool) -> bool:
        progress, limit = self._progress, self._settings.most_writers
        if target in progress.writing:
            return False
        return is_read or (
            not progress.readers.get(target) and not (limit and len(progress.writing) >= limit)
        )

    def _is_over(self, place: int) -> bool:
        """Whether the run ends before this operation: now, or before its time comes."""
        limit_s, speedup = self._settings.duration_s, self._settings.speedup
        if limit_s is None:
            return False
        due_s = float(self._operations["time_s"][place]) / speedup if speedup else 0.0
        return max(due_s, (time.monotonic_ns() - self._start_ns) / 1e9) > limit_s

    def _done(self, place: int) -> None:
        progress, target = self._progress, int(self._objects[place])
        with progress.changed:
            if target in progress.writing:
                progress.writing.remove(target)
            elif (left := progress.readers[target] - 1) > 0:
                progress.readers[target] = left
            else:
                del progress.readers[target]
            progress.changed.notify_all()

    def _execute(self, place: int, buffers: _StreamBuffers) -> None:
        operation, row = self._operations[place], self.timed[place]
        key = self._layout.key(int(operation["entry"]), int(operation["part"]))
        if operation["op"] == Op.READ and self._paths is not None:
            self._evict(self._paths, key)
        due_ns = self._wait_until_due(float(operation["time_s"]))
        timer = _Timer()
        if operation["op"] == Op.READ:
            outcome = self._read(key, int(operation["bytes"]), buffers, timer)
        elif operation["op"] == Op.WRITE:
            outcome = self._write(key, int(operation["bytes"]), buffers, timer)
        else:
            outcome = self._delete(key, timer)
        row["begin_ns"], row["end_ns"] = timer.begin_ns - self._start_ns, timer.end_ns - self._start_ns
        row["busy_ns"], row["outcome"] = timer.busy_ns, outcome
        row["lag_ns"] = 0 if due_ns is None else timer.begin_ns - due_ns

    def _wait_until_due(self, time_s: float) -> int | None:
        if not self._settings.speedup:
            return None
        due_ns = self._start_ns + int(time_s / self._settings.speedup * 1e9)
        while (left_ns := due_ns - time.monotonic_ns()) > 0 and not self._progress.is_stopped:
            time.sleep(min(left_ns / 1e9, 0.1))
        return due_ns

    def _evict(self, paths: capabilities.SupportsLocalPaths, key: str) -> None:
        try:
            self.residue.add(residency.evict_file(paths.local_path(key)))
        except ObjectNotFound:
            return  # the read finds out, and counts the miss

    def _read(self, key: str, size_bytes: int, buffers: _StreamBuffers, timer: _Timer) -> EntryOutcome:
        try:
            with timer.storage():
                source = self._storage.open(key)
            with ExitStack() as opened:
                opened.callback(source.close)
                expected_bytes = size_bytes + self._layout.footer_bytes
                judged = entries.judge_size(source.size_bytes, expected_bytes)
                if judged is not EntryOutcome.DONE:
                    return judged
                return self._read_payload(source, key, size_bytes, buffers.first, timer)
        except ObjectNotFound:
            return EntryOutcome.MISSING
        except StorageError:
            return EntryOutcome.UNREADABLE

    def _read_payload(
        self, source: Source, key: str, size_bytes: int, buffer: memoryview, timer: _Timer
    ) -> EntryOutcome:
        """Read all chunks, the footer with the last of them, and verify each."""
        footer_bytes, chunk_bytes = self._layout.footer_bytes, len(buffer) - self._layout.footer_bytes
        digest, content = xxhash.xxh3_128(), None
        if not footer_bytes:
            content = Content(self._settings.seed, key)
        for offset in range(0, size_bytes, chunk_bytes):
            payload = buffer[: min(chunk_bytes, size_bytes - offset)]
            is_last = offset + len(payload) == size_bytes
            whole = buffer[: len(payload) + footer_bytes] if is_last else payload
            with timer.storage():
                source.read_into(offset, whole)
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

    def _write(self, key: str, size_bytes: int, buffers: _StreamBuffers, timer: _Timer) -> EntryOutcome:
        content, digest = Content(self._settings.seed, key), xxhash.xxh3_128()
        footer_bytes, chunk_bytes = self._layout.footer_bytes, buffers.chunk_bytes
        sink = None
        with ExitStack() as undo:
            for offset in range(0, size_bytes, chunk_bytes):
                with timer.storage():
                    buffer = buffers.take_free()
                payload = buffer[: min(chunk_bytes, size_bytes - offset)]
                content.fill(payload, offset)
                whole = payload
                if footer_bytes:
                    digest.update(payload)
                    if offset + len(payload) == size_bytes:
                        whole = buffer[: len(payload) + footer_bytes]
                        whole[len(payload) :] = entries.make_footer(key, size_bytes, digest.digest())
                with timer.storage():
                    if sink is None:
                        sink = self._storage.create(key, size_bytes + footer_bytes)
                        undo.callback(sink.abort)
                    sink.submit(whole, buffers.lend(buffer))
            assert sink is not None, "entries are not empty"
            with timer.storage():
                sink.finish()
            undo.pop_all()
        return EntryOutcome.DONE

    def _delete(self, key: str, timer: _Timer) -> EntryOutcome:
        try:
            with timer.storage():
                self._storage.delete(key)
        except ObjectNotFound:
            return EntryOutcome.MISSING
        return EntryOutcome.DONE


class _StreamBuffers:
    """One stream's memory: a chunk and its footer, and a second one if a sink keeps the first for a while."""

    def __init__(self, chunk_bytes: int, footer_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._size_bytes = chunk_bytes + footer_bytes
        self.first = aligned_buffer(self._size_bytes)
        self._all = [self.first]
        self._lent: set[int] = set()
        self._changed = threading.Condition()

    def take_free(self) -> memoryview:
        """A buffer that no sink has; waits for one if both are in flight."""
        with self._changed:
            while True:
                for buffer in self._all:
                    if id(buffer) not in self._lent:
                        return buffer
                if len(self._all) == 1:
                    self._all.append(aligned_buffer(self._size_bytes))
                else:
                    self._changed.wait()

    def lend(self, buffer: memoryview) -> Callable[[], None]:
        """Hand the buffer to a sink; what is returned takes it back."""
        with self._changed:
            self._lent.add(id(buffer))

        def release() -> None:
            with self._changed:
                self._lent.discard(id(buffer))
                self._changed.notify_all()

        return release


class _Timer:
    """The time that the storage took, from its first call to its last."""

    def __init__(self) -> None:
        self.begin_ns = self.end_ns = time.monotonic_ns()
        self.busy_ns = 0
        self._has_begun = False

    @contextmanager
    def storage(self) -> Iterator[None]:
        """Count the body."""
        began_ns = time.monotonic_ns()
        if not self._has_begun:
            self.begin_ns, self._has_begun = began_ns, True
        try:
            yield
        finally:
            self.end_ns = time.monotonic_ns()
            self.busy_ns += self.end_ns - began_ns
