"""The write pipeline: producer -> buffers -> storage, several objects at once, with timestamps.

Each stream has one thread that fills buffers and one that submits them, so content is produced while the
storage works. Invariants: an object is durable with exactly its planned bytes, or the phase raises an error
and the object is aborted; a buffer is refilled only after the storage has released it, so no byte changes
between being produced and being written.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol, Self

from penstock.errors import PenstockError, ShortTransfer, StorageTimeout, UsageError, WaitTimeout
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import no_thread
from penstock.storage.protocol import Release, Storage
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import Measurement, Timestamps, now_ns

VerifyMode = Literal["full", "sample", "off"]

MIN_BUFFERS_PER_STREAM = 2
"""One buffer at the storage and one being filled: with fewer, one side always waits for the other."""


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object to write or read completely; its `key` is relative to the storage's root."""

    key: str
    size_bytes: int


class Producer(Protocol):
    """Makes the bytes of planned objects."""

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite all of `buffer` with the object's bytes from `offset` onward.

        Called from front to back for each object, by one thread; for different objects by several threads at
        once. An exception ends the phase. Should release the GIL while it works.
        """


class DeferringProducer:
    """A `Producer` that defers some work until its source is released and the caller no longer waits."""

    def catch_up(self) -> None:
        """Wait until all that the calling thread has filled is in its buffers; then the source may change."""

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Finish what `fill` has deferred.

        Called once for each range, in the same order and by the same thread.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Settings for one rank's writing or reading of objects.

    `streams` is the number of objects written at once, or of read requests in flight. If the storage returns
    no buffer for `silence_s` seconds, it counts as dead.
    """

    streams: int = 2
    chunk_bytes: int = 16 << 20
    buffer_memory_bytes: int = 256 << 20
    verify: VerifyMode = "full"
    sample_every: int = 16
    """With verify="sample", every n-th chunk is verified, and always an object's last chunk."""
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("streams", "chunk_bytes", "sample_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", fix="Give at least 1.")
        least = MIN_BUFFERS_PER_STREAM * self.streams * self.chunk_bytes
        if self.buffer_memory_bytes < least:
            raise UsageError(
                f"{self.buffer_memory_bytes} bytes of buffers are too few for {self.streams} streams of "
                f"{MIN_BUFFERS_PER_STREAM} x {self.chunk_bytes} bytes",
                fix=f"Give at least {least} bytes, smaller chunks or fewer streams.",
            )


class PipelineStopped(PenstockError):
    """Another thread failed or the user interrupted the phase: this thread stops, but is not the cause."""

    def __init__(self) -> None:
        super().__init__("Stopped because the pipeline stopped")


class Buffer:
    """One buffer, and which chunk of which object it holds. Either one thread or the storage has it."""

    __slots__ = ("chunk", "is_in_flight", "number", "offset", "release", "size_bytes", "stream", "whole")

    def __init__(self, whole: memoryview) -> None:
        self.whole = whole
        self.is_in_flight = False
        """True from its submission until the storage releases it."""
        self.release: Release | None = None
        self.stream = 0
        self.number = 0
        """The number of the object."""
        self.chunk = 0
        self.offset = 0
        self.size_bytes = 0

    @property
    def filled(self) -> memoryview:
        """The part that holds the chunk: all of it, except for an object's last chunk."""
        return self.whole if self.size_bytes == len(self.whole) else self.whole[: self.size_bytes]


