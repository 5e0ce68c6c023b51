"""What went on when: bytes, operations and concurrency in buckets of time, by tier.

An event that spans several buckets is shared out by the time it spent in each; it counts as an operation
where it began. A bucket's concurrency is the mean over the whole bucket.
"""

from __future__ import annotations

from penstock.errors import UsageError
from penstock.trace.lens import quoted
from penstock.trace.questions.base import IS_IO, IS_READ, IS_WRITE, Answer, Column, Events, Unit
from penstock.trace.questions.measures import measured

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000
_SHARE = "(size_bytes * (CASE WHEN whole_us > 0 THEN dur_us / whole_us ELSE 1 END))"
_EXTRA = (
    "count(*) FILTER (WHERE is_first)",
    f"coalesce(sum({_SHARE}) FILTER (WHERE {IS_READ}), 0)",
    f"coalesce(sum({_SHARE}) FILTER (WHERE {IS_WRITE}), 0)",
    "sum(dur_us)::BIGINT",
)


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
    cut = Events(connection=events.connection, relation=_cut(events, width))
    keys = ("run", "tier", "bucket")
    rows = [
        (run, tier, bucket * width, width, started, read, written, read * 1e6 / width, written * 1e6 / width,
         inside / width, union_us / width)
        for run, tier, bucket, _, _, union_us, _, started, read, written, inside in measured(
            cut, keys, where="true", extra=_EXTRA
        )
    ]  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1] or "", row[2]))
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


def _cut(events: Events, width: int) -> str:
    """Events cut at the edges of buckets; nearly all lie in one, and are spared the general case."""
    origins = events.ask("SELECT run, min(ts_us) FROM {events} GROUP BY run")
    cases = "".join(f" WHEN {quoted(run)} THEN {origin_us}" for run, origin_us in origins)
    origin = f"CASE run{cases} ELSE 0 END" if cases else "0"
    shifted = f"""
        SELECT run, tier, op, size_bytes, dur_us AS whole_us, ts_us - {origin} AS since_us,
               since_us + dur_us AS until_us, since_us // {width} AS first,
               greatest(since_us, until_us - 1) // {width} AS last
        FROM {events.relation} WHERE {IS_IO}"""
    kept = "run, tier, op, size_bytes, whole_us"
    return f"""(
        WITH shifted AS ({shifted})
        SELECT {kept}, first AS bucket, true AS is_first, since_us AS ts_us, until_us AS end_us,
               until_us - since_us AS dur_us
        FROM shifted WHERE first = last
        UNION ALL
        SELECT {kept}, bucket, bucket = first, greatest(since_us, bucket * {width}) AS begin,
               least(until_us, (bucket + 1) * {width}) AS finish, finish - begin
        FROM (SELECT *, unnest(range(first, last + 1)) AS bucket FROM shifted WHERE first < last))"""


def _round_width(span_us: int) -> int:
    """1, 2 or 5 times a power of ten microseconds, for about a hundred buckets."""
    wanted, power = max(1, span_us // _BUCKETS_WANTED), 1
    while wanted > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted <= step * power)
