"""`penstock trace record`, `load`, `sql` and `export`: record traces, convert them, and query them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Final

from penstock.cli.options import argument, arguments, group, option, repeated, required, verb
from penstock.cli.parsers import FILE, FOLDER, FOLDER_URI, NEW_FILE, TEXT, choice
from penstock.cli.terminal import Terminal, table
from penstock.cli.trace_options import TIERS, TraceOptions, check_output, parse_dimensions, report_losses
from penstock.errors import name_some

_MOST_FILES: Final = 50
_RANK_PATTERN: Final = option(
    "--rank-pattern",
    TEXT,
    "Regular expression whose first group captures the rank in a trace file's name (default: finds 3 in "
    "rank3 and trace-3).",
    metavar="REGEX",
)


@partial(
    verb, has_json=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def record(
    terminal: Terminal,  # noqa: ARG001 - the program's output is its own
    *,
    command: tuple[str, ...] = arguments(
        "[--] COMMAND...", TEXT, "Program to run, and its arguments.", is_required=False
    ),
    out: Path = option("--out", FOLDER, "Write the trace into DIR.", default="traces", short="-o"),
    tracer: str = option(
        "--tracer",
        choice("auto", "dftracer", "strace"),
        "Trace with this program; auto is dftracer if it is installed, else strace.",
        default="auto",
    ),
    folders: tuple[str, ...] = repeated("--data", FOLDER_URI, "Trace only this directory (dftracer only)."),
) -> int:
    """Run a program and trace its I/O, with dftracer if it is installed and with strace otherwise.

    Exits with the program's exit code. Programs that do their I/O through Penstock do not need this: use
    --trace, or set PENSTOCK_TRACE=DIR in their environment.

    Examples:

      penstock trace record --out traces -- python train.py --epochs 1

      penstock trace record --tracer strace -- cp model.pt /scratch
    """
    from penstock.trace.capture.external_tracers import BLIND_SPOTS, plan_recording
    from penstock.trace.capture.external_tracers import record as run_recorded

    folder = out.absolute()
    recording = plan_recording(list(command), folder, tracer=tracer, data=folders)
    print(f"Tracing with {recording.tracer} into {folder}", file=sys.stderr)
    print(f"Note: {BLIND_SPOTS[recording.tracer]}.", file=sys.stderr)
    return run_recorded(recording)


@verb
def load(
    terminal: Terminal,
    *,
    source: TraceOptions = group(TraceOptions),
    out: Path = required("--out", NEW_FILE, "Write this Parquet file.", short="-o", metavar="TABLE"),
    rank_pattern: str | None = _RANK_PATTERN,
) -> None:
    """Convert trace files to a sorted event table, which is much faster to query.

    Reads .pfw and .pfw.gz of all DFTracer versions, Chrome traces, output of strace -f -ttt -T, and Darshan
    logs. First prints what was lost or guessed in damaged files. The table is Parquet, which other tools can
    read.

    Examples:

      penstock trace load traces/*.pfw.gz -o run.events

      penstock trace load traces -o writes.events --where "op = 'write'" --strict --json
    """
    from penstock.trace.event_schema import RANK_PATTERN
    from penstock.trace.questions.answer import count_left_out
    from penstock.trace.reading.trace_files import find_trace_files
    from penstock.trace.trace_set import convert, find_clock_mismatches, name_trace_files

    sources = name_trace_files(
        find_trace_files(source.files),
        run="",
        rank_pattern=rank_pattern or RANK_PATTERN,
    )
    with terminal.progress() as progress:
        facts = convert(
            sources,
            out,
            progress=progress,
            where=source.where,
            strict=source.strict,
            dask=source.dask,
        )
    report_losses(facts.accounts, terminal, strict=source.strict)
    mismatches = find_clock_mismatches(facts.accounts)
    terminal.notes(mismatches)
    num_events = sum(account.events + account.salvaged for account in facts.accounts)
    document = {
        "table": str(out),
        "size_bytes": out.stat().st_size,
        "events": num_events,
        "files": [account.document() for account in facts.accounts],
        "mismatches": mismatches,
    }
    # Of thousands of files, list those that lost something first.
    shown = list(facts.accounts)
    if len(shown) > _MOST_FILES:
        shown = sorted(shown, key=lambda account: account.is_whole)[:_MOST_FILES]
    rows = [
        {
            "file": account.file,
            "lines": f"{account.lines:,}",
            "events": f"{account.events:,}",
            "salvaged": f"{account.salvaged:,}",
            "dropped": f"{account.dropped:,}",
            "of rank": name_some(sorted(account.ranks)) or "-",
            "hosts": name_some(sorted(account.hosts)) or "-",
        }
        for account in shown
    ]
    terminal.result(
        document,
        [
            *table(f"{out}: {num_events:,} events", rows),
            *count_left_out(len(facts.accounts) - len(shown), "--json gives all"),
        ],
    )


@verb
def sql(
    terminal: Terminal,
    *,
    query: str = argument("QUERY", TEXT, "Query over the table `events`, in DuckDB's SQL."),
    source: TraceOptions = group(TraceOptions),
    rank_pattern: str | None = _RANK_PATTERN,
) -> None:
    """Query traces in SQL.

    A query is one SELECT. It can read only the events: no files, no network. It cannot write.
    Columns of `events`: ts_us, dur_us, end_us, op, name, cat, pid, tid, rank, host, path, size_bytes, offset,
    ret, epoch, step, args (JSON text), run, file.

    Examples:

      penstock trace sql "SELECT op, count(*), sum(dur_us) FROM events GROUP BY op" traces/*.pfw.gz

      penstock trace sql "SELECT max(end_us) - min(ts_us) AS span_us FROM events" run.events --json
    """
    from penstock.trace.questions.answer import MOST_ROWS, count_left_out
    from penstock.trace.questions.sql import check_query, run_query

    check_query(query)
    with source.open(terminal, rank_pattern=rank_pattern) as traces:
        answer = run_query(traces, query)
        mismatches = traces.mismatches()
    document = {**answer.document(), **({"mismatches": mismatches} if mismatches else {})}
    # A file, or a program behind a pipe, has no width to fit into.
    terminal.result(
        document,
        [
            *table("", answer.texts(MOST_ROWS)),
            *count_left_out(len(answer.rows[MOST_ROWS:]), "--json gives all"),
        ],
    )


@verb
def export(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    source: TraceOptions = group(TraceOptions),
    out: Path = required("--out", FILE, "Write this file: trace.json or trace.json.gz.", short="-o"),
) -> None:
    """Export events as a Chrome trace, which ui.perfetto.dev opens.

    Examples:

      penstock trace export run.events -o run.json.gz

      penstock trace export run.events -o writes.json --where "op = 'write'"
    """
    from penstock.trace.dimensions import view_events
    from penstock.trace.perfetto_export import export_perfetto
    from penstock.trace.reading.trace_files import is_export
    from penstock.trace.trace_set import RELATION

    dimensions = parse_dimensions(tiers)
    check_output(out, source.files, kind="an earlier export of traces", is_kind=is_export)
    with source.open(terminal) as traces, terminal.progress() as progress:
        events = view_events(traces.connection, RELATION, dimensions)
        num_events = export_perfetto(events, out, progress=progress)
    document = {"file": str(out), "num_events": num_events, "size_bytes": out.stat().st_size}
    terminal.result(document, [f"{out}: {num_events:,} events"])
