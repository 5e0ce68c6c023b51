"""The write pipeline: producer -> buffers -> storage, several objects at once, with timestamps.

Each stream has one thread that fills buffers and one that submits them, so content is produced while the
storage works. Invariant: an object is durable with exactly its planned bytes, or the phase raises an error
and the object is aborted.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol, Self, runtime_checkable

from penstock.errors import ShortTransfer, UsageError
from penstock.progress import Progress, Silent
from penstock.storage.capabilities import offers
from penstock.storage.protocol import Sink, Storage
from penstock.transfer import ledger
from penstock.transfer.buffers import (
    MIN_BUFFERS_PER_STREAM,
    Buffer,
    Ownership,
    PipelineBuffers,
    PipelineStopped,
    WarmMemory,
    WorkerGroup,
)

VerifyMode = Literal["full", "sample", "off"]
FillOrder = Literal["chunk by chunk", "all first"]
"""Whether each chunk is settled and passed on before the next is filled, or only when all are filled.

"all first" needs buffers for everything, and releases the producer's source as early as possible.
"""


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object to write or read in full; its `key` is relative to the storage's root."""

    key: str
    size_bytes: int


class Producer(Protocol):
    """Makes the bytes of planned objects."""

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite all of `buffer` with the object's bytes from `offset` on.

        Called front to back for each object, by one thread; for different objects by several at once. An
        exception ends the phase. It should release the GIL while it works.
        """


@runtime_checkable
class SupportsSettling(Protocol):
    """A `Producer` that defers some work until its source is released and the caller waits no longer."""

    def catch_up(self) -> None:
        """Return when everything the calling thread has filled is in its buffers: the source may change."""

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Finish what `fill` left. Called once for each range, in its order, by the same thread."""


class Verifier(Protocol):
    """Knows which bytes planned objects should have."""

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """The index in `buffer`, read at `offset`, of the first wrong byte; None if all are right.

        Called from several threads at once, in no order, at most once for each range.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """How a rank writes or reads its objects.

    `streams` objects are written at once, or as many read requests are in flight. `silence_s` is how long a
    storage may return no buffer before it counts as dead.
    """

    streams: int = 2
    chunk_bytes: int = 16 << 20
    buffer_memory_bytes: int = 256 << 20
    verify: VerifyMode = "full"
    sample_every: int = 16
    """With verify="sample", every n-th chunk is verified, and always an object's last one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamContext:
    """What all streams of a phase share; `next_job` gives each job to one of them."""

    next_job: Callable[[], ledger.ObjectJob | None]
    producer: Producer
    buffers: PipelineBuffers
    stamps: ledger.Timestamps
    chunk_bytes: int
    order: FillOrder


