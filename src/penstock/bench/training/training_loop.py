"""The timed loop of one rank: wait for a batch, compute, wait for the other ranks, record.

The real run and the measurement of the harness limit run this same loop. Nothing happens between a step's
four timestamps except what their names say. The harness limit is what the same plan, loader, threads and
barriers reach on storage that costs no time, measured for a few seconds before the real run. It is the most
that this client can deliver, so a result close to it says nothing about storage. Only reading is replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.bench.epoch_order import DrawnTimes
from penstock.bench.loader.loader_protocol import (
    Batch,
    BatchRequest,
    ContentCheck,
    Loader,
    LoaderOptions,
    OpenStorage,
    ReadRequest,
)
from penstock.bench.recorded_run import EventsInMemory, StepRecorder
from penstock.bench.training.batch_requests import KNOWN_FILES, BatchPlanner, plan_ahead
from penstock.bench.training.training_checkpoints import TrainingCheckpoints, is_due
from penstock.bench.training.training_files import TrainingFiles
from penstock.bench.training.training_plan import RankEpoch, Sharding, TrainingPlan
from penstock.cluster.comm import Comm
from penstock.errors import ObjectNotFound
from penstock.progress import PhasesOnly, Progress
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.step_events import RankEvents, SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.storage import Source, Storage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedStorage
from penstock.workload.enums import ReadType
from penstock.workload.spec import Workload

SPIN_NS: Final = 200_000
"""Sleep until this long before the end, then watch the clock, because a sleep ends 50 to 150 us late."""


def compute_until(end_ns: int) -> int:
    """Emulate computation until `end_ns`; return the time at which it ended.

    If `end_ns` has passed, return at once. The end is absolute, so what the caller did before does not add to
    the computation.
    """
    now_ns = time.monotonic_ns()
    if end_ns - now_ns > SPIN_NS:
        time.sleep((end_ns - now_ns - SPIN_NS) / 1e9)
        now_ns = time.monotonic_ns()
    while now_ns < end_ns:
        os.sched_yield()  # gives the core and the GIL to loader threads
        now_ns = time.monotonic_ns()
    return now_ns


def show_step(event: StepEvent, progress: Progress, comm: Comm) -> None:
    """Count a step in `progress`. All ranks read as many samples, and about as many bytes."""
    progress.advance(1)
    progress.count(
        steps=1,
        samples=event.samples * comm.size,
        read_bytes=event.read_bytes * comm.size,
        computing_s=(event.computed_ns - event.loaded_ns) / 1e9,
        sample_wait_s=(event.loaded_ns - event.start_ns) / 1e9,
        rank_wait_s=(event.barrier_ns - event.computed_ns) / 1e9,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """The files and the plan of a run, and the times that preparing them took."""

    files: TrainingFiles
    plan: TrainingPlan
    opening_s: float
    validated_files: int
    validation_s: float
    planning_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """One rank's work in a phase: its samples, their requests and the computation."""

    phase: StepPhase
    sharding: Sharding
    batches: BatchPlanner
    compute: DrawnTimes
    reads_first: bool = False
    """True if all of an epoch's samples are read before its first step, and then come from memory."""


