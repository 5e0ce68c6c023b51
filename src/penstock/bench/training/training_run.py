"""A training run from start to finish: prepare, start the loader, harness limit, epochs, results folder.

Collective: every rank calls `train` and gets the same result. Only the steps of the loop count; everything
else is timed separately. However the run ends, its folder records it.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.checkpoint.checkpoint_rounds import PROGRESS_FILE
from penstock.bench.epoch_order import Remainder
from penstock.bench.loader.loader_protocol import (
    ContentCheck,
    FormatDecoder,
    Loader,
    LoaderOptions,
    OpenStorage,
)
from penstock.bench.page_cache_eviction import CacheEviction, evict
from penstock.bench.recorded_run import RunSettings, record_run
from penstock.bench.training.training_checkpoints import CheckpointsRequest, TrainingCheckpoints
from penstock.bench.training.training_files import (
    OpenFormat,
    TrainingFiles,
    explained_absence,
    open_files,
    validate,
)
from penstock.bench.training.training_loop import (
    PreparedTraining,
    TrainingLoop,
    make_phase_works,
    measure_harness_limit,
)
from penstock.bench.training.training_plan import (
    EpochPlan,
    eval_epochs,
    plan_training,
    require_counted_step,
)
from penstock.bench.training.training_result import Stages, TrainingResult, write_results
from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.external_dataset import list_external_files
from penstock.dataset.formats import open_format
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.results.active_run import ActiveRun
from penstock.results.step_events import SpanKind, StepPhase
from penstock.storage import Counters, Storage, capabilities
from penstock.workload import enums
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(RunSettings):
    """A request for a training run.

    `reopen` is for loaders whose processes open the storage themselves. `checkpoints` are saved during
    training. With `decodes`, samples are decoded; `check` compares samples with what their generator
    produced, and so implies decoding. `reader` opens the files' format; replace it for your own format.
    `is_judged` is for commands that fail below the required utilization: they refuse a run that could only
    reach 0 % by DLIO's definition.
    """

    workload: Workload
    seed: int
    division: Remainder = Remainder.ROTATE
    loader: LoaderOptions
    reopen: OpenStorage | None = None
    checkpoints: CheckpointsRequest | None = None
    decodes: bool = False
    check: ContentCheck = ContentCheck.OFF
    reader: OpenFormat | None = None
    is_judged: bool = False


def choose_seed(comm: Comm, workload: Workload, seed: int | None) -> int:
    """Return `seed`; if it is None, a random seed for random shuffling, else the workload's. Collective."""
    if seed is not None:
        return seed
    if enums.Shuffle.RANDOM in (workload.reader.file_shuffle, workload.reader.sample_shuffle):
        return comm.broadcast(secrets.randbits(31), awaiting="rank 0 to draw a seed")
    return workload.train.seed


def list_unsupported(workload: Workload) -> Sequence[str]:
    """Return remarks on settings of the workload that a run ignores. They are printed once, and recorded."""
    profiling = workload.profiling
    remarks = []
    if workload.workflow.profiling and profiling.profiler is not enums.Profiler.IOSTAT:
        remarks.append(
            f"workflow.profiling: {profiling.profiler} is not started; a run records only iostat figures"
        )
    if not workload.reader.drop_page_cache:
        remarks.append("reader.drop_page_cache is off: reads may come from memory instead of storage")
    return remarks


