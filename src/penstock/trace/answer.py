"""The answer to a question in SQL, as JSON can carry it: integers stay integers, of whatever size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import duckdb

from penstock.errors import UsageError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class SqlAnswer:
    """Columns and rows, in the order of the question."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def document(self) -> Mapping[str, Any]:
        """The answer as JSON."""
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}

    def texts(self) -> list[dict[str, str]]:
        """The answer as rows of a table for people."""
        return [
            {
                column: "-" if value is None else str(value)
                for column, value in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]


def ask(connection: DuckDBPyConnection, query: str) -> SqlAnswer:
    """Ask in SQL; what DuckDB cannot make sense of is wrong usage."""
    try:
        asked = connection.execute(query)
        columns = [column[0] for column in asked.description or ()]
        return SqlAnswer(columns, [[_plain(value) for value in row] for row in asked.fetchall()])
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip(), where="the query", fix="Columns: penstock trace sql --help names them."
        ) from error


def _plain(value: Any) -> Any:
    """A value as JSON has it: whole decimals become integers, what JSON lacks becomes text."""
    match value:
        case None | bool() | int() | str():
            return value
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case list() | tuple():
            return [_plain(each) for each in value]
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case _:
            return str(value)
