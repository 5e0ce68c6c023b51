"""Which events are wanted, and what the bytes of their lines must hold: most others are never parsed.

Place in the flow: from the words of a user to the search in pages and the filter of batches. Invariant:
needles are a necessary condition only; the expression itself is always applied to the events that are left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

import duckdb
import pyarrow as pa

from penstock.errors import UsageError
from penstock.trace.event import SCHEMA, FileAccount
from penstock.trace.reading.needles import NO_NEEDLES, Needles, derive


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Events for which the SQL expression `where` holds; all if it is empty."""

    where: str = ""

    def __post_init__(self) -> None:
        """Refuse what DuckDB cannot apply to events, before anything is read."""
        self.needles()

    def needles(self) -> Needles:
        """What the bytes of a wanted event's line hold."""
        return _examined(self.where) if self.where else NO_NEEDLES

    @contextmanager
    def judge(self) -> Iterator[Judge]:
        """Who applies the expression. One serves many files; to begin costs as much as 100,000 lines."""
        if not self.where:
            yield Judge("", None)
            return
        with duckdb.connect(config={"threads": 1}) as connection:
            yield Judge(self.where, connection)


@dataclass(frozen=True, slots=True)
class Judge:
    """Applies an expression to batches of events; safe for threads."""

    where: str
    connection: duckdb.DuckDBPyConnection | None

    def filter(self, batches: Iterator[pa.RecordBatch], account: FileAccount) -> Iterator[pa.RecordBatch]:
        """The wanted events of batches; the others are counted as unwanted."""
        if self.connection is None:
            yield from batches
            return
        with self.connection.cursor() as cursor:
            for batch in batches:
                wanted = batch.filter(_mask(cursor, pa.Table.from_batches([batch]), self.where))
                account.unwanted += batch.num_rows - wanted.num_rows
                yield wanted


EVERYTHING: Final = Selection()
"""All events."""


@cache
def _examined(where: str) -> Needles:
    """Needles of an expression that DuckDB can apply; asked once for all files."""
    with duckdb.connect() as connection:
        _mask(connection, SCHEMA.empty_table(), where)
        query = f"SELECT * FROM events WHERE {where}"
        told = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()[0][0]
    statements = json.loads(told).get("statements") or [{}]
    return derive(statements[0].get("node", {}).get("where_clause") or {})


def _mask(connection: duckdb.DuckDBPyConnection, table: pa.Table, where: str) -> pa.Array:
    """For each event whether it is wanted, in their order."""
    try:
        judged = connection.from_arrow(table).project(f"coalesce(({where})::BOOLEAN, false) AS wanted")
        return judged.to_arrow_table()["wanted"].combine_chunks()
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip().partition("\n")[0],
            where=f"--where {where}",
            fix="Write SQL over columns of events.",
        ) from error
