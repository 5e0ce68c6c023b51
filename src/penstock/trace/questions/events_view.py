"""The view that questions query: events with tier, file class and phase, and users' SQL over it.

relation + dimensions -> EventsView -> question -> Answer
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol

import duckdb

from penstock.errors import UsageError
from penstock.trace.dimensions import OTHER, sql_literal
from penstock.trace.event_cells import are_many_sql, sums_sql
from penstock.trace.event_schema import COLUMNS
from penstock.trace.needed_columns import check_query

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

    from penstock.trace.dimensions import Dimensions, PhaseOf
    from penstock.trace.ordered_events import OrderedEvents
    from penstock.trace.stored_sums import StoredSums
    from penstock.trace.trace_set import TraceSet


DERIVED: Final = ("tier", "file_class", "phase")
IS_IO: Final = "phase = 'io'"
IS_WRITE: Final = "op IN ('write', 'pwrite', 'writev', 'pwritev', 'fwrite')"
IS_READ: Final = "op IN ('read', 'pread', 'readv', 'preadv', 'fread')"


class Relations(Protocol):
    """The relations that hold the same events with more or fewer derived columns.

    `source` has no derived columns; `keys` are the integer columns that others depend on alone.
    """

    @property
    def source(self) -> str:
        """The relation without derived columns."""

    @property
    def keys(self) -> Mapping[str, str]:
        """The integer column that alone decides a column's value, by column."""

    def find(self, sql: str) -> str:
        """The relation for a query: one with the derived columns that its text names."""

    def find_cells(self, columns: frozenset[str], sql: str) -> str | None:
        """Sums of events by these columns at least, with what `sql` names; None if there would be many."""

    def has_cells(self, columns: frozenset[str]) -> bool:
        """Whether there are such sums without a look at the events."""


@dataclass(frozen=True, slots=True)
class OneRelation:
    """A relation that has all columns that anybody will ask for."""

    source: str
    keys: Mapping[str, str] = field(default_factory=dict)

    def find(self, sql: str) -> str:
        """The relation, whatever the query."""
        del sql
        return self.source

    def find_cells(self, columns: frozenset[str], sql: str) -> str | None:
        """None: nobody knows what decides its columns."""
        del columns, sql
        return None

    def has_cells(self, columns: frozenset[str]) -> bool:
        """False, as above."""
        del columns
        return False


_KEYED: Final = {
    **dict.fromkeys(("op", "name", "cat"), "kind_id"),
    **dict.fromkeys(("path", "tier", "file_class"), "path_id"),
}


