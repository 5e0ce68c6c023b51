"""Who did how much: operations, files and classes of files, with calls, bytes and measures of time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import (
    GROUPINGS,
    IS_IO,
    IS_READ,
    IS_WRITE,
    Answer,
    Column,
    Events,
    Unit,
    check_keys,
)

_EXTRA = f""",
       coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT AS read_bytes,
       coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT AS written_bytes,
       max(dur_us) AS max_us"""


def ops(events: Events, *, by: Sequence[str] = ("tier", "op")) -> Answer:
    """I/O operations, those that took longest first."""
    return _measured(events, by, where=IS_IO, name="ops", title="Operations")


def files(events: Events, *, by: Sequence[str] = ("path",), top: int | None = None) -> Answer:
    """Files by the time spent on them."""
    return _measured(events, by, where="path IS NOT NULL", name="files", title="Files", top=top)


def classes(events: Events, *, by: Sequence[str] = ("file_class", "op")) -> Answer:
    """Classes of files by the time spent on them."""
    return _measured(events, by, where="path IS NOT NULL", name="classes", title="Classes of files")


def _measured(
    events: Events, by: Sequence[str], *, where: str, name: str, title: str, top: int | None = None
) -> Answer:
    check_keys(by, GROUPINGS)
    limit = f" LIMIT {top}" if top is not None else ""
    extra = _EXTRA if "path" in by else f", count(DISTINCT path) AS num_files{_EXTRA}"
    rows = events.ask(
        measures_sql("{events}", by, where=where, extra=extra)
        + f" ORDER BY sum_us DESC, {', '.join(by)}{limit}"
    )
    columns = [
        *(Column(key) for key in by),
        Column("num_events", Unit.COUNT),
        Column("sum_us", Unit.MICROSECONDS),
        Column("union_us", Unit.MICROSECONDS),
        Column("concurrency", Unit.RATIO),
        *([] if "path" in by else [Column("num_files", Unit.COUNT)]),
        Column("read_bytes", Unit.BYTES),
        Column("written_bytes", Unit.BYTES),
        Column("max_us", Unit.MICROSECONDS),
    ]
    return Answer(name=name, title=f"{title} by {', '.join(by)}", columns=columns, rows=rows)
