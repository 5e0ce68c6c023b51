"""Interval unions: the time in which at least one event was under way, exactly, in whole microseconds.

Three measures always stand side by side, because each alone misleads: the sum of durations counts parallel
threads many times, the longest thread forgets the others, the union does not say how many ran at once.
Invariant: union <= sum.

`union_times` makes one pass over the events in the order of time, in bounded memory; `union_sql` gives the
same inside of larger queries, at several times the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

_BATCH_ROWS: Final = 1 << 17
_SETS: Final = 3
_BITS: Final = 32
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
    if "file_class" in by:
        events = events.classified()
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join([*by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    counts = events.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}")
    busy = union_times(events, by, first=where)
    width = len(by)
    rows = []
    for row in counts:
        key, (num_events, sum_us, *more) = row[:width], row[width:]
        union_us = busy.get(key, NO_TIME).first_us
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows


def union_times(
    events: EventsView, by: Sequence[str], *, first: str, second: str = "false"
) -> dict[tuple[Any, ...], UnionTimes]:
    """Unions by the values of `by`; `first` and `second` are SQL conditions of the two sets."""
    keys = "".join(f"{key}, " for key in by)
    # DuckDB sorts, on disk if need be, so that what an event adds depends on earlier rows only.
    reader = events.read(
        f"""SELECT {keys}(({first})::TINYINT + 2 * ({second})::TINYINT)::BIGINT AS member, ts_us, end_us
            FROM {{events}} WHERE dur_us > 0 AND (({first}) OR ({second})) ORDER BY ts_us""",
        _BATCH_ROWS,
    )
    groups = _Groups(len(by))
    for batch in reader:
        columns = [batch.column(number) for number in range(batch.num_columns)]
        codes = groups.encode(columns[: len(by)], batch.num_rows)
        groups.add(codes, *(column.to_numpy() for column in columns[len(by) :]))
    return {groups.key(code): UnionTimes(*map(int, groups.total[code])) for code in range(len(groups))}


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


class _Groups:
    """Values of key columns as small numbers, the same in every batch, and the union of each group so far.

    Pairs of columns are numbered anew, so a group stays one number however many columns there are.
    """

    def __init__(self, num_columns: int) -> None:
        self._columns = [_Numbering() for _ in range(num_columns)]
        self._pairs = [_Numbering() for _ in range(num_columns)]
        self._reach = np.full((16, _SETS), _NEVER, dtype=np.int64)
        self.total = np.zeros((16, _SETS), dtype=np.int64)

    def encode(self, columns: Sequence[pa.Array], num_rows: int) -> Numbers:
        """The group of each row."""
        codes = np.zeros(num_rows, dtype=np.int64)
        for column, numbers, pairs in zip(columns, self._columns, self._pairs, strict=True):
            codes = pairs.encode(pa.array((codes << _BITS) | numbers.encode(column)))
        missing = len(self) - len(self.total)
        if missing > 0:
            more = max(missing, len(self.total))
            self._reach = np.concatenate((self._reach, np.full((more, _SETS), _NEVER, dtype=np.int64)))
            self.total = np.concatenate((self.total, np.zeros((more, _SETS), dtype=np.int64)))
        return codes

    def add(self, codes: Numbers, members: Numbers, starts: Numbers, ends: Numbers) -> None:
        """Add events in the order of their starts; `members` has a bit for each of the first two sets."""
        # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
        order = np.argsort(codes.astype(np.int16) if len(self) < 1 << 15 else codes, kind="stable")
        codes, members, starts, ends = codes[order], members[order], starts[order], ends[order]
        for number in range(_SETS):
            chosen = slice(None) if number == _SETS - 1 else np.flatnonzero((members >> number) & 1)
            self._add_set(number, codes[chosen], starts[chosen], ends[chosen])

    def _add_set(self, number: int, codes: Numbers, starts: Numbers, ends: Numbers) -> None:
        if not len(codes):
            return
        is_first = np.concatenate(([True], codes[1:] != codes[:-1]))
        firsts = np.flatnonzero(is_first)
        groups = codes[firsts]
        # The furthest end before each event: of its group in this batch, and of the batches before.
        reach = self._reach[codes, number]
        furthest = _running_max(ends, np.cumsum(is_first) - 1)
        reach[1:] = np.where(is_first[1:], reach[1:], np.maximum(reach[1:], furthest[:-1]))
        added = np.maximum(0, ends - np.maximum(starts, reach))
        self.total[groups, number] += np.add.reduceat(added, firsts)
        lasts = np.append(firsts[1:], len(codes)) - 1
        self._reach[groups, number] = np.maximum(self._reach[groups, number], furthest[lasts])

    def __len__(self) -> int:
        return len(self._pairs[-1].values) if self._pairs else 1

    def key(self, code: int) -> tuple[Any, ...]:
        """The values of a group."""
        values = []
        for numbers, pairs in zip(reversed(self._columns), reversed(self._pairs), strict=True):
            pair = pairs.values[code]
            values.append(numbers.values[pair & ((1 << _BITS) - 1)])
            code = pair >> _BITS
        return tuple(reversed(values))


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


class _Numbering:
    """The values of one column, numbered as they come."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def encode(self, column: pa.Array) -> Numbers:
        """The number of each row's value; a missing one is a value, too."""
        encoded = column.dictionary_encode(null_encoding="encode")
        numbers = np.array([self._number(value) for value in encoded.dictionary.to_pylist()], dtype=np.int64)
        return numbers[encoded.indices.to_numpy()] if len(column) else numbers

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number
