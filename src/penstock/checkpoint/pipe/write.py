"""The way out: producer -> owned buffers -> storage, several objects at once, timed from end to end.

Each stream has a thread that fills and one that submits, so content is made while the storage works.
Invariant: an object is either durable with exactly its planned bytes, or the phase raises and it is aborted.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Self

from penstock.checkpoint.pipe.buffers import Buffer, Buffers, Ownership
from penstock.checkpoint.pipe.crew import Crew
from penstock.checkpoint.pipe.judge import require_durable
from penstock.checkpoint.pipe.lane import Lane, Shared
from penstock.checkpoint.pipe.memory import WarmMemory
from penstock.checkpoint.pipe.report import PhaseFacts, Tally, measure
from penstock.checkpoint.pipe.stamps import Job, Stamps, now_ns, number_chunks, total_chunks
from penstock.progress import Progress, Silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.pipe.base import (
        FillOrder,
        Measurement,
        PipeSettings,
        PlannedObject,
        Producer,
    )
    from penstock.storage.protocol import Storage


def write_objects(
    storages: Sequence[Storage],
    planned: Sequence[PlannedObject],
    producer: Producer,
    settings: PipeSettings,
    *,
    memory: WarmMemory | None = None,
    rank: int = 0,
    origin_ns: int | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Write and make durable all of `planned`; the first failure of any thread is raised, nothing half stays.

    Stream i writes to `storages[i % len(storages)]`: give each stream one of its own where requests and
    retries are wanted for each. `memory` is what earlier phases used, at least `buffer_memory_bytes`;
    `origin_ns` is a moment that all ranks share, by default the beginning of this call.
    """
    entered_ns = now_ns()
    memory = memory or WarmMemory(settings.buffer_memory_bytes)
    memory.touch(settings.buffer_memory_bytes)
    with WritePipe(planned, producer, settings, memory=memory, entered_ns=entered_ns) as pipe:
        return pipe.write_to(storages, rank=rank, origin_ns=origin_ns, progress=progress)


class WritePipe:
    """One phase of writing. It fills buffers from the beginning, and empties them once told where to.

    Use it as a context: leaving it early gives up, and whatever is unfinished is aborted.
    """

    def __init__(
        self,
        planned: Sequence[PlannedObject],
        producer: Producer,
        settings: PipeSettings,
        *,
        memory: WarmMemory,
        entered_ns: int | None = None,
        order: FillOrder = "chunk by chunk",
    ) -> None:
        self._entered_ns = now_ns() if entered_ns is None else entered_ns
        self._streams = settings.streams
        self._jobs = number_chunks(planned, settings.chunk_bytes)
        self._planned_bytes = sum(each.size_bytes for each in planned)
        self._unfilled = iter(self._jobs)
        self._picking = threading.Lock()
        self._buffers = Buffers(memory, settings)
        self._stamps = Stamps.for_chunks(total_chunks(self._jobs), len(self._jobs))
        for buffer in self._buffers.all:
            buffer.release = partial(self._acknowledge, buffer)
        shared = Shared(
            next_job=self._next_job,
            producer=producer,
            buffers=self._buffers,
            stamps=self._stamps,
            chunk_bytes=settings.chunk_bytes,
            order=order,
        )
        self._lanes = tuple(Lane(stream, shared) for stream in range(settings.streams))
        self._crew = Crew(2 * settings.streams, self.stop)
        self._fillers = [self._crew.start(lane.fill) for lane in self._lanes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.dismiss()

    def stop(self) -> None:
        """Have all threads give up; safe at any time, from any thread."""
        self._buffers.stop()
        for lane in self._lanes:
            lane.stop()

    def wait_filled(self, timeout_s: float | None = None) -> None:
        """Return when the producer is needed no more; raises what a thread raised."""
        filled = [lane.filled for lane in self._lanes]
        self._crew.wait(filled, "all bytes to be copied into buffers", timeout_s)

    @property
    def filled_ns(self) -> int:
        """When the producer's source was needed for the last time; 0 before the first stream is that far."""
        return max(lane.filled_ns for lane in self._lanes)

    def write_to(
        self,
        storages: Sequence[Storage],
        *,
        rank: int = 0,
        origin_ns: int | None = None,
        progress: Progress | None = None,
    ) -> Measurement:
        """Empty the buffers into storage until everything is durable; what the phase was seen to do."""
        progress = progress or Silent()
        progress.begin("writing", self._planned_bytes)
        tally = Tally(storages, self._streams)
        self._buffers.expect_returns()
        writers = [
            self._crew.start(lane.write, storages[stream % len(storages)], progress)
            for stream, lane in enumerate(self._lanes)
        ]
        self._crew.wait([*self._fillers, *writers], "all bytes to be durable")
        phase = PhaseFacts(
            direction="write",
            rank=rank,
            origin_ns=self._entered_ns if origin_ns is None else origin_ns,
            entered_ns=self._entered_ns,
            planned_bytes=self._planned_bytes,
        )
        measurement = measure(phase, self._stamps, [lane.facts for lane in self._lanes], tally)
        require_durable(measurement.ledger, uri=storages[0].uri)
        return measurement

    def _next_job(self) -> Job | None:
        with self._picking:
            return next(self._unfilled, None)

    def _acknowledge(self, buffer: Buffer) -> None:
        """The storage lets go of `buffer`; called from any thread of its."""
        self._stamps.acknowledged[buffer.chunk] = now_ns()
        self._buffers.give_back(buffer, Ownership.IN_FLIGHT)
