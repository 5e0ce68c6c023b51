"""`penstock trace load`: trace files become a table of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.trace.opening import Dask, Files, RankPattern, Strict, Where, tell_losses

if TYPE_CHECKING:
    from penstock.trace.event_schema import FileAccount


def load(
    files: Files,
    *,
    out: Annotated[str, typer.Option("--out", "-o", metavar="TABLE", help="The Parquet file to make.")],
    run: Annotated[
        str, typer.Option("--run", metavar="NAME", help="What to call this run in the table.")
    ] = "",
    where: Where = "",
    rank_pattern: RankPattern = None,
    dask: Dask = "",
    strict: Strict = False,
    as_json: JsonFlag = False,
) -> None:
    """Convert trace files once into a sorted table, which answers questions much faster.

    Reads .pfw and .pfw.gz of all DFTracer versions, Chrome traces, strace -f -ttt -T, and Darshan DXT text.
    What was lost or guessed of damaged files is said first. The table is Parquet: other tools open it, too.

    Examples:

      penstock trace load traces/*.pfw.gz -o run.events

      penstock trace load traces -o writes.events --where "op = 'write'" --strict --json
    """
    from functools import partial
    from pathlib import Path

    from penstock.trace.event_table import convert
    from penstock.trace.reading.event_filter import EventFilter
    from penstock.trace.reading.trace_file import RANK_PATTERN
    from penstock.trace.trace_set import find_trace_files, load_with_dask, name_trace_files

    terminal = Terminal(as_json=as_json)
    sources = name_trace_files(find_trace_files(files), run=run, rank_pattern=rank_pattern or RANK_PATTERN)
    make = partial(load_with_dask, dask) if dask else convert
    with terminal.progress() as progress:
        wanted = EventFilter(where=where)
        facts = make(sources, Path(out), progress=progress, event_filter=wanted, strict=strict)
    tell_losses(facts.accounts, terminal, strict=strict)
    document = {
        "table": out,
        "size_bytes": Path(out).stat().st_size,
        "events": sum(each.events + each.salvaged for each in facts.accounts),
        "files": [each.document() for each in facts.accounts],
    }
    terminal.result(
        document, table(f"{out}: {document['events']:,} events", [_row(each) for each in facts.accounts])
    )


def _row(account: FileAccount) -> dict[str, str]:
    return {
        "file": account.file,
        "lines": f"{account.lines:,}",
        "events": f"{account.events:,}",
        "salvaged": f"{account.salvaged:,}",
        "dropped": f"{account.dropped:,}",
        "skipped": f"{account.skipped:,}",
        "ranks": _some(sorted(account.ranks)),
        "hosts": _some(sorted(account.hosts)),
    }


def _some(names: list[int] | list[str]) -> str:
    shown = ", ".join(map(str, names[:3]))
    return f"{shown}, ... ({len(names)})" if len(names) > 3 else shown or "-"
