"""Interval unions: the time in which at least one event was under way, exactly, in whole microseconds.

Three measures always stand side by side, because each alone misleads: the sum of durations counts parallel
threads many times, the longest thread forgets the others, the union does not say how many ran at once.
Invariant: union <= sum.

`union_times` makes one pass over the events in the order of time, in bounded memory; `union_sql` gives the
same inside of larger queries, at several times the cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.questions.events_view import EventsView

_BATCH_ROWS: Final = 1 << 18
_NEVER: Final = np.iinfo(np.int64).min

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class UnionTimes:
    """Microseconds in which an event of the first set, of the second, or of either was under way."""

    first_us: int
    second_us: int
    either_us: int

    @property
    def both_us(self) -> int:
        """Time in which events of both sets were under way."""
        return self.first_us + self.second_us - self.either_us

    @property
    def first_alone_us(self) -> int:
        """Time in which only events of the first set were under way."""
        return self.either_us - self.second_us

    @property
    def second_alone_us(self) -> int:
        """Time in which only events of the second set were under way."""
        return self.either_us - self.first_us


NO_TIME: Final = UnionTimes(0, 0, 0)


def measure_groups(
    events: EventsView, by: Sequence[str], *, where: str, extra: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """Rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`."""
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join([*by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    counts = events.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}")
    unions = union_times(events, by, where)
    width = len(by)
    rows = []
    for row in counts:
        key, (num_events, sum_us, *more) = row[:width], row[width:]
        (union_us,) = unions.get(key, (0,))
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows


def overlap_times(
    events: EventsView, by: Sequence[str], *, first: str, second: str
) -> dict[tuple[Any, ...], UnionTimes]:
    """Unions of two sets of events and of both together, by the values of `by`; sets are SQL conditions."""
    unions = union_times(events, by, first, second, f"({first}) OR ({second})")
    return {key: UnionTimes(*times) for key, times in unions.items()}


Times = dict[tuple[Any, ...], tuple[int, ...]]


def union_times(events: EventsView, by: Sequence[str], *sets: str) -> Times:
    """The time in which an event of each set was under way, by the values of `by`; sets are conditions."""
    is_member = " OR ".join(f"({one})" for one in sets)
    members = " + ".join(f"(coalesce({one}, false)::INTEGER << {n})" for n, one in enumerate(sets))
    groups: list[tuple[Any, ...]] = [()]
    number, join = "0::INTEGER", ""
    if by:
        _store_groups(events, by, is_member)
        groups = events.ask(f"SELECT {', '.join(by)} FROM penstock_groups ORDER BY union_group")
        matches = " AND ".join(f"e.{key} IS NOT DISTINCT FROM g.{key}" for key in by)
        number, join = "union_group", f" JOIN penstock_groups g ON {matches}"
    selected = ", ".join([*by, f"{members} AS union_sets", "ts_us", "end_us"])
    query = (
        f"SELECT {number} AS union_group, union_sets, ts_us, end_us"
        f" FROM (SELECT {selected} FROM {{events}} WHERE dur_us > 0 AND ({is_member})) e{join}"
    )
    sweep = _Sweep(len(groups), len(sets))
    # A scan with a join keeps the order of a sorted table, though nothing in SQL promises it.
    if not (events.is_ordered and sweep.add_all(events.read(query, _BATCH_ROWS))):
        sweep = _Sweep(len(groups), len(sets))
        sweep.add_all(events.read(f"{query} ORDER BY ts_us", _BATCH_ROWS))
    return {group: tuple(map(int, total)) for group, total in zip(groups, sweep.total, strict=True)}


def _store_groups(events: EventsView, by: Sequence[str], where: str) -> None:
    keys = ", ".join(by)
    events.connection.execute(
        events.fill_in(f"""
            CREATE OR REPLACE TEMP TABLE penstock_groups AS
            SELECT {keys}, (row_number() OVER () - 1)::INTEGER AS union_group
            FROM (SELECT DISTINCT {keys} FROM {{events}} WHERE {where})""")
    )


class _Sweep:
    """Adds up unions of sets of events by group, batch by batch in the order of time."""

    def __init__(self, num_groups: int, num_sets: int) -> None:
        self.total = np.zeros((num_groups, num_sets), dtype=np.int64)
        # The furthest end so far: what an event adds is its part behind it.
        self._reach = np.full((num_sets, num_groups), _NEVER)
        # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
        self._code_type = np.int16 if num_groups < 1 << 15 else np.int32

    def add_all(self, batches: Iterator[pa.RecordBatch]) -> bool:
        """Add the events of all batches; False, and the sums mean nothing, if they are not in order."""
        last_us = _NEVER
        for batch in batches:
            codes, members, starts, ends = (batch.column(place).to_numpy() for place in range(4))
            if starts[0] < last_us or np.any(starts[1:] < starts[:-1]):
                return False
            last_us = int(starts[-1])
            self.add(codes, members, starts, ends)
        return True

    def add(self, codes: Numbers, members: Numbers, starts: Numbers, ends: Numbers) -> None:
        """Add events in the order of their starts; `members` has a bit for each set."""
        if len(self.total) > 1:
            order = np.argsort(codes.astype(self._code_type), kind="stable")
            codes, members, starts, ends = codes[order], members[order], starts[order], ends[order]
        for number in range(self.total.shape[1]):
            is_member = (members >> number) & 1
            if is_member.all():
                self._add_set(number, codes, starts, ends)
            elif is_member.any():
                chosen = np.flatnonzero(is_member)
                self._add_set(number, codes[chosen], starts[chosen], ends[chosen])

    def _add_set(self, number: int, codes: Numbers, starts: Numbers, ends: Numbers) -> None:
        reach = self._reach[number]
        firsts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        groups = codes[firsts]
        lengths = np.diff(firsts, append=len(codes))
        furthest = _running_max(ends, np.repeat(np.arange(len(firsts)), lengths))
        before = np.empty_like(furthest)
        before[1:] = furthest[:-1]
        before[firsts] = _NEVER
        before = np.maximum(before, np.repeat(reach[groups], lengths))
        added = np.maximum(0, ends - np.maximum(starts, before))
        self.total[groups, number] += np.add.reduceat(added, firsts)
        reach[groups] = np.maximum(reach[groups], furthest[firsts + lengths - 1])


def union_sql(source: str, by: Sequence[str], *, where: str = "true", extra: str = "") -> str:
    """SELECT the columns `by`, num_events, sum_us, union_us and concurrency of the events in `source`.

    What an event adds to the union is its part behind the furthest end before it, in the order of starts.
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


def _running_max(ends: Numbers, groups: Numbers) -> Numbers:
    """The largest end so far within each group; `groups` counts 0, 0, 1, 2, 2 from the first to the last."""
    lowest = int(ends.min())
    span = int(ends.max()) - lowest + 1
    if span * (int(groups[-1]) + 1) < 1 << 62:
        # Lifting each group above the ones before it makes one accumulation serve them all.
        lift = groups * span - lowest
        return np.maximum.accumulate(ends + lift) - lift
    levels, ranks = np.unique(ends, return_inverse=True)
    lift = groups * len(levels)
    return levels[np.maximum.accumulate(ranks + lift) - lift]
