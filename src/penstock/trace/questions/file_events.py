"""The life of one file: its events in order."""

from __future__ import annotations

from penstock.errors import UsageError
from penstock.trace.lens import quoted
from penstock.trace.questions.base import Answer, Column, Events, Unit


def file_events(events: Events, path: str) -> Answer:
    """Events of `path`: a whole path, or the base name of a file that occurs once."""
    chosen = _chosen(events, path)
    rows = events.ask(f"""
        SELECT run, rank, tid, ts_us - (SELECT min(ts_us) FROM {{events}}), dur_us, name, op, size_bytes,
               "offset", ret
        FROM {{events}} WHERE path = {quoted(chosen)} ORDER BY ts_us, end_us, tid, name""")
    columns = [
        Column("run"),
        Column("rank"),
        Column("tid"),
        Column("since_start_us", Unit.MICROSECONDS),
        Column("dur_us", Unit.MICROSECONDS),
        Column("name"),
        Column("op"),
        Column("size_bytes", Unit.BYTES),
        Column("offset", Unit.BYTES),
        Column("ret"),
    ]
    return Answer(name="file", title=chosen, columns=columns, rows=rows)


def _chosen(events: Events, path: str) -> str:
    found = events.ask(f"""
        SELECT DISTINCT path FROM {{events}}
        WHERE path = {quoted(path)} OR ends_with(path, {quoted("/" + path.lstrip("/"))})
        ORDER BY path <> {quoted(path)}, path LIMIT 6""")
    paths = [row[0] for row in found]
    if path in paths or len(paths) == 1:
        return str(paths[0])
    if paths:
        raise UsageError(f"Several files end in {path!r}: {', '.join(paths)}", fix="Write the whole path.")
    near = events.ask(f"""
        SELECT path FROM (SELECT DISTINCT path FROM {{events}} WHERE path IS NOT NULL)
        ORDER BY levenshtein(path, {quoted(path)}), path LIMIT 1""")
    advice = f"The nearest name is {near[0][0]}." if near else "This trace names no files at all."
    raise UsageError(f"No event is of a file {path!r}", fix=advice)
