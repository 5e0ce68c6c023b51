"""A training run from start to finish: prepare, harness limit, epochs, results folder.

Collective: every rank calls `train` and gets the same result. Only the steps of the loop count; everything
else is timed separately. The run's folder records how the run ended in every case.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.bench.checkpoint.checkpoint_rounds import PROGRESS_FILE
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import (
    ContentCheck,
    FormatDecoder,
    Loader,
    LoaderOptions,
    OpenStorage,
)
from penstock.bench.page_cache_eviction import CacheEviction, evict_keys
from penstock.bench.run_settings import RunSettings
from penstock.bench.step_recorder import RunTrace, StepRecorder, read_clocks
from penstock.bench.training import harness_limit, training_files, training_loop, training_result
from penstock.bench.training.training_checkpoints import CheckpointsRequest, TrainingCheckpoints
from penstock.bench.training.training_loop import PreparedTraining
from penstock.bench.training.training_plan import (
    EpochPlan,
    eval_epochs,
    plan_training,
    require_counted_step,
)
from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.external_dataset import list_external_files
from penstock.dataset.formats import open_format
from penstock.errors import StorageError, UsageError
from penstock.progress import Progress
from penstock.results import counter_files, event_files, phase_figures, published_files, run_folder
from penstock.results.active_run import ActiveRun
from penstock.results.step_events import SpanKind, StepPhase
from penstock.storage import Counters, Storage, capabilities
from penstock.workload import enums
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(RunSettings):
    """A request for a training run.

    `reopen` is for loaders whose processes open the storage themselves. `checkpoints` says what is saved on
    the way, and where. `decodes` makes samples of what is read; `check` compares them with their generator,
    which takes decoding. `reader` opens files of a format of its own. `needs_counted_step` refuses a run
    whose utilization could only be 0 %, as DLIO calls it.
    """

    workload: Workload
    seed: int
    division: Remainder = Remainder.ROTATE
    loader: LoaderOptions
    reopen: OpenStorage | None = None
    checkpoints: CheckpointsRequest | None = None
    decodes: bool = False
    check: ContentCheck = ContentCheck.OFF
    reader: training_files.OpenFormat | None = None
    needs_counted_step: bool = False


def choose_seed(comm: Comm, workload: Workload, seed: int | None) -> int:
    """The seed of `--seed`; else a random one for random shuffling, or the workload's. Collective."""
    if seed is not None:
        return seed
    if enums.Shuffle.RANDOM in (workload.reader.file_shuffle, workload.reader.sample_shuffle):
        return comm.broadcast(secrets.randbits(31), awaiting="rank 0 to draw a seed")
    return workload.train.seed


def list_unsupported(workload: Workload) -> Sequence[str]:
    """Remarks on what the workload asks for and a run does not do: printed once, and recorded."""
    profiling = workload.profiling
    remarks = []
    if workload.workflow.profiling and profiling.profiler is not enums.Profiler.IOSTAT:
        remarks.append(
            f"workflow.profiling: {profiling.profiler} is not started; iostat is what a run records"
        )
    if not workload.reader.drop_page_cache:
        remarks.append("reader.drop_page_cache is off: reads may come from memory instead of storage")
    return remarks


def prepare_training(
    workload: Workload,
    storage: Storage,
    *,
    seed: int,
    division: Remainder,
    comm: Comm,
    progress: Progress,
    reader: training_files.OpenFormat = open_format,
) -> PreparedTraining:
    """Open, validate and plan. Collective."""
    began_s = time.monotonic()
    dataset, evaluates = workload.dataset, bool(eval_epochs(workload, workload.train.epochs))
    files = all_gather_results(
        comm,
        lambda: training_files.open_files(
            dataset, storage, seed=workload.train.seed, evaluates=evaluates, reader=reader
        ),
        awaiting="all ranks to open the data set",
    )[comm.rank]
    if files.needs_listing:
        files = files.with_listing(
            list_external_files(dataset, storage, evaluates=evaluates, comm=comm, progress=progress)
        )
    opened_s = time.monotonic()
    validation = training_files.validate(files, storage, comm=comm, progress=progress)
    validated_s = time.monotonic()
    plan = plan_training(
        workload, block_samples=files.block_samples(), seed=seed, division=division, comm=comm
    )
    return PreparedTraining(
        files=files,
        plan=plan,
        validation=validation,
        opening_s=opened_s - began_s,
        planning_s=time.monotonic() - validated_s,
    )


