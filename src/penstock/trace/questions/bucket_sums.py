"""Calls, bytes and time in buckets of time, in one pass over the events.

An event that spans several buckets is divided among them by the time that it spent in each; it began in one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.trace.arrow_functions import Numbers
from penstock.trace.interval_union import Measured, Sweep, sweep_events
from penstock.trace.questions.events_view import IS_READ, IS_WRITE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.trace.event_codes import Batch
    from penstock.trace.interval_union import Key
    from penstock.trace.questions.events_view import EventsView

_READ: Final = 1
_WRITTEN: Final = 2
_NUM_KINDS: Final = 4
"""Kinds of calls; a call has a bit of each that it is."""


@dataclass(slots=True)
class BucketSums:
    """What happened in a bucket; `inside_us` is the sum of the times of all events in it."""

    busy_us: int = 0
    inside_us: int = 0
    num_started: int = 0
    read_bytes: float = 0.0
    written_bytes: float = 0.0


def round_up(wanted_us: int) -> int:
    """The next round length of time: 1, 2 or 5 times a power of ten microseconds."""
    power = 1
    while wanted_us > 10 * power:
        power *= 10
    return next(step * power for step in (1, 2, 5, 10) if wanted_us <= step * power)


def sum_buckets(
    events: EventsView, by: Sequence[str], where: str, *, width_us: int, origin_of: Callable[[Key], int]
) -> Mapping[Key, BucketSums]:
    """Sums of events by the values of `by` and the number of the bucket of time, counted from `origin_of`."""

    def make(groups: Sequence[Key]) -> _BucketSweep:
        return _BucketSweep(np.array([*map(origin_of, groups), 0], dtype=np.int64), width_us)

    sets = (where, f"({where}) AND {IS_READ}", f"({where}) AND {IS_WRITE}")
    groups, sweep = sweep_events(events, by, sets, make, ("size_bytes",))
    return {(*groups[group], bucket): sums for (group, bucket), sums in sweep.sums.items()}


class _BucketSweep(Sweep):
    """Adds up the events of groups by bucket; those behind the last group are not asked for."""

    def __init__(self, origins: Numbers, width_us: int) -> None:
        super().__init__(len(origins), 1)
        self._num_groups = len(origins) - 1
        # Those of the last are in no bucket, but an overflow would be in many.
        self._origins = np.append(origins[:-1], origins[:1] if len(origins) > 1 else 0)
        self._have_one_origin = bool(np.all(self._origins == self._origins[0]))
        self._width_us = width_us
        self.sums: defaultdict[tuple[int, int], BucketSums] = defaultdict(BucketSums)

    def _measure(self, batch: Batch) -> Measured | None:
        measured = super()._measure(batch)
        return measured and replace(measured, more=list(self._add_up(*batch)))

    def _add_measured(self, batch: Measured) -> None:
        super()._add_measured(batch)
        for group, bucket, kind, num_started, inside_us, moved_bytes in batch.more:
            sums = self.sums[group, bucket]
            sums.num_started += int(num_started)
            sums.inside_us += int(inside_us)
            sums.read_bytes += moved_bytes if kind == _READ else 0
            sums.written_bytes += moved_bytes if kind == _WRITTEN else 0

    def _add_up(
        self, codes: Numbers, members: Numbers, starts: Numbers, ends: Numbers, sizes: Numbers
    ) -> Iterator[tuple[Any, ...]]:
        """Group, bucket, kind of call, calls that began, time, and bytes."""
        # Nearly all events are within one bucket: the few others are taken out, and divided.
        origins = self._origins[0] if self._have_one_origin else self._origins[codes]
        begins, lengths = starts - origins, ends - starts
        buckets = begins // self._width_us
        is_longer = begins + lengths > (buckets + 1) * self._width_us
        longer = np.flatnonzero(is_longer & (codes < self._num_groups))
        kinds, sizes = members >> 1, np.maximum(sizes, 0)
        begun = ~is_longer
        weights = begun, np.where(begun, lengths, 0), np.where(begun, sizes, 0)
        yield from self._count(codes, kinds, buckets, weights if len(longer) else (None, lengths, sizes))
        codes, kinds, sizes, lengths = (
            codes[longer],
            kinds[longer],
            sizes[longer].astype(float),
            lengths[longer],
        )
        is_first = np.ones(len(longer), dtype=bool)
        for pieces, of_pieces, times_us in self._cut(codes, starts[longer], ends[longer]):
            moved = sizes[pieces] * times_us / lengths[pieces]
            yield from self._count(
                codes[pieces], kinds[pieces], of_pieces, (is_first[pieces], times_us, moved)
            )
            is_first[pieces] = False

    def _sum(self, codes: Numbers, firsts: Numbers, begins: Numbers, ends: Numbers) -> Any:
        """The lengths of pieces by group and bucket, divided at the edges of buckets."""
        del firsts
        chosen = np.flatnonzero((ends > begins) & (codes < self._num_groups))
        codes = codes[chosen]
        return [
            row
            for pieces, buckets, times_us in self._cut(codes, begins[chosen], ends[chosen])
            for row in self._count(codes[pieces], 0, buckets, (times_us,))
        ]

    def _take(self, number: int, sums: Any, sign: int) -> None:
        del number
        for group, bucket, _, time_us in sums:
            self.sums[group, bucket].busy_us += sign * int(time_us)

    def _cut(
        self, codes: Numbers, begins: Numbers, ends: Numbers
    ) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Divide times at edges: the places of those with one more piece, its bucket and its length."""
        origins = self._origins[codes]
        places, begins, ends = np.arange(len(codes)), begins - origins, ends - origins
        while len(places):
            buckets = begins // self._width_us
            edges = np.minimum(ends, (buckets + 1) * self._width_us)
            yield places, buckets, edges - begins
            is_longer = np.flatnonzero(ends > edges)
            places, begins, ends = places[is_longer], edges[is_longer], ends[is_longer]

    def _count(
        self, codes: Numbers, kinds: Numbers | int, buckets: Numbers, measures: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Group, bucket, kind and the sums of these measures, of which None is 1 for each event."""
        lowest = int(buckets.min())
        num_buckets = int(buckets.max()) - lowest + 1
        places = (codes.astype(np.int64) * num_buckets + (buckets - lowest)) * _NUM_KINDS + kinds
        num_places = self._num_groups * num_buckets * _NUM_KINDS
        known = None
        if num_places > len(codes):
            known, places = np.unique(places, return_inverse=True)
        sums = [np.bincount(places, measure)[:num_places] for measure in measures]
        found = np.flatnonzero(np.any([one > 0 for one in sums], axis=0))
        of_found = found if known is None else known[found]
        asked = of_found < num_places
        groups, numbers = np.divmod(of_found[asked] // _NUM_KINDS, num_buckets)
        return zip(
            groups.tolist(), (numbers + lowest).tolist(), (of_found[asked] % _NUM_KINDS).tolist(),
            *(one[found[asked]].tolist() for one in sums), strict=True,
        )  # fmt: skip
