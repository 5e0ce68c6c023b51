"""What happens over time, in buckets: bytes by tier and by rank, computation beside I/O, metadata calls.

An event that spans several buckets is divided by the time that it spent in each; it counts as a call where it
began. Sums over all buckets are those of the events.
"""

from typing import Final

from penstock.trace.figures.placed_calls import CALLS, THREADS, PlacedCalls
from penstock.trace.figures.time_axis import TimeAxis
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView
from penstock.trace.questions.timeline import cut_sql, share_sql

BANDWIDTH_BUCKETS: Final = 1000
HEAT_BUCKETS: Final = 150
OVERLAP_BUCKETS: Final = 300
MOST_RANK_ROWS: Final = 64
MOST_OPERATIONS: Final = 6

_MOVED: Final = share_sql("size_bytes")


def bandwidth(events: EventsView, axis: TimeAxis) -> Answer:
    """Bytes read and written in each fine bucket, by run and tier; buckets without bytes are left out."""
    width_us = axis.bucket_us(BANDWIDTH_BUCKETS)
    since = axis.since_sql()
    source = f"""
        SELECT run, tier, size_bytes, {IS_READ} AS is_read, dur_us AS whole_us, {since} AS since_us,
               since_us + dur_us AS until_us
        FROM {{events}} WHERE {IS_IO} AND size_bytes > 0 AND ({IS_READ} OR {IS_WRITE})"""
    rows = events.ask(f"""
        SELECT run, tier, bucket * {width_us}, {width_us},
               coalesce(sum({_MOVED}) FILTER (WHERE is_read), 0),
               coalesce(sum({_MOVED}) FILTER (WHERE NOT is_read), 0)
        FROM ({cut_sql(source, width_us, "run, tier, size_bytes, is_read, whole_us")})
        GROUP BY run, tier, bucket ORDER BY run, tier, bucket""")
    columns = make_columns("run", "tier", "since_start_us", "bucket_us", "read_bytes", "written_bytes")
    return Answer(name="bandwidth", title="Bandwidth over time", columns=columns, rows=rows)