def make_phase_works(
    workload: Workload,
    prepared: PreparedTraining,
    storage: Storage,
    *,
    rank: int,
    known_files: int = KNOWN_FILES,
    check: ContentCheck | None = None,
) -> dict[StepPhase, PhaseWork]:
    """Return the work of training, and of evaluation if the plan has any."""
    plan = prepared.plan
    phases = [(StepPhase.TRAIN, plan.sharding, workload.train.computation_time)]
    if plan.evaluation is not None:
        phases.append((StepPhase.EVAL, plan.evaluation, workload.evaluation.eval_time))
    works = {}
    for phase, sharding, duration in phases:
        times = partial(DrawnTimes, seed=workload.train.seed, phase=phase, rank=rank)
        batches = BatchPlanner(
            prepared.files,
            storage,
            phase,
            transfer_bytes=workload.reader.transfer_bytes,
            known_files=known_files,
            check=check,
            preprocess=times(duration=workload.reader.preprocess_time),
        )
        works[phase] = PhaseWork(
            phase=phase,
            sharding=sharding,
            batches=batches,
            compute=times(duration=duration),
            reads_first=workload.reader.read_type is ReadType.MEMORY,
        )
    return works


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Runs one rank's epochs and evaluations. `planned_ahead` batches are planned before they are read."""

    comm: Comm
    loader: Loader
    recorder: StepRecorder | EventsInMemory
    progress: Progress
    planned_ahead: int
    saver: TrainingCheckpoints | None = None

    def run(self, work: PhaseWork, epoch: int, num_steps: int) -> tuple[int, float] | None:
        """Run one epoch of training, or one evaluation. Collective.

        In training, all ranks wait for each other after each step; in an evaluation they do not, as in DLIO.
        If all samples are read before the first step, returns the bytes of this read and the time it took.
        """
        comm, progress, phase = self.comm, self.progress, work.phase
        saver = self.saver if phase is StepPhase.TRAIN else None
        durations_ns = work.compute.of_epoch(epoch, num_steps)
        order = RankEpoch(work.sharding, rank=comm.rank, epoch=epoch)
        preload, block = None, 1
        with closing(plan_ahead(work.batches.of_epoch(order, num_steps), self.planned_ahead)) as requests:
            began_ns = time.monotonic_ns()
            batches = iter(self.loader.epoch(requests))
            if work.reads_first:
                # Read the whole epoch and wait for all ranks; the batches then come from memory.
                loaded = list(batches)
                comm.barrier(awaiting="all ranks to read their samples before the first step")
                elapsed_s = (time.monotonic_ns() - began_ns) / 1e9
                preload = sum(batch.read_bytes for batch in loaded), elapsed_s
                batches = (Batch(batch.num_samples) for batch in loaded)
                began_ns = time.monotonic_ns()
            for step, duration_ns in enumerate(durations_ns, start=1):
                progress.enter("reading")
                start_ns = time.monotonic_ns()
                batch = next(batches)
                loaded_ns = time.monotonic_ns()
                progress.enter("computing")
                computed_ns = compute_until(loaded_ns + duration_ns)
                if phase is StepPhase.TRAIN:
                    comm.barrier(awaiting=f"all ranks to finish step {step}")
                barrier_ns = time.monotonic_ns()
                # Steps are recorded after the barrier, so that the time falls between two steps and into no
                # figure.
                event = StepEvent(
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
                self.recorder.add_step(event)
                show_step(event, progress, comm)
                saves = saver is not None and is_due(saver.when, epoch, step, num_steps)
                # A block ends before its checkpoint is written, so the checkpoint's time counts in no block.
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
        """Record the end of a block or of an epoch, which includes its evaluation."""
        self.recorder.add_span(
            SpanEvent(
                kind=kind,
                phase=phase,
                epoch=epoch,
                block=block,
                step=step,
                start_ns=began_ns,
                end_ns=time.monotonic_ns(),
            )
        )


LONGEST_S: Final = 3.0
FEWEST_STEPS: Final = 8
MOST_STEPS: Final = 200
_KNOWN_FILES: Final = 1 << 16
"""The number of surveyed files to remember, so that measuring the harness limit surveys none again."""


def count_limit_steps(compute_s: float, num_steps: int) -> int:
    """Return the number of steps of the harness limit: about `LONGEST_S` of computation, at most an epoch."""
    affordable = int(LONGEST_S / compute_s) if compute_s > 0 else MOST_STEPS
    return min(num_steps, max(FEWEST_STEPS, min(affordable, MOST_STEPS)))


def measure_harness_limit(
    workload: Workload,
    prepared: PreparedTraining,
    storage: Storage,
    *,
    options: LoaderOptions,
    comm: Comm,
    progress: Progress,
    reopen: OpenStorage | None = None,
) -> tuple[dict[str, Any] | None, Loader | None, float]:
    """Measure the harness limit with the first steps of the first epoch. Collective.

    Returns the limit, or None if the steps are too few to count; the loader, if its workers can switch to the
    storage that `reopen` opens, otherwise None; and the time that the loader took to start.
    """
    plan = prepared.plan
    num_steps = count_limit_steps(workload.train.computation_time.expected_s, plan.epochs[0].num_steps)
    works = make_phase_works(workload, prepared, storage, rank=comm.rank, known_files=_KNOWN_FILES)
    work = works[StepPhase.TRAIN]
    order = RankEpoch(plan.sharding, rank=comm.rank, epoch=1)
    sizes = object_sizes(work.batches.of_epoch(order, num_steps), storage)
    recorder = EventsInMemory()
    progress.begin("measuring the harness limit, steps", num_steps)
    with ExitStack() as undo:
        began_s = time.monotonic()
        loader = options.start(ZeroCostStorage(sizes, storage), partial(ZeroCostStorage, sizes))
        start_s = time.monotonic() - began_s
        undo.callback(loader.close)
        loop = TrainingLoop(
            comm=comm,
            loader=loader,
            recorder=recorder,
            progress=PhasesOnly(progress),
            planned_ahead=options.prefetch_batches + 2,
        )
        comm.barrier(awaiting="all ranks to begin measuring the harness limit")
        loop.run(work, 1, num_steps)
        limit = summarize_limit(recorder, comm, workload, num_steps)
        change_storage = getattr(loader, "change_storage", None)
        if reopen is None or change_storage is None:
            return limit, None, 0.0
        change_storage(reopen)
        undo.pop_all()
        return limit, loader, start_s


def summarize_limit(
    recorder: EventsInMemory, comm: Comm, workload: Workload, num_steps: int
) -> dict[str, Any] | None:
    """Return the figures of the steps of all ranks; None if too few steps count. Collective."""
    mine = recorder.events(rank=comm.rank, host=comm.host)
    events: Sequence[RankEvents] = comm.gather(mine, awaiting="the harness limit of all ranks")
    figures = compute_phase_figures(events, workload)
    if figures is None or figures.times is None:
        return None
    strict = figures.au_strict_percent
    return {
        "steps": num_steps,
        "au_compat": figures.au_compat_percent.mean,
        "au_strict": strict.mean if strict else None,
        "samples_per_s": figures.samples_per_s_strict,
        "compute_share": figures.times.shares.compute,
    }


class ZeroCostStorage(WrappedStorage):
    """Objects of the given sizes, read in no time; buffers are left unchanged.

    `inside` is the wrapped storage. A worker process, in which that storage is not open, has none.
    """

    def __init__(self, sizes: Mapping[str, int], inside: Storage | None = None) -> None:
        super().__init__(inside or MemoryStorage(), cost="none")
        self._sizes = sizes

    def open(self, key: str) -> Source:
        """Open an object that is read in no time."""
        if key not in self._sizes:
            raise ObjectNotFound("The size of this object is not known", uri=f"{self.uri}/{key}")
        return _ZeroCostSource(self._sizes[key])


class _ZeroCostSource:
    """An object of which only the size is known."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Leave `buffer` unchanged."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def object_sizes(requests: Iterable[BatchRequest], storage: Storage) -> dict[str, int]:
    """Return the sizes of the objects that these requests read.

    Sizes missing in the requests come from `storage`.
    """
    sizes: dict[str, int] = {}
    for request in requests:
        for read in request.requests:
            assert isinstance(read, ReadRequest), "the harness limit is measured without decoding"
            if read.expected_bytes is not None:
                sizes[read.key] = read.expected_bytes
            elif read.size_bytes is not None:
                sizes[read.key] = max(sizes.get(read.key, 0), read.offset + read.size_bytes)
            elif read.key not in sizes:
                sizes[read.key] = storage.stat(read.key).size_bytes
    return sizes