class StreamWorker:
    """One stream: its two threads' work, and its own counts for the measurement."""

    def __init__(self, stream: int, shared: StreamContext) -> None:
        self._stream = stream
        self._shared = shared
        # Jobs, each followed by its chunks; None when there are no more, or the phase stopped.
        self._ready: SimpleQueue[ledger.ObjectJob | Buffer | None] = SimpleQueue()
        self._unsettled: deque[tuple[ledger.ObjectJob, Buffer | None]] = deque()
        self._is_stopped = False
        self.filled: Future[None] = Future()
        """Done when this stream no longer needs the producer's source; failed if it stopped before."""
        self.filled_ns = 0
        self.facts = ledger.StreamFacts()

    def stop(self) -> None:
        """Wake the submitting thread, which then stops."""
        self._is_stopped = True
        self._ready.put(None)

    def fill(self) -> None:
        """Fill buffers, object by object, until no job is left."""
        with ExitStack() as undo:
            undo.callback(self.filled.set_exception, PipelineStopped())
            self._fill_all()
            undo.pop_all()
        self.filled_ns = ledger.now_ns()
        self.filled.set_result(None)
        self._settle_all()
        self._ready.put(None)

    def write(self, storage: Storage, progress: Progress) -> None:
        """Submit filled buffers, object by object, each durable before the next begins."""
        while isinstance(job := self._next_ready(), ledger.ObjectJob):
            self._write_object(job, storage, progress)

    def _fill_all(self) -> None:
        producer = self._shared.producer
        while (job := self._shared.next_job()) is not None:
            self._add_filled(job, None)
            for number in range(job.num_chunks):
                self._add_filled(job, self._fill_chunk(job, number))
        # What is left to settle already has its buffers, so other streams may use the free ones.
        self._shared.buffers.retire(self._stream)
        if offers(producer, SupportsSettling):
            producer.catch_up()

    def _add_filled(self, job: ledger.ObjectJob, buffer: Buffer | None) -> None:
        self._unsettled.append((job, buffer))
        if self._shared.order == "chunk by chunk":
            self._settle_all()

    def _settle_all(self) -> None:
        """Pass on what is filled, each object before its chunks."""
        producer = self._shared.producer
        while self._unsettled:
            if self._is_stopped:
                raise PipelineStopped
            job, buffer = self._unsettled.popleft()
            if buffer is None:
                self._ready.put(job)
                continue
            if offers(producer, SupportsSettling):
                producer.settle(job.planned, buffer.offset, buffer.filled)
            buffer.hand_on(Ownership.FILLING, Ownership.READY)
            self._ready.put(buffer)
            # The storage comes first. Where fillers have all cores, its thread would else get one at the next
            # tick of the kernel's clock, up to 4 ms later.
            os.sched_yield()

    def _fill_chunk(self, job: ledger.ObjectJob, number: int) -> Buffer:
        shared, stamps, chunk = self._shared, self._shared.stamps, job.first_chunk + number
        awaited_ns = ledger.now_ns()
        buffer = shared.buffers.take(self._stream, job.planned.key)
        begin_ns = ledger.now_ns()
        self.facts.content_stall_ns += begin_ns - awaited_ns
        buffer.job, buffer.chunk, buffer.offset = job.number, chunk, number * shared.chunk_bytes
        buffer.size_bytes = min(shared.chunk_bytes, job.planned.size_bytes - buffer.offset)
        shared.producer.fill(job.planned, buffer.offset, buffer.filled)
        stamps.stream[chunk] = self._stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.content_begin[chunk] = begin_ns
        stamps.content_end[chunk] = ledger.now_ns()
        return buffer

    def _next_ready(self) -> ledger.ObjectJob | Buffer | None:
        awaited_ns = ledger.now_ns()
        ready = self._ready.get()
        if self._is_stopped:
            raise PipelineStopped
        if self.facts.num_objects:
            # Waiting before a stream's first object is set-up, not a stall.
            self.facts.storage_stall_ns += ledger.now_ns() - awaited_ns
        return ready

    def _write_object(self, job: ledger.ObjectJob, storage: Storage, progress: Progress) -> None:
        stamps, planned = self._shared.stamps, job.planned
        stamps.object_stream[job.number] = self._stream
        stamps.opening[job.number, 0] = ledger.now_ns()
        with ExitStack() as undo:
            sink = storage.create(planned.key, planned.size_bytes)
            undo.callback(sink.abort)
            stamps.opening[job.number, 1] = ledger.now_ns()
            self.facts.num_objects += 1
            for _ in range(job.num_chunks):
                progress.advance(self._submit_next(sink))
            stamps.ending[job.number, 0] = ledger.now_ns()
            info = sink.finish()
            stamps.ending[job.number, 1] = ledger.now_ns()
            if info.size_bytes != planned.size_bytes:
                raise ShortTransfer(
                    f"{planned.size_bytes} bytes were submitted, but the storage stored {info.size_bytes}",
                    uri=f"{storage.uri.rstrip('/')}/{planned.key}",
                    expected_bytes=planned.size_bytes,
                    actual_bytes=info.size_bytes,
                    fix="The storage lost part of this object; none of it counts as written.",
                )
            undo.pop_all()
        self.facts.durable_bytes += info.size_bytes

    def _submit_next(self, sink: Sink) -> int:
        buffer = self._next_ready()
        if not isinstance(buffer, Buffer):
            raise PipelineStopped
        # Read before submitting: after that, the buffer may already have its next owner.
        chunk, size_bytes, stamps = buffer.chunk, buffer.size_bytes, self._shared.stamps
        buffer.hand_on(Ownership.READY, Ownership.IN_FLIGHT)
        stamps.submitted[chunk] = ledger.now_ns()
        sink.submit(buffer.filled, buffer.release)
        stamps.returned[chunk] = ledger.now_ns()
        return size_bytes


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
) -> ledger.Measurement:
    """Write all of `planned` durably; the first failure of any thread is raised, and partial objects removed.

    Stream i writes to `storages[i % len(storages)]`: to count requests and retries per stream, give each its
    own. `memory`, of at least `buffer_memory_bytes`, may come from earlier phases. `origin_ns` is a moment
    that all ranks share, by default the beginning of this call.
    """
    entered_ns = ledger.now_ns()
    memory = memory or WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    with WritePipeline(planned, producer, settings, memory=memory, entered_ns=entered_ns) as pipe:
        return pipe.write_to(storages, rank=rank, origin_ns=origin_ns, progress=progress)


