"""Options that the trace commands share, and the answers that they print.

Losses from damaged traces are printed before any answer; with `--strict`, they end the command with an error.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import arguments, flag, option, repeated
from penstock.cli.parsers import TEXT, URI, Parser, choice, new_file
from penstock.cli.terminal import Terminal, TextTable, View, print_json
from penstock.errors import UsageError, name_some
from penstock.trace.questions.answer import Answer

if TYPE_CHECKING:
    from penstock.trace.dimensions import Dimensions, EventsView
    from penstock.trace.event_schema import FileAccount
    from penstock.trace.trace_set import TraceSet

_MAX_COLUMNS = 10
"""A single row with more columns than this is printed with one line per column."""
_ALL_ROWS: Final = "--format csv or --json gives all"


DASK: Final = option(
    "--dask",
    TEXT,
    "Read traces in Dask workers: `local`, or the address of their scheduler (default: in this process).",
    default="",
    metavar="ADDRESS",
)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options for reading trace files."""

    where: str = option(
        "--where", TEXT, "Read only matching events, e.g. \"path LIKE '%ckpt%'\".", default="", metavar="SQL"
    )
    dask: str = DASK
    strict: bool = flag("--strict", "Fail if any part of a trace was lost or guessed.")


@dataclass(frozen=True, kw_only=True)
class TraceOptions(ReadOptions):
    """Trace files, and the options for reading them."""

    files: tuple[str, ...] = arguments(
        "FILES...", URI, "Trace files, directories, globs, or tables of `penstock trace load`."
    )

    @contextmanager
    def open(self, terminal: Terminal, *, rank_pattern: str | None = None) -> Iterator[TraceSet]:
        """Open the traces: show progress, then print what was lost."""
        from penstock.trace.event_schema import RANK_PATTERN
        from penstock.trace.trace_set import open_trace_set

        with ExitStack() as resources:
            with terminal.progress() as progress:
                traces = resources.enter_context(
                    open_trace_set(
                        {"": self.files},
                        progress=progress,
                        where=self.where,
                        rank_pattern=rank_pattern or RANK_PATTERN,
                        dask=self.dask,
                    )
                )
            report_losses(traces.accounts, terminal, strict=self.strict)
            terminal.notes(traces.mismatches())
            yield traces


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(TraceOptions):
    """The traces that a question is about, and the format of its answer."""

    form: str = option(
        "--format", choice("table", "csv", "markdown"), "Print the answer in this format.", default="table"
    )

    def ask(
        self,
        question: Callable[[EventsView], Sequence[Answer]],
        terminal: Terminal,
        dimensions: Dimensions,
    ) -> None:
        """Ask the question and print its answers. In JSON, the first answer is at the top level."""
        from penstock.trace.dimensions import view_events
        from penstock.trace.questions import answer as rendering
        from penstock.trace.trace_set import RELATION

        with self.open(terminal) as traces:
            events = view_events(traces.connection, RELATION, dimensions)
            most_rows = None if terminal.as_json or self.form == "csv" else rendering.MOST_ROWS
            main, *others = answers = question(replace(events, most_rows=most_rows))
            if terminal.as_json:
                document: dict[str, Any] = rendering.document(main)
                if others:
                    document["tables"] = {answer.name: rendering.document(answer) for answer in others}
                if mismatches := traces.mismatches():
                    document["mismatches"] = list(mismatches)
                print_json(document)
            elif self.form == "csv":
                sys.stdout.write("\n".join(map(rendering.as_csv, answers)))
            elif self.form == "markdown":
                sys.stdout.write(
                    "\n".join(
                        rendering.as_markdown(one.first(rendering.MOST_ROWS), _ALL_ROWS) for one in answers
                    )
                )
            else:
                terminal.result({}, chain.from_iterable(view_answer(one, _ALL_ROWS) for one in answers))


def check_output(out: Path, traces: Sequence[str], *, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Refuse to overwrite a trace, or a file that is not of this `kind`, before anything is read.

    An empty file may be overwritten, but not through a link, which others may have made.
    """
    from penstock.trace.reading.trace_files import find_trace_files
    from penstock.trace.trace_set import refuse_overwriting

    new_file(str(out))
    if out.exists():
        refuse_overwriting(
            out,
            find_trace_files(traces),
            kind=kind,
            is_kind=lambda path: (not path.stat().st_size and not path.is_symlink()) or is_kind(path),
        )


def report_losses(accounts: Sequence[FileAccount], terminal: Terminal, *, strict: bool) -> None:
    """Print what was lost from damaged traces. With `strict`, raise an error for it."""
    from penstock.trace.event_schema import refuse_damaged, refuse_lost

    alike: dict[str, list[str]] = {}
    for account in accounts:
        what = account.faults[-1] if account.is_without_events and account.faults else ""
        if what in alike:
            alike[what].append(Path(account.file).name)
            continue
        if what:
            alike[what] = []
        terminal.notes(account.losses())
    terminal.notes(f"{name_some(others)}: {what}" for what, others in alike.items() if others)
    refuse_lost(accounts)
    if strict:
        refuse_damaged(accounts)


TIERS: Final = repeated(
    "--tier",
    Parser("NAME=/PATH", str),
    "Assign files below PATH to a storage tier (default: one for each mount point).",
)
CLASSES: Final = repeated(
    "--class",
    Parser("NAME=REGEX", str),
    "Assign files whose names match a regular expression to a class.",
)
PHASES: Final = repeated(
    "--phase", Parser("NAME=RULE", str), "Assign events to a phase, e.g. flush=name~flush,cat=POSIX."
)


def parse_dimensions(
    tiers: Sequence[str] = (), classes: Sequence[str] = (), phases: Sequence[str] = ()
) -> Dimensions:
    """Parse the options into dimensions; without tiers, each mount point of this machine is a tier."""
    from penstock.trace import dimensions as trace_dimensions

    prefixes: dict[str, list[str]] = {}
    host = "" if tiers else socket.gethostname()
    for text in tiers:
        name, prefix = trace_dimensions.parse_tier(text)
        prefixes.setdefault(name, []).append(prefix)
    if not prefixes:
        mounts = Path("/proc/mounts")
        prefixes = (
            trace_dimensions.parse_mounts(mounts.read_text(encoding="utf-8")) if mounts.exists() else {}
        )
    patterns = {}
    for text in classes:
        name, equals, pattern = text.partition("=")
        if not equals:
            raise UsageError(f"{text!r} is not a class", fix="Write for example --class 'weights=^layer-'.")
        patterns[name] = trace_dimensions.check_pattern(pattern)
    # The user's rules come first, because the first rule that matches an event decides.
    rules = (*map(trace_dimensions.parse_phase, phases), *trace_dimensions.DEFAULT_PHASES)
    return trace_dimensions.Dimensions(tiers=prefixes, host=host, file_classes=patterns, phases=rules)


def view_answer(answer: Answer, all_rows: str = "--json gives all") -> View:
    """Show one answer at full width, with its notes. `all_rows` tells the reader where to find all rows."""
    from penstock.trace.questions import answer as rendering

    answer = answer.first(rendering.MOST_ROWS)
    rows = rendering.as_records(answer)
    if len(rows) == 1 and len(answer.columns) > _MAX_COLUMNS:
        rows = [{"what": what, "value": value} for what, value in rows[0].items()]
    yield TextTable(answer.title, rows)
    yield from rendering.count_left_out(answer.num_left_out, all_rows)
    yield from answer.notes
