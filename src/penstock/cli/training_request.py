"""A training run from its options: the request, the preflight gates, the submission, the run itself.

Place in the flow: `penstock training run`, `penstock submission run training` and `penstock-dlio` build their
requests here. A division's rules decide here which loader reads and what happens to remainders.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from penstock.cli.option_groups import (
    DataOptions,
    GateOptions,
    WorkloadOptions,
    inspect_gates,
    parse_overrides,
)
from penstock.cli.options import command_line, flag, group, option
from penstock.cli.parsers import CONTENT_CHECK, DIVISION, NAME, URI, whole
from penstock.cli.run_reports import capture_training_output, reconciliation_notes
from penstock.cli.submission_options import ResultOptions, SubmissionEntry, locate, open_session
from penstock.cli.terminal import Terminal
from penstock.cluster.comm import Comm
from penstock.cluster.gates.gate_model import PreflightRequest
from penstock.environment import Environment, process_environment
from penstock.errors import UsageError
from penstock.optional_libraries import explained_imports
from penstock.storage import open_storage
from penstock.submission.tree_layout import Benchmark
from penstock.workload import entry_points, enums, mlperf_divisions, quantities
from penstock.workload.spec import ReaderSection, Workload

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.loader.loader_protocol import LoaderOptions, OpenStorage
    from penstock.bench.loader.pytorch_loader import PytorchOptions
    from penstock.bench.loader.sample_decoder import ContentCheck
    from penstock.bench.training.training_checkpoints import CheckpointsRequest
    from penstock.bench.training.training_files import OpenFormat
    from penstock.bench.training.training_result import TrainingResult
    from penstock.bench.training.training_run import TrainingRequest
    from penstock.workflows.submission.result_draft import ResultWriter


@dataclass(frozen=True, kw_only=True)
class TrainingRunOptions:
    """All options of a training run."""

    workload: WorkloadOptions = group(WorkloadOptions)
    data: DataOptions = group(DataOptions)
    results: ResultOptions = group(ResultOptions)
    loader: str | None = option(
        "--loader",
        NAME,
        "Read with this loader: native, pytorch, one of an installed extension, or your own: MODULE:FACTORY "
        "(default: native).",
    )
    reader: str | None = option(
        "--reader", NAME, "Read all files with this format of an installed extension."
    )
    threads: int | None = option(
        "--threads",
        whole(1),
        "Keep this many reads in flight on each rank (default: the workload's reader.read_threads).",
    )
    seed: int | None = option(
        "--seed", whole(0), "Seed the sample order (default: the workload's train.seed)."
    )
    division: Remainder | None = option(
        "--division",
        DIVISION,
        "Handle samples that do not divide evenly among ranks in this way (default: rotate).",
    )
    decode: bool = flag("--decode", "Decode samples, as a trainer does.")
    check: ContentCheck = option(
        "--check", CONTENT_CHECK, "Verify sample contents: off, sample (1 in 16) or full.", default="off"
    )
    checkpoints: str | None = option(
        "--checkpoints", URI, "Save checkpoints here (default: the workload's checkpoint_folder)."
    )
    gates: GateOptions = group(GateOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """A request, how its storage is opened, and the submission session that it belongs to, if any."""

    request: TrainingRequest
    open_storage: OpenStorage
    session: ResultWriter | None

    @property
    def is_stopped(self) -> bool:
        """Whether a closed gate forbids the run."""
        inspection = self.request.inspection
        return inspection is not None and inspection.preflight.is_stopped


def plan_training(
    options: TrainingRunOptions, *, comm: Comm, terminal: Terminal, written_bytes: int = 0
) -> PlannedTraining:
    """The run that the options ask for, with its gates inspected; prints what people should know of it.

    `written_bytes` is what this rank will write to the data set's storage.
    """
    from penstock.bench.training.training_run import TrainingRequest

    folder = options.results.folder
    loaded = options.workload.load(terminal)
    rules = choose_reading_rules(options)
    unsupported = list_unsupported(loaded.workload)
    terminal.notes(unsupported)
    submitted = _find_submitted(options, loaded.workload)
    workload = submitted.located.workload if submitted else loaded.workload
    opener = options.data.opener(rank=comm.rank)
    environment = process_environment()
    request = TrainingRequest(
        workload=workload,
        results=folder,
        seed=choose_seed(comm, workload, options.seed),
        division=rules.division,
        loader=loader_options(rules.loader, workload, options.threads),
        reopen=opener,
        decodes=options.decode or decodes_arrow(workload),
        check=options.check,
        reader=load_reader(options.reader),
        needs_counted_step=True,
        command=command_line(),
        environment=environment,
        overrides=tuple(f"++workload.{text}" for text in options.workload.settings),
        remarks=(*map(str, loaded.remarks), *unsupported),
        checkpoints=plan_checkpoints(workload, options.checkpoints, comm=comm, environment=environment),
    )
    request = _inspect(request, options, written_bytes, comm=comm, terminal=terminal)
    plan = PlannedTraining(request=request, open_storage=opener, session=None)
    if plan.is_stopped or submitted is None:
        return plan
    return replace(plan, session=open_session(submitted, options.workload.settings, comm=comm))


def run_training(plan: PlannedTraining, *, comm: Comm, terminal: Terminal) -> TrainingResult:
    """Train, and add the result to its submission tree if it belongs to one."""
    from penstock.bench.training.training_run import train
    from penstock.workflows.submission.draft_training_result import add_run
    from penstock.workflows.submission.result_draft import RunObserver

    storage = plan.open_storage()
    with terminal.progress() as progress:
        if plan.session is None:
            result = train(plan.request, storage, comm=comm, progress=progress)
        else:
            observer = RunObserver(
                progress=progress,
                note=terminal.note,
                format_logs=partial(capture_training_output, remarks=plan.request.remarks),
            )
            result = add_run(plan.session, plan.request, storage, comm=comm, observer=observer)
    stages = result.stages
    terminal.notes((*stages.remarks, *reconciliation_notes(stages.deliveries), *stages.advice))
    return result


def _find_submitted(options: TrainingRunOptions, workload: Workload) -> SubmissionEntry | None:
    series = options.results.find_series(benchmark=Benchmark.TRAINING, model=workload.name)
    if series is None:
        return None
    located = locate(series, workload, options.data.uri)
    return SubmissionEntry(series=series, located=located, rehearsed_at=options.results.rehearsed_at)


def _inspect(
    request: TrainingRequest,
    options: TrainingRunOptions,
    written_bytes: int,
    *,
    comm: Comm,
    terminal: Terminal,
) -> TrainingRequest:
    preflight = PreflightRequest(
        environment=request.environment,
        uri=options.data.uri,
        reopen=options.data.opener(rank=comm.rank, is_traced=False),
        results=options.results.folder,
        results_option=options.results.folder_option,
        written_bytes=written_bytes,
    )
    is_strict = options.results.rules.division is not None
    inspection = inspect_gates(preflight, options.gates, is_strict=is_strict, comm=comm, terminal=terminal)
    return replace(request, inspection=inspection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRules:
    """Which loader reads, and what happens to samples that do not divide evenly."""

    loader: str
    division: Remainder


def choose_reading_rules(options: TrainingRunOptions) -> ReadingRules:
    """What the options ask for, or what their division of MLPerf Storage prescribes."""
    submitted = options.results.rules.division
    if submitted is mlperf_divisions.SubmissionDivision.CLOSED:
        return closed_rules(options.workload, options.loader, options.division)
    if submitted is mlperf_divisions.SubmissionDivision.OPEN:
        _require_allowed_changes(submitted, options.workload)
    return default_rules(options.loader, options.division)


def default_rules(loader: str | None, division: Remainder | None) -> ReadingRules:
    """Outside of the closed division: our own loader, and no sample left out of two epochs in a row."""
    return ReadingRules(loader=loader or "native", division=division or DIVISION("rotate"))


def closed_rules(workload: WorkloadOptions, loader: str | None, division: Remainder | None) -> ReadingRules:
    """What the closed division prescribes; UsageError if the options say something else."""
    _require_allowed_changes(mlperf_divisions.SubmissionDivision.CLOSED, workload)
    for name, given, prescribed in (("--loader", loader, "pytorch"), ("--division", division, "drop")):
        if given not in (None, prescribed):
            raise UsageError(
                f"The CLOSED division requires {name} {prescribed}, not {given} (rule 3.6.2)",
                where=name,
                fix=f"Leave {name} out, or run without --closed.",
            )
    return ReadingRules(loader="pytorch", division=DIVISION("drop"))


def _require_allowed_changes(division: mlperf_divisions.SubmissionDivision, options: WorkloadOptions) -> None:
    """Raise UsageError unless the division allows this workload with these changes."""
    from penstock.workload.load_workload import shipped

    name = options.name
    families = {loaded.workload.name for loaded in shipped()}
    family = name.rpartition("_")[0] if name not in families else name
    if family not in families:
        raise UsageError(
            f"{name} is not a shipped workload, and the {division.upper()} division allows no other "
            f"(rule {mlperf_divisions.RULES[division]})",
            where=f"--{division}",
            fix="`penstock workloads` lists them.",
        )
    changed = [override.path for override in parse_overrides(options.settings)]
    mlperf_divisions.require_allowed(division, changed, workload=family)


def loader_options(name: str, workload: Workload, threads: int | None) -> LoaderOptions:
    """The loader of this name, set up as the workload and `--threads` say."""
    from penstock.bench.loader.native_loader import NativeOptions

    if name == "pytorch":
        return _pytorch_options(workload, threads)
    if name != "native":
        extension = entry_points.load_extension(
            entry_points.Extension.LOADER, name, where="--loader", own=("native", "pytorch")
        )
        options: LoaderOptions = extension(workload, threads)
        return options
    reader = workload.reader
    # Only TensorFlow preprocesses in threads of its own; elsewhere the reading threads work on samples, too.
    is_tensorflow = reader.data_loader is enums.LoaderKind.TENSORFLOW and not reader.preprocess_time.is_zero
    return NativeOptions(
        threads=threads or reader.read_threads or NativeOptions().threads,
        prefetch_batches=reader.prefetch_size,
        preprocess_threads=reader.computation_threads if is_tensorflow else None,
    )


def _pytorch_options(workload: Workload, threads: int | None) -> PytorchOptions:
    """One worker for each read in flight; none if the workload says `read_threads: 0`."""
    from penstock.bench.loader.native_loader import NativeOptions

    with explained_imports():
        from penstock.bench.loader.pytorch_loader import PytorchOptions
    reader, dataset = workload.reader, workload.dataset
    workers = reader.read_threads if threads is None else threads
    return PytorchOptions(
        workers=NativeOptions().threads if workers is None else workers,
        sample_bytes=max(
            1,
            _transformed_bytes(reader)
            or int(dataset.record_length_bytes_resize or dataset.record_length_bytes),
        ),
        prefetch_batches=reader.prefetch_size,
        context=reader.multiprocessing_context,
        pin_memory=reader.pin_memory,
    )


def _transformed_bytes(reader: ReaderSection) -> int:
    """A sample's size after its transformation, if the workload says its shape; else 0."""
    dims = reader.transformed_record_dims
    return prod(dims) * quantities.element_bytes(reader.transformed_record_element_type) if dims else 0


