"""The timed loops of the probe, one function per operation, and the blocks of data that they write.

Each loop runs on one thread and owns its blocks. Blocks are page-aligned and incompressible; stamping one
again before each write keeps content generation out of the timed section.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from penstock.bench.probe.probe_plan import ProbeStep
from penstock.errors import PenstockError, ShortTransfer, StorageTimeout
from penstock.progress import Progress
from penstock.storage import Storage, capabilities
from penstock.storage.aligned import PAGE_BYTES
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import write_object
from penstock.transfer.buffers import WarmMemory

Move = Callable[[int], int]
"""Moves a block at an offset; returns how many bytes it moved."""


class ObjectTarget:
    """Ranges of one object are read; a write is a whole new object of one block, in place of an older one."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._source = storage.open(key)

    def reader(self, buffer: memoryview) -> Move:
        """Fills a block from the object."""

        def read(offset: int) -> int:
            self._source.read_into(offset, buffer)
            return buffer.nbytes

        return read

    def writer(self, buffer: memoryview, slot: int) -> Move:
        """Writes an object of one block, durable on return."""
        key = slot_key(self._key, slot)

        def write(_offset: int) -> int:
            write_object(self._storage, key, [buffer], size_bytes=buffer.nbytes)
            return buffer.nbytes

        return write

    def close(self) -> None:
        """Close the object."""
        self._source.close()


def check_moved(moved: int, wanted: int, uri: str) -> None:
    """Raise `ShortTransfer` unless a whole block moved."""
    if moved != wanted:
        raise ShortTransfer(
            f"Only {moved} of {wanted} bytes moved",
            uri=uri,
            expected_bytes=wanted,
            actual_bytes=moved,
            fix="Check that nothing truncates the file meanwhile.",
        )


def slot_key(key: str, slot: int) -> str:
    """The object that writes of one slot replace, on storages without writes in place."""
    return f"{key}-write{slot}"


