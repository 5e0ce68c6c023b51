"""How much of the I/O ran at the same time as other I/O, and as computation: exactly, from intervals.

`union_us`, `sum_us` and `concurrency` are those of the I/O; what computes at the same time is a real overlap
of intervals, not a difference of totals.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trace.intervals import measures_sql
from penstock.trace.questions.base import GROUPINGS, Answer, Column, Events, Unit, check_keys


def overlap(events: Events, *, by: Sequence[str] = ("pid",), of: str = "io") -> Answer:
    """A row for each value of `by`; `of` is the phase that counts as I/O, `all`: everything but compute."""
    check_keys(by, GROUPINGS)
    notes = []
    counted = "phase <> 'compute'" if of == "all" else f"phase = '{of}'"
    if of == "io" and not events.ask_one(f"SELECT count(*) FROM {{events}} WHERE {counted}")[0]:
        counted = "phase <> 'compute'"
        notes.append("No event is of the phase io: everything but compute is counted.")
    keys = ", ".join(by)
    match = " AND ".join(f"a.{key} IS NOT DISTINCT FROM b.{key}" for key in by)
    both = f"({counted} OR phase = 'compute')"
    rows = events.ask(f"""
        WITH io AS ({measures_sql("{events}", by, where=counted)}),
             compute AS ({measures_sql("{events}", by, where="phase = 'compute'")}),
             either AS ({measures_sql("{events}", by, where=both)}),
             joined AS (
                 SELECT a.*, coalesce(c.union_us, 0) AS compute_us, e.union_us AS either_us
                 FROM io a LEFT JOIN compute c ON {match.replace("b.", "c.")}
                           JOIN either e ON {match.replace("b.", "e.")})
        SELECT {keys}, num_events, union_us, sum_us, concurrency, compute_us,
               union_us + compute_us - either_us, either_us - compute_us, either_us - union_us
        FROM joined ORDER BY {keys}""")
    columns = [
        *(Column(key) for key in by),
        Column("num_events", Unit.COUNT),
        Column("union_us", Unit.MICROSECONDS),
        Column("sum_us", Unit.MICROSECONDS),
        Column("concurrency", Unit.RATIO),
        Column("compute_us", Unit.MICROSECONDS),
        Column("overlap_us", Unit.MICROSECONDS),
        Column("io_alone_us", Unit.MICROSECONDS),
        Column("compute_alone_us", Unit.MICROSECONDS),
    ]
    return Answer(name="overlap", title=f"I/O and compute by {keys}", columns=columns, rows=rows, notes=notes)
