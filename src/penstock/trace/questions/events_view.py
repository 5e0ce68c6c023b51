"""The view that questions query: events with tier, file class and phase; unions of intervals; users' SQL.

    relation + dimensions -> EventsView -> question -> Answer

Three measures of time always stand side by side, because each alone misleads: the sum of durations counts
parallel threads many times, the longest thread forgets the others, the union does not tell how many ran at
once. Unions are exact, in whole microseconds, and never larger than sums.

DuckDB reads ten million events in a second; its window functions would take ten. So numpy measures unions in
the order of time, a batch at a time: an event adds its part behind the furthest end so far.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np
import numpy.typing as npt

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


_BATCH_ROWS: Final = 1 << 19
_NEVER: Final = np.iinfo(np.int64).min // 2

Numbers = npt.NDArray[np.int64]
Key = tuple[Any, ...]
Totals = defaultdict[Any, list[int]]


def measure_groups(
    events: EventsView, by: Sequence[str], *, where: str, extra: Sequence[str] = ()
) -> list[Key]:
    """Rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`."""
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join([*by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    unions = union_times(events, by, where)
    rows = []
    for row in events.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}"):
        key, (num_events, sum_us, *more) = row[: len(by)], row[len(by) :]
        (union_us,) = unions.get(key, (0,))
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows


def union_times(events: EventsView, by: Sequence[str], *sets: str) -> dict[Key, tuple[int, ...]]:
    """The time in which an event of each set was under way, by the values of `by`; sets are SQL conditions.

    Groups none of whose events takes any time are left out.
    """

    def add(totals: Totals, keys: list[Key], place: int, groups: Numbers, lengths: Numbers) -> None:
        firsts = np.flatnonzero(np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1])))
        sums = np.add.reduceat(lengths, firsts).tolist()
        for group, total_us in zip(groups[firsts].tolist(), sums, strict=True):
            totals[keys[group]][place] += total_us

    totals = _add_up(
        events,
        by,
        sets,
        lambda total, keys, place, at, begins, ends: add(total, keys, place, at, ends - begins),
    )
    times = {key: tuple(total) for key, total in totals.items()}
    # Without keys all events are one group, even if there are none.
    return times if by else {(): (0,) * len(sets), **times}


def union_in_buckets(
    events: EventsView, by: Sequence[str], *sets: str, width_us: int, origin_of: Callable[[Key], int]
) -> dict[tuple[Key, int], list[int]]:
    """The same in each bucket of time: by key and number of the bucket, counted from the key's origin."""

    def add(  # noqa: PLR0917 - the arrays of a batch
        totals: Totals, keys: list[Key], place: int, groups: Numbers, begins: Numbers, ends: Numbers
    ) -> None:
        origins = np.array([origin_of(key) for key in keys], dtype=np.int64)[groups]
        begins, ends = begins - origins, ends - origins
        while len(groups):
            buckets = begins // width_us
            edges = np.minimum(ends, (buckets + 1) * width_us)
            changes = np.flatnonzero((np.diff(groups) != 0) | (np.diff(buckets) != 0)) + 1
            firsts = np.concatenate((np.zeros(1, np.int64), changes))
            sums = np.add.reduceat(edges - begins, firsts)
            found = zip(groups[firsts].tolist(), buckets[firsts].tolist(), sums.tolist(), strict=True)
            for group, bucket, total_us in found:
                totals[keys[group], bucket][place] += total_us
            # Pieces that reach into the next bucket go on there.
            is_longer = ends > edges
            groups, begins, ends = groups[is_longer], edges[is_longer], ends[is_longer]

    return _add_up(events, by, sets, add)


def _add_up(events: EventsView, by: Sequence[str], sets: Sequence[str], add: Callable[..., None]) -> Totals:
    """The totals that `add` makes of the pieces of time whose lengths add up to unions.

    The pieces of a group and set do not overlap; `add` gets the keys, the place of the set, and the group (a
    place among the keys), begin and end of each piece. Pieces of a group stand together, in order.
    """
    is_member = " OR ".join(f"({one})" for one in sets)
    members = " + ".join(f"(coalesce({one}, false)::UTINYINT << {place})" for place, one in enumerate(sets))
    where = f"WHERE dur_us > 0 AND ({is_member})"
    numbered, keys, number_of = "0", [()], {0: 0}
    if by:
        names = ", ".join(by)
        # A hash stands for the values of a group: a join with a table of groups would lose the order.
        numbered = f"hash({names})"
        found = events.ask(f"SELECT {numbered}, {names} FROM {{events}} {where} GROUP BY {names}")
        keys = [row[1:] for row in found]
        number_of = {row[0]: number for number, row in enumerate(found)}
        assert len(number_of) == len(keys), "two groups have the same hash of 64 bits"
    query = f"SELECT {numbered} AS numbered, {members} AS members, ts_us, end_us FROM {{events}} {where}"
    # A table has its events in the order of time. Several tables may not, and conditions that DuckDB makes a
    # join of lose the order; then events are sorted, which takes longer than all the rest.
    for order in ("", " ORDER BY ts_us"):
        totals: Totals = defaultdict(lambda: [0] * len(sets))
        reach = np.full((len(sets), len(keys)), _NEVER)
        last_us = _NEVER
        for batch in events.read(query + order, _BATCH_ROWS):
            members_of, starts, ends = (batch.column(place).to_numpy() for place in (1, 2, 3))
            if len(starts) and (starts[0] < last_us or np.any(starts[1:] < starts[:-1])):
                break
            last_us = starts[-1] if len(starts) else last_us
            codes = np.zeros(len(starts), dtype=np.int64)
            if by:
                encoded = batch.column(0).dictionary_encode()
                numbers = [number_of[value] for value in encoded.dictionary.to_pylist()]
                codes = np.array(numbers, dtype=np.int64)[encoded.indices.to_numpy()]
                # numpy sorts 16-bit numbers by radix, several times faster than wider ones.
                sortable = codes.astype(np.int16 if len(keys) < 1 << 15 else np.int32)
                by_group = np.argsort(sortable, kind="stable")
                codes, members_of, starts, ends = (one[by_group] for one in (codes, members_of, starts, ends))
            for place in range(len(sets)):
                chosen = (members_of & (1 << place)) != 0
                if chosen.any():
                    groups, begins, until = codes[chosen], starts[chosen], ends[chosen]
                    begins = _cut_covered(groups, begins, until, reach[place])
                    is_left = until > begins
                    if is_left.any():
                        add(totals, keys, place, groups[is_left], begins[is_left], until[is_left])
        else:
            return totals
    raise AssertionError("sorted events are out of order")


def _cut_covered(groups: Numbers, starts: Numbers, ends: Numbers, reach: Numbers) -> Numbers:
    """Where each event begins to add to its group's union; `reach` is moved to the groups' furthest ends.

    For example, of 0-10, 5-12 and 6-8 the first adds from 0 on, the second from 10 on, the third nothing.
    """
    is_first = np.concatenate((np.ones(1, bool), groups[1:] != groups[:-1]))
    firsts = np.flatnonzero(is_first)
    of_firsts = groups[firsts]
    furthest = ends.copy()
    furthest[firsts] = np.maximum(ends[firsts], reach[of_firsts])
    lowest, span = int(furthest.min()), int(furthest.max()) - int(furthest.min()) + 1
    if span * len(firsts) < 1 << 62:
        # Lifted above all groups before it, a group is not reached by their ends: one pass serves all.
        lift = (np.cumsum(is_first) - 1) * span - lowest
        furthest = np.maximum.accumulate(furthest + lift) - lift
    else:
        for begin, end in pairwise([*firsts.tolist(), len(groups)]):
            furthest[begin:end] = np.maximum.accumulate(furthest[begin:end])
    before = np.concatenate((furthest[:1], furthest[:-1]))
    before[firsts] = reach[of_firsts]
    reach[of_firsts] = furthest[np.append(firsts[1:], len(groups)) - 1]
    return np.maximum(starts, before)
