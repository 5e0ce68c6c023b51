"""The timed loop of one rank: wait for a batch, compute, meet the other ranks, record; epoch after epoch.

The real run and the measurement of the harness limit run this same loop. Nothing happens between a step's
four timestamps but what their names say.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.bench.compute import ComputeTimes, PreprocessTimes, SystemClock, compute_until
from penstock.bench.loader.loader_protocol import Batch, ContentCheck, Loader
from penstock.bench.training import training_files
from penstock.bench.training.batch_requests import KNOWN_FILES, BatchPlanner, plan_ahead
from penstock.bench.training.training_plan import RankEpoch, Sharding, TrainingPlan
from penstock.bench.training.training_result import Preload
from penstock.cluster.comm import Comm
from penstock.progress import Progress
from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.storage import Storage
from penstock.workload.enums import ReadType
from penstock.workload.spec import Workload

if TYPE_CHECKING:
    from penstock.bench.training.training_checkpoints import TrainingCheckpoints


class EventRecorder(Protocol):
    """Keeps the events of a rank, in their order."""

    def add_step(self, step: StepEvent) -> None:
        """Keep a step that has ended."""

    def add_span(self, span: SpanEvent) -> None:
        """Keep an epoch or a block that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """One rank's work in a phase: its samples, their requests and the computation."""

    phase: StepPhase
    sharding: Sharding
    batches: BatchPlanner
    compute: ComputeTimes
    reads_first: bool = False
    """True if an epoch's samples are all read before its first step, which then finds them in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """The input of the loop, and the times of its preparation."""

    files: training_files.TrainingFiles
    plan: TrainingPlan
    validation: training_files.Validation
    opening_s: float
    planning_s: float


def make_phase_works(
    workload: Workload,
    prepared: PreparedTraining,
    storage: Storage,
    *,
    rank: int,
    known_files: int = KNOWN_FILES,
    check: ContentCheck | None = None,
) -> dict[StepPhase, PhaseWork]:
    """The work of training, and of evaluation where the plan has one."""
    plan, seed = prepared.plan, workload.train.seed
    shardings = {StepPhase.TRAIN: plan.sharding}
    if plan.evaluation is not None:
        shardings[StepPhase.EVAL] = plan.evaluation
    durations = {
        StepPhase.TRAIN: workload.train.computation_time,
        StepPhase.EVAL: workload.evaluation.eval_time,
    }
    return {
        phase: PhaseWork(
            phase=phase,
            sharding=sharding,
            batches=BatchPlanner(
                prepared.files,
                storage,
                phase,
                transfer_bytes=workload.reader.transfer_bytes,
                known_files=known_files,
                check=check,
                preprocess=PreprocessTimes(
                    duration=workload.reader.preprocess_time, seed=seed, phase=phase, rank=rank
                ),
            ),
            reads_first=workload.reader.read_type is ReadType.MEMORY,
            compute=ComputeTimes(duration=durations[phase], seed=seed, phase=phase, rank=rank),
        )
        for phase, sharding in shardings.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Runs epochs and evaluations of one rank. `planned_ahead` batches are planned before they are read."""

    comm: Comm
    loader: Loader
    recorder: EventRecorder
    progress: Progress
    planned_ahead: int
    saver: TrainingCheckpoints | None = None

    def run(self, work: PhaseWork, epoch: int, num_steps: int) -> Preload | None:
        """One epoch of training, in which all ranks meet after each step, or one evaluation. Collective.

        In an evaluation ranks do not wait for each other, as with DLIO.
        """
        comm, progress, clock, phase = self.comm, self.progress, SystemClock(), work.phase
        saver = self.saver if phase is StepPhase.TRAIN else None
        durations_ns = work.compute.of_epoch(epoch, num_steps)
        order = RankEpoch(work.sharding, rank=comm.rank, epoch=epoch)
        preload, block = None, 1
        with closing(plan_ahead(work.batches.of_epoch(order, num_steps), self.planned_ahead)) as requests:
            began_ns = time.monotonic_ns()
            batches = iter(self.loader.epoch(requests))
            if work.reads_first:
                # Read the whole epoch and wait for all ranks; its batches then come from memory.
                loaded = list(batches)
                comm.barrier(awaiting="all ranks to read their samples before the first step")
                elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
                preload = Preload(read_bytes=sum(batch.read_bytes for batch in loaded), elapsed_s=elapsed_s)
                batches = (Batch(batch.num_samples) for batch in loaded)
                began_ns = time.monotonic_ns()
            for step, duration_ns in enumerate(durations_ns, start=1):
                progress.enter("reading")
                start_ns = time.monotonic_ns()
                batch = next(batches)
                loaded_ns = time.monotonic_ns()
                progress.enter("computing")
                computed_ns = compute_until(loaded_ns + duration_ns, clock)
                if phase is StepPhase.TRAIN:
                    comm.barrier(awaiting=f"all ranks to finish step {step}")
                barrier_ns = time.monotonic_ns()
                # Recording comes after the barrier: its time falls between two steps, and into no figure.
                self.recorder.add_step(
                    StepEvent(
                        phase=phase,
                        epoch=epoch,
                        block=block,
                        step=step,
                        start_ns=start_ns,
                        loaded_ns=loaded_ns,
                        computed_ns=computed_ns,
                        barrier_ns=barrier_ns,
                        samples=batch.num_samples,
                        read_bytes=batch.read_bytes,
                        reads=batch.num_reads,
                        read_ns=batch.read_ns,
                        decode_ns=batch.decode_ns,
                    )
                )
                # All ranks read as many samples as this one, and about as many bytes.
                progress.advance(1)
                progress.count(
                    steps=1,
                    samples=batch.num_samples * comm.size,
                    read_bytes=batch.read_bytes * comm.size,
                    computing_s=(computed_ns - loaded_ns) / 1e9,
                    sample_wait_s=(loaded_ns - start_ns) / 1e9,
                    rank_wait_s=(barrier_ns - computed_ns) / 1e9,
                )
                saves = saver is not None and saver.is_due(epoch, step, num_steps)
                # A checkpoint ends its block before it is taken, so its time counts in no block.
                if saves or step == num_steps:
                    self.add_span(SpanKind.BLOCK, phase, epoch, began_ns, step=step, block=block)
                if saver is not None and saves:
                    saver.take(epoch, block, step)
                    block, began_ns = block + 1, time.monotonic_ns()
            progress.enter("working")
        return preload

    def add_span(
        self, kind: SpanKind, phase: StepPhase, epoch: int, began_ns: int, *, step: int = 0, block: int = 1
    ) -> None:
        """Record that a block or an epoch, its evaluation included, is over."""
        self.recorder.add_span(
            SpanEvent(
                kind=kind,
                phase=phase,
                epoch=epoch,
                block=block,
                step=step,
                start_ns=began_ns,
                end_ns=time.monotonic_ns(),
                size_bytes=0,
            )
        )
