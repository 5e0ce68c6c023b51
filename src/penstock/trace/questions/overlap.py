"""How much of the I/O ran at the same time as other I/O, and as computation: exactly, from intervals.

`union_us`, `sum_us` and `concurrency` are those of the I/O; its overlap with computation is one of intervals,
not a difference of totals.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import UsageError
from penstock.trace.dimensions import sql_literal
from penstock.trace.interval_union import NO_TIME, UnionTimes, union_times
from penstock.trace.questions.answer import Answer, Column, Value, make_columns
from penstock.trace.questions.events_view import GROUPINGS, EventsView, check_keys


def overlap(events: EventsView, *, by: Sequence[str] = ("pid",), of: str = "io") -> Answer:
    """A row for each value of `by`; `of` is the phase that counts as I/O, or `all` but compute."""
    check_keys(by, GROUPINGS)
    notes = []
    counted = "phase <> 'compute'" if of == "all" else f"phase = {sql_literal(of)}"
    if of == "io" and not events.ask_one(f"SELECT count(*) FROM {{events}} WHERE {counted}")[0]:
        counted = "phase <> 'compute'"
        notes.append("No event has the phase io: everything but compute is counted.")
    keys = ", ".join(by)
    counts = events.ask(f"""
        SELECT {keys}, count(*), sum(dur_us)::BIGINT FROM {{events}} WHERE {counted}
        GROUP BY {keys} ORDER BY {keys}""")
    if not counts and of not in ("io", "all"):
        known = ", ".join(row[0] for row in events.ask("SELECT DISTINCT phase FROM {events} ORDER BY phase"))
        raise UsageError(f"No event has the phase {of!r}", fix=f"Phases of these traces: {known}.")
    busy = union_times(events, by, first=counted, second="phase = 'compute'")
    rows = [_row(row[:-2], row[-2], row[-1], busy.get(row[:-2], NO_TIME)) for row in counts]
    columns = make_columns(
        *map(Column, by), "num_events", "union_us", "sum_us", "concurrency", "compute_us", "overlap_us",
        "io_alone_us", "compute_alone_us",
    )  # fmt: skip
    return Answer(name="overlap", title=f"I/O and compute by {keys}", columns=columns, rows=rows, notes=notes)


def _row(key: Sequence[Value], num_events: int, sum_us: int, busy: UnionTimes) -> tuple[Value, ...]:
    io_us, compute_us, either_us = busy.first_us, busy.second_us, busy.either_us
    return (
        *key,
        num_events,
        io_us,
        sum_us,
        sum_us / io_us if io_us else None,
        compute_us,
        io_us + compute_us - either_us,
        either_us - compute_us,
        either_us - io_us,
    )