class FileTarget:
    """Blocks of one file in place: past the page cache, or through it, durable and never out of memory."""

    def __init__(self, storage: SupportsLocalPaths, key: str, uri: str, *, is_sequential: bool) -> None:
        self._is_buffered = storage.uses_page_cache
        flags = os.O_RDWR | (os.O_DSYNC if self._is_buffered else os.O_DIRECT)
        with translate_os_errors("Opening", f"{uri}/{key}"):
            self.descriptor = os.open(storage.local_path(key), flags)
        if not is_sequential:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def reader(self, buffer: memoryview) -> Move:
        """Fills a block; the page cache does not keep it for the next time."""
        read = partial(os.preadv, self.descriptor, (buffer,))
        return partial(self._read_and_forget, read) if self._is_buffered else read

    def _read_and_forget(self, read: Move, offset: int) -> int:
        moved = read(offset)
        os.posix_fadvise(self.descriptor, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def writer(self, buffer: memoryview, slot: int) -> Move:  # noqa: ARG002 - one file for all
        """Writes a block over the one that is there."""
        return partial(os.pwritev, self.descriptor, (buffer,))

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


BlockTarget = ObjectTarget | FileTarget


def find_local_files(storage: Storage) -> SupportsLocalPaths | None:
    """The storage itself, if its blocks are reached by opening its files; a wrapper is not passed by."""
    return cast("SupportsLocalPaths", storage) if isinstance(storage, SupportsLocalPaths) else None


_SILENCE_S = 300
"""The time without any accepted block after which a storage counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTask:
    """One thread's task. It passes `gate` twice before its clock starts: all threads, all ranks."""

    storage: Storage
    step: ProbeStep
    key: str
    blocks: Blocks
    gate: threading.Barrier
    stop: threading.Event
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """One thread's times on the monotonic clock, and for each block when it ended and how long it took.

    `create_ns`, before the start, is what it took to create an object and to reserve its space; `drain_ns`,
    before the end, is the wait for durability.
    """

    start_ns: int
    end_ns: int
    create_ns: int
    drain_ns: int
    ended_ns: NDArray[np.int64]
    latencies_ns: NDArray[np.int64]


class StreamStopped(PenstockError):
    """Raised in streams that stop because another one failed or the user interrupted; never the cause."""

    def __init__(self) -> None:
        super().__init__("Stopped because the measurement as a whole stopped")


class _Watch:
    """Start, end, and each block's times. Made once a stream is ready; returns once all others are."""

    def __init__(self, task: StreamTask, *, create_ns: int = 0) -> None:
        self._create_ns = create_ns
        self._stop = task.stop
        self._progress = task.progress
        self._size_bytes = task.step.block_bytes
        # Whoever follows needs no more than some updates a second, and they cost as much as a small read.
        self._told_at = max(1, _TOLD_BYTES // self._size_bytes)
        self._began_ns = [0] * task.step.blocks_per_stream
        self._ended_ns = [0] * task.step.blocks_per_stream
        try:
            task.gate.wait()  # the threads of this rank
            task.gate.wait()  # then all ranks
        except threading.BrokenBarrierError:
            raise StreamStopped from None
        self._start_ns = time.monotonic_ns()

    def begin(self, operation: int) -> None:
        if self._stop.is_set():
            raise StreamStopped
        self._began_ns[operation] = time.monotonic_ns()

    def done(self, operation: int) -> None:
        self._ended_ns[operation] = time.monotonic_ns()
        if operation % self._told_at == 0:
            self._progress.advance(self._size_bytes * min(self._told_at, len(self._ended_ns) - operation))

    def stop(self, drain_from_ns: int | None = None) -> StreamTimes:
        end_ns = time.monotonic_ns()
        ended_ns = np.array(self._ended_ns, dtype=np.int64)
        return StreamTimes(
            start_ns=self._start_ns,
            end_ns=end_ns,
            create_ns=self._create_ns,
            drain_ns=end_ns - drain_from_ns if drain_from_ns else 0,
            ended_ns=ended_ns,
            latencies_ns=ended_ns - np.array(self._began_ns, dtype=np.int64),
        )


_TOLD_BYTES: Final = 4 << 20


def write(task: StreamTask) -> StreamTimes:
    """One object, front to back, durable at the end; a block is reused once the storage has released it."""
    step, blocks = task.step, task.blocks
    free: SimpleQueue[int] = SimpleQueue()
    for index in range(len(blocks)):
        free.put(index)
    with ExitStack() as undo:
        begin_ns = time.monotonic_ns()
        sink = task.storage.create(task.key, step.blocks_per_stream * step.block_bytes)
        undo.callback(sink.abort)
        watch = _Watch(task, create_ns=time.monotonic_ns() - begin_ns)
        for operation in range(step.blocks_per_stream):
            index = _next_free(free, task)
            buffer = blocks.renew(index)
            watch.begin(operation)
            sink.submit(buffer, _released(watch, operation, free, index))
        submitted_ns = time.monotonic_ns()
        sink.finish()
        times = watch.stop(drain_from_ns=submitted_ns)
        undo.pop_all()
    return times


def _next_free(free: SimpleQueue[int], task: StreamTask) -> int:
    try:
        return free.get(timeout=_SILENCE_S)
    except Empty:
        raise StorageTimeout(
            f"Storage has kept all {len(task.blocks)} blocks for {_SILENCE_S} s without releasing one",
            uri=f"{task.storage.uri}/{task.key}",
            fix="Look at the server's load; on object stores lower parts_in_flight.",
        ) from None


def _released(watch: _Watch, operation: int, free: SimpleQueue[int], index: int) -> Callable[[], None]:
    def release() -> None:
        watch.done(operation)
        free.put(index)

    return release


def read(task: StreamTask) -> StreamTimes:
    """One object, front to back."""
    return _read_at(task, range(task.step.blocks_per_stream))


def random_read(task: StreamTask) -> StreamTimes:
    """Blocks of one object, each at most once, in an order that no read-ahead guesses."""
    with closing(task.storage.open(task.key)) as source:
        num_blocks = source.size_bytes // task.step.block_bytes
    # Seeded by the size: two probes of equal files read in the same order.
    order = np.random.Generator(np.random.SFC64(num_blocks)).permutation(num_blocks)
    return _read_at(task, order[: task.step.blocks_per_stream].tolist())


def _read_at(task: StreamTask, positions: range | list[int]) -> StreamTimes:
    size_bytes, uri = task.step.block_bytes, f"{task.storage.uri}/{task.key}"
    with closing(_open_target(task)) as target, translate_os_errors("Reading", uri):
        read = target.reader(task.blocks.view(0))
        watch = _Watch(task)
        for operation, position in enumerate(positions):
            watch.begin(operation)
            moved = read(position * size_bytes)
            watch.done(operation)
            check_moved(moved, size_bytes, uri)
        times = watch.stop()
    if isinstance(target, FileTarget):
        task.storage.counters.add(requests=len(positions), read_bytes=len(positions) * size_bytes)
    return times


def _open_target(task: StreamTask) -> BlockTarget:
    """Past the page cache the file itself: there what a storage adds to a call is a part of its latency."""
    files = find_local_files(task.storage)
    if files is None or files.uses_page_cache or task.step.block_bytes % PAGE_BYTES:
        return ObjectTarget(task.storage, task.key)
    return FileTarget(files, task.key, task.storage.uri, is_sequential=task.step.op == "read")


def small_key(key: str, number: int) -> str:
    """The name of one of a stream's many small objects."""
    return f"{key}-{number}"


def small_write(task: StreamTask) -> StreamTimes:
    """Many objects of one block, each durable before the next begins."""
    watch = _Watch(task)
    for operation in range(task.step.blocks_per_stream):
        buffer = task.blocks.renew(0)
        watch.begin(operation)
        with ExitStack() as undo:
            sink = task.storage.create(small_key(task.key, operation), len(buffer))
            undo.callback(sink.abort)
            sink.submit(buffer)
            sink.finish()
            undo.pop_all()
        watch.done(operation)
    return watch.stop()


def small_read(task: StreamTask) -> StreamTimes:
    """Many objects of one block: open, read, close."""
    buffer = task.blocks.view(0)
    watch = _Watch(task)
    for operation in range(task.step.blocks_per_stream):
        watch.begin(operation)
        with closing(task.storage.open(small_key(task.key, operation))) as source:
            source.read_into(0, buffer)
        watch.done(operation)
    return watch.stop()


def fsync(task: StreamTask) -> StreamTimes:
    """One block appended and fsynced at a time, as a journal does; the storage protocol has no such call."""
    folder = capabilities.find_local_root(task.storage)
    assert folder is not None, "fsync is planned for file systems only"
    path = folder / task.key
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with ExitStack() as undo:
        undo.callback(path.unlink)
        undo.callback(os.close, descriptor)
        watch = _Watch(task)
        for operation in range(task.step.blocks_per_stream):
            buffer = task.blocks.renew(0)
            watch.begin(operation)
            os.write(descriptor, buffer)
            os.fsync(descriptor)
            watch.done(operation)
        return watch.stop()


_STAMPED_BYTES: Final = 4096
"""The smallest unit that storage systems compare when they look for duplicates."""


class Blocks:
    """`num_blocks` blocks of `block_bytes` each, for one stream on one thread."""

    def __init__(self, num_blocks: int, block_bytes: int, *, stream_id: int) -> None:
        # The same memory as the pipeline of checkpoints has: a limit must not be lower for its small pages.
        memory = WarmMemory(num_blocks * _whole_pages(block_bytes))
        random = np.random.Generator(np.random.SFC64(stream_id))
        words = np.frombuffer(memory.view, dtype=np.uint64)
        words[:] = random.integers(0, 2**64, size=words.size, dtype=np.uint64)
        words = words.reshape(num_blocks, -1)
        self._stamped = words[:, :: _STAMPED_BYTES // 8]
        self._views = [memoryview(row).cast("B")[:block_bytes] for row in words]  # type: ignore[arg-type]
        self._stamps = np.arange(self._stamped.shape[1], dtype=np.uint64)
        self._next_stamp = count((stream_id + 1) << 48, self._stamps.size)

    def __len__(self) -> int:
        return len(self._views)

    def view(self, index: int) -> memoryview:
        """Block `index` as it is: the buffer to read into."""
        return self._views[index]

    def renew(self, index: int) -> memoryview:
        """Block `index` with content that was never written before by this stream."""
        self._stamped[index] = self._stamps + np.uint64(next(self._next_stamp))
        return self._views[index]


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _STAMPED_BYTES) * _STAMPED_BYTES
