"""The timed loop of one rank: wait for a batch, compute, meet the other ranks, record; epoch after epoch.

The real run and the measurement of the harness limit run this same loop. Nothing happens between a step's
four timestamps but what their names say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from penstock.progress import RunProgress
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
    progress: RunProgress
    planned_ahead: int
    saver: TrainingCheckpoints | None = None

    def train(self, work: PhaseWork, epoch: int, num_steps: int) -> Preload | None:
        """One epoch of training; collective: all ranks meet after each step."""
        return self._run(work, epoch, num_steps, self._meet_ranks)

    def evaluate(self, work: PhaseWork, epoch: int, num_steps: int) -> Preload | None:
        """One evaluation, in which ranks do not wait for each other, as with DLIO."""
        return self._run(work, epoch, num_steps, lambda _step: None)

    def record_epoch(self, epoch: int, began_ns: int) -> None:
        """Record that an epoch, its evaluation included, is over."""
        self._add_span(SpanKind.EPOCH, StepPhase.TRAIN, epoch, began_ns)

    def _run(
        self, work: PhaseWork, epoch: int, num_steps: int, meet: Callable[[int], None]
    ) -> Preload | None:
        durations_ns = work.compute.of_epoch(epoch, num_steps)
        order = RankEpoch(work.sharding, rank=self.comm.rank, epoch=epoch)
        requests = plan_ahead(work.batches.of_epoch(order, num_steps), self.planned_ahead)
        with closing(requests):
            preload = None
            began_ns = time.monotonic_ns()
            batches = iter(self.loader.epoch(requests))
            if work.reads_first:
                preload, batches = self._preload(batches)
                began_ns = time.monotonic_ns()
            self._run_steps(work, epoch, batches, durations_ns, meet, began_ns=began_ns)
        return preload

    def _run_steps(
        self,
        work: PhaseWork,
        epoch: int,
        batches: Iterator[Batch],
        durations_ns: list[int],
        meet: Callable[[int], None],
        *,
        began_ns: int,
    ) -> None:
        clock = SystemClock()
        saver = self.saver if work.phase is StepPhase.TRAIN else None
        block, num_steps = 1, len(durations_ns)
        for step, duration_ns in enumerate(durations_ns, start=1):
            self.progress.enter("reading")
            start_ns = time.monotonic_ns()
            batch = next(batches)
            loaded_ns = time.monotonic_ns()
            self.progress.enter("computing")
            computed_ns = compute_until(loaded_ns + duration_ns, clock)
            meet(step)
            # Recording comes after the barrier: its time falls between two steps, and into no figure.
            event = StepEvent(
                phase=work.phase,
                epoch=epoch,
                block=block,
                step=step,
                start_ns=start_ns,
                loaded_ns=loaded_ns,
                computed_ns=computed_ns,
                barrier_ns=time.monotonic_ns(),
                samples=batch.num_samples,
                read_bytes=batch.read_bytes,
                reads=batch.num_reads,
                read_ns=batch.read_ns,
                decode_ns=batch.decode_ns,
            )
            self.recorder.add_step(event)
            self._count(event)
            saves = saver is not None and saver.is_due(epoch, step, num_steps)
            # A checkpoint ends its block before it is taken, so its time counts in no block.
            if saves or step == num_steps:
                self._add_span(SpanKind.BLOCK, work.phase, epoch, began_ns, step=step, block=block)
            if saver is not None and saves:
                saver.take(epoch, block, step)
                block, began_ns = block + 1, time.monotonic_ns()
        self.progress.enter("working")

    def _count(self, step: StepEvent) -> None:
        """Count a step of all ranks, which read as many samples as this one and about as many bytes."""
        self.progress.advance(1)
        self.progress.count(
            steps=1,
            samples=step.samples * self.comm.size,
            read_bytes=step.read_bytes * self.comm.size,
            computing_s=(step.computed_ns - step.loaded_ns) / 1e9,
            sample_wait_s=(step.loaded_ns - step.start_ns) / 1e9,
            rank_wait_s=(step.barrier_ns - step.computed_ns) / 1e9,
        )

    def _preload(self, batches: Iterator[Batch]) -> tuple[Preload, Iterator[Batch]]:
        """Read a whole epoch and wait for all ranks; its batches as they come from memory, without a read."""
        began_s = time.monotonic()
        loaded = list(batches)
        self.comm.barrier(awaiting="all ranks to read their samples before the first step")
        preload = Preload(
            read_bytes=sum(batch.read_bytes for batch in loaded), elapsed_s=time.monotonic() - began_s
        )
        return preload, (Batch(batch.num_samples, 0, 0, 0) for batch in loaded)

    def _meet_ranks(self, step: int) -> None:
        self.comm.barrier(awaiting=f"all ranks to finish step {step}")

    def _add_span(
        self, kind: SpanKind, phase: StepPhase, epoch: int, began_ns: int, *, step: int = 0, block: int = 1
    ) -> None:
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
