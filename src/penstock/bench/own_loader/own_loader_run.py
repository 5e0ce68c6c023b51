"""A training run over a user's own loader, with emulated computation or the user's own step.

Collective, as every training run is: all ranks call it and get the same result, in the same folder, page and
JSON. A step has the same four timestamps as in other runs. All ranks take as many steps as the rank with the
fewest batches.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from penstock.bench.epoch_order import DrawnTimes
from penstock.bench.own_loader.loader_watch import (
    ProcessWatch,
    TorchWatch,
    WorkerDeaths,
    parse_trial,
)
from penstock.bench.own_loader.user_code import (
    DescribedLoader,
    SampleCounter,
    announce_epoch,
    explain_code,
    explain_failure,
    find_batch_size,
    make_loader,
)
from penstock.bench.own_loader.waits import LoaderWaits, StepWait, divide_waits
from penstock.bench.page_cache_eviction import CacheEviction, evict
from penstock.bench.recorded_run import EventsInMemory, RunSettings, StepRecorder, record_run
from penstock.bench.training.training_loop import compute_until, show_step
from penstock.bench.training.training_result import Stages, TrainingResult, write_results
from penstock.cluster.comm import Comm
from penstock.errors import PenstockError, UsageError
from penstock.progress import PhasesOnly, Progress
from penstock.results.step_events import SpanEvent, SpanKind, StepEvent, StepPhase
from penstock.storage import Storage, capabilities
from penstock.storage.in_memory import MemoryStorage
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Workload

_RECORDED_EVERY_NS: Final = 5 * 10**9
"""Steps are held back this long until the bytes read for them are known; a killed run loses no more than
that.
"""
_FIRST_DRAWN: Final = 1024
_END: Final = object()

Consume = Callable[[Any, int, int, int], int]
"""`(batch, loaded_ns, epoch, step)`: computes, and returns the time at which the computation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoaderRequest(RunSettings):
    """A request for a run of a user's own loader.

    `factory` creates the loader; `step`, if given, consumes its batches. `data` is the storage that the
    loader reads, if the user named it: its pages are evicted before each epoch, and its devices are observed.
    `trials` are changes such as `workers=8`, each measured in a separate run.
    """

    workload: Workload
    loader: DescribedLoader
    factory: Callable[..., Any]
    step: Callable[[Any], object] | None = None
    max_steps: int | None = None
    seed: int
    data: Storage | None = None
    trials: Sequence[str] = ()


def run_own_loader(request: OwnLoaderRequest, *, comm: Comm, progress: Progress) -> TrainingResult:
    """Run the user's loader for all epochs. Returns the same result on every rank."""
    for change in request.trials:
        parse_trial(change)  # refuse an invalid change before hours of measurement
    with (
        WorkerDeaths() as deaths,
        request.open_run(
            request.workload,
            comm=comm,
            seeds={"order": request.seed},
            plan={
                "loader": request.loader.document(),
                "access": {
                    "data": request.data.uri if request.data else None,
                    "step": request.loader.step,
                    "batch_size": request.loader.batch_size,
                    "max_steps": request.max_steps,
                },
            },
            progress=progress,
        ) as (run, folder),
    ):
        heartbeat = run.heartbeat if run else lambda: None
        stages, workload = _measure_and_try(
            request, comm, progress, deaths=deaths, folder=folder, heartbeat=heartbeat
        )
        result = write_results(run, stages, request, workload, is_judged=True) if run else None
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def _measure_and_try(
    request: OwnLoaderRequest,
    comm: Comm,
    progress: Progress,
    *,
    deaths: WorkerDeaths,
    folder: Path,
    heartbeat: Callable[[], None],
) -> tuple[Stages, Workload]:
    """Measure the loader, then each trial. Afterwards, the steps are in the folder's spools."""
    storage = request.data or MemoryStorage()
    measured = _Measurement(request, comm, progress, deaths)
    with (
        record_run(comm, folder, storage, heartbeat=heartbeat) as (recorder, observer),
        observer.during("read"),
    ):
        measured.run(recorder)
    waits = LoaderWaits.of_ranks(comm.gather(measured.waits, awaiting="the waits of all ranks"))
    workload = measured.describe_workload()
    for change in request.trials:
        progress.begin(f"trying {change}", 1)
        tried = _Measurement(request, comm, PhasesOnly(progress), deaths, parse_trial(change))
        tried.run(EventsInMemory())
        gain = tried.samples_per_s / measured.samples_per_s if measured.samples_per_s else 0.0
        gains = comm.gather(gain, awaiting="all ranks' trials")
        waits.trials[change] = sum(gains) / len(gains)
    return Stages(
        loader=request.loader,
        storage_uri=storage.uri if request.data else "",
        storage_options=storage.options,
        epochs=tuple(measured.stages),
        remarks=tuple(measured.remarks),
        loader_start_s=waits.factory_s,
        # The devices that the loader reads are known only if the user named the location of the data.
        deliveries=(observer.deliver("read", measured.waits.io["rchar"]),) if request.data else (),
        waits=waits,
    ), workload


