"""The rows of each figure of a report: one SQL query for each, with as many rows as a drawing can show.

    events -> TimeAxis, which all runs share -> calls, placed on it as numbers -> rows of figures

An event that spans several buckets of time is divided by the time that it spent in each; it counts as a call
in the bucket where it began. Sums over all buckets equal those of the events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.trace.dimensions import IS_IO, IS_READ, IS_WRITE, LEADER, EventsView, case_sql, sql_literal
from penstock.trace.questions.answer import Answer, Column, Unit, make_columns
from penstock.trace.questions.breakdowns import MOVED_PART, cut_sql, round_up
from penstock.units import format_seconds

KIND = f"""CASE WHEN phase = 'compute' THEN 'compute' WHEN phase <> 'io' THEN NULL
                WHEN {IS_READ} THEN 'read' WHEN {IS_WRITE} THEN 'write' ELSE 'metadata' END"""
"""An SQL expression for the kind of call or computation that a drawing shows for an event, otherwise NULL."""
LOOP_PART = """CASE WHEN phase IN ('wait', 'barrier') THEN phase WHEN phase = 'stall' THEN 'checkpoint'
                     WHEN phase = 'app_io' AND contains(cat, 'checkpoint') THEN 'checkpoint'
                     WHEN phase = 'loop' AND cat = 'step' THEN 'step' END"""
"""An SQL expression for the part of a program's loop that a drawing shows for an event, otherwise NULL."""


@dataclass(frozen=True, slots=True)
class RunExtent:
    """The beginning and the span of a run, and the number of events that some figures draw."""

    origin_us: int
    span_us: int
    num_compute: int
    num_offsets: int


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The runs that have events, in their order, and the span of the longest."""

    events: EventsView
    runs: Mapping[str, RunExtent]
    span_us: int

    def since_sql(self, run: str = "run") -> str:
        """Return SQL for an event's start since its run's first event; `run` is the column of run names."""
        return f"(ts_us - {case_sql(run, {name: extent.origin_us for name, extent in self.runs.items()})})"

    def bucket_us(self, most: int) -> int:
        """Return a round time (1, 2 or 5 times a power of ten) of which at most `most` cover the axis."""
        return round_up(-(-(self.span_us + 1) // most))


def measure_axis(events: EventsView, runs: Sequence[str]) -> TimeAxis:
    """Return the time axis of these runs; runs without events are left out."""
    rows = events.ask(f"""
        SELECT run, min(ts_us), max(end_us) - min(ts_us),
               count(*) FILTER (WHERE phase = 'compute' AND dur_us > 0),
               count(*) FILTER (WHERE {IS_IO} AND "offset" IS NOT NULL AND size_bytes > 0)
        FROM {{events}} GROUP BY run""")
    extents = {run: RunExtent(*measured) for run, *measured in rows}
    ordered = {run: extents[run] for run in runs if run in extents}
    return TimeAxis(events, ordered, max((extent.span_us for extent in ordered.values()), default=1))


THREADS: Final = "penstock_threads"
"""Table: run, host, pid, tid, rank, leader; `thread` and `process`, numbered over all runs; `row`, per run.