class PipelineBuffers:
    """All buffers of one phase, shared by its streams.

    A stream may take any free buffer as long as every other stream can still get `MIN_BUFFERS_PER_STREAM`.
    Even if the storage keeps one stream's buffers for a long time, the other streams therefore never starve.
    """

    def __init__(self, memory: WarmMemory, settings: PipelineSettings) -> None:
        size_bytes = settings.chunk_bytes
        starts = range(0, settings.buffer_memory_bytes - size_bytes + 1, round_up(size_bytes, PAGE_BYTES))
        self.all = tuple(Buffer(memory.view[start : start + size_bytes]) for start in starts)
        self._free = list(reversed(self.all))
        self._held = [0] * settings.streams
        self._changed = threading.Condition()
        self._silence_s = settings.silence_s
        self._is_stopped = False
        self._last_return_s: float | None = None

    def take(self, stream: int, awaiting: str) -> Buffer:
        """Wait for a free buffer. In errors, `awaiting` names what holds the buffers."""
        with self._changed:
            while not self._may_take(stream):
                self._wait(awaiting)
            if self._is_stopped:
                raise PipelineStopped
            buffer = self._free.pop()
            self._held[stream] += 1
            buffer.stream = stream
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Make `buffer` free again; called once, from any thread."""
        with self._changed:
            self._held[buffer.stream] -= 1
            self._free.append(buffer)
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def expect_returns(self) -> None:
        """Expect buffers to return from now on: if none does for `silence_s`, the storage counts as dead."""
        with self._changed:
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def stop(self) -> None:
        """Make all present and future `take` calls raise `PipelineStopped`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def retire(self, stream: int) -> None:
        """Free the buffers reserved for a stream that will take no more."""
        with self._changed:
            self._held[stream] += len(self.all)
            self._changed.notify_all()

    def _may_take(self, stream: int) -> bool:
        if self._is_stopped:
            return True
        reserved = sum(
            max(0, MIN_BUFFERS_PER_STREAM - held) for other, held in enumerate(self._held) if other != stream
        )
        least = 0 if self._held[stream] < MIN_BUFFERS_PER_STREAM else reserved
        return len(self._free) > least

    def _wait(self, awaiting: str) -> None:
        if self._last_return_s is None:
            self._changed.wait()
            return
        left_s = self._last_return_s + self._silence_s - time.monotonic()
        if left_s <= 0:
            raise StorageTimeout(
                f"{awaiting} held all {len(self.all)} buffers for {self._silence_s:g} s and released none",
                fix="Check the server's load; use fewer parts in flight, or more buffer memory.",
            )
        self._changed.wait(left_s)