class DerivedRelations:
    """Tier and file class, worked out once for each path, and phase, once for each kind of event."""

    def __init__(
        self,
        connection: DuckDBPyConnection,
        source: str,
        dimensions: Dimensions,
        stored: StoredSums | None = None,
    ) -> None:
        self._connection = connection
        self.source = source
        self._stored = stored
        self.keys = _KEYED | ({"phase": "kind_id"} if dimensions.phases_depend_on_kind() else {})
        self._dimensions = dimensions
        self._made: set[str] = set()
        self._cells: dict[frozenset[str], str | None] = {}

    def find(self, sql: str) -> str:
        """The source itself, or a view of it with the phase, or with all derived columns."""
        if "file_class" in sql or _names_all_columns(sql) or ("tier" in sql and self._dimensions.tiers):
            return self._make("penstock_events", self._join_paths)
        if "phase" in sql:
            return self._make("penstock_phased", self._join_phases)
        return self._make("penstock_tiered", self._tell_tiers) if "tier" in sql else self.source

    def find_cells(self, columns: frozenset[str], sql: str) -> str | None:
        """Sums by these columns, or by more, which are made once; None if there would be many."""
        keys = self._find_made(columns) or columns
        if keys not in self._cells:
            self._cells[keys] = self._add_up(sorted(keys))
        table = self._cells[keys]
        return None if table is None else self._make(*self._join_cells(table, keys, sql))

    def has_cells(self, columns: frozenset[str]) -> bool:
        """Whether there are sums by these columns, or by more."""
        return self._find_made(columns) is not None

    def _find_made(self, columns: frozenset[str]) -> frozenset[str] | None:
        stored = self._stored and self._stored.find(columns)
        if self._stored and stored:
            name, keys = stored
            self._cells[keys] = self._stored.relation(name)
        made = [keys for keys, table in self._cells.items() if table is not None and columns <= keys]
        return min(made, key=len, default=None)

    def _add_up(self, columns: Sequence[str]) -> str | None:
        if columns and self._connection.execute(are_many_sql(self.source, columns)).fetchall()[0][0]:
            return None
        table = f"penstock_sums_{len(self._cells)}"
        self._connection.execute(f"CREATE OR REPLACE TEMP TABLE {table} AS {sums_sql(self.source, columns)}")
        return table

    def _join_cells(self, table: str, keys: frozenset[str], sql: str) -> tuple[str, Callable[[], str]]:
        """The name of a view of sums with what follows from their columns, and its definition."""
        name, selected, joins = f"{table}_view", ["*"], ""
        if "kind_id" in keys:
            joins = f" JOIN {self._store_kinds()} USING (kind_id)"
        if "path_id" in keys and _PATH_TEXTS[bool(self._dimensions.tiers)].search(sql):
            name, joins = f"{name}_of_paths", f"{joins} LEFT JOIN {self._store_paths()} USING (path_id)"
        elif "path_id" in keys and not self._dimensions.tiers:
            selected.append(f"{_TIER_OF_PATH} AS tier")
        return name, lambda: f"SELECT {', '.join(selected)} FROM {table}{joins}"

    def _make(self, view: str, define: Callable[[], str], kind: str = "VIEW") -> str:
        if view not in self._made:
            self._connection.execute(f"CREATE OR REPLACE TEMP {kind} {view} AS {define()}")
            self._made.add(view)
        return view

    def _store_paths(self) -> str:
        tier, file_class = self._dimensions.tier_sql(), self._dimensions.file_class_sql()
        paths = (
            (self._stored and self._stored.find_texts("paths"))
            or f"""(
            SELECT path_id, any_value(path) AS path FROM {self.source}
            WHERE path_id IS NOT NULL GROUP BY path_id)"""
        )
        define = f"SELECT path_id, path, {tier} AS tier, {file_class} AS file_class FROM {paths}"
        return self._make("penstock_paths", lambda: define, "TABLE")

    def _store_kinds(self) -> str:
        phase = f", {self._dimensions.phase_sql()} AS phase" if "phase" in self.keys else ""
        kinds = (
            (self._stored and self._stored.find_texts("kinds"))
            or f"""(
            SELECT kind_id, any_value(op) AS op, any_value(name) AS name, any_value(cat) AS cat
            FROM {self.source} GROUP BY kind_id)"""
        )
        define = f"SELECT *{phase} FROM {kinds}"
        return self._make("penstock_kinds", lambda: define, "TABLE")

    def _join_paths(self) -> str:
        phased = self._make("penstock_phased", self._join_phases)
        derived = "tier, file_class" if self._dimensions.tiers else "file_class"
        paths = f"(SELECT path_id, {derived} FROM {self._store_paths()})"
        return f"SELECT {phased}.*, {derived} FROM {phased} LEFT JOIN {paths} USING (path_id)"

    def _tell_tiers(self) -> str:
        return f"SELECT *, {_TIER_OF_PATH} AS tier FROM {self.source}"

    def _join_phases(self) -> str:
        source, phase = self.source, self._dimensions.phase_sql()
        tier = "" if self._dimensions.tiers else f", {_TIER_OF_PATH} AS tier"
        if self._dimensions.phase_of is not None:
            _store_phases(self._connection, source, self._dimensions.phase_of)
            return (
                f"SELECT {source}.*{tier}, coalesce(own_phase, {phase}) AS phase"
                f" FROM {source} LEFT JOIN penstock_phases USING (name, cat, args)"
            )
        if "phase" not in self.keys:
            return f"SELECT *{tier}, {phase} AS phase FROM {source}"
        kinds = f"(SELECT kind_id, phase FROM {self._store_kinds()})"
        return f"SELECT {source}.*{tier}, phase FROM {source} JOIN {kinds} USING (kind_id)"