def train(request: TrainingRequest, storage: Storage, *, comm: Comm, progress: Progress) -> TrainingResult:
    """Run the workload on the files at `storage`. Returns the same result on every rank."""
    workload, saves = request.workload, request.checkpoints
    prepared = prepare_training(
        workload,
        storage,
        seed=request.seed,
        division=request.division,
        comm=comm,
        progress=progress,
        reader=request.reader or open_format,
    )
    if request.is_judged:
        require_counted_step(workload, prepared.plan)
    with request.open_run(
        workload,
        comm=comm,
        seeds={"order": request.seed},
        plan={**prepared.plan.document(), "access": _access(request, storage)},
        remarks=prepared.files.remarks,
        progress=progress,
        written=capabilities.find_local_root(saves.reopen()) if saves else None,
    ) as (run, folder):
        with explained_absence(prepared.files):
            decoder = choose_decoder(request, prepared.files, uri=storage.uri)
            limit: Mapping[str, Any] | None = None
            loader: Loader | None = None
            began_s, start_s = time.monotonic(), 0.0
            if decoder is None:  # zero-cost storage holds nothing to decode
                limit, loader, start_s = measure_harness_limit(
                    workload,
                    prepared,
                    storage,
                    options=request.loader,
                    comm=comm,
                    progress=progress,
                    reopen=request.reopen,
                )
            limit_s = time.monotonic() - began_s - start_s
            if loader is None:
                began_s = time.monotonic()
                loader = request.loader.start(storage, request.reopen, decoder)
                start_s = time.monotonic() - began_s
            with closing(loader):
                start_s = comm.reduce(start_s, "max", awaiting="all ranks' loaders")
                startup = {"ceiling": limit, "ceiling_s": limit_s, "loader_start_s": start_s}
                stages = _run_epochs(
                    request,
                    prepared,
                    storage,
                    loader,
                    comm=comm,
                    progress=progress,
                    check=decoder.check if decoder else None,
                    run=run,
                    folder=folder,
                    startup=startup,
                )
        result = write_results(run, stages, request, workload, is_judged=request.is_judged) if run else None
        return comm.broadcast(result, awaiting="rank 0 to finish the run's files")


def _access(request: TrainingRequest, storage: Storage) -> dict[str, Any]:
    """Return the access path to the data set and the way of reading it, which users vary and compare."""
    return {
        "data": storage.uri,
        "storage": dict(storage.options),
        "loader": request.loader.document(),
        "decode": request.decodes,
        "check": request.check.value,
        "reader": getattr(request.reader, "__name__", None),
    }


def prepare_training(
    workload: Workload,
    storage: Storage,
    *,
    seed: int,
    division: Remainder,
    comm: Comm,
    progress: Progress,
    reader: OpenFormat = open_format,
) -> PreparedTraining:
    """Open, validate and plan the data set's files. Collective."""
    began_s = time.monotonic()
    dataset, evaluates = workload.dataset, bool(eval_epochs(workload, workload.train.epochs))
    files = all_gather_results(
        comm,
        lambda: open_files(dataset, storage, seed=workload.train.seed, evaluates=evaluates, reader=reader),
        awaiting="all ranks to open the data set",
    )[comm.rank]
    if files.needs_listing:
        files = files.with_listing(
            list_external_files(dataset, storage, evaluates=evaluates, comm=comm, progress=progress)
        )
    opened_s = time.monotonic()
    num_validated, validation_s = validate(files, storage, comm=comm, progress=progress)
    validated_s = time.monotonic()
    plan = plan_training(
        workload, block_samples=files.block_samples(), seed=seed, division=division, comm=comm
    )
    return PreparedTraining(
        files=files,
        plan=plan,
        opening_s=opened_s - began_s,
        validated_files=num_validated,
        validation_s=validation_s,
        planning_s=time.monotonic() - validated_s,
    )


def choose_decoder(request: TrainingRequest, files: TrainingFiles, *, uri: str) -> FormatDecoder | None:
    """Return the decoder of samples, or None if they are dropped undecoded.

    Raises `UsageError` if no manifest describes the content of the files.
    """
    arrow = request.workload.storage.storage_options.decode is enums.Decode.ARROW  # DLIO's own key
    decodes = request.decodes or arrow or request.check is not ContentCheck.OFF
    if not decodes or not files.are_stored:
        return None
    if files.recipe is None:
        raise UsageError(
            "Samples can be decoded and checked only where penstock's manifest says how files are laid out",
            where=uri,
            fix="Run without --decode and --check, or make the data set with `penstock training generate`.",
        )
    return FormatDecoder(files.data_files.kind, files.recipe, request.check)