class WorkerGroup:
    """Up to `num_threads` threads. If one fails, the group calls `stop`, which must end the others soon."""

    def __init__(self, num_threads: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-pipe")
        self._started: list[Future[None]] = []
        self._is_closed = False

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Run `work` in a thread; raise `Unavailable` if this process may have no more threads."""
        if self._is_closed:
            stopped: Future[None] = Future()
            stopped.set_exception(PipelineStopped())
            return stopped
        try:
            future = self._threads.submit(self._run, work, *arguments)
        except RuntimeError as error:
            raise no_thread(error) from error
        self._started.append(future)
        return future

    def wait(self, futures: Sequence[Future[None]], awaited: str, timeout_s: float | None = None) -> None:
        """Return when `futures` are done; raise the failure of any thread of the group."""
        if wait_for(futures, timeout=timeout_s).not_done:
            raise WaitTimeout(awaited, timeout_s or 0.0)
        if any(future.done() and future.exception() for future in self._started):
            # A future may have stopped because of another thread, whose own future is not done yet.
            wait_for(self._started)
            failures = [error for future in self._started if (error := future.exception())]
            causes = [error for error in failures if not isinstance(error, PipelineStopped)]
            raise (causes or failures)[0]

    def close(self) -> None:
        """Stop all threads and wait for them, even if stopping fails: the next save uses their memory."""
        try:
            self._stop()
        finally:
            self._is_closed = True
            self._threads.shutdown(wait=True)
            # `stop` belongs to the object that owns this group: keeping it would create a reference cycle.
            self._stop = lambda: None

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        with ExitStack() as undo:
            undo.callback(self._stop)
            work(*arguments)
            undo.pop_all()


def write_objects(
    storages: Sequence[Storage],
    planned: Sequence[PlannedObject],
    producer: Producer,
    settings: PipelineSettings,
    *,
    memory: WarmMemory | None = None,
    rank: int = 0,
    origin_ns: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Write all of `planned` durably. On failure, raise the first error and remove partial objects.

    Stream i writes to `storages[i % len(storages)]`: to count requests and retries per stream, give each a
    `Storage`. `memory`, of at least `buffer_memory_bytes`, may be reused from earlier phases. `origin_ns` is
    a moment that all ranks share (default: the beginning of this call).
    """
    entered_ns = now_ns()
    memory = memory or WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    with WritePipeline(planned, producer, settings, memory=memory, entered_ns=entered_ns) as pipe:
        return pipe.write_to(storages, rank=rank, origin_ns=origin_ns, progress=progress)


class _Stream:
    """One stream: what its filling thread passes to its writing thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Numbers of objects, each followed by its buffers; None if there are no more, or the phase has
        # stopped.
        self.ready: SimpleQueue[int | Buffer | None] = SimpleQueue()
        self.unsettled: deque[int | Buffer] = deque()
        self.filled: Future[None] = Future()
        """Done when the stream no longer needs the producer's source; failed if it stopped before."""
        self.filled_ns = 0
        self.has_begun = False
        """True from the first chunk that was submitted on."""


class WritePipeline:
    """One phase of writing. Buffers are filled and written once `write_to` is called.

    `start_filling` begins to fill them earlier. With `fills_first`, nothing is settled or written until
    everything is filled: this needs buffers for everything, and releases the producer's source as early as
    possible. Use the object as a context manager: leaving it early stops the threads and aborts unfinished
    objects.
    """

    def __init__(
        self,
        planned: Sequence[PlannedObject],
        producer: Producer,
        settings: PipelineSettings,
        *,
        memory: WarmMemory,
        entered_ns: int | None = None,
        fills_first: bool = False,
    ) -> None:
        self._planned = planned
        self._producer = producer
        self._deferring = producer if isinstance(producer, DeferringProducer) else DeferringProducer()
        self._fills_first = fills_first
        self._chunk_bytes = settings.chunk_bytes
        self._buffers = PipelineBuffers(memory, settings)
        sizes = [item.size_bytes for item in planned]
        entered_ns = now_ns() if entered_ns is None else entered_ns
        self._stamps = Timestamps(sizes, settings.chunk_bytes, settings.streams, entered_ns)
        for buffer in self._buffers.all:
            buffer.release = partial(self._acknowledge, buffer)
        self._unclaimed = iter(range(len(planned)))
        self._lock = threading.Lock()
        self._streams = tuple(_Stream(number) for number in range(settings.streams))
        self._workers = WorkerGroup(2 * settings.streams, self.stop)
        self._fillers: list[Future[None]] = []
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        # Each buffer refers to this object through `release`. With this cycle, staging memory and the tensors
        # that were copied would stay until Python's next garbage collection; without it, they are freed with
        # the save.
        for buffer in self._buffers.all:
            buffer.release = None

    def stop(self) -> None:
        """Stop all threads; may be called at any time, from any thread."""
        self._is_stopped = True
        self._buffers.stop()
        for stream in self._streams:
            stream.ready.put(None)
        # Work that starts now ends immediately, so that no one waits for it.
        self.start_filling()

    def start_filling(self) -> None:
        """Begin to fill buffers unless that has begun; any thread may call this."""
        with self._lock:
            if not self._fillers:
                self._fillers = [self._workers.start(self._fill, stream) for stream in self._streams]

    def wait_filled(self, timeout_s: float | None = None) -> None:
        """Return when the producer is no longer needed; raise the error of a thread that failed."""
        filled = [stream.filled for stream in self._streams]
        self._workers.wait(filled, "all bytes to be copied into buffers", timeout_s)

    @property
    def filled_ns(self) -> int:
        """The time when the producer's source was last needed; 0 until the first stream is filled."""
        return max(stream.filled_ns for stream in self._streams)

    def write_to(
        self,
        storages: Sequence[Storage],
        *,
        rank: int = 0,
        origin_ns: int | None = None,
        progress: Progress | None = None,
        key_of: Callable[[str], str] = str,
    ) -> Measurement:
        """Write the buffers to storage until everything is durable, and return the measurement.

        `key_of` maps an object's planned key to its key in storage.
        """
        self._key_of = key_of
        progress = progress or Progress()
        progress.begin("writing", self._stamps.planned_bytes)
        self._stamps.begin_counting(storages)
        self._buffers.expect_returns()
        writers = [
            self._workers.start(self._write, stream, storages[stream.number % len(storages)], progress)
            for stream in self._streams
        ]
        # Filling keeps all cores busy, so the writers start first: they open their files and then wait.
        self.start_filling()
        self._workers.wait([*self._fillers, *writers], "all bytes to be durable")
        measured = self._stamps.measure("write", rank=rank, origin_ns=origin_ns)
        measured.require_complete(storages[0].uri)
        return measured

    def _fill(self, stream: _Stream) -> None:
        """Fill buffers, object by object, until no object is left."""
        with ExitStack() as undo:
            undo.callback(lambda: stream.filled.set_exception(PipelineStopped()))
            while True:
                with self._lock:
                    number = next(self._unclaimed, None)
                if number is None:
                    break
                stream.unsettled.append(number)
                for chunk in self._stamps.chunks(number):
                    if not self._fills_first:
                        self._settle(stream)
                    stream.unsettled.append(self._fill_chunk(stream.number, number, chunk))
                if not self._fills_first:
                    self._settle(stream)
            # Whatever is left to settle already has its buffers, so other streams may use the free ones.
            self._buffers.retire(stream.number)
            self._deferring.catch_up()
            undo.pop_all()
        stream.filled_ns = now_ns()
        stream.filled.set_result(None)
        self._settle(stream)
        stream.ready.put(None)

    def _fill_chunk(self, stream: int, number: int, chunk: int) -> Buffer:
        planned, stamps = self._planned[number], self._stamps
        awaited_ns = now_ns()
        buffer = self._buffers.take(stream, planned.key)
        begin_ns = now_ns()
        stamps.content_stall_ns[stream] += begin_ns - awaited_ns
        buffer.number, buffer.chunk = number, chunk
        buffer.offset = (chunk - stamps.chunks(number).start) * self._chunk_bytes
        buffer.size_bytes = min(self._chunk_bytes, planned.size_bytes - buffer.offset)
        self._producer.fill(planned, buffer.offset, buffer.filled)
        stamps.stream[chunk] = stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.content_begin[chunk] = begin_ns
        stamps.content_end[chunk] = now_ns()
        return buffer

    def _settle(self, stream: _Stream) -> None:
        """Settle filled buffers and pass them on for writing, each object before its chunks."""
        while stream.unsettled:
            if self._is_stopped:
                raise PipelineStopped
            entry = stream.unsettled.popleft()
            if isinstance(entry, Buffer):
                self._deferring.settle(self._planned[entry.number], entry.offset, entry.filled)
            stream.ready.put(entry)
            # The storage has priority. If filling threads occupied all cores, the storage's thread would
            # otherwise run only at the next tick of the kernel's clock, up to 4 ms later.
            os.sched_yield()

    def _write(self, stream: _Stream, storage: Storage, progress: Progress) -> None:
        """Submit filled buffers, object by object; each object is durable before the next begins."""
        while isinstance(number := self._next_ready(stream), int):
            self._write_object(stream, number, storage, progress)

    def _next_ready(self, stream: _Stream) -> int | Buffer | None:
        awaited_ns = now_ns()
        ready = stream.ready.get()
        if self._is_stopped:
            raise PipelineStopped
        if stream.has_begun:
            # Waiting before a stream's first chunk counts as set-up, not as a stall.
            self._stamps.storage_stall_ns[stream.number] += now_ns() - awaited_ns
        return ready

    def _write_object(self, stream: _Stream, number: int, storage: Storage, progress: Progress) -> None:
        stamps, planned = self._stamps, self._planned[number]
        stamps.object_stream[number] = stream.number
        stamps.opening[number, 0] = now_ns()
        with ExitStack() as undo:
            sink = storage.create(self._key_of(planned.key), planned.size_bytes)
            undo.callback(sink.abort)
            stamps.opening[number, 1] = now_ns()
            stamps.num_objects[stream.number] += 1
            for _ in stamps.chunks(number):
                buffer = self._next_ready(stream)
                if not isinstance(buffer, Buffer):
                    raise PipelineStopped
                # Read before submitting: afterwards, the buffer may already belong to someone else.
                chunk, size_bytes = buffer.chunk, buffer.size_bytes
                buffer.is_in_flight = True
                stamps.submitted[chunk] = now_ns()
                sink.submit(buffer.filled, buffer.release)
                stamps.returned[chunk] = now_ns()
                stream.has_begun = True
                progress.advance(size_bytes)
            stamps.ending[number, 0] = now_ns()
            info = sink.finish()
            stamps.ending[number, 1] = now_ns()
            if info.size_bytes != planned.size_bytes:
                raise ShortTransfer(
                    f"{planned.size_bytes} bytes were submitted, but the storage stored {info.size_bytes}",
                    uri=f"{storage.uri.rstrip('/')}/{planned.key}",
                    expected_bytes=planned.size_bytes,
                    actual_bytes=info.size_bytes,
                    fix="The storage lost part of this object; none of it counts as written.",
                )
            undo.pop_all()
        stamps.durable_bytes[stream.number] += info.size_bytes

    def _acknowledge(self, buffer: Buffer) -> None:
        """Called when the storage has released `buffer`, from any of the storage's threads."""
        with self._lock:
            was_in_flight, buffer.is_in_flight = buffer.is_in_flight, False
        if not was_in_flight:
            raise PenstockError(
                "A buffer that the storage did not have was released",
                fix="A storage must release each buffer exactly once; this one does not.",
            )
        self._stamps.acknowledged[buffer.chunk] = now_ns()
        self._buffers.give_back(buffer)
