"""A trace set: raw files, event tables or both, opened as one relation of DuckDB, with their losses.

    names, globs, folders -> raw files -> a temporary table, by threads or Dask workers \
                          -> event tables ---------------------------------------------- -> view `events`

`open_trace_set` shows the whole way. Raw files become a table in a temporary folder, which is removed when
the set is closed. Invariant: a table that is older than its sources is rebuilt before it is asked.
"""

import glob
import importlib
import logging
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import duckdb

from penstock.errors import UsageError
from penstock.optional_libraries import explained_imports
from penstock.progress import Progress, Silent
from penstock.trace.capture.trace_writer import COUNT_SUFFIX
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import ALL_COLUMNS, COLUMNS, FileAccount
from penstock.trace.event_store import KEYS, TABLE_SCHEMA, EventStore
from penstock.trace.event_table import (
    EventTableFacts,
    check_target,
    convert,
    join_tables,
    read_events,
    read_facts,
)
from penstock.trace.ordered_events import OrderedEvents, ParquetEvents, TableEvents
from penstock.trace.reading.chunks import explain_unreadable
from penstock.trace.reading.clock_check import find_clock_mismatches
from penstock.trace.reading.event_filter import ALL_EVENTS, EventFilter
from penstock.trace.reading.folder_search import explain_empty, find_in_folder, name_some
from penstock.trace.reading.trace_file import RANK_PATTERN, Dialect, TraceFile
from penstock.trace.stored_sums import StoredSums, TableSums, number_key

LOCAL: Final = "local"
"""Stands for a scheduler with workers on this machine only."""

_TIMEOUT: Final = "120s"
"""For a scheduler to answer; starting workers takes a while on a busy machine."""


RELATION: Final = "events"
"""The name of the events in questions and in users' SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """Opened traces: a connection on which `relation` holds the events, and the accounts of their files."""

    connection: duckdb.DuckDBPyConnection
    accounts: Sequence[FileAccount]
    relation: str = RELATION
    files: Sequence[Path] = ()
    """The files that the connection reads."""
    is_ordered: bool = False
    """Whether a scan gives the events in the order of time."""
    ordered: OrderedEvents | None = None
    """The same events for threads, if they can be read past DuckDB."""
    sums: StoredSums | None = None
    """What is stored of these events, added up."""

    def losses(self) -> list[str]:
        """What was lost or guessed, for people, one line each; empty if nothing was."""
        return [line for account in self.accounts for line in account.losses()]

    knows_processes: bool = False
    """Whether hosts, ranks and files of events were read."""

    def mismatches(self) -> list[str]:
        """Files that do not fit together, one sentence each; empty if there are none.

        Their clocks or units cannot be right, or nobody can tell the processes of one from another's.
        """
        return [*find_clock_mismatches(self.accounts), *self._find_shared_processes()]

    def _find_shared_processes(self) -> Iterator[str]:
        """Say that files without hosts have the same processes, unless a rank or a listing explains it.

        Listings of strace have a file for each thread; all else has a file, or several, for each process.
        """
        for dialect in sorted({account.dialect for account in self.accounts} - {Dialect.STRACE.value}):
            files = [one.file for one in self.accounts if one.dialect == dialect and not one.hosts]
            if len(files) < 2 or not self.knows_processes:
                continue
            shared = self.connection.execute(
                f"""
                SELECT pid, list(DISTINCT file ORDER BY file) FROM {self.relation}
                WHERE host IS NULL AND list_contains(?, file) GROUP BY run, pid
                HAVING count(DISTINCT coalesce(rank::VARCHAR, file)) > 1 ORDER BY pid""",
                [files],
            ).fetchall()
            if shared:
                pid, of_pid = shared[0]
                names = name_some([Path(name) for name in of_pid])
                more = f", and {len(shared) - 1:,} more processes do" if len(shared) > 1 else ""
                yield (
                    f"Process {pid} occurs in {names}, which name no host{more}: if these are processes of"
                    " several machines, each number counts as one process"
                )


def find_trace_files(patterns: Sequence[str]) -> list[Path]:
    """The files that names, globs and folders match, each once, in the order of the patterns."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        try:
            paths.update(dict.fromkeys(_find_matches(pattern)))
        except OSError as error:
            raise explain_unreadable(error, Path(pattern)) from error
    return list(paths)


def _find_matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        matches, left_out = find_in_folder(path)
        if matches and left_out:
            logger.warning("%s: left out, because they are no traces: %s", path, name_some(left_out))
    else:
        matches, left_out = [path] if path.exists() else _expand_glob(pattern), []
        for match in matches:
            # A pipe would be waited for, and cannot be read twice.
            if not stat.S_ISREG(match.stat().st_mode):
                raise UsageError(
                    "Only regular files are traces", where=str(match), fix="Write the trace to a file first."
                )
    if not matches:
        raise UsageError(
            explain_empty(path, left_out) if path.is_dir() else "No such file",
            where=pattern,
            fix="Name trace files, a folder of them, a quoted glob, or an event table.",
        )
    return matches


