"""`penstock checkpoint flush`: make durable what was handed over to a cache's daemon, and wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.checkpoint.levels.flush.flusher import FlushState

NOT_FLUSHED = 1


def flush(
    cache: Annotated[list[str], typer.Argument(metavar="CACHE...", help="Caches that can be reached here.")],
    *,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Give up when nothing has moved for so long.")
    ] = "30min",
    as_json: JsonFlag = False,
) -> None:
    """Make durable what was handed over in CACHE and is not yet durable: after a crash, or before a job ends.

    Starts the cache's daemon if none runs, and waits for it. Ctrl-C ends only the waiting. A step of several
    nodes becomes durable when the daemons of all of them have copied their shares, so run this on each.
    Exits with 1 if a step is not durable in the end.

    Examples:

      penstock checkpoint flush /local/ssd/run

      srun --ntasks-per-node=1 penstock checkpoint flush /local/ssd/run --timeout 2h
    """
    from dataclasses import asdict

    from penstock.checkpoint.levels.cache_tools import cache_folder, drain_caches
    from penstock.units import parse_seconds

    terminal = Terminal(as_json=as_json)
    folders = [cache_folder(path) for path in cache]
    with terminal.progress() as progress:
        found = drain_caches(folders, progress, timeout_s=parse_seconds(timeout))
    rows = [_row(folder, step, state) for folder, states in found.items() for step, state in states.items()]
    document = {
        str(folder): {step: asdict(state) for step, state in states.items()}
        for folder, states in found.items()
    }
    terminal.result({"caches": document}, table("flushed", rows))
    left = [(step, state) for states in found.values() for step, state in states.items() if not state.is_over]
    for step, state in left:
        terminal.note(f"step {step} is not durable: {state.reason or state.phase}")
    if left:
        raise typer.Exit(NOT_FLUSHED)


def _row(folder: Path, step: int, state: FlushState) -> dict[str, str]:
    from penstock.units import format_bytes

    return {
        "cache": str(folder),
        "step": str(step),
        "state": state.phase,
        "size": format_bytes(state.size_bytes),
        "copied": format_bytes(state.copied_bytes),
    }
