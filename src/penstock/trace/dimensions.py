"""Dimensions of events, as derived columns in SQL: tiers of storage, classes of files, phases.

    relation of events + `Dimensions` -> `EventsView`, which questions query

Invariant: text from users enters SQL only through `sql_literal`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.event_schema import SCHEMA, SUM, open_database

if TYPE_CHECKING:
    import pyarrow as pa

PhaseOf = Callable[[str, str, Mapping[str, Any]], str | None]
"""Gives the phase of an event by its name, cat and args; None leaves the phase to the rules."""

OTHER: Final = "other"
"""The tier of files below none of the prefixes, and the phase of events that match no rule."""


PhaseRule = tuple[str, tuple[str, ...]]
"""A phase, and the conditions (`name~text`, `cat=POSIX|STDIO`, `args.key=value`) that all its events meet."""

DEFAULT_PHASES: Final[tuple[PhaseRule, ...]] = (
    ("compute", ("name~compute",)),
    ("compute", ("cat=compute",)),
    ("wait", ("name~enumerate(DataLoader)#",)),
    ("loop", ("name~ProfilerStep#",)),
    ("wait", ("cat=wait",)),
    ("barrier", ("cat=barrier",)),
    ("stall", ("cat=stall",)),
    ("loop", ("cat=step|epoch|run",)),
    ("app_io", ("cat~reader|checkpoint",)),
    ("process", ("cat=POSIX", "op=fork|vfork|clone|clone3|wait|waitpid|wait4|waitid|execve|exit|kill")),
    ("io", ("cat=POSIX|STDIO|OBJECT",)),
    ("compute", ("cat=kernel|cpu_op",)),
    ("device_copy", ("cat=gpu_memcpy|gpu_memset",)),
)
"""The application's own spans of I/O contain the calls that they make, so the two are never added.

Calls that create, await and end a `process` are not I/O, although tracers list them as such. `wait` (for
data), `barrier` (for other ranks) and `stall` (for a checkpoint) are waiting, which is not I/O, although I/O
may be its cause; a `loop` contains all of them. In traces of PyTorch's profiler, device kernels and operators
are computation, and two annotations are recognized: a DataLoader's wait, and a step. Other annotations have
no phase, because they may contain anything; copies to and from a device are neither computation nor storage.
"""


NO_IO: Final = "phase IN ('compute', 'wait', 'barrier', 'stall', 'loop', 'process')"
"""An SQL condition for the default phases that are not I/O, whatever `other` may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Tiers by path prefix (the longest wins), file classes by regular expression on the base name, phases.

    The class of a file that matches none is its base name without digits and dashes. Rules of phases are
    tried in order.
    """

    tiers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    host: str = ""
    """The host whose mount points the tiers are; they say nothing about files on other hosts."""
    file_classes: Mapping[str, str] = field(default_factory=dict)
    phases: Sequence[PhaseRule] = DEFAULT_PHASES
    phase_of: PhaseOf | None = None

    def tier_sql(self) -> str:
        """Return SQL for the tier, which is NULL for events without a path."""
        prefixes = sorted(
            ((prefix.rstrip("/"), name) for name, some in self.tiers.items() for prefix in some),
            key=lambda pair: -len(pair[0]),
        )
        cases = "".join(
            f" WHEN path = {sql_literal(prefix or '/')} OR starts_with(path, {sql_literal(prefix + '/')})"
            f" THEN {sql_literal(name)}"
            for prefix, name in prefixes
        )
        if self.host:
            # Darshan's sums have no host, and are mostly read on another host.
            is_foreign = f"host <> {sql_literal(self.host)} OR (host IS NULL AND starts_with(args, '{SUM}'))"
            cases = f" WHEN {is_foreign} THEN {sql_literal(OTHER)}{cases}"
        return f"CASE WHEN path IS NULL THEN NULL{cases} ELSE {sql_literal(OTHER)} END"

    def file_class_sql(self) -> str:
        """Return SQL for the file class, which is NULL for events without a path."""
        base = "parse_filename(path, false, 'forward_slash')"
        cases = "".join(
            f" WHEN regexp_matches({base}, {sql_literal(pattern)}) THEN {sql_literal(name)}"
            for name, pattern in self.file_classes.items()
        )
        return f"CASE WHEN path IS NULL THEN NULL{cases} ELSE translate({base}, '0123456789-', '') END"

    def phase_sql(self) -> str:
        """Return SQL for the phase, which is never NULL."""
        cases = "".join(
            f" WHEN {' AND '.join(map(_condition_sql, conditions))} THEN {sql_literal(phase)}"
            for phase, conditions in self.phases
        )
        return f"CASE{cases} ELSE {sql_literal(OTHER)} END" if cases else sql_literal(OTHER)


def parse_phase(text: str) -> PhaseRule:
    """Parse a phase rule from the command line: `flush=name~flush,cat=POSIX`."""
    phase, equals, rest = text.partition("=")
    phase, conditions = phase.strip(), tuple(part.strip() for part in rest.split(",") if part.strip())
    if not equals or not phase or not conditions:
        raise UsageError(f"{text!r} is not a phase rule", fix="Example: --phase flush=name~flush,cat=POSIX.")
    for condition in conditions:
        _condition_sql(condition)
    return phase, conditions


def parse_tier(text: str) -> tuple[str, str]:
    """Parse a tier from the command line: `ssd=/l/ssd`."""
    name, equals, prefix = text.partition("=")
    if not equals or not name or not prefix.startswith("/"):
        raise UsageError(f"{text!r} is not a tier", fix="Example: --tier ssd=/l/ssd.")
    return name, prefix


def parse_mounts(mounts: str) -> dict[str, list[str]]:
    """Make each mount point of /proc/mounts a tier, except the kernel's virtual file systems."""
    virtual = {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "mqueue", "debugfs", "tracefs", "securityfs"}
    points = (line.split()[1:3] for line in mounts.splitlines() if line.count(" ") >= 2)
    return {point: [point] for point, kind in points if kind not in virtual}


