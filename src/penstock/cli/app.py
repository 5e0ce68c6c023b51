"""The root of the command line. Every error ends here, as one paragraph and an exit code.

Exit codes: 0 ok; 1 the thing measured or checked failed; 2 wrong usage; 3 this machine lacks something; 70 a
defect in Penstock itself; 130 interrupted. The modules imported at the top import nothing heavy themselves.
"""

import errno
import logging
import sys
import traceback as traceback_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from penstock import __version__
from penstock.cli.options import Group
from penstock.cli.terminal import clear_progress
from penstock.environment import keep_working_folder_off_path, process_environment
from penstock.errors import PenstockError, UsageError, printable
from penstock.optional_libraries import missing_library

DEFECT = 70
NO_OUTPUT = 3
INTERRUPTED = 130

EXIT_CODES = (
    "Exit codes: 0 ok; 1 the thing measured or checked failed; 2 wrong usage; "
    "3 this machine lacks something; 70 a defect in Penstock itself; 130 interrupted."
)

TRAINING = Group(
    "Benchmark training data loading: how many accelerators can this storage feed?",
    {
        "size": "penstock.cli.training_dataset:size",
        "whatif": "penstock.cli.training_dataset:whatif",
        "generate": "penstock.cli.training_dataset:generate",
        "verify": "penstock.cli.training_dataset:verify",
        "plan": "penstock.cli.training_dataset:plan",
        "run": "penstock.cli.training_benchmark:run",
        "sweep": "penstock.cli.training_benchmark:sweep",
    },
    extra="bench",
)
CHECKPOINT = Group(
    "Benchmark, inspect and manage checkpoints.",
    {
        "convert": "penstock.cli.checkpoint_tools:convert",
        "diff": "penstock.cli.checkpoint_tools:diff",
        "flush": "penstock.cli.checkpoint_manager:flush",
        "halt": "penstock.cli.checkpoint_manager:halt",
        "ls": "penstock.cli.checkpoint_tools:list_checkpoints",
        "models": "penstock.cli.checkpoint_benchmark:models",
        "plan": "penstock.cli.checkpoint_planning:plan",
        "rm": "penstock.cli.checkpoint_tools:remove",
        "run": "penstock.cli.checkpoint_benchmark:run",
        "show": "penstock.cli.checkpoint_tools:show",
        "size": "penstock.cli.checkpoint_benchmark:size",
        "status": "penstock.cli.checkpoint_manager:status",
        "verify": "penstock.cli.checkpoint_tools:verify",
    },
)
TRACE = Group(
    "Record I/O traces and analyze them: where does the time go?",
    {
        "record": "penstock.cli.trace_tables:record",
        "load": "penstock.cli.trace_tables:load",
        "sql": "penstock.cli.trace_tables:sql",
        "summary": "penstock.cli.trace_questions:summary",
        "ops": "penstock.cli.trace_questions:ops",
        "files": "penstock.cli.trace_questions:files",
        "classes": "penstock.cli.trace_questions:classes",
        "sizes": "penstock.cli.trace_questions:sizes",
        "file": "penstock.cli.trace_questions:file",
        "ranks": "penstock.cli.trace_questions:ranks",
        "timeline": "penstock.cli.trace_questions:timeline",
        "overlap": "penstock.cli.trace_questions:overlap",
        "report": "penstock.cli.trace_comparison:report",
        "compare": "penstock.cli.trace_comparison:compare",
        "expect": "penstock.cli.trace_comparison:expect",
        "export": "penstock.cli.trace_tables:export",
    },
    extra="trace",
)
KVCACHE = Group(
    "Plan and measure storage for the key-value caches of LLM inference.",
    {
        "models": "penstock.cli.kvcache_planning:models",
        "size": "penstock.cli.kvcache_planning:size",
        "simulate": "penstock.cli.kvcache_planning:simulate",
        "run": "penstock.cli.kvcache_benchmark:run",
        "replay": "penstock.cli.kvcache_benchmark:replay",
        "compare": "penstock.cli.kvcache_benchmark:compare",
        "inspect": "penstock.cli.kvcache_planning:inspect",
    },
)
RESULTS = Group(
    "List, show, compare, follow and delete recorded runs.",
    {
        "ls": "penstock.cli.results_runs:list_runs",
        "show": "penstock.cli.results_runs:show",
        "page": "penstock.cli.results_runs:page",
        "compare": "penstock.cli.results_runs:compare",
        "watch": "penstock.cli.results_watch:watch",
        "rm": "penstock.cli.results_runs:remove",
    },
)
SUBMISSION = Group(
    "Prepare, run and check MLPerf Storage submissions.",
    {
        "init": "penstock.cli.submission_tree:init",
        "describe": "penstock.cli.submission_tree:describe",
        "rehearse": "penstock.cli.submission_rehearse:rehearse",
        "run": Group(
            "Run a whole benchmark result; run the same command again to continue after an interruption.",
            {
                "checkpointing": "penstock.cli.submission_run:checkpointing",
                "training": "penstock.cli.submission_run:training",
            },
        ),
        "status": "penstock.cli.submission_tree:status",
        "check": "penstock.cli.submission_check:check",
        "report": "penstock.cli.submission_check:report",
        "rules": "penstock.cli.submission_check:rules",
    },
)


def completion_script(command: click.Command) -> str:
    """Return the script that lets the user's shell complete `penstock` command lines."""
    name = Path(process_environment().get("SHELL", "")).name
    completion = get_completion_class(name)
    if completion is None:
        raise UsageError(
            f"No completion for the shell {name or 'of this session'!r}",
            where="SHELL",
            fix="Use bash, zsh or fish.",
        )
    return completion(command, {}, "penstock", "_PENSTOCK_COMPLETE").source()


