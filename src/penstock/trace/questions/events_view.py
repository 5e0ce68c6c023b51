"""The view that questions query: events with tier, file class and phase, and users' SQL over events.

relation + dimensions -> EventsView -> question -> Answer
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.event_schema import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.dimensions import Dimensions
    from penstock.trace.trace_set import TraceSet


DERIVED: Final = ("tier", "file_class", "phase")
IS_IO: Final = "phase = 'io'"
IS_WRITE: Final = "op IN ('write', 'pwrite', 'writev', 'pwritev', 'fwrite')"
IS_READ: Final = "op IN ('read', 'pread', 'readv', 'preadv', 'fread')"


@dataclass(frozen=True, slots=True)
class EventsView:
    """Events with the columns of the event schema and the derived columns, on a connection."""

    connection: duckdb.DuckDBPyConnection
    relation: str

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query in which `{events}` stands for the relation."""
        return self.connection.execute(self.fill_in(sql)).fetchall()

    def ask_one(self, sql: str) -> tuple[Any, ...]:
        """The only row of a query."""
        (row,) = self.ask(sql)
        return row

    def read(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a query in Arrow batches, for answers that do not fit in memory."""
        yield from self.connection.sql(self.fill_in(sql)).to_arrow_reader(batch_rows)

    def fill_in(self, sql: str) -> str:
        """The query with the relation in place of `{events}`."""
        return sql.replace("{events}", self.relation)


def view_events(
    connection: duckdb.DuckDBPyConnection,
    source: str,
    dimensions: Dimensions,
    *,
    relation: str = "penstock_events",
    is_stored: bool = False,
) -> EventsView:
    """The events of `source` with tier, file class and phase as `dimensions` define them.

    Stored events have these columns worked out once, in memory; otherwise each query works out what it needs.
    """
    phase, join = dimensions.phase_sql(), ""
    if dimensions.phase_of is not None:
        # The user's function is called once for each combination that occurs.
        connection.execute(
            "CREATE OR REPLACE TEMP TABLE penstock_phases"
            " (name VARCHAR, cat VARCHAR, args VARCHAR, own_phase VARCHAR)"
        )
        kinds = connection.execute(f"SELECT DISTINCT name, cat, args FROM {source}").fetchall()
        if kinds:
            connection.executemany(
                "INSERT INTO penstock_phases VALUES (?, ?, ?, ?)",
                [(*kind, dimensions.phase_of(kind[0], kind[1], json.loads(kind[2]))) for kind in kinds],
            )
        phase, join = f"coalesce(own_phase, {phase})", " LEFT JOIN penstock_phases USING (name, cat, args)"
    columns = ", ".join(f'{source}."{column.name}"' for column in COLUMNS)
    connection.execute(
        f"CREATE OR REPLACE TEMP {'TABLE' if is_stored else 'VIEW'} {relation} AS"
        f" SELECT {columns}, {dimensions.tier_sql()} AS tier, {dimensions.file_class_sql()} AS file_class,"
        f" {phase} AS phase FROM {source}{join}"
    )
    return EventsView(connection, relation)


def check_keys(by: Sequence[str]) -> Sequence[str]:
    """Columns to group by; UsageError for one that does not exist.

    The same pid on two hosts is two processes, so `pid` brings `host` with it.
    """
    for key in by:
        if key not in GROUPINGS:
            raise UsageError(f"Cannot group by {key!r}", fix=f"Choose from: {', '.join(GROUPINGS)}.")
    if "pid" in by and "host" not in by:
        place = list(by).index("pid")
        return [*by[:place], "host", *by[place:]]
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
        """The result as rows of a table for people; columns of the same name are numbered."""
        heads: list[str] = []
        for column in self.columns:
            names = (column, *(f"{column} ({number})" for number in range(2, len(self.columns) + 1)))
            heads.append(next(name for name in names if name not in heads))
        return [
            {head: "-" if value is None else str(value) for head, value in zip(heads, row, strict=True)}
            for row in self.rows
        ]


_ALLOWED: Final = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_FIX: Final = "Run penstock trace sql --help for the columns."


def check_query(query: str) -> None:
    """Raise UsageError unless a query is one statement that only reads `events`; no trace is read."""
    columns = ", ".join(f'"{column.name}" {column.type_sql}' for column in COLUMNS)
    with duckdb.connect(config={"enable_external_access": False}) as connection:
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
        connection.execute(f"CREATE TABLE events ({columns})")
        try:
            connection.execute(query)
        except duckdb.Error as error:
            raise UsageError(str(error).strip(), where="the query", fix=_FIX) from error


def run_query(traces: TraceSet, query: str) -> SqlAnswer:
    """Run a user's query on `events`; it reads no other files and writes nothing. UsageError if it fails."""
    check_query(query)
    connection = traces.connection
    if traces.files:
        connection.execute("SET allowed_paths = ?", [[str(path) for path in traces.files]])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return answer_query(connection, query)


def answer_query(connection: duckdb.DuckDBPyConnection, query: str) -> SqlAnswer:
    """Run a query on a connection as it is."""
    try:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or ()]
        return SqlAnswer(columns, [[_plain(value) for value in row] for row in cursor.fetchall()])
    except duckdb.Error as error:
        raise UsageError(str(error).strip(), where="the query", fix=_FIX) from error


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