def check_pattern(pattern: str) -> str:
    """Return a user's regular expression. Raises `UsageError` if DuckDB, which applies it, cannot."""
    try:
        open_database().cursor().execute("SELECT regexp_matches('', $1)", [pattern])
    except duckdb.Error as error:
        raise UsageError(f"{pattern!r:.200} is not a regular expression of RE2: {error!s:.200}") from error
    return pattern


def sql_literal(text: str) -> str:
    """Return a string as an SQL string literal."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def case_sql(column: str, values: Mapping[str, int]) -> str:
    """Return SQL for the number that `values` has for a column's value; NULL if it has none."""
    cases = "".join(f" WHEN {sql_literal(text)} THEN {number}" for text, number in values.items())
    return f"CASE {column}{cases} END" if cases else "NULL"


_CONDITION: Final = re.compile(r"(name|op|cat|path|args(?:\.\w+)+)\s*(!=|=|~)\s*(.+)")


def _condition_sql(condition: str) -> str:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        raise UsageError(
            f"{condition!r} is not a condition of a phase",
            fix="Use name~part, cat=POSIX|STDIO, op!=close or args.key=value.",
        )
    column, comparison, values = match.groups()
    if column.startswith("args."):
        column = f"json_extract_string(args, {sql_literal('$.' + column.removeprefix('args.'))})"
    alternatives = [value.strip() for value in values.split("|")]
    if comparison == "~":
        tests = " OR ".join(f"contains({column}, {sql_literal(value)})" for value in alternatives)
        return f"coalesce({tests}, false)"
    inside = f"coalesce({column} IN ({', '.join(map(sql_literal, alternatives))}), false)"
    return f"NOT {inside}" if comparison == "!=" else inside


IS_IO: Final = "phase = 'io'"
IS_WRITE: Final = "op IN ('write', 'pwrite', 'writev', 'pwritev', 'fwrite')"
IS_READ: Final = "op IN ('read', 'pread', 'readv', 'preadv', 'fread')"
IS_CALL: Final = "NOT contains(args, '\"is_sum\"')"
"""An SQL condition for single calls; Darshan's counters are sums of many calls."""


def argument_sql(name: str) -> str:
    """Return an SQL expression for the argument `name` as an integer; NULL if missing or not an integer."""
    return f"TRY_CAST(json_extract_string(args, '$.{name}') AS BIGINT)"


NUM_CALLS: Final = (
    f"CASE WHEN {IS_CALL} THEN 1 ELSE coalesce({argument_sql('calls')}, 0)"
    f" + coalesce({argument_sql('fsyncs')}, 0) END"
)
"""An SQL expression for the number of calls that an event stands for."""

LEADER: Final = f"""CASE WHEN rank IS NULL AND cat = 'POSIX' AND contains(args, '"parent"')
    THEN coalesce({argument_sql("parent")}, pid) ELSE pid END"""
"""An SQL expression for the process that an event belongs to; for a trainer's workers and forked writers,
this is the trainer.

If ranks are known, workers and writers have their trainer's rank; otherwise, strace shows whose descendants
they are.
"""
RANK_NAME: Final = f"""CASE WHEN rank IS NOT NULL THEN 'rank ' || rank
    ELSE 'process ' || ({LEADER}) || coalesce(' on ' || host, '') END"""
"""An SQL expression for the rank of an event, or else the process to which the event belongs."""

