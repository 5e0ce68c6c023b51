"""`penstock trace record`: trace the I/O of any program from outside."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.options import arguments, option, repeated, verb
from penstock.cli.parsers import FOLDER, FOLDER_URI, TEXT, choice
from penstock.cli.terminal import Terminal


@dataclass(frozen=True, kw_only=True)
class _RecordOptions:
    command: tuple[str, ...] = arguments(
        "[--] COMMAND...", TEXT, "Program to run, and its arguments.", is_required=False
    )
    out: Path = option("--out", FOLDER, "Directory for the trace.", default="traces", short="-o")
    tracer: str = option(
        "--tracer",
        choice("auto", "dftracer", "strace"),
        "Tracer; auto is dftracer if it is installed, else strace.",
        default="auto",
    )
    folders: tuple[str, ...] = repeated("--data", FOLDER_URI, "Trace only this directory; for dftracer.")


@verb(
    _RecordOptions,
    has_json=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def record(options: _RecordOptions, terminal: Terminal) -> int:  # noqa: ARG001 - the program's output is its own
    """Run a program and trace its I/O, with dftracer if it is installed and with strace otherwise.

    Exits with the program's exit code. Programs that use Penstock's own storage do not need this: they take
    --trace, or PENSTOCK_TRACE=DIR in their environment.

    Examples:

      penstock trace record --out traces -- python train.py --epochs 1

      penstock trace record --tracer strace -- cp model.pt /scratch
    """
    from penstock.trace.capture.external_tracers import TRACERS, plan_recording
    from penstock.trace.capture.external_tracers import record as run_recorded

    folder = options.out.absolute()
    recording = plan_recording(
        list(options.command), folder, tracer=TRACERS[options.tracer], data=options.folders
    )
    print(f"Tracing with {recording.tracer} into {folder}", file=sys.stderr)
    return run_recorded(recording, folder)
