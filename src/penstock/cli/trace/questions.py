"""The questions of `penstock trace`: one verb each, all with the same files, lens and forms."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal
from penstock.cli.trace.asking import (
    By,
    Classes,
    Form,
    FormOption,
    Phases,
    Tiers,
    asked,
    columns,
    make_lens,
    show,
)
from penstock.cli.trace.opening import Dask, Files, Strict, Where

Top = Annotated[int | None, typer.Option("--top", min=1, help="Only so many rows.")]


def summary(
    files: Files,
    *,
    phase: Phases = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Tell what a trace is of: hosts, ranks, files, time; compute, I/O, their overlap; sizes by function.

    Examples:

      penstock trace summary traces/*.pfw.gz

      penstock trace summary run.events --json
    """
    from penstock.trace.questions.summary import summary as ask

    terminal = Terminal(as_json=as_json)
    with asked(
        files, terminal, make_lens(None, None, phase), where=where, dask=dask, strict=strict
    ) as events:
        show(terminal, ask(events), form)


def ops(
    files: Files,
    *,
    by: By = None,
    tier: Tiers = None,
    file_class: Classes = None,
    phase: Phases = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """List I/O operations by the time they took: calls, bytes, sum, union and concurrency.

    Examples:

      penstock trace ops run.events --tier ssd=/l/ssd --tier pfs=/p/lustre2

      penstock trace ops run.events --by host,name --format csv
    """
    from penstock.trace.questions.counts import ops as ask

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, file_class, phase)
    with asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events:
        show(terminal, [ask(events, by=columns(by, ("tier", "op")))], form)


def files_(
    files: Files,
    *,
    by: By = None,
    top: Top = None,
    tier: Tiers = None,
    file_class: Classes = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """List files by the time spent on them.

    Examples:

      penstock trace files run.events --top 20

      penstock trace files run.events --by path,op --where "path LIKE '%model%'" --json
    """
    from penstock.trace.questions.counts import files as ask

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, file_class, None)
    with asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events:
        show(terminal, [ask(events, by=columns(by, ("path",)), top=top)], form)


def classes(
    files: Files,
    *,
    by: By = None,
    tier: Tiers = None,
    file_class: Classes = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """List classes of files by the time spent on them: names without digits, or patterns of your own.

    Examples:

      penstock trace classes run.events

      penstock trace classes run.events --class 'weights=^(layer|model)-' --by file_class,tier
    """
    from penstock.trace.questions.counts import classes as ask

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, file_class, None)
    with asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events:
        show(terminal, [ask(events, by=columns(by, ("file_class", "op")))], form)


def sizes(
    files: Files,
    *,
    by: By = None,
    top: Annotated[int, typer.Option("--top", min=1, help="So many of the most frequent sizes.")] = 20,
    tier: Tiers = None,
    file_class: Classes = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Describe sizes of transfers: exact quantiles, and how often each size occurs.

    Examples:

      penstock trace sizes run.events

      penstock trace sizes run.events --by tier,op --top 5 --json
    """
    from penstock.trace.questions.sizes import sizes as ask

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, file_class, None)
    with asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events:
        show(terminal, ask(events, by=columns(by, ("op",)), top=top), form)


def file(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A file that was worked on, or its name.")],
    files: Files,
    *,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Tell the life of one file: its events in order.

    Examples:

      penstock trace file model-1-600-0.pt run.events

      penstock trace file /l/ssd/ckpt/model-1-600-0.pt traces/*.pfw.gz --json
    """
    from penstock.trace.questions.file_events import file_events

    terminal = Terminal(as_json=as_json)
    with asked(files, terminal, make_lens(None, None, None), where=where, dask=dask, strict=strict) as events:
        show(terminal, [file_events(events, path)], form)


def ranks(
    files: Files,
    *,
    phase: Phases = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Compare ranks: skew, and stragglers.

    Examples:

      penstock trace ranks run.events

      penstock trace ranks run.events --where "op = 'write'" --json
    """
    from penstock.trace.questions.ranks import ranks as ask

    terminal = Terminal(as_json=as_json)
    with asked(
        files, terminal, make_lens(None, None, phase), where=where, dask=dask, strict=strict
    ) as events:
        show(terminal, [ask(events)], form)


def timeline(
    files: Files,
    *,
    bucket: Annotated[
        str | None, typer.Option("--bucket", metavar="TIME", help="As 1s or 100ms; else about 100 buckets.")
    ] = None,
    tier: Tiers = None,
    phase: Phases = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
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
    terminal = Terminal(as_json=as_json)
    with asked(
        files, terminal, make_lens(tier, None, phase), where=where, dask=dask, strict=strict
    ) as events:
        show(terminal, [ask(events, bucket_us=bucket_us)], form)


def overlap(
    files: Files,
    *,
    by: By = None,
    of: Annotated[
        str, typer.Option("--of", metavar="PHASE", help="What counts as I/O; all: not compute.")
    ] = "io",
    tier: Tiers = None,
    file_class: Classes = None,
    phase: Phases = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    form: FormOption = Form.TABLE,
    as_json: JsonFlag = False,
) -> None:
    """Tell how much I/O ran side by side, and beside computation: from intervals, to the microsecond.

    `union_us` is the time in which any I/O was under way, `sum_us` adds all durations, `concurrency` is how
    many ran at a time; `overlap_us` is I/O and computation at once.

    Examples:

      penstock trace overlap run.events --by rank

      penstock trace overlap traces/*.pfw.gz --by pid,tid --json
    """
    from penstock.trace.questions.overlap import overlap as ask

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, file_class, phase)
    with asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events:
        show(terminal, [ask(events, by=columns(by, ("pid",)), of=of)], form)
