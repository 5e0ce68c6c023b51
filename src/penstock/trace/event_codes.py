"""One integer for all that a question asks of an event, so that a scan in the order of time needs no join.

DuckDB does not keep the order of rows that it joins, and sorting them again costs more than all the rest of a
question. What group and sets an event belongs to mostly follows from a few integer columns; they make a code,
and two arrays give the group and the sets of each code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.trace.event_cells import INTEGERS, TEXTS, find_cells, find_key_columns
from penstock.trace.ordered_events import MISSING, Part, split_part

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

Key = tuple[Any, ...]
Batch = tuple[npt.NDArray[Any], ...]

BATCH_ROWS: Final = 1 << 15
"""As many events as a cache holds."""

_MOST_CODES: Final = 1 << 22
_MOST_COMBINATIONS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class EventCodes:
    """How to read the codes, starts and ends of all events, and what each code stands for.

    Events of no set have the group behind the last one.
    """

    groups: Sequence[Key]
    group_of: npt.NDArray[np.int32]
    sets_of: npt.NDArray[np.int32]
    ranges: Sequence[_Range]

    def batches(
        self, events: EventsView, measures: Sequence[str] = ()
    ) -> Iterator[Callable[[], Iterator[Batch]]]:
        """A function for each part of the events: its batches are groups, sets, starts, ends and measures."""
        names = [*(one.name for one in self.ranges), "ts_us", "end_us", *measures]
        if events.ordered is not None:
            return (partial(self._read, part, measures) for part in events.ordered.parts(names))
        return (partial(self._split, part, measures) for part in self._ask(events, names))

    def _ask(self, events: EventsView, names: Sequence[str]) -> Iterator[Part]:
        selected = [
            name if name in ("ts_us", "end_us") else f"coalesce({name}, {MISSING}) AS {name}"
            for name in names
        ]
        query = f"SELECT {', '.join(selected)} FROM {events.relations.source}"
        for batch in events.connection.sql(query).to_arrow_reader(BATCH_ROWS):
            yield {name: batch.column(place).to_numpy() for place, name in enumerate(names)}

    def _read(self, read: Callable[[], Part], measures: Sequence[str]) -> Iterator[Batch]:
        return self._split(read(), measures)

    def _split(self, part: Part, measures: Sequence[str]) -> Iterator[Batch]:
        for piece in split_part(part, BATCH_ROWS):
            codes: npt.NDArray[Any] = np.zeros(len(piece["ts_us"]), dtype=np.int64)
            for number, one in enumerate(self.ranges):
                places = one.places(piece[one.name])
                codes = codes * one.size + places if number else places
            times = piece["ts_us"], piece["end_us"]
            yield self.group_of[codes], self.sets_of[codes], *times, *(piece[name] for name in measures)


def code_events(events: EventsView, by: Sequence[str], sets: Sequence[str]) -> EventCodes | None:
    """Codes for events by group and sets; None if these do not follow from a few integer columns."""
    columns = find_key_columns(events.relations.keys, (*by, *sets, *events.conditions))
    cells = find_cells(events, (*by, *sets))
    if columns is None or cells is None:
        return None
    integers, texts = sorted(columns & INTEGERS), sorted(columns & TEXTS)
    # All events have a code, because a scan that filters takes longer than one that does not.
    of_all = "".join(f"({one}) AND " for one in events.conditions)
    members = " + ".join(
        f"(coalesce({of_all}({chosen}), false)::INTEGER << {n})" for n, chosen in enumerate(sets)
    )
    keyed = [*integers, *texts]
    selected = [*keyed, f"any_value({members})", *(f"any_value({key})" for key in by)]
    rows = replace(cells, conditions=()).ask(f"""
        SELECT {", ".join(selected)} FROM {{events}}
        {"GROUP BY " + ", ".join(keyed) if keyed else "HAVING count(*) > 0"}
        LIMIT {_MOST_COMBINATIONS + 1}""")
    if len(rows) > _MOST_COMBINATIONS:
        return None
    combinations = [
        (row[: len(integers)], row[len(keyed)], row[len(keyed) + 1 :] if row[len(keyed)] else None)
        for row in rows
    ]
    meanings = {key: (sets_of_key, group) for key, sets_of_key, group in combinations}
    if any(meanings[key] != (sets_of_key, group) for key, sets_of_key, group in combinations):
        return None
    ranges = [_Range.of(name, [key[place] for key in meanings]) for place, name in enumerate(integers)]
    if prod(one.size for one in ranges) > _MOST_CODES:
        return None
    return _build_codes(meanings, ranges)


@dataclass(frozen=True, slots=True)
class _Range:
    """The values of an integer column; the place of NULL is 0."""

    name: str
    lowest: int
    size: int

    @classmethod
    def of(cls, name: str, values: Sequence[int | None]) -> _Range:
        """The range of the values that occur."""
        known = [value for value in values if value is not None]
        return cls(name, min(known), max(known) - min(known) + 2) if known else cls(name, 0, 1)

    def place(self, value: int | None) -> int:
        """The place of a value within the range."""
        return 0 if value is None else value - self.lowest + 1

    def places(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The places of a column's values."""
        if self.size == 1:
            return np.zeros(len(values), dtype=np.int64)
        # What is missing is far below.
        places: npt.NDArray[Any] = np.maximum(values - (self.lowest - 1), 0)
        return places


def _build_codes(meanings: Mapping[Key, tuple[int, Key | None]], ranges: Sequence[_Range]) -> EventCodes:
    groups = list(dict.fromkeys(group for _, group in meanings.values() if group is not None))
    number_of: dict[Key | None, int] = {group: number for number, group in enumerate(groups)}
    number_of[None] = len(groups)
    num_codes = prod(one.size for one in ranges)
    group_of, sets_of = np.zeros(num_codes, dtype=np.int32), np.zeros(num_codes, dtype=np.int32)
    for key, (sets, group) in meanings.items():
        code = 0
        for value, one in zip(key, ranges, strict=True):
            code = code * one.size + one.place(value)
        group_of[code], sets_of[code] = number_of[group], sets
    return EventCodes(groups, group_of, sets_of, ranges)
