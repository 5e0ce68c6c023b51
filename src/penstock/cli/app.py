"""The root of the command line, and its edge: every error becomes one paragraph and an exit code here.

Exit codes: 0 ok; 1 the thing measured or checked failed; 2 wrong usage; 3 this machine lacks something;
70 a defect of Penstock itself; 130 interrupted. Modules imported here import nothing heavy at their top.
"""

from __future__ import annotations

import sys
import traceback as traceback_module
from collections.abc import Callable
from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import (
    checkpoint,
    cluster,
    demo,
    doctor,
    results,
    storage,
    submission,
    trace,
    training,
    workloads,
)
from penstock.cli.terminal import clear_progress
from penstock.errors import PenstockError
from penstock.extras import missing_library

DEFECT = 70
INTERRUPTED = 130

EXIT_CODES = (
    "Exit codes: 0 ok; 1 the thing measured or checked failed; 2 wrong usage; "
    "3 this machine lacks something; 70 a defect of Penstock itself; 130 interrupted."
)

app = typer.Typer(
    name="penstock",
    help="Measure, explain and speed up the path between storage and accelerators.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(training.app, name="training")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(trace.app, name="trace")
app.add_typer(storage.app, name="storage")
app.add_typer(results.app, name="results")
app.add_typer(cluster.app, name="cluster")
app.add_typer(submission.app, name="submission")
app.command(name="workloads")(workloads.workloads)
app.command(name="doctor")(doctor.doctor)
app.command(name="demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with every error.")] = False,
) -> None:
    """Options that stand before the noun; `main` has acted on both before this is called."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    words, debug = take_debug(sys.argv[1:] if arguments is None else arguments)
    return at_the_edge(lambda: app(words, prog_name="penstock", obj=words), debug=debug)


def at_the_edge(program: Callable[[], object], *, debug: bool) -> int:
    """Run a program of ours to its exit code, and explain whatever ends it."""
    try:
        program()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
        return _explain("interrupted", code) if code == INTERRUPTED else code
    except PenstockError as error:
        return _explain(str(error), error.exit_code, traceback=debug)
    except ModuleNotFoundError as error:
        missing = missing_library(error)
        if missing is None:
            return _explain_defect(error, traceback=debug)
        return _explain(str(missing), missing.exit_code, traceback=debug)
    except Exception as error:  # noqa: BLE001 - the command line's edge: whatever arrives here is our defect
        return _explain_defect(error, traceback=debug)
    return 0


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` is understood anywhere before a `--`, because one adds it to the end of what just failed."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(own) :]
    return [word for word in own if word != "--debug"] + rest, "--debug" in own


def _explain_defect(error: Exception, *, traceback: bool) -> int:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = "Please report it together with what the same command prints under --debug."
    return _explain(f"a defect in Penstock itself: {what}. {advice}", DEFECT, traceback=traceback)


def _explain(message: str, exit_code: int, *, traceback: bool = False) -> int:
    clear_progress()
    if traceback:
        traceback_module.print_exc()
    print(f"penstock: {message}", file=sys.stderr)
    return exit_code
