"""The axis of time that all runs of a report share: each run begins at zero, and the longest ends the axis.

    events -> TimeAxis -> rows of figures (`over_time`, `calls`) -> panels -> page

Invariant: buckets of a figure are as many as a drawing can show, however long the runs are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import ALL_RANKS
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView
from penstock.trace.questions.timeline import round_up

KIND = f"""CASE WHEN phase = 'compute' THEN 'compute' WHEN phase <> 'io' THEN NULL
                WHEN {IS_READ} THEN 'read' WHEN {IS_WRITE} THEN 'write' ELSE 'metadata' END"""
"""SQL expression: which kind of call or computation an event is in a drawing, else NULL."""
LOOP_PART = """CASE WHEN phase IN ('wait', 'barrier') THEN phase WHEN phase = 'stall' THEN 'checkpoint'
                     WHEN phase = 'app_io' AND contains(cat, 'checkpoint') THEN 'checkpoint'
                     WHEN phase = 'loop' AND cat = 'step' THEN 'step' END"""
"""SQL expression: which part of a program's own loop an event is in a drawing, else NULL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunExtent:
    """What a run has to draw, and when it began."""

    origin_us: int
    span_us: int
    num_events: int
    num_io: int
    num_compute: int
    num_offsets: int
    num_processes: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """Runs that have events, in their order, and the span of the longest."""

    runs: Mapping[str, RunExtent]
    span_us: int

    def since_sql(self, run: str = "run") -> str:
        """SQL expression: an event's start since its run's first event; `run` is the column of names."""
        cases = "".join(
            f" WHEN {sql_literal(name)} THEN {extent.origin_us}" for name, extent in self.runs.items()
        )
        return f"(ts_us - CASE {run}{cases} END)" if cases else "ts_us"

    def bucket_us(self, most: int) -> int:
        """A round length of time of which at most `most` cover the axis: 1, 2 or 5 times a power of ten."""
        return round_up(-(-(self.span_us + 1) // most))


def measure_axis(events: EventsView, runs: Sequence[str]) -> TimeAxis:
    """Measure the runs; those without events are left out."""
    rows = events.ask(f"""
        SELECT run, min(ts_us), max(end_us) - min(ts_us), count(*), count(*) FILTER (WHERE {IS_IO}),
               count(*) FILTER (WHERE phase = 'compute' AND dur_us > 0),
               count(*) FILTER (WHERE {IS_IO} AND "offset" IS NOT NULL AND size_bytes > 0)
        FROM {{events}} GROUP BY run""")
    threads = events.ask(f"""
        SELECT run, count(DISTINCT (host, pid)) FILTER (pid <> {ALL_RANKS}), count(*)
        FROM (SELECT DISTINCT run, host, pid, tid FROM {{events}}) GROUP BY run""")
    counted = {run: (num_processes, num_threads) for run, num_processes, num_threads in threads}
    extents = {
        row[0]: RunExtent(
            origin_us=row[1],
            span_us=row[2],
            num_events=row[3],
            num_io=row[4],
            num_compute=row[5],
            num_offsets=row[6],
            num_processes=counted[row[0]][0],
            num_threads=counted[row[0]][1],
        )
        for row in rows
    }
    ordered = {run: extents[run] for run in runs if run in extents}
    return TimeAxis(runs=ordered, span_us=max((extent.span_us for extent in ordered.values()), default=1))