A process is a rank of a host if ranks are known, else a process together with the workers that read for it.
"""
CALLS: Final = "penstock_calls"
"""Table: process, thread, kind, since_us, until_us, size_bytes; and the time from which each event adds to
the union of I/O (`io_from_us`), of computation (`compute_from_us`), or of both (`any_from_us`).
"""
LOOP_PARTS: Final = "penstock_loop_parts"
"""The table of the steps, waits and checkpoints that a program records: thread, kind, since_us, until_us."""


def place_calls(axis: TimeAxis) -> None:
    """Make the tables of threads, calls and loop parts, replacing earlier ones on this connection."""
    events = axis.events
    process = "rank NULLS LAST, host, CASE WHEN rank IS NULL THEN leader END"
    events.ask(f"""
        CREATE OR REPLACE TEMP TABLE {THREADS} AS
        SELECT *, row_number() OVER (ORDER BY run, {process}, pid, tid)::INTEGER AS thread,
               dense_rank() OVER (ORDER BY run, {process})::INTEGER AS process,
               dense_rank() OVER (PARTITION BY run ORDER BY {process}) - 1 AS row
        FROM (SELECT run, host, pid, tid, min(min(rank)) OVER (PARTITION BY run, host, pid) AS rank,
                     min({LEADER}) AS leader
              FROM {{events}} WHERE phase IN ('io', 'compute') OR {LOOP_PART} IS NOT NULL
              GROUP BY run, host, pid, tid)""")
    has_compute = any(extent.num_compute for extent in axis.runs.values())
    parts = {"io": "kind <> 'compute'", "compute": "kind = 'compute'", "any": "true"}
    columns = ", ".join(
        f"{_part(where) if has_compute or what == 'io' else 'NULL::BIGINT'} AS {what}_from_us"
        for what, where in parts.items()
    )
    events.ask(f"""
        CREATE OR REPLACE TEMP TABLE {CALLS} AS
        SELECT *, {columns}
        FROM (SELECT t.process, t.thread, ({KIND})::ENUM ('read', 'write', 'metadata', 'compute') AS kind,
                     {axis.since_sql("e.run")} AS since_us, since_us + dur_us AS until_us, size_bytes
              FROM {{events}} e JOIN {THREADS} t ON {_SAME_THREAD} WHERE phase IN ('io', 'compute'))
        WINDOW before AS (PARTITION BY process ORDER BY since_us
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)""")
    events.ask(f"""
        CREATE OR REPLACE TEMP TABLE {LOOP_PARTS} AS
        SELECT t.thread, {LOOP_PART} AS kind, {axis.since_sql("e.run")} AS since_us,
               since_us + dur_us AS until_us
        FROM {{events}} e JOIN {THREADS} t ON {_SAME_THREAD}
        -- The first condition is cheap, and holds for few events.
        WHERE phase NOT IN ('io', 'compute') AND {LOOP_PART} IS NOT NULL""")


_SAME_THREAD: Final = (
    "e.run = t.run AND e.pid = t.pid AND e.tid = t.tid AND e.host IS NOT DISTINCT FROM t.host"
)


def _part(where: str) -> str:
    """Return an SQL expression for where an event begins to add to the union of events that meet `where`."""
    reach = f"max(until_us) FILTER (WHERE {where}) OVER before"
    return f"CASE WHEN {where} THEN least(until_us, greatest(since_us, coalesce({reach}, since_us))) END"


BANDWIDTH_BUCKETS: Final = 1000
HEAT_BUCKETS: Final = 150
OVERLAP_BUCKETS: Final = 300
MOST_RANK_ROWS: Final = 64
MOST_OPERATIONS: Final = 6


def bandwidth(axis: TimeAxis) -> Answer:
    """Return the bytes read and written in each fine bucket that has any, by run and tier."""
    width_us = axis.bucket_us(BANDWIDTH_BUCKETS)
    since = axis.since_sql()
    source = f"""
        SELECT run, tier, size_bytes, {IS_READ} AS is_read, dur_us AS whole_us, {since} AS since_us,
               since_us + dur_us AS until_us
        FROM {{events}} WHERE {IS_IO} AND size_bytes > 0 AND ({IS_READ} OR {IS_WRITE})"""
    rows = axis.events.ask(f"""
        SELECT run, tier, bucket * {width_us}, {width_us},
               coalesce(sum({MOVED_PART}) FILTER (WHERE is_read), 0),
               coalesce(sum({MOVED_PART}) FILTER (WHERE NOT is_read), 0)
        FROM ({cut_sql(source, width_us, "run, tier, size_bytes, is_read, whole_us")})
        GROUP BY run, tier, bucket ORDER BY run, tier, bucket""")
    columns = make_columns("run", "tier", "since_start_us", "bucket_us", "read_bytes", "written_bytes")
    return Answer(name="bandwidth", title="Bandwidth over time", columns=columns, rows=rows)


def rank_cells(axis: TimeAxis) -> Answer:
    """Return bytes and busy time by rank and bucket; if there are many ranks, adjacent ones share a row.

    Busy time is the time in which a rank had at least one call in progress; a row of several ranks has their
    sum.
    """
    width_us = axis.bucket_us(HEAT_BUCKETS)
    (num_rows,) = axis.events.ask_one(f"SELECT coalesce(max(row), 0) + 1 FROM {THREADS}")
    together = -(-num_rows // MOST_RANK_ROWS)
    source = f"""
        SELECT process, kind, size_bytes, until_us - since_us AS whole_us, io_from_us, since_us, until_us
        FROM {CALLS} WHERE kind <> 'compute'"""
    rows = axis.events.ask(f"""
        WITH cells AS (
            SELECT process, bucket,
                   coalesce(sum({MOVED_PART}) FILTER (WHERE kind = 'read'), 0) AS read_bytes,
                   coalesce(sum({MOVED_PART}) FILTER (WHERE kind = 'write'), 0) AS written_bytes,
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


def overlap_lanes(axis: TimeAxis) -> Answer:
    """Return the time of computation, I/O and both at once in each bucket, summed over a run's ranks."""
    width_us = axis.bucket_us(OVERLAP_BUCKETS)
    source = " UNION ALL ".join(
        f"SELECT process, '{what}' AS what, {what}_from_us AS since_us, until_us FROM {CALLS} "
        f"WHERE {what}_from_us < until_us AND any_from_us IS NOT NULL"
        for what in ("io", "compute", "any")
    )
    spent = (
        f"coalesce(sum(finish_us - begin_us) FILTER (WHERE what = '{what}'), 0) AS {what}_us"
        for what in ("compute", "io", "any")
    )
    rows = axis.events.ask(f"""
        WITH spent AS (
            SELECT process, bucket, {", ".join(spent)}
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


def metadata_calls(axis: TimeAxis) -> Answer:
    """Return the calls without data (open, stat, seek, close, sync) in each bucket, by run and operation.

    The most frequent operations are named; all others are `other`.
    """
    width_us = axis.bucket_us(HEAT_BUCKETS)
    is_metadata = f"{IS_IO} AND NOT ({IS_READ} OR {IS_WRITE})"
    rows = axis.events.ask(f"""
        WITH frequent AS (
            SELECT op FROM {{events}} WHERE {is_metadata} GROUP BY op ORDER BY count(*) DESC, op
            LIMIT {MOST_OPERATIONS})
        SELECT run, CASE WHEN op IN (SELECT op FROM frequent) THEN op ELSE 'other' END AS operation,
               {axis.since_sql()} // {width_us} * {width_us} AS since_us, {width_us}, count(*),
               sum(dur_us)::BIGINT
        FROM {{events}} WHERE {is_metadata} GROUP BY ALL ORDER BY run, operation, since_us""")
    columns = make_columns("run", "op", "since_start_us", "bucket_us", "num_calls", "sum_us")
    return Answer(name="metadata_calls", title="Metadata operations over time", columns=columns, rows=rows)


PIXELS: Final = 1000
"""The number of columns of a drawing: calls that begin and end in the same columns are one bar."""
MOST_LANES: Final = 48
MOST_BARS: Final = 12_000
OFFSET_ROWS: Final = 120
MOST_OFFSET_FILES: Final = 4
STEP_PIXELS: Final = 4
"""Wider steps have an edge each; narrower ones become one bar, because they follow one another."""


def call_bars(axis: TimeAxis) -> Answer:
    """Return bars of calls, and parts of a loop, by thread; bars that no drawing could tell apart are merged.

    A run with more threads than lanes has a lane for each process; with more processes than lanes, those with
    the most I/O are drawn. The notes say so.
    """
    # With many runs, each has fewer lanes, so that the page can still be read.
    most_lanes = max(16, MOST_LANES // max(1, len(axis.runs)))
    pixel_us = max(1, axis.span_us // PIXELS)
    threads = axis.events.ask(f"SELECT run, count(*) FROM {THREADS} GROUP BY run")
    of_processes = [run for run, num_threads in threads if num_threads > most_lanes]
    runs = ", ".join(map(sql_literal, of_processes)) or "NULL"
    rows = axis.events.ask(f"""
        WITH busy AS (
            SELECT thread, coalesce(sum(until_us - since_us) FILTER (WHERE kind <> 'compute'), 0) AS sum_us
            FROM {CALLS} GROUP BY thread),
        named AS (
            SELECT *, CASE WHEN run IN ({runs}) THEN -process ELSE thread END AS lane
            FROM {THREADS} JOIN busy USING (thread)),
        lanes AS (
            SELECT lane, run, min(rank) AS rank, any_value(host) AS host, min(pid) AS pid,
                   CASE WHEN lane < 0 THEN 0 ELSE min(tid) END AS tid, list(thread) AS threads,
                   count(*) OVER (PARTITION BY run) AS num_lanes
            FROM named GROUP BY lane, run
            QUALIFY row_number() OVER (PARTITION BY run ORDER BY sum(sum_us) DESC, lane) <= {most_lanes}),
        placed AS (SELECT lane, unnest(threads) AS thread FROM lanes),
        drawn AS ({" UNION ALL ".join(_drawn_sql(table, pixel_us) for table in (CALLS, LOOP_PARTS))})
        SELECT run, rank, host, pid, tid, num_lanes, kind, since_us, until_us, num_events, sum_us
        FROM drawn JOIN lanes USING (lane)
        ORDER BY run, rank NULLS LAST, host, pid, tid, kind, since_us""")
    most = max(1, MOST_BARS // max(1, len(axis.runs)))
    merged: Bars = []
    notes: list[str] = []
    for run in axis.runs:
        bars, gap_us = _thin([list(row) for row in rows if row[0] == run], pixel_us, most, axis.span_us)
        merged += [[*row[:5], *row[6:]] for row in bars]
        notes.append(_explain(run, bars, gap_us, most_lanes, is_of_processes=run in of_processes))
    columns = make_columns(
        "run", Column("rank", Unit.COUNT), "host", Column("pid", Unit.COUNT), Column("tid", Unit.COUNT),
        "kind", "since_start_us", "until_us", "num_events", "sum_us",
    )  # fmt: skip
    return Answer(
        name="call_bars", title="Calls by rank and thread", columns=columns, rows=merged, notes=notes
    )


def _drawn_sql(table: str, pixel_us: int) -> str:
    """Return SQL for the events in the lanes of `placed`; events that share start and end pixels are one."""
    return f"""
        SELECT lane, kind::VARCHAR AS kind, min(since_us) AS since_us, max(until_us) AS until_us,
               count(*) AS num_events, sum(until_us - since_us)::BIGINT AS sum_us
        FROM {table} JOIN placed USING (thread)
        GROUP BY lane, {table}.kind, since_us // {pixel_us}, until_us // {pixel_us}"""


Bars = list[list[Any]]


def _thin(rows: Bars, gap_us: int, most: int, span_us: int) -> tuple[Bars, int]:
    """Merge bars of one lane and kind closer than `gap_us`, which doubles until at most `most` remain."""
    bars = _merge(rows, gap_us)
    while len(bars) > most and gap_us < span_us:
        gap_us *= 2
        bars = _merge(bars, gap_us)
    return bars, gap_us


def _merge(rows: Bars, gap_us: int) -> Bars:
    """Merge rows, which end in start, end, number and sum; the columns before these are lane and kind."""
    bars: Bars = []
    for row in rows:
        *lane, since_us, until_us, num_events, sum_us = row
        last: list[Any] = bars[-1] if bars else [None] * len(row)
        if last[:-4] == lane and since_us <= last[-3] + gap_us:
            longest_us = max(last[-1] / last[-2], sum_us / num_events)
            if lane[-1] != "step" or longest_us < STEP_PIXELS * gap_us:
                last[-3:] = [max(last[-3], until_us), last[-2] + num_events, last[-1] + sum_us]
                continue
        bars.append(list(row))
    return bars


def _explain(run: str, bars: Bars, gap_us: int, most_lanes: int, *, is_of_processes: bool) -> str:
    """Return a sentence on what the drawing of a run leaves out or merges."""
    num_events, num_bars = sum(int(bar[-2] or 0) for bar in bars), len(bars)
    num_lanes = int(bars[0][5] or 0) if bars else 0
    lanes = "processes" if is_of_processes else "threads"
    parts = [f"{num_lanes:,} {lanes}"]
    if num_lanes > most_lanes:
        parts = [f"the {most_lanes} of {num_lanes:,} {lanes} with the most I/O"]
    if num_events > num_bars:
        gap = format_seconds(gap_us / 1e6)
        parts.append(f"{num_events:,} events as {num_bars:,} bars: events less than {gap} apart share one")
    return f"{run}: {', '.join(parts)}"


def file_offsets(axis: TimeAxis) -> Answer:
    """Return where each run's busiest files were read and written over time, at a drawing's resolution.

    The busiest files of a run are those with the most bytes among calls whose offset is known.
    """
    columns_us = max(1, axis.span_us // (PIXELS // 2))
    placed = f"""
        SELECT run, path, {IS_WRITE} AS is_write, "offset" AS begins, size_bytes,
               {axis.since_sql()} AS since_us, since_us + dur_us AS until_us
        FROM {{events}}
        WHERE {IS_IO} AND ({IS_READ} OR {IS_WRITE}) AND "offset" IS NOT NULL AND path IS NOT NULL
          AND size_bytes > 0"""
    rows = axis.events.ask(f"""
        WITH placed AS ({placed}),
        busiest AS (
            SELECT run, path, sum(size_bytes) AS total, max(begins + size_bytes) AS length FROM placed
            GROUP BY run, path
            QUALIFY row_number() OVER (PARTITION BY run ORDER BY total DESC, path) <= {MOST_OFFSET_FILES})
        SELECT run, path, total::BIGINT, length::BIGINT,
               CASE WHEN is_write THEN 'write' ELSE 'read' END AS kind,
               min(since_us), max(until_us), min(begins), max(begins + size_bytes), count(*),
               sum(size_bytes)::BIGINT
        FROM placed JOIN busiest USING (run, path)
        GROUP BY run, path, total, length, kind, since_us // {columns_us}, until_us // {columns_us},
                 begins * {OFFSET_ROWS} // length, (begins + size_bytes) * {OFFSET_ROWS} // length
        ORDER BY run, total DESC, path, 6, 8""")
    columns = make_columns(
        "run", "path", "total_bytes", Column("length_bytes", Unit.BYTES), "kind",
        "since_start_us", "until_us", Column("from_bytes", Unit.BYTES), Column("to_bytes", Unit.BYTES),
        "num_calls", "moved_bytes",
    )  # fmt: skip
    return Answer(name="file_offsets", title="Offsets over time", columns=columns, rows=rows)


MOST_FILES: Final = 12


def size_bins(events: EventsView) -> Answer:
    """Return transfers and bytes in bins of size, by run and direction: powers of two, and a bin for 0."""
    rows = events.ask(f"""
        SELECT run, CASE WHEN {IS_WRITE} THEN 'write' ELSE 'read' END AS kind,
               CASE WHEN size_bytes > 0 THEN (2 ** floor(log2(size_bytes)))::BIGINT ELSE 0 END AS from_bytes,
               greatest(1, 2 * from_bytes), count(*), sum(size_bytes)::BIGINT
        FROM {{events}} WHERE {IS_IO} AND size_bytes IS NOT NULL AND ({IS_WRITE} OR {IS_READ})
        GROUP BY run, kind, from_bytes ORDER BY run, kind, from_bytes""")
    columns = make_columns(
        "run", "kind", "from_bytes", Column("to_bytes", Unit.BYTES), "num_calls", "total_bytes"
    )
    return Answer(name="size_bins", title="Sizes of transfers", columns=columns, rows=rows)


def latency_bins(events: EventsView) -> Answer:
    """Return calls and their time by duration, in bins of 1, 2 and 5 times powers of ten, by run and kind."""
    rows = events.ask(f"""
        WITH alike AS (
            SELECT run, op, phase, dur_us, count(*) AS num_calls FROM {{events}} WHERE {IS_IO} GROUP BY ALL),
        timed AS (
            SELECT run, {KIND} AS kind, dur_us, num_calls,
                   (10 ** floor(log10(greatest(dur_us, 1))))::BIGINT AS power_us
            FROM alike)
        SELECT run, kind,
               CASE WHEN dur_us < 1 THEN 0 WHEN dur_us >= 5 * power_us THEN 5 * power_us
                    WHEN dur_us >= 2 * power_us THEN 2 * power_us ELSE power_us END AS from_us,
               any_value(CASE WHEN dur_us < 1 THEN 1 WHEN dur_us >= 5 * power_us THEN 10 * power_us
                              WHEN dur_us >= 2 * power_us THEN 5 * power_us ELSE 2 * power_us END),
               sum(num_calls)::BIGINT, sum(num_calls * dur_us)::BIGINT
        FROM timed GROUP BY run, kind, from_us ORDER BY run, kind, from_us""")
    columns = make_columns("run", "kind", "from_us", "to_us", "num_calls", "sum_us")
    return Answer(name="latency_bins", title="Durations of calls", columns=columns, rows=rows)


def busiest_files(events: EventsView) -> Answer:
    """Return the files of each run with the most bytes or the most time: calls, bytes, busy time.

    `union_us` is the time in which at least one call on the file was in progress.
    """
    rows = events.ask(f"""
        WITH totals AS (
            SELECT run, path, any_value(tier) AS tier, count(*) AS num_calls, sum(dur_us)::BIGINT AS sum_us,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_READ}), 0)::BIGINT AS read_bytes,
                   coalesce(sum(size_bytes) FILTER (WHERE {IS_WRITE}), 0)::BIGINT AS written_bytes
            FROM {{events}} WHERE {IS_IO} AND path IS NOT NULL GROUP BY run, path
            QUALIFY row_number() OVER (
                        PARTITION BY run ORDER BY read_bytes + written_bytes DESC, path) <= {MOST_FILES}
                 OR row_number() OVER (PARTITION BY run ORDER BY sum_us DESC, path) <= {MOST_FILES}),
        busy AS (
            SELECT run, path,
                   greatest(0, end_us - greatest(ts_us, coalesce(max(end_us) OVER (
                       PARTITION BY run, path ORDER BY ts_us
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), ts_us))) AS added_us
            FROM {{events}} SEMI JOIN totals USING (run, path) WHERE {IS_IO})
        SELECT run, tier, path, num_calls, read_bytes, written_bytes, sum_us, sum(added_us)::BIGINT
        FROM totals JOIN busy USING (run, path) GROUP BY ALL ORDER BY run, 8 DESC, path""")
    columns = make_columns(
        "run", "tier", "path", "num_calls", "read_bytes", "written_bytes", "sum_us", "union_us"
    )
    return Answer(name="busiest_files", title="Files by bytes and time", columns=columns, rows=rows)


def operations(events: EventsView) -> Answer:
    """Return calls by run and operation: their number, total and longest time, and bytes."""
    rows = events.ask(f"""
        SELECT run, op, any_value({KIND}) AS kind, count(*), sum(dur_us)::BIGINT AS sum_us, avg(dur_us),
               max(dur_us), coalesce(sum(size_bytes), 0)::BIGINT, arg_max(path, dur_us)
        FROM {{events}} WHERE {IS_IO} GROUP BY run, op ORDER BY run, sum_us DESC, op""")
    columns = make_columns(
        "run", "op", "kind", "num_calls", "sum_us", "mean_us", "max_us", "moved_bytes",
        Column("slowest_path", Unit.TEXT),
    )  # fmt: skip
    return Answer(name="operations", title="Operations", columns=columns, rows=rows)
