"""The read pipeline: storage -> buffers -> verifier, several requests at once, with timestamps.

Streams share the chunks of all objects. An equal number of threads verify these chunks while the next ones
are read. Only the benchmark uses it: loading a checkpoint verifies in the reading threads
(`transfer.reader`). Invariant: a phase that returns has read every planned byte, and its measurement lists
the wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

from penstock.errors import ShortTransfer
from penstock.progress import Progress
from penstock.storage.protocol import Source, Storage
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import Measurement, Timestamps, WrongByte, now_ns
from penstock.transfer.pipeline import Buffer, PipelineBuffers, PipelineStopped, WorkerGroup
from penstock.transfer.reader import OpenFiles

if TYPE_CHECKING:
    from penstock.transfer.pipeline import PipelineSettings, PlannedObject

MOST_WRONG_BYTES: Final = 1000
"""A measurement lists at most this many places of wrong bytes."""

Verify = Callable[["PlannedObject", int, memoryview], int | None]
"""Receives an object, an offset and the bytes read there; returns the index of the first wrong byte in the
buffer, None if all are correct. Called from several threads at once, in any order, at most once for each
range.
"""


def read_objects(
    storages: Sequence[Storage],
    planned: Sequence[PlannedObject],
    verify: Verify | None,
    settings: PipelineSettings,
    *,
    memory: WarmMemory | None = None,
    rank: int = 0,
    origin_ns: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Read all of `planned`, and verify with `verify` as much as the settings require.

    The arguments are those of `write_objects`. Wrong bytes raise no error: the measurement lists them, and
    none of the bytes of their chunk counts as verified.
    """
    entered_ns = now_ns()
    memory = memory or WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    pipe = ReadPipeline(storages, planned, verify, settings, memory=memory, entered_ns=entered_ns)
    with pipe:
        return pipe.read(rank, origin_ns, progress or Progress())


