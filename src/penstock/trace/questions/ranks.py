"""Whether all ranks did the same in the same time: skew, and who held up the others."""

from __future__ import annotations

from statistics import median

from penstock.trace.questions.base import IS_IO, Answer, Column, Events, Unit
from penstock.trace.questions.measures import measured

_MOVED = "coalesce(sum(size_bytes), 0)::BIGINT"
STRAGGLER_RATIO = 1.25
"""A rank that is so much busier with I/O than the median is called a straggler."""


def ranks(events: Events) -> Answer:
    """A row for each process, by run and rank."""
    busy = measured(events, ("run", "rank", "pid", "host"), where=IS_IO, extra=[_MOVED])
    spans = {
        row[:3]: row[3:]
        for row in events.ask("""
            SELECT run, pid, host, max(end_us) - min(min(ts_us)) OVER (PARTITION BY run),
                   coalesce(sum(dur_us) FILTER (WHERE phase = 'app_io'), 0)::BIGINT
            FROM {events} GROUP BY run, pid, host""")
    }
    rows = [
        (
            run,
            rank,
            pid,
            host,
            num_events,
            moved,
            sum_us,
            union_us,
            concurrency,
            *reversed(spans[run, pid, host]),
        )
        for run, rank, pid, host, num_events, sum_us, union_us, concurrency, moved in busy
    ]
    rows.sort(key=lambda row: (row[0], -1 if row[1] is None else row[1], row[2], row[3] or ""))
    middles = {run: median(row[7] for row in rows if row[0] == run) for run in {row[0] for row in rows}}
    judged = [
        (*row, ratio, ratio is not None and ratio > STRAGGLER_RATIO)
        for row in rows
        for ratio in (row[7] / middles[row[0]] if middles[row[0]] else None,)
    ]
    columns = [
        Column("run"),
        Column("rank"),
        Column("pid"),
        Column("host"),
        Column("num_events", Unit.COUNT),
        Column("moved_bytes", Unit.BYTES),
        Column("sum_us", Unit.MICROSECONDS),
        Column("union_us", Unit.MICROSECONDS),
        Column("concurrency", Unit.RATIO),
        Column("app_us", Unit.MICROSECONDS),
        Column("last_event_us", Unit.MICROSECONDS),
        Column("to_median", Unit.RATIO),
        Column("is_straggler"),
    ]
    note = f"A straggler's union is more than {STRAGGLER_RATIO:g} times its run's median."
    return Answer(name="ranks", title="Ranks", columns=columns, rows=judged, notes=[note])
