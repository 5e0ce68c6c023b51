"""Which events are wanted, and what the bytes of their lines must hold: most others are never parsed.

Place in the flow: from the words of a user to the search in pages and the filter of batches. Invariant:
needles are a necessary condition only; the expression itself is always applied to the events that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa

from penstock.errors import UsageError
from penstock.trace.event import SCHEMA, FileAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Events for which the SQL expression `where` holds; all if it is empty."""

    where: str = ""

    def __post_init__(self) -> None:
        """Refuse what DuckDB cannot apply to events, before anything is read."""
        if self.where:
            with duckdb.connect() as connection:
                _filtered(connection, SCHEMA.empty_table(), self.where)

    def filter(self, batches: Iterator[pa.RecordBatch], account: FileAccount) -> Iterator[pa.RecordBatch]:
        """The wanted events of batches; the others are counted as unwanted."""
        if not self.where:
            yield from batches
            return
        with duckdb.connect(config={"threads": 1}) as connection:
            for batch in batches:
                wanted = _filtered(connection, pa.Table.from_batches([batch]), self.where)
                account.unwanted += batch.num_rows - wanted.num_rows
                yield from wanted.to_batches()


EVERYTHING: Final = Selection()
"""All events."""


def _filtered(connection: duckdb.DuckDBPyConnection, table: pa.Table, where: str) -> pa.Table:
    try:
        return connection.from_arrow(table).filter(where).to_arrow_table()
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip().partition("\n")[0],
            where=f"--where {where}",
            fix="Write SQL over columns of events.",
        ) from error
