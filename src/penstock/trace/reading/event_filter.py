"""Filters events by an SQL expression, and derives from it which lines need not be parsed at all.

Invariant: a prefilter is a necessary condition only. Whatever of the expression it does not understand is not
required of the bytes, and the expression itself is always applied to the events that are left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import duckdb
import pyarrow as pa

from penstock.errors import UsageError
from penstock.trace.event_schema import SCHEMA, FileAccount, spellings


@dataclass(frozen=True, slots=True)
class Prefilter:
    """Bytes that the line of a wanted event has: one of each sort that there are patterns of."""

    name_patterns: tuple[bytes, ...] = ()
    path_patterns: tuple[bytes, ...] = ()
    """Pieces of paths. They may stand in the line that explains the hash of a path instead."""

    @property
    def is_active(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self.name_patterns or self.path_patterns)


NO_PREFILTER: Final = Prefilter()
_UNESCAPED: Final = re.compile(r"[A-Za-z0-9_.:+-]{2,}")
"""Letters that no writer of JSON escapes. A slash may be written as backslash and slash."""


def derive_prefilter(where: Mapping[str, Any]) -> Prefilter:
    """The prefilter of an expression, given as the tree of DuckDB's `json_serialize_sql`."""
    name_patterns: tuple[bytes, ...] = ()
    path_patterns: tuple[bytes, ...] = ()
    for term in _terms(where):
        column, values = _compared(term)
        if column == "path":
            path_patterns = path_patterns or _longest_pieces(values)
        elif column == "op":
            names = [name for value in values for name in spellings(value)]
            name_patterns = name_patterns or _quoted_patterns(names)
        elif column in ("name", "cat"):
            name_patterns = name_patterns or _quoted_patterns(values)
    return Prefilter(name_patterns, path_patterns)


def _terms(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The operands of a conjunction, which must all hold."""
    if node.get("type") == "CONJUNCTION_AND":
        for child in node.get("children", ()):
            yield from _terms(child)
    else:
        yield node


def _compared(term: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A column, and the texts one of which it equals or contains; no column for any other term."""
    kind = term.get("type")
    if kind == "COMPARE_EQUAL":
        sides = [term.get("left", {}), term.get("right", {})]
        sides.sort(key=lambda side: side.get("class") != "COLUMN_REF")
        return _column(sides[0]), _texts(sides[1:])
    if kind == "COMPARE_IN":
        children = term.get("children", [])
        return (_column(children[0]), _texts(children[1:])) if children else ("", [])
    if term.get("class") == "FUNCTION" and term.get("function_name") in _CONTAINING:
        sides = [side.get("expression", side) for side in term.get("arguments", term.get("children", ()))]
        if len(sides) != 2 or _column(sides[0]) != "path":
            return "", []
        texts = _texts(sides[1:])
        if term["function_name"] == "~~":
            texts = [max(re.split(r"[%_]", text), key=len) for text in texts]
        return "path", texts
    return "", []


_CONTAINING: Final = ("~~", "contains", "starts_with", "prefix")
"""DuckDB's functions (LIKE is `~~`) that hold only for texts that contain their argument."""


def _column(node: Mapping[str, Any]) -> str:
    names = node.get("column_names") or [""]
    return str(names[-1]) if node.get("class") == "COLUMN_REF" else ""


def _texts(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The literals; empty if one of the nodes is not a literal."""
    texts = [_literal(node) for node in nodes]
    return [] if None in texts else [text for text in texts if text is not None]


def _literal(node: Mapping[str, Any]) -> str | None:
    literal, value = node.get("literal"), node.get("value")
    if node.get("class") != "CONSTANT":
        return None
    if isinstance(literal, dict) and isinstance(literal.get("text"), str):
        return str(literal["text"])
    return str(value["value"]) if isinstance(value, dict) and isinstance(value.get("value"), str) else None


def _longest_pieces(values: Sequence[str]) -> tuple[bytes, ...]:
    """The longest part of each text that appears unescaped in a line; none if a text has no such part."""
    pieces = [max(_UNESCAPED.findall(value), key=len, default="") for value in values]
    return tuple(piece.encode() for piece in pieces) if all(pieces) else ()


def _quoted_patterns(values: Sequence[str]) -> tuple[bytes, ...]:
    """Each text in quotes; nothing if one would be escaped."""
    plain = [value for value in values if _UNESCAPED.fullmatch(value)]
    return tuple(f'"{value}"'.encode() for value in plain) if len(plain) == len(values) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Events for which the SQL expression `where` holds; all if it is empty."""

    where: str = ""

    def __post_init__(self) -> None:
        """Refuse what DuckDB cannot apply to events, before anything is read."""
        self.prefilter()

    def prefilter(self) -> Prefilter:
        """What the line of a wanted event has."""
        return _examine(self.where) if self.where else NO_PREFILTER

    @contextmanager
    def open(self) -> Iterator[BatchFilter]:
        """Prepare to apply the expression. Opening costs as much as 100,000 lines; share it among files."""
        if not self.where:
            yield BatchFilter("", None)
            return
        with duckdb.connect(config={"threads": 1}) as connection:
            yield BatchFilter(self.where, connection)


@dataclass(frozen=True, slots=True)
class BatchFilter:
    """Applies an expression to batches of events; safe for threads."""

    where: str
    connection: duckdb.DuckDBPyConnection | None

    def apply(self, batches: Iterator[pa.RecordBatch], account: FileAccount) -> Iterator[pa.RecordBatch]:
        """Keep the wanted events of batches; the others are counted as unwanted."""
        if self.connection is None:
            yield from batches
            return
        with self.connection.cursor() as cursor:
            for batch in batches:
                wanted = batch.filter(_mask(cursor, pa.Table.from_batches([batch]), self.where))
                account.unwanted += batch.num_rows - wanted.num_rows
                yield wanted


ALL_EVENTS: Final = EventFilter()
"""All events."""


@cache
def _examine(where: str) -> Prefilter:
    """The prefilter of an expression; UsageError for one that DuckDB cannot apply to events."""
    with duckdb.connect() as connection:
        _mask(connection, SCHEMA.empty_table(), where)
        query = f"SELECT * FROM events WHERE {where}"
        tree = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    statements = json.loads(tree).get("statements") or [{}]
    return derive_prefilter(statements[0].get("node", {}).get("where_clause") or {})


def _mask(connection: duckdb.DuckDBPyConnection, table: pa.Table, where: str) -> pa.Array:
    """Whether each event is wanted, in order."""
    try:
        verdicts = connection.from_arrow(table).project(f"coalesce(({where})::BOOLEAN, false) AS wanted")
        return verdicts.to_arrow_table()["wanted"].combine_chunks()
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip().partition("\n")[0],
            where=f"--where {where}",
            fix="Write SQL over columns of events.",
        ) from error
