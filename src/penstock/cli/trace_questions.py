"""`penstock trace summary`, `ops`, `files`, ...: one question to traces each; `report` draws all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import argument, arguments, group, option, verb
from penstock.cli.parsers import FILE, TEXT, TIME, URI, several, whole
from penstock.cli.terminal import Terminal, View, bold
from penstock.cli.trace_options import (
    RUN_TEXT,
    ClassOptions,
    PhaseOptions,
    QuestionOptions,
    TierOptions,
    TracedRunOptions,
    check_output,
    report_losses,
)
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.trace.compare.run_report import RunReport
    from penstock.trace.questions.answer import Answer
    from penstock.trace.questions.events_view import EventsView

_PAGE = "report.html"
_COLUMNS = several(TEXT)
_BY_TEXT = "Group by these columns: rank, host, op, tier, ..."


@dataclass(frozen=True, kw_only=True)
class PhaseQuestion(PhaseOptions, QuestionOptions):
    """A question that assigns events to phases."""


@verb(PhaseQuestion)
def summary(options: PhaseQuestion, terminal: Terminal) -> None:
    """Summarize a trace: hosts, ranks, files and time; compute, I/O and their overlap; sizes by function.

    Examples:

      penstock trace summary traces/*.pfw.gz

      penstock trace summary run.events --json
    """
    from penstock.trace.questions.breakdowns import describe_runs
    from penstock.trace.questions.breakdowns import summary as ask

    def ask_with_runs(events: EventsView) -> Sequence[Answer]:
        facts, functions = ask(events)
        return replace(facts, notes=[*describe_runs(events), *facts.notes]), functions

    options.ask(ask_with_runs, terminal)


@verb(PhaseQuestion)
def ranks(options: PhaseQuestion, terminal: Terminal) -> None:
    """Compare ranks: skew, and stragglers.

    Examples:

      penstock trace ranks run.events

      penstock trace ranks run.events --where "op = 'write'" --json
    """
    from penstock.trace.questions.breakdowns import ranks as ask

    options.ask(lambda events: [ask(events)], terminal)


@dataclass(frozen=True, kw_only=True)
class _OpsQuestion(TierOptions, ClassOptions, PhaseOptions, QuestionOptions):
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="tier,op", metavar="COLUMN,...")


@verb(_OpsQuestion)
def ops(options: _OpsQuestion, terminal: Terminal) -> None:
    """List I/O operations by the time they took: calls, bytes, sum, union and concurrency.

    Examples:

      penstock trace ops run.events --tier ssd=/l/ssd --tier pfs=/p/lustre2

      penstock trace ops run.events --by host,name --format csv
    """
    from penstock.trace.questions.breakdowns import ops as ask

    options.ask(lambda events: [ask(events, by=options.by)], terminal)


@dataclass(frozen=True, kw_only=True)
class _FilesQuestion(TierOptions, ClassOptions, QuestionOptions):
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="path", metavar="COLUMN,...")
    top: int | None = option("--top", whole(1), "Show only the first N rows.")


@verb(_FilesQuestion)
def files(options: _FilesQuestion, terminal: Terminal) -> None:
    """List files by the time spent on them.

    Examples:

      penstock trace files run.events --top 20

      penstock trace files run.events --by path,op --where "path LIKE '%model%'" --json
    """
    from penstock.trace.questions.breakdowns import files as ask

    options.ask(lambda events: [ask(events, by=options.by, top=options.top)], terminal)


@dataclass(frozen=True, kw_only=True)
class _ClassesQuestion(TierOptions, ClassOptions, QuestionOptions):
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="file_class,op", metavar="COLUMN,...")


@verb(_ClassesQuestion)
def classes(options: _ClassesQuestion, terminal: Terminal) -> None:
    """List classes of files by the time spent on them: names without digits, or the patterns of --class.

    Examples:

      penstock trace classes run.events

      penstock trace classes run.events --class 'weights=^(layer|model)-' --by file_class,tier
    """
    from penstock.trace.questions.breakdowns import classes as ask

    options.ask(lambda events: [ask(events, by=options.by)], terminal)


@dataclass(frozen=True, kw_only=True)
class _SizesQuestion(TierOptions, ClassOptions, QuestionOptions):
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="op", metavar="COLUMN,...")
    top: int = option("--top", whole(1), "Show the N most frequent sizes.", default="20")


@verb(_SizesQuestion)
def sizes(options: _SizesQuestion, terminal: Terminal) -> None:
    """Describe transfer sizes: exact quantiles, and how often each size occurs.

    Examples:

      penstock trace sizes run.events

      penstock trace sizes run.events --by tier,op --top 5 --json
    """
    from penstock.trace.questions.breakdowns import sizes as ask

    options.ask(lambda events: ask(events, by=options.by, top=options.top), terminal)


@dataclass(frozen=True, kw_only=True)
class _FileQuestion:
    path: str = argument("PATH", TEXT, "Path or name of a file in the traces.")
    question: QuestionOptions = group(QuestionOptions)


@verb(_FileQuestion)
def file(options: _FileQuestion, terminal: Terminal) -> None:
    """List the events of one file in order.

    Examples:

      penstock trace file model-1-600-0.pt run.events

      penstock trace file /l/ssd/ckpt/model-1-600-0.pt traces/*.pfw.gz --json
    """
    from penstock.trace.questions.timeline import file_events

    options.question.ask(lambda events: [file_events(events, options.path)], terminal)


@dataclass(frozen=True, kw_only=True)
class _TimelineQuestion(TierOptions, PhaseOptions, QuestionOptions):
    bucket_s: float | None = option(
        "--bucket",
        TIME,
        "Divide the time into buckets of this length, e.g. 100ms (default: about 100 buckets).",
    )


@verb(_TimelineQuestion)
def timeline(options: _TimelineQuestion, terminal: Terminal) -> None:
    """Show bandwidth, operations and concurrency of each tier over time.

    Examples:

      penstock trace timeline run.events --tier ssd=/l/ssd

      penstock trace timeline run.events --bucket 1s --format csv
    """
    from penstock.trace.questions.timeline import timeline as ask

    bucket_us = None if options.bucket_s is None else round(options.bucket_s * 1e6)
    if bucket_us is not None and bucket_us < 1:
        raise UsageError(
            "The bucket is shorter than a microsecond", where="--bucket", fix="Write for example 100ms."
        )
    options.ask(lambda events: [ask(events, bucket_us=bucket_us)], terminal)


@dataclass(frozen=True, kw_only=True)
class _OverlapQuestion(TierOptions, ClassOptions, PhaseOptions, QuestionOptions):
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="pid", metavar="COLUMN,...")
    of: str = option(
        "--of",
        TEXT,
        "Count this phase as I/O; all: everything but compute and waiting.",
        default="io",
        metavar="PHASE",
    )


@verb(_OverlapQuestion)
def overlap(options: _OverlapQuestion, terminal: Terminal) -> None:
    """Measure how much I/O overlaps with other I/O and with computation, from intervals.

    `union_us` is the time in which any I/O was running, `sum_us` adds all durations, `concurrency` is how
    many operations ran at a time, and `overlap_us` is the time of I/O and computation at once.

    Examples:

      penstock trace overlap run.events --by rank

      penstock trace overlap traces/*.pfw.gz --by pid,tid --json
    """
    from penstock.trace.questions.breakdowns import overlap as ask

    options.ask(lambda events: [ask(events, by=options.by, of=options.of)], terminal)


@dataclass(frozen=True, kw_only=True)
class _ReportOptions(TracedRunOptions):
    runs: tuple[str, ...] = arguments("RUN...", URI, RUN_TEXT)
    out: Path | None = option(
        "--out", FILE, f"Write this page (default: {_PAGE}, or none with --json).", short="-o"
    )


@verb(_ReportOptions)
def report(options: _ReportOptions, terminal: Terminal) -> None:
    """Draw what runs did: who called when, bandwidth, sizes, durations, files, overlap with computation.

    The page is one file that loads nothing. It begins with what moved, how long it took and what was slow,
    and with findings, those that cost most time first. --json prints the data of all figures.

    Examples:

      penstock trace report traces --out report.html

      penstock trace report base.events new.events --tier ssd=/l/ssd --out both.html

      penstock trace report before=monday/traces after=friday/traces --json
    """
    from penstock.reports.page import is_page
    from penstock.trace.compare.run_report import report_runs, write_run_report
    from penstock.trace.compare.trace_study import open_study

    description = options.describe()
    out = options.out or (None if terminal.as_json else Path(_PAGE))
    if out is not None:
        check_output(out, (), kind="an earlier report", is_kind=is_page)
    with (
        terminal.progress() as progress,
        open_study(description, Path(), progress=progress, dask=options.read.dask) as study,
    ):
        accounts = [account for of_run in study.accounts.values() for account in of_run]
        report_losses(accounts, terminal, strict=options.read.strict)
        made = report_runs(study, progress=progress)
    if out is not None:
        write_run_report(made, out)
        terminal.note(f"wrote {out}")
    terminal.result({"page": str(out) if out else None, **made.document()}, _view_report(made))


def _view_report(made: RunReport) -> View:
    """The first sentences, and the findings by their titles."""
    yield from made.says
    for finding in made.findings:
        yield bold(f"{finding.code} {finding.title}")
    for _, section in made.figures.values():
        if not (section.charts or section.tables or section.parts):
            yield f"{section.title}: {section.why_empty}"
