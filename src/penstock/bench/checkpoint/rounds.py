"""One round: all ranks write or read one checkpoint through the engine's pipeline.

Collective. A round that fails on any rank fails on all of them and leaves none of its files behind. Content
follows from the seed and the object's key, so nothing is stored to verify against.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from penstock.bench.cache_eviction import evict_objects
from penstock.bench.checkpoint.checkpoint_result import MAX_WRONG_PLACES, RoundFigures
from penstock.bench.checkpoint.round_plan import choose_source_process, plan_objects
from penstock.checkpoint.saving.buffers import MIN_BUFFERS_PER_STREAM
from penstock.checkpoint.saving.measurement import combine_ranks, common_origin_ns
from penstock.checkpoint.saving.pipeline import write_objects
from penstock.checkpoint.saving.read_pipeline import read_objects
from penstock.cluster.comm import all_gather_results
from penstock.dataset.content import Content
from penstock.errors import ObjectNotFound, StorageError
from penstock.results.step_events import SpanEvent, SpanKind, StepPhase

if TYPE_CHECKING:
    from penstock.bench.checkpoint.progress_board import RoundProgress
    from penstock.bench.checkpoint.round_plan import CheckpointRound
    from penstock.bench.model_state import StateLayout
    from penstock.bench.step_recorder import StepRecorder
    from penstock.checkpoint.saving.buffers import WarmMemory
    from penstock.checkpoint.saving.measurement import Measurement
    from penstock.checkpoint.saving.pipeline import PipelineSettings, PlannedObject
    from penstock.cluster.comm import Comm
    from penstock.storage import Storage


class StateContent:
    """The bytes of some planned objects; made before the clock starts, used by any thread."""

    def __init__(self, seed: int, planned: Iterable[PlannedObject]) -> None:
        # A key names checkpoint, rank and file, so that no two of a run have a block in common.
        self._contents = {each.key: Content(seed, each.key) for each in planned}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Overwrite `buffer` with the object's bytes from `offset` on."""
        self._contents[planned.key].fill(buffer, offset)

    def verify(self, planned: PlannedObject, offset: int, buffer: memoryview) -> int | None:
        """Where in `buffer` the first wrong byte is; None if all are right."""
        return self._contents[planned.key].verify(buffer, offset)


logger = logging.getLogger(__name__)

LONGEST_ROUND_S: Final = 7 * 24 * 3600.0
"""Ranks may take very unlike times. None hangs: the pipe gives up on a silent storage by itself."""

_KINDS: Final = {"write": SpanKind.SAVE, "read": SpanKind.LOAD}
_TITLES: Final = {"write": "writing", "read": "reading"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRunner:
    """What all rounds of one rank have in common. `shift` is how far ranks are moved for reading."""

    comm: Comm
    layout: StateLayout
    storages: Sequence[Storage]
    pipe: PipelineSettings
    memory: WarmMemory
    seed: int
    shift: int
    syncs_ranks: bool
    watch: RoundProgress
    recorder: StepRecorder

    def run(self, each: CheckpointRound, *, last: int) -> RoundFigures:
        """The round, and what all ranks saw of it. `last` is the number of its direction's last round."""
        process = self.comm.rank
        if each.direction == "read":
            process = choose_source_process(process, num_processes=self.comm.size, shift=self.shift)
        planned = plan_objects(self.layout, process, each.step, epoch=each.epoch)
        content = StateContent(self.seed, planned)
        cold = evict_objects(self.storages[0], planned, comm=self.comm) if each.direction == "read" else None
        title = f"{_TITLES[each.direction]} checkpoint {each.number} of {last}"
        began_at_s = time.time()
        with self.watch.track(title, self._bytes_of_ranks(each)):
            measurements = self._move(each, planned, content)
        busy = [seen for seen in measurements if seen is not None]
        return RoundFigures(
            round=each,
            began_at_s=began_at_s,
            ended_at_s=time.time(),
            phase=combine_ranks(busy),
            cold=cold,
            wrong=tuple(place for seen in busy for place in seen.wrong_bytes)[:MAX_WRONG_PLACES],
        )

    def _bytes_of_ranks(self, each: CheckpointRound) -> list[int]:
        sizes: list[int] = self.layout.bytes_of_processes().tolist()
        shift = self.shift if each.direction == "read" else 0
        return [
            sizes[choose_source_process(rank, num_processes=len(sizes), shift=shift)]
            for rank in range(len(sizes))
        ]

    def _move(
        self, each: CheckpointRound, planned: Sequence[PlannedObject], content: StateContent
    ) -> list[Measurement | None]:
        """The timed part; a rank without files sees nothing."""
        move = write_objects if each.direction == "write" else read_objects
        with ExitStack() as undo:
            if each.direction == "write":
                undo.callback(remove_objects, self.storages[0], planned)
            origin_ns = common_origin_ns(self.comm, awaiting="all ranks to begin a checkpoint")

            def work() -> Measurement | None:
                if not planned:
                    return None
                return move(
                    self.storages,
                    planned,
                    content,
                    self.pipe,
                    memory=self.memory,
                    rank=self.comm.rank,
                    origin_ns=origin_ns,
                    progress=self.watch,
                )

            seen = all_gather_results(
                self.comm,
                work,
                awaiting="all ranks to finish a checkpoint",
                timeout_s=max(LONGEST_ROUND_S, self.comm.timeout_s),
            )
            undo.pop_all()
        self._note(each, seen[self.comm.rank], planned, origin_ns)
        return seen

    def _note(
        self,
        each: CheckpointRound,
        seen: Measurement | None,
        planned: Sequence[PlannedObject],
        origin_ns: int,
    ) -> None:
        """DLIO's span of the round: this rank's own time, with `rank_sync` until all have met."""
        end_ns = time.monotonic_ns() if self.syncs_ranks or seen is None else seen.end_ns
        self.recorder.add_span(
            SpanEvent(
                kind=_KINDS[each.direction],
                phase=StepPhase.TRAIN,
                epoch=each.epoch,
                block=each.number,
                step=each.step,
                start_ns=origin_ns,
                end_ns=end_ns if seen or self.syncs_ranks else origin_ns,
                size_bytes=sum(one.size_bytes for one in planned),
            )
        )


def fit_pipe(pipe: PipelineSettings, planned: Sequence[PlannedObject]) -> PipelineSettings:
    """The settings with no more memory and streams than the objects of a checkpoint can use.

    Memory is touched before it is timed, and costs seconds a GiB: a small checkpoint should not pay for it.
    """
    streams = max(1, min(pipe.streams, len(planned)))
    used = sum(-(-each.size_bytes // pipe.chunk_bytes) for each in planned) * pipe.chunk_bytes
    least = MIN_BUFFERS_PER_STREAM * streams * pipe.chunk_bytes
    return replace(pipe, streams=streams, buffer_memory_bytes=max(least, min(pipe.buffer_memory_bytes, used)))


def remove_objects(storage: Storage, planned: Sequence[PlannedObject]) -> None:
    """Delete what is there of these; a cleanup must not fail, so the log names what cannot be deleted."""
    for each in planned:
        try:
            storage.delete(each.key)
        except ObjectNotFound:
            logger.debug("%s was not there", each.key)
        except StorageError as error:
            logger.warning("Could not delete what a failed checkpoint left: %s", error)
