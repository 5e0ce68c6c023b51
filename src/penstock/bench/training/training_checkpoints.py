"""Checkpoints during a training run: when they are due, and writing them through the engine's pipeline.

A checkpoint lies outside of all timed blocks, so neither waits nor utilization count it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.checkpoint.checkpoint_folder import require_room
from penstock.bench.checkpoint.progress_board import ProgressBoard, ProgressOutputs, RoundProgress
from penstock.bench.checkpoint.round_plan import CheckpointRound, plan_objects
from penstock.bench.checkpoint.rounds import RoundRunner, fit_pipe
from penstock.bench.training.training_result import CheckpointsTaken
from penstock.checkpoint.saving.buffers import WarmMemory
from penstock.checkpoint.saving.pipeline import PipelineSettings
from penstock.dataset.content import Content
from penstock.progress import Silent
from penstock.storage.capabilities import find_local_root

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_request import OpenStorage
    from penstock.bench.checkpoint.checkpoint_result import RoundFigures
    from penstock.bench.model_state import StateLayout
    from penstock.bench.step_recorder import StepRecorder
    from penstock.cluster.comm import Comm
    from penstock.workload.spec import CheckpointSection

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """What a run saves, when, and where. `reopen` opens the place, once for each stream of the pipe."""

    layout: StateLayout
    when: CheckpointSection
    reopen: OpenStorage
    seed: int
    pipe: PipelineSettings = field(default_factory=PipelineSettings)


def is_due(when: CheckpointSection, epoch: int, step: int, num_steps: int) -> bool:
    """Whether a checkpoint follows a step: every n steps of an epoch, or at the end of chosen epochs."""
    if when.steps_between_checkpoints:
        return step % when.steps_between_checkpoints == 0
    late = epoch - when.checkpoint_after_epoch
    return step == num_steps and late >= 0 and late % when.epochs_between_checkpoints == 0


def count_due(when: CheckpointSection, epochs: Sequence[tuple[int, int]]) -> int:
    """How many checkpoints a run of these epochs, each with its number of steps, will take."""
    if when.steps_between_checkpoints:
        return sum(num_steps // when.steps_between_checkpoints for _, num_steps in epochs)
    return sum(is_due(when, epoch, num_steps, num_steps) for epoch, num_steps in epochs)


@dataclass(slots=True, kw_only=True)
class TrainingCheckpoints:
    """Takes a run's checkpoints; its memory and connections are ready before the first epoch."""

    request: CheckpointsRequest
    work: RoundRunner
    num_due: int
    _taken: list[RoundFigures] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        request: CheckpointsRequest,
        epochs: Sequence[tuple[int, int]],
        *,
        comm: Comm,
        board: Path,
        recorder: StepRecorder,
        heartbeat: Callable[[], None],
    ) -> TrainingCheckpoints:
        """Check that there is room for all of them, and warm up. Collective."""
        num_due = count_due(request.when, epochs)
        sizes: list[int] = request.layout.bytes_of_processes().tolist()
        require_room(find_local_root(request.reopen()), [size * num_due for size in sizes], comm=comm)
        pipe = fit_pipe(request.pipe, plan_objects(request.layout, comm.rank, 1))
        memory = WarmMemory(pipe.buffer_memory_bytes)
        if num_due and sizes[comm.rank]:
            memory.touch()
            Content(request.seed, 0)
        # A bar shows the epoch; what a checkpoint adds to it would be no step.
        outputs = ProgressOutputs(progress=Silent(), heartbeat=heartbeat, tell=_nobody_listens)
        watch = RoundProgress(
            ProgressBoard(board, rank=comm.rank, num_ranks=comm.size), rank=comm.rank, outputs=outputs
        )
        work = RoundRunner(
            comm=comm,
            layout=request.layout,
            storages=[request.reopen() for _ in range(pipe.streams)],
            pipe=pipe,
            memory=memory,
            seed=request.seed,
            shift=0,
            syncs_ranks=request.when.rank_sync,
            watch=watch,
            recorder=recorder,
        )
        return cls(request=request, work=work, num_due=num_due)

    def is_due(self, epoch: int, step: int, num_steps: int) -> bool:
        """Whether one follows this step."""
        return is_due(self.request.when, epoch, step, num_steps)

    def take(self, epoch: int, block: int, step: int) -> None:
        """Write it, durably; all ranks return together."""
        each = CheckpointRound(direction="write", number=block, step=step, epoch=epoch)
        self._taken.append(self.work.run(each, last=self.num_due))

    def taken(self) -> CheckpointsTaken:
        """What all of them came to."""
        duration_s = sum(each.phase.duration_s for each in self._taken)
        num_bytes = self.request.layout.total_bytes
        rate = num_bytes * len(self._taken) / duration_s / GIB if duration_s else None
        return CheckpointsTaken(
            checkpoints=len(self._taken),
            bytes_each=num_bytes,
            duration_s=duration_s,
            gib_per_s=rate,
            target=self.work.storages[0].uri,
        )


def _nobody_listens(_text: str) -> None:
    """A line a minute would stand between the steps of a bar."""
