"""What the trace commands share: trace files as arguments, dimensions as options, and printed answers.

What was lost of damaged traces is printed before any answer, and is an error with `--strict`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import arguments, flag, group, option, repeated
from penstock.cli.parsers import TEXT, URI, Parser, choice
from penstock.cli.terminal import Terminal, TextTable, View, bold, print_json
from penstock.errors import UsageError
from penstock.trace import dimensions as trace_dimensions
from penstock.trace.questions.answer import Answer, document
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import ComparisonSpec
    from penstock.trace.event_schema import FileAccount
    from penstock.trace.questions.events_view import EventsView
    from penstock.trace.trace_set import TraceSet

_MAX_COLUMNS = 10
"""A single row of more columns is shown as a column."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How trace files are read."""

    where: str = option(
        "--where", TEXT, "Read only matching events, e.g. \"path LIKE '%ckpt%'\".", default="", metavar="SQL"
    )
    dask: str = option(
        "--dask",
        TEXT,
        "Read with the workers of Dask: local, or a scheduler's address.",
        default="",
        metavar="ADDRESS",
    )
    strict: bool = flag("--strict", "Fail if any part of a trace was lost or guessed.")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Trace files, and how they are read."""

    files: tuple[str, ...] = arguments(
        "FILES...", URI, "Trace files, directories, globs, or tables of `penstock trace load`."
    )
    read: ReadOptions = group(ReadOptions)

    @contextmanager
    def open(self, terminal: Terminal, *, rank_pattern: str | None = None) -> Iterator[TraceSet]:
        """Open the traces: draws progress while they are read, then prints what was lost of them."""
        from penstock.trace.reading.event_batch import RANK_PATTERN
        from penstock.trace.trace_set import open_trace_set

        with ExitStack() as resources:
            with terminal.progress() as progress:
                traces = resources.enter_context(
                    open_trace_set(
                        {"": self.files},
                        progress=progress,
                        where=self.read.where,
                        rank_pattern=rank_pattern or RANK_PATTERN,
                        dask=self.read.dask,
                    )
                )
            report_losses(traces.accounts, terminal, strict=self.read.strict)
            terminal.notes(traces.mismatches())
            yield traces


def check_output(out: Path, traces: Sequence[str], *, kind: str, is_kind: Callable[[Path], bool]) -> None:
    """Before anything is read: refuse to write over a trace, or over a file that is not of this `kind`.

    An empty file has nothing to lose, and what is no file is not replaced: /dev/stdout.
    """
    from penstock.trace.reading.find_files import find_trace_files
    from penstock.trace.trace_set import refuse_overwriting

    if out.exists() and (out.is_dir() or out.is_file()):
        refuse_overwriting(
            out,
            find_trace_files(traces),
            kind=kind,
            is_kind=lambda path: not path.stat().st_size or is_kind(path),
        )


def report_losses(accounts: Sequence[FileAccount], terminal: Terminal, *, strict: bool) -> None:
    """Print what was lost of traces; with `strict` it is an error."""
    from penstock.trace.event_schema import refuse_damaged, refuse_lost
    from penstock.trace.reading.find_files import name_some

    alike: dict[str, list[Path]] = {}
    for account in accounts:
        what = account.faults[-1] if account.is_without_events and account.faults else ""
        if what in alike:
            alike[what].append(Path(account.file))
            continue
        if what:
            alike[what] = []
        terminal.notes(account.losses())
    terminal.notes(f"{name_some(others)}: {what}" for what, others in alike.items() if others)
    refuse_lost(accounts)
    if strict:
        refuse_damaged(accounts)


RANK_PATTERN_TEXT = "Find the rank in a file's name by the first group of this regular expression."
_TIER = Parser("NAME=/PATH", str)
_CLASS = Parser("NAME=REGEX", str)
_PHASE = Parser("NAME=RULE", str)


@dataclass(frozen=True, kw_only=True)
class DimensionOptions:
    """The dimensions that events are assigned to: a command inherits the options of those that it uses."""

    tiers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()

    def dimensions(self) -> trace_dimensions.Dimensions:
        """The dimensions of these options; without tiers, each mount point of this machine is one."""
        prefixes: dict[str, list[str]] = {}
        for text in self.tiers:
            name, prefix = trace_dimensions.parse_tier(text)
            prefixes.setdefault(name, []).append(prefix)
        if not prefixes:
            mounts = Path("/proc/mounts")
            prefixes = (
                trace_dimensions.parse_mounts(mounts.read_text(encoding="utf-8")) if mounts.exists() else {}
            )
        # The user's rules come first, because the first rule that matches an event decides.
        rules = (*map(trace_dimensions.parse_phase, self.phases), *trace_dimensions.DEFAULT_PHASES)
        return trace_dimensions.Dimensions(
            tiers=prefixes, file_classes=dict(map(_parse_class, self.classes)), phases=rules
        )


def _parse_class(text: str) -> tuple[str, str]:
    name, equals, pattern = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} is not a class", fix="Write for example --class 'weights=^layer-'.")
    return name, trace_dimensions.check_pattern(pattern)


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Storage tiers."""

    tiers: tuple[str, ...] = repeated(
        "--tier", _TIER, "Assign files below PATH to a storage tier (default: one for each mount point)."
    )