def choose_seed(comm: Comm, workload: Workload, seed: int | None) -> int:
    """The seed of `--seed`; else a random one for random shuffling, or the workload's. Collective."""
    if seed is not None:
        return seed
    if enums.Shuffle.RANDOM in (workload.reader.file_shuffle, workload.reader.sample_shuffle):
        return comm.broadcast(secrets.randbits(31), awaiting="rank 0 to draw a seed")
    return workload.train.seed


def load_reader(name: str | None) -> OpenFormat | None:
    """The reader of an extension; None for files of our own formats."""
    if name is None:
        return None
    reader: OpenFormat = entry_points.load_extension(entry_points.Extension.READER, name, where="--reader")
    return reader


def decodes_arrow(workload: Workload) -> bool:
    """Whether DLIO's own key says that samples are decoded."""
    return workload.storage.storage_options.decode is enums.Decode.ARROW


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


def plan_checkpoints(
    workload: Workload,
    uri: str | None,
    *,
    comm: Comm,
    environment: Environment,
    options: Mapping[str, str] | None = None,
) -> CheckpointsRequest | None:
    """The checkpoints that the workload saves as it trains, to `uri` or its own folder; None if none."""
    from penstock.bench.state_layout import LayoutRequest, plan_layout
    from penstock.bench.training.training_checkpoints import CheckpointsRequest
    from penstock.cli.checkpoint_request import durability_options
    from penstock.workload.load_workload import model_of_workload

    if not workload.workflow.checkpoint:
        return None
    model = model_of_workload(workload.model.name, workload)
    checkpoint = workload.checkpoint
    destination = uri or checkpoint.checkpoint_folder
    storage_options = {**durability_options(destination, fsync=checkpoint.fsync), **(options or {})}
    return CheckpointsRequest(
        layout=plan_layout(LayoutRequest(model=model, num_processes=comm.size, mode=checkpoint.mode)),
        when=checkpoint,
        reopen=partial(open_storage, destination, environment, options=storage_options, rank=comm.rank),
        seed=workload.train.seed,
    )