def rank_cells(placed: PlacedCalls) -> Answer:
    """Bytes and busy time of each rank in each bucket; of many ranks, several neighbours are one row.

    Busy is the time in which a rank had at least one call under way; of a row of several, the sum of them.
    """
    width_us = placed.axis.bucket_us(HEAT_BUCKETS)
    (num_rows,) = placed.events.ask_one(f"SELECT coalesce(max(row), 0) + 1 FROM {THREADS}")
    together = -(-num_rows // MOST_RANK_ROWS)
    source = f"""
        SELECT process, kind, size_bytes, until_us - since_us AS whole_us, io_from_us, since_us, until_us
        FROM {CALLS} WHERE kind <> 'compute'"""
    rows = placed.events.ask(f"""
        WITH cells AS (
            SELECT process, bucket,
                   coalesce(sum({_MOVED}) FILTER (WHERE kind = 'read'), 0) AS read_bytes,
                   coalesce(sum({_MOVED}) FILTER (WHERE kind = 'write'), 0) AS written_bytes,
                   sum(greatest(0, finish_us - greatest(begin_us, io_from_us))) AS busy_us
            FROM ({cut_sql(source, width_us, "process, kind, size_bytes, whole_us, io_from_us")})
            GROUP BY process, bucket),
        ranks AS (
            SELECT run, process, row // {together} AS row, min(rank) AS rank, min(pid) AS pid,
                   any_value(host) AS host
            FROM {THREADS} SEMI JOIN cells USING (process) GROUP BY ALL),
        row_names AS (
            SELECT run, row, min(rank) AS first_rank, max(rank) AS last_rank, any_value(host) AS host,
                   min(pid) AS pid, count(*) AS num_processes
            FROM ranks GROUP BY run, row)
        SELECT run, row, first_rank, last_rank, n.host, n.pid, num_processes, bucket * {width_us}, {width_us},
               sum(read_bytes), sum(written_bytes), sum(busy_us)::BIGINT
        FROM cells JOIN ranks USING (process) JOIN row_names n USING (run, row)
        GROUP BY run, row, first_rank, last_rank, n.host, n.pid, num_processes, bucket
        ORDER BY run, row, bucket""")
    columns = make_columns(
        "run", Column("row", Unit.COUNT), Column("first_rank", Unit.COUNT), Column("last_rank", Unit.COUNT),
        "host", Column("pid", Unit.COUNT), "num_processes", "since_start_us", "bucket_us", "read_bytes",
        "written_bytes", "busy_us",
    )  # fmt: skip
    notes = [] if together == 1 else [f"Each row is {together} ranks, next to one another."]
    return Answer(name="rank_cells", title="I/O by rank and time", columns=columns, rows=rows, notes=notes)


def overlap_lanes(placed: PlacedCalls) -> Answer:
    """Time of computation, of I/O, and of both at once in each bucket: sums over the ranks of a run."""
    width_us = placed.axis.bucket_us(OVERLAP_BUCKETS)
    source = " UNION ALL ".join(
        f"SELECT process, '{what}' AS what, {what}_from_us AS since_us, until_us FROM {CALLS} "
        f"WHERE {what}_from_us < until_us AND any_from_us IS NOT NULL"
        for what in ("io", "compute", "any")
    )
    rows = placed.events.ask(f"""
        WITH spent AS (
            SELECT process, bucket, {", ".join(map(_spent, ("compute", "io", "any")))}
            FROM ({cut_sql(source, width_us, "process, what")}) GROUP BY process, bucket),
        computing AS (
            SELECT run, count(DISTINCT process) AS num_processes
            FROM {THREADS} SEMI JOIN spent USING (process) GROUP BY run),
        by_run AS (
            SELECT run, bucket, sum(compute_us)::BIGINT AS compute_us, sum(io_us)::BIGINT AS io_us,
                   sum(any_us)::BIGINT AS any_us
            FROM spent JOIN (SELECT DISTINCT run, process FROM {THREADS}) USING (process)
            GROUP BY run, bucket)
        SELECT run, bucket * {width_us}, {width_us}, num_processes, compute_us, io_us,
               compute_us + io_us - any_us
        FROM by_run JOIN computing USING (run)
        WHERE run IN (SELECT run FROM by_run WHERE compute_us > 0) ORDER BY run, bucket""")
    columns = make_columns(
        "run", "since_start_us", "bucket_us", "num_processes", "compute_us", "io_us", "both_us"
    )
    return Answer(name="overlap_lanes", title="Computation and I/O", columns=columns, rows=rows)


def _spent(what: str) -> str:
    return f"coalesce(sum(finish_us - begin_us) FILTER (WHERE what = '{what}'), 0) AS {what}_us"


def metadata_calls(events: EventsView, axis: TimeAxis) -> Answer:
    """Calls that move no data (open, stat, seek, close, sync) in each bucket, by run and operation.

    The most frequent operations have their names, the others are `other`.
    """
    width_us = axis.bucket_us(HEAT_BUCKETS)
    is_metadata = f"{IS_IO} AND NOT ({IS_READ} OR {IS_WRITE})"
    rows = events.ask(f"""
        WITH frequent AS (
            SELECT op FROM {{events}} WHERE {is_metadata} GROUP BY op ORDER BY count(*) DESC, op
            LIMIT {MOST_OPERATIONS})
        SELECT run, CASE WHEN op IN (SELECT op FROM frequent) THEN op ELSE 'other' END AS operation,
               {axis.since_sql()} // {width_us} * {width_us} AS since_us, {width_us}, count(*),
               sum(dur_us)::BIGINT
        FROM {{events}} WHERE {is_metadata} GROUP BY ALL ORDER BY run, operation, since_us""")
    columns = make_columns("run", "op", "since_start_us", "bucket_us", "num_calls", "sum_us")
    return Answer(name="metadata_calls", title="Metadata operations over time", columns=columns, rows=rows)
