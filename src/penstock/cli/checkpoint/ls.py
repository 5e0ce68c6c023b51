"""`penstock checkpoint ls`: the checkpoints of a run, their sizes, ages and states."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from penstock.checkpoint.inspection import Listed


def list_checkpoints(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A run's folder or URI, or one checkpoint.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """List the checkpoints in PATH: step, state, size, age.

    The state comes from metadata, manifest and file sizes: committed, no sums (of another writer), damaged.
    Only `penstock checkpoint verify` reads all bytes.

    Examples:

      penstock checkpoint ls /pfs/run

      penstock checkpoint ls s3://bucket/run --json
    """
    from dataclasses import asdict

    from penstock.checkpoint import inspection

    terminal = Terminal(as_json=as_json)
    found = inspection.list_checkpoints(path)
    now_s = time.time()
    rows = [_row(one, now_s) for one in found]
    for one in found:
        if one.complaint:
            terminal.note(f"{one.name}: {one.complaint}")
    terminal.result({"path": path, "checkpoints": [asdict(one) for one in found]}, table(path, rows))


def _row(one: Listed, now_s: float) -> dict[str, str]:
    from penstock.units import format_bytes, format_seconds

    return {
        "checkpoint": one.name,
        "step": "-" if one.step is None else str(one.step),
        "state": one.state.value,
        "size": format_bytes(one.size_bytes),
        "files": str(one.num_files),
        "tensors": str(one.num_tensors),
        "age": format_seconds(max(now_s - one.modified_s, 0.0)),
    }
