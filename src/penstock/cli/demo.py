"""`penstock demo`: a tour of the system on this machine's disk, about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.workflows.demo import Tour


def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where to work and to leave report.html.")
    ] = Path("penstock-demo"),
    *,
    as_json: JsonFlag = False,
) -> None:
    """Tour the system on this machine's disk: about a minute, a table, and a page to keep.

    Examples:

      penstock demo

      penstock demo --out /mnt/pfs/demo --json
    """
    from penstock.environment import process_environment
    from penstock.workflows.demo import tour

    terminal = Terminal(as_json=as_json)
    terminal.note(
        f"A tour at {out.resolve()}: what this storage can do at best, training, and checkpoints ..."
    )
    with terminal.progress() as progress:
        seen = tour(out, environment=process_environment(), progress=progress)
    for remark in seen.probe.notes:
        terminal.note(remark)
    terminal.result(seen.document(), lambda console: _draw(console, seen))
    terminal.note(f"The whole report: {seen.report}")


def _draw(console: Console, seen: Tour) -> None:
    from penstock.bench.probe.measurement import headline_rows
    from penstock.workflows.demo import checkpoint_rows, training_rows

    table(f"The limits of {seen.probe.uri}", headline_rows(seen.probe.measurements))(console)
    table(f"Training {seen.training.workload}, small", training_rows(seen.training))(console)
    table(f"Checkpoints of {seen.checkpoints.model}, small", checkpoint_rows(seen.checkpoints))(console)
