"""Exports events for Perfetto and chrome://tracing: one JSON document of complete events, written row by row.

Invariants: bounded memory, whatever the trace's size; an earlier export is replaced by a complete one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.results.published_files import publishing
from penstock.storage.files.system_calls import translate_os_errors
from penstock.trace.reading.trace_files import EXPORT_HEAD

if TYPE_CHECKING:
    from penstock.progress import Progress
    from penstock.trace.dimensions import EventsView

_BATCH: Final = 20_000


def export_perfetto(events: EventsView, path: Path, *, progress: Progress) -> int:
    """Write the events to `path` (gzip if it ends in .gz); return their number."""
    (total,) = events.ask_one("SELECT count(*) FROM {events}")
    progress.begin("exporting events", total)
    open_text = gzip.open if path.suffix == ".gz" else open
    with (
        translate_os_errors("Exporting", str(path)),
        publishing(path) as (draft, _),
        open_text(draft, "wt", encoding="utf-8") as out,
    ):
        out.write(EXPORT_HEAD)
        separator = ""
        for document in chain(_name_processes(events), _documents(events, progress)):
            out.write(separator + json.dumps(document))
            separator = ",\n"
        out.write("\n]}\n")
    return int(total)


def _name_processes(events: EventsView) -> Iterator[dict[str, Any]]:
    """Name the processes for Perfetto by run, rank and host."""
    for number, run, rank, host, pid in events.ask(
        f"SELECT number, run, rank, host, pid FROM {_NUMBERED} ORDER BY number"
    ):
        process = f"rank {rank}" if rank is not None else f"process {pid}"
        name = " ".join(filter(None, (run, process, f"on {host}" if host else "")))
        yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}


_NUMBERED: Final = """(
    SELECT row_number() OVER (ORDER BY run, rank, host, pid) AS number, run, rank, host, pid
    FROM (SELECT run, any_value(rank) AS rank, host, pid FROM {events} GROUP BY run, host, pid))"""
"""Processes, numbered over all runs and hosts because several may have the same pid."""
_COLUMNS: Final = ("path", "size_bytes", "offset", "ret", "epoch", "step")


def _documents(events: EventsView, progress: Progress) -> Iterator[dict[str, Any]]:
    sql = f"""
        SELECT e.name, e.cat, 'X' AS ph, e.ts_us AS ts, e.dur_us AS dur, n.number AS pid, e.tid, e.args,
               {", ".join(f'e."{column}"' for column in _COLUMNS)}
        FROM {{events}} e JOIN {_NUMBERED} n
          ON e.run = n.run AND e.pid = n.pid AND e.host IS NOT DISTINCT FROM n.host"""
    for batch in events.read(sql, _BATCH):
        progress.advance(batch.num_rows)
        for row in batch.to_pylist():
            columns = {name: value for name in _COLUMNS if (value := row.pop(name)) is not None}
            yield {**row, "args": {**json.loads(row["args"]), **columns}}