def _expand_glob(pattern: str) -> list[Path]:
    """The files that a glob matches, except the event counts beside unfinished traces."""
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute globs, too
    paths = [Path(match) for match in matches if not match.endswith(COUNT_SUFFIX)]
    return [path for path in paths if not path.is_dir()]


def name_trace_files(paths: Sequence[Path], *, run: str, rank_pattern: str = RANK_PATTERN) -> list[TraceFile]:
    """Files to read, each under the shortest name that distinguishes it from the others."""
    names = [path.name for path in paths]
    unique = len(set(names)) == len(names)
    return [
        TraceFile(path=path, name=path.name if unique else str(path), run=run, rank_pattern=rank_pattern)
        for path in paths
    ]


@contextmanager
def open_trace_set(
    runs: Mapping[str, Sequence[str]],
    *,
    progress: Progress,
    event_filter: EventFilter = ALL_EVENTS,
    rank_pattern: str = RANK_PATTERN,
    dask: str = "",
    columns: frozenset[str] = ALL_COLUMNS,
) -> Iterator[TraceSet]:
    """Open the files of named runs (names, globs, folders, tables) as one relation `events`.

    Of raw files, only these `columns` and those of the filter are read; the others are NULL. With `dask`
    (`local`, or a scheduler's address) its workers read raw files. They must share all folders with this
    process, including the one for temporary files.
    """
    with TemporaryDirectory(prefix="penstock-trace-") as folder, duckdb.connect() as connection:
        connection.execute("SET temp_directory = ?", [folder])
        # A question asks several times of the same tables.
        connection.execute("SET parquet_metadata_cache = true")
        # Without times among them, nobody can see the order of events, and sorting them takes time.
        wanted = (columns | event_filter.columns()) or frozenset(("ts_us",))
        tables: list[_OpenTable] = []
        accounts: list[FileAccount] = []
        for number, (run, patterns) in enumerate(runs.items()):
            raw: list[Path] = []
            for path in find_trace_files(patterns):
                facts = read_facts(path)
                if facts is None:
                    raw.append(path)
                    continue
                tables.append(_OpenTable.from_file(run, path))
                accounts.extend(_refresh(path, facts, progress).accounts)
            if raw:
                files = name_trace_files(raw, run=run, rank_pattern=rank_pattern)
                made = Path(folder) / str(number)
                made.mkdir()
                if dask:
                    with connect_dask(dask) as client:
                        targets, all_facts = convert_with_dask(
                            client, files, made, progress=progress, event_filter=event_filter
                        )
                    tables += [_OpenTable.from_file(run, target) for target in targets]
                    accounts += [account for facts in all_facts for account in facts.accounts]
                else:
                    store = EventStore(wanted, made)
                    accounts += read_events(
                        files, store, progress=progress, event_filter=event_filter, columns=wanted | {"ts_us"}
                    )
                    tables.append(_OpenTable.from_store(run, store, made, connection))
        connection.execute(f"CREATE TEMP VIEW {RELATION} AS {_union_tables(tables, event_filter)}")
        is_ordered = len(tables) == 1 and "ts_us" in tables[0].columns
        yield TraceSet(
            connection=connection,
            accounts=accounts,
            files=[table.path for table in tables if table.path is not None],
            is_ordered=is_ordered,
            ordered=tables[0].ordered if is_ordered and not event_filter.where else None,
            sums=None if event_filter.where else _find_sums(connection, tables),
            knows_processes={"run", "file", "host", "rank", "pid"} <= wanted,
        )


@dataclass(frozen=True, slots=True)
class _OpenTable:
    """Events of one run that DuckDB can read: its name for them, and which columns there are."""

    run: str
    source: str
    columns: frozenset[str]
    ordered: OrderedEvents
    path: Path | None = None

    @classmethod
    def from_file(cls, run: str, path: Path) -> Self:
        return cls(run, _read_sql(path), frozenset(TABLE_SCHEMA.names), ParquetEvents(path), path)

    @classmethod
    def from_store(
        cls, run: str, store: EventStore, folder: Path, connection: duckdb.DuckDBPyConnection
    ) -> Self:
        """The events of raw files: in memory, or in a table for this command if they are many."""
        if store.is_spilled:
            path = folder / "run.events"
            names = store.write(path)
            return cls(run, _read_sql(path), names, ParquetEvents(path), path)
        table = store.read_all()
        name = f"penstock_raw_{folder.name}"
        connection.register(name, table)
        return cls(run, name, frozenset(table.column_names), TableEvents(table))


