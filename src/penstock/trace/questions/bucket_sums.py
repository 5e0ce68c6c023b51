"""Calls, bytes and time in buckets of time, in one pass over the events.

An event that spans several buckets is divided among them by the time that it spent in each; it began in one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.trace.arrow_functions import Numbers
from penstock.trace.interval_union import Measured, Sweep, sweep_events
from penstock.trace.questions.events_view import IS_READ, IS_WRITE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.trace.event_codes import Batch
    from penstock.trace.interval_union import Key
    from penstock.trace.questions.events_view import EventsView

_READS: Final = 2
_WRITES: Final = 4
"""The bits of the second and the third set: calls that read, and calls that write."""


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

    def _measure_more(self, batch: Batch) -> Sequence[Any]:
        num_asked = int(np.searchsorted(batch[0], self._num_groups))
        return list(self._add_up(*(one[:num_asked] for one in batch))) if num_asked else ()

    def _add_measured(self, batch: Measured) -> None:
        super()._add_measured(batch)
        for group, bucket, num_started, inside_us, read_bytes, written_bytes in batch.more:
            sums = self.sums[group, bucket]
            sums.num_started += num_started
            sums.inside_us += inside_us
            sums.read_bytes += read_bytes
            sums.written_bytes += written_bytes

    def _add_up(
        self, codes: Numbers, members: Numbers, starts: Numbers, ends: Numbers, sizes: Numbers
    ) -> Iterator[tuple[Any, ...]]:
        """Group, bucket, calls that began, their time in it, and the bytes of those that read and wrote."""
        begins, lengths = starts - self._origins_of(codes), ends - starts
        buckets = begins // self._width_us
        moved = tuple(np.where(members & kind, np.maximum(sizes, 0), 0) for kind in (_READS, _WRITES))
        # Nearly all events are within one bucket: the few others are taken out, and divided.
        longer = np.flatnonzero(begins + lengths > (buckets + 1) * self._width_us)
        of_longer = [one[longer].astype(float) for one in moved]
        all_us = lengths[longer]
        for one in (lengths, *moved):
            one[longer] = 0
        yield from _add_runs(codes, buckets, (np.ones_like(lengths), lengths, *moved))
        codes = codes[longer]
        for pieces, of_pieces, times_us in self._cut(codes, starts[longer], ends[longer]):
            parts = (one[pieces] * times_us / all_us[pieces] for one in of_longer)
            yield from _add_runs(codes[pieces], of_pieces, (np.zeros_like(times_us), times_us, *parts))

    def _sum(self, codes: Numbers, firsts: Numbers, begins: Numbers, ends: Numbers) -> Any:
        """The lengths of pieces by group and bucket, divided at the edges of buckets."""
        del firsts
        chosen = np.flatnonzero((ends > begins) & (codes < self._num_groups))
        codes = codes[chosen]
        return [
            row
            for pieces, buckets, times_us in self._cut(codes, begins[chosen], ends[chosen])
            for row in _add_runs(codes[pieces], buckets, (times_us,))
        ]

    def _take(self, number: int, sums: Any, sign: int) -> None:
        del number
        for group, bucket, time_us in sums:
            self.sums[group, bucket].busy_us += sign * time_us

    def _origins_of(self, codes: Numbers) -> Any:
        return self._origins[0] if self._have_one_origin else self._origins[codes]

    def _cut(
        self, codes: Numbers, begins: Numbers, ends: Numbers
    ) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
        """Divide times at edges: the places of those with one more piece, its bucket and its length."""
        origins = self._origins_of(codes)
        places, begins, ends = np.arange(len(codes)), begins - origins, ends - origins
        while len(places):
            buckets = begins // self._width_us
            edges = np.minimum(ends, (buckets + 1) * self._width_us)
            yield places, buckets, edges - begins
            is_longer = np.flatnonzero(ends > edges)
            places, begins, ends = places[is_longer], edges[is_longer], ends[is_longer]


def _add_runs(
    codes: Numbers, buckets: Numbers, measures: Sequence[npt.NDArray[Any]]
) -> Iterator[tuple[Any, ...]]:
    """Group, bucket and sums of these measures; events of a group stand together, in the order of time."""
    if not len(codes):
        return iter(())
    is_next = (codes[1:] != codes[:-1]) | (buckets[1:] != buckets[:-1])
    firsts = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(is_next) + 1))
    sums = (np.add.reduceat(one, firsts).tolist() for one in measures)
    return zip(codes[firsts].tolist(), buckets[firsts].tolist(), *sums, strict=True)