_COUNT_ALL: Final = re.compile(r"\bcount\s*\(\s*\*", re.IGNORECASE)
_ALL_COLUMNS: Final = re.compile(r"(?:\b(?:select|distinct|all)\s|[,.(]|^)\s*\*", re.IGNORECASE)
"""A star that stands for columns: no operand stands before it."""
_PATH_TEXTS: Final = {
    False: re.compile(r"\b(?:path|file_class)\b"),
    True: re.compile(r"\b(?:path|file_class|tier)\b"),
}
"""Names of what follows from a path, without and with prefixes of tiers."""
_TIER_OF_PATH: Final = f"CASE WHEN path_id IS NOT NULL THEN {sql_literal(OTHER)} END"
"""The tier where there are no prefixes of tiers."""


def _names_all_columns(sql: str) -> bool:
    return _ALL_COLUMNS.search(_COUNT_ALL.sub("", sql)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsView:
    """Events with the columns of the event schema, their keys and the derived columns, on a connection."""

    connection: DuckDBPyConnection
    relations: Relations
    conditions: tuple[str, ...] = ()
    is_ordered: bool = False
    """Whether a scan gives the events in the order of time."""
    ordered: OrderedEvents | None = None
    """The same events for threads, if they can be read past DuckDB."""

    @property
    def relation(self) -> str:
        """A relation with all columns."""
        return self._find("*")

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
        """The query with the narrowest relation that it needs in place of `{events}`."""
        return sql.replace("{events}", self._find(sql))

    def of_relation(self, source: str) -> EventsView:
        """A relation that has all columns that will be asked of it, on the same connection."""
        return EventsView(connection=self.connection, relations=OneRelation(source))

    def only(self, where: str) -> EventsView:
        """The events for which the SQL condition `where` holds."""
        return replace(self, conditions=(*self.conditions, where))

    def _find(self, sql: str) -> str:
        relation = self.relations.find(" ".join((sql, *self.conditions)))
        if not self.conditions:
            return relation
        conditions = " AND ".join(f"({where})" for where in self.conditions)
        return f"(SELECT * FROM {relation} WHERE {conditions})"


def view_traces(traces: TraceSet, dimensions: Dimensions, relation: str = "") -> EventsView:
    """The events of traces, or a copy of them that `relation` names."""
    source = relation or traces.relation
    return EventsView(
        connection=traces.connection,
        relations=DerivedRelations(traces.connection, source, dimensions, traces.sums),
        is_ordered=traces.is_ordered,
        ordered=traces.ordered,
    )


def view_events(
    connection: DuckDBPyConnection, source: str, dimensions: Dimensions, *, is_ordered: bool = False
) -> EventsView:
    """Events of `source` with tier, file class and phase as `dimensions` define them."""
    relations = DerivedRelations(connection, source, dimensions)
    return EventsView(connection=connection, relations=relations, is_ordered=is_ordered)


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
    """Columns to group by; UsageError for one that does not exist.

    The same pid on two hosts is two processes, so `pid` brings `host` with it.
    """
    for key in by:
        if key not in allowed:
            raise UsageError(f"Cannot group by {key!r}", fix=f"Choose from: {', '.join(allowed)}.")
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


def run_query(traces: TraceSet, query: str) -> SqlAnswer:
    """Run a user's query on `events`; it reads no other files and writes nothing. UsageError if it fails."""
    connection = traces.connection
    check_query(connection, query)
    if traces.files:
        connection.execute("SET allowed_paths = ?", [[str(path) for path in traces.files]])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return answer_query(connection, query)


def answer_query(connection: DuckDBPyConnection, query: str) -> SqlAnswer:
    """Run a query on a connection as it is."""
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
