"""The timed loop of one rank: wait for a batch, compute, meet the others, note it; epoch after epoch.

Place in the flow: between a loader and a record of steps. The real run and the ceiling run are this same one.
Invariant: nothing happens between a step's four moments but what their names say.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.bench.compute import ComputeTimes, SystemClock, compute_until
from penstock.bench.training.batches import KNOWN_FILES, Batches, ahead
from penstock.bench.training.plan import Deal, RankEpoch
from penstock.results.events import Phase, SpanEvent, SpanKind, StepEvent

if TYPE_CHECKING:
    from penstock.bench.loader.base import Loader
    from penstock.bench.training.prepare import Prepared
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage
    from penstock.workload.spec import Workload


class Recorder(Protocol):
    """Keeps what happened, in its order."""

    def add_step(self, step: StepEvent) -> None:
        """One step is over."""

    def add_span(self, span: SpanEvent) -> None:
        """An epoch or a block is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """What one rank needs to run a phase: how samples are dealt out, requested, and computed on."""

    phase: Phase
    deal: Deal
    batches: Batches
    compute: ComputeTimes


def phase_works(
    workload: Workload, prepared: Prepared, storage: Storage, *, rank: int, known_files: int = KNOWN_FILES
) -> dict[Phase, PhaseWork]:
    """The work of training, and of evaluation where the plan has one."""
    plan, seed = prepared.plan, workload.train.seed
    deals = {Phase.TRAIN: plan.deal}
    if plan.evaluation is not None:
        deals[Phase.EVAL] = plan.evaluation
    durations = {
        Phase.TRAIN: workload.train.computation_time,
        Phase.EVAL: workload.evaluation.eval_time,
    }
    return {
        phase: PhaseWork(
            phase=phase,
            deal=deal,
            batches=Batches(
                prepared.files,
                storage,
                phase,
                transfer_bytes=workload.reader.transfer_bytes,
                known_files=known_files,
            ),
            compute=ComputeTimes(duration=durations[phase], seed=seed, phase=phase, rank=rank),
        )
        for phase, deal in deals.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Runs epochs and evaluations of one rank. `planned_ahead` batches are planned before they are read."""

    comm: Comm
    loader: Loader
    recorder: Recorder
    progress: Progress
    planned_ahead: int

    def train(self, work: PhaseWork, epoch: int, num_steps: int) -> None:
        """One epoch of training; collective: all ranks meet after each step."""
        self._run(work, epoch, num_steps, self._meet_all)

    def evaluate(self, work: PhaseWork, epoch: int, num_steps: int) -> None:
        """One evaluation, in which ranks do not wait for each other, as with DLIO."""
        self._run(work, epoch, num_steps, _meet_nobody)

    def note_epoch(self, epoch: int, began_ns: int) -> None:
        """Record that an epoch, its evaluation included, is over."""
        self._note(SpanKind.EPOCH, Phase.TRAIN, epoch, began_ns)

    def _run(self, work: PhaseWork, epoch: int, num_steps: int, meet: Callable[[int], None]) -> None:
        began_ns = time.monotonic_ns()
        durations_ns = work.compute.of_epoch(epoch, num_steps).tolist()
        clock = SystemClock()
        order = RankEpoch(work.deal, rank=self.comm.rank, epoch=epoch)
        requests = ahead(work.batches.of_epoch(order, num_steps), self.planned_ahead)
        with closing(requests):
            batches = iter(self.loader.epoch(requests))
            for step, duration_ns in enumerate(durations_ns, start=1):
                start_ns = time.monotonic_ns()
                batch = next(batches)
                loaded_ns = time.monotonic_ns()
                computed_ns = compute_until(loaded_ns + duration_ns, clock)
                meet(step)
                self.recorder.add_step(
                    StepEvent(
                        phase=work.phase,
                        epoch=epoch,
                        block=1,
                        step=step,
                        start_ns=start_ns,
                        loaded_ns=loaded_ns,
                        computed_ns=computed_ns,
                        barrier_ns=time.monotonic_ns(),
                        samples=batch.num_samples,
                        read_bytes=batch.read_bytes,
                        reads=batch.num_reads,
                        read_ns=batch.read_ns,
                        decode_ns=0,
                    )
                )
                self.progress.advance(1)
        self._note(SpanKind.BLOCK, work.phase, epoch, began_ns, step=num_steps)

    def _meet_all(self, step: int) -> None:
        self.comm.barrier(awaiting=f"all ranks to finish step {step}")

    def _note(self, kind: SpanKind, phase: Phase, epoch: int, began_ns: int, *, step: int = 0) -> None:
        self.recorder.add_span(
            SpanEvent(
                kind=kind,
                phase=phase,
                epoch=epoch,
                block=1,
                step=step,
                start_ns=began_ns,
                end_ns=time.monotonic_ns(),
                size_bytes=0,
            )
        )


def _meet_nobody(_step: int) -> None:
    """The barrier of a phase that has none."""
