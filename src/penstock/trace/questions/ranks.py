"""Whether all ranks did the same in the same time: skew, and who held up the others."""

from __future__ import annotations

from statistics import median

from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import IS_IO, Answer, Column, Events, Unit

STRAGGLER_RATIO = 1.25
"""A rank that is so much busier with I/O than the median is called a straggler."""


def ranks(events: Events) -> Answer:
    """A row for each process, by run and rank."""
    rows = events.ask(f"""
        WITH io AS ({measures_sql("{events}", ("run", "rank", "pid", "host"), where=IS_IO)}),
             span AS (
                SELECT run, pid, host,
                       coalesce(sum(size_bytes) FILTER (WHERE {IS_IO}), 0)::BIGINT AS moved_bytes,
                       max(end_us) - min(min(ts_us)) OVER (PARTITION BY run) AS last_us,
                       coalesce(sum(dur_us) FILTER (WHERE phase = 'app_io'), 0)::BIGINT AS app_us
                FROM {{events}} GROUP BY run, pid, host)
        SELECT io.run, rank, io.pid, io.host, num_events, moved_bytes, sum_us, union_us, concurrency,
               app_us, last_us
        FROM io JOIN span
          ON io.run = span.run AND io.pid = span.pid AND io.host IS NOT DISTINCT FROM span.host
        ORDER BY io.run, rank, io.pid, io.host""")
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
