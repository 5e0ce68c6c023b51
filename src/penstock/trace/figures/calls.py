"""Single calls, as far as a drawing can show them: by thread, and by offset in the busiest files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.trace.dimensions import sql_literal
from penstock.trace.figures.placed_calls import CALLS, LOOP_PARTS, THREADS, PlacedCalls
from penstock.trace.figures.time_axis import TimeAxis
from penstock.trace.questions.answer import Answer, Column, Unit, Value, make_columns
from penstock.trace.questions.events_view import IS_IO, IS_READ, IS_WRITE, EventsView
from penstock.units import format_seconds

PIXELS: Final = 1000
"""Columns of a drawing: calls that begin and end in the same ones are one bar."""
MOST_LANES: Final = 48
MOST_BARS: Final = 12_000
OFFSET_ROWS: Final = 120
MOST_FILES: Final = 4
STEP_PIXELS: Final = 4
"""Steps that are wider have an edge each; others become one bar, as they follow one another."""


def lanes_of_each(num_runs: int) -> int:
    """The most lanes that one of so many runs has, so that a page of many runs can still be read."""
    return max(16, MOST_LANES // max(1, num_runs))


def call_bars(placed: PlacedCalls) -> Answer:
    """Bars of calls, and parts of a loop, by thread: neighbours that no drawing could tell apart are one bar.

    A run of more threads than lanes has a lane for each process; of more processes than lanes, those with the
    most I/O are drawn. The notes tell.
    """
    axis = placed.axis
    most_lanes = lanes_of_each(len(axis.runs))
    pixel_us = max(1, axis.span_us // PIXELS)
    threads = placed.events.ask(f"SELECT run, count(*) FROM {THREADS} GROUP BY run")
    of_processes = [run for run, num_threads in threads if num_threads > most_lanes]
    runs = ", ".join(map(sql_literal, of_processes)) or "NULL"
    rows = placed.events.ask(f"""
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
    merged: list[tuple[Value, ...]] = []
    notes: list[str] = []
    for run in axis.runs:
        bars, gap_us = _thin([row for row in rows if row[0] == run], pixel_us, most, axis.span_us)
        merged += [(*row[:5], *row[6:]) for row in bars]
        notes.append(_explain(run, bars, gap_us, most_lanes, is_of_processes=run in of_processes))
    columns = make_columns(
        "run", Column("rank", Unit.COUNT), "host", Column("pid", Unit.COUNT), Column("tid", Unit.COUNT),
        "kind", "since_start_us", "until_us", "num_events", "sum_us",
    )  # fmt: skip
    return Answer(
        name="call_bars", title="Calls by rank and thread", columns=columns, rows=merged, notes=notes
    )


def _drawn_sql(table: str, pixel_us: int) -> str:
    """Events of a table in the lanes of `placed`, those that begin and end in the same pixels as one."""
    return f"""
        SELECT lane, kind::VARCHAR AS kind, min(since_us) AS since_us, max(until_us) AS until_us,
               count(*) AS num_events, sum(until_us - since_us)::BIGINT AS sum_us
        FROM {table} JOIN placed USING (thread)
        GROUP BY lane, {table}.kind, since_us // {pixel_us}, until_us // {pixel_us}"""


Bars = list[tuple[Value, ...]]


def _thin(rows: Bars, gap_us: int, most: int, span_us: int) -> tuple[Bars, int]:
    """Merge neighbours of one lane and kind that are closer than `gap_us`, which grows until bars are few."""
    bars = list(_merge(rows, gap_us))
    while len(bars) > most and gap_us < span_us:
        gap_us *= 2
        bars = list(_merge(bars, gap_us))
    return bars, gap_us


def _merge(rows: Sequence[tuple[Value, ...]], gap_us: int) -> Iterator[tuple[Value, ...]]:
    """Rows end in start, end, number and sum; what is before them names lane and kind."""
    last: _Bar | None = None
    for row in rows:
        *lane, since_us, until_us, num_events, sum_us = row
        bar = _Bar(tuple(lane), since_us, until_us, num_events, sum_us)  # type: ignore[arg-type]
        if last is not None and last.meets(bar, gap_us):
            last.until_us = max(last.until_us, bar.until_us)
            last.num_events += bar.num_events
            last.sum_us += bar.sum_us
            continue
        if last is not None:
            yield last.row()
        last = bar
    if last is not None:
        yield last.row()


@dataclass(slots=True)
class _Bar:
    lane: tuple[Value, ...]
    since_us: int
    until_us: int
    num_events: int
    sum_us: int

    def meets(self, bar: _Bar, gap_us: int) -> bool:
        """Whether the next bar is of the same lane and kind, and so near that the two are one."""
        if bar.lane != self.lane or bar.since_us > self.until_us + gap_us:
            return False
        longest_us = max(self.sum_us / self.num_events, bar.sum_us / bar.num_events)
        return self.lane[-1] != "step" or longest_us < STEP_PIXELS * gap_us

    def row(self) -> tuple[Value, ...]:
        """The bar as it came from the query."""
        return (*self.lane, self.since_us, self.until_us, self.num_events, self.sum_us)


def _explain(run: str, bars: Bars, gap_us: int, most_lanes: int, *, is_of_processes: bool) -> str:
    """What the drawing of a run leaves out or puts together."""
    num_events, num_bars = sum(int(bar[-2] or 0) for bar in bars), len(bars)
    num_lanes = int(bars[0][5] or 0) if bars else 0
    lanes = "processes" if is_of_processes else "threads"
    said = [f"{num_lanes:,} {lanes}"]
    if num_lanes > most_lanes:
        said = [f"the {most_lanes} of {num_lanes:,} {lanes} with the most I/O"]
    if num_events > num_bars:
        gap = format_seconds(gap_us / 1e6)
        said.append(f"{num_events:,} events as {num_bars:,} bars: those less than {gap} apart are one")
    return f"{run}: {', '.join(said)}"


def file_offsets(events: EventsView, axis: TimeAxis) -> Answer:
    """Where in the busiest files each run reads and writes over time, on a grid as fine as a drawing.

    The busiest files of a run are those with the most bytes among calls whose offset is known.
    """
    columns_us = max(1, axis.span_us // (PIXELS // 2))
    placed = f"""
        SELECT run, path, {IS_WRITE} AS is_write, "offset" AS begins, size_bytes,
               {axis.since_sql()} AS since_us, since_us + dur_us AS until_us
        FROM {{events}}
        WHERE {IS_IO} AND ({IS_READ} OR {IS_WRITE}) AND "offset" IS NOT NULL AND path IS NOT NULL
          AND size_bytes > 0"""
    rows = events.ask(f"""
        WITH placed AS ({placed}),
        busiest AS (
            SELECT run, path, sum(size_bytes) AS total, max(begins + size_bytes) AS length FROM placed
            GROUP BY run, path
            QUALIFY row_number() OVER (PARTITION BY run ORDER BY total DESC, path) <= {MOST_FILES})
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
