"""`penstock checkpoint size`: what each rank writes of a checkpoint, with the proof of the total."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.checkpoint.words import (
    ModelName,
    Scale,
    Settings,
    Subset,
    layout_of,
    model_of,
    parse_scale,
)
from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.model_state import StateLayout
    from penstock.workload.checkpoint_model import CheckpointModel

GIB = 2**30
GB = 10**9


def size(
    model: ModelName,
    *,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, metavar="N", help="Else as many as it is laid out for.")
    ] = None,
    scale: Scale = "1",
    subset: Subset = False,
    checkpoints: Annotated[
        int | None, typer.Option("--checkpoints", min=1, help="How many are kept; else as the model says.")
    ] = None,
    settings: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell what a checkpoint holds: each rank's files and bytes, their total, and how it follows.

    Examples:

      penstock checkpoint size llama3-70b --ranks 64

      penstock checkpoint size llama3-8b --scale 0.01 --ranks 2 --json
    """
    terminal = Terminal(as_json=as_json)
    asked = model_of(model, settings)
    for remark in asked.remarks:
        terminal.note(str(remark))
    share = parse_scale(scale)
    layout = layout_of(asked, ranks=ranks, scale=share, subset=subset)
    kept = checkpoints or asked.workload.checkpoint.num_checkpoints_write or 1
    proof = _proof(asked, layout, scale=scale, kept=kept)
    document = _document(asked, layout, kept=kept) | {"proof": proof}
    terminal.result(document, lambda console: _draw(console, asked, layout, proof))


def _document(model: CheckpointModel, layout: StateLayout, *, kept: int) -> dict[str, Any]:
    split = layout.mesh
    return {
        "model": model.name,
        "parameters": layout.num_parameters,
        "parallelism": {
            "tensor": split.tensor,
            "pipeline": split.pipeline,
            "data": split.data,
            "zero_stage": model.workload.model.parallelism.zero_stage,
        },
        "is_subset": layout.is_subset,
        "is_folded": layout.is_folded,
        "total_bytes": layout.total_bytes,
        "total_gib": layout.total_bytes / GIB,
        "total_gb": layout.total_bytes / GB,
        "checkpoints": kept,
        "all_checkpoints_bytes": kept * layout.total_bytes,
        "all_checkpoints_gib": kept * layout.total_bytes / GIB,
        "ranks": [
            {
                "rank": rank,
                "bytes": size_bytes,
                "files": [{"name": file.name, "bytes": file.size_bytes} for file in layout.files_of(rank)],
            }
            for rank, size_bytes in enumerate(layout.bytes_of_processes().tolist())
        ],
    }


def _proof(model: CheckpointModel, layout: StateLayout, *, scale: str, kept: int) -> list[str]:
    """How the total follows, a sentence a step."""
    from penstock.bench.model_state.layout_planner import DATATYPE_BYTES, OPTIMIZER_STATES

    spec, total = model.workload.model, layout.total_bytes
    lines = []
    if layout.num_parameters is not None:
        held, kept_in_optimizer = spec.model_datatype, spec.optimizer_datatype
        each = DATATYPE_BYTES[held] + OPTIMIZER_STATES * DATATYPE_BYTES[kept_in_optimizer]
        lines.append(
            f"{layout.num_parameters:,} parameters x ({DATATYPE_BYTES[held]} B {held.value} + "
            f"{OPTIMIZER_STATES} x {DATATYPE_BYTES[kept_in_optimizer]} B {kept_in_optimizer.value}) = "
            f"{layout.num_parameters * each:,} B"
        )
    if scale not in ("1", "1.0"):
        lines.append(f"{scale} of every file's bytes is written: {total:,} B")
    mesh = layout.mesh
    if not model.files:
        lines.append(
            f"{mesh.num_ranks:,} ranks: tensor {mesh.tensor} x pipeline {mesh.pipeline} x data {mesh.data}, "
            f"ZeRO {spec.parallelism.zero_stage}"
        )
    if layout.is_subset:
        lines.append(f"a subset: the first {layout.num_carried:,} of them write, and no others")
    if layout.is_folded:
        lines.append(f"{layout.num_processes:,} processes carry {layout.num_carried:,} ranks, several each")
    lines.append(
        f"one checkpoint: {total:,} B = {total / GIB:,.4f} GiB = {total / GB:,.4f} GB in "
        f"{layout.num_files:,} files"
    )
    if kept > 1:
        lines.append(f"{kept} checkpoints: {kept * total:,} B = {kept * total / GIB:,.14g} GiB")
    return lines


def _draw(console: Console, model: CheckpointModel, layout: StateLayout, proof: list[str]) -> None:
    rows = []
    numbered = [
        (f"{size_bytes / GIB:,.3f}", f"{size_bytes / GB:,.3f}", f"{_num_files(layout, rank):,}", rank)
        for rank, size_bytes in enumerate(layout.bytes_of_processes().tolist())
    ]
    for (gib, gb, files), members in groupby(numbered, key=lambda row: row[:3]):
        alike = [rank for *_, rank in members]
        ranks = f"{alike[0]}" if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        rows.append({"rank": ranks, "files": files, "GiB each": gib, "GB each": gb})
    table(f"A checkpoint of {model.name}", rows)(console)
    for line in proof:
        console.print(line)


def _num_files(layout: StateLayout, rank: int) -> int:
    return sum(1 for _ in layout.files_of(rank))
