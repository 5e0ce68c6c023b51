"""Checkpoints during a training run: when they are due, and writing them through the engine.

Checkpoints are outside all timed blocks, so they count neither as waiting nor in the utilization.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.bench.checkpoint.checkpoint_result import GIB, CheckpointRound, RoundFigures
from penstock.bench.checkpoint.checkpoint_rounds import (
    ProgressBoard,
    RoundProgress,
    RoundRunner,
    fit_pipe,
    plan_objects,
)
from penstock.bench.checkpoint.checkpoint_run import require_room
from penstock.bench.loader.loader_protocol import OpenStorage
from penstock.bench.recorded_run import StepRecorder
from penstock.bench.state_layout import StateLayout, plan_layout
from penstock.cluster.comm import Comm
from penstock.dataset.content import Content
from penstock.environment import Environment
from penstock.progress import Activity, Progress
from penstock.storage import open_storage
from penstock.storage.capabilities import find_local_root
from penstock.storage.uri import has_option
from penstock.transfer.buffers import WarmMemory
from penstock.transfer.pipeline import PipelineSettings
from penstock.workload.load_workload import model_of_workload
from penstock.workload.spec import CheckpointSection, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """The checkpoints of a run: what they contain, and when and where they are saved.

    `reopen` opens the location, once for each stream.
    """

    layout: StateLayout
    when: CheckpointSection
    reopen: OpenStorage
    seed: int


def plan_checkpoints(
    workload: Workload,
    uri: str | None,
    *,
    num_ranks: int,
    rank: int,
    environment: Environment,
    options: Mapping[str, str] | None = None,
) -> CheckpointsRequest | None:
    """Plan the checkpoints that a workload saves while it trains; None if it saves none.

    They are saved to `uri`, or to the workload's own checkpoint folder if `uri` is None.
    """
    if not workload.workflow.checkpoint:
        return None
    model, checkpoint = model_of_workload(workload.model.name, workload), workload.checkpoint
    destination = uri or checkpoint.checkpoint_folder
    storage_options = {**durability_options(destination, fsync=checkpoint.fsync), **(options or {})}
    return CheckpointsRequest(
        layout=plan_layout(model, num_processes=num_ranks, mode=checkpoint.mode),
        when=checkpoint,
        reopen=partial(open_storage, destination, environment, options=storage_options, rank=rank),
        seed=workload.train.seed,
    )


def durability_options(uri: str, *, fsync: bool) -> Mapping[str, str]:
    """Return the storage option that `fsync` sets; none for object stores, whose writes are durable."""
    return {"fsync": str(fsync).lower()} if has_option(uri, "fsync") else {}


def is_due(when: CheckpointSection, epoch: int, step: int, num_steps: int) -> bool:
    """Return True if a checkpoint follows this step: after every n steps, or at the end of chosen epochs."""
    if when.steps_between_checkpoints:
        return step % when.steps_between_checkpoints == 0
    late = epoch - when.checkpoint_after_epoch
    return step == num_steps and late >= 0 and late % when.epochs_between_checkpoints == 0


def count_due(when: CheckpointSection, epochs: Sequence[tuple[int, int]]) -> int:
    """Return the number of checkpoints in a run. `epochs` has each epoch with its number of steps."""
    if when.steps_between_checkpoints:
        return sum(num_steps // when.steps_between_checkpoints for _, num_steps in epochs)
    return sum(is_due(when, epoch, num_steps, num_steps) for epoch, num_steps in epochs)


class _OnTheWay(Progress):
    """Shows a checkpoint as a remark next to the steps of the epoch, without advancing them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self, phase: str, total: float) -> None:  # noqa: ARG002 - the protocol's
        """Remark that a checkpoint is being written."""
        self._progress.remark(phase)

    def enter(self, activity: Activity, *, unit: str = "", times: int = 1) -> None:  # noqa: ARG002 - likewise
        """Report this rank's activity; the remark is shown while it writes."""
        self._progress.enter(activity)
        if activity != "moving":
            self._progress.remark("")

    def advance(self, amount: float) -> None:
        """Count the bytes written."""
        self._progress.count(written_bytes=amount)


class TrainingCheckpoints:
    """Writes a run's checkpoints. Its memory and connections are ready before the first epoch."""

    def __init__(
        self,
        request: CheckpointsRequest,
        epochs: Sequence[tuple[int, int]],
        *,
        comm: Comm,
        board: Path,
        recorder: StepRecorder,
        progress: Progress,
        heartbeat: Callable[[], None],
    ) -> None:
        """Check that there is room for all checkpoints, and warm up. Collective."""
        self.when = request.when
        self._layout = request.layout
        self._taken: list[RoundFigures] = []
        self._num_due = count_due(request.when, epochs)
        sizes: list[int] = request.layout.bytes_of_processes().tolist()
        storage = request.reopen()
        require_room(find_local_root(storage), [size * self._num_due for size in sizes], comm=comm)
        pipe = fit_pipe(PipelineSettings(), plan_objects(request.layout, comm.rank, 1))
        memory = WarmMemory(pipe.buffer_memory_bytes)
        if self._num_due and sizes[comm.rank]:
            memory.touch()
            Content(request.seed, 0)
        self._runner = RoundRunner(
            comm=comm,
            layout=request.layout,
            storages=[storage, *(request.reopen() for _ in range(pipe.streams - 1))],
            pipe=pipe,
            memory=memory,
            seed=request.seed,
            shift=0,
            syncs_ranks=request.when.rank_sync,
            progress=RoundProgress(
                ProgressBoard(board, rank=comm.rank, num_ranks=comm.size),
                rank=comm.rank,
                progress=_OnTheWay(progress),
                heartbeat=heartbeat,
            ),
            recorder=recorder,
        )

    def take(self, epoch: int, block: int, step: int) -> None:
        """Write one checkpoint durably. All ranks return together."""
        checkpoint = CheckpointRound(direction="write", number=block, step=step, epoch=epoch)
        self._taken.append(self._runner.run(checkpoint, last=self._num_due))

    def document(self) -> dict[str, Any]:
        """Return the totals of all checkpoints, as plain data; their times include making files durable."""
        duration_s = sum(figures.phase.duration_s for figures in self._taken)
        bytes_each = self._layout.total_bytes
        rate = bytes_each * len(self._taken) / duration_s / GIB if duration_s else None
        return {
            "checkpoints": len(self._taken),
            "bytes_each": bytes_each,
            "duration_s": duration_s,
            "gib_per_s": rate,
            "target": self._runner.storages[0].uri,
        }
