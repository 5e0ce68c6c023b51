"""Exact arithmetic of time intervals in whole microseconds: unions, overlaps, concurrency.

Place in the flow: below questions, comparison and findings. Three measures always stand side by side, because
each alone misleads: the sum of durations counts parallel threads many times, the longest thread forgets the
others, the union is the time in which at least one call was under way. Invariant: union <= sum.

In SQL for tables of any size; in numpy for what is in memory, and as the other opinion in tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]


def measures_sql(source: str, by: Sequence[str], *, where: str = "true", extra: str = "") -> str:
    """SELECT the columns `by`, num_events, sum_us, union_us and concurrency of the events in `source`.

    What an event adds to the union is its part behind the furthest end before it, in order of beginnings.
    """
    keys = ", ".join(by)
    partition = f"PARTITION BY {keys}" if by else ""
    grouping = f"GROUP BY {keys}" if by else ""
    reach = f"max(end_us) OVER ({partition} ORDER BY ts_us ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    return f"""
        SELECT {keys}{", " if by else ""}count(*) AS num_events,
               coalesce(sum(dur_us), 0)::BIGINT AS sum_us, coalesce(sum(added_us), 0)::BIGINT AS union_us,
               CASE WHEN sum(added_us) > 0 THEN sum(dur_us) / sum(added_us) END AS concurrency{extra}
        FROM (
            SELECT *, greatest(0, end_us - greatest(ts_us, coalesce({reach}, ts_us))) AS added_us
            FROM {source} WHERE {where}
        ) {grouping}"""


def union_us(starts: Times, ends: Times) -> int:
    """Microseconds that at least one interval covers."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.concatenate(([starts[0]], np.maximum.accumulate(ends)[:-1]))
    return int(np.maximum(0, ends - np.maximum(starts, reach)).sum())


def merged(starts: Times, ends: Times) -> tuple[Times, Times]:
    """The same time as disjoint intervals, in order; intervals that touch become one."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate(([True], starts[1:] > reach[:-1]))
    return starts[begins], reach[np.concatenate((begins[1:], [True]))]


def overlap_us(first: tuple[Times, Times], second: tuple[Times, Times]) -> int:
    """Microseconds that both sets cover: what is counted twice when their unions are added."""
    both = union_us(np.concatenate((first[0], second[0])), np.concatenate((first[1], second[1])))
    return union_us(*first) + union_us(*second) - both


def concurrency_steps(starts: Times, ends: Times) -> tuple[Times, Times]:
    """A sweep line: at which moments the number of intervals under way changes, and to what."""
    moments = np.concatenate((starts, ends))
    changes = np.concatenate((np.ones_like(starts), -np.ones_like(ends)))
    times, where = np.unique(moments, return_inverse=True)
    steps = np.zeros(len(times), dtype=np.int64)
    np.add.at(steps, where, changes)
    return times, np.cumsum(steps)