def _find_sums(connection: duckdb.DuckDBPyConnection, tables: Sequence[_OpenTable]) -> StoredSums | None:
    """The sums that tables store; None if some events come from elsewhere."""
    stored = [
        (table.run, TableSums(table.ordered)) for table in tables if isinstance(table.ordered, ParquetEvents)
    ]
    return StoredSums(connection, stored) if len(stored) == len(tables) else None


def _read_sql(path: Path) -> str:
    return f"read_parquet({sql_literal(str(path))})"


def _refresh(path: Path, facts: EventTableFacts, progress: Progress) -> EventTableFacts:
    """The facts of a table, rebuilt if its sources have changed."""
    if not facts.is_stale():
        return facts
    if not facts.can_be_rebuilt():
        raise UsageError(
            "This event table is out of date, and some of its trace files are gone",
            where=str(path),
            fix="Load the remaining files into a new table: penstock trace load.",
        )
    logger.info("%s is older than its trace files: rebuilding it", path)
    files = [source.file for source in facts.sources]
    return convert(files, path, progress=progress, event_filter=EventFilter(where=facts.where))


def _union_tables(tables: Sequence[_OpenTable], event_filter: EventFilter) -> str:
    where = f" WHERE {event_filter.where}" if event_filter.where else ""
    parts = [
        f"SELECT {_select_columns(table, number)} FROM {table.source}" for number, table in enumerate(tables)
    ]
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}){where}"


def _select_columns(table: _OpenTable, number: int) -> str:
    """All columns, with the name that the run was opened by; without one, a table keeps its own run names."""
    selected = []
    for column in COLUMNS:
        if column.name == "run" and table.run:
            selected.append(f"{sql_literal(table.run)} AS run")
        elif column.name in table.columns:
            selected.append(f'"{column.name}"')
        else:
            selected.append(f'NULL::{column.type_sql} AS "{column.name}"')
    keys = (number_key(key, number) if key in table.columns else f"NULL::BIGINT AS {key}" for key in KEYS)
    return ", ".join([*selected, *keys])


@contextmanager
def connect_dask(scheduler: str) -> Iterator[Any]:
    """A Dask client of `scheduler` (`local`, or an address as tcp://host:8786).

    Raises Unavailable if Dask is not installed, UsageError if no scheduler answers.
    """
    with explained_imports("dask"):
        distributed = importlib.import_module("distributed")
    with ExitStack() as resources:
        if scheduler == LOCAL:
            cluster = distributed.LocalCluster(
                dashboard_address="127.0.0.1:0", threads_per_worker=1, host="127.0.0.1"
            )
            resources.enter_context(cluster)
            scheduler = cluster.scheduler_address
        try:
            client = resources.enter_context(distributed.Client(scheduler, timeout=_TIMEOUT))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"No Dask scheduler answers: {error}",
                where=f"--dask {scheduler}",
                fix="Write --dask local, or the address that dask scheduler printed, as tcp://host:8786.",
            ) from error
        yield client


def convert_with_dask(
    client: Any,
    files: Sequence[TraceFile],
    folder: Path,
    *,
    progress: Progress,
    event_filter: EventFilter,
) -> tuple[list[Path], list[EventTableFacts]]:
    """Make one table per file in `folder`, which the workers must share; the tables, and their facts."""
    distributed = importlib.import_module("distributed")
    progress.begin("reading traces", float(len(files)))
    targets = [folder / f"{number:06d}.events" for number in range(len(files))]
    futures = client.map(_convert_one, files, targets, [event_filter] * len(files), pure=False)
    facts: dict[Any, EventTableFacts] = {}
    for future, result in distributed.as_completed(futures, with_results=True):
        facts[future.key] = result
        progress.advance(1)
    return targets, [facts[future.key] for future in futures]


def load_with_dask(
    scheduler: str,
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    event_filter: EventFilter,
    strict: bool = False,
) -> EventTableFacts:
    """Make the table that `convert` would make; the workers must share the target's folder."""
    check_target(target, files)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent.absolute()) as folder,
        connect_dask(scheduler) as client,
    ):
        tables, facts = convert_with_dask(
            client,
            files,
            Path(folder),
            progress=progress,
            event_filter=event_filter,
        )
        return join_tables(tables, facts, target, strict=strict)


def _convert_one(file: TraceFile, target: Path, event_filter: EventFilter) -> EventTableFacts:
    return convert([file], target, progress=Silent(), event_filter=event_filter, threads=1)


logger = logging.getLogger(__name__)
