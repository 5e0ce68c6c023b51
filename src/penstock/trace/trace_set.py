"""A trace set: raw files, event tables or both, opened as one relation of DuckDB, with their losses.

    names, globs, folders -> raw files -> sorted, in memory or in a temporary table \
                          -> event tables -------------------------------------------- -> view `events`

`open_trace_set` shows the whole way. Invariant: a table that is older than its sources is rebuilt before it
is asked.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import duckdb

from penstock.errors import UsageError
from penstock.optional_libraries import explained_imports
from penstock.progress import Progress, Silent
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import FileAccount
from penstock.trace.event_table import (
    COLUMNS_SQL,
    EventTableFacts,
    GatheredEvents,
    check_target,
    check_where,
    convert,
    publishing,
    read_events,
    read_facts,
    refuse_facts,
    write_table,
)
from penstock.trace.reading.clock_check import find_clock_mismatches
from penstock.trace.reading.event_batch import RANK_PATTERN, TraceFile
from penstock.trace.reading.find_files import find_trace_files, name_some
from penstock.trace.reading.trace_file import Dialect

LOCAL: Final = "local"
"""Stands for a scheduler with workers on this machine only."""
_TIMEOUT: Final = "120s"
"""For a scheduler to answer; starting workers takes a while on a busy machine."""
RELATION: Final = "events"
"""The name of the events in questions and in users' SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSet:
    """Opened traces: a connection with a view `events`, and the accounts of their files."""

    connection: duckdb.DuckDBPyConnection
    accounts: Sequence[FileAccount]
    accounts_of_runs: Mapping[str, Sequence[FileAccount]]
    files: Sequence[Path] = ()
    """The files that the connection reads."""

    def losses(self) -> list[str]:
        """Everything that was lost or guessed, for people, one line each; empty if nothing was."""
        return [line for account in self.accounts for line in account.losses()]

    def mismatches(self) -> list[str]:
        """Files that do not fit together, one sentence each; empty if there are none.

        Their clocks or units cannot be right, or nobody can tell the processes of one from another's.
        """
        return [*find_clock_mismatches(self.accounts), *self._find_shared_processes()]

    def _find_shared_processes(self) -> Iterator[str]:
        """Yield a sentence if files without hosts have the same processes, and no rank explains it.

        Listings of strace have a file for each thread; all else has a file, or several, for each process.
        """
        for dialect in sorted({account.dialect for account in self.accounts} - {Dialect.STRACE.value}):
            files = [one.file for one in self.accounts if one.dialect == dialect and not one.hosts]
            if len(files) < 2:
                continue
            shared = self.connection.execute(
                f"""
                SELECT pid, list(DISTINCT file ORDER BY file) FROM {RELATION}
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
    where: str = "",
    rank_pattern: str = RANK_PATTERN,
    dask: str = "",
) -> Iterator[TraceSet]:
    """Open the files of named runs (names, globs, folders, tables) as one relation `events`.

    With `dask` (`local`, or a scheduler's address) its workers read raw files. They must share all folders
    with this process, including the one for temporary files.
    """
    check_where(where)
    with TemporaryDirectory(prefix="penstock-trace-") as temporary, duckdb.connect() as connection:
        folder = Path(temporary)
        connection.execute("SET temp_directory = ?", [temporary])
        # A question asks several times of the same tables.
        connection.execute("SET parquet_metadata_cache = true")
        selected: list[str] = []
        tables: list[Path] = []
        of_runs: dict[str, list[FileAccount]] = {run: [] for run in runs}
        for run, patterns in runs.items():
            # A run's events have the name by which it was opened; without one, a table keeps its own.
            columns = COLUMNS_SQL.replace('"run"', f"{sql_literal(run)} AS run") if run else COLUMNS_SQL
            raw: list[Path] = []
            for path in find_trace_files(patterns):
                facts = read_facts(path)
                if facts is None:
                    raw.append(path)
                    continue
                of_runs[run] += _refresh(path, facts, progress).accounts
                tables.append(path)
                selected.append(f"SELECT {columns} FROM read_parquet({sql_literal(str(path))})")
            if not raw:
                continue
            files = name_trace_files(raw, run=run, rank_pattern=rank_pattern)
            made = folder / str(len(selected))
            made.mkdir()
            if dask:
                with connect_dask(dask) as client:
                    all_facts = convert_with_dask(client, files, made, progress=progress, where=where)
                of_runs[run] += [account for facts in all_facts for account in facts.accounts]
                source = f"read_parquet({sql_literal(str(made / '*.events'))})"
                tables += sorted(made.iterdir())
            else:
                gathered = GatheredEvents(made)
                of_runs[run] += read_events(files, gathered, progress=progress, where=where)
                query = gathered.source(connection)
                if gathered.has_parts:
                    table = made / "run.events"
                    write_table(connection, query, table, EventTableFacts(sources=(), accounts=()), "lz4")
                    source = f"read_parquet({sql_literal(str(table))})"
                    tables.append(table)
                else:
                    source = f"penstock_raw_{len(selected)}"
                    connection.execute(f"CREATE TEMP TABLE {source} AS {query}")
                    connection.unregister("penstock_gathered")
            selected.append(f"SELECT {columns} FROM {source}")
        union = " UNION ALL ".join(selected)
        connection.execute(
            f"CREATE TEMP VIEW {RELATION} AS SELECT * FROM ({union})" + (f" WHERE {where}" if where else "")
        )
        yield TraceSet(
            connection=connection,
            accounts=[account for accounts in of_runs.values() for account in accounts],
            accounts_of_runs=of_runs,
            files=tables,
        )


def _refresh(path: Path, facts: EventTableFacts, progress: Progress) -> EventTableFacts:
    """The facts of a table, rebuilt if its sources have changed."""
    if not any(source.has_changed() for source in facts.sources):
        return facts
    if not all(Path(source.path).exists() for source in facts.sources):
        raise UsageError(
            "This event table is out of date, and some of its trace files are gone",
            where=str(path),
            fix="Load the remaining files into a new table: penstock trace load.",
        )
    logger.info("%s is older than its trace files: rebuilding it", path)
    return convert([source.file for source in facts.sources], path, progress=progress, where=facts.where)


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
    client: Any, files: Sequence[TraceFile], folder: Path, *, progress: Progress, where: str
) -> list[EventTableFacts]:
    """Make one table per file in `folder`, which the workers must share; returns the tables' facts."""
    distributed = importlib.import_module("distributed")
    progress.begin("reading traces", float(len(files)))
    targets = [folder / f"{number:06d}.events" for number in range(len(files))]
    futures = client.map(_convert_one, files, targets, [where] * len(files), pure=False)
    facts: dict[Any, EventTableFacts] = {}
    for future, result in distributed.as_completed(futures, with_results=True):
        facts[future.key] = result
        progress.advance(1)
    return [facts[future.key] for future in futures]


def load_with_dask(
    scheduler: str,
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    where: str = "",
    strict: bool = False,
) -> EventTableFacts:
    """Make the table that `convert` would make; the workers must share the target's folder."""
    check_target(target, files)
    with (
        publishing(target) as (draft, folder),
        connect_dask(scheduler) as client,
        duckdb.connect() as connection,
    ):
        parts = convert_with_dask(client, files, folder, progress=progress, where=where)
        joined = EventTableFacts(
            sources=tuple(source for part in parts for source in part.sources),
            accounts=tuple(account for part in parts for account in part.accounts),
            where=where,
        )
        refuse_facts(joined, target, strict=strict)
        tables = f"read_parquet({sql_literal(f'{folder}/*.events')}, filename = true, file_row_number = true)"
        query = f"SELECT {COLUMNS_SQL} FROM {tables} ORDER BY ts_us, filename, file_row_number"
        write_table(connection, query, draft, joined)
    return joined


def _convert_one(file: TraceFile, target: Path, where: str) -> EventTableFacts:
    return convert([file], target, progress=Silent(), where=where, threads=1)


logger = logging.getLogger(__name__)