class WritePipeline:
    """One phase of writing. Buffers are filled and written once `write_to` is called.

    They are filled before that if `start_filling` is called. Use it as a context manager: leaving it early
    stops the threads and aborts unfinished objects.
    """

    def __init__(
        self,
        planned: Sequence[PlannedObject],
        producer: Producer,
        settings: PipelineSettings,
        *,
        memory: WarmMemory,
        entered_ns: int | None = None,
        order: FillOrder = "chunk by chunk",
    ) -> None:
        self._entered_ns = ledger.now_ns() if entered_ns is None else entered_ns
        self._streams = settings.streams
        self._jobs = ledger.number_chunks(planned, settings.chunk_bytes)
        self._planned_bytes = sum(item.size_bytes for item in planned)
        self._buffers = PipelineBuffers(memory, settings)
        self._stamps = ledger.Timestamps.for_chunks(ledger.total_chunks(self._jobs), len(self._jobs))
        for buffer in self._buffers.all:
            buffer.release = partial(self._acknowledge, buffer)
        shared = StreamContext(
            next_job=_deal_out(self._jobs),
            producer=producer,
            buffers=self._buffers,
            stamps=self._stamps,
            chunk_bytes=settings.chunk_bytes,
            order=order,
        )
        self._stream_workers = tuple(StreamWorker(number, shared) for number in range(settings.streams))
        self._workers = WorkerGroup(2 * settings.streams, self.stop)
        self._fillers: list[Future[None]] = []
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        # Each buffer calls back into this object. Without that cycle, staging memory and the tensors that
        # were copied are freed with the save; with it, they would stay until Python's next collection.
        for buffer in self._buffers.all:
            buffer.release = None

    def stop(self) -> None:
        """Stop all threads; may be called at any time, from any thread."""
        self._buffers.stop()
        for stream in self._stream_workers:
            stream.stop()
        # What has not begun ends at once, and with it whoever waits for it.
        self.start_filling()

    def start_filling(self) -> None:
        """Begin to fill buffers, unless that has begun; any thread may call."""
        with self._starting:
            if not self._fillers:
                self._fillers = [self._workers.start(stream.fill) for stream in self._stream_workers]

    def wait_filled(self, timeout_s: float | None = None) -> None:
        """Return when the producer is no longer needed; raises what a thread raised."""
        filled = [stream.filled for stream in self._stream_workers]
        self._workers.wait(filled, "all bytes to be copied into buffers", timeout_s)

    @property
    def filled_ns(self) -> int:
        """When the producer's source was last needed; 0 before the first stream has finished filling."""
        return max(stream.filled_ns for stream in self._stream_workers)

    def write_to(
        self,
        storages: Sequence[Storage],
        *,
        rank: int = 0,
        origin_ns: int | None = None,
        progress: Progress | None = None,
        on_settled: Callable[[], None] | None = None,
    ) -> ledger.Measurement:
        """Write the buffers to storage until everything is durable, and return the measurement.

        `on_settled` is called when all bytes are made, while the last of them are still being written.
        """
        progress = progress or Silent()
        progress.begin("writing", self._planned_bytes)
        counter_deltas = ledger.CounterDeltas(storages, self._streams)
        self._buffers.expect_returns()
        writers = [
            self._workers.start(stream.write, storages[number % len(storages)], progress)
            for number, stream in enumerate(self._stream_workers)
        ]
        # After the writers, which open their files and then wait: filling keeps all cores busy.
        self.start_filling()
        if on_settled is not None:
            self._workers.wait(self._fillers, "all bytes to be copied into buffers")
            on_settled()
        self._workers.wait([*self._fillers, *writers], "all bytes to be durable")
        phase = ledger.PhaseFacts(
            direction="write",
            rank=rank,
            origin_ns=self._entered_ns if origin_ns is None else origin_ns,
            entered_ns=self._entered_ns,
            planned_bytes=self._planned_bytes,
        )
        measured = ledger.measure(
            phase, self._stamps, [stream.facts for stream in self._stream_workers], counter_deltas
        )
        ledger.require_durable(measured.ledger, uri=storages[0].uri)
        return measured

    def _acknowledge(self, buffer: Buffer) -> None:
        """The storage has released `buffer`; called from any of its threads."""
        self._stamps.acknowledged[buffer.chunk] = ledger.now_ns()
        self._buffers.give_back(buffer, Ownership.IN_FLIGHT)


def _deal_out(jobs: Sequence[ledger.ObjectJob]) -> Callable[[], ledger.ObjectJob | None]:
    """A thread-safe function that returns one job after another, and None when there are no more."""
    remaining, picking = iter(jobs), threading.Lock()

    def next_job() -> ledger.ObjectJob | None:
        with picking:
            return next(remaining, None)

    return next_job
