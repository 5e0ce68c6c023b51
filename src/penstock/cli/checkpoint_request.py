"""A checkpoint run from its options: the request, the preflight gates, the submission, the run itself.

Place in the flow: `penstock checkpoint run` and `penstock submission run checkpointing` build their requests
here; `penstock-dlio` builds its own and shares the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from penstock.cli.option_groups import (
    BackendOptions,
    GateOptions,
    ModelOptions,
    inspect_gates,
    plan_model_layout,
)
from penstock.cli.options import command_line, flag, group, option, required, switch
from penstock.cli.parsers import SCALE, SIZE, TEXT, TIME, URI, choice, whole
from penstock.cli.run_reports import capture_checkpoint_output, checkpoint_warnings
from penstock.cli.submission_options import ResultOptions, SubmissionEntry, open_session, parse_changes
from penstock.cli.terminal import Terminal
from penstock.cluster.comm import Comm
from penstock.cluster.gates.gate_model import PreflightRequest
from penstock.environment import process_environment, untraced
from penstock.storage import open_storage
from penstock.submission.authoring import preflight
from penstock.submission.authoring.preflight import locate_checkpoints
from penstock.submission.tree_layout import Benchmark
from penstock.workload.mlperf_divisions import SubmissionDivision

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.transfer.pipeline import PipelineSettings


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The options for moving each rank's files."""

    streams: int = option("--streams", whole(1), "Maximum files in flight per rank.", default="2")
    chunk_bytes: int = option("--chunk", SIZE, "Size of an I/O request.", default="16MiB")
    buffer_bytes: int = option("--buffer-memory", SIZE, "Maximum buffer memory per rank.", default="256MiB")
    verify: str = option(
        "--verify",
        choice("full", "sample", "off"),
        "Verify the bytes that are read: all, a sample of them, or none.",
        default="full",
    )

    def settings(self) -> PipelineSettings:
        """The pipeline's settings."""
        from penstock.transfer.pipeline import PipelineSettings

        return PipelineSettings(
            streams=self.streams,
            chunk_bytes=self.chunk_bytes,
            buffer_memory_bytes=self.buffer_bytes,
            verify=self.verify,  # type: ignore[arg-type]  # one of the three words
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointRunOptions:
    """All options of a checkpoint run."""

    model: ModelOptions = group(ModelOptions)
    destination: str = required(
        "--to", URI, "Place for the checkpoints: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: BackendOptions = group(BackendOptions)
    results: ResultOptions = group(ResultOptions)
    scale: Fraction = option("--scale", SCALE, "Share of every file to write, e.g. 0.01.", default="1")
    writes: int | None = option(
        "--writes", whole(0), "Number of checkpoints to write (default: the model's, 10)."
    )
    reads: int | None = option(
        "--reads", whole(0), "Number of checkpoints to read back (default: the model's, 10)."
    )
    is_subset: bool = flag("--subset", "Run on fewer ranks than the model needs; they carry a subset of it.")
    fsync: bool | None = switch(
        "--fsync", "Make every file durable before its write counts as done (default: the model's)."
    )
    interval_s: float | None = option(
        "--interval", TIME, "Pause between two checkpoints (default: the model's, 5s)."
    )
    pipeline: PipelineOptions = group(PipelineOptions)
    seed: int | None = option("--seed", whole(0), "Seed of the contents (default: random for each run).")
    resumes: bool = flag("--resume", "Continue an interrupted run: keep its complete checkpoints.")
    removes: bool = flag("--remove", "Delete the checkpoints at the end.")
    gates: GateOptions = group(GateOptions)
    accelerator: str = option(
        "--accelerator",
        TEXT,
        "Accelerator whose memory is saved, b200 or mi355; needed with --submission.",
        default="",
    )


def run_checkpoint_benchmark(
    options: CheckpointRunOptions, *, comm: Comm, terminal: Terminal
) -> CheckpointResult | None:
    """Write and read the checkpoints that the options ask for; None if a closed gate stopped the run."""
    request = build_request(options, comm=comm)
    submitted = _find_submitted(options, request)
    request = _inspect(request, options, comm=comm, terminal=terminal)
    if request.inspection is not None and request.inspection.preflight.is_stopped:
        return None
    terminal.notes(request.remarks)
    if submitted is None:
        return perform_run(request, options.destination, options.storage.values, comm=comm, terminal=terminal)
    return _run_submitted(request, options, submitted, comm=comm, terminal=terminal)


def build_request(options: CheckpointRunOptions, *, comm: Comm) -> CheckpointRequest:
    """The request for these options."""
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest, change_checkpoint_section

    model = change_checkpoint_section(
        options.model.load(),
        num_checkpoints_write=options.writes,
        num_checkpoints_read=options.reads,
        fsync=options.fsync,
        time_between_checkpoints_s=options.interval_s,
        mode="subset" if options.is_subset else None,
        checkpoint_folder=options.destination,
    )
    layout = plan_model_layout(model, ranks=comm.size, scale=options.scale, is_subset=options.is_subset)
    return CheckpointRequest(
        model=model,
        layout=layout,
        scale=options.scale,
        pipe=options.pipeline.settings(),
        results=options.results.folder,
        seed=options.seed,
        resumes=options.resumes,
        removes=options.removes,
        command=command_line(),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in options.model.settings),
        remarks=model.remarks,
    )


def _find_submitted(options: CheckpointRunOptions, request: CheckpointRequest) -> SubmissionEntry | None:
    """The series that the run belongs to, once its division's rules allow the run."""
    if (division := options.results.rules.division) is not None:
        _require_allowed(options, request, division)
    series = options.results.find_series(
        benchmark=Benchmark.CHECKPOINTING, model=request.model.workload.full_name
    )
    if series is None:
        return None
    located = locate_checkpoints(request.model.workload, options.destination)
    return SubmissionEntry(series=series, located=located, rehearsed_at=options.results.rehearsed_at)


def _require_allowed(
    options: CheckpointRunOptions, request: CheckpointRequest, division: SubmissionDivision
) -> None:
    from penstock.submission.edition import load_edition

    checkpoint, layout = request.model.workload.checkpoint, request.layout
    by_option = {"checkpoint.fsync": options.fsync, "checkpoint.time_between_checkpoints": options.interval_s}
    changed = [
        *parse_changes(options.model.settings),
        *(key for key, value in by_option.items() if value is not None),
    ]
    breaches = preflight.checkpoint_breaches(
        load_edition("v3.0"),
        division,
        model=request.model.workload.full_name,
        accelerator=options.accelerator,
        num_processes=layout.num_processes,
        num_writes=checkpoint.num_checkpoints_write,
        num_reads=checkpoint.num_checkpoints_read,
        is_subset=layout.is_subset,
        # A rehearsal does everything but sizes as in earnest.
        scale=Fraction(1) if options.results.rehearsed_at else request.scale,
        changed=changed,
        size_gib=layout.total_bytes / float(request.scale) / 2**30,
    )
    preflight.require_none(breaches, f"--{division.value}")


def _inspect(
    request: CheckpointRequest, options: CheckpointRunOptions, *, comm: Comm, terminal: Terminal
) -> CheckpointRequest:
    num_writes = request.model.workload.checkpoint.num_checkpoints_write
    # What gates read and write is not part of the run, so it stays out of its trace.
    environment = untraced(request.environment)
    preflight = PreflightRequest(
        environment=request.environment,
        uri=options.destination,
        reopen=partial(
            open_storage, options.destination, environment, options=options.storage.values, rank=comm.rank
        ),
        results=request.results,
        results_option=options.results.folder_option,
        written_bytes=int(request.layout.bytes_of_processes()[comm.rank]) * num_writes,
    )
    is_strict = options.results.rules.division is not None
    inspection = inspect_gates(preflight, options.gates, is_strict=is_strict, comm=comm, terminal=terminal)
    return replace(request, inspection=inspection)


def _run_submitted(
    request: CheckpointRequest,
    options: CheckpointRunOptions,
    submitted: SubmissionEntry,
    *,
    comm: Comm,
    terminal: Terminal,
) -> CheckpointResult:
    from penstock.submission.edition import load_edition
    from penstock.workflows.submission.result_draft import RunObserver, add_checkpoints

    request = replace(request, model=replace(request.model, workload=submitted.located.workload))
    with terminal.progress() as progress:
        result = add_checkpoints(
            open_session(submitted, options.model.settings, comm=comm),
            request,
            _opener(request, options.destination, options.storage.values, comm),
            accelerator=options.accelerator,
            edition=load_edition("v3.0"),
            comm=comm,
            observer=RunObserver(
                progress=progress, note=terminal.note, format_logs=capture_checkpoint_output
            ),
        )
    terminal.notes(checkpoint_warnings(result))
    return result


def perform_run(
    request: CheckpointRequest,
    uri: str,
    storage_options: Mapping[str, str],
    *,
    comm: Comm,
    terminal: Terminal,
) -> CheckpointResult:
    """Run the request on the storage at `uri`; prints what keeps its figures from being the storage's."""
    from penstock.bench.checkpoint.checkpoint_run import run_checkpoints

    with terminal.progress() as progress:
        result = run_checkpoints(
            request,
            _opener(request, uri, storage_options, comm),
            comm=comm,
            progress=progress,
            tell=terminal.note,
        )
    terminal.notes(checkpoint_warnings(result))
    return result


def _opener(
    request: CheckpointRequest, uri: str, storage_options: Mapping[str, str], comm: Comm
) -> OpenStorage:
    """A function that opens the storage for checkpoints, as durable as the request says."""
    from penstock.bench.training.training_checkpoints import durability_options

    durable = durability_options(uri, fsync=request.model.workload.checkpoint.fsync)
    return partial(
        open_storage, uri, request.environment, options={**durable, **storage_options}, rank=comm.rank
    )
