"""Which columns of events a user's SQL needs, asked of DuckDB's own plan before anything is read."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.event_schema import ALL_COLUMNS, COLUMNS

_ALLOWED: Final = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)


def check_query(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.StatementType:
    """What a query is; UsageError unless it is a single statement that only reads."""
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise UsageError(str(error).strip(), where="the query") from error
    if len(statements) != 1:
        raise UsageError(
            f"There are {len(statements)} statements", where="the query", fix="Write a single SELECT."
        )
    if statements[0].type not in _ALLOWED:
        kind = statements[0].type.name.lower().replace("_", " ")
        raise UsageError(
            f"A query may only read events; this is a statement of the kind {kind}",
            where="the query",
            fix="Write a SELECT; --json prints its answer for files and programs.",
        )
    return statements[0].type


def find_needed_columns(query: str) -> frozenset[str]:
    """The columns of `events` that a query reads; UsageError if it is none or does not fit `events`."""
    columns = ", ".join(f'"{column.name}" {column.type_sql}' for column in COLUMNS)
    with duckdb.connect(config={"enable_external_access": False}) as connection:
        if check_query(connection, query) is duckdb.StatementType.EXPLAIN:
            return ALL_COLUMNS
        connection.execute(f"CREATE TABLE events ({columns}, kind_id INTEGER, path_id INTEGER)")
        # Of an empty table, or by its statistics, DuckDB would plan to read nothing at all; and a scan that
        # filters does not list the columns that it filters by.
        connection.execute("INSERT INTO events (ts_us) VALUES (0)")
        connection.execute(
            "SET disabled_optimizers = 'filter_pushdown,statistics_propagation,empty_result_pullup'"
        )
        try:
            # DuckDB's errors show the line that they are about: on a line of its own, EXPLAIN is not in it.
            plan = connection.execute(f"EXPLAIN (FORMAT json)\n{query}").fetchall()[0][1]
        except duckdb.Error as error:
            raise UsageError(
                _LINE.sub(_number_of_query, str(error).strip()),
                where="the query",
                fix="Run penstock trace sql --help for the columns.",
            ) from error
    scanned = frozenset(_scanned_columns(json.loads(plan)))
    keys = ({"op", "name", "cat"} if "kind_id" in scanned else set()) | (
        {"path"} if "path_id" in scanned else set()
    )
    return (scanned | keys) & ALL_COLUMNS


_LINE: Final = re.compile(r"^LINE (\d+): ", re.MULTILINE)


def _number_of_query(shown: re.Match[str]) -> str:
    """A line's number in the query as the user wrote it, as wide as before: a caret below points into it."""
    return f"LINE {int(shown[1]) - 1}: ".ljust(len(shown[0]))


def _scanned_columns(node: Any) -> Iterator[str]:
    for child in node if isinstance(node, list) else node.get("children", []):
        yield from _scanned_columns(child)
    if isinstance(node, dict) and "SCAN" in node.get("name", ""):
        projections = node.get("extra_info", {}).get("Projections", [])
        yield from [projections] if isinstance(projections, str) else projections
