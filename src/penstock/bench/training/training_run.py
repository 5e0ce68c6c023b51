"""A training run from start to finish: prepare, harness limit, epochs, results folder.

Collective: every rank calls `train` and gets the same result. Only the steps of the loop count; everything
else is timed separately. The run's folder records how the run ended in every case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.cache_eviction import evict_data_set
from penstock.bench.checkpoint.progress_board import PROGRESS_FILE
from penstock.bench.device_counters import DeviceObserver
from penstock.bench.loader.sample_decoder import ContentCheck, FormatDecoder
from penstock.bench.step_recorder import StepRecorder, read_clocks
from penstock.bench.training.batch_requests import SampleHandling
from penstock.bench.training.harness_limit import measure_harness_limit
from penstock.bench.training.training_checkpoints import TrainingCheckpoints
from penstock.bench.training.training_files import TrainingFiles, Validation, open_files, validate
from penstock.bench.training.training_loop import Preload, TrainingLoop, make_phase_works
from penstock.bench.training.training_plan import (
    TrainingPlan,
    eval_epochs,
    plan_training,
)
from penstock.bench.training.training_result import STAGES_FILE, EpochStage, Stages, TrainingResult
from penstock.cluster.comm import all_gather_results
from penstock.dataset.external import list_external_files
from penstock.dataset.formats import open_format
from penstock.errors import StorageError, UsageError
from penstock.results.active_run import ActiveRun
from penstock.results.counter_files import gather_counters
from penstock.results.dlio.output_files import DlioOutputs, HydraFacts, write_dlio_files
from penstock.results.event_files import SpoolWriter, gather_events, read_events, spool_path
from penstock.results.phase_figures import compute_phase_figures
from penstock.results.provenance import redact, unique_hosts
from penstock.results.published_files import write_json
from penstock.results.run_record import RunRequest
from penstock.results.step_events import StepPhase
from penstock.storage import Counters
from penstock.storage.capabilities import uses_page_cache
from penstock.workload.choices import DataFormat

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.training.training_files import OpenFormat
    from penstock.bench.training.training_loop import PhaseWork
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.bench.training.training_result import HarnessLimit
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.results.provenance import HostFacts
    from penstock.storage import Storage
    from penstock.workload.spec import Workload


def _write_results(
    run: ActiveRun, stages: Stages, *, request: TrainingRequest, hosts: Sequence[HostFacts]
) -> TrainingResult:
    """Close the run, whose ranks have all written their last event."""
    workload = request.workload
    num_ranks = run.record.ranks
    gather_events(run.folder, num_ranks)
    gather_counters(run.folder)
    events = read_events(run.folder)
    # Without computation every ceiling is near 0, and says nothing about this client.
    is_computing = not workload.train.computation_time.is_zero
    share = stages.ceiling.compute_share if stages.ceiling and is_computing else None
    train = compute_phase_figures(events, workload, ceiling=share)
    if train is None:
        raise StorageError("The run left no completed epoch", uri=str(run.folder))
    evaluation = compute_phase_figures(events, workload, phase=StepPhase.EVAL)
    write_json(run.folder, STAGES_FILE, stages.document())
    write_dlio_files(
        run.folder,
        DlioOutputs(
            workload=workload,
            ranks=events,
            hosts=hosts,
            started=datetime.fromisoformat(run.record.started_at),
            ended=datetime.now(UTC),
            train=train,
            evaluation=evaluation,
        ),
        HydraFacts(
            workload_name=workload.full_name,
            overrides=redact(request.overrides),
            subfolder=request.hydra_subfolder,
            working_folder=str(Path.cwd()),
            run_folder=str(run.folder),
        ),
        log_before=request.log_before,
    )
    run.finish(train=train, evaluation=evaluation, deliveries=stages.deliveries)
    return TrainingResult(
        workload=workload.full_name,
        ranks=num_ranks,
        results_dir=str(run.folder),
        train=train,
        evaluation=evaluation,
        stages=stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """What the loop needs, and how long its preparation took."""

    files: TrainingFiles
    plan: TrainingPlan
    validation: Validation
    opening_s: float
    planning_s: float


def prepare_training(
    workload: Workload,
    storage: Storage,
    *,
    seed: int,
    division: Remainder,
    comm: Comm,
    progress: Progress,
    reader: OpenFormat | None = None,
) -> PreparedTraining:
    """Open, validate and plan."""
    began_s = time.monotonic()
    after = eval_epochs(workload, workload.train.epochs)
    files = all_gather_results(
        comm,
        lambda: open_files(
            workload.dataset,
            storage,
            seed=workload.train.seed,
            evaluates=bool(after),
            reader=reader or open_format,
        ),
        awaiting="all ranks to open the data set",
    )[comm.rank]
    if files.need_listing:
        found = list_external_files(
            workload.dataset, storage, evaluates=bool(after), comm=comm, progress=progress
        )
        files = files.listed(found)
    opened_s = time.monotonic()
    validation = validate(files, storage, comm=comm, progress=progress)
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


def train(request: TrainingRequest, storage: Storage, *, comm: Comm, progress: Progress) -> TrainingResult:
    """Run the workload on the files at `storage`; the same result on every rank."""
    prepared = prepare_training(
        request.workload,
        storage,
        seed=request.seed,
        division=request.division,
        comm=comm,
        progress=progress,
        reader=request.reader,
    )
    hosts = unique_hosts(comm.gather(request.facts_of(comm.host), awaiting="facts of all hosts"))
    with ExitStack() as open_things:
        run = None
        if comm.rank == 0:
            asked = RunRequest(
                workload=request.workload,
                ranks=comm.size,
                hosts=hosts,
                command=request.command,
                environment=request.environment,
                seeds={"order": request.seed},
                preflight=request.inspection.preflight if request.inspection else None,
                cluster=request.inspection.cluster if request.inspection else None,
                plan=prepared.plan.document(),
                remarks=(*request.remarks, *prepared.files.remarks),
            )
            run = open_things.enter_context(_open_run(request, asked))
        folder = comm.broadcast(run.folder if run else None, awaiting="the folder of the run")
        session = _Session(request, storage, comm, progress, prepared)
        stages = session.run(folder, run)
        result = None
        if run is not None:
            result = _write_results(run, stages, request=request, hosts=hosts)
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def _open_run(request: TrainingRequest, asked: RunRequest) -> ActiveRun:
    if request.run_folder is not None:
        return ActiveRun.start_in(request.run_folder, asked, results=request.results)
    return ActiveRun.start(request.results, asked)


@dataclass(frozen=True, slots=True)
class _Session:
    """One rank's part of a run between its plan and its figures."""

    request: TrainingRequest
    storage: Storage
    comm: Comm
    progress: Progress
    prepared: PreparedTraining

    def run(self, folder: Path, run: ActiveRun | None) -> Stages:
        """Ceiling, then all epochs; their steps lie in the folder's spools afterwards."""
        workload = self.request.workload
        handling, decoder = choose_handling(self.request, self.prepared.files, uri=self.storage.uri)
        began_s = time.monotonic()
        # Nothing can be decoded of storage that costs nothing, because it holds nothing.
        ceiling = None if handling.decodes else self._ceiling()
        ceiling_s = time.monotonic() - began_s
        works = make_phase_works(
            workload, self.prepared, self.storage, rank=self.comm.rank, handling=handling
        )
        spool = SpoolWriter(spool_path(folder, self.comm.rank), read_clocks(self.comm.rank, self.comm.host))
        sign = run.heartbeat if run else _nobody_asks
        observer = DeviceObserver(self.comm, folder, self.storage)
        with observer, StepRecorder(spool, on_flush=sign) as recorder:
            saver = self._saver(folder, recorder, sign)
            began_s = time.monotonic()
            with closing(self.request.loader.start(self.storage, self.request.reopen, decoder)) as loader:
                loader_start_s = time.monotonic() - began_s
                loop = TrainingLoop(
                    comm=self.comm,
                    loader=loader,
                    recorder=recorder,
                    progress=self.progress,
                    planned_ahead=self.request.loader.prefetch_batches + 2,
                    saver=saver,
                )
                before_bytes = self.storage.counters.snapshot().read_bytes
                with observer.during("read"):
                    epochs = tuple(self._epochs(loop, works))
        counted = self.storage.counters.snapshot() + loader.counters
        counters = self.comm.gather(counted, awaiting="what the storages of all ranks counted")
        survey_bytes = sum(work.batches.survey_bytes for work in works.values())
        return Stages(
            opening_s=self.prepared.opening_s,
            files_found=self.prepared.files.num_found,
            remarks=self.prepared.files.remarks,
            validation=self.prepared.validation,
            planning_s=self.prepared.planning_s,
            loader=self.request.loader,
            loader_start_s=self.comm.reduce(loader_start_s, "max", awaiting="all ranks' loaders"),
            ceiling=ceiling,
            ceiling_s=ceiling_s,
            epochs=epochs,
            checkpoints=saver.taken() if saver else None,
            survey_bytes=self.comm.reduce(survey_bytes, "sum", awaiting="all ranks' surveys"),
            storage_uri=self.storage.uri,
            storage_options=self.storage.options,
            counters=sum(counters, Counters()),
            deliveries=(observer.deliver("read", counted.read_bytes - before_bytes),),
        )

    def _saver(
        self, folder: Path, recorder: StepRecorder, sign: Callable[[], None]
    ) -> TrainingCheckpoints | None:
        """What takes checkpoints on the way, warmed up; None where none are asked for. Collective."""
        wish = self.request.checkpoints
        if wish is None:
            return None
        epochs = [(epoch.epoch, epoch.num_steps) for epoch in self.prepared.plan.epochs]
        return TrainingCheckpoints.begin(
            wish, epochs, comm=self.comm, board=folder / PROGRESS_FILE, recorder=recorder, heartbeat=sign
        )

    def _ceiling(self) -> HarnessLimit | None:
        return measure_harness_limit(
            self.request.workload,
            self.prepared,
            self.storage,
            options=self.request.loader,
            comm=self.comm,
            progress=self.progress,
        )

    def _epochs(self, loop: TrainingLoop, works: Mapping[StepPhase, PhaseWork]) -> Iterator[EpochStage]:
        """Run every epoch; what came before each of them, as its epoch is over."""
        plan = self.prepared.plan
        ended_s = time.monotonic()
        for epoch in plan.epochs:
            cache = None
            if uses_page_cache(self.storage):
                cache = evict_data_set(self.prepared.files, self.storage, comm=self.comm)
            self.comm.barrier(awaiting=f"all ranks to begin epoch {epoch.epoch}")
            self.progress.begin(f"epoch {epoch.epoch} of {len(plan.epochs)}, steps", epoch.num_steps)
            began_ns = time.monotonic_ns()
            change_s = began_ns / 1e9 - ended_s - (cache.elapsed_s if cache else 0.0)
            preload = loop.train(works[StepPhase.TRAIN], epoch.epoch, epoch.num_steps)
            if epoch.epoch in plan.eval_epochs:
                self.progress.begin(f"evaluation after epoch {epoch.epoch}, steps", plan.eval_steps)
                loop.evaluate(works[StepPhase.EVAL], epoch.epoch, plan.eval_steps)
            loop.note_epoch(epoch.epoch, began_ns)
            ended_s = time.monotonic()
            yield EpochStage(epoch=epoch.epoch, cache=cache, change_s=change_s, preload=self._sum(preload))

    def _sum(self, preload: Preload | None) -> Preload | None:
        """What all ranks read before the first step, and how long the last one took. Collective."""
        if preload is None:
            return None
        return Preload(
            read_bytes=self.comm.reduce(preload.read_bytes, "sum", awaiting="what all ranks read first"),
            elapsed_s=self.comm.reduce(preload.elapsed_s, "max", awaiting="the rank that read longest"),
        )


def choose_handling(
    request: TrainingRequest, files: TrainingFiles, *, uri: str
) -> tuple[SampleHandling, FormatDecoder | None]:
    """What becomes of samples, and who does it; `UsageError` where nothing tells what files hold."""
    decodes = request.decodes or request.check is not ContentCheck.OFF
    if not decodes or files.dataset.format is DataFormat.SYNTHETIC:
        return SampleHandling(), None
    if files.recipe is None:
        raise UsageError(
            "Samples can be decoded and checked only where penstock's manifest says how files are laid out",
            where=uri,
            fix="Run without --decode and --check, or make the data set with `penstock training generate`.",
        )
    return SampleHandling(decodes=True, check=request.check), FormatDecoder(files.kind, files.recipe)


def _nobody_asks() -> None:
    """Only rank 0 gives signs of life."""