@dataclass(slots=True)
class _Measurement:
    """One rank's epochs, with or without the settings of a trial."""

    request: OwnLoaderRequest
    comm: Comm
    progress: Progress
    deaths: WorkerDeaths
    changes: Mapping[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)
    stages: list[Mapping[str, Any]] = field(default_factory=list)
    batch_size: int = 1
    samples_per_s: float = 0.0
    waits: LoaderWaits = field(init=False)
    _num_steps: list[int] = field(default_factory=list)

    def run(self, recorder: StepRecorder | EventsInMemory) -> None:
        """Run all epochs, watching this thread, torch's loaders and the loader's processes."""
        request, comm, epochs = self.request, self.comm, self.request.workload.train.epochs
        found = self.waits = LoaderWaits(loader=request.loader.name, tolerated=1 - request.workload.metric.au)
        loop = EpochLoop(comm, recorder, self.progress, self._choose_step(), request.loader.name)
        watch, elapsed_ns, began_s = ProcessWatch(loop.waited_ns), 0, time.monotonic()
        loader = self._make_loader()
        found.factory_s = time.monotonic() - began_s
        count = SampleCounter(find_batch_size(loader))
        size = request.loader.batch_size
        loop.count = count if size is None else lambda _: size
        with TorchWatch(self.deaths, self.changes) as torch_watch, ExitStack() as undo:
            watch.start()
            undo.callback(watch.stop)
            loop.read_bytes = lambda: (torch_watch.read_so_far() or watch.read_so_far())["rchar"]
            ended_s = time.monotonic()
            for epoch in range(1, epochs + 1):
                if epoch > 1 and hasattr(loader, "__next__"):  # an iterator, which one epoch exhausts
                    loader = self._make_loader()
                cache = self._evict()
                announce_epoch(loader, epoch - 1, request.loader.name)
                comm.barrier(awaiting=f"all ranks to begin epoch {epoch}")
                total = request.max_steps or 0
                with suppress(TypeError, NotImplementedError):
                    total = min(len(loader), request.max_steps or len(loader))
                self.progress.begin(f"epoch {epoch} of {epochs}, steps", total)
                change_s = time.monotonic() - ended_s - (cache.elapsed_s if cache else 0.0)
                dropped = cache.document() if cache else None
                self.stages.append({"epoch": epoch, "cache": dropped, "change_s": change_s, "preload": None})
                steps = loop.run_epoch(loader, epoch, max_steps=request.max_steps)
                if total > len(steps) and comm.size == 1:
                    self.remarks.append(
                        f"Epoch {epoch} ended after {len(steps)} of the {total} batches that the "
                        "loader's length promises"
                    )
                # The iterator is gone, so its workers have written all their records.
                deliveries = torch_watch.take_deliveries()
                stages_ns = divide_waits(steps, deliveries, watch.busy_share)
                waited_ns = sum(step.loaded_ns - step.start_ns for step in steps)
                found.stages_s.update({stage: spent / 1e9 for stage, spent in stages_ns.items()})
                found.wait_s += waited_ns / 1e9
                found.compute_s += (loop.elapsed_ns - waited_ns) / 1e9
                found.ended_s += loop.ended_s
                found.batches += len(steps)
                self._num_steps.append(len(steps))
                elapsed_ns += loop.elapsed_ns
                ended_s = time.monotonic()
            found.io = torch_watch.read_so_far() or watch.read_so_far()
            found.settings, found.memory = torch_watch.settings, watch.memory
        # The workers of loaders other than torch's are counted as processes.
        found.workers = torch_watch.settings.get("workers", 0) or watch.num_workers
        found.samples, self.batch_size = loop.samples, loop.batch_size or 1
        self.samples_per_s = loop.samples / (elapsed_ns / 1e9) if elapsed_ns else 0.0
        if not found.batches:
            raise UsageError(
                "The loader returned no batch",
                where=request.loader.name,
                fix="Check its data and its sampler.",
            )

    def _make_loader(self) -> Any:
        request, comm = self.request, self.comm
        return make_loader(
            request.factory,
            request.loader.name,
            rank=comm.rank,
            num_ranks=comm.size,
            epochs=request.workload.train.epochs,
            seed=request.seed,
        )

    def _choose_step(self) -> Consume:
        request, train = self.request, self.request.workload.train
        if request.step is not None:
            return _users_step(request.step, request.loader.step or "")
        times = DrawnTimes(
            duration=train.computation_time, seed=train.seed, phase=StepPhase.TRAIN, rank=self.comm.rank
        )
        return _emulated_step(times)

    def _evict(self) -> CacheEviction | None:
        """Evict the data that the loader reads, once per host; None if unnamed or never cached."""
        data, comm = self.request.data, self.comm
        if data is None or not capabilities.uses_page_cache(data):
            return None
        hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
        evicts = hosts.index(comm.host) == comm.rank
        return evict(data, (stored.key for stored in data.list("")) if evicts else (), comm=comm)

    def describe_workload(self) -> Workload:
        """Describe the run as a workload, with the steps and samples that were measured. Collective."""
        workload, comm = self.request.workload, self.comm
        batch_size = comm.reduce(self.batch_size, "max", awaiting="the batches of all ranks")
        steps = min((steps for steps in self._num_steps if steps), default=1)
        dataset = replace(
            workload.dataset,
            format=DataFormat.SYNTHETIC,
            num_files_train=steps * batch_size * comm.size,
            num_samples_per_file=1,
            record_length_bytes=Fraction(max(1, self.waits.io["rchar"] // max(1, self.waits.samples))),
            record_length_bytes_stdev=Fraction(0),
        )
        return replace(workload, dataset=dataset, reader=replace(workload.reader, batch_size=batch_size))


def _emulated_step(times: DrawnTimes) -> Consume:
    """Return a step that ignores the batch, and computes for as long as the workload asks."""
    drawn: dict[int, list[int]] = {}

    def consume(_batch: Any, loaded_ns: int, epoch: int, step: int) -> int:
        durations = drawn.get(epoch, [])
        if step > len(durations):
            durations = drawn[epoch] = times.of_epoch(epoch, max(_FIRST_DRAWN, 2 * len(durations)))
        return compute_until(loaded_ns + durations[step - 1])

    return consume


def _users_step(function: Callable[[Any], object], name: str) -> Consume:
    """Return a step that calls the user's function."""

    def consume(batch: Any, _loaded_ns: int, epoch: int, step: int) -> int:
        try:
            function(batch)
        except (Exception, SystemExit) as error:  # a user's step may raise anything
            raise explain_code(error, f"The step {name}", f"at step {step} of epoch {epoch}") from error
        return time.monotonic_ns()

    return consume


@dataclass(slots=True)
class EpochLoop:
    """The timed loop of one rank: wait for a batch, let the step consume it, wait for the other ranks.

    The wait of an epoch's first step begins before the iterator is created, as it does for a trainer.
    `read_bytes` returns the bytes read so far. Steps are recorded in groups, and the bytes read during a
    group are divided equally among its steps.
    """

    comm: Comm
    recorder: StepRecorder | EventsInMemory
    progress: Progress
    consume: Consume
    name: str
    count: Callable[[Any], int] = lambda _: 1
    read_bytes: Callable[[], int] = lambda: 0
    samples: int = 0
    batch_size: int = 0
    elapsed_ns: int = 0
    """The time from the beginning of the last epoch to the end of its last step."""
    ended_s: float = 0.0
    """The time that the iterator then took to end."""
    _waited_ns: int = 0
    _waits_since_ns: int = 0
    _recorded_bytes: int = 0
    _pending: list[StepEvent] = field(default_factory=list)

    def waited_ns(self) -> int:
        """Return the sum of all waits so far, including the current one. Called by another thread."""
        since_ns = self._waits_since_ns
        return self._waited_ns + (time.monotonic_ns() - since_ns if since_ns else 0)

    def run_epoch(self, loader: Iterable[Any], epoch: int, *, max_steps: int | None = None) -> list[StepWait]:
        """Run one epoch. Collective: it ends for all ranks as soon as any rank has no more batches."""
        waits: list[StepWait] = []
        ended_ns = began_ns = time.monotonic_ns()
        try:
            for event, wait in self._step_through(loader, epoch, max_steps):
                waits.append(wait)
                self._pending.append(event)
                ended_ns = event.barrier_ns
                self.samples += event.samples
                self.batch_size = self.batch_size or event.samples  # the last one may have fewer
                show_step(event, self.progress, self.comm)
                if ended_ns - self._pending[0].barrier_ns > _RECORDED_EVERY_NS:
                    self._record()
        finally:
            self._waits_since_ns = 0
            self.progress.enter("working")
            self._record()
        self.elapsed_ns = ended_ns - began_ns
        for kind, step in ((SpanKind.BLOCK, len(waits)), (SpanKind.EPOCH, 0)):
            span = SpanEvent(
                kind=kind,
                phase=StepPhase.TRAIN,
                epoch=epoch,
                block=1,
                step=step,
                start_ns=began_ns,
                end_ns=ended_ns,
            )
            self.recorder.add_span(span)
        self.ended_s = (time.monotonic_ns() - ended_ns) / 1e9
        return waits

    def _step_through(
        self, loader: Iterable[Any], epoch: int, max_steps: int | None
    ) -> Iterable[tuple[StepEvent, StepWait]]:
        comm, now_ns, thread_ns = self.comm, time.monotonic_ns, time.thread_time_ns
        step, batch, iterator = 0, None, None
        try:
            while step != max_steps:
                step += 1
                self.progress.enter("reading")
                self._waits_since_ns = start_ns = now_ns()
                cpu_ns = thread_ns()
                try:
                    iterator = iter(loader) if iterator is None else iterator
                    batch = next(iterator, _END)
                except PenstockError:
                    raise
                except (Exception, SystemExit) as error:  # a user's loader may raise anything
                    raise explain_failure(error, loader=self.name, epoch=epoch, step=step) from error
                loaded_ns, cpu_ns = now_ns(), thread_ns() - cpu_ns
                self._waits_since_ns, self._waited_ns = 0, self._waited_ns + loaded_ns - start_ns
                self.progress.enter("computing")
                has_batch = batch is not _END
                computed_ns = self.consume(batch, loaded_ns, epoch, step) if has_batch else loaded_ns
                if comm.size > 1:
                    awaited = f"all ranks to finish step {step}"
                    has_batch = bool(comm.reduce(int(has_batch), "min", awaiting=awaited))
                if not has_batch:
                    break
                event = StepEvent(
                    phase=StepPhase.TRAIN,
                    epoch=epoch,
                    block=1,
                    step=step,
                    start_ns=start_ns,
                    loaded_ns=loaded_ns,
                    computed_ns=computed_ns,
                    barrier_ns=now_ns(),
                    samples=self.count(batch),
                )
                yield event, StepWait(start_ns, loaded_ns, cpu_ns, is_first=step == 1)
        finally:
            del batch, iterator  # a DataLoader's workers end with it, and report what they have read

    def _record(self) -> None:
        """Record the steps that were held back, dividing the bytes read meanwhile equally among them."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        total = self.read_bytes()
        new_bytes = max(0, total - self._recorded_bytes)
        self._recorded_bytes = max(total, self._recorded_bytes)
        self.progress.count(read_bytes=new_bytes * self.comm.size)
        share, rest = divmod(new_bytes, len(pending))
        for number, event in enumerate(pending):
            self.recorder.add_step(event._replace(read_bytes=share + (rest if number == 0 else 0)))
