"""`penstock checkpoint run`, `size` and `models`: the checkpoint benchmark, and how much it writes.

`penstock submission run checkpointing` calls `run_checkpoint_benchmark`; `penstock-dlio` builds its own
request and calls `perform_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.option_groups import (
    CLOSED_GATES,
    SKIPPED_GATES,
    STORAGE,
    inspect_gates,
    parse_overrides,
)
from penstock.cli.options import (
    argument,
    command_line,
    flag,
    group,
    option,
    refuse_ignored,
    repeated,
    required,
    switch,
    verb,
)
from penstock.cli.parsers import MODEL, SCALE, SETTING, SIZE, TEXT, TIME, URI, choice, whole
from penstock.cli.rank_options import followed
from penstock.cli.run_reports import capture_checkpoint_output, checkpoint_warnings, view_checkpoints
from penstock.cli.submission_options import ResultOptions, open_session, parse_changes
from penstock.cli.terminal import Line, Terminal, table
from penstock.cluster.comm import Comm, held_on_rank0
from penstock.cluster.gates.gate_model import Gate, PreflightRequest
from penstock.environment import process_environment, untraced
from penstock.storage import open_storage
from penstock.submission.authoring import preflight
from penstock.submission.tree_layout import Benchmark
from penstock.units import format_bytes, format_count
from penstock.workload.mlperf_divisions import SubmissionDivision

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.bench.state_layout import StateLayout
    from penstock.workload.load_workload import CheckpointModel

WRONG_BYTES = 1
GIB = 2**30
GB = 10**9
MODEL_NAME: Final = argument(
    "MODEL", MODEL, "Shipped model (see `penstock checkpoint models`) or a YAML file."
)
_SETTINGS: Final = repeated("--set", SETTING, "Override a setting of the model, e.g. model.num_layers=4.")


@dataclass(frozen=True, kw_only=True)
class CheckpointRunOptions:
    """All options of a checkpoint run."""

    model: str = MODEL_NAME
    settings: tuple[str, ...] = _SETTINGS
    destination: str = required(
        "--to", URI, "Location of the checkpoints: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: tuple[tuple[str, str], ...] = STORAGE
    results: ResultOptions = group(ResultOptions)
    scale: Fraction = option(
        "--scale", SCALE, "Multiply the size of every file by this factor, e.g. 0.01.", default="1"
    )
    writes: int | None = option(
        "--writes", whole(0), "Number of checkpoints to write (default: the model's setting, usually 10)."
    )
    reads: int | None = option(
        "--reads", whole(0), "Number of checkpoints to read back (default: the model's setting, usually 10)."
    )
    is_subset: bool = flag("--subset", "With --ranks N, write only the files of the model's first N ranks.")
    fsync: bool | None = switch(
        "--fsync", "Make every file durable before its write counts as done (default: the model's setting)."
    )
    interval_s: float | None = option(
        "--interval", TIME, "Pause between two checkpoints (default: the model's setting, usually 5s)."
    )
    streams: int = option("--streams", whole(1), "Maximum files in flight per rank.", default="2")
    chunk_bytes: int = option("--chunk", SIZE, "Size of an I/O request.", default="16MiB")
    buffer_bytes: int = option("--buffer-memory", SIZE, "Maximum buffer memory per rank.", default="256MiB")
    verify: str = option(
        "--verify",
        choice("full", "sample", "off"),
        "Verify all bytes that are read, a sample of them, or none.",
        default="full",
    )
    seed: int | None = option("--seed", whole(0), "Seed of the contents (default: random for each run).")
    resumes: bool = flag("--resume", "Continue an interrupted run: keep its complete checkpoints.")
    removes: bool = flag("--remove", "Delete the checkpoints at the end.")
    skipped_gates: tuple[Gate, ...] = SKIPPED_GATES
    accelerator: str = option(
        "--accelerator",
        TEXT,
        "Accelerator that each rank stands for: b200 or mi355; required with --submission.",
        default="",
    )


@followed
def run(
    comm: Comm,
    terminal: Terminal,
    *,
    options: CheckpointRunOptions = group(CheckpointRunOptions),
) -> int:
    r"""Write checkpoints of a model, read them back, and report the throughput of both.

    A write ends when its last byte is durable. Before a read, every node evicts the checkpoint's files from
    its page cache. Every byte read is verified. Unless --remove is given, the checkpoints remain on storage,
    so that a later run can read them with `--writes 0`.

    Examples:

      penstock checkpoint run llama3-8b --to direct:///mnt/pfs/ckpt --results runs --ranks 8

      penstock checkpoint run llama3-8b --to ./ckpt --results runs --scale 0.01 --writes 2 --reads 2 --json

      penstock checkpoint run llama3-8b --to /mnt/ckpt --ranks 8 --closed --accelerator b200 \
        --submission ~/results --system fast
    """
    result = run_checkpoint_benchmark(options, comm=comm, terminal=terminal)
    if result is None:
        return CLOSED_GATES
    terminal.result(result.document(), view_checkpoints(result))
    return 0 if result.is_right else WRONG_BYTES


def run_checkpoint_benchmark(
    options: CheckpointRunOptions, *, comm: Comm, terminal: Terminal
) -> CheckpointResult | None:
    """Write and read checkpoints according to the options; return None if a closed gate stopped the run."""
    from penstock.bench.checkpoint.checkpoint_run import CheckpointRequest
    from penstock.storage.volumes import locked_folder
    from penstock.submission.edition import load_edition
    from penstock.transfer.pipeline import PipelineSettings
    from penstock.workflows.submission_results import add_checkpoints

    environment, storage_options = process_environment(), dict(options.storage)
    model, layout = plan_model(options, ranks=comm.size)
    division = options.results.rules.division
    series = options.results.find_series(benchmark=Benchmark.CHECKPOINTING, model=model.workload.full_name)
    num_writes = model.workload.checkpoint.num_checkpoints_write
    inspection = inspect_gates(
        PreflightRequest(
            environment=environment,
            uri=options.destination,
            # The reads and writes of the gates are not part of the run, so they stay out of its trace.
            reopen=partial(
                open_storage,
                options.destination,
                untraced(environment),
                options=storage_options,
                rank=comm.rank,
            ),
            results=options.results.folder,
            results_option=options.results.folder_option,
            written_bytes=int(layout.bytes_of_processes()[comm.rank]) * num_writes,
        ),
        options.skipped_gates,
        is_strict=division is not None,
        comm=comm,
        terminal=terminal,
    )
    if inspection.preflight.is_stopped:
        return None
    terminal.notes(model.remarks)
    request = CheckpointRequest(
        model=model,
        layout=layout,
        scale=options.scale,
        pipe=PipelineSettings(
            streams=options.streams,
            chunk_bytes=options.chunk_bytes,
            buffer_memory_bytes=options.buffer_bytes,
            verify=options.verify,  # type: ignore[arg-type]  # one of the three words
        ),
        results=options.results.folder,
        seed=options.seed,
        resumes=options.resumes,
        removes=options.removes,
        command=command_line(),
        environment=environment,
        overrides=tuple(f"++workload.{text}" for text in options.settings),
        remarks=model.remarks,
        inspection=inspection,
    )
    if series is None:
        return perform_run(request, options.destination, storage_options, comm=comm, terminal=terminal)
    located = preflight.locate_checkpoints(model.workload, options.destination)
    request = replace(request, model=replace(model, workload=located.workload))
    lock = locked_folder(series.tree.root)
    with held_on_rank0(comm, lock, awaiting="rank 0 to lock the tree"), terminal.progress() as progress:
        result = add_checkpoints(
            open_session(
                series, located, options.settings, rehearsed_at=options.results.rehearsed_at, comm=comm
            ),
            request,
            _opener(request, options.destination, storage_options, comm),
            accelerator=options.accelerator,
            edition=load_edition("v3.0"),
            comm=comm,
            progress=progress,
            note=terminal.note,
            format_logs=capture_checkpoint_output,
        )
    terminal.notes(checkpoint_warnings(result))
    return result


def plan_model(options: CheckpointRunOptions, *, ranks: int) -> tuple[CheckpointModel, StateLayout]:
    """Return the requested model and its layout on `ranks` ranks; refuse what the division forbids."""
    from penstock.bench.checkpoint.checkpoint_run import change_checkpoint_section
    from penstock.workload.load_workload import load_model

    model = change_checkpoint_section(
        load_model(options.model, overrides=parse_overrides(options.settings)),
        num_checkpoints_write=options.writes,
        num_checkpoints_read=options.reads,
        fsync=options.fsync,
        time_between_checkpoints_s=options.interval_s,
        mode="subset" if options.is_subset else None,
        checkpoint_folder=options.destination,
    )
    layout = plan_model_layout(model, ranks=ranks, scale=options.scale, is_subset=options.is_subset)
    if (division := options.results.rules.division) is not None:
        _require_allowed(options, model, layout, division)
    elif options.results.tree is None:
        refuse_ignored(
            ("--accelerator",), "the run is not submitted", fix="Leave it out, or add --submission DIR."
        )
    return model, layout


def plan_model_layout(
    model: CheckpointModel, *, ranks: int | None, scale: Fraction, is_subset: bool
) -> StateLayout:
    """Lay out the model's files on `ranks` ranks, or on the model's own number of ranks."""
    from penstock.bench.state_layout import plan_layout
    from penstock.workload.enums import CheckpointMode

    mode = CheckpointMode.SUBSET if is_subset else model.workload.checkpoint.mode
    return plan_layout(model, num_processes=ranks, scale=scale, mode=mode)


def _require_allowed(
    options: CheckpointRunOptions, model: CheckpointModel, layout: StateLayout, division: SubmissionDivision
) -> None:
    from penstock.submission.edition import load_edition

    checkpoint = model.workload.checkpoint
    by_option = {"checkpoint.fsync": options.fsync, "checkpoint.time_between_checkpoints": options.interval_s}
    changed = [
        *parse_changes(options.settings),
        *(key for key, value in by_option.items() if value is not None),
    ]
    breaches = preflight.checkpoint_breaches(
        load_edition("v3.0"),
        division,
        model=model.workload.full_name,
        accelerator=options.accelerator,
        num_processes=layout.num_processes,
        num_writes=checkpoint.num_checkpoints_write,
        num_reads=checkpoint.num_checkpoints_read,
        is_subset=layout.is_subset,
        # A rehearsal does everything that a real result requires, at a smaller scale.
        scale=Fraction(1) if options.results.rehearsed_at else options.scale,
        changed=changed,
        size_gib=layout.full_bytes / 2**30,
    )
    preflight.require_none(breaches, f"--{division.value}")


def perform_run(
    request: CheckpointRequest,
    uri: str,
    storage_options: Mapping[str, str],
    *,
    comm: Comm,
    terminal: Terminal,
) -> CheckpointResult:
    """Run the request on the storage at `uri`, and print any reason to doubt its figures."""
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
    """Return a function that opens the storage at `uri` with the durability that the request specifies."""
    from penstock.bench.training.training_checkpoints import durability_options

    durable = durability_options(uri, fsync=request.model.workload.checkpoint.fsync)
    return partial(
        open_storage, uri, request.environment, options={**durable, **storage_options}, rank=comm.rank
    )


@verb
def size(
    terminal: Terminal,
    *,
    name: str = MODEL_NAME,
    settings: tuple[str, ...] = _SETTINGS,
    ranks: int | None = option(
        "--ranks", whole(1), "Number of ranks to divide the model among (default: the model's own number)."
    ),
    scale: Fraction = option(
        "--scale", SCALE, "Multiply the size of every file by this factor, e.g. 0.01.", default="1"
    ),
    is_subset: bool = flag("--subset", "With --ranks N, count only the files of the model's first N ranks."),
) -> None:
    """Calculate the files and bytes that each rank writes, and show how the total is calculated.

    Examples:

      penstock checkpoint size llama3-70b --ranks 64

      penstock checkpoint size llama3-8b --scale 0.01 --ranks 2 --json
    """
    from penstock.workload.load_workload import load_model

    if ranks is None:
        refuse_ignored(("--subset",), "all ranks of the model are counted", fix="Add --ranks N.")
    model = load_model(name, overrides=parse_overrides(settings))
    terminal.notes(model.remarks)
    layout = plan_model_layout(model, ranks=ranks, scale=scale, is_subset=is_subset)
    mesh, total = layout.mesh, layout.total_bytes
    num_kept = model.workload.checkpoint.num_checkpoints_write or 1
    bytes_of_ranks: list[int] = layout.bytes_of_processes().tolist()
    files_of_ranks = [list(layout.files_of(rank)) for rank in range(len(bytes_of_ranks))]
    proof = _proof(model, layout, scale=scale, num_kept=num_kept)
    document = {
        "model": model.workload.full_name,
        "parameters": layout.num_parameters,
        "parallelism": {
            "tensor": mesh.tensor,
            "pipeline": mesh.pipeline,
            "data": mesh.data,
            "zero_stage": model.workload.model.parallelism.zero_stage,
        },
        "is_subset": layout.is_subset,
        "is_folded": layout.is_folded,
        "total_bytes": total,
        "total_gib": total / GIB,
        "total_gb": total / GB,
        "checkpoints": num_kept,
        "all_checkpoints_bytes": num_kept * total,
        "all_checkpoints_gib": num_kept * total / GIB,
        "ranks": [
            {
                "rank": rank,
                "bytes": size_bytes,
                "files": [{"name": file.key, "bytes": file.size_bytes} for file in files],
            }
            for rank, (size_bytes, files) in enumerate(zip(bytes_of_ranks, files_of_ranks, strict=True))
        ],
        "proof": proof,
    }
    # One row for each sequence of adjacent ranks that write the same amounts.
    rows = []
    amounts = zip(bytes_of_ranks, map(len, files_of_ranks), strict=True)
    for (size_bytes, num_files), members in groupby(enumerate(amounts), key=lambda numbered: numbered[1]):
        alike = [rank for rank, _ in members]
        rows.append(
            {
                "rank": f"{alike[0]}" if len(alike) == 1 else f"{alike[0]} to {alike[-1]}",
                "files": f"{num_files:,}",
                "GiB each": f"{size_bytes / GIB:,.3f}",
                "GB each": f"{size_bytes / GB:,.3f}",
            }
        )
    terminal.result(document, [*table(f"A checkpoint of {model.workload.full_name}", rows), *proof])


def _proof(model: CheckpointModel, layout: StateLayout, *, scale: Fraction, num_kept: int) -> list[str]:
    """Return the calculation of the total, one sentence per step."""
    from penstock.bench.state_layout import DATATYPE_BYTES, OPTIMIZER_STATES

    total, mesh, described = layout.total_bytes, layout.mesh, model.workload.model
    lines = []
    if layout.num_parameters is not None:
        weight, optimizer = described.model_datatype, described.optimizer_datatype
        weight_bytes, state_bytes = DATATYPE_BYTES[weight], DATATYPE_BYTES[optimizer]
        all_bytes = layout.num_parameters * (weight_bytes + OPTIMIZER_STATES * state_bytes)
        lines.append(
            f"{layout.num_parameters:,} parameters x ({weight_bytes} B {weight.value} + "
            f"{OPTIMIZER_STATES} x {state_bytes} B {optimizer.value}) = {all_bytes:,} B"
        )
    if scale != 1:
        lines.append(f"{float(scale):g} of every file's bytes is written: {total:,} B")
    if not model.files:
        lines.append(
            f"{format_count(mesh.num_ranks, 'rank')}: tensor {mesh.tensor} x pipeline {mesh.pipeline} x "
            f"data {mesh.data}, "
            f"ZeRO {described.parallelism.zero_stage}"
        )
    if layout.is_subset:
        lines.append(f"a subset: the first {layout.num_carried:,} of them write, and no others")
    if layout.is_folded:
        lines.append(f"{layout.num_processes:,} processes carry {layout.num_carried:,} ranks, several each")
    lines.append(
        f"one checkpoint: {total:,} B = {total / GIB:,.4f} GiB = {total / GB:,.4f} GB in "
        f"{format_count(layout.num_files, 'file')}"
    )
    if num_kept > 1:
        lines.append(
            f"{format_count(num_kept, 'checkpoint')}: {num_kept * total:,} B = "
            f"{num_kept * total / GIB:,.14g} GiB"
        )
    return lines


@verb
def models(terminal: Terminal) -> None:
    """List the models and the sizes of their checkpoints.

    Examples:

      penstock checkpoint models

      penstock checkpoint models --json
    """
    from penstock.workload.load_workload import load_model
    from penstock.workload.shipped_catalog import cards

    entries: list[dict[str, Any]] = []
    lines: list[Line] = []
    for name, card in cards().items():
        model = load_model(name)
        layout = plan_model_layout(model, ranks=None, scale=Fraction(1), is_subset=False)
        split = model.workload.model.parallelism
        entries.append(
            {
                "name": name,
                "also": list(card.aliases),
                "about": model.about,
                "ranks": layout.num_processes,
                "tensor": split.tensor,
                "pipeline": split.pipeline,
                "data": layout.mesh.data,
                "zero_stage": split.zero_stage,
                "parameters": layout.num_parameters,
                "files": layout.num_files,
                "total_bytes": layout.total_bytes,
            }
        )
        size_text = format_bytes(layout.total_bytes)
        also = f" (DLIO's {', '.join(card.aliases)})" if card.aliases else ""
        lines += [
            [(name, "bold"), also],
            [("  " + model.about, "italic")],
            (
                f"  {size_text} in {format_count(layout.num_files, 'file')} of "
                f"{format_count(layout.num_processes, 'rank')}"
            ),
        ]
    terminal.result({"models": entries}, lines)
