"""`penstock doctor`: what is installed and usable here."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cluster.doctor import Diagnosis

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(
    at: Annotated[
        Path,
        typer.Option(
            "--at", metavar="FOLDER", exists=True, file_okay=False, help="Look at this file system."
        ),
    ] = Path(),
    *,
    as_json: JsonFlag = False,
) -> None:
    """Tell what is installed and usable here, with a fix for each lack.

    Exits with 0: a lack is a fact about this machine, not a failure of the examination.

    Examples:

      penstock doctor

      penstock doctor --at /mnt/pfs --json
    """
    from dataclasses import asdict

    from penstock.cluster.doctor import examine
    from penstock.environment import process_environment

    found = list(examine(at, process_environment()))
    Terminal(as_json=as_json).result(
        {"diagnoses": [asdict(seen) for seen in found]}, lambda console: _draw(console, found)
    )


def _draw(console: Console, found: list[Diagnosis]) -> None:
    """Findings under their area; a lack is followed by its fix."""
    from rich.markup import escape

    width = max(len(seen.subject) for seen in found)
    for area, members in groupby(found, key=lambda seen: seen.area):
        console.print(f"[bold]{area}[/bold]")
        for seen in members:
            state = f"[{_COLOURS[seen.state]}]{seen.state:<8}[/]"
            console.print(f"  {state} {seen.subject:<{width}}  {escape(seen.found)}")
            if seen.fix:
                console.print(f"  {'':<8} {'':<{width}}  [italic]{escape(seen.fix)}[/italic]")
    states: list[str] = [seen.state for seen in found]
    console.print(", ".join(f"{states.count(state)} {state}" for state in _COLOURS))
