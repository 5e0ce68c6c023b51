"""The read pipeline: storage -> buffers -> verifier, several requests at once, with timestamps.

Streams share the chunks of all objects; as many threads verify what was read while the next chunk is read.
Only the benchmark uses it: loading has a reader of its own. Invariant: a phase that returns has read every
planned byte, and its record lists the wrong ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

from penstock.checkpoint.saving.buffers import (
    Buffer,
    Ownership,
    PipelineBuffers,
    PipelineStopped,
    WarmMemory,
    WorkerGroup,
)
from penstock.checkpoint.saving.measurement import (
    CounterDeltas,
    Measurement,
    ObjectJob,
    PhaseFacts,
    StreamFacts,
    Timestamps,
    WrongByte,
    measure,
    now_ns,
    number_chunks,
    require_read,
    total_chunks,
)
from penstock.errors import ShortTransfer
from penstock.progress import Progress, Silent
from penstock.storage.protocol import Source, Storage

if TYPE_CHECKING:
    from penstock.checkpoint.saving.pipeline import PipelineSettings, PlannedObject, Verifier

MOST_WRONG_BYTES: Final = 1000
"""So many places are kept; a phase with more is not worth listing further."""


def read_objects(
    storages: Sequence[Storage],
    planned: Sequence[PlannedObject],
    verifier: Verifier | None,
    settings: PipelineSettings,
    *,
    memory: WarmMemory | None = None,
    rank: int = 0,
    origin_ns: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Read all of `planned` and verify as much as the settings say; without a `verifier`, nothing.

    Arguments as for `write_objects`. Wrong bytes do not raise: they are in the measurement, and no byte of
    their chunk counts as verified.
    """
    entered_ns = now_ns()
    memory = memory or WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    phase = PhaseFacts(
        direction="read",
        rank=rank,
        origin_ns=entered_ns if origin_ns is None else origin_ns,
        entered_ns=entered_ns,
        planned_bytes=sum(each.size_bytes for each in planned),
    )
    with ReadPipeline(planned, verifier, settings, memory=memory) as pipe:
        return pipe.read_from(storages, phase, progress or Silent())


