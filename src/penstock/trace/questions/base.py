"""The waist between questions and whoever shows their answers.

    events (a view with tier, file_class and phase) -> question -> Answer -> terminal, CSV, JSON, Markdown

One invariant: an answer holds exact numbers (microseconds, bytes, counts as integers); only rendering rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import UsageError
from penstock.trace.event import COLUMNS

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

    from penstock.trace.lens import Lens, PhaseOf

Value = int | float | str | bool | None

DERIVED: Final = ("tier", "file_class", "phase")
IS_IO: Final = "phase = 'io'"
IS_WRITE: Final = "op IN ('write', 'pwrite', 'writev', 'pwritev', 'fwrite')"
IS_READ: Final = "op IN ('read', 'pread', 'readv', 'preadv', 'fread')"


class Unit(StrEnum):
    """What a column's numbers are, so that each reader gets them in a fitting form."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    GIB = "GiB"
    NUMBER = "number"
    MICROSECONDS = "us"
    RATE = "bytes/s"
    RATIO = "ratio"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an answer; its name carries the unit, as `union_us`. `head` is for people, if other."""

    name: str
    unit: Unit = Unit.TEXT
    head: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A table: `name` in files; `title`, `notes` and what stands for a missing value are for people."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()
    missing: str = "-"

    def records(self) -> list[dict[str, Value]]:
        """One mapping a row."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events that can be asked: a relation of the waist's columns and the derived ones, on a connection."""

    connection: DuckDBPyConnection
    relation: str
    file_class_sql: str = ""

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of `sql`, in which `{events}` stands for the relation."""
        return self.connection.execute(sql.replace("{events}", self.relation)).fetchall()

    def ask_one(self, sql: str) -> tuple[Any, ...]:
        """The only row."""
        (row,) = self.ask(sql)
        return row

    def read(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of `sql` in batches of columns, for answers that do not fit in memory."""
        relation = self.connection.sql(sql.replace("{events}", self.relation))
        yield from relation.to_arrow_reader(batch_rows)

    def only(self, where: str) -> Events:
        """Those of them for which the SQL expression `where` holds."""
        return replace(self, relation=f"(SELECT * FROM {self.relation} WHERE {where})")

    def classified(self) -> Events:
        """The same events, their classes found once a path: regular expressions for each row are slow."""
        if not self.file_class_sql:
            return self
        paths = f"(SELECT DISTINCT path FROM {self.relation})"
        known = f"(SELECT path, {self.file_class_sql} AS file_class FROM {paths})"
        join = f"JOIN {known} known ON e.path IS NOT DISTINCT FROM known.path"
        relation = f"(SELECT e.* REPLACE (known.file_class AS file_class) FROM {self.relation} e {join})"
        return replace(self, relation=relation, file_class_sql="")


def through_lens(connection: DuckDBPyConnection, source: str, lens: Lens) -> Events:
    """The events of `source` with tier, file class and phase as `lens` tells them."""
    columns, judged = lens.columns_sql(), ""
    if lens.phase_of is not None:
        _judge_phases(connection, source, lens.phase_of)
        columns = columns.replace(lens.phase_sql(), f"coalesce(judged, {lens.phase_sql()})")
        judged = " LEFT JOIN penstock_phases USING (name, cat, args)"
    select = f"SELECT {source}.*, {columns} FROM {source}{judged}"
    connection.execute(f"CREATE OR REPLACE TEMP VIEW penstock_events AS {select}")
    return Events(connection=connection, relation="penstock_events", file_class_sql=lens.file_class_sql())


def _judge_phases(connection: DuckDBPyConnection, source: str, phase_of: PhaseOf) -> None:
    """Ask the user's predicate once for each combination that occurs."""
    kinds = connection.execute(f"SELECT DISTINCT name, cat, args FROM {source}").fetchall()
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE penstock_phases"
        " (name VARCHAR, cat VARCHAR, args VARCHAR, judged VARCHAR)"
    )
    judged = [(name, cat, args, phase_of(name, cat, json.loads(args))) for name, cat, args in kinds]
    if judged:
        connection.executemany("INSERT INTO penstock_phases VALUES (?, ?, ?, ?)", judged)


def check_keys(by: Sequence[str], allowed: Sequence[str]) -> Sequence[str]:
    """Columns to group by, or an error that names those there are."""
    for key in by:
        if key not in allowed:
            raise UsageError(f"Cannot ask by {key!r}", fix=f"Ask by one of {', '.join(allowed)}.")
    return by


GROUPINGS: Final = (
    *(
        column.name
        for column in COLUMNS
        if column.name not in ("ts_us", "dur_us", "end_us", "args", "offset")
    ),
    *DERIVED,
)
