"""Interval unions: the time in which at least one event was under way, exactly, in whole microseconds.

Three measures always stand side by side, because each alone misleads: the sum of durations counts parallel
threads many times, the longest thread forgets the others, the union does not say how many ran at once.
Invariant: union <= sum.

`union_times` makes one pass over the events in the order of time, in bounded memory; `union_sql` gives the
same inside of larger queries, at several times the cost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.trace.arrow_functions import find_distinct
from penstock.trace.event_cells import add_up
from penstock.trace.event_codes import BATCH_ROWS, Batch, code_events
from penstock.trace.ordered_events import MISSING

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

_MOST_THREADS: Final = 4
_NEVER: Final = np.iinfo(np.int64).min
_TIMES: Final = 4
"""Arrays of a batch that every sweep needs: groups, sets, starts and ends."""

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
    """Rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`.

    Those are of sums of events: `max(longest_us)`, `sum(size_bytes)`, see `event_cells`.
    """
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join(
        [*by, "coalesce(sum(num_events), 0)::BIGINT", "coalesce(sum(sum_us), 0)::BIGINT", *extra]
    )
    cells = add_up(events, (*by, where), extra)
    counts = cells.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}")
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


Key = tuple[Any, ...]
Times = dict[Key, tuple[int, ...]]


def union_times(events: EventsView, by: Sequence[str], *sets: str) -> Times:
    """The time in which an event of each set was under way, by the values of `by`; sets are conditions."""
    # Without keys there is nothing to tell apart but the sets.
    groups, sweep = sweep_events(
        events, by, sets, lambda groups: Sweep(len(groups) + 1 if by else 1, len(sets))
    )
    times = {group: tuple(map(int, total)) for group, total in zip(groups, sweep.total, strict=False)}
    # Without keys all events are one group, even if there are none.
    return times if by else {(): (0,) * len(sets), **times}


SweepT = TypeVar("SweepT", bound="Sweep")


def sweep_events(
    events: EventsView,
    by: Sequence[str],
    sets: Sequence[str],
    make: Callable[[Sequence[Key]], SweepT],
    measures: Sequence[str] = (),
) -> tuple[Sequence[Key], SweepT]:
    """Groups, and a sweep over all events of these sets; its batches have these integer columns, too."""
    codes = code_events(events, by, sets) if events.is_ordered else None
    if codes is not None:
        sweep = make(codes.groups)
        if sweep.add_all(codes.batches(events, measures), lambda read: read()):
            return codes.groups, sweep
    groups, batches = _read_sorted(events, by, sets, measures)
    sweep = make(groups)
    sweep.add_all(batches)
    return groups, sweep


def _read_sorted(
    events: EventsView, by: Sequence[str], sets: Sequence[str], measures: Sequence[str]
) -> tuple[Sequence[Key], Iterator[tuple[Numbers, ...]]]:
    """Groups, and batches of the groups, sets, starts and ends of events, by any columns, in any order."""
    is_member = " OR ".join(f"({one})" for one in sets)
    members = " + ".join(f"(coalesce({one}, false)::INTEGER << {n})" for n, one in enumerate(sets))
    groups: list[Key] = [()]
    number, join = "0::INTEGER", ""
    if by:
        _store_groups(events, by, is_member)
        groups = events.ask(f"SELECT {', '.join(by)} FROM penstock_groups ORDER BY union_group")
        matches = " AND ".join(f"e.{key} IS NOT DISTINCT FROM g.{key}" for key in by)
        number, join = "union_group", f" JOIN penstock_groups g ON {matches}"
    measured = ["ts_us", "end_us", *measures]
    filled = [*measured[:2], *(f"coalesce({name}, {MISSING}) AS {name}" for name in measures)]
    selected = ", ".join([*by, f"{members} AS union_sets", *filled])
    # Events that take no time are in no union, but may be among what is measured.
    lasts = "true" if measures else "dur_us > 0"
    query = (
        f"SELECT {number} AS union_group, union_sets, {', '.join(measured)}"
        f" FROM (SELECT {selected} FROM {{events}} WHERE {lasts} AND ({is_member})) e{join} ORDER BY ts_us"
    )
    return groups, (
        tuple(batch.column(place).to_numpy() for place in range(batch.num_columns))
        for batch in events.read(query, BATCH_ROWS)
    )


def _store_groups(events: EventsView, by: Sequence[str], where: str) -> None:
    keys = ", ".join(by)
    events.connection.execute(
        events.fill_in(f"""
            CREATE OR REPLACE TEMP TABLE penstock_groups AS
            SELECT {keys}, (row_number() OVER () - 1)::INTEGER AS union_group
            FROM (SELECT DISTINCT {keys} FROM {{events}} WHERE {where})""")
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What the events of one set add to the union of each group.

    These are pieces of time, some empty, none of which overlaps another of its group. Those of a group stand
    together, in order.
    """

    number: int
    codes: Numbers
    firsts: Numbers
    begins: Numbers
    ends: Numbers
    sums: Any

    def cut_before(self, reach: Numbers) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Groups, begins and ends of the parts of pieces that lie before what each group has reached."""
        lasts = np.append(self.firsts[1:], len(self.codes))
        places = self.firsts
        for _ in range(_SHORT_OVERLAP):
            is_before = (places < lasts) & (self.begins[np.minimum(places, len(self.codes) - 1)] < reach)
            places, lasts, reach = places[is_before], lasts[is_before], reach[is_before]
            if not len(places):
                return
            yield self.codes[places], self.begins[places], np.minimum(self.ends[places], reach)
            places = places + 1
        for place, last, reached in zip(places.tolist(), lasts.tolist(), reach.tolist(), strict=True):
            stop = place + int(np.searchsorted(self.begins[place:last], reached))
            if stop > place:
                ends = np.minimum(self.ends[place:stop], reached)
                yield self.codes[place:stop], self.begins[place:stop], ends


_SHORT_OVERLAP: Final = 8
"""Pieces of a group that are cut together with those of other groups; more are cut group by group."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch without regard to what came before it."""

    pieces: Sequence[_Pieces]
    first_us: int
    last_us: int
    more: Sequence[Any] = ()
    """What a kind of sweep measures besides."""


class Sweep:
    """Adds up unions of sets of events by group, batch by batch in the order of time.

    Threads measure batches side by side; added one after another, a batch loses what earlier events cover.
    """

    def __init__(self, num_groups: int, num_sets: int) -> None:
        self.total = np.zeros((num_groups, num_sets), dtype=np.int64)
        # The furthest end so far: what an event adds is its part behind it.
        self._reach = np.full((num_sets, num_groups), _NEVER)
        # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
        self._code_type = np.int16 if num_groups < 1 << 15 else np.int32

    def add_all(
        self, parts: Iterable[Any], read: Callable[[Any], Iterable[Batch]] = lambda part: [part]
    ) -> bool:
        """Add batches of groups, sets, starts and ends, which `read` gives of each part.

        False, and no sum holds, if events are not in order.
        """
        last_us = _NEVER
        for measured in _map_side_by_side(lambda part: list(map(self._measure, read(part))), parts):
            for batch in measured:
                if batch is None or batch.first_us < last_us:
                    return False
                last_us = batch.last_us
                self._add_measured(batch)
        return True

    def add(self, codes: Numbers, members: Numbers, starts: Numbers, ends: Numbers) -> None:
        """Add events in the order of their starts; `members` has a bit for each set."""
        self.add_all([(codes, members, starts, ends)])

    def _measure(self, batch: Batch) -> Measured | None:
        """The pieces of a batch; None if its events are not in order."""
        starts = batch[2]
        if np.any(starts[1:] < starts[:-1]):
            return None
        first_us, last_us = int(starts[0]), int(starts[-1])
        num_groups, num_sets = self.total.shape
        if num_groups > 1:
            order = np.argsort(batch[0].astype(self._code_type), kind="stable")
            # Of a single set, those that are not in it are behind the last group.
            needed = (True, num_sets > 1 or len(batch) > _TIMES, *[True] * (len(batch) - 2))
            batch = tuple(one[order] if needs else one for one, needs in zip(batch, needed, strict=True))
        return Measured(list(self._measure_sets(batch)), first_us, last_us, self._measure_more(batch))

    def _measure_sets(self, batch: Batch) -> Iterator[_Pieces]:
        codes, members, starts, ends = batch[:_TIMES]
        num_groups, num_sets = self.total.shape
        if num_sets == 1 and num_groups > 1:
            yield self._measure_set(0, codes, starts, ends)
            return
        for number in range(num_sets):
            is_member = (members & (1 << number)) != 0
            num_members = np.count_nonzero(is_member)
            if num_members == len(members):
                yield self._measure_set(number, codes, starts, ends)
            elif num_members:
                yield self._measure_set(number, codes[is_member], starts[is_member], ends[is_member])

    def _measure_more(self, batch: Batch) -> Sequence[Any]:
        """What a kind of sweep measures besides, of events by group."""
        del batch
        return ()

    def _measure_set(self, number: int, codes: Numbers, starts: Numbers, ends: Numbers) -> _Pieces:
        """The pieces of events of one set; those of a group stand together."""
        firsts = np.zeros(1, dtype=np.int64)
        if len(self.total) > 1:
            firsts = np.concatenate((firsts, np.flatnonzero(codes[1:] != codes[:-1]) + 1))
        furthest = _running_max(ends, firsts)
        begins = np.empty_like(furthest)
        np.maximum(starts[1:], furthest[:-1], out=begins[1:])
        begins[firsts] = starts[firsts]
        return _Pieces(number, codes, firsts, begins, furthest, self._sum(codes, firsts, begins, furthest))

    def _add_measured(self, batch: Measured) -> None:
        for pieces in batch.pieces:
            reach, groups = self._reach[pieces.number], pieces.codes[pieces.firsts]
            self._take(pieces.number, pieces.sums, 1)
            for codes, begins, ends in pieces.cut_before(reach[groups]):
                firsts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
                self._take(pieces.number, self._sum(codes, firsts, begins, ends), -1)
            lasts = np.append(pieces.firsts[1:], len(pieces.codes)) - 1
            reach[groups] = np.maximum(reach[groups], pieces.ends[lasts])

    def _sum(self, codes: Numbers, firsts: Numbers, begins: Numbers, ends: Numbers) -> Any:
        """The lengths of pieces by group."""
        return codes[firsts], np.add.reduceat(ends - begins, firsts)

    def _take(self, number: int, sums: Any, sign: int) -> None:
        """Add sums of lengths, or take them away."""
        groups, times_us = sums
        self.total[groups, number] += sign * times_us


def _map_side_by_side(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """The results of a function, in order, by threads that are a few items ahead."""
    num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(num_threads, "union") as pool:
        ahead: deque[Future[Any]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


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


def _running_max(ends: Numbers, firsts: Numbers) -> Numbers:
    """The largest end so far within each group; groups begin at `firsts`."""
    if len(firsts) == 1:
        return np.maximum.accumulate(ends)
    lengths = np.diff(firsts, append=len(ends))
    lowest = int(ends.min())
    span = int(ends.max()) - lowest + 1
    if span * len(firsts) < 1 << 62:
        # Lifting each group above the ones before it makes one accumulation serve them all.
        lift = np.repeat(np.arange(len(firsts)) * span - lowest, lengths)
        lifted = ends + lift
        np.maximum.accumulate(lifted, out=lifted)
        lifted -= lift
        return lifted
    levels, ranks = find_distinct(ends)
    lift = np.repeat(np.arange(len(firsts)) * len(levels), lengths)
    return levels[np.maximum.accumulate(ranks + lift) - lift]