def _run_epochs(
    request: TrainingRequest,
    prepared: PreparedTraining,
    storage: Storage,
    loader: Loader,
    *,
    comm: Comm,
    progress: Progress,
    check: ContentCheck | None,
    run: ActiveRun | None,
    folder: Path,
    startup: Mapping[str, Any],
) -> Stages:
    """Run all epochs. Afterwards, the steps are in the folder's spools. Collective.

    `startup` has the stages of the harness limit and of the loader's start.
    """
    plan, files = prepared.plan, prepared.files
    works = make_phase_works(request.workload, prepared, storage, rank=comm.rank, check=check)
    heartbeat = run.heartbeat if run else lambda: None
    with record_run(comm, folder, storage, heartbeat=heartbeat) as (recorder, observer):
        saver = None
        if request.checkpoints is not None:
            saver = TrainingCheckpoints(
                request.checkpoints,
                [(epoch.epoch, epoch.num_steps) for epoch in plan.epochs],
                comm=comm,
                board=folder / PROGRESS_FILE,
                recorder=recorder,
                progress=progress,
                heartbeat=heartbeat,
            )
        loop = TrainingLoop(
            comm=comm,
            loader=loader,
            recorder=recorder,
            progress=progress,
            # One more than the loader holds, so that the loader never waits for a plan.
            planned_ahead=request.loader.prefetch_batches + 2,
            saver=saver,
        )
        before_bytes = storage.counters.snapshot().read_bytes
        num_steps = sum(epoch.num_steps for epoch in plan.epochs) + len(plan.eval_epochs) * plan.eval_steps
        progress.expect(num_steps, "steps")
        epochs = []
        with observer.during("read"):
            ended_s = time.monotonic()
            for epoch in plan.epochs:
                cache = _evict(request, prepared, epoch, storage, comm=comm, progress=progress)
                comm.barrier(awaiting=f"all ranks to begin epoch {epoch.epoch}")
                progress.begin(f"epoch {epoch.epoch} of {len(plan.epochs)}, steps", epoch.num_steps)
                began_ns = time.monotonic_ns()
                change_s = began_ns / 1e9 - ended_s - (cache.elapsed_s if cache else 0.0)
                preload = loop.run(works[StepPhase.TRAIN], epoch.epoch, epoch.num_steps)
                if epoch.epoch in plan.eval_epochs:
                    progress.begin(f"evaluation after epoch {epoch.epoch}, steps", plan.eval_steps)
                    loop.run(works[StepPhase.EVAL], epoch.epoch, plan.eval_steps)
                loop.add_span(SpanKind.EPOCH, StepPhase.TRAIN, epoch.epoch, began_ns)
                ended_s = time.monotonic()
                stage = {
                    "epoch": epoch.epoch,
                    "cache": cache.document() if cache else None,
                    "change_s": change_s,
                    "preload": None,
                }
                if preload is not None:  # the bytes of all ranks, and the time of the slowest
                    read_bytes, elapsed_s = preload
                    stage["preload"] = {
                        "read_bytes": comm.reduce(read_bytes, "sum", awaiting="what all ranks read first"),
                        "elapsed_s": comm.reduce(elapsed_s, "max", awaiting="the rank that read longest"),
                    }
                epochs.append(stage)
    counted = storage.counters.snapshot() + loader.counters
    counters = comm.gather(counted, awaiting="what the storages of all ranks counted")
    survey_bytes = sum(work.batches.survey_bytes for work in works.values())
    return Stages(
        loader=request.loader,
        storage_uri=storage.uri,
        storage_options=storage.options,
        epochs=tuple(epochs),
        opening_s=prepared.opening_s,
        files_found=files.num_found,
        remarks=files.remarks,
        validated_files=prepared.validated_files,
        validation_s=prepared.validation_s,
        planning_s=prepared.planning_s,
        **startup,
        checkpoints=saver.document() if saver else None,
        survey_bytes=comm.reduce(survey_bytes, "sum", awaiting="all ranks' surveys"),
        counters=sum(counters, Counters()),
        deliveries=(observer.deliver("read", counted.read_bytes - before_bytes),),
    )


def _evict(
    request: TrainingRequest,
    prepared: PreparedTraining,
    epoch: EpochPlan,
    storage: Storage,
    *,
    comm: Comm,
    progress: Progress,
) -> CacheEviction | None:
    """Evict from memory what this epoch reads, and nothing else; None if none of it can be there."""
    files, plan = prepared.files, prepared.plan
    is_dropped = request.workload.reader.drop_page_cache and files.are_stored
    if not is_dropped or not capabilities.uses_page_cache(storage):
        return None
    progress.begin("dropping files from the page cache", plan.estimate_files_read(epoch))
    keys: Iterator[str] = (
        key
        for phase, numbers in plan.files_read(epoch, rank=comm.rank)
        for number in numbers.tolist()
        for key in files.keys_of(phase, number)
    )
    return evict(storage, keys, comm=comm, advance=progress.advance, explained=explained_absence(files))
