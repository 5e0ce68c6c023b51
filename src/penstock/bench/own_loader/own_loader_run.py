"""A training run over a user's own loader: his iterable as it is, a step that computes or is his own.

Collective, as every training run: all ranks call it and get the same result, in the same folder, page and
JSON. Steps have the same four moments. All ranks take as many steps as the one with the fewest batches.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from penstock.bench.compute import ComputeTimes
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.own_loader.loader_meter import LoaderMeter, RankWaits, count_cores
from penstock.bench.own_loader.own_loader_loop import (
    EpochOutcome,
    OwnLoaderLoop,
    RowRecorder,
    call_factory,
    emulated_step,
    users_step,
)
from penstock.bench.own_loader.own_reads import OwnReads
from penstock.bench.own_loader.process_watch import WaitingClock, find_descendants
from penstock.bench.own_loader.torch_probe import Trial, parse_trial
from penstock.bench.own_loader.user_code import SampleCounter, UserLoader, announce_epoch, find_batch_size
from penstock.bench.own_loader.wait_report import LoaderWaits, merge_ranks
from penstock.bench.page_cache_eviction import CacheEviction
from penstock.bench.run_settings import RunSettings
from penstock.bench.run_trace import RunTrace
from penstock.bench.step_recorder import StepRecorder, read_clocks
from penstock.bench.training.harness_limit import EventsInMemory, count_limit_steps, summarize_limit
from penstock.bench.training.training_files import Validation
from penstock.bench.training.training_result import EpochStage, HarnessLimit, Stages, TrainingResult
from penstock.cluster.comm import Comm, all_gather_results
from penstock.errors import StorageError, UsageError
from penstock.progress import PhasesOnly, RunProgress
from penstock.results import counter_files, event_files, phase_figures, published_files, run_folder
from penstock.results.active_run import ActiveRun
from penstock.results.bottleneck import Bottleneck, BottleneckVerdict
from penstock.results.step_events import StepPhase
from penstock.storage import Counters, Storage, capabilities, residency
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Workload

_LIMIT_SHARE: Final = 0.3
"""The part of the harness limit's usual time that it takes here, where nothing but the loop is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoaderRequest(RunSettings):
    """What a run of a user's loader is asked to do.

    `data` is where the loader reads, if that was said: its pages are evicted before each epoch, and its
    device is watched. `tries_advice` tries what the run itself advises, where that can be tried.
    """

    workload: Workload
    loader: UserLoader
    seed: int
    data: Storage | None = None
    trials: Sequence[Trial] = ()
    tries_advice: bool = False


def run_own_loader(request: OwnLoaderRequest, *, comm: Comm, progress: RunProgress) -> TrainingResult:
    """Run the user's loader for all epochs; the same result on every rank."""
    with request.open_run(
        request.workload,
        comm=comm,
        seeds={"order": request.seed},
        plan={"loader": request.loader.described.document()},
        progress=progress,
    ) as (run, folder):
        session = _Session(request, comm, progress)
        stages, workload = session.run(folder, run)
        result = _write_results(run, stages, workload, request=request) if run else None
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def _write_results(
    run: ActiveRun, stages: Stages, workload: Workload, *, request: OwnLoaderRequest
) -> TrainingResult:
    event_files.gather_events(run.folder, run.record.ranks)
    counter_files.gather_counters(run.folder)
    events = event_files.read_events(run.folder)
    share = stages.ceiling.compute_share if stages.ceiling else None
    train = phase_figures.compute_phase_figures(events, workload, ceiling=share)
    if train is None or stages.waits is None:
        raise StorageError("The run left no completed epoch", uri=str(run.folder))
    train = replace(train, verdict=_judge(stages.waits, train.verdict))
    published_files.write_json(run.folder, run_folder.STAGES_FILE, stages.document())
    request.write_dlio_files(run, workload, events=events, train=train)
    run.finish(train=train, deliveries=stages.deliveries, workload=workload)
    return TrainingResult(
        workload=workload.full_name,
        ranks=run.record.ranks,
        results_dir=str(run.folder),
        train=train,
        evaluation=None,
        stages=stages,
    )


def _judge(waits: LoaderWaits, usual: BottleneckVerdict | None) -> BottleneckVerdict:
    """The verdict of every training run, told by the stages of the waits."""
    bottleneck = {"storage": Bottleneck.STORAGE, "consumer": Bottleneck.NONE}.get(
        waits.bottleneck, Bottleneck.CLIENT_CPU
    )
    evidence = usual.evidence if usual else ()
    if usual is not None and usual.bottleneck is Bottleneck.BARRIER:
        return usual
    return BottleneckVerdict(bottleneck=bottleneck, evidence=(f"{waits.sentence}.", *evidence[:1]))


@dataclass(slots=True)
class _Measured:
    """One rank's epochs."""

    waits: RankWaits
    epochs: list[EpochOutcome] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    stages: list[EpochStage] = field(default_factory=list)

    @property
    def samples_per_s(self) -> float:
        """Over the time in epochs."""
        elapsed_s = sum(epoch.elapsed_ns for epoch in self.epochs) / 1e9
        return sum(epoch.samples for epoch in self.epochs) / elapsed_s if elapsed_s else 0.0

    @property
    def batch_size(self) -> int:
        """The samples of the first batch: the last one of an epoch may have fewer."""
        return max((epoch.batch_size for epoch in self.epochs), default=1)