def _print_and_exit(name: str, make: Callable[[click.Command], str], text: str) -> click.Option:
    """Make an option that prints the string that `make` returns, instead of running a command."""

    def callback(context: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            print(make(context.command))
            context.exit()

    return click.Option([name], is_flag=True, is_eager=True, expose_value=False, callback=callback, help=text)


app = Group(
    "Measure, explain and speed up the I/O path between storage and accelerators.",
    {
        "workloads": "penstock.cli.first_steps:workloads",
        "doctor": "penstock.cli.first_steps:doctor",
        "demo": "penstock.cli.first_steps:demo",
        "docs": "penstock.cli.first_steps:docs",
        "training": TRAINING,
        "checkpoint": CHECKPOINT,
        "kvcache": KVCACHE,
        "trace": TRACE,
        "storage": Group(
            "Measure the limits of a storage system.", {"probe": "penstock.cli.storage_probe:probe"}
        ),
        "results": RESULTS,
        "cluster": Group(
            "Collect and compare the facts of all hosts.",
            {"collect": "penstock.cli.cluster_facts:collect", "check": "penstock.cli.cluster_facts:check"},
        ),
        "submission": SUBMISSION,
    },
    params=[
        _print_and_exit("--version", lambda _: f"penstock {__version__}", "Print the version and exit."),
        click.Option(
            ["--debug"], is_flag=True, expose_value=False, help="Show a traceback with every error."
        ),
        _print_and_exit(
            "--show-completion",
            completion_script,
            'Print the completion script of the current shell; in bash, load it with: eval "$(penstock '
            '--show-completion)"',
        ),
    ],
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


class _SafeFormatter(logging.Formatter):
    """Escapes control characters in warnings, which may quote file names."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (default: the process's own), and return its exit code."""
    words, debug = take_debug(arguments)
    return run_at_edge(
        lambda: app.main(words, prog_name="penstock", standalone_mode=False, obj=words), debug=debug
    )


def run_at_edge(program: Callable[[], Any], *, debug: bool) -> int:
    """Run one of Penstock's programs, explain whatever ends it early, and return its exit code."""
    # This handler prints the warnings of a process without handlers, which commands are.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_SafeFormatter())
    with _opened("stdout"), _opened("stderr"):
        try:
            code = int(program() or 0)
            print(end="", flush=True)  # an error of the output is explained, too
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
            return _explain("interrupted", code) if code == INTERRUPTED else code
        except (KeyboardInterrupt, click.Abort):
            return _explain("interrupted", INTERRUPTED)
        except Exception as error:  # noqa: BLE001 - the command line's edge: every exception is explained here
            return _explain_error(error, traceback=debug)
    return code


class _AbandonablePipe(FileIO):
    """A standard stream that drops what is written after its reader has left, as `| head` does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


@contextmanager
def _opened(name: str) -> Iterator[None]:
    """Print to the stream `name` of `sys` in the body, whatever characters the text has, and read or not.

    Characters that the locale's encoding lacks are printed as escapes, because names in checkpoints may
    contain any character.
    """
    usual = stream = getattr(sys, name)
    if isinstance(stream, TextIOWrapper):
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), FileIO):
            pipe = BufferedWriter(_AbandonablePipe(stream.fileno(), "w", closefd=False))
            lines = stream.line_buffering or stream.write_through
            stream = TextIOWrapper(pipe, stream.encoding, line_buffering=lines)
            setattr(sys, name, stream)
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        setattr(sys, name, usual)
        if stream is not usual:
            with suppress(OSError):
                stream.flush()


def take_debug(arguments: list[str] | None) -> tuple[list[str], bool]:
    """Remove `--debug` from the words before any `--`; return the other words, and whether it was there.

    The flag may stand anywhere, because people append it to a command that failed. None means this process's
    own arguments.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        keep_working_folder_off_path()
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(ours) :]
    return [word for word in ours if word != "--debug"] + rest, "--debug" in ours


def _explain_error(error: Exception, *, traceback: bool) -> int:
    # A missing library that belongs to an extra is not a defect: the user has to install it.
    if isinstance(error, ModuleNotFoundError):
        error = missing_library(error) or error
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        more = f" `{context.command_path} --help` shows what it takes." if context else ""
        return _explain(error.format_message() + more, error.exit_code, traceback=traceback)
    if isinstance(error, PenstockError):
        return _explain(str(error), error.exit_code, traceback=traceback)
    if isinstance(error, OSError) and error.filename is not None:
        # The system refused a path, usually one that the user named: that is a fact about this machine.
        from penstock.storage.files.system_calls import map_os_error

        refused = map_os_error(error, "Opening", str(error.filename))
        return _explain(str(refused), refused.exit_code, traceback=traceback)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Files are opened by name, so an error without a name concerns standard output.
        return _explain(f"The output cannot be written: {error.strerror}", NO_OUTPUT, traceback=traceback)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = "Please report it together with what the same command prints under --debug."
    return _explain(f"a defect in Penstock itself: {what}. {advice}", DEFECT, traceback=traceback)


def _explain(message: str, exit_code: int, *, traceback: bool = False) -> int:
    clear_progress()
    if traceback:
        print(printable(traceback_module.format_exc()), file=sys.stderr, end="")
    # If not even this can be written, the exit code still shows the failure.
    with suppress(OSError):
        print(printable(f"penstock: {message}"), file=sys.stderr, flush=True)
    return exit_code
