"""What happened when: I/O in buckets of time by tier, and the events of one file in order.

An event that spans several buckets is divided by the time it spent in each; it counts as an operation where
it began. A bucket's concurrency is the mean over the whole bucket.
"""

from __future__ import annotations

from penstock.errors import UsageError
from penstock.trace.dimensions import sql_literal
from penstock.trace.interval_union import measure_groups
from penstock.trace.questions.answer import Answer, Column, Unit
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000
_SHARE = "(size_bytes * (CASE WHEN whole_us > 0 THEN dur_us / whole_us ELSE 1 END))"
_EXTRA = (
    "count(*) FILTER (WHERE is_first)",
    f"coalesce(sum({_SHARE}) FILTER (WHERE {IS_READ}), 0)",
    f"coalesce(sum({_SHARE}) FILTER (WHERE {IS_WRITE}), 0)",
    "sum(dur_us)::BIGINT",
)


def timeline(events: EventsView, *, bucket_us: int | None = None) -> Answer:
    """A row for each bucket of each run and tier in which something went on."""
    span_us = events.ask_one(f"""
        SELECT coalesce(max(span), 1) FROM (
            SELECT max(end_us) FILTER (WHERE {IS_IO}) - min(ts_us) AS span FROM {{events}} GROUP BY run)""")[
        0
    ]
    width = bucket_us or _round_width(span_us)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(f"The trace has {span_us // width:,} such buckets", fix="Take larger ones.")
    cut = EventsView(connection=events.connection, relation=_cut(events, width))
    keys = ("run", "tier", "bucket")
    rows = [
        (run, tier, bucket * width, width, started, read, written, read * 1e6 / width, written * 1e6 / width,
         inside / width, union_us / width)
        for run, tier, bucket, _, _, union_us, _, started, read, written, inside in measure_groups(
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


def _cut(events: EventsView, width: int) -> str:
    """Events cut at the edges of buckets; nearly all lie in one, and are spared the general case."""
    origins = events.ask("SELECT run, min(ts_us) FROM {events} GROUP BY run")
    cases = "".join(f" WHEN {sql_literal(run)} THEN {origin_us}" for run, origin_us in origins)
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


def file_events(events: EventsView, path: str) -> Answer:
    """Events of `path`: a whole path, or the base name of a file that occurs once."""
    chosen = _chosen(events, path)
    rows = events.ask(f"""
        SELECT run, rank, tid, ts_us - (SELECT min(ts_us) FROM {{events}}), dur_us, name, op, size_bytes,
               "offset", ret
        FROM {{events}} WHERE path = {sql_literal(chosen)} ORDER BY ts_us, end_us, tid, name""")
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


def _chosen(events: EventsView, path: str) -> str:
    found = events.ask(f"""
        SELECT DISTINCT path FROM {{events}}
        WHERE path = {sql_literal(path)} OR ends_with(path, {sql_literal("/" + path.lstrip("/"))})
        ORDER BY path <> {sql_literal(path)}, path LIMIT 6""")
    paths = [row[0] for row in found]
    if path in paths or len(paths) == 1:
        return str(paths[0])
    if paths:
        raise UsageError(f"Several files end in {path!r}: {', '.join(paths)}", fix="Write the whole path.")
    near = events.ask(f"""
        SELECT path FROM (SELECT DISTINCT path FROM {{events}} WHERE path IS NOT NULL)
        ORDER BY levenshtein(path, {sql_literal(path)}), path LIMIT 1""")
    advice = f"The nearest name is {near[0][0]}." if near else "This trace names no files at all."
    raise UsageError(f"No event is of a file {path!r}", fix=advice)
