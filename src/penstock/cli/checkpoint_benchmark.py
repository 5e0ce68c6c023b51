"""`penstock checkpoint run`, `size` and `models`: the benchmark, and what it writes, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.cli.checkpoint_request import CheckpointRunOptions, run_checkpoint_benchmark
from penstock.cli.option_groups import CLOSED_GATES, ModelOptions, plan_model_layout
from penstock.cli.options import NoOptions, flag, group, option, verb
from penstock.cli.parsers import SCALE, whole
from penstock.cli.rank_options import ranked
from penstock.cli.run_reports import view_checkpoints
from penstock.cli.terminal import Terminal, TextTable, View
from penstock.cluster.comm import Comm
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.bench.state_layout import StateLayout
    from penstock.workload.load_workload import CheckpointModel

WRONG_BYTES = 1
GIB = 2**30
GB = 10**9


@ranked(CheckpointRunOptions, is_followed=True)
def run(options: CheckpointRunOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Write checkpoints of a model, read them back, and report the throughput of both directions.

    A write ends when its last byte is durable; before a read, its files are evicted from the page cache of
    every node. Every byte read is verified. The checkpoints remain, for a later run with `--writes 0`, unless
    --remove is given.

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


@dataclass(frozen=True, kw_only=True)
class _SizeOptions:
    model: ModelOptions = group(ModelOptions)
    ranks: int | None = option(
        "--ranks", whole(1), "Number of ranks to lay the model out on (default: the model's own)."
    )
    scale: Fraction = option("--scale", SCALE, "Share of every file to calculate.", default="1")
    is_subset: bool = flag("--subset", "Use fewer ranks than the model needs; they carry a subset of it.")


@verb(_SizeOptions)
def size(options: _SizeOptions, terminal: Terminal) -> None:
    """Calculate each rank's files and bytes of a checkpoint, and prove the total.

    Examples:

      penstock checkpoint size llama3-70b --ranks 64

      penstock checkpoint size llama3-8b --scale 0.01 --ranks 2 --json
    """
    model = options.model.load()
    terminal.notes(model.remarks)
    layout = plan_model_layout(model, ranks=options.ranks, scale=options.scale, is_subset=options.is_subset)
    num_kept = model.workload.checkpoint.num_checkpoints_write or 1
    proof = _proof(model, layout, scale=options.scale, num_kept=num_kept)
    document = _size_document(model, layout, num_kept=num_kept) | {"proof": proof}
    terminal.result(document, _view_size(model, layout, proof))


def _size_document(model: CheckpointModel, layout: StateLayout, *, num_kept: int) -> dict[str, Any]:
    mesh = layout.mesh
    return {
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
        "total_bytes": layout.total_bytes,
        "total_gib": layout.total_bytes / GIB,
        "total_gb": layout.total_bytes / GB,
        "checkpoints": num_kept,
        "all_checkpoints_bytes": num_kept * layout.total_bytes,
        "all_checkpoints_gib": num_kept * layout.total_bytes / GIB,
        "ranks": [
            {
                "rank": rank,
                "bytes": size_bytes,
                "files": [{"name": file.name, "bytes": file.size_bytes} for file in layout.files_of(rank)],
            }
            for rank, size_bytes in enumerate(layout.bytes_of_processes().tolist())
        ],
    }


def _proof(model: CheckpointModel, layout: StateLayout, *, scale: Fraction, num_kept: int) -> list[str]:
    """The steps from which the total follows, a sentence each."""
    total, mesh = layout.total_bytes, layout.mesh
    lines = [] if layout.num_parameters is None else [_parameter_proof(model, layout.num_parameters)]
    if scale != 1:
        lines.append(f"{float(scale):g} of every file's bytes is written: {total:,} B")
    if not model.files:
        lines.append(
            f"{mesh.num_ranks:,} ranks: tensor {mesh.tensor} x pipeline {mesh.pipeline} x data {mesh.data}, "
            f"ZeRO {model.workload.model.parallelism.zero_stage}"
        )
    if layout.is_subset:
        lines.append(f"a subset: the first {layout.num_carried:,} of them write, and no others")
    if layout.is_folded:
        lines.append(f"{layout.num_processes:,} processes carry {layout.num_carried:,} ranks, several each")
    lines.append(
        f"one checkpoint: {total:,} B = {total / GIB:,.4f} GiB = {total / GB:,.4f} GB in "
        f"{layout.num_files:,} files"
    )
    if num_kept > 1:
        lines.append(f"{num_kept} checkpoints: {num_kept * total:,} B = {num_kept * total / GIB:,.14g} GiB")
    return lines


def _parameter_proof(model: CheckpointModel, num_parameters: int) -> str:
    from penstock.bench.state_layout import DATATYPE_BYTES, OPTIMIZER_STATES

    weights, optimizer = model.workload.model.model_datatype, model.workload.model.optimizer_datatype
    parameter_bytes = DATATYPE_BYTES[weights] + OPTIMIZER_STATES * DATATYPE_BYTES[optimizer]
    return (
        f"{num_parameters:,} parameters x ({DATATYPE_BYTES[weights]} B {weights.value} + "
        f"{OPTIMIZER_STATES} x {DATATYPE_BYTES[optimizer]} B {optimizer.value}) = "
        f"{num_parameters * parameter_bytes:,} B"
    )


def _view_size(model: CheckpointModel, layout: StateLayout, proof: list[str]) -> View:
    """One row for each run of neighbouring ranks that write the same amounts, and the proof."""
    numbered = [
        (f"{size_bytes / GIB:,.3f}", f"{size_bytes / GB:,.3f}", f"{len(list(layout.files_of(rank))):,}", rank)
        for rank, size_bytes in enumerate(layout.bytes_of_processes().tolist())
    ]
    rows = []
    for (gib, gb, files), members in groupby(numbered, key=lambda row: row[:3]):
        alike = [rank for *_, rank in members]
        ranks = f"{alike[0]}" if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        rows.append({"rank": ranks, "files": files, "GiB each": gib, "GB each": gb})
    yield TextTable(f"A checkpoint of {model.workload.full_name}", rows)
    yield from proof


@verb(NoOptions)
def models(_: NoOptions, terminal: Terminal) -> None:
    """List the models whose checkpoints can be written, with their sizes.

    Examples:

      penstock checkpoint models

      penstock checkpoint models --json
    """
    from penstock.workload.shipped_catalog import cards

    entries = [_describe_model(name) for name in cards()]
    terminal.result({"models": entries}, _view_models(entries))


def _describe_model(name: str) -> dict[str, Any]:
    from penstock.workload.load_workload import load_model
    from penstock.workload.shipped_catalog import cards

    model = load_model(name)
    layout = plan_model_layout(model, ranks=None, scale=Fraction(1), is_subset=False)
    split = model.workload.model.parallelism
    return {
        "name": name,
        "also": list(cards()[name].aliases),
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


def _view_models(entries: list[dict[str, Any]]) -> View:
    for model in entries:
        also = f" (DLIO's {', '.join(model['also'])})" if model["also"] else ""
        yield [(model["name"], "bold"), also]
        yield [("  " + model["about"], "italic")]
        size = format_bytes(model["total_bytes"])
        yield f"  {size} in {model['files']:,} files of {model['ranks']:,} ranks"
