"""The rounds of a checkpoint benchmark: which checkpoints are written and read, in which order, and how.

All writes come before all reads, as in MLPerf Storage and DLIO. In a round all ranks write or read one
checkpoint through the engine's pipeline: collective, and a round that fails on any rank fails on all of them
and leaves none of its files behind. Content follows from the seed and the object's key, so nothing is stored
to verify against.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from penstock.bench.checkpoint import checkpoint_result, read_pipeline
from penstock.bench.checkpoint.checkpoint_result import EPOCH, CheckpointRound
from penstock.bench.page_cache_eviction import evict_objects
from penstock.bench.progress_board import RoundProgress
from penstock.bench.state_layout import StateLayout, checkpoint_folder
from penstock.bench.step_recorder import StepRecorder
from penstock.cluster.comm import Comm, all_gather_results, decide_on_rank0
from penstock.dataset.content import Content
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.results.checkpoint_files import MovedBytes, RoundThroughput
from penstock.results.step_events import SpanEvent, SpanKind, StepPhase
from penstock.storage import Storage
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.ledger import Measurement, combine_ranks, common_origin_ns
from penstock.transfer.pipeline import MIN_BUFFERS_PER_STREAM, PipelineSettings, PlannedObject, write_objects

logger = logging.getLogger(__name__)


def plan_rounds(*, num_writes: int, num_reads: int, kept_steps: Sequence[int]) -> tuple[CheckpointRound, ...]:
    """The rounds still to come; `kept_steps` are those of complete checkpoints that stay, ascending.

    Reads take the oldest checkpoints first, as DLIO does: what was written last may still be in some cache.
    """
    missing = (step for step in range(1, num_writes + 1) if step not in kept_steps)
    writes = [CheckpointRound(direction="write", number=step, step=step) for step in missing]
    readable = sorted({*kept_steps, *(write.step for write in writes)})
    if num_reads > len(readable):
        raise UsageError(
            f"{num_reads} checkpoints are to be read, but only {len(readable)} will exist",
            where="--reads",
            fix=f"Read at most {len(readable)}, or write more: --writes {num_reads}.",
        )
    reads = [
        CheckpointRound(direction="read", number=number, step=step)
        for number, step in enumerate(readable[:num_reads], start=1)
    ]
    return (*writes, *reads)


def plan_objects(
    layout: StateLayout, process: int, step: int, *, epoch: int = EPOCH
) -> tuple[PlannedObject, ...]:
    """What one process writes of a checkpoint."""
    folder = checkpoint_folder(epoch, step)
    return tuple(
        PlannedObject(f"{folder}/{file.name}", file.size_bytes)
        for file in layout.files_of(process, epoch=epoch, step=step)
    )


def choose_source_process(process: int, *, num_processes: int, shift: int) -> int:
    """Whose files a process reads back: with a shift of a node's ranks, those of the next node."""
    return (process + shift) % num_processes


def rank_shift(hosts: Sequence[str]) -> int:
    """How far to shift so that every rank reads what another host wrote; 0 on one host.

    It is the largest number of ranks on a host. Where hosts have unlike numbers of consecutive ranks, some
    ranks of a large host still read what their own host wrote.
    """
    counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
    return max(counts) if len(counts) > 1 else 0


def seconds_between(rounds: Sequence[CheckpointRound], interval_s: float) -> Iterator[float]:
    """How long to wait before each round: the interval between two of them, nothing before the first."""
    return (interval_s if place else 0.0 for place in range(len(rounds)))


