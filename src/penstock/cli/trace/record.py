"""`penstock trace record`: any program, traced from outside."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def record(
    context: typer.Context,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Where the trace goes.")] = "traces",
    tracer: Annotated[
        str, typer.Option("--tracer", metavar="NAME", help="auto, dftracer or strace.")
    ] = "auto",
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="DIR", help="With dftracer: trace these folders only; repeatable."),
    ] = None,
) -> None:
    """Run COMMAND and trace its I/O: through dftracer where it is installed, through strace otherwise.

    The exit code is the program's. Programs on Penstock's own storage need none of this: they take --trace,
    or PENSTOCK_TRACE=DIR in their environment.

    Examples:

        penstock trace record --out traces -- python train.py --epochs 1

        penstock trace record --tracer strace -- cp model.pt /scratch
    """
    from pathlib import Path

    from penstock.errors import UsageError
    from penstock.trace.capture.external_tracers import TRACERS, plan_recording
    from penstock.trace.capture.external_tracers import record as run_recorded

    if tracer not in TRACERS:
        raise UsageError(f"--tracer {tracer}: no such tracer", fix=f"Use one of {', '.join(TRACERS)}.")
    folder = Path(out).absolute()
    recording = plan_recording(context.args, folder, tracer=TRACERS[tracer], data=data or ())
    print(f"Tracing with {recording.tracer} into {folder}", file=sys.stderr)
    code = run_recorded(recording, folder)
    if code:
        raise typer.Exit(code)
