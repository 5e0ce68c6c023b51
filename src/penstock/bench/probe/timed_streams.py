"""The timed loops of the probe, one function per operation, and the blocks of data that they write.

Each loop runs on one thread and owns its blocks. Blocks are page-aligned and incompressible. Before each
write a block is only stamped again, which keeps content generation out of the timed section.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.comm import Comm
from penstock.errors import ShortTransfer, StorageTimeout
from penstock.progress import Progress
from penstock.storage import Source, Storage, capabilities
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import SupportsLocalPaths
from penstock.storage.files.system_calls import translate_os_errors
from penstock.storage.protocol import write_object
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.pipeline import PipelineStopped, WorkerGroup

Operation = Literal["write", "read", "random_read", "small_write", "small_read", "fsync"]
Mode = Literal["buffered", "direct", "objects", "memory"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """One step to time on every rank: `streams` threads with one block in flight each.

    Each stream transfers `blocks_per_stream` blocks of `block_bytes`; a small object is one block.
    """

    op: Operation
    mode: Mode
    streams: int
    block_bytes: int
    blocks_per_stream: int

    @property
    def size_bytes(self) -> int:
        """The bytes that one rank transfers in this step."""
        return self.streams * self.blocks_per_stream * self.block_bytes


class StartGate:
    """The common start of the threads of all ranks. `start_ns` is its time on this host."""

    def __init__(self, num_threads: int) -> None:
        # The barrier is passed twice: once by the threads of this rank, then when all ranks are ready.
        self.barrier = threading.Barrier(num_threads + 1)
        self.stopped = threading.Event()
        self.start_ns = 0

    def stop(self) -> None:
        """Stop all threads of this rank."""
        self.stopped.set()
        self.barrier.abort()

    def wait(self) -> None:
        """Wait until the threads of all ranks are ready; `PipelineStopped` if any has failed."""
        try:
            self.barrier.wait()
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PipelineStopped from None

    def require_open(self) -> None:
        """Raise `PipelineStopped` if any thread has failed."""
        if self.stopped.is_set():
            raise PipelineStopped


def run_together(
    num_threads: int, work: Callable[[int, StartGate], Result], *, comm: Comm, what: str
) -> list[Result]:
    """Call `work(thread, gate)` on each thread. They begin together on all ranks.

    A thread that fails stops all others, and its error is raised. Collective.
    """
    gate, results = StartGate(num_threads), dict[int, Result]()

    def run(thread: int) -> None:
        results[thread] = work(thread, gate)

    with closing(WorkerGroup(num_threads, gate.stop)) as group:
        started = [group.start(run, thread) for thread in range(num_threads)]
        with suppress(threading.BrokenBarrierError):  # the thread that broke it carries the reason
            gate.barrier.wait()
            comm.barrier(awaiting=f"all ranks to be ready for {what}")
            gate.start_ns = time.monotonic_ns()
            gate.barrier.wait()
        group.wait(started, what)
    return [results[thread] for thread in range(num_threads)]


class ObjectTarget:
    """Reads ranges of one object. A write replaces the object of its slot with a new one of one block."""

    def __init__(self, storage: Storage, key: str, num_slots: int) -> None:
        self._storage = storage
        self._source = storage.open(key)
        self.written_keys = [f"{key}-write{slot}" for slot in range(num_slots)]
        self.read, self.close = self._source.read_into, self._source.close

    def write(self, _offset: int, buffer: memoryview, slot: int) -> None:
        """Write an object of one block, durable on return."""
        write_object(self._storage, self.written_keys[slot], [buffer], size_bytes=buffer.nbytes)


class FileTarget:
    """Blocks of one file, read and written in place.

    Reads and writes either bypass the page cache, or pass through it; writes are then made durable, and the
    blocks that are read do not stay in it.
    """

    def __init__(self, storage: SupportsLocalPaths, key: str, uri: str, *, is_sequential: bool) -> None:
        self._is_buffered = storage.uses_page_cache
        self._uri = f"{uri}/{key}"
        flags = os.O_RDWR | (os.O_DSYNC if self._is_buffered else os.O_DIRECT)
        with translate_os_errors("Opening", self._uri):
            self.descriptor = os.open(storage.local_path(key), flags)
        if not is_sequential:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a block from the file, without keeping it in the page cache for the next read."""
        self._require_whole(os.preadv(self.descriptor, (buffer,), offset), buffer)
        if self._is_buffered:
            os.posix_fadvise(self.descriptor, offset, buffer.nbytes, os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, buffer: memoryview, _slot: int) -> None:
        """Overwrite a block of the file."""
        self._require_whole(os.pwritev(self.descriptor, (buffer,), offset), buffer)

    def _require_whole(self, moved: int, buffer: memoryview) -> None:
        if moved != buffer.nbytes:
            raise ShortTransfer(
                f"Only {moved} of {buffer.nbytes} bytes moved",
                uri=self._uri,
                expected_bytes=buffer.nbytes,
                actual_bytes=moved,
                fix="Check that nothing truncates the file meanwhile.",
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


BlockTarget = ObjectTarget | FileTarget


_SILENCE_S = 300
"""The time without an accepted block after which the storage counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTask:
    """One thread's task. It passes `gate` before its clock starts."""

    storage: Storage
    step: ProbeStep
    key: str
    blocks: Blocks
    gate: StartGate
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """One thread's times by the monotonic clock, and the end and duration of each block.

    `create_ns`, the time before the start, is what it took to create an object and reserve its space.
    `drain_ns`, the last part before the end, is the wait for durability.
    """

    start_ns: int
    end_ns: int
    create_ns: int
    drain_ns: int
    ended_ns: NDArray[np.int64]
    latencies_ns: NDArray[np.int64]


_SHOWN_BYTES: Final = 4 << 20
"""Progress is updated after this many bytes, because one update costs as much as a small read."""


class _Watch:
    """Times a stream's start and end, and each block.

    Created once a stream is ready; creation returns when all other streams are ready, too.
    """

    def __init__(self, task: StreamTask, *, create_ns: int = 0) -> None:
        self._create_ns = create_ns
        self._gate = task.gate
        self._progress = task.progress
        self._size_bytes = task.step.block_bytes
        self._shown_every = max(1, _SHOWN_BYTES // self._size_bytes)
        self._began_ns = [0] * task.step.blocks_per_stream
        self._ended_ns = [0] * task.step.blocks_per_stream
        task.gate.wait()
        self._start_ns = time.monotonic_ns()

    def begin(self, operation: int) -> None:
        self._gate.require_open()
        self._began_ns[operation] = time.monotonic_ns()

    def done(self, operation: int) -> None:
        self._ended_ns[operation] = time.monotonic_ns()
        if operation % self._shown_every == 0:
            shown = min(self._shown_every, len(self._ended_ns) - operation)
            self._progress.advance(self._size_bytes * shown)

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


def write(task: StreamTask) -> StreamTimes:
    """Write one object front to back, durable at the end.

    A block is reused once the storage has released it.
    """
    step, blocks = task.step, task.blocks
    free: SimpleQueue[int] = SimpleQueue()
    for index in range(len(blocks.views)):
        free.put(index)
    with ExitStack() as undo:
        begin_ns = time.monotonic_ns()
        sink = task.storage.create(task.key, step.blocks_per_stream * step.block_bytes)
        undo.callback(sink.abort)
        watch = _Watch(task, create_ns=time.monotonic_ns() - begin_ns)

        def release(operation: int, index: int) -> None:
            watch.done(operation)
            free.put(index)

        for operation in range(step.blocks_per_stream):
            try:
                index = free.get(timeout=_SILENCE_S)
            except Empty:
                raise StorageTimeout(
                    f"Storage has kept all {len(blocks.views)} blocks for {_SILENCE_S} s "
                    "without releasing one",
                    uri=f"{task.storage.uri}/{task.key}",
                    fix="Look at the server's load; on object stores lower parts_in_flight.",
                ) from None
            buffer = blocks.renew(index)
            watch.begin(operation)
            sink.submit(buffer, partial(release, operation, index))
        submitted_ns = time.monotonic_ns()
        sink.finish()
        times = watch.stop(drain_from_ns=submitted_ns)
        undo.pop_all()
    return times


def _repeat(task: StreamTask, move: Callable[[int, memoryview], object]) -> StreamTimes:
    """Perform one operation after another with one buffer, which gets new content before each write."""
    watch, buffer = _Watch(task), task.blocks.views[0]
    for operation in range(task.step.blocks_per_stream):
        if "read" not in task.step.op:
            task.blocks.renew(0)
        watch.begin(operation)
        move(operation, buffer)
        watch.done(operation)
    return watch.stop()


def read(task: StreamTask) -> StreamTimes:
    """Read blocks of one object: front to back, or each at most once in an order that defeats read-ahead."""
    step, storage = task.step, task.storage
    positions: Sequence[int] = range(step.blocks_per_stream)
    if step.op == "random_read":
        num_blocks = storage.stat(task.key).size_bytes // step.block_bytes
        # The seed is the size, so that two probes of equal files read in the same order.
        order = np.random.Generator(np.random.SFC64(num_blocks)).permutation(num_blocks)
        positions = order[: step.blocks_per_stream].tolist()
    # Past the page cache, the file is read directly, because a storage's overhead per call would add to the
    # latency.
    files = storage if isinstance(storage, SupportsLocalPaths) and not storage.uses_page_cache else None
    opened: FileTarget | Source
    if files is not None and step.block_bytes % PAGE_BYTES == 0:
        opened = FileTarget(files, task.key, storage.uri, is_sequential=step.op == "read")
        read_block = opened.read
    else:
        opened = storage.open(task.key)
        read_block = opened.read_into
    with closing(opened), translate_os_errors("Reading", f"{storage.uri}/{task.key}"):
        times = _repeat(task, lambda number, buffer: read_block(positions[number] * step.block_bytes, buffer))
    if isinstance(opened, FileTarget):
        storage.counters.add(requests=len(positions), read_bytes=len(positions) * step.block_bytes)
    return times


def small_write(task: StreamTask) -> StreamTimes:
    """Write many objects of one block, each durable before the next begins."""
    size_bytes = task.step.block_bytes
    return _repeat(
        task,
        lambda number, buffer: write_object(
            task.storage, f"{task.key}-{number}", [buffer], size_bytes=size_bytes
        ),
    )


def small_read(task: StreamTask) -> StreamTimes:
    """Read many objects of one block: open, read, close."""

    def read_object(number: int, buffer: memoryview) -> None:
        with closing(task.storage.open(f"{task.key}-{number}")) as source:
            source.read_into(0, buffer)

    return _repeat(task, read_object)


def fsync(task: StreamTask) -> StreamTimes:
    """Append and fsync one block at a time, as a journal does. The storage protocol has no such call."""
    folder = capabilities.find_local_root(task.storage)
    assert folder is not None, "fsync is planned for file systems only"
    path = folder / task.key
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def append(_number: int, buffer: memoryview) -> None:
        os.write(descriptor, buffer)
        os.fsync(descriptor)

    with ExitStack() as undo:
        undo.callback(path.unlink)
        undo.callback(os.close, descriptor)
        return _repeat(task, append)


_STAMPED_BYTES: Final = 4096
"""The smallest unit that storage systems compare when they look for duplicates."""


class Blocks:
    """`num_blocks` blocks of `block_bytes` each, for one stream on one thread. `views` are their buffers."""

    def __init__(self, num_blocks: int, block_bytes: int, *, stream_id: int) -> None:
        # The same kind of memory as in the checkpoint pipeline, so that small pages do not make the limit
        # lower.
        memory = WarmMemory(num_blocks * round_up(block_bytes, _STAMPED_BYTES))
        random = np.random.Generator(np.random.SFC64(stream_id))
        words = np.frombuffer(memory.view, dtype=np.uint64)
        words[:] = random.integers(0, 2**64, size=words.size, dtype=np.uint64)
        words = words.reshape(num_blocks, -1)
        self._stamped = words[:, :: _STAMPED_BYTES // 8]
        self.views = [memoryview(row).cast("B")[:block_bytes] for row in words]  # type: ignore[arg-type]
        self._stamps = np.arange(self._stamped.shape[1], dtype=np.uint64)
        self._next_stamp = count((stream_id + 1) << 48, self._stamps.size)

    def renew(self, index: int) -> memoryview:
        """Give block `index` content that this stream has never written before."""
        self._stamped[index] = self._stamps + np.uint64(next(self._next_stamp))
        return self.views[index]