class StateContent:
    """The bytes of some planned objects; made before the clock starts, used by any thread."""

    def __init__(self, seed: int, planned: Iterable[PlannedObject]) -> None:
        # A key names checkpoint, rank and file, so that no two of a run have a block in common.
        self._contents = {object_.key: Content(seed, object_.key) for object_ in planned}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite `buffer` with the object's bytes from `offset` on."""
        self._contents[planned.key].fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Where in `buffer` the first wrong byte is; None if all are right."""
        return self._contents[planned.key].verify(buffer, offset)


LONGEST_ROUND_S: Final = 7 * 24 * 3600.0
"""Ranks may take very different times; the pipeline itself gives up on a storage that stays silent."""

_KINDS: Final = {"write": SpanKind.SAVE, "read": SpanKind.LOAD}
_TITLES: Final = {"write": "writing", "read": "reading"}
_UNITS: Final = {"write": "written_bytes", "read": "read_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRunner:
    """Runs the rounds of one rank. For reading, ranks are moved by `shift`."""

    comm: Comm
    layout: StateLayout
    storages: Sequence[Storage]
    pipe: PipelineSettings
    memory: WarmMemory
    seed: int
    shift: int
    syncs_ranks: bool
    progress: RoundProgress
    recorder: StepRecorder
    throughput: list[RoundThroughput] = field(default_factory=list)
    """On rank 0: what all ranks moved over the time of each round so far."""

    def run(self, checkpoint: CheckpointRound, *, last: int) -> checkpoint_result.RoundFigures:
        """Run the round; its figures over all ranks. `last` is the number of its direction's last round."""
        process = self.comm.rank
        if checkpoint.direction == "read":
            process = choose_source_process(process, num_processes=self.comm.size, shift=self.shift)
        planned = plan_objects(self.layout, process, checkpoint.step, epoch=checkpoint.epoch)
        content = StateContent(self.seed, planned)
        cold = (
            evict_objects(self.storages[0], planned, comm=self.comm)
            if checkpoint.direction == "read"
            else None
        )
        title = f"{_TITLES[checkpoint.direction]} checkpoint {checkpoint.number} of {last}"
        began_at_s, began_ns = time.time(), time.monotonic_ns()
        unit = _UNITS[checkpoint.direction]
        with self.progress.track(title, self._bytes_of_ranks(checkpoint), unit=unit):
            measurements = self._move(checkpoint, planned, content)
        self.recorder.add_stall(epoch=checkpoint.epoch, step=checkpoint.step, began_ns=began_ns)
        total_bytes = sum(object_.size_bytes for object_ in planned)

        def keep(ranks: list[MovedBytes]) -> None:
            self.throughput.append(
                RoundThroughput(direction=checkpoint.direction, step=checkpoint.step, ranks=ranks)
            )

        decide_on_rank0(
            self.comm,
            lambda: self.progress.moved_over_time(total_bytes),
            keep,
            awaiting="what all ranks moved over time",
        )
        busy = [measurement for measurement in measurements if measurement is not None]
        return checkpoint_result.RoundFigures(
            round=checkpoint,
            began_at_s=began_at_s,
            ended_at_s=time.time(),
            phase=combine_ranks(busy),
            cold=cold,
            wrong=tuple(place for measurement in busy for place in measurement.wrong_bytes)[
                : checkpoint_result.MAX_WRONG_PLACES
            ],
        )

    def _bytes_of_ranks(self, checkpoint: CheckpointRound) -> list[int]:
        sizes: list[int] = self.layout.bytes_of_processes().tolist()
        shift = self.shift if checkpoint.direction == "read" else 0
        return [
            sizes[choose_source_process(rank, num_processes=len(sizes), shift=shift)]
            for rank in range(len(sizes))
        ]

    def _move(
        self, checkpoint: CheckpointRound, planned: Sequence[PlannedObject], content: StateContent
    ) -> list[Measurement | None]:
        """The timed part; None of a rank without files."""
        with ExitStack() as undo:
            if checkpoint.direction == "write":
                undo.callback(remove_objects, self.storages[0], planned)
            origin_ns = common_origin_ns(self.comm, awaiting="all ranks to begin a checkpoint")
            self.progress.begin_at(origin_ns)

            def work() -> Measurement | None:
                if not planned:
                    return None
                move = (
                    partial(write_objects, self.storages, planned, content)
                    if checkpoint.direction == "write"
                    else partial(read_pipeline.read_objects, self.storages, planned, content.verify)
                )
                return move(
                    self.pipe,
                    memory=self.memory,
                    rank=self.comm.rank,
                    origin_ns=origin_ns,
                    progress=self.progress,
                )

            # A failure of any rank is raised here on all of them, and each removes what it wrote.
            measurements = all_gather_results(
                self.comm,
                work,
                awaiting="all ranks to finish a checkpoint",
                timeout_s=max(LONGEST_ROUND_S, self.comm.timeout_s),
            )
            undo.pop_all()
        self._add_span(checkpoint, measurements[self.comm.rank], planned, origin_ns)
        return measurements

    def _add_span(
        self,
        checkpoint: CheckpointRound,
        measurement: Measurement | None,
        planned: Sequence[PlannedObject],
        origin_ns: int,
    ) -> None:
        """DLIO's span of the round: this rank's own time, with `rank_sync` until all have met."""
        end_ns = time.monotonic_ns() if self.syncs_ranks or measurement is None else measurement.end_ns
        self.recorder.add_span(
            SpanEvent(
                kind=_KINDS[checkpoint.direction],
                phase=StepPhase.TRAIN,
                epoch=checkpoint.epoch,
                block=checkpoint.number,
                step=checkpoint.step,
                start_ns=origin_ns,
                end_ns=end_ns if measurement or self.syncs_ranks else origin_ns,
                size_bytes=sum(object_.size_bytes for object_ in planned),
            )
        )


def fit_pipe(pipe: PipelineSettings, planned: Sequence[PlannedObject]) -> PipelineSettings:
    """The settings with no more memory and streams than the objects of a checkpoint can use.

    Memory is touched before it is timed, and costs seconds a GiB: a small checkpoint should not pay for it.
    """
    streams = max(1, min(pipe.streams, len(planned)))
    used = sum(-(-object_.size_bytes // pipe.chunk_bytes) for object_ in planned) * pipe.chunk_bytes
    least = MIN_BUFFERS_PER_STREAM * streams * pipe.chunk_bytes
    return replace(pipe, streams=streams, buffer_memory_bytes=max(least, min(pipe.buffer_memory_bytes, used)))


def remove_objects(storage: Storage, planned: Sequence[PlannedObject]) -> None:
    """Delete objects, where they exist; what cannot be deleted is logged, as a cleanup must not fail."""
    for object_ in planned:
        try:
            storage.delete(object_.key)
        except ObjectNotFound:
            logger.debug("%s did not exist", object_.key)
        except StorageError as error:
            logger.warning("Could not delete what a failed checkpoint left: %s", error)
