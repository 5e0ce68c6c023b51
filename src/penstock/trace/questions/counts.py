"""Who did how much: operations, files and classes of files, with calls, bytes and measures of time."""

from __future__ import annotations

from collections.abc import Sequence

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
from penstock.trace.questions.measures import measured

_EXTRA = (
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT",
    f"coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT",
    "max(dur_us)",
)


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
    extra = _EXTRA if "path" in by else ("count(DISTINCT path)", *_EXTRA)
    rows = measured(events, by, where=where, extra=extra)
    width = len(by)
    rows.sort(key=lambda row: (-row[width + 1], *map(str, row[:width])))
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
    return Answer(name=name, title=f"{title} by {', '.join(by)}", columns=columns, rows=rows[:top])
