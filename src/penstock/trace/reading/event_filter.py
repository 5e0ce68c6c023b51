"""Filters events by an SQL expression while they are read, so that the others are never kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final

import duckdb
import pyarrow as pa

from penstock.errors import UsageError
from penstock.trace.event_schema import SCHEMA, FileAccount
from penstock.trace.needed_columns import find_needed_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Events for which the SQL expression `where` holds; all if it is empty."""

    where: str = ""

    def __post_init__(self) -> None:
        """Refuse what DuckDB cannot apply to events, before anything is read."""
        if self.where:
            _examine(self.where)

    def columns(self) -> frozenset[str]:
        """The columns that the expression reads."""
        return find_needed_columns(f"SELECT 1 FROM events WHERE {self.where}") if self.where else frozenset()

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
def _examine(where: str) -> None:
    """UsageError for an expression that DuckDB cannot apply to events."""
    with duckdb.connect() as connection:
        _mask(connection, SCHEMA.empty_table(), where)


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
