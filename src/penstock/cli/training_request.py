"""A training run from its options: the request, the preflight gates, the submission, the run itself.

`penstock training run` and `penstock submission run training` build their requests here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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
from penstock.environment import process_environment
from penstock.submission.tree_layout import Benchmark
from penstock.workload import entry_points, mlperf_divisions
from penstock.workload.shipped_catalog import families

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.loader.loader_protocol import ContentCheck, OpenStorage
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
        "Loader: native, pytorch, one of an extension, or your own, MODULE:FACTORY (default: native).",
    )
    reader: str | None = option(
        "--reader", NAME, "File format of an installed extension, with which all files are read."
    )
    threads: int | None = option(
        "--threads",
        whole(1),
        "Maximum reads in flight per rank (default: the workload's reader.read_threads).",
    )
    seed: int | None = option(
        "--seed", whole(0), "Seed of the sample order (default: the workload's train.seed)."
    )
    division: Remainder | None = option(
        "--division",
        DIVISION,
        "What to do with samples that do not divide evenly among ranks (default: rotate).",
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
        """True if a closed gate forbids the run."""
        inspection = self.request.inspection
        return inspection is not None and inspection.preflight.is_stopped


def plan_training(
    options: TrainingRunOptions, *, comm: Comm, terminal: Terminal, written_bytes: int = 0
) -> PlannedTraining:
    """The run that the options ask for, with its gates inspected; prints what people should know of it.

    `written_bytes` is what this rank will write to the data set's storage.
    """
    from penstock.bench.loader import loader_options
    from penstock.bench.training.training_checkpoints import plan_checkpoints
    from penstock.bench.training.training_run import TrainingRequest, choose_seed, list_unsupported

    loaded = options.workload.load(terminal)
    loader, remainder = mlperf_divisions.choose_reading(
        options.results.rules.division,
        options.workload.name,
        [override.path for override in parse_overrides(options.workload.settings)],
        families=families(),
        loader=options.loader,
        remainder=options.division.value if options.division else None,
    )
    unsupported = list_unsupported(loaded.workload)
    terminal.notes(unsupported)
    workload, submitted = loaded.workload, None
    series = options.results.find_series(benchmark=Benchmark.TRAINING, model=workload.name)
    if series is not None:
        located = locate(series, workload, options.data.uri)
        workload = located.workload
        submitted = SubmissionEntry(series=series, located=located, rehearsed_at=options.results.rehearsed_at)
    environment = process_environment()
    preflight = PreflightRequest(
        environment=environment,
        uri=options.data.uri,
        reopen=options.data.opener(rank=comm.rank, is_traced=False),
        results=options.results.folder,
        results_option=options.results.folder_option,
        written_bytes=written_bytes,
    )
    opener = options.data.opener(rank=comm.rank)
    reader: OpenFormat | None = None
    if options.reader is not None:
        reader = entry_points.load_extension(entry_points.Extension.READER, options.reader, where="--reader")
    request = TrainingRequest(
        workload=workload,
        results=options.results.folder,
        seed=choose_seed(comm, workload, options.seed),
        division=DIVISION(remainder),
        loader=loader_options(loader, workload, options.threads),
        reopen=opener,
        decodes=options.decode,
        check=options.check,
        reader=reader,
        needs_counted_step=True,
        command=command_line(),
        environment=environment,
        overrides=tuple(f"++workload.{text}" for text in options.workload.settings),
        remarks=(*loaded.remarks, *unsupported),
        checkpoints=plan_checkpoints(
            workload, options.checkpoints, num_ranks=comm.size, rank=comm.rank, environment=environment
        ),
        inspection=inspect_gates(
            preflight,
            options.gates,
            is_strict=options.results.rules.division is not None,
            comm=comm,
            terminal=terminal,
        ),
    )
    session = None
    is_stopped = request.inspection is not None and request.inspection.preflight.is_stopped
    if submitted is not None and not is_stopped:
        session = open_session(submitted, options.workload.settings, comm=comm)
    return PlannedTraining(request=request, open_storage=opener, session=session)


def run_training(plan: PlannedTraining, *, comm: Comm, terminal: Terminal) -> TrainingResult:
    """Train, and add the result to its submission tree if it belongs to one."""
    storage = plan.open_storage()
    with terminal.progress() as progress:
        if plan.session is None:
            from penstock.bench.training.training_run import train

            result = train(plan.request, storage, comm=comm, progress=progress)
        else:
            from penstock.workflows.submission.draft_training_result import add_run
            from penstock.workflows.submission.result_draft import RunObserver

            observer = RunObserver(
                progress=progress,
                note=terminal.note,
                format_logs=partial(capture_training_output, remarks=plan.request.remarks),
            )
            result = add_run(plan.session, plan.request, storage, comm=comm, observer=observer)
    stages = result.stages
    terminal.notes((*stages.remarks, *reconciliation_notes(stages.deliveries), *stages.advice))
    return result