@dataclass(frozen=True, slots=True)
class _Session:
    """One rank's part of a run, and of the trials that follow it."""

    request: OwnLoaderRequest
    comm: Comm
    progress: RunProgress

    def run(self, folder: Path, run: ActiveRun | None) -> tuple[Stages, Workload]:
        """Measure, then try what was asked for; afterwards the folder's spools have the steps."""
        request, comm = self.request, self.comm
        storage = request.data or MemoryStorage()
        spool = event_files.SpoolWriter(
            event_files.spool_path(folder, comm.rank), read_clocks(comm.rank, comm.host)
        )
        observer = DeviceObserver(comm, folder, storage)
        began_s, strangers = time.monotonic(), _find_strangers()
        loader = self._make_loader()
        factory_s = comm.reduce(time.monotonic() - began_s, "max", awaiting="all ranks' factories")
        on_flush = run.heartbeat if run else lambda: None
        recorder = StepRecorder(spool, on_flush=on_flush, trace=RunTrace.of(storage, folder))
        with observer, recorder, observer.during("read"):
            measured = self._measure(loader, recorder, strangers)
        del loader
        waits = self._merge(measured, factory_s)
        workload = self._describe(measured)
        return Stages(
            remarks=tuple(measured.remarks),
            opening_s=0.0,
            validation=Validation(num_files=0, elapsed_s=0.0),
            planning_s=0.0,
            loader=request.loader.described,
            loader_start_s=factory_s,
            ceiling=self._measure_limit(measured, workload),
            ceiling_s=0.0,
            epochs=tuple(measured.stages),
            survey_bytes=0,
            storage_uri=storage.uri if request.data else "",
            storage_options=storage.options,
            counters=Counters(),
            # Which devices it reads is known if it was said where the data lies.
            deliveries=(observer.deliver("read", measured.waits.io.get("rchar", 0)),) if request.data else (),
            waits=self._try(waits, measured),
        ), workload

    def _make_loader(self) -> Any:
        request, comm = self.request, self.comm
        make = partial(request.loader.make, rank=comm.rank, num_ranks=comm.size, seed=request.seed)
        return call_factory(
            partial(make, epochs=request.workload.train.epochs), request.loader.described.name
        )

    def _measure(
        self,
        loader: Any,
        recorder: RowRecorder,
        strangers: frozenset[int],
        changes: Mapping[str, Any] | None = None,
    ) -> _Measured:
        """All epochs with all probes."""
        request, comm = self.request, self.comm
        hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
        cores = count_cores() / hosts.count(comm.host)
        with LoaderMeter(changes, cores=cores, strangers=strangers) as meter:
            measured = _Measured(meter.found)
            progress = self.progress if changes is None else PhasesOnly(self.progress)
            loop = self._make_loop(recorder, meter.clock, progress, self._make_counter(loader))
            loop.read_bytes = meter.read_bytes
            ended_s = time.monotonic()
            for epoch in range(1, request.workload.train.epochs + 1):
                if epoch > 1 and iter(loader) is loader:  # an iterator, which one epoch has used up
                    loader = self._make_loader()
                cache = self._evict()
                announce_epoch(loader, epoch - 1)
                comm.barrier(awaiting=f"all ranks to begin epoch {epoch}")
                total = self._total(loader)
                self.progress.begin(f"epoch {epoch} of {request.workload.train.epochs}, steps", total)
                change_s = time.monotonic() - ended_s - (cache.elapsed_s if cache else 0.0)
                outcome = loop.run_epoch(loader, epoch)
                waited_ns = outcome.waited_ns
                meter.end_epoch(
                    outcome.steps, consumed_ns=outcome.elapsed_ns - waited_ns, samples=outcome.samples
                )
                measured.epochs.append(outcome)
                if total > len(outcome.steps) and comm.size == 1:
                    measured.remarks.append(
                        f"Epoch {epoch} ended after {len(outcome.steps)} of the {total} batches that the "
                        "loader's length promises"
                    )
                measured.stages.append(EpochStage(epoch=epoch, cache=cache, change_s=change_s))
                ended_s = time.monotonic()
        if not any(outcome.steps for outcome in measured.epochs):
            raise UsageError(
                "The loader gave no batch",
                where=request.loader.described.name,
                fix="Check its data and its sampler.",
            )
        return measured

    def _make_loop(
        self,
        recorder: RowRecorder,
        clock: WaitingClock,
        progress: RunProgress,
        count: Callable[[Any], int],
    ) -> OwnLoaderLoop:
        request, train = self.request, self.request.workload.train
        times = ComputeTimes(
            duration=train.computation_time, seed=train.seed, phase=StepPhase.TRAIN, rank=self.comm.rank
        )
        step = request.loader.step
        return OwnLoaderLoop(
            comm=self.comm,
            recorder=recorder,
            progress=progress,
            consume=emulated_step(times)
            if step is None
            else users_step(step, request.loader.described.step or ""),
            clock=clock,
            name=request.loader.described.name,
            count=count,
            max_steps=request.loader.max_steps,
        )

    def _make_counter(self, loader: Any) -> Callable[[Any], int]:
        """What counts the samples of a batch."""
        given = self.request.loader.described.batch_size
        return SampleCounter(find_batch_size(loader)) if given is None else lambda _: given

    def _total(self, loader: Any) -> int:
        """The steps of an epoch, as far as they are known."""
        with suppress(TypeError, NotImplementedError):
            return min(len(loader), self.request.loader.max_steps or len(loader))
        return self.request.loader.max_steps or 0

    def _evict(self) -> CacheEviction | None:
        """Drop what the loader reads from memory, once a host; None where it was not said what that is."""
        data, comm = self.request.data, self.comm
        if data is None or not capabilities.uses_page_cache(data):
            return None
        began_s = time.monotonic()
        hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
        evicts = hosts.index(comm.host) == comm.rank
        drops = all_gather_results(
            comm,
            lambda: residency.evict_objects(data) if evicts else None,
            awaiting="all nodes to drop the data set from memory",
        )
        done = [drop for drop in drops if drop is not None]
        return CacheEviction(
            before_bytes=sum(drop.before.resident_bytes for drop in done),
            resident_bytes=sum(drop.after.resident_bytes for drop in done),
            total_bytes=sum(drop.after.total_bytes for drop in done),
            elapsed_s=time.monotonic() - began_s,
        )

    def _merge(self, measured: _Measured, factory_s: float) -> LoaderWaits:
        ended_s = sum(epoch.ended_s for epoch in measured.epochs)
        ranks = self.comm.gather(measured.waits, awaiting="the waits of all ranks")
        return merge_ranks(
            ranks,
            loader=self.request.loader.described.name,
            tolerated=1 - self.request.workload.metric.au,
            startup_s=factory_s,
            ended_s=self.comm.reduce(ended_s, "max", awaiting="the ends of all ranks' loaders"),
        )

    def _describe(self, measured: _Measured) -> Workload:
        """The workload in the words of all runs: the steps and samples that there were."""
        workload, comm = self.request.workload, self.comm
        batch_size = comm.reduce(measured.batch_size, "max", awaiting="the batches of all ranks")
        steps = min((len(epoch.steps) for epoch in measured.epochs if epoch.steps), default=1)
        samples = max(1, measured.waits.samples)
        dataset = replace(
            workload.dataset,
            format=DataFormat.SYNTHETIC,
            num_files_train=steps * batch_size * comm.size,
            num_samples_per_file=1,
            record_length_bytes=Fraction(max(1, measured.waits.io.get("rchar", 0) // samples)),
            record_length_bytes_stdev=Fraction(0),
        )
        reader = replace(workload.reader, batch_size=batch_size)
        return replace(workload, dataset=dataset, reader=reader)

    def _measure_limit(self, measured: _Measured, workload: Workload) -> HarnessLimit | None:
        """The same loop over batches that cost nothing; None of a user's step, which takes what it gets."""
        compute_s = workload.train.computation_time.expected_s
        if self.request.loader.step is not None or not compute_s:
            return None
        num_steps = max(1, int(_LIMIT_SHARE * count_limit_steps(compute_s, len(measured.epochs[0].steps))))
        recorder = EventsInMemory()
        self.progress.begin("measuring the harness limit, steps", num_steps)
        batch_size = workload.reader.batch_size
        loop = self._make_loop(recorder, WaitingClock(), PhasesOnly(self.progress), lambda _: batch_size)
        loop.max_steps = num_steps
        loop.run_epoch(repeat(None), 1)
        mine = recorder.events(rank=self.comm.rank, host=self.comm.host)
        events = self.comm.gather(mine, awaiting="the harness limit of all ranks")
        return summarize_limit(events, workload, num_steps)

    def _try(self, waits: LoaderWaits, measured: _Measured) -> LoaderWaits:
        """Run again with each change, and compare the samples a second."""
        for trial in self._choose_trials(waits):
            self.progress.begin(f"trying {trial.change}", 1)
            strangers = _find_strangers()
            tried = self._measure(self._make_loader(), EventsInMemory(), strangers, trial.settings)
            gain = tried.samples_per_s / measured.samples_per_s if measured.samples_per_s else 0.0
            gains = self.comm.gather(gain, awaiting="all ranks' trials")
            waits = waits.with_trial(trial.change, sum(gains) / len(gains))
        return waits

    def _choose_trials(self, waits: LoaderWaits) -> list[Trial]:
        trials = list(self.request.trials)
        advice = waits.advice
        if self.request.tries_advice and advice is not None and advice.change.startswith("workers="):
            trials.append(parse_trial(advice.change))
        return trials


def _find_strangers() -> frozenset[int]:
    """The processes below this one before there is a loader, which are not the loader's."""
    return frozenset(find_descendants(OwnReads())[0])
