"""The view that questions query: events with tier, file class and phase, and users' SQL over it.

relation + dimensions -> EventsView -> question -> Answer
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.event_schema import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

    from penstock.trace.dimensions import Dimensions, PhaseOf


DERIVED: Final = ("tier", "file_class", "phase")
IS_IO: Final = "phase = 'io'"
IS_WRITE: Final = "op IN ('write', 'pwrite', 'writev', 'pwritev', 'fwrite')"
IS_READ: Final = "op IN ('read', 'pread', 'readv', 'preadv', 'fread')"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsView:
    """A relation with the columns of the event schema and the derived ones, on a connection."""

    connection: DuckDBPyConnection
    relation: str
    file_class_sql: str = ""

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query in which `{events}` stands for the relation."""
        return self.connection.execute(sql.replace("{events}", self.relation)).fetchall()

    def ask_one(self, sql: str) -> tuple[Any, ...]:
        """The only row of a query."""
        (row,) = self.ask(sql)
        return row

    def read(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a query in Arrow batches, for answers that do not fit in memory."""
        relation = self.connection.sql(sql.replace("{events}", self.relation))
        yield from relation.to_arrow_reader(batch_rows)

    def only(self, where: str) -> EventsView:
        """The events for which the SQL condition `where` holds."""
        return replace(self, relation=f"(SELECT * FROM {self.relation} WHERE {where})")

    def classified(self) -> EventsView:
        """The same events, classified once per path, because a regular expression per row is slow."""
        if not self.file_class_sql:
            return self
        paths = f"(SELECT DISTINCT path FROM {self.relation})"
        known = f"(SELECT path, {self.file_class_sql} AS file_class FROM {paths})"
        join = f"JOIN {known} known ON e.path IS NOT DISTINCT FROM known.path"
        relation = f"(SELECT e.* REPLACE (known.file_class AS file_class) FROM {self.relation} e {join})"
        return replace(self, relation=relation, file_class_sql="")


def view_events(connection: DuckDBPyConnection, source: str, dimensions: Dimensions) -> EventsView:
    """Create the view of `source` with tier, file class and phase as `dimensions` define them."""
    columns, phases = dimensions.columns_sql(), ""
    if dimensions.phase_of is not None:
        _store_phases(connection, source, dimensions.phase_of)
        columns = columns.replace(dimensions.phase_sql(), f"coalesce(own_phase, {dimensions.phase_sql()})")
        phases = " LEFT JOIN penstock_phases USING (name, cat, args)"
    select = f"SELECT {source}.*, {columns} FROM {source}{phases}"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW penstock_events AS {select}")
    return EventsView(
        connection=connection, relation="penstock_events", file_class_sql=dimensions.file_class_sql()
    )


def _store_phases(connection: DuckDBPyConnection, source: str, phase_of: PhaseOf) -> None:
    """Call the user's function once for each combination that occurs, and store its phases."""
    kinds = connection.execute(f"SELECT DISTINCT name, cat, args FROM {source}").fetchall()
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE penstock_phases"
        " (name VARCHAR, cat VARCHAR, args VARCHAR, own_phase VARCHAR)"
    )
    phases = [(name, cat, args, phase_of(name, cat, json.loads(args))) for name, cat, args in kinds]
    if phases:
        connection.executemany("INSERT INTO penstock_phases VALUES (?, ?, ?, ?)", phases)


def check_keys(by: Sequence[str], allowed: Sequence[str]) -> Sequence[str]:
    """Columns to group by; UsageError for one that does not exist."""
    for key in by:
        if key not in allowed:
            raise UsageError(f"Cannot group by {key!r}", fix=f"Choose from: {', '.join(allowed)}.")
    return by


GROUPINGS: Final = (
    *(
        column.name
        for column in COLUMNS
        if column.name not in ("ts_us", "dur_us", "end_us", "args", "offset")
    ),
    *DERIVED,
)


@dataclass(frozen=True, slots=True)
class SqlAnswer:
    """The result of a user's query, as JSON can carry it: integers stay integers, of any size."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def document(self) -> Mapping[str, Any]:
        """The result as JSON."""
        return {"columns": list(self.columns), "rows": [list(row) for row in self.rows]}

    def texts(self) -> list[dict[str, str]]:
        """The result as rows of a table for people."""
        return [
            {
                column: "-" if value is None else str(value)
                for column, value in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]


def run_query(connection: DuckDBPyConnection, query: str) -> SqlAnswer:
    """Run a user's query; UsageError for one that DuckDB cannot run."""
    try:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or ()]
        return SqlAnswer(columns, [[_plain(value) for value in row] for row in cursor.fetchall()])
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip(), where="the query", fix="Run penstock trace sql --help for the columns."
        ) from error


def _plain(value: Any) -> Any:
    """A value as JSON has it: whole decimals become integers, what JSON cannot express becomes text."""
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
