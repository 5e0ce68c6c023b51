"""`penstock trace summary`, `ops`, `files`, ...: each answers one question about traces."""

from __future__ import annotations

from penstock.cli.options import argument, group, option, verb
from penstock.cli.parsers import TEXT, TIME, several, whole
from penstock.cli.terminal import Terminal
from penstock.cli.trace_options import (
    CLASSES,
    PHASES,
    TIERS,
    QuestionOptions,
    parse_dimensions,
)
from penstock.errors import UsageError

_COLUMNS = several(TEXT)
_BY_TEXT = "Group by these columns: rank, host, op, tier, ..."


@verb
def summary(
    terminal: Terminal,
    *,
    phases: tuple[str, ...] = PHASES,
    question: QuestionOptions = group(QuestionOptions),
) -> None:
    """Summarize a trace: hosts, ranks, files and time; compute, I/O and their overlap; sizes by function.

    Examples:

      penstock trace summary traces/*.pfw.gz

      penstock trace summary run.events --json
    """
    from penstock.trace.questions.breakdowns import summary as ask

    question.ask(ask, terminal, parse_dimensions(phases=phases))


@verb
def ranks(
    terminal: Terminal,
    *,
    phases: tuple[str, ...] = PHASES,
    question: QuestionOptions = group(QuestionOptions),
) -> None:
    """Compare ranks: skew and stragglers.

    Examples:

      penstock trace ranks run.events

      penstock trace ranks run.events --where "op = 'write'" --json
    """
    from penstock.trace.questions.breakdowns import ranks as ask

    question.ask(lambda events: [ask(events)], terminal, parse_dimensions(phases=phases))


@verb
def ops(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    phases: tuple[str, ...] = PHASES,
    question: QuestionOptions = group(QuestionOptions),
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="tier,op", metavar="COLUMN,..."),
) -> None:
    """List I/O operations by the time taken, with calls, bytes, summed time, union time and concurrency.

    Examples:

      penstock trace ops run.events --tier ssd=/l/ssd --tier pfs=/p/lustre2

      penstock trace ops run.events --by host,name --format csv
    """
    from penstock.trace.questions.breakdowns import break_down

    question.ask(
        lambda events: [break_down(events, "ops", by=by)],
        terminal,
        parse_dimensions(tiers=tiers, classes=classes, phases=phases),
    )


@verb
def files(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    question: QuestionOptions = group(QuestionOptions),
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="path", metavar="COLUMN,..."),
    top: int | None = option("--top", whole(1), "Show only the first N rows."),
) -> None:
    """List files by the time spent on them.

    Examples:

      penstock trace files run.events --top 20

      penstock trace files run.events --by path,op --where "path LIKE '%model%'" --json
    """
    from penstock.trace.questions.breakdowns import break_down

    question.ask(
        lambda events: [break_down(events, "files", by=by, top=top)],
        terminal,
        parse_dimensions(tiers=tiers, classes=classes),
    )


@verb
def classes(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    question: QuestionOptions = group(QuestionOptions),
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="file_class,op", metavar="COLUMN,..."),
) -> None:
    """List classes of files (names without digits, or the patterns of --class) by the time spent on them.

    Examples:

      penstock trace classes run.events

      penstock trace classes run.events --class 'weights=^(layer|model)-' --by file_class,tier
    """
    from penstock.trace.questions.breakdowns import break_down

    question.ask(
        lambda events: [break_down(events, "classes", by=by)],
        terminal,
        parse_dimensions(tiers=tiers, classes=classes),
    )


@verb
def sizes(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    question: QuestionOptions = group(QuestionOptions),
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="op", metavar="COLUMN,..."),
    top: int = option("--top", whole(1), "Show the N most frequent sizes.", default="20"),
) -> None:
    """Describe transfer sizes: exact quantiles, and how often each size occurs.

    Examples:

      penstock trace sizes run.events

      penstock trace sizes run.events --by tier,op --top 5 --json
    """
    from penstock.trace.questions.breakdowns import sizes as ask

    question.ask(
        lambda events: ask(events, by=by, top=top), terminal, parse_dimensions(tiers=tiers, classes=classes)
    )


@verb
def file(
    terminal: Terminal,
    *,
    path: str = argument("PATH", TEXT, "Path or name of a file in the traces."),
    question: QuestionOptions = group(QuestionOptions),
) -> None:
    """List the events of one file in chronological order.

    Examples:

      penstock trace file model-1-600-0.pt run.events

      penstock trace file /l/ssd/ckpt/model-1-600-0.pt traces/*.pfw.gz --json
    """
    from penstock.trace.questions.breakdowns import file_events

    question.ask(lambda events: [file_events(events, path)], terminal, parse_dimensions())


@verb
def timeline(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    phases: tuple[str, ...] = PHASES,
    question: QuestionOptions = group(QuestionOptions),
    bucket_s: float | None = option(
        "--bucket",
        TIME,
        "Divide the time into buckets of this length, e.g. 100ms (default: about 100 buckets).",
    ),
) -> None:
    """Show bandwidth, operations and concurrency of each tier over time.

    Examples:

      penstock trace timeline run.events --tier ssd=/l/ssd

      penstock trace timeline run.events --bucket 1s --format csv
    """
    from penstock.trace.questions.breakdowns import timeline as ask

    bucket_us = None if bucket_s is None else round(bucket_s * 1e6)
    if bucket_us is not None and bucket_us < 1:
        raise UsageError(
            "The bucket is shorter than a microsecond", where="--bucket", fix="Write for example 100ms."
        )
    question.ask(
        lambda events: [ask(events, bucket_us=bucket_us)],
        terminal,
        parse_dimensions(tiers=tiers, phases=phases),
    )


@verb
def overlap(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    phases: tuple[str, ...] = PHASES,
    question: QuestionOptions = group(QuestionOptions),
    by: tuple[str, ...] = option("--by", _COLUMNS, _BY_TEXT, default="pid", metavar="COLUMN,..."),
    of: str = option(
        "--of",
        TEXT,
        "Count the events of this phase as I/O; `all`: those of every phase except compute and waiting.",
        default="io",
        metavar="PHASE",
    ),
) -> None:
    """Measure how much I/O overlaps with other I/O and with computation, from the intervals of events.

    `union_us` is the time during which any I/O was running, `sum_us` the sum of all durations, `concurrency`
    how many operations ran at a time, and `overlap_us` the time during which I/O and computation both ran.

    Examples:

      penstock trace overlap run.events --by rank

      penstock trace overlap traces/*.pfw.gz --by pid,tid --json
    """
    from penstock.trace.questions.breakdowns import overlap as ask

    question.ask(
        lambda events: [ask(events, by=by, of=of)],
        terminal,
        parse_dimensions(tiers=tiers, classes=classes, phases=phases),
    )
