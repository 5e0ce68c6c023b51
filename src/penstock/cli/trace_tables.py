"""`penstock trace load` and `sql`: trace files become an event table, and answer questions in SQL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import argument, group, option, required, verb
from penstock.cli.parsers import FOLDER_URI, NAME, TEXT
from penstock.cli.terminal import Terminal, table
from penstock.cli.trace_options import RANK_PATTERN_TEXT, TraceOptions, report_losses

if TYPE_CHECKING:
    from penstock.trace.event_schema import FileAccount


@dataclass(frozen=True, kw_only=True)
class _LoadOptions:
    traces: TraceOptions = group(TraceOptions)
    out: str = required("--out", FOLDER_URI, "Parquet file to write.", short="-o", metavar="TABLE")
    run: str = option("--run", NAME, "Name of this run in the table.", default="")
    rank_pattern: str | None = option("--rank-pattern", TEXT, RANK_PATTERN_TEXT, metavar="REGEX")


@verb(_LoadOptions)
def load(options: _LoadOptions, terminal: Terminal) -> None:
    """Convert trace files to a sorted event table, which answers questions much faster.

    Reads .pfw and .pfw.gz of all DFTracer versions, Chrome traces, strace -f -ttt -T, and Darshan DXT text.
    What was lost or guessed of damaged files is printed first. The table is Parquet, which other tools read.

    Examples:

      penstock trace load traces/*.pfw.gz -o run.events

      penstock trace load traces -o writes.events --where "op = 'write'" --strict --json
    """
    from penstock.trace.event_table import convert
    from penstock.trace.reading.event_filter import EventFilter
    from penstock.trace.reading.trace_file import RANK_PATTERN
    from penstock.trace.trace_set import find_trace_files, load_with_dask, name_trace_files

    read = options.traces.read
    sources = name_trace_files(
        find_trace_files(options.traces.files),
        run=options.run,
        rank_pattern=options.rank_pattern or RANK_PATTERN,
    )
    make_table = partial(load_with_dask, read.dask) if read.dask else convert
    out, event_filter = Path(options.out), EventFilter(where=read.where)
    with terminal.progress() as progress:
        facts = make_table(sources, out, progress=progress, event_filter=event_filter, strict=read.strict)
    report_losses(facts.accounts, terminal, strict=read.strict)
    num_events = sum(account.events + account.salvaged for account in facts.accounts)
    document = {
        "table": options.out,
        "size_bytes": out.stat().st_size,
        "events": num_events,
        "files": [account.document() for account in facts.accounts],
    }
    rows = [_row(account) for account in facts.accounts]
    terminal.result(document, table(f"{options.out}: {num_events:,} events", rows))


def _row(account: FileAccount) -> dict[str, str]:
    return {
        "file": account.file,
        "lines": f"{account.lines:,}",
        "events": f"{account.events:,}",
        "salvaged": f"{account.salvaged:,}",
        "dropped": f"{account.dropped:,}",
        "skipped": f"{account.skipped:,}",
        "ranks": _shorten(sorted(account.ranks)),
        "hosts": _shorten(sorted(account.hosts)),
    }


def _shorten(names: list[int] | list[str]) -> str:
    shown = ", ".join(map(str, names[:3]))
    return f"{shown}, ... ({len(names)})" if len(names) > 3 else shown or "-"


@dataclass(frozen=True, kw_only=True)
class _SqlOptions:
    query: str = argument("QUERY", TEXT, "DuckDB's SQL over a table `events`.")
    traces: TraceOptions = group(TraceOptions)
    rank_pattern: str | None = option("--rank-pattern", TEXT, RANK_PATTERN_TEXT, metavar="REGEX")


@verb(_SqlOptions)
def sql(options: _SqlOptions, terminal: Terminal) -> None:
    """Query traces in SQL.

    Columns of `events`: ts_us, dur_us, end_us, op, name, cat, pid, tid, rank, host, path, size_bytes, offset,
    ret, epoch, step, args (JSON text), run, file.

    Examples:

      penstock trace sql "SELECT op, count(*), sum(dur_us) FROM events GROUP BY op" traces/*.pfw.gz

      penstock trace sql "SELECT max(end_us) - min(ts_us) AS span_us FROM events" run.events --json
    """
    from penstock.trace.questions.events_view import run_query

    with options.traces.open(terminal, rank_pattern=options.rank_pattern) as traces:
        answer = run_query(traces.connection, options.query)
    terminal.result(answer.document(), table("", answer.texts()))