_MODULE_PARTS: Final = ("/site-packages", "/dist-packages", "/__pycache__", "/lib/python", ".so.", "memfd:")
_MODULE_ENDS: Final = (".py", ".pyc", ".so", "pyvenv.cfg")
_SYSTEM: Final = (
    "/proc/", "/sys/", "/etc/", "/usr/lib", "/usr/share/", "/usr/bin/", "/lib/", "/lib64/", "/bin/",
    "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pt", "/dev/nvidia",
    *(f"/dev/shm/{part}" for part in ("torch_", "sem.", "psm_", "pym")),  # noqa: S108 - names of others
)  # fmt: skip


def _is_runtime_sql() -> str:
    tests = [
        *(f"contains(path, {sql_literal(part)})" for part in _MODULE_PARTS),
        *(f"ends_with(path, {sql_literal(end)})" for end in _MODULE_ENDS),
        *(f"starts_with(path, {sql_literal(start)})" for start in _SYSTEM),
        # Descriptors that are not files: socket:[4711], pipe:[3], anon_inode:[eventpoll].
        "(NOT starts_with(path, '/') AND contains(path, ':['))",
    ]
    return f"(phase = 'io' AND coalesce({' OR '.join(tests)}, false))"


IS_RUNTIME: Final = _is_runtime_sql()
"""An SQL condition for I/O that starts a program or connects its processes: modules, sockets, shared memory.
"""


@dataclass(frozen=True, slots=True)
class EventsView:
    """Events with the columns of the event schema and the derived columns, on a connection.

    `most_rows` is the number of rows that answers show; further rows are only counted.
    """

    connection: duckdb.DuckDBPyConnection
    relation: str
    is_stored: bool = False
    most_rows: int | None = None

    def work(self) -> EventsView:
        """Return the events without the I/O of the program's runtime, with the column `rank_name`."""
        kind = "TABLE" if self.is_stored else "VIEW"
        self.connection.execute(
            f"CREATE OR REPLACE TEMP {kind} penstock_work AS"
            f" SELECT *, {RANK_NAME} AS rank_name FROM {self.relation} WHERE NOT {IS_RUNTIME}"
        )
        return replace(self, relation="penstock_work")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query in which `{events}` stands for the relation."""
        return self.connection.execute(sql.replace("{events}", self.relation)).fetchall()

    def ask_first(self, sql: str) -> tuple[list[tuple[Any, ...]], int]:
        """Return the first `most_rows` rows of an ordered query, and the number of all further rows."""
        rows = self.ask(f"SELECT * FROM ({sql}) LIMIT {self.most_rows or 'NULL'}")
        (num_rows,) = (
            (len(rows),) if len(rows) != self.most_rows else self.ask_one(f"SELECT count(*) FROM ({sql})")
        )
        return rows, num_rows - len(rows)

    def ask_one(self, sql: str) -> tuple[Any, ...]:
        """Return the only row of a query."""
        (row,) = self.ask(sql)
        return row

    def read(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query in Arrow batches, for answers that do not fit in memory."""
        yield from self.connection.sql(sql.replace("{events}", self.relation)).to_arrow_reader(batch_rows)


def view_events(
    connection: duckdb.DuckDBPyConnection,
    source: str,
    dimensions: Dimensions,
    *,
    is_stored: bool = False,
) -> EventsView:
    """Return the events of `source` with tier, file class and phase as `dimensions` define them.

    For stored events, these columns are computed once, in memory; otherwise, each query computes what it
    needs.
    """
    phase, join = dimensions.phase_sql(), ""
    if dimensions.phase_of is not None:
        # The user's function is called once for each combination of values.
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
    columns = ", ".join(f'{source}."{name}"' for name in SCHEMA.names)
    connection.execute(
        f"CREATE OR REPLACE TEMP {'TABLE' if is_stored else 'VIEW'} penstock_events AS"
        f" SELECT {columns}, {dimensions.tier_sql()} AS tier, {dimensions.file_class_sql()} AS file_class,"
        f" {phase} AS phase FROM {source}{join}"
    )
    return EventsView(connection, "penstock_events", is_stored)


def check_keys(by: Sequence[str]) -> Sequence[str]:
    """Return columns to group by. Raises `UsageError` for one that does not exist.

    Equal pids on two hosts are two processes, so `pid` brings `host` with it.
    """
    for key in by:
        if key not in GROUPINGS:
            raise UsageError(f"Cannot group by {key!r}", fix=f"Choose from: {', '.join(GROUPINGS)}.")
    if "pid" in by and "host" not in by:
        place = list(by).index("pid")
        return [*by[:place], "host", *by[place:]]
    return by


GROUPINGS: Final = (
    *(name for name in SCHEMA.names if name not in ("ts_us", "dur_us", "end_us", "args", "offset")),
    "tier",
    "file_class",
    "phase",
)
