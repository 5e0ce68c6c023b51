"""`penstock demo`: a tour of the system on this machine's disk, about a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table


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
    from penstock.bench.probe.rows import headline_rows
    from penstock.campaign.demo import tour
    from penstock.environment import process_environment

    terminal = Terminal(as_json=as_json)
    terminal.note(f"Measuring what the storage at {out.resolve()} can do at best ...")
    with terminal.progress() as progress:
        seen = tour(out, environment=process_environment(), progress=progress)
    for remark in seen.probe.notes:
        terminal.note(remark)
    title = f"The limits of {out.resolve()}"
    terminal.result(seen.document(), table(title, headline_rows(seen.probe.measurements)))
    terminal.note(f"The whole report: {seen.report}")
