"""What happened when: I/O in buckets of time by tier, and the events of one file in order.

An event that spans several buckets is divided by the time it spent in each; it counts as an operation where
it began. A bucket's concurrency is the mean over the whole bucket.
"""

from collections.abc import Mapping
from typing import Any

from penstock.errors import UsageError
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_cells import add_up, find_cells
from penstock.trace.interval_union import union_by_bucket
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView

_BUCKETS_WANTED = 100
_MOST_BUCKETS = 100_000


def timeline(events: EventsView, *, bucket_us: int | None = None) -> Answer:
    """A row for each bucket of each run and tier in which there was I/O."""
    cells = add_up(events, ("run", "tier", "phase"))
    starts = cells.ask(f"""
        SELECT run, min(first_us), max(last_us) FILTER (WHERE {IS_IO}) - min(first_us)
        FROM {{events}} GROUP BY run""")
    origins: dict[str, int] = {run: first_us for run, first_us, _ in starts}
    span_us = max((span for _, _, span in starts if span is not None), default=1)
    width = bucket_us or _round_width(span_us)
    if span_us // width > _MOST_BUCKETS:
        raise UsageError(
            f"The trace has {span_us // width:,} buckets of this size", fix="Use larger buckets."
        )
    busy_us = union_by_bucket(
        events, ("run", "tier"), IS_IO, width_us=width, origin_of=lambda key: origins[key[0]]
    )
    pieces = _measure_buckets(events, origins, width)
    rows = [
        (run, tier, bucket * width, width, started, read, written, read * 1e6 / width, written * 1e6 / width,
         inside / width, busy_us.get((run, tier, bucket), 0) / width)
        for run, tier, bucket, started, read, written, inside in pieces
    ]  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[1] or "", row[2]))
    columns = make_columns(
        "run", "tier", "since_start_us", "bucket_us", "num_started", "read_bytes", "written_bytes",
        "read_rate", "write_rate", "concurrency", "busy_share",
    )  # fmt: skip
    note = f"Each bucket is {width / 1e6:g} s; times are since the run's first event."
    return Answer(name="timeline", title="Timeline", columns=columns, rows=rows, notes=[note])


def _measure_buckets(events: EventsView, origins: Mapping[str, int], width: int) -> list[tuple[Any, ...]]:
    """Run, tier, bucket, calls that began in it, bytes read and written, and the sum of times within it.

    Nearly all events are within one bucket, and skip the general case. Where numbers decide what kind of call
    an event is, events are added up by those first.
    """
    kinds = find_cells(events, ("run", "tier", "op", "phase"))
    kind, where, join = "op", IS_IO, ""
    if kinds is not None:
        kind, where = "kind_id", "true"
        join = (
            f"JOIN (SELECT DISTINCT kind_id, op, phase FROM {kinds.relation}) USING (kind_id) WHERE {IS_IO}"
        )
    cases = "".join(f" WHEN {sql_literal(run)} THEN {origin_us}" for run, origin_us in origins.items())
    origin = f"CASE run{cases} ELSE 0 END" if cases else "0"
    chosen = events.fill_in(
        f"SELECT run, tier, {kind}, size_bytes, dur_us, ts_us FROM {{events}} WHERE {where}"
    )
    return events.of_relation(f"({chosen})").ask(f"""
        WITH shifted AS NOT MATERIALIZED (
            SELECT run, tier, {kind}, size_bytes, dur_us, ts_us - {origin} AS since_us,
                   since_us + dur_us AS until_us, since_us // {width} AS first,
                   greatest(since_us, until_us - 1) // {width} AS last
            FROM {{events}}),
        pieces AS (
            SELECT run, tier, {kind}, first AS bucket, count(*) AS started, sum(size_bytes)::DOUBLE AS moved,
                   sum(dur_us) AS inside_us
            FROM shifted WHERE first = last GROUP BY ALL
            UNION ALL
            SELECT run, tier, {kind}, bucket, count(*) FILTER (WHERE bucket = first),
                   sum(size_bytes * piece_us / dur_us), sum(piece_us)
            FROM (
                SELECT *, least(until_us, (bucket + 1) * {width}) - greatest(since_us, bucket * {width})
                       AS piece_us
                FROM (SELECT *, unnest(range(first, last + 1)) AS bucket FROM shifted WHERE first < last))
            GROUP BY ALL)
        SELECT run, tier, bucket, sum(started)::BIGINT, coalesce(sum(moved) FILTER (WHERE {IS_READ}), 0),
               coalesce(sum(moved) FILTER (WHERE {IS_WRITE}), 0), sum(inside_us)::BIGINT
        FROM pieces {join} GROUP BY run, tier, bucket""")


def _round_width(span_us: int) -> int:
    """1, 2 or 5 times a power of ten microseconds, for about a hundred buckets."""
    wanted, power = max(1, span_us // _BUCKETS_WANTED), 1
    while wanted > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted <= step * power)


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
