"""What happens over time, in buckets: bytes by tier and by rank, computation beside I/O, metadata calls.

An event that spans several buckets is divided by the time that it spent in each; it counts as a call where it
began. Sums over all buckets are those of the events.
"""

from __future__ import annotations

from typing import Final

from penstock.trace.figures.time_axis import TimeAxis, cut_sql
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView

BANDWIDTH_BUCKETS: Final = 1000
HEAT_BUCKETS: Final = 150
OVERLAP_BUCKETS: Final = 300
MOST_RANK_ROWS: Final = 64
MOST_OPERATIONS: Final = 6

_MOVED: Final = (
    """(size_bytes * (CASE WHEN whole_us > 0 THEN (finish_us - begin_us) / whole_us ELSE 1 END))"""
)
_BEFORE: Final = "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"


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


def rank_cells(events: EventsView, axis: TimeAxis) -> Answer:
    """Bytes and busy time of each rank in each bucket; of many ranks, several neighbours are one row.

    Busy is the time in which a process had at least one call under way; of a row of several processes, the
    mean of them.
    """
    width_us = axis.bucket_us(HEAT_BUCKETS)
    most = max((extent.num_processes for extent in axis.runs.values()), default=1)
    together = -(-most // MOST_RANK_ROWS)
    source = f"""
        SELECT *, max(until_us) OVER (PARTITION BY run, number ORDER BY since_us {_BEFORE}) AS reach_us
        FROM (SELECT e.run, p.number, size_bytes, dur_us AS whole_us, {IS_READ} AS is_read,
                     {IS_READ} OR {IS_WRITE} AS moves,
                     {axis.since_sql("e.run")} AS since_us, since_us + dur_us AS until_us
              FROM {{events}} e JOIN processes p
                ON e.run = p.run AND e.pid = p.pid AND e.host IS NOT DISTINCT FROM p.host
              WHERE {IS_IO})"""
    rows = events.ask(f"""
        WITH processes AS (
            SELECT run, host, pid, min(rank) AS rank,
                   row_number() OVER (PARTITION BY run ORDER BY min(rank) NULLS LAST, host, pid) - 1 AS number
            FROM {{events}} WHERE {IS_IO} GROUP BY run, host, pid),
        row_names AS (
            SELECT run, number // {together} AS row, count(*) AS num_processes, min(rank) AS first_rank,
                   max(rank) AS last_rank, min(pid) AS pid, any_value(host) AS host
            FROM processes GROUP BY ALL),
        cells AS (
            SELECT run, number // {together} AS row, bucket,
                   coalesce(sum({_MOVED}) FILTER (WHERE moves AND is_read), 0) AS read_bytes,
                   coalesce(sum({_MOVED}) FILTER (WHERE moves AND NOT is_read), 0) AS written_bytes,
                   sum(greatest(0, finish_us - greatest(begin_us, coalesce(reach_us, begin_us))))::BIGINT
                   AS busy_us
            FROM ({cut_sql(source, width_us, "run, number, size_bytes, whole_us, is_read, moves, reach_us")})
            GROUP BY ALL)
        SELECT run, row, first_rank, last_rank, host, pid, num_processes, bucket * {width_us}, {width_us},
               read_bytes, written_bytes, busy_us
        FROM cells JOIN row_names USING (run, row) ORDER BY run, row, bucket""")
    columns = make_columns(
        "run", Column("row", Unit.COUNT), Column("first_rank", Unit.COUNT), Column("last_rank", Unit.COUNT),
        "host", Column("pid", Unit.COUNT), "num_processes", "since_start_us", "bucket_us", "read_bytes",
        "written_bytes", "busy_us",
    )  # fmt: skip
    notes = [] if together == 1 else [f"Each row is {together} ranks, next to one another."]
    return Answer(name="rank_cells", title="I/O by rank and time", columns=columns, rows=rows, notes=notes)


def overlap_lanes(events: EventsView, axis: TimeAxis) -> Answer:
    """Time of computation, of I/O, and of both at once in each bucket: sums over processes, by run.

    A process is one rank of a host where ranks are known, because its workers read for it.
    """
    width_us = axis.bucket_us(OVERLAP_BUCKETS)
    process = "run, host, coalesce(rank, pid)"
    source = f"""
        SELECT run, what, greatest(since_us, coalesce(reach_us, since_us)) AS since_us, until_us
        FROM (SELECT *, max(until_us) OVER (PARTITION BY run, process, what ORDER BY since_us {_BEFORE})
                        AS reach_us
              FROM (SELECT *, unnest([is_compute::INTEGER, 2]) AS what FROM timed))
        WHERE until_us > coalesce(reach_us, since_us)"""
    rows = events.ask(f"""
        WITH timed AS (
            SELECT run, dense_rank() OVER (ORDER BY {process}) AS process, phase = 'compute' AS is_compute,
                   {axis.since_sql()} AS since_us, since_us + dur_us AS until_us
            FROM {{events}} WHERE dur_us > 0 AND phase IN ('io', 'compute')
              AND run IN (SELECT run FROM {{events}} WHERE phase = 'compute')),
        spent AS (
            SELECT run, bucket,
                   coalesce(sum(finish_us - begin_us) FILTER (WHERE what = 1), 0)::BIGINT AS compute_us,
                   coalesce(sum(finish_us - begin_us) FILTER (WHERE what = 0), 0)::BIGINT AS io_us,
                   coalesce(sum(finish_us - begin_us) FILTER (WHERE what = 2), 0)::BIGINT AS either_us
            FROM ({cut_sql(source, width_us, "run, what")}) GROUP BY run, bucket)
        SELECT run, bucket * {width_us}, {width_us},
               (SELECT count(DISTINCT process) FROM timed t WHERE t.run = spent.run),
               compute_us, io_us, compute_us + io_us - either_us
        FROM spent ORDER BY run, bucket""")
    columns = make_columns(
        "run", "since_start_us", "bucket_us", "num_processes", "compute_us", "io_us", "both_us"
    )
    return Answer(name="overlap_lanes", title="Computation and I/O", columns=columns, rows=rows)


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
