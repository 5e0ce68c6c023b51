"""`penstock checkpoint rm`: take a checkpoint away."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal


def remove(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A committed checkpoint's folder or URI.")],
    *,
    even_last: Annotated[
        bool, typer.Option("--even-last", help="Also the last one of its run that is whole.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Believe the files and sizes of those that stay.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove the checkpoint at PATH: its name first, in one durable step, then its files.

    The last whole one of a run is kept, unless --even-last is given: before anything goes, another one is
    verified to its last byte, the newest first.

    Examples:

      penstock checkpoint rm /pfs/run/step-100

      penstock checkpoint rm s3://bucket/run/step-100 --even-last --json
    """
    from dataclasses import asdict

    from penstock.checkpoint.tools import remove
    from penstock.units import format_bytes

    terminal = Terminal(as_json=as_json)
    with terminal.progress() as progress:
        gone = remove.remove(path, even_last=even_last, verified=not no_verify, progress=progress)
    stays = f"; {gone.stays} is whole and stays" if gone.stays else ""
    text = f"removed {gone.uri}: {gone.num_files} files, {format_bytes(gone.size_bytes)}{stays}"
    terminal.result(asdict(gone), lambda console: console.print(text))
