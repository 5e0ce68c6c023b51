"""What happened when: I/O in buckets of time by tier, and the events of one file in order.

An event that spans several buckets is divided by the time it spent in each; it counts as an operation where
it began. A bucket's concurrency is the mean over the whole bucket.
"""

from penstock.errors import UsageError
from penstock.trace.dimensions import IS_IO, IS_READ, IS_WRITE, EventsView, case_sql, sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.breakdowns import union_in_buckets

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000


def round_up(wanted_us: int) -> int:
    """The next round length of time: 1, 2 or 5 times a power of ten microseconds."""
    power = 1
    while wanted_us > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted_us <= step * power)


def cut_sql(source: str, bucket_us: int, kept: str) -> str:
    """SELECT `kept`, bucket, begin_us and finish_us: `source` cut at the edges of buckets.

    `source` is a SELECT with `since_us` and `until_us`. Most events are within one bucket, and skip the
    general case.
    """
    placed = f"""
        (SELECT *, since_us // {bucket_us} AS first_bucket,
                greatest(since_us, until_us - 1) // {bucket_us} AS last_bucket FROM ({source}))"""
    return f"""
        SELECT {kept}, first_bucket AS bucket, since_us AS begin_us, until_us AS finish_us
        FROM {placed} WHERE first_bucket = last_bucket
        UNION ALL
        SELECT {kept}, bucket, greatest(since_us, bucket * {bucket_us}),
               least(until_us, (bucket + 1) * {bucket_us})
        FROM (SELECT *, unnest(range(first_bucket, last_bucket + 1)) AS bucket FROM {placed}
              WHERE first_bucket < last_bucket)"""


def share_sql(what: str) -> str:
    """SQL of the part of `what` that a piece of `cut_sql` has, of an event that took `whole_us`."""
    return f"({what} * (CASE WHEN whole_us > 0 THEN (finish_us - begin_us) / whole_us ELSE 1 END))"


def timeline(events: EventsView, *, bucket_us: int | None = None) -> Answer:
    """A row for each bucket of each run and tier in which there was I/O."""
    starts = events.ask(f"""
        SELECT run, min(ts_us), max(end_us) FILTER (WHERE {IS_IO}) - min(ts_us)
        FROM {{events}} GROUP BY run""")
    origins: dict[str, int] = {run: first_us for run, first_us, _ in starts}
    span_us = max((span for _, _, span in starts if span is not None), default=1)
    width = bucket_us or round_up(span_us // _BUCKETS_WANTED)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(
            f"The trace has {span_us // width:,} buckets of this size", fix="Use larger buckets."
        )
    source = f"""
        SELECT run, tier, coalesce(size_bytes, 0) AS size_bytes, {IS_READ} AS is_read, {IS_WRITE} AS is_write,
               dur_us AS whole_us, ts_us - {case_sql("run", origins)} AS since_us,
               since_us + dur_us AS until_us
        FROM {{events}} WHERE {IS_IO}"""
    moved = share_sql("size_bytes")
    sums = events.ask(f"""
        SELECT run, tier, bucket, count(*) FILTER (WHERE begin_us = since_us),
               coalesce(sum({moved}) FILTER (WHERE is_read), 0)::DOUBLE,
               coalesce(sum({moved}) FILTER (WHERE is_write), 0)::DOUBLE, sum(finish_us - begin_us)::BIGINT
        FROM ({cut_sql(source, width, "run, tier, size_bytes, is_read, is_write, whole_us, since_us")})
        GROUP BY run, tier, bucket""")
    busy = union_in_buckets(
        events, ("run", "tier"), IS_IO, width_us=width, origin_of=lambda key: origins[key[0]]
    )
    rows = []
    for run, tier, bucket, num_started, read_bytes, written_bytes, inside_us in sums:
        (busy_us,) = busy.get(((run, tier), bucket), (0,))
        rates = read_bytes * 1e6 / width, written_bytes * 1e6 / width
        rows.append(
            (run, tier, bucket * width, width, num_started, read_bytes, written_bytes, *rates,
             inside_us / width, busy_us / width)
        )  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1] or "", row[2]))
    columns = make_columns(
        "run", "tier", "since_start_us", "bucket_us", "num_started", "read_bytes", "written_bytes",
        "read_rate", "write_rate", "concurrency", "busy_share",
    )  # fmt: skip
    note = f"Each bucket is {width / 1e6:g} s; times are since the run's first event."
    return Answer(name="timeline", title="Timeline", columns=columns, rows=rows, notes=[note])


def file_events(events: EventsView, path: str) -> Answer:
    """The events of `path`, which is a whole path or the end of one that is unique."""
    path = _find_path(events, path)
    rows = events.ask(f"""
        SELECT run, rank, tid, ts_us - (SELECT min(ts_us) FROM {{events}}), dur_us, name, op, size_bytes,
               "offset", ret
        FROM {{events}} WHERE path = {sql_literal(path)} ORDER BY ts_us, end_us, tid, name""")
    columns = make_columns(
        "run", "rank", "tid", "since_start_us", "dur_us", "name", "op", "size_bytes",
        Column("offset", Unit.BYTES), "ret",
    )  # fmt: skip
    return Answer(name="file", title=path, columns=columns, rows=rows)


def _find_path(events: EventsView, path: str) -> str:
    matches = events.ask(f"""
        SELECT DISTINCT path FROM {{events}}
        WHERE path = {sql_literal(path)} OR ends_with(path, {sql_literal("/" + path.lstrip("/"))})
        ORDER BY path <> {sql_literal(path)}, path LIMIT 6""")
    paths = [row[0] for row in matches]
    if path in paths or len(paths) == 1:
        return str(paths[0])
    if paths:
        raise UsageError(f"Several files end in {path!r}: {', '.join(paths)}", fix="Give the whole path.")
    nearest = events.ask(f"""
        SELECT path FROM (SELECT DISTINCT path FROM {{events}} WHERE path IS NOT NULL)
        ORDER BY levenshtein(path, {sql_literal(path)}), path LIMIT 1""")
    advice = f"The nearest name is {nearest[0][0]}." if nearest else "This trace names no files."
    raise UsageError(f"No event has the file {path!r}", fix=advice)
