"""Calls and computation as numbers only, placed on the axis of time: made once for all figures that need it.

Texts of ten million rows are looked at once here; figures then group by numbers. For each event the table has
the part that no earlier event of its process covers, so that sums of these parts are unions.
"""

from dataclasses import dataclass
from typing import Final

from penstock.trace.figures.time_axis import KIND, LOOP_PART, TimeAxis
from penstock.trace.questions.events_view import EventsView

THREADS: Final = "penstock_threads"
"""Table: run, host, pid, tid, rank; `thread` and `process`, numbered over all runs, and `row`, within a run.

A process is one rank of a host where ranks are known, because its workers read for it.
"""
CALLS: Final = "penstock_calls"
"""Table: process, thread, kind, since_us, until_us, size_bytes; and where each event adds to a union:
`io_from_us` to that of I/O, `compute_from_us` to that of computation, `any_from_us` to that of both."""
LOOP_PARTS: Final = "penstock_loop_parts"
"""Table: thread, kind, since_us, until_us of the steps, waits and checkpoints that a program records."""


@dataclass(frozen=True, slots=True)
class PlacedCalls:
    """The tables, on the connection of the events they are made from."""

    events: EventsView
    axis: TimeAxis


def place_calls(events: EventsView, axis: TimeAxis) -> PlacedCalls:
    """Make the tables, over those of an earlier report on this connection."""
    process = "rank NULLS LAST, host, CASE WHEN rank IS NULL THEN pid END"
    events.ask(f"""
        CREATE OR REPLACE TEMP TABLE {THREADS} AS
        SELECT *, row_number() OVER (ORDER BY run, {process}, pid, tid)::INTEGER AS thread,
               dense_rank() OVER (ORDER BY run, {process})::INTEGER AS process,
               dense_rank() OVER (PARTITION BY run ORDER BY {process}) - 1 AS row
        FROM (SELECT run, host, pid, tid, min(min(rank)) OVER (PARTITION BY run, host, pid) AS rank
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
    return PlacedCalls(events, axis)


_SAME_THREAD: Final = (
    "e.run = t.run AND e.pid = t.pid AND e.tid = t.tid AND e.host IS NOT DISTINCT FROM t.host"
)


def _part(where: str) -> str:
    """SQL expression: where an event begins to add to the union of those that `where` holds for."""
    reach = f"max(until_us) FILTER (WHERE {where}) OVER before"
    return f"CASE WHEN {where} THEN least(until_us, greatest(since_us, coalesce({reach}, since_us))) END"