@dataclass(frozen=True, kw_only=True)
class ClassOptions:
    """Classes of files."""

    classes: tuple[str, ...] = repeated(
        "--class", _CLASS, "Assign files whose names match a regular expression to a class."
    )


@dataclass(frozen=True, kw_only=True)
class PhaseOptions:
    """Phases of the program."""

    phases: tuple[str, ...] = repeated(
        "--phase", _PHASE, "Assign events to a phase, e.g. flush=name~flush,cat=POSIX."
    )


RUN_TEXT = "A run: a directory, a quoted glob, a table, or NAME=any of them. Files side by side are one."


@dataclass(frozen=True, kw_only=True)
class TracedRunOptions(TierOptions, ClassOptions, PhaseOptions, DimensionOptions):
    """Runs beside each other, and how they are seen."""

    runs: tuple[str, ...]
    read: ReadOptions = group(ReadOptions)

    def describe(self) -> ComparisonSpec:
        """The runs and how they are seen, as a file would describe them."""
        from penstock.trace.compare.trace_study import ComparisonSpec, name_runs

        dimensions = self.dimensions()
        return ComparisonSpec(
            runs=name_runs(self.runs),
            tiers={name: tuple(prefixes) for name, prefixes in dimensions.tiers.items()},
            file_classes=dict(dimensions.file_classes) or "strip-digits",
            phases=self.phases,
            where=self.read.where,
        )


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(DimensionOptions):
    """The traces that a question is asked about, and the form of its answer."""

    traces: TraceOptions = group(TraceOptions)
    form: str = option(
        "--format", choice("table", "csv", "markdown"), "Print the answer in this format.", default="table"
    )

    def ask(self, question: Callable[[EventsView], Sequence[Answer]], terminal: Terminal) -> None:
        """Ask the traces and print the answers."""
        from penstock.trace.questions.events_view import view_events
        from penstock.trace.trace_set import RELATION

        dimensions = self.dimensions()
        with self.traces.open(terminal) as traces:
            answers = question(view_events(traces.connection, RELATION, dimensions))
            _print_answers(answers, self.form, terminal, traces.mismatches())


def _print_answers(
    answers: Sequence[Answer], form: str, terminal: Terminal, mismatches: Sequence[str]
) -> None:
    """Print answers: the first is the main one, whose rows a JSON document has at its top level."""
    from penstock.trace.questions import answer as rendering

    main, *others = answers
    if terminal.as_json:
        document: dict[str, Any] = rendering.document(main)
        if others:
            document["tables"] = {answer.name: rendering.document(answer) for answer in others}
        if mismatches:
            document["mismatches"] = list(mismatches)
        print_json(document)
    elif form == "table":
        terminal.result({}, chain.from_iterable(map(view_answer, answers)))
    else:
        write: Callable[[Answer], str] = rendering.as_csv if form == "csv" else rendering.as_markdown
        sys.stdout.write("\n".join(map(write, answers)))


def view_answer(answer: Answer) -> View:
    """One answer as wide as it is, and its notes."""
    from penstock.trace.questions import answer as rendering

    rows = rendering.as_records(answer)
    if len(rows) == 1 and len(answer.columns) > _MAX_COLUMNS:
        rows = [{"what": what, "value": value} for what, value in rows[0].items()]
    yield TextTable(answer.title, rows, is_wide=True)
    yield from answer.notes


def view_findings(comparison: ComparisonResult) -> View:
    """The findings of a comparison of runs."""
    for finding in comparison.findings:
        yield bold(f"{finding.code} {finding.title}")
        for sentence in finding.says:
            yield f"  {sentence}"
        if finding.lost_us:
            yield f"  Lost: {format_seconds(finding.lost_us / 1e6)} a rank."
        if finding.fix:
            yield f"  {finding.fix}"


def comparison_document(comparison: ComparisonResult) -> dict[str, Any]:
    """A comparison of runs as JSON."""
    return {
        "runs": list(comparison.runs),
        "baseline": comparison.baseline,
        "mismatches": document(comparison.mismatches),
        "findings": [
            {
                "code": finding.code,
                "weight": finding.weight.value,
                "title": finding.title,
                "runs": list(finding.runs),
                "says": list(finding.says),
                "lost_us": finding.lost_us,
                "fix": finding.fix,
                "evidence": document(finding.evidence),
            }
            for finding in comparison.findings
        ],
        "tables": {answer.name: document(answer) for answer in (*comparison.tables, *comparison.charts)},
    }
