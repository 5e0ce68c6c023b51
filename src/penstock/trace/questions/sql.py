"""Users' SQL over traces: one statement that only reads events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.event_schema import SCHEMA, fix_sql

if TYPE_CHECKING:
    from penstock.trace.trace_set import TraceSet


@dataclass(frozen=True, slots=True)
class SqlAnswer:
    """The result of a user's query, as JSON can carry it: integers stay integers, of any size."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def document(self) -> Mapping[str, Any]:
        """Return the result as JSON."""
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}

    def texts(self, most_rows: int) -> list[dict[str, str]]:
        """Return the first rows as text, for a table that people read; equal column names are numbered."""
        heads: list[str] = []
        for column in self.columns:
            names = (column, *(f"{column} ({number})" for number in range(2, len(self.columns) + 1)))
            heads.append(next(name for name in names if name not in heads))
        return [
            {head: "-" if value is None else str(value) for head, value in zip(heads, row, strict=True)}
            for row in self.rows[:most_rows]
        ]


_ALLOWED: Final = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
QUERY_FIX: Final = "Run penstock trace sql --help for the columns."


def check_query(query: str) -> None:
    """Raise `UsageError` unless a query is one statement that only reads `events`. No trace is read."""
    with duckdb.connect(config={"enable_external_access": False, "lock_configuration": True}) as connection:
        require_one_query(connection, query)
        connection.from_arrow(SCHEMA.empty_table()).create("events")
        try:
            connection.execute(query)
        except duckdb.Error as error:
            raise UsageError(str(error).strip(), where="the query", fix=QUERY_FIX) from error


def require_one_query(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise `UsageError` unless `query` is one statement that reads. It is parsed, but not run."""
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip(), where="the query", fix=fix_sql(error, query, QUERY_FIX)
        ) from error
    if len(statements) != 1:
        raise UsageError(
            f"There are {len(statements)} statements", where="the query", fix="Write a single SELECT."
        )
    if statements[0].type not in _ALLOWED:
        kind = statements[0].type.name.lower().replace("_", " ")
        raise UsageError(
            f"A query may only read events; this is a statement of the kind {kind}",
            where="the query",
            fix="Write a SELECT; --json prints its result for files and programs.",
        )


def run_query(traces: TraceSet, query: str) -> SqlAnswer:
    """Run a user's query on `events`.

    The query can read no other files and write nothing. Raises `UsageError` if it fails.
    """
    check_query(query)
    traces.confine()
    return answer_query(traces.connection, query)


def answer_query(connection: duckdb.DuckDBPyConnection, query: str) -> SqlAnswer:
    """Run a query on an existing connection, without checks."""
    try:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or ()]
        return SqlAnswer(columns, [[_plain(value) for value in row] for row in cursor.fetchall()])
    except (duckdb.IOException, duckdb.OutOfMemoryException):
        raise  # not the query's fault
    except duckdb.Error as error:
        raise UsageError(str(error).strip(), where="the query", fix=QUERY_FIX) from error


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: integral decimals as integers, what JSON lacks as strings."""
    match value:
        case None | bool() | int() | str():
            return value
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case _:
            return str(value)