class ReadPipeline:
    """One phase of reading, as a context manager.

    Leaving it early stops all threads and closes all objects.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        planned: Sequence[PlannedObject],
        verify: Verify | None,
        settings: PipelineSettings,
        *,
        memory: WarmMemory,
        entered_ns: int,
    ) -> None:
        self._storages = storages
        self._planned = planned
        self._verify = verify
        self._settings = settings
        self._buffers = PipelineBuffers(memory, settings)
        sizes = [item.size_bytes for item in planned]
        self._stamps = Timestamps(sizes, settings.chunk_bytes, settings.streams, entered_ns)
        # An empty object is opened, too: it might be missing, or no longer empty.
        self._chunks = [
            (number, chunk)
            for number in range(len(planned))
            for chunk in self._stamps.chunks(number) or (None,)
        ]
        self._unread = iter(self._chunks)
        self._picking = threading.Lock()
        self._files = OpenFiles(number for number, _ in self._chunks)
        self._unverified: SimpleQueue[Buffer | None] = SimpleQueue()
        self._is_stopped = False
        self._wrong: list[WrongByte] = []
        self._workers = WorkerGroup(2 * settings.streams, self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        self._files.close()

    def stop(self) -> None:
        """Stop all threads. May be called at any time, from any thread."""
        self._is_stopped = True
        self._buffers.stop()
        for _ in range(self._settings.streams):
            self._unverified.put(None)

    def read(self, rank: int, origin_ns: int | None, progress: Progress) -> Measurement:
        """Read and verify all objects, and return the measurement."""
        progress.begin("reading", self._stamps.planned_bytes)
        streams = range(self._settings.streams)
        self._stamps.begin_counting(self._storages)
        self._buffers.expect_returns()
        verifiers = [self._workers.start(self._verify_chunks, stream) for stream in streams]
        readers = [self._workers.start(self._read_chunks, stream, progress) for stream in streams]
        self._workers.wait(readers, "all bytes to be read")
        for _ in verifiers:
            self._unverified.put(None)
        self._workers.wait(verifiers, "all bytes to be verified")
        wrong = tuple(sorted(self._wrong, key=lambda place: (place.key, place.offset)))
        measured = self._stamps.measure("read", rank=rank, origin_ns=origin_ns, wrong_bytes=wrong)
        measured.require_complete(self._storages[0].uri)
        return measured

    def _open(self, stream: int, number: int) -> Source:
        """Open an object for the first stream that needs it."""
        planned, stamps = self._planned[number], self._stamps
        storage = self._storages[stream % len(self._storages)]
        stamps.opening[number, 0] = now_ns()
        source = storage.open(planned.key)
        stamps.opening[number, 1] = now_ns()
        stamps.num_objects[stream] += 1
        stamps.object_stream[number] = stream
        if source.size_bytes != planned.size_bytes:
            source.close()
            raise ShortTransfer(
                f"The object has {source.size_bytes} bytes, but {planned.size_bytes} bytes were written",
                uri=f"{storage.uri.rstrip('/')}/{planned.key}",
                expected_bytes=planned.size_bytes,
                actual_bytes=source.size_bytes,
                fix="It was replaced or truncated since then; write it again.",
            )
        return source

    def _read_chunks(self, stream: int, progress: Progress) -> None:
        while not self._is_stopped:
            with self._picking:
                number, chunk = next(self._unread, (None, None))
            if number is None:
                return
            if chunk is None:
                self._files.open(number, partial(self._open, stream))
            else:
                awaited_ns = now_ns()
                buffer = self._buffers.take(stream, "verification")
                self._stamps.storage_stall_ns[stream] += now_ns() - awaited_ns
                self._read_chunk(stream, number, chunk, buffer)
                progress.advance(buffer.size_bytes)
                if self._is_to_verify(number, chunk):
                    self._unverified.put(buffer)
                else:
                    self._buffers.give_back(buffer)
            self._files.done(number)

    def _read_chunk(self, stream: int, number: int, chunk: int, buffer: Buffer) -> None:
        stamps, chunk_bytes = self._stamps, self._settings.chunk_bytes
        buffer.number, buffer.chunk = number, chunk
        buffer.offset = (chunk - stamps.chunks(number).start) * chunk_bytes
        buffer.size_bytes = min(chunk_bytes, self._planned[number].size_bytes - buffer.offset)
        source = self._files.open(number, partial(self._open, stream))
        stamps.stream[chunk] = stream
        stamps.size_bytes[chunk] = buffer.size_bytes
        stamps.submitted[chunk] = now_ns()
        source.read_into(buffer.offset, buffer.filled)
        stamps.returned[chunk] = stamps.acknowledged[chunk] = now_ns()

    def _is_to_verify(self, number: int, chunk: int) -> bool:
        if self._verify is None or self._settings.verify == "off":
            return False
        chunks = self._stamps.chunks(number)
        is_sampled = (chunk - chunks.start) % self._settings.sample_every == 0 or chunk == chunks[-1]
        return self._settings.verify == "full" or is_sampled

    def _verify_chunks(self, stream: int) -> None:
        stamps = self._stamps
        while True:
            awaited_ns = now_ns()
            buffer = self._unverified.get()
            if self._is_stopped:
                raise PipelineStopped
            stamps.content_stall_ns[stream] += now_ns() - awaited_ns
            if buffer is None:
                return
            assert self._verify is not None
            planned, chunk = self._planned[buffer.number], buffer.chunk
            stamps.content_begin[chunk] = now_ns()
            wrong = self._verify(planned, buffer.offset, buffer.filled)
            stamps.content_end[chunk] = now_ns()
            if wrong is not None:
                stamps.is_wrong[chunk] = True
                if len(self._wrong) < MOST_WRONG_BYTES:
                    self._wrong.append(WrongByte(planned.key, buffer.offset + wrong))
            self._buffers.give_back(buffer)
