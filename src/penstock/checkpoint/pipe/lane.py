"""One stream of the way out: a thread that fills buffers front to back, and one that submits them.

Between `write`, which starts the threads, and `buffers`, whose states it moves on. Invariant: a sink that was
created is finished with exactly the planned bytes, or aborted.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from penstock.checkpoint.pipe.base import SupportsSettling
from penstock.checkpoint.pipe.buffers import Buffer, Buffers, Ownership, PipeStopped
from penstock.checkpoint.pipe.report import StreamFacts
from penstock.checkpoint.pipe.stamps import Job, Stamps, now_ns
from penstock.errors import ShortTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.checkpoint.pipe.base import FillOrder, Producer
    from penstock.progress import Progress
    from penstock.storage.protocol import Sink, Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all lanes of a phase have in common; `next_job` gives each job to one of them."""

    next_job: Callable[[], Job | None]
    producer: Producer
    buffers: Buffers
    stamps: Stamps
    chunk_bytes: int
    order: FillOrder


class Lane:
    """One stream, and what it counts by itself for the record."""

    def __init__(self, stream: int, shared: Shared) -> None:
        self._stream = stream
        self._shared = shared
        # Jobs, each followed by its chunks; None when there are no more, or the phase stopped.
        self._ready: SimpleQueue[Job | Buffer | None] = SimpleQueue()
        self._unsettled: deque[tuple[Job, Buffer | None]] = deque()
        self._is_stopped = False
        self.filled: Future[None] = Future()
        """Done when this stream needs the producer's source no more; failed where it gave up before."""
        self.filled_ns = 0
        self.facts = StreamFacts()

    def stop(self) -> None:
        """Wake the submitting thread, which gives up."""
        self._is_stopped = True
        self._ready.put(None)

    def fill(self) -> None:
        """Fill buffers, object after object, until no job is left."""
        with ExitStack() as undo:
            undo.callback(self.filled.set_exception, PipeStopped())
            self._fill_all()
            undo.pop_all()
        self.filled_ns = now_ns()
        self.filled.set_result(None)
        self._settle_all()
        self._ready.put(None)

    def write(self, storage: Storage, progress: Progress) -> None:
        """Submit what is filled, object after object, each durable before the next begins."""
        while isinstance(job := self._next_ready(), Job):
            self._write_object(job, storage, progress)

    def _fill_all(self) -> None:
        producer = self._shared.producer
        while (job := self._shared.next_job()) is not None:
            self._note(job, None)
            for number in range(job.num_chunks):
                self._note(job, self._fill_chunk(job, number))
        # What is left to settle holds its buffers already: others may have those that are free.
        self._shared.buffers.retire(self._stream)
        if isinstance(producer, SupportsSettling):
            producer.catch_up()

    def _note(self, job: Job, buffer: Buffer | None) -> None:
        self._unsettled.append((job, buffer))
        if self._shared.order == "chunk by chunk":
            self._settle_all()

    def _settle_all(self) -> None:
        """Hand on what is filled, each object before its chunks."""
        producer = self._shared.producer
        while self._unsettled:
            if self._is_stopped:
                raise PipeStopped
            job, buffer = self._unsettled.popleft()
            if buffer is None:
                self._ready.put(job)
                continue
            if isinstance(producer, SupportsSettling):
                producer.settle(job.planned, buffer.offset, buffer.filled)
            buffer.hand_on(Ownership.FILLING, Ownership.READY)
            self._ready.put(buffer)

    def _fill_chunk(self, job: Job, number: int) -> Buffer:
        shared, stamps, chunk = self._shared, self._shared.stamps, job.first_chunk + number
        awaited_ns = now_ns()
        buffer = shared.buffers.take(self._stream, job.planned.key)
        begin_ns = now_ns()
        self.facts.content_stall_ns += begin_ns - awaited_ns
        buffer.job, buffer.chunk, buffer.offset = job.number, chunk, number * shared.chunk_bytes
        buffer.size_bytes = min(shared.chunk_bytes, job.planned.size_bytes - buffer.offset)
        shared.producer.fill(job.planned, buffer.offset, buffer.filled)
        stamps.stream[chunk] = self._stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.content_begin[chunk] = begin_ns
        stamps.content_end[chunk] = now_ns()
        return buffer

    def _next_ready(self) -> Job | Buffer | None:
        awaited_ns = now_ns()
        ready = self._ready.get()
        if self._is_stopped:
            raise PipeStopped
        if self.facts.num_objects:
            # Before a stream's first object there is nothing that could be stalled: that is set-up.
            self.facts.storage_stall_ns += now_ns() - awaited_ns
        return ready

    def _write_object(self, job: Job, storage: Storage, progress: Progress) -> None:
        stamps, planned = self._shared.stamps, job.planned
        stamps.object_stream[job.number] = self._stream
        stamps.opening[job.number, 0] = now_ns()
        with ExitStack() as undo:
            sink = storage.create(planned.key, planned.size_bytes)
            undo.callback(sink.abort)
            stamps.opening[job.number, 1] = now_ns()
            self.facts.num_objects += 1
            for _ in range(job.num_chunks):
                progress.advance(self._submit_next(sink))
            stamps.ending[job.number, 0] = now_ns()
            info = sink.finish()
            stamps.ending[job.number, 1] = now_ns()
            if info.size_bytes != planned.size_bytes:
                raise ShortTransfer(
                    f"{planned.size_bytes} bytes were submitted, but the storage has {info.size_bytes}",
                    uri=f"{storage.uri.rstrip('/')}/{planned.key}",
                    expected_bytes=planned.size_bytes,
                    actual_bytes=info.size_bytes,
                    fix="The storage lost a part of this object; nothing of it counts as written.",
                )
            undo.pop_all()
        self.facts.durable_bytes += info.size_bytes

    def _submit_next(self, sink: Sink) -> int:
        buffer = self._next_ready()
        if not isinstance(buffer, Buffer):
            raise PipeStopped
        # Once submitted it is not ours to look at: its next owner may have it already.
        chunk, size_bytes, stamps = buffer.chunk, buffer.size_bytes, self._shared.stamps
        buffer.hand_on(Ownership.READY, Ownership.IN_FLIGHT)
        stamps.submitted[chunk] = now_ns()
        sink.submit(buffer.filled, buffer.release)
        stamps.returned[chunk] = now_ns()
        return size_bytes