@dataclass(slots=True)
class _OpenObject:
    """One object while it is being read: opened by whoever needs it first, closed by whoever is last."""

    job: ObjectJob
    chunks_left: int
    source: Source | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class ReadPipeline:
    """One phase of reading. Use it as a context: leaving it early gives up and closes everything."""

    def __init__(
        self,
        planned: Sequence[PlannedObject],
        verifier: Verifier | None,
        settings: PipelineSettings,
        *,
        memory: WarmMemory,
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._jobs = number_chunks(planned, settings.chunk_bytes)
        self._readings = tuple(_OpenObject(job, job.num_chunks) for job in self._jobs)
        self._chunks = self._all_chunks()
        self._picking = threading.Lock()
        self._buffers = PipelineBuffers(memory, settings)
        self._stamps = Timestamps.for_chunks(total_chunks(self._jobs), len(self._jobs))
        self._facts = [StreamFacts() for _ in range(settings.streams)]
        self._unverified: SimpleQueue[Buffer | None] = SimpleQueue()
        self._is_stopped = False
        self._wrong: list[WrongByte] = []
        self._crew = WorkerGroup(2 * settings.streams, self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.dismiss()
        for reading in self._readings:
            self._close(reading)

    def stop(self) -> None:
        """Have all threads give up; safe at any time, from any thread."""
        self._is_stopped = True
        self._buffers.stop()
        for _ in range(self._settings.streams):
            self._unverified.put(None)

    def read_from(self, storages: Sequence[Storage], phase: PhaseFacts, progress: Progress) -> Measurement:
        """Read and verify everything; what the phase was seen to do."""
        progress.begin("reading", phase.planned_bytes)
        streams = range(self._settings.streams)
        tally = CounterDeltas(storages, len(streams))
        self._buffers.expect_returns()
        verifiers = [self._crew.start(self._verify, stream) for stream in streams]
        readers = [
            self._crew.start(self._read, stream, storages[stream % len(storages)], progress)
            for stream in streams
        ]
        self._crew.wait(readers, "all bytes to be read")
        for _ in verifiers:
            self._unverified.put(None)
        self._crew.wait(verifiers, "all bytes to be verified")
        wrong = tuple(sorted(self._wrong, key=lambda each: (each.key, each.offset)))
        measurement = measure(phase, self._stamps, self._facts, tally, wrong_bytes=wrong)
        require_read(measurement.ledger, uri=storages[0].uri)
        return measurement

    def _all_chunks(self) -> Iterator[tuple[_OpenObject, int]]:
        for reading in self._readings:
            for number in range(reading.job.num_chunks):
                yield reading, number

    def _next_chunk(self) -> tuple[_OpenObject, int] | None:
        with self._picking:
            return next(self._chunks, None)

    def _read(self, stream: int, storage: Storage, progress: Progress) -> None:
        if stream == 0:
            self._look_at_empty_objects(storage)
        while (picked := self._next_chunk()) is not None:
            reading, number = picked
            awaited_ns = now_ns()
            buffer = self._buffers.take(stream, "verification")
            self._facts[stream].storage_stall_ns += now_ns() - awaited_ns
            self._read_chunk(stream, storage, reading, number, buffer)
            progress.advance(buffer.size_bytes)
            if self._is_to_verify(reading.job, number):
                buffer.hand_on(Ownership.FILLING, Ownership.READY)
                self._unverified.put(buffer)
            else:
                self._buffers.give_back(buffer, Ownership.FILLING)

    def _look_at_empty_objects(self, storage: Storage) -> None:
        """They have no chunk that would find them missing, or no longer empty."""
        for reading in self._readings:
            if not reading.job.num_chunks:
                self._source(0, storage, reading)
                self._close(reading)

    def _read_chunk(
        self, stream: int, storage: Storage, reading: _OpenObject, number: int, buffer: Buffer
    ) -> None:
        stamps, planned, chunk_bytes = self._stamps, reading.job.planned, self._settings.chunk_bytes
        chunk = reading.job.first_chunk + number
        buffer.job, buffer.chunk, buffer.offset = reading.job.number, chunk, number * chunk_bytes
        buffer.size_bytes = min(chunk_bytes, planned.size_bytes - buffer.offset)
        source = self._source(stream, storage, reading)
        stamps.stream[chunk] = stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.submitted[chunk] = now_ns()
        source.read_into(buffer.offset, buffer.filled)
        stamps.returned[chunk] = stamps.acknowledged[chunk] = now_ns()
        with reading.lock:
            reading.chunks_left -= 1
            is_last = reading.chunks_left == 0
        if is_last:
            self._close(reading)

    def _source(self, stream: int, storage: Storage, reading: _OpenObject) -> Source:
        planned, span = reading.job.planned, self._stamps.opening[reading.job.number]
        with reading.lock:
            if reading.source is None:
                span[0] = now_ns()
                reading.source = storage.open(planned.key)
                span[1] = now_ns()
                self._facts[stream].num_objects += 1
                self._stamps.object_stream[reading.job.number] = stream
                _check_size(reading.source, planned, storage.uri)
            return reading.source

    def _is_to_verify(self, job: ObjectJob, number: int) -> bool:
        if self._verifier is None or self._settings.verify == "off":
            return False
        is_sampled = number % self._settings.sample_every == 0 or number == job.num_chunks - 1
        return self._settings.verify == "full" or is_sampled

    def _verify(self, stream: int) -> None:
        while (buffer := self._next_unverified(stream)) is not None:
            assert self._verifier is not None
            planned, chunk = self._jobs[buffer.job].planned, buffer.chunk
            begin_ns = now_ns()
            wrong = self._verifier.verify(planned, buffer.offset, buffer.filled)
            self._stamps.content_begin[chunk] = begin_ns
            self._stamps.content_end[chunk] = now_ns()
            if wrong is not None:
                self._stamps.is_wrong[chunk] = True
                if len(self._wrong) < MOST_WRONG_BYTES:
                    self._wrong.append(WrongByte(planned.key, buffer.offset + wrong))
            self._buffers.give_back(buffer, Ownership.READY)

    def _next_unverified(self, stream: int) -> Buffer | None:
        awaited_ns = now_ns()
        buffer = self._unverified.get()
        if self._is_stopped:
            raise PipelineStopped
        self._facts[stream].content_stall_ns += now_ns() - awaited_ns
        return buffer

    def _close(self, reading: _OpenObject) -> None:
        with reading.lock:
            source, reading.source = reading.source, None
        if source is not None:
            source.close()


def _check_size(source: Source, planned: PlannedObject, uri: str) -> None:
    if source.size_bytes != planned.size_bytes:
        raise ShortTransfer(
            f"The object has {source.size_bytes} bytes, but {planned.size_bytes} were written",
            uri=f"{uri.rstrip('/')}/{planned.key}",
            expected_bytes=planned.size_bytes,
            actual_bytes=source.size_bytes,
            fix="It was replaced or cut since; write it anew.",
        )