def train(
    request: TrainingRequest, storage: Storage, *, comm: Comm, progress: Progress
) -> training_result.TrainingResult:
    """Run the workload on the files at `storage`; the same result on every rank."""
    prepared = prepare_training(
        request.workload,
        storage,
        seed=request.seed,
        division=request.division,
        comm=comm,
        progress=progress,
        reader=request.reader or open_format,
    )
    if request.needs_counted_step:
        require_counted_step(request.workload, prepared.plan)
    with request.open_run(
        request.workload,
        comm=comm,
        seeds={"order": request.seed},
        plan=prepared.plan.document(),
        remarks=prepared.files.remarks,
        progress=progress,
    ) as (run, folder):
        with training_files.explained_absence(prepared.files):
            stages = _Session(request, storage, comm, progress, prepared).run(folder, run)
        result = _write_results(run, stages, request=request) if run else None
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def _write_results(
    run: ActiveRun, stages: training_result.Stages, *, request: TrainingRequest
) -> training_result.TrainingResult:
    """Close the run, once all ranks have written their last event."""
    workload = request.workload
    num_ranks = run.record.ranks
    event_files.gather_events(run.folder, num_ranks)
    counter_files.gather_counters(run.folder)
    events = event_files.read_events(run.folder)
    # Without computation every harness limit is near 0, and says nothing about this client.
    is_computing = not workload.train.computation_time.is_zero
    share = stages.ceiling.compute_share if stages.ceiling and is_computing else None
    train = phase_figures.compute_phase_figures(events, workload, ceiling=share)
    if train is None:
        raise StorageError("The run left no completed epoch", uri=str(run.folder))
    evaluation = phase_figures.compute_phase_figures(events, workload, phase=StepPhase.EVAL)
    published_files.write_json(run.folder, run_folder.STAGES_FILE, stages.document())
    request.write_dlio_files(
        run,
        workload,
        events=events,
        train=train,
        evaluation=evaluation,
        preparation=stages.sentences(),
    )
    run.finish(train=train, evaluation=evaluation, deliveries=stages.deliveries)
    return training_result.TrainingResult(
        workload=workload.full_name,
        ranks=num_ranks,
        results_dir=str(run.folder),
        train=train,
        evaluation=evaluation,
        stages=stages,
    )


