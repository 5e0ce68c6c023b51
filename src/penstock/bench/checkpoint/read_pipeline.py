"""The read pipeline: storage -> buffers -> verifier, several requests at once, with timestamps.

Streams share the chunks of all objects; as many threads verify what was read while the next chunks are read.
Only the benchmark uses it: loading has its own reader. Invariant: a phase that returns has read every planned
byte, and its measurement lists the wrong ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

from penstock.errors import ShortTransfer
from penstock.progress import Progress, Silent
from penstock.storage.protocol import Source, Storage
from penstock.transfer import buffers, ledger

if TYPE_CHECKING:
    from penstock.transfer.pipeline import PipelineSettings, PlannedObject, Verifier

MOST_WRONG_BYTES: Final = 1000
"""Places of wrong bytes that a measurement lists at most."""


def read_objects(
    storages: Sequence[Storage],
    planned: Sequence[PlannedObject],
    verifier: Verifier | None,
    settings: PipelineSettings,
    *,
    memory: buffers.WarmMemory | None = None,
    rank: int = 0,
    origin_ns: int | None = None,
    progress: Progress | None = None,
) -> ledger.Measurement:
    """Read all of `planned`, and verify as much as the settings say if there is a `verifier`.

    The arguments are those of `write_objects`. Wrong bytes raise no error: the measurement lists them, and no
    byte of their chunk counts as verified.
    """
    entered_ns = ledger.now_ns()
    memory = memory or buffers.WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    phase = ledger.PhaseFacts(
        direction="read",
        rank=rank,
        origin_ns=entered_ns if origin_ns is None else origin_ns,
        entered_ns=entered_ns,
        planned_bytes=sum(planned_object.size_bytes for planned_object in planned),
    )
    with ReadPipeline(planned, verifier, settings, memory=memory) as pipe:
        return pipe.read_from(storages, phase, progress or Silent())


@dataclass(slots=True)
class _OpenObject:
    """One object while it is read: opened by the first thread that needs it, closed by the last."""

    job: ledger.ObjectJob
    chunks_left: int
    source: Source | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReadPipeline:
    """One phase of reading. Use it as a context manager: leaving it early stops and closes everything."""

    def __init__(
        self,
        planned: Sequence[PlannedObject],
        verifier: Verifier | None,
        settings: PipelineSettings,
        *,
        memory: buffers.WarmMemory,
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._jobs = ledger.number_chunks(planned, settings.chunk_bytes)
        self._open_objects = tuple(_OpenObject(job, job.num_chunks) for job in self._jobs)
        self._chunks = self._all_chunks()
        self._picking = threading.Lock()
        self._buffers = buffers.PipelineBuffers(memory, settings)
        self._stamps = ledger.Timestamps.for_chunks(ledger.total_chunks(self._jobs), len(self._jobs))
        self._facts = [ledger.StreamFacts() for _ in range(settings.streams)]
        self._unverified: SimpleQueue[buffers.Buffer | None] = SimpleQueue()
        self._is_stopped = False
        self._wrong: list[ledger.WrongByte] = []
        self._workers = buffers.WorkerGroup(2 * settings.streams, self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        for open_object in self._open_objects:
            self._close(open_object)

    def stop(self) -> None:
        """Stop all threads; may be called at any time, from any thread."""
        self._is_stopped = True
        self._buffers.stop()
        for _ in range(self._settings.streams):
            self._unverified.put(None)

    def read_from(
        self, storages: Sequence[Storage], phase: ledger.PhaseFacts, progress: Progress
    ) -> ledger.Measurement:
        """Read and verify everything, and return the measurement."""
        progress.begin("reading", phase.planned_bytes)
        streams = range(self._settings.streams)
        counter_deltas = ledger.CounterDeltas(storages, len(streams))
        self._buffers.expect_returns()
        verifiers = [self._workers.start(self._verify, stream) for stream in streams]
        readers = [
            self._workers.start(self._read, stream, storages[stream % len(storages)], progress)
            for stream in streams
        ]
        self._workers.wait(readers, "all bytes to be read")
        for _ in verifiers:
            self._unverified.put(None)
        self._workers.wait(verifiers, "all bytes to be verified")
        wrong = tuple(sorted(self._wrong, key=lambda place: (place.key, place.offset)))
        measured = ledger.measure(phase, self._stamps, self._facts, counter_deltas, wrong_bytes=wrong)
        ledger.require_read(measured.ledger, uri=storages[0].uri)
        return measured

    def _all_chunks(self) -> Iterator[tuple[_OpenObject, int]]:
        for open_object in self._open_objects:
            for number in range(open_object.job.num_chunks):
                yield open_object, number

    def _next_chunk(self) -> tuple[_OpenObject, int] | None:
        with self._picking:
            return next(self._chunks, None)

    def _read(self, stream: int, storage: Storage, progress: Progress) -> None:
        if stream == 0:
            self._check_empty_objects(storage)
        while (picked := self._next_chunk()) is not None:
            open_object, number = picked
            awaited_ns = ledger.now_ns()
            buffer = self._buffers.take(stream, "verification")
            self._facts[stream].storage_stall_ns += ledger.now_ns() - awaited_ns
            self._read_chunk(stream, storage, open_object, number, buffer)
            progress.advance(buffer.size_bytes)
            if self._is_to_verify(open_object.job, number):
                buffer.hand_on(buffers.Ownership.FILLING, buffers.Ownership.READY)
                self._unverified.put(buffer)
            else:
                self._buffers.give_back(buffer, buffers.Ownership.FILLING)

    def _check_empty_objects(self, storage: Storage) -> None:
        """Open the objects without chunks, which might be missing or no longer empty."""
        for open_object in self._open_objects:
            if not open_object.job.num_chunks:
                self._source(0, storage, open_object)
                self._close(open_object)

    def _read_chunk(
        self, stream: int, storage: Storage, open_object: _OpenObject, number: int, buffer: buffers.Buffer
    ) -> None:
        stamps, planned, chunk_bytes = self._stamps, open_object.job.planned, self._settings.chunk_bytes
        chunk = open_object.job.first_chunk + number
        buffer.job, buffer.chunk, buffer.offset = open_object.job.number, chunk, number * chunk_bytes
        buffer.size_bytes = min(chunk_bytes, planned.size_bytes - buffer.offset)
        source = self._source(stream, storage, open_object)
        stamps.stream[chunk] = stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.submitted[chunk] = ledger.now_ns()
        source.read_into(buffer.offset, buffer.filled)
        stamps.returned[chunk] = stamps.acknowledged[chunk] = ledger.now_ns()
        with open_object.lock:
            open_object.chunks_left -= 1
            is_last = open_object.chunks_left == 0
        if is_last:
            self._close(open_object)

    def _source(self, stream: int, storage: Storage, open_object: _OpenObject) -> Source:
        planned, span = open_object.job.planned, self._stamps.opening[open_object.job.number]
        with open_object.lock:
            if open_object.source is None:
                span[0] = ledger.now_ns()
                open_object.source = storage.open(planned.key)
                span[1] = ledger.now_ns()
                self._facts[stream].num_objects += 1
                self._stamps.object_stream[open_object.job.number] = stream
                _check_size(open_object.source, planned, storage.uri)
            return open_object.source

    def _is_to_verify(self, job: ledger.ObjectJob, number: int) -> bool:
        if self._verifier is None or self._settings.verify == "off":
            return False
        is_sampled = number % self._settings.sample_every == 0 or number == job.num_chunks - 1
        return self._settings.verify == "full" or is_sampled

    def _verify(self, stream: int) -> None:
        while (buffer := self._next_unverified(stream)) is not None:
            assert self._verifier is not None
            planned, chunk = self._jobs[buffer.job].planned, buffer.chunk
            begin_ns = ledger.now_ns()
            wrong = self._verifier.verify(planned, buffer.offset, buffer.filled)
            self._stamps.content_begin[chunk] = begin_ns
            self._stamps.content_end[chunk] = ledger.now_ns()
            if wrong is not None:
                self._stamps.is_wrong[chunk] = True
                if len(self._wrong) < MOST_WRONG_BYTES:
                    self._wrong.append(ledger.WrongByte(planned.key, buffer.offset + wrong))
            self._buffers.give_back(buffer, buffers.Ownership.READY)

    def _next_unverified(self, stream: int) -> buffers.Buffer | None:
        awaited_ns = ledger.now_ns()
        buffer = self._unverified.get()
        if self._is_stopped:
            raise buffers.PipelineStopped
        self._facts[stream].content_stall_ns += ledger.now_ns() - awaited_ns
        return buffer

    def _close(self, open_object: _OpenObject) -> None:
        with open_object.lock:
            source, open_object.source = open_object.source, None
        if source is not None:
            source.close()


def _check_size(source: Source, planned: PlannedObject, uri: str) -> None:
    if source.size_bytes != planned.size_bytes:
        raise ShortTransfer(
            f"The object has {source.size_bytes} bytes, but {planned.size_bytes} bytes were written",
            uri=f"{uri.rstrip('/')}/{planned.key}",
            expected_bytes=planned.size_bytes,
            actual_bytes=source.size_bytes,
            fix="It was replaced or truncated since then; write it again.",
        )
