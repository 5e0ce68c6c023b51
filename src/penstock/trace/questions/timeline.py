"""What went on when: bytes, operations and concurrency in buckets of time, by tier.

An event that spans several buckets is shared out by the time it spent in each; it counts as an operation
where it began. A bucket's concurrency is the mean over the whole bucket.
"""

from __future__ import annotations

from penstock.errors import UsageError
from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import IS_IO, IS_READ, IS_WRITE, Answer, Column, Events, Unit

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000


def timeline(events: Events, *, bucket_us: int | None = None) -> Answer:
    """A row for each bucket of each run and tier in which something went on."""
    span_us = events.ask_one(f"""
        SELECT coalesce(max(span), 1) FROM (
            SELECT max(end_us) FILTER (WHERE {IS_IO}) - min(ts_us) AS span FROM {{events}} GROUP BY run)""")[
        0
    ]
    width = bucket_us or _round_width(span_us)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(f"The trace has {span_us // width:,} such buckets", fix="Take larger ones.")
    share = "(size_bytes * (CASE WHEN dur_us > 0 THEN (end_us - ts_us) / dur_us ELSE 1 END))"
    extra = f""",
        count(*) FILTER (WHERE is_first) AS num_started,
        coalesce(sum({share}) FILTER (WHERE {IS_READ}), 0) AS read_bytes,
        coalesce(sum({share}) FILTER (WHERE {IS_WRITE}), 0) AS written_bytes,
        sum(end_us - ts_us)::BIGINT AS inside_us"""
    keys = ("run", "tier", "bucket")
    rows = events.ask(f"""
        WITH origins AS (SELECT run, min(ts_us) AS origin_us FROM {{events}} GROUP BY run),
        shifted AS (
            SELECT run, tier, op, size_bytes, dur_us,
                   ts_us - origin_us AS ts_us, end_us - origin_us AS end_us
            FROM {{events}} JOIN origins USING (run) WHERE {IS_IO}),
        cut AS (
            SELECT run, tier, op, size_bytes, dur_us, bucket, bucket = ts_us // {width} AS is_first,
                   greatest(ts_us, bucket * {width}) AS ts_us, least(end_us, (bucket + 1) * {width}) AS end_us
            FROM (SELECT *, unnest(range(ts_us // {width}, last_us // {width} + 1)) AS bucket
                  FROM (SELECT *, greatest(ts_us, end_us - 1) AS last_us FROM shifted)))
        SELECT run, tier, bucket * {width}, {width}, num_started, read_bytes, written_bytes,
               read_bytes * 1e6 / {width}, written_bytes * 1e6 / {width},
               inside_us / {width}, union_us / {width}
        FROM ({measures_sql("cut", keys, extra=extra)}) ORDER BY run, tier, bucket""")
    columns = [
        Column("run"),
        Column("tier"),
        Column("since_start_us", Unit.MICROSECONDS),
        Column("bucket_us", Unit.MICROSECONDS),
        Column("num_started", Unit.COUNT),
        Column("read_bytes", Unit.BYTES),
        Column("written_bytes", Unit.BYTES),
        Column("read_rate", Unit.RATE),
        Column("write_rate", Unit.RATE),
        Column("concurrency", Unit.RATIO),
        Column("busy_share", Unit.SHARE),
    ]
    note = f"Each bucket is {width / 1e6:g} s; times are since the run's first event."
    return Answer(name="timeline", title="Timeline", columns=columns, rows=rows, notes=[note])


def _round_width(span_us: int) -> int:
    """1, 2 or 5 times a power of ten microseconds, for about a hundred buckets."""
    wanted, power = max(1, span_us // _BUCKETS_WANTED), 1
    while wanted > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted <= step * power)
