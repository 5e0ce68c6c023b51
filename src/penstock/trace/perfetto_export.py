"""Exports events for Perfetto and chrome://tracing: one JSON document of complete events, written row by row.

Invariant: bounded memory, whatever the trace's size.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from penstock.errors import StorageError
from penstock.trace.reading.find_files import EXPORT_HEAD

if TYPE_CHECKING:
    from penstock.progress import Progress
    from penstock.trace.questions.events_view import EventsView

_BATCH: Final = 20_000


def export_perfetto(events: EventsView, path: Path, *, progress: Progress) -> int:
    """Write the events to `path` (gzip if it ends in .gz); returns their number."""
    (total,) = events.ask_one("SELECT count(*) FROM {events}")
    progress.begin("exporting events", total)
    try:
        with _open_output(path) as out:
            out.write(EXPORT_HEAD)
            separator = ""
            for line in chain(map(json.dumps, _name_processes(events)), _lines(events, progress)):
                out.write(separator + line)
                separator = ",\n"
            out.write("\n]}\n")
    except OSError as error:
        raise StorageError(f"Cannot export: {error}", uri=str(path), errno=error.errno) from error
    return int(total)


def _open_output(path: Path) -> IO[str]:
    return (
        gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    )


def _name_processes(events: EventsView) -> Iterator[dict[str, Any]]:
    """Names that Perfetto shows for processes: run, rank and host."""
    for number, run, rank, host, pid in _processes(events):
        process = f"rank {rank}" if rank is not None else f"process {pid}"
        name = " ".join(filter(None, (run, process, f"on {host}" if host else "")))
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}


def _processes(events: EventsView) -> list[tuple[Any, ...]]:
    """Processes numbered over all runs and hosts, because several may have the same pid."""
    return events.ask(f"SELECT number, run, rank, host, pid FROM {_NUMBERED} ORDER BY number")


_NUMBERED: Final = """(
    SELECT row_number() OVER (ORDER BY run, rank, host, pid) AS number, run, rank, host, pid
    FROM (SELECT run, any_value(rank) AS rank, host, pid FROM {events} GROUP BY run, host, pid))"""


def _lines(events: EventsView, progress: Progress) -> Iterator[str]:
    sql = f"""
        SELECT e.name, e.cat, e.ts_us, e.dur_us, n.number, e.tid, e.path, e.size_bytes, e."offset", e.ret,
               e.epoch, e.step, e.args
        FROM {{events}} e JOIN {_NUMBERED} n
          ON e.run = n.run AND e.pid = n.pid AND e.host IS NOT DISTINCT FROM n.host"""
    cursor = events.connection.execute(events.fill_in(sql))
    while rows := cursor.fetchmany(_BATCH):
        progress.advance(len(rows))
        for name, cat, ts_us, dur_us, number, tid, *rest in rows:
            columns = dict(
                zip(("path", "size_bytes", "offset", "ret", "epoch", "step"), rest[:-1], strict=True)
            )
            args = {
                **json.loads(rest[-1]),
                **{key: value for key, value in columns.items() if value is not None},
            }
            yield json.dumps(
                {
                    "name": name, "cat": cat, "ph": "X", "ts": ts_us, "dur": dur_us, "pid": number,
                    "tid": tid, "args": args,
                }
            )  # fmt: skip
