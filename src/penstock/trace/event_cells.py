"""Events added up once by the integers that decide what groups and sets they belong to.

Questions group events by texts and by what is derived of them, which DuckDB does slowly for each of millions
of rows, and each question asks several times. A few integers decide all of it: events are added up by those,
in one scan, and questions add up the sums, which are few.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.trace.event_schema import COLUMNS

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView

INTEGERS: Final = frozenset(("kind_id", "path_id", "rank", "pid", "tid"))
EACH_SIZE: Final = "each_bytes"
"""Stands for `size_bytes` where events are added up by it: among sums, that is the sum of their sizes."""
TEXTS: Final = frozenset(("run", "host", "file"))
"""Columns that mostly follow from the others: a process has one host."""
MEASURES: Final = {
    "num_events": ("count(*)", "1"),
    "sum_us": ("sum(dur_us)", "dur_us"),
    "longest_us": ("max(dur_us)", "dur_us"),
    "first_us": ("min(ts_us)", "ts_us"),
    "last_us": ("max(end_us)", "end_us"),
    "size_bytes": ("sum(size_bytes)", "size_bytes"),
}
"""What sums have besides the columns that they are of: in SQL of many events, and of one."""
_DERIVED: Final = frozenset(("tier", "file_class", "phase"))
_KNOWN: Final = frozenset((*(column.name for column in COLUMNS), *_DERIVED, *INTEGERS, EACH_SIZE))
_TEXT_LITERAL: Final = re.compile(r"'(?:[^']|'')*'")
_IDENTIFIER: Final = re.compile(r"[a-z_]\w*")
_SAMPLE_ROWS: Final = 1 << 17
_MOST_OF_SAMPLE: Final = 1 << 15
"""Sums of which the first events have more would be about as many as the events."""


def find_key_columns(keys: Mapping[str, str], texts: Sequence[str]) -> frozenset[str] | None:
    """The columns that decide these SQL expressions; None if events cannot be added up by one of them."""
    columns = {keys.get(name, name) for name in find_names(texts)}
    return frozenset(columns) if columns <= INTEGERS | TEXTS | {EACH_SIZE} else None


def find_names(texts: Sequence[str]) -> frozenset[str]:
    """The columns that SQL expressions name."""
    names = {name for text in texts for name in _IDENTIFIER.findall(_TEXT_LITERAL.sub("", text).lower())}
    return frozenset(names & _KNOWN)


def add_up(events: EventsView, by: Sequence[str], sums: Sequence[str] = ()) -> EventsView:
    """Sums of events, or the events themselves as sums of one: rows with the columns of MEASURES.

    `by` are SQL expressions over columns of events, as groups and conditions; `sums` also name measures.
    """
    added = find_cells(events, by, sums)
    if added is not None:
        return added
    names = find_names((*by, *sums)) - MEASURES.keys()
    measures = [f"{of_one} AS {name}" for name, (_, of_one) in MEASURES.items()]
    rows = events.fill_in(
        f"(SELECT {', '.join([*map(_column_sql, sorted(names)), *measures])} FROM {{events}})"
    )
    return events.of_relation(rows)


def find_cells(events: EventsView, by: Sequence[str], sums: Sequence[str] = ()) -> EventsView | None:
    """Sums of events; None if there would be too many, or these expressions do not follow from integers."""
    measured = [name for name in find_names(sums) if name not in MEASURES]
    columns = find_key_columns(events.relations.keys, (*by, *measured, *events.conditions))
    relation = (
        None
        if columns is None
        else events.relations.find_cells(columns, " ".join((*by, *sums, *events.conditions)))
    )
    return None if relation is None else replace(events.of_relation(relation), conditions=events.conditions)


def prefer_cells(events: EventsView, by: Sequence[str]) -> EventsView:
    """Sums of events where there are some already, else the events."""
    columns = find_key_columns(events.relations.keys, (*by, *events.conditions))
    known = columns is not None and events.relations.has_cells(columns)
    return (find_cells(events, by) if known else None) or events


def sums_sql(source: str, columns: Sequence[str]) -> str:
    """SELECT the sums of events by these columns."""
    measures = [f"{of_many} AS {name}" for name, (of_many, _) in MEASURES.items()]
    grouping = f"GROUP BY {', '.join(columns)}" if columns else "HAVING count(*) > 0"
    return f"SELECT {', '.join([*map(_column_sql, columns), *measures])} FROM {source} {grouping}"


def are_many_sql(source: str, columns: Sequence[str]) -> str:
    """SELECT whether there would be many sums by these columns, judged by the first events."""
    return f"""
        SELECT count(*) > {_MOST_OF_SAMPLE} FROM (
            SELECT DISTINCT {", ".join(columns)}
            FROM (SELECT {", ".join(map(_column_sql, columns))} FROM {source} LIMIT {_SAMPLE_ROWS}))"""


def _column_sql(name: str) -> str:
    return f"size_bytes AS {EACH_SIZE}" if name == EACH_SIZE else f'"{name}"'
