"""One integer for all that a question asks of an event, so that a scan in the order of time needs no join.

DuckDB does not keep the order of rows that it joins, and sorting them again costs more than all the rest of a
question. What group and sets an event belongs to mostly follows from a few integer columns; they make a code,
and two arrays give the group and the sets of each code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.trace.event_schema import COLUMNS

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

Key = tuple[Any, ...]

_INTEGERS: Final = frozenset(("kind_id", "path_id", "rank", "pid", "tid"))
_TEXTS: Final = frozenset(("run", "host", "file"))
"""Columns that mostly follow from the others: a process has one host."""
_KNOWN: Final = frozenset((*(column.name for column in COLUMNS), "tier", "file_class", "phase", *_INTEGERS))
_MOST_CODES: Final = 1 << 22
_MOST_COMBINATIONS: Final = 1 << 17
_TEXT_LITERAL: Final = re.compile(r"'(?:[^']|'')*'")
_IDENTIFIER: Final = re.compile(r"[a-z_]\w*")


@dataclass(frozen=True, slots=True)
class EventCodes:
    """A query for the codes, starts and ends of all events, and what each code stands for.

    Events of no set have the group behind the last one.
    """

    query: str
    groups: Sequence[Key]
    group_of: npt.NDArray[np.int32]
    sets_of: npt.NDArray[np.int32]

    def read(self, events: EventsView, batch_rows: int) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Batches of the groups, sets, starts and ends of events."""
        for batch in events.connection.sql(self.query).to_arrow_reader(batch_rows):
            codes, starts, ends = (batch.column(place).to_numpy() for place in range(3))
            yield self.group_of[codes], self.sets_of[codes], starts, ends


def code_events(events: EventsView, by: Sequence[str], sets: Sequence[str]) -> EventCodes | None:
    """Codes for events by group and sets; None if these do not follow from a few integer columns."""
    columns = _find_columns(events.relations.keys, (*by, *sets, *events.conditions))
    if columns is None:
        return None
    integers, texts = sorted(columns & _INTEGERS), sorted(columns & _TEXTS)
    # All events have a code, because a scan that filters takes longer than one that does not.
    of_all = "".join(f"({one}) AND " for one in events.conditions)
    members = " + ".join(
        f"(coalesce({of_all}({chosen}), false)::INTEGER << {n})" for n, chosen in enumerate(sets)
    )
    keyed = [*integers, *texts]
    selected = [*keyed, f"any_value({members})", *(f"any_value({key})" for key in by)]
    rows = replace(events, conditions=()).ask(f"""
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
    return _build_codes(events.relations.source, meanings, ranges)


def _find_columns(keys: Mapping[str, str], texts: Sequence[str]) -> frozenset[str] | None:
    """The columns that these expressions depend on; None if a code cannot hold one of them."""
    names = {name for text in texts for name in _IDENTIFIER.findall(_TEXT_LITERAL.sub("", text).lower())}
    columns = {keys.get(name, name) for name in names & _KNOWN}
    return frozenset(columns) if columns <= _INTEGERS | _TEXTS else None


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


def _build_codes(
    source: str, meanings: Mapping[Key, tuple[int, Key | None]], ranges: Sequence[_Range]
) -> EventCodes:
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
    code_sql = "0"
    for one in ranges:
        code_sql = f"({code_sql} * {one.size} + coalesce({one.name} - {one.lowest} + 1, 0))"
    return EventCodes(f"SELECT ({code_sql})::INTEGER, ts_us, end_us FROM {source}", groups, group_of, sets_of)
