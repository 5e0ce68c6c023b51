"""Unions of intervals: the time in which at least one event was under way, exactly, in whole microseconds.

Three measures always stand side by side, because each alone misleads: the sum of durations counts parallel
threads many times, the longest thread forgets the others, the union does not say how many ran at once.
Invariant: union <= sum.

DuckDB reads the events of ten million in a second; its window functions would take ten. So numpy measures
them in the order of time, a batch at a time: an event adds its part behind the furthest end so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

_BATCH_ROWS: Final = 1 << 19
_NEVER: Final = np.iinfo(np.int64).min // 2

Numbers = npt.NDArray[np.int64]
Key = tuple[Any, ...]
Totals = defaultdict[Any, list[int]]


def measure_groups(
    events: EventsView, by: Sequence[str], *, where: str, extra: Sequence[str] = ()
) -> list[Key]:
    """Rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`."""
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join([*by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    unions = union_times(events, by, where)
    rows = []
    for row in events.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}"):
        key, (num_events, sum_us, *more) = row[: len(by)], row[len(by) :]
        (union_us,) = unions.get(key, (0,))
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows


def union_times(events: EventsView, by: Sequence[str], *sets: str) -> dict[Key, tuple[int, ...]]:
    """The time in which an event of each set was under way, by the values of `by`; sets are SQL conditions.

    Groups none of whose events takes any time are left out.
    """

    def add(totals: Totals, keys: list[Key], place: int, groups: Numbers, lengths: Numbers) -> None:
        firsts = np.flatnonzero(np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1])))
        sums = np.add.reduceat(lengths, firsts).tolist()
        for group, total_us in zip(groups[firsts].tolist(), sums, strict=True):
            totals[keys[group]][place] += total_us

    totals = _add_up(
        events,
        by,
        sets,
        lambda total, keys, place, at, begins, ends: add(total, keys, place, at, ends - begins),
    )
    times = {key: tuple(total) for key, total in totals.items()}
    # Without keys all events are one group, even if there are none.
    return times if by else {(): (0,) * len(sets), **times}


def union_in_buckets(
    events: EventsView, by: Sequence[str], *sets: str, width_us: int, origin_of: Callable[[Key], int]
) -> dict[tuple[Key, int], list[int]]:
    """The same in each bucket of time: by key and number of the bucket, counted from the key's origin."""

    def add(  # noqa: PLR0917 - the arrays of a batch
        totals: Totals, keys: list[Key], place: int, groups: Numbers, begins: Numbers, ends: Numbers
    ) -> None:
        origins = np.array([origin_of(key) for key in keys], dtype=np.int64)[groups]
        begins, ends = begins - origins, ends - origins
        while len(groups):
            buckets = begins // width_us
            edges = np.minimum(ends, (buckets + 1) * width_us)
            changes = np.flatnonzero((np.diff(groups) != 0) | (np.diff(buckets) != 0)) + 1
            firsts = np.concatenate((np.zeros(1, np.int64), changes))
            sums = np.add.reduceat(edges - begins, firsts)
            found = zip(groups[firsts].tolist(), buckets[firsts].tolist(), sums.tolist(), strict=True)
            for group, bucket, total_us in found:
                totals[keys[group], bucket][place] += total_us
            # Pieces that reach into the next bucket go on there.
            is_longer = ends > edges
            groups, begins, ends = groups[is_longer], edges[is_longer], ends[is_longer]

    return _add_up(events, by, sets, add)


def _add_up(events: EventsView, by: Sequence[str], sets: Sequence[str], add: Callable[..., None]) -> Totals:
    """The totals that `add` makes of the pieces of time whose lengths add up to unions.

    The pieces of a group and set do not overlap; `add` gets the keys, the place of the set, and the group (a
    place among the keys), begin and end of each piece. Pieces of a group stand together, in order.
    """
    is_member = " OR ".join(f"({one})" for one in sets)
    members = " + ".join(f"(coalesce({one}, false)::UTINYINT << {place})" for place, one in enumerate(sets))
    where = f"WHERE dur_us > 0 AND ({is_member})"
    numbered, keys, number_of = "0", [()], {0: 0}
    if by:
        names = ", ".join(by)
        # A hash stands for the values of a group: a join with a table of groups would lose the order.
        numbered = f"hash({names})"
        found = events.ask(f"SELECT {numbered}, {names} FROM {{events}} {where} GROUP BY {names}")
        keys = [row[1:] for row in found]
        number_of = {row[0]: number for number, row in enumerate(found)}
        assert len(number_of) == len(keys), "two groups have the same hash of 64 bits"
    query = f"SELECT {numbered} AS numbered, {members} AS members, ts_us, end_us FROM {{events}} {where}"
    # A table has its events in the order of time. Several tables may not, and conditions that DuckDB makes a
    # join of lose the order; then events are sorted, which takes longer than all the rest.
    for order in ("", " ORDER BY ts_us"):
        totals: Totals = defaultdict(lambda: [0] * len(sets))
        reach = np.full((len(sets), len(keys)), _NEVER)
        last_us = _NEVER
        for batch in events.read(query + order, _BATCH_ROWS):
            members_of, starts, ends = (batch.column(place).to_numpy() for place in (1, 2, 3))
            if len(starts) and (starts[0] < last_us or np.any(starts[1:] < starts[:-1])):
                break
            last_us = starts[-1] if len(starts) else last_us
            codes = np.zeros(len(starts), dtype=np.int64)
            if by:
                encoded = batch.column(0).dictionary_encode()
                numbers = [number_of[value] for value in encoded.dictionary.to_pylist()]
                codes = np.array(numbers, dtype=np.int64)[encoded.indices.to_numpy()]
                # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
                sortable = codes.astype(np.int16 if len(keys) < 1 << 15 else np.int32)
                by_group = np.argsort(sortable, kind="stable")
                codes, members_of, starts, ends = (one[by_group] for one in (codes, members_of, starts, ends))
            for place in range(len(sets)):
                chosen = (members_of & (1 << place)) != 0
                if chosen.any():
                    groups, begins, until = codes[chosen], starts[chosen], ends[chosen]
                    begins = _cut_covered(groups, begins, until, reach[place])
                    is_left = until > begins
                    if is_left.any():
                        add(totals, keys, place, groups[is_left], begins[is_left], until[is_left])
        else:
            return totals
    raise AssertionError("sorted events are out of order")


def _cut_covered(groups: Numbers, starts: Numbers, ends: Numbers, reach: Numbers) -> Numbers:
    """Where each event begins to add to its group's union; `reach` is moved to the groups' furthest ends.

    For example, of 0-10, 5-12 and 6-8 the first adds from 0 on, the second from 10 on, the third nothing.
    """
    is_first = np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1]))
    firsts = np.flatnonzero(is_first)
    of_firsts = groups[firsts]
    furthest = ends.copy()
    furthest[firsts] = np.maximum(ends[firsts], reach[of_firsts])
    lowest, span = int(furthest.min()), int(furthest.max()) - int(furthest.min()) + 1
    if span * len(firsts) < 1 << 62:
        # Lifted above all groups before it, a group is not reached by their ends: one pass serves all.
        lift = (np.cumsum(is_first) - 1) * span - lowest
        furthest = np.maximum.accumulate(furthest + lift) - lift
    else:
        for begin, end in pairwise([*firsts.tolist(), len(groups)]):
            furthest[begin:end] = np.maximum.accumulate(furthest[begin:end])
    before = np.concatenate((furthest[:1], furthest[:-1]))
    before[firsts] = reach[of_firsts]
    reach[of_firsts] = furthest[np.append(firsts[1:], len(groups)) - 1]
    return np.maximum(starts, before)
