"""The harness limit: the same plan, loader, threads and barriers on storage that costs no time.

Measured for a few seconds before the real run. It is the most that this client can deliver, so a result close
to it says nothing about storage. Only reading is replaced.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np

from penstock.bench.loader.loader_protocol import (
    BatchRequest,
    Loader,
    LoaderOptions,
    OpenStorage,
    ReadRequest,
)
from penstock.bench.step_recorder import read_clocks
from penstock.bench.training.training_loop import PreparedTraining, TrainingLoop, make_phase_works
from penstock.bench.training.training_plan import RankEpoch
from penstock.bench.training.training_result import HarnessLimit
from penstock.cluster.comm import Comm
from penstock.errors import ObjectNotFound
from penstock.progress import PhasesOnly, Progress
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.step_events import (
    SPAN_TYPE,
    STEP_TYPE,
    RankEvents,
    SpanEvent,
    StepEvent,
    StepPhase,
)
from penstock.storage import Source, Storage
from penstock.storage.in_memory import MemoryStorage
from penstock.storage.protocol import WrappedStorage
from penstock.workload.spec import Workload

LONGEST_S: Final = 3.0
FEWEST_STEPS: Final = 8
MOST_STEPS: Final = 200
_KNOWN_FILES: Final = 1 << 16
"""Files surveyed before the run and remembered, so that none is surveyed while it is timed."""


def count_limit_steps(compute_s: float, num_steps: int) -> int:
    """The steps of the measurement: about `LONGEST_S` of computation, never more than an epoch."""
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
) -> tuple[HarnessLimit | None, Loader | None, float]:
    """Run the first steps of the first epoch. Collective.

    Returns the limit, None if the steps are too few to count; the loader, if its workers can change over to
    the storage of `reopen`; and how long the loader took to start.
    """
    plan = prepared.plan
    num_steps = count_limit_steps(workload.train.computation_time.expected_s, plan.epochs[0].num_steps)
    work = make_phase_works(workload, prepared, storage, rank=comm.rank, known_files=_KNOWN_FILES)[
        StepPhase.TRAIN
    ]
    order = RankEpoch(plan.sharding, rank=comm.rank, epoch=1)
    sizes = object_sizes(work.batches.of_epoch(order, num_steps), storage)
    recorder = EventsInMemory()
    progress.begin("measuring the harness limit, steps", num_steps)
    with ExitStack() as undo:
        began_s = time.monotonic()
        loader = options.start(ZeroCostStorage(storage, sizes), partial(_open_zero_cost, sizes))
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
        mine = recorder.events(rank=comm.rank, host=comm.host)
        events = comm.gather(mine, awaiting="the harness limit of all ranks")
        limit = summarize_limit(events, workload, num_steps)
        change_storage = getattr(loader, "change_storage", None)
        if reopen is None or change_storage is None:
            return limit, None, 0.0
        change_storage(reopen)
        undo.pop_all()
        return limit, loader, start_s


def summarize_limit(ranks: Sequence[RankEvents], workload: Workload, num_steps: int) -> HarnessLimit | None:
    """The figures that the steps reached; None if too few of them count."""
    figures = compute_phase_figures(ranks, workload)
    if figures is None or figures.times is None:
        return None
    strict = figures.au_strict_percent
    return HarnessLimit(
        num_steps=num_steps,
        au_compat_percent=figures.au_compat_percent.mean,
        au_strict_percent=strict.mean if strict else None,
        samples_per_s=figures.samples_per_s_strict,
        compute_share=figures.times.shares.compute,
    )


class ZeroCostStorage(WrappedStorage):
    """Objects of the given sizes, read in no time; buffers are left unchanged."""

    def __init__(self, inside: Storage, sizes: Mapping[str, int]) -> None:
        super().__init__(inside, cost="none")
        self._sizes = sizes

    def open(self, key: str) -> Source:
        """An object that is read in no time."""
        if key not in self._sizes:
            raise ObjectNotFound("The size of this object is not known", uri=f"{self.uri}/{key}")
        return _ZeroCostSource(self._sizes[key])


def _open_zero_cost(sizes: Mapping[str, int]) -> Storage:
    """The same in a worker process, where the wrapped storage is not open."""
    return ZeroCostStorage(MemoryStorage(), sizes)


class _ZeroCostSource:
    """An object of which only the size is known."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Leave `buffer` unchanged."""

    def close(self) -> None:
        """Nothing is open."""


def object_sizes(requests: Iterable[BatchRequest], storage: Storage) -> dict[str, int]:
    """The sizes of the objects that these requests read; looked up at `storage` where they do not say."""
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


class EventsInMemory:
    """An `EventRecorder` in memory, for runs that leave no record."""

    def __init__(self) -> None:
        self._steps: list[StepEvent] = []
        self._spans: list[SpanEvent] = []

    def add_step(self, step: StepEvent) -> None:
        """Keep one step."""
        self._steps.append(step)

    def add_span(self, span: SpanEvent) -> None:
        """Keep one span."""
        self._spans.append(span)

    def events(self, *, rank: int, host: str) -> RankEvents:
        """Everything recorded, as one rank's events."""
        return RankEvents(
            clock=read_clocks(rank, host),
            steps=np.array(self._steps, STEP_TYPE),
            spans=np.array(self._spans, SPAN_TYPE),
        )
