"""The questions of `penstock trace`: one verb each, all with the same files, lens and forms."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.trace.asking import By, columns
from penstock.cli.trace.question import Asking, question

Top = Annotated[int | None, typer.Option("--top", min=1, help="Only so many rows.")]


@question("phase")
def summary(asking: Asking) -> None:
    """Tell what a trace is of: hosts, ranks, files, time; compute, I/O, their overlap; sizes by function.

    Examples:

      penstock trace summary traces/*.pfw.gz

      penstock trace summary run.events --json
    """
    from penstock.trace.questions.summary import summary as ask

    with asking.events() as events:
        asking.show(ask(events))


@question("tier", "file_class", "phase")
def ops(asking: Asking, *, by: By = None) -> None:
    """List I/O operations by the time they took: calls, bytes, sum, union and concurrency.

    Examples:

      penstock trace ops run.events --tier ssd=/l/ssd --tier pfs=/p/lustre2

      penstock trace ops run.events --by host,name --format csv
    """
    from penstock.trace.questions.breakdowns import ops as ask

    with asking.events() as events:
        asking.show([ask(events, by=columns(by, ("tier", "op")))])


@question("tier", "file_class")
def files_(asking: Asking, *, by: By = None, top: Top = None) -> None:
    """List files by the time spent on them.

    Examples:

      penstock trace files run.events --top 20

      penstock trace files run.events --by path,op --where "path LIKE '%model%'" --json
    """
    from penstock.trace.questions.breakdowns import files as ask

    with asking.events() as events:
        asking.show([ask(events, by=columns(by, ("path",)), top=top)])


@question("tier", "file_class")
def classes(asking: Asking, *, by: By = None) -> None:
    """List classes of files by the time spent on them: names without digits, or patterns of your own.

    Examples:

      penstock trace classes run.events

      penstock trace classes run.events --class 'weights=^(layer|model)-' --by file_class,tier
    """
    from penstock.trace.questions.breakdowns import classes as ask

    with asking.events() as events:
        asking.show([ask(events, by=columns(by, ("file_class", "op")))])


@question("tier", "file_class")
def sizes(
    asking: Asking,
    *,
    by: By = None,
    top: Annotated[int, typer.Option("--top", min=1, help="So many of the most frequent sizes.")] = 20,
) -> None:
    """Describe sizes of transfers: exact quantiles, and how often each size occurs.

    Examples:

      penstock trace sizes run.events

      penstock trace sizes run.events --by tier,op --top 5 --json
    """
    from penstock.trace.questions.breakdowns import sizes as ask

    with asking.events() as events:
        asking.show(ask(events, by=columns(by, ("op",)), top=top))


@question()
def file(
    asking: Asking,
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file that was worked on, or its name.")],
) -> None:
    """Tell the life of one file: its events in order.

    Examples:

      penstock trace file model-1-600-0.pt run.events

      penstock trace file /l/ssd/ckpt/model-1-600-0.pt traces/*.pfw.gz --json
    """
    from penstock.trace.questions.timeline import file_events

    with asking.events() as events:
        asking.show([file_events(events, path)])


@question("phase")
def ranks(asking: Asking) -> None:
    """Compare ranks: skew, and stragglers.

    Examples:

      penstock trace ranks run.events

      penstock trace ranks run.events --where "op = 'write'" --json
    """
    from penstock.trace.questions.breakdowns import ranks as ask

    with asking.events() as events:
        asking.show([ask(events)])


@question("tier", "phase")
def timeline(
    asking: Asking,
    *,
    bucket: Annotated[
        str | None, typer.Option("--bucket", metavar="TIME", help="As 1s or 100ms; else about 100 buckets.")
    ] = None,
) -> None:
    """Tell what went on when: bandwidth, operations and concurrency of each tier.

    Examples:

      penstock trace timeline run.events --tier ssd=/l/ssd

      penstock trace timeline run.events --bucket 1s --format csv
    """
    from penstock.errors import UsageError
    from penstock.trace.questions.timeline import timeline as ask
    from penstock.units import parse_seconds

    bucket_us = None if bucket is None else round(parse_seconds(bucket) * 1e6)
    if bucket_us is not None and bucket_us < 1:
        raise UsageError(f"--bucket {bucket} is shorter than a microsecond", fix="Write for example 100ms.")
    with asking.events() as events:
        asking.show([ask(events, bucket_us=bucket_us)])


@question("tier", "file_class", "phase")
def overlap(
    asking: Asking,
    *,
    by: By = None,
    of: Annotated[
        str, typer.Option("--of", metavar="PHASE", help="What counts as I/O; all: not compute.")
    ] = "io",
) -> None:
    """Tell how much I/O ran side by side, and beside computation: from intervals, to the microsecond.

    `union_us` is the time in which any I/O was under way, `sum_us` adds all durations, `concurrency` is how
    many ran at a time; `overlap_us` is I/O and computation at once.

    Examples:

      penstock trace overlap run.events --by rank

      penstock trace overlap traces/*.pfw.gz --by pid,tid --json
    """
    from penstock.trace.questions.overlap import overlap as ask

    with asking.events() as events:
        asking.show([ask(events, by=columns(by, ("pid",)), of=of)])