@dataclass(frozen=True, slots=True)
class _Session:
    """One rank's part of a run between its plan and its figures."""

    request: TrainingRequest
    storage: Storage
    comm: Comm
    progress: Progress
    prepared: PreparedTraining

    def run(self, folder: Path, run: ActiveRun | None) -> training_result.Stages:
        """Measure the harness limit, then run all epochs; afterwards the folder's spools have their steps."""
        decoder = choose_decoder(self.request, self.prepared.files, uri=self.storage.uri)
        request, began_s = self.request, time.monotonic()
        limit, loader, start_s = None, None, 0.0
        if decoder is None:  # storage that costs nothing holds nothing, so there is nothing to decode
            limit, loader, start_s = harness_limit.measure_harness_limit(
                request.workload,
                self.prepared,
                self.storage,
                options=request.loader,
                comm=self.comm,
                progress=self.progress,
                reopen=request.reopen,
            )
        limit_s = time.monotonic() - began_s - start_s
        if loader is None:
            began_s = time.monotonic()
            loader = request.loader.start(self.storage, request.reopen, decoder)
            start_s = time.monotonic() - began_s
        with closing(loader):
            stages = self._run_with(loader, decoder, folder, run)
        start_s = self.comm.reduce(start_s, "max", awaiting="all ranks' loaders")
        return replace(stages, loader_start_s=start_s, ceiling=limit, ceiling_s=limit_s)

    def _run_with(
        self, loader: Loader, decoder: FormatDecoder | None, folder: Path, run: ActiveRun | None
    ) -> training_result.Stages:
        works = training_loop.make_phase_works(
            self.request.workload,
            self.prepared,
            self.storage,
            rank=self.comm.rank,
            check=decoder.check if decoder else None,
        )
        spool = event_files.SpoolWriter(
            event_files.spool_path(folder, self.comm.rank), read_clocks(self.comm.rank, self.comm.host)
        )
        heartbeat = run.heartbeat if run else lambda: None
        observer = DeviceObserver(self.comm, folder, self.storage)
        trace = RunTrace.of(self.storage, folder)
        with observer, StepRecorder(spool, on_flush=heartbeat, trace=trace) as recorder:
            saver = self._start_saver(folder, recorder, heartbeat)
            loop = training_loop.TrainingLoop(
                comm=self.comm,
                loader=loader,
                recorder=recorder,
                progress=self.progress,
                # One more than the loader holds, so that it never waits for a plan.
                planned_ahead=self.request.loader.prefetch_batches + 2,
                saver=saver,
            )
            before_bytes = self.storage.counters.snapshot().read_bytes
            with observer.during("read"):
                epochs = tuple(self._run_epochs(loop, works))
        counted = self.storage.counters.snapshot() + loader.counters
        counters = self.comm.gather(counted, awaiting="what the storages of all ranks counted")
        survey_bytes = sum(work.batches.survey_bytes for work in works.values())
        return training_result.Stages(
            opening_s=self.prepared.opening_s,
            files_found=self.prepared.files.num_found,
            remarks=self.prepared.files.remarks,
            validation=self.prepared.validation,
            planning_s=self.prepared.planning_s,
            loader=self.request.loader,
            epochs=epochs,
            checkpoints=saver.taken() if saver else None,
            survey_bytes=self.comm.reduce(survey_bytes, "sum", awaiting="all ranks' surveys"),
            storage_uri=self.storage.uri,
            storage_options=self.storage.options,
            counters=sum(counters, Counters()),
            deliveries=(observer.deliver("read", counted.read_bytes - before_bytes),),
        )

    def _start_saver(
        self, folder: Path, recorder: StepRecorder, heartbeat: Callable[[], None]
    ) -> TrainingCheckpoints | None:
        """Start what takes checkpoints on the way, warmed up; None if none are asked for. Collective."""
        if self.request.checkpoints is None:
            return None
        return TrainingCheckpoints.begin(
            self.request.checkpoints,
            [(epoch.epoch, epoch.num_steps) for epoch in self.prepared.plan.epochs],
            comm=self.comm,
            board=folder / PROGRESS_FILE,
            recorder=recorder,
            progress=self.progress,
            heartbeat=heartbeat,
        )

    def _run_epochs(
        self, loop: training_loop.TrainingLoop, works: Mapping[StepPhase, training_loop.PhaseWork]
    ) -> Iterator[training_result.EpochStage]:
        """Run every epoch; yield what preceded it once it is over."""
        plan = self.prepared.plan
        num_steps = sum(epoch.num_steps for epoch in plan.epochs) + len(plan.eval_epochs) * plan.eval_steps
        self.progress.expect(num_steps, "steps")
        ended_s = time.monotonic()
        for epoch in plan.epochs:
            cache = self._evict(epoch)
            self.comm.barrier(awaiting=f"all ranks to begin epoch {epoch.epoch}")
            self.progress.begin(f"epoch {epoch.epoch} of {len(plan.epochs)}, steps", epoch.num_steps)
            began_ns = time.monotonic_ns()
            change_s = began_ns / 1e9 - ended_s - (cache.elapsed_s if cache else 0.0)
            preload = loop.run(works[StepPhase.TRAIN], epoch.epoch, epoch.num_steps)
            if epoch.epoch in plan.eval_epochs:
                self.progress.begin(f"evaluation after epoch {epoch.epoch}, steps", plan.eval_steps)
                loop.run(works[StepPhase.EVAL], epoch.epoch, plan.eval_steps)
            loop.add_span(SpanKind.EPOCH, StepPhase.TRAIN, epoch.epoch, began_ns)
            ended_s = time.monotonic()
            yield training_result.EpochStage(
                epoch=epoch.epoch, cache=cache, change_s=change_s, preload=self._merge(preload)
            )

    def _evict(self, epoch: EpochPlan) -> CacheEviction | None:
        """Drop what this epoch reads from memory, and nothing else; None where nothing can be there."""
        files = self.prepared.files
        is_dropped = self.request.workload.reader.drop_page_cache and files.are_stored
        if not is_dropped or not capabilities.uses_page_cache(self.storage):
            return None
        plan = self.prepared.plan
        self.progress.begin("dropping files from the page cache", plan.estimate_files_read(epoch))
        keys = (
            key
            for phase, numbers in plan.files_read(epoch, rank=self.comm.rank)
            for number in numbers.tolist()
            for key in files.keys_of(phase, number)
        )
        return evict_keys(
            keys,
            self.storage,
            comm=self.comm,
            advance=self.progress.advance,
            explained=training_files.explained_absence(files),
        )

    def _merge(self, preload: training_result.Preload | None) -> training_result.Preload | None:
        """The bytes that all ranks read before the first step, and the longest time. Collective."""
        if preload is None:
            return None
        return training_result.Preload(
            read_bytes=self.comm.reduce(preload.read_bytes, "sum", awaiting="what all ranks read first"),
            elapsed_s=self.comm.reduce(preload.elapsed_s, "max", awaiting="the rank that read longest"),
        )


def choose_decoder(
    request: TrainingRequest, files: training_files.TrainingFiles, *, uri: str
) -> FormatDecoder | None:
    """The decoder of samples; None if they are dropped as they came.

    `UsageError` if no manifest describes what the files hold.
    """
    arrow = request.workload.storage.storage_options.decode is enums.Decode.ARROW  # DLIO's own key
    decodes = request.decodes or arrow or request.check is not ContentCheck.OFF
    if not decodes or files.dataset.format is enums.DataFormat.SYNTHETIC:
        return None
    if files.recipe is None:
        raise UsageError(
            "Samples can be decoded and checked only where penstock's manifest says how files are laid out",
            where=uri,
            fix="Run without --decode and --check, or make the data set with `penstock training generate`.",
        )
    return FormatDecoder(files.kind, files.recipe, request.check)
