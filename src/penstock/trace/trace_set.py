"""A trace set: raw files, event tables or both, opened as one relation of DuckDB, with their losses.

    files, each on a thread -> batches -> gathered in memory or in parts on disk -> DuckDB sorts
        -> `convert`: an event table, one Parquet file in order of time, which any tool opens
        -> `open_trace_set`: a temporary table, which with event tables is the view `events`

Invariants: a table is complete or absent, whenever the process dies; events at the same time are in the order
of their files, and within a file in the order of its lines; a table carries its sources and their accounts,
so queries on it know what was lost; a table that is older than its sources is rebuilt before it is queried,
and refused if rebuilding would run SQL that is stored in the table.
"""

from __future__ import annotations

import errno
import glob
import importlib
import json
import logging
import os
import resource
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory, gettempdir
from threading import Event, Lock, Timer
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.environment import find_other_writer
from penstock.errors import DataDamaged, TraceDamaged, UsageError, name_some
from penstock.optional_libraries import explained_imports
from penstock.progress import Progress
from penstock.results.published_files import publishing
from penstock.storage.files.local_files import parse_json
from penstock.storage.files.system_calls import map_os_error, translate_os_errors
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import (
    BATCH_SCHEMA,
    RANK_PATTERN,
    SCHEMA,
    TEXT_COLUMNS,
    FileAccount,
    TraceFile,
    batch_rows,
    fix_sql,
    refuse_damaged,
    refuse_lost,
)
from penstock.trace.reading.chrome import ChromeDocument
from penstock.trace.reading.json_lines import QUERY_LINES, JsonLines
from penstock.trace.reading.strace import read_strace
from penstock.trace.reading.trace_files import (
    LARGEST_RATIO,
    UTF8_MARK,
    Dialect,
    detect_dialect,
    find_trace_files,
    guess_content,
    read_event_count,
    read_pieces,
    split_lines,
)
from penstock.units import format_count

logger = logging.getLogger(__name__)


def refuse_overwriting(
    path: Path, inputs: Iterable[Path], *, kind: str, is_kind: Callable[[Path], object]
) -> None:
    """Raise UsageError if writing `path` would destroy an input, or a file that is not of this `kind`."""
    if not path.exists():
        return
    if any(path.samefile(one) for one in inputs):
        raise UsageError("The output is one of the inputs", where=str(path), fix="Name another file.")
    if path.is_dir() or not is_kind(path):
        raise UsageError(f"File exists and is not {kind}", where=str(path), fix="Name another file.")


_MOST_THREADS: Final = 4
"""The number of files that are read at once: more threads would wait for the Python parts of reading."""
_MEMORY_EVENTS: Final = 1 << 21
"""The number of events that are gathered in memory; if there are more, they are written to parts on disk
before they are sorted.
"""
_SORT_MEMORY: Final = "1GB"
"""The memory that DuckDB may use for sorting; what does not fit goes to the scratch folder."""
_UNPACKED_BYTES: Final = 1 << 30
"""The bytes to which any event table may unpack, even one of very few different texts."""
_KEY: Final = b"penstock.trace"
_VERSION: Final = 3
_TIMES: Final = 1 << 61
"""Times between minus this and this can be added without overflow."""
_RECREATE: Final = "Create it again with penstock trace load."
_READABLE: Final = (2, 3)
"""The readable versions of tables. The second, of Penstock 0.2.0, has columns and sums that are ignored
today.
"""
COLUMNS_SQL: Final = ", ".join(f'"{name}"' for name in SCHEMA.names)


@dataclass(frozen=True, slots=True)
class EventTableFacts:
    """The origin of a table, stored in it: its files as they were, and the fate of their lines."""

    sources: tuple[Mapping[str, Any], ...] = ()
    accounts: tuple[FileAccount, ...] = ()
    where: str = ""


def _describe_source(file: TraceFile) -> Mapping[str, Any]:
    """Describe a file in its present state, as tables do."""
    facts = file.path.stat()
    return {
        "path": str(file.path.absolute()),
        "name": file.name,
        "run": file.run,
        "rank_pattern": file.rank_pattern,
        "size_bytes": facts.st_size,
        "mtime_ns": facts.st_mtime_ns,
    }


def convert(
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    where: str = "",
    strict: bool = False,
    threads: int = 0,
    dask: str = "",
) -> EventTableFacts:
    """Make the table `target` from these files, replacing an older table in one step; return its facts.

    `threads` files are read at once (0: one per core, at most four), unless workers of `dask` read them,
    which must share the target's folder. With `strict`, a damaged file raises an error, and no table is made.
    A table without any events does not replace an older table.
    """
    inputs = [file.path for file in files]
    refuse_overwriting(target, inputs, kind="a Penstock event table", is_kind=_is_event_table)
    sources = tuple(map(_describe_source, files))
    with _explained(str(target)), publishing(target) as (draft, scratch), duckdb.connect() as connection:
        # Workers on other hosts know the folder by its name only.
        gathered = GatheredEvents(scratch.resolve() if dask else scratch)
        accounts = read_events(files, gathered, progress=progress, where=where, threads=threads, dask=dask)
        if strict:
            refuse_damaged(accounts)
        if target.exists():
            refuse_lost(accounts)
        facts = EventTableFacts(sources=sources, accounts=accounts, where=where)
        progress.begin("writing the table", 1)
        write_table(connection, gathered.source(connection), draft, facts)
        progress.advance(1)
    return facts


def read_events(
    files: Sequence[TraceFile],
    gathered: GatheredEvents,
    *,
    progress: Progress,
    where: str = "",
    threads: int = 0,
    dask: str = "",
) -> tuple[FileAccount, ...]:
    """Read files in parallel, and gather the events that meet `where`; return the files' accounts."""
    check_where(where)
    if dask:
        return _read_with_dask(dask, files, gathered, progress=progress, where=where)
    progress.begin("reading traces", float(sum(file.path.stat().st_size for file in files)))
    num_threads = max(1, min(threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS), len(files)))
    is_stopped = Event()

    def advance(num_bytes: int) -> None:
        if is_stopped.is_set():
            raise _Stopped
        progress.advance(num_bytes)

    def read(number: int, file: TraceFile) -> FileAccount:
        reading = read_trace_file(file, advance)
        with filtering.cursor() as cursor:
            for batch in reading.batches:
                wanted = _keep_wanted(cursor, batch, where) if where else batch
                reading.account.unwanted += batch.num_rows - wanted.num_rows
                gathered.add(number, wanted)
        return reading.account

    with duckdb.connect(config=_CONFINED) as filtering, ThreadPoolExecutor(num_threads, "trace") as pool:
        try:
            futures = [pool.submit(read, number, file) for number, file in enumerate(files)]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            is_stopped.set()
    failures = [error for future in futures if (error := future.exception()) is not None]
    # The failure that stopped the other threads comes before their errors.
    for error in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise error
    return tuple(future.result() for future in futures)


@dataclass(slots=True)
class TraceReading:
    """A file that is being read: iterate over `batches` first, then look at `account`."""

    account: FileAccount
    batches: Iterator[pa.RecordBatch] = field(repr=False)


def read_trace_file(
    file: TraceFile, advance: Callable[[int], None] = lambda _: None, query_lines: int = QUERY_LINES
) -> TraceReading:
    """Begin to read a file; `advance` is called with the number of bytes that were read from disk.

    After the last batch, the account is complete, and says what is wrong with the file. Only a file that
    cannot be read at all raises an error. Fewer lines than `query_lines` are parsed by Python, which changes
    only the speed.
    """
    account = FileAccount(file=file.name or file.path.name, size_bytes=file.path.stat().st_size)
    return TraceReading(account, _read_batches(file, account, advance, query_lines))


def _read_batches(
    file: TraceFile, account: FileAccount, advance: Callable[[int], None], query_lines: int
) -> Iterator[pa.RecordBatch]:
    """Yield batches from the reader of the file's dialect. To add a dialect, add a case here."""
    # Read before the trace, so that events that a running program records meanwhile do not count as missing.
    account.announced_events = read_event_count(file.path)
    pieces = read_pieces(file.path, account.faults.append, advance)
    head = next(pieces, b"").removeprefix(UTF8_MARK)
    pieces = chain([head], pieces)
    dialect = detect_dialect(head)
    account.dialect = dialect.value
    if dialect is Dialect.JSON_LINES:
        batches = JsonLines(file, account, query_lines).read(split_lines(pieces))
    elif dialect is Dialect.CHROME:
        batches = batch_rows(ChromeDocument(account, file.rank).read(pieces), file)
    elif dialect is Dialect.STRACE:
        batches = batch_rows(read_strace(file.path, head, split_lines(pieces), account), file)
    else:
        from penstock.trace.reading import darshan  # noqa: PLC0415 - few have such logs

        is_log = dialect is Dialect.DARSHAN_LOG
        rows = (
            darshan.read_darshan_log(file.path, account)
            if is_log
            else darshan.read_darshan_text(split_lines(pieces), account, file.path.name)
        )
        batches = batch_rows(rows, file)
    for batch in batches:
        account.hosts |= {host for host in batch["host"].dictionary.to_pylist() if host is not None}
        account.ranks |= {rank for rank in batch["rank"].unique().to_pylist() if rank is not None}
        starts = batch["ts_us"].to_numpy()
        first_us, last_us = int(starts.min()), int(starts.max())
        account.first_us = first_us if account.first_us is None else min(account.first_us, first_us)
        account.last_us = last_us if account.last_us is None else max(account.last_us, last_us)
        yield batch
    if not head:
        account.notes.append("it is empty")
    # Damaged JSON explains itself line by line, and Darshan's text without segments is a known case.
    is_damaged = account.dropped or (account.faults and dialect is not Dialect.DARSHAN)
    if is_damaged and account.is_without_events and head and not head.lstrip().startswith((b"{", b"[")):
        account.faults.append(f"not one event: it seems to be {guess_content(file.path.name, head)}")


class _Stopped(Exception):
    """Another file's failure, or an interrupt, has ended the conversion."""


_CONFINED: Final[dict[str, Any]] = {"threads": 1, "enable_external_access": False, "lock_configuration": True}
"""Settings of a connection that reads and writes no files, whatever an expression says."""


_QUERY_BYTES: Final = 4 << 30
_ONE_QUERY: Final = Lock()


@contextmanager
def bound_query(
    connection: duckdb.DuckDBPyConnection, sql: str, where: str, fix: str, most_seconds: float = 300
) -> Iterator[None]:
    """Raise `UsageError` if `sql`, which may be somebody else's, fails, or takes much memory or time.

    DuckDB's own limit does not count the texts and lists that functions build.
    """
    with _ONE_QUERY:  # the limit applies to the whole process
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + _QUERY_BYTES
        limits = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
        timer = Timer(most_seconds, connection.interrupt)
        timer.start()
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        try:
            yield
        except (duckdb.OutOfMemoryException, duckdb.InterruptException, MemoryError) as error:
            why = f"It takes more than {_QUERY_BYTES >> 30} GiB of memory or {most_seconds:g} s"
            raise UsageError(why, where=where, fix="Ask for less.") from error
        except duckdb.IOException:
            raise  # not the SQL's fault
        except duckdb.Error as error:
            why = str(error).strip().partition("\n")[0]
            raise UsageError(why, where=where, fix=fix_sql(error, sql, fix)) from error
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            timer.cancel()


@cache
def check_where(where: str) -> None:
    """Raise `UsageError` for an expression that DuckDB cannot apply to events, or that reads other data."""
    if where:
        with duckdb.connect(config=_CONFINED) as connection:
            _keep_wanted(connection, SCHEMA.empty_table(), where)


def _keep_wanted(connection: duckdb.DuckDBPyConnection, events: Any, where: str) -> Any:
    """Return the events that meet an expression, in their order."""
    table = pa.Table.from_batches([events]) if isinstance(events, pa.RecordBatch) else events
    with bound_query(connection, where, f"--where {where}", "Write SQL over columns of events."):
        # An `Expression` is parsed on its own, so its text cannot end the expression and begin a statement.
        wanted = duckdb.SQLExpression(where).cast("BOOLEAN")
        verdicts = connection.from_arrow(table).select(wanted.alias("wanted")).to_arrow_table()["wanted"]
        return events.filter(verdicts.combine_chunks())


class GatheredEvents:
    """Gathers batches of several files from several threads, in memory or, if there are many, on disk."""

    def __init__(self, scratch: Path, most_in_memory: int = _MEMORY_EVENTS) -> None:
        self.scratch = scratch
        self._most_in_memory = most_in_memory
        self._lock = Lock()
        self._pending: list[pa.Table] = []
        self._num_pending = self.num_parts = 0
        self._num_of_file: dict[int, int] = {}

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        """Add events of file `number`, in the order of its lines."""
        with self._lock:
            line = self._num_of_file.get(number, 0)
            self._num_of_file[number] = line + batch.num_rows
            places = np.full(batch.num_rows, number, np.int32), np.arange(line, line + batch.num_rows)
            table = pa.Table.from_batches([batch])
            for name, values in zip(("file_number", "line"), places, strict=True):
                table = table.append_column(name, pa.array(values))
            self._pending.append(table)
            self._num_pending += batch.num_rows
            if self._num_pending >= self._most_in_memory:
                self._write_part()

    def source(self, connection: duckdb.DuckDBPyConnection) -> str:
        """Return a query for all events in the order of time."""
        relation = f"read_parquet({sql_literal(str(self.scratch / 'part-*.parquet'))})"
        if self.num_parts:
            self._write_part()
        else:
            empty = pa.schema([*SCHEMA, ("file_number", pa.int32()), ("line", pa.int64())]).empty_table()
            # Dictionaries differ between batches, so each batch is a chunk.
            connection.register(
                "penstock_gathered", pa.concat_tables(self._pending) if self._pending else empty
            )
            relation = "penstock_gathered"
        connection.execute("SET temp_directory = ?", [str(self.scratch)])
        return f"SELECT {COLUMNS_SQL} FROM {relation} ORDER BY ts_us, file_number, line"

    def _write_part(self) -> None:
        if self._pending:
            part = self.scratch / f"part-{self.num_parts:05d}.parquet"
            with translate_os_errors("Writing events", str(self.scratch)):
                pq.write_table(pa.concat_tables(self._pending).unify_dictionaries(), part, compression="lz4")
            self._pending, self._num_pending = [], 0
            self.num_parts += 1


def write_table(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    path: Path,
    facts: EventTableFacts,
    compression: str = "zstd",
) -> None:
    """Write the events of a query, in the query's order, as a table with these facts."""
    document = {
        "version": _VERSION,
        "where": facts.where,
        "sources": facts.sources,
        "accounts": [account.document() for account in facts.accounts],
    }
    connection.execute("SET memory_limit = ?", [_SORT_MEMORY])
    connection.execute(
        f"COPY ({query}) TO {sql_literal(str(path))} (FORMAT parquet, COMPRESSION {compression},"
        f" ROW_GROUP_SIZE 131072, KV_METADATA {{{sql_literal(_KEY.decode())}: $1}})",
        [json.dumps(document)],
    )
    connection.execute("RESET memory_limit")


def _read_footer(path: Path) -> pq.FileMetaData | None:
    """Return what a Parquet file says about itself, or None if the file is not a Parquet file."""
    try:
        return pq.read_metadata(path)
    except (pa.ArrowException, OSError):
        return None


def _is_event_table(path: Path) -> bool:
    footer = _read_footer(path)
    return footer is not None and _KEY in (footer.metadata or {})


def read_facts(path: Path) -> EventTableFacts | None:
    """Return the facts of a table, or None if the file is not a Parquet file."""
    footer = _read_footer(path)
    if footer is None:
        return None
    text = (footer.metadata or {}).get(_KEY)
    if text is None:
        raise UsageError(
            "This Parquet file is not an event table",
            where=str(path),
            fix="Create one with penstock trace load, from the files that the tracer itself wrote.",
        )
    facts = None
    try:
        document = parse_json(text)
        version = document["version"]
        if version in _READABLE:
            accounts = tuple(map(FileAccount.from_document, document["accounts"]))
            facts = EventTableFacts(tuple(document["sources"]), accounts, document["where"])
            for one in facts.sources:
                str.encode(one["path"] + one["name"] + one["run"] + one["rank_pattern"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataDamaged(
            "The facts of this event table are damaged", where=str(path), fix=_RECREATE
        ) from error
    if facts is None:
        raise UsageError(
            f"Another version of Penstock wrote this table (format {version}, not {_VERSION})",
            where=str(path),
            fix=_RECREATE,
        )
    columns = footer.schema.to_arrow_schema()
    types = dict(zip(columns.names, columns.types, strict=True))
    wrong = [column.name for column in SCHEMA if types.get(column.name) != column.type]
    if wrong:
        raise DataDamaged(
            f"This event table lacks columns of events: {', '.join(wrong)}", where=str(path), fix=_RECREATE
        )
    size_bytes = path.stat().st_size
    unpacked_bytes = sum(footer.row_group(place).total_byte_size for place in range(footer.num_row_groups))
    # A table of Penstock has at most 40 events a byte, because each 131,072 events have pages of their own.
    largest = LARGEST_RATIO * size_bytes
    if footer.num_rows > largest or unpacked_bytes > max(_UNPACKED_BYTES, largest):
        raise DataDamaged(
            f"This event table unpacks to over {LARGEST_RATIO} times its size",
            where=str(path),
            fix=_RECREATE,
        )
    return facts


def _require_events(connection: duckdb.DuckDBPyConnection, path: Path, source: str) -> None:
    """Raise `DataDamaged` if a row of a table cannot be an event: every question counts on some columns."""
    exact = " AND ".join(f"{column.name} IS NOT NULL" for column in SCHEMA if not column.nullable)
    is_event = f"{exact} AND ts_us BETWEEN {-_TIMES} AND {_TIMES} AND dur_us >= 0 AND end_us = ts_us + dur_us"
    query = f"SELECT count(*) FROM {source} WHERE ({is_event}) IS NOT TRUE"
    ((num_wrong,),) = connection.execute(query).fetchall()
    if num_wrong:
        raise DataDamaged(
            f"This event table has {format_count(num_wrong, 'row')} that cannot be an event",
            where=str(path),
            fix=_RECREATE,
        )


@contextmanager
def _explained(place: str) -> Iterator[None]:
    """Convert DuckDB's errors about storage in the block, in which it writes to `place`, and about data."""
    try:
        yield
    except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
        # DuckDB refuses to fill more than a share of the disk, and gives errors only as text.
        text = str(error).replace("max_temp_directory_size", os.strerror(errno.ENOSPC))
        number = next((number for number in errno.errorcode if os.strerror(number) in text), 0)
        refused = OSError(number, os.strerror(number) if number else text)
        raise map_os_error(refused, "Reading or writing events", place) from error
    except (duckdb.DataError, duckdb.InvalidInputException) as error:
        what = str(error).partition("\n")[0]
        raise TraceDamaged(
            f"An event has a number or a text that cannot be evaluated: {what:.200}",
            fix="Leave such events out with --where.",
        ) from error


LOCAL: Final = "local"
"""Stands for a scheduler with workers on this machine."""
_TIMEOUT: Final = "120s"
"""The wait for a scheduler's response; on a busy machine, starting workers takes a while."""
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

    def confine(self) -> None:
        """Restrict SQL on this connection to reading what is open now, and to writing nothing."""
        if self.files:
            self.connection.execute("SET allowed_paths = ?", [[str(path) for path in self.files]])
        self.connection.execute("SET enable_external_access = false")
        self.connection.execute("SET lock_configuration = true")

    def losses(self) -> list[str]:
        """List everything that was lost or guessed, for people, one line each; empty if nothing was."""
        return [line for account in self.accounts for line in account.losses()]

    def mismatches(self) -> list[str]:
        """Name files that do not fit together, in one sentence each; empty if there are none.

        Their clocks or units cannot be right, or the processes of one cannot be told from those of another.
        """
        return [*find_clock_mismatches(self.accounts), *self._find_shared_processes()]

    def _find_shared_processes(self) -> Iterator[str]:
        """Yield a sentence if files without hosts have the same processes, and no rank explains it.

        strace writes a listing for each thread; all other tracers write a file, or several, for each process.
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
                names = name_some([Path(name).name for name in of_pid])
                more = f", and {len(shared) - 1:,} more processes do" if len(shared) > 1 else ""
                yield (
                    f"Process {pid} occurs in {names}, which name no host{more}: if they are from"
                    " several machines, processes with the same number count as one"
                )


def name_trace_files(paths: Sequence[Path], *, run: str, rank_pattern: str = RANK_PATTERN) -> list[TraceFile]:
    """Return the files to read, named by their base names, or by full paths if two base names are equal."""
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

    With `dask` (`local`, or a scheduler's address), Dask's workers read raw files. They must share all
    folders with this process, including the one for temporary files.
    """
    check_where(where)
    with (
        _explained(f"TMPDIR={gettempdir()}"),
        TemporaryDirectory(prefix="penstock-trace-") as temporary,
        duckdb.connect() as connection,
    ):
        folder = Path(temporary)
        connection.execute("SET temp_directory = ?", [temporary])
        # A question queries the same tables several times.
        connection.execute("SET parquet_metadata_cache = true")
        selected: list[str] = []
        tables: list[Path] = []
        of_runs: dict[str, list[FileAccount]] = {run: [] for run in runs}
        for run, patterns in runs.items():
            # A run's events get the name under which the run was opened; without one, a table keeps its own.
            columns = COLUMNS_SQL.replace('"run"', f"{sql_literal(run)} AS run") if run else COLUMNS_SQL
            raw: list[Path] = []
            for path in find_trace_files(patterns):
                facts = read_facts(path)
                if facts is None:
                    raw.append(path)
                    continue
                of_runs[run] += _refresh(path, facts, progress).accounts
                tables.append(path)
                # To DuckDB, a name may be a pattern of other files' names.
                source = f"read_parquet({sql_literal(glob.escape(str(path)))})"
                _require_events(connection, path, source)
                selected.append(f"SELECT {columns} FROM {source}")
            if not raw:
                continue
            files = name_trace_files(raw, run=run, rank_pattern=rank_pattern)
            made = folder / str(len(selected))
            made.mkdir()
            gathered = GatheredEvents(made)
            of_runs[run] += read_events(files, gathered, progress=progress, where=where, dask=dask)
            query = gathered.source(connection)
            if gathered.num_parts:
                table = made / "run.events"
                write_table(connection, query, table, EventTableFacts(), "lz4")
                source = f"read_parquet({sql_literal(str(table))})"
                tables.append(table)
            else:
                source = f"penstock_raw_{len(selected)}"
                connection.execute(f"CREATE TEMP TABLE {source} AS {query}")
                connection.unregister("penstock_gathered")
            selected.append(f"SELECT {columns} FROM {source}")
        union = " UNION ALL ".join(selected)
        connection.execute(
            f"CREATE TEMP VIEW {RELATION} AS SELECT * FROM ({union})"
            + (f" WHERE (\n{where}\n)" if where else "")
        )
        yield TraceSet(
            connection=connection,
            accounts=[account for accounts in of_runs.values() for account in accounts],
            accounts_of_runs=of_runs,
            files=tables,
        )


def _refresh(path: Path, facts: EventTableFacts, progress: Progress) -> EventTableFacts:
    """Return the facts of a table, rebuilt if its sources have changed; deleted ones count as unchanged."""
    files = [
        TraceFile(path=Path(one["path"]), name=one["name"], run=one["run"], rank_pattern=one["rank_pattern"])
        for one in facts.sources
    ]
    there = [file.path.is_file() for file in files]
    if all(
        _describe_source(file) == source
        for file, source, is_there in zip(files, facts.sources, there, strict=True)
        if is_there
    ):
        return facts
    if not all(there):
        raise UsageError(
            "This event table is out of date, and some of its trace files are gone",
            where=str(path),
            fix="Load the remaining files into a new table: penstock trace load.",
        )
    if reason := find_other_writer(path.resolve(), 0o002):
        # The table names the files to read, and would show their lines to whoever can read the table.
        raise UsageError(
            f"This event table is older than its trace files, and cannot be rebuilt here: {reason}",
            where=str(path),
            fix="Load the trace files into a table of your own: penstock trace load.",
        )
    if facts.where:
        # SQL in a file is data: only the file's owner may ask for it to be run.
        raise UsageError(
            "This event table is older than its trace files, and was made with --where",
            where=str(path),
            fix=f"If you trust its SQL, load it again: penstock trace load --where {quote(facts.where)}",
        )
    logger.info("%s is older than its trace files: rebuilding it", path)
    return convert(files, path, progress=progress)


def _read_with_dask(
    scheduler: str, files: Sequence[TraceFile], gathered: GatheredEvents, *, progress: Progress, where: str
) -> tuple[FileAccount, ...]:
    """Let workers make a table of each file in the scratch folder, and gather the tables.

    The workers must share the scratch folder. `scheduler` is `local`, for processes started by this one, or
    an address such as tcp://host:8786. Raises `Unavailable` if Dask is needed but not installed, and
    `UsageError` if no scheduler answers.
    """
    with ExitStack() as resources:
        if scheduler == LOCAL:
            # A scheduler of Dask listens on a port, and runs the code of anybody who connects to it.
            workers: Any = resources.enter_context(_local_processes(len(files)))
        else:
            with explained_imports("dask"):
                distributed = importlib.import_module("distributed")
            try:
                client = resources.enter_context(distributed.Client(scheduler, timeout=_TIMEOUT))
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"No Dask scheduler answers: {error}",
                    where=f"--dask {scheduler}",
                    fix="Write --dask local, or the address that dask scheduler printed, as tcp://host:8786.",
                ) from error
            workers = client.get_executor(pure=False)
        progress.begin("reading traces", float(len(files)))
        targets = [gathered.scratch / f"{number:06d}.events" for number in range(len(files))]
        convert_one = partial(_convert_one, where=where)
        futures = [workers.submit(convert_one, *each) for each in zip(files, targets, strict=True)]
        for _ in as_completed(futures):
            progress.advance(1)
        accounts = [future.result() for future in futures]
    for number, target in enumerate(targets):
        with pq.ParquetFile(target, read_dictionary=list(TEXT_COLUMNS)) as table:
            for batch in table.iter_batches(columns=SCHEMA.names):
                gathered.add(number, batch.cast(BATCH_SCHEMA))
        target.unlink()
    return tuple(accounts)


@contextmanager
def _local_processes(num_files: int) -> Iterator[ProcessPoolExecutor]:
    """Start at most one process for each core and file; all end with the block, even while they work."""
    num_processes = max(1, min(len(os.sched_getaffinity(0)), num_files))
    workers = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
    try:
        yield workers
    finally:
        processes = list(workers._processes.values())  # noqa: SLF001 - there is no public way to end them
        workers.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def _convert_one(file: TraceFile, target: Path, where: str) -> FileAccount:
    facts = convert([file], target, progress=Progress(), where=where, threads=1)
    return facts.accounts[0]


APART_US: Final = 30 * 86_400 * 1_000_000
"""Files of one run whose times are further apart than this were not recorded by agreeing clocks."""
_YEAR_US: Final = 31_556_952 * 1_000_000
_FROM_2000_US, _TO_2100_US = 30 * _YEAR_US, 130 * _YEAR_US


def find_clock_mismatches(accounts: Sequence[FileAccount]) -> list[str]:
    """Return sentences about files whose times cannot be right, either alone or compared with other files."""
    timed = sorted(
        ((account.first_us, account) for account in accounts if account.first_us is not None),
        key=itemgetter(0),
    )
    sentences = []
    for unit, ratio in (("nanoseconds", 1000), ("milliseconds", 1 / 1000), ("seconds", 1 / 1_000_000)):
        # Chrome's documents often count from the start of the machine, so small times are not an error there.
        wrong = [
            (first_us, account)
            for first_us, account in timed
            if not _FROM_2000_US <= first_us < _TO_2100_US
            and _FROM_2000_US <= first_us / ratio < _TO_2100_US
            and (ratio > 1 or account.dialect == Dialect.JSON_LINES)
        ]
        if wrong:
            sentences.append(
                f"Times of {_name_files(wrong)} look like {unit} that were read as microseconds (the first is"
                f" of {_format_date(wrong[0][0])}): durations are wrong, too. A line of metadata time_metric"
                " gives DFTracer's unit"
            )
    groups: list[list[tuple[int, FileAccount]]] = []
    last_us = 0
    copies: dict[Hashable, list[tuple[int, FileAccount]]] = {}
    for first_us, account in timed:
        if not groups or first_us - last_us > APART_US:
            groups.append([])
        groups[-1].append((first_us, account))
        last_us = max(last_us, account.last_us or 0)
        num_events = account.events + account.salvaged
        # The times of many jobs count from 0 at the job's start.
        if num_events >= 2 and first_us >= _FROM_2000_US:
            # A truncated copy ends earlier; if ranks are known, an equal first microsecond is enough.
            rest = () if account.ranks else (account.last_us, num_events)
            who = (account.dialect, first_us, frozenset(account.hosts), frozenset(account.ranks), *rest)
            copies.setdefault(who, []).append((first_us, account))
    if len(groups) > 1:
        each = "; ".join(f"{_name_files(group)} from {_format_date(group[0][0])} on" for group in groups)
        sentences.append(
            "The clocks or units of these files do not agree, so spans, timelines and overlaps over all of"
            f" them are wrong: {each}"
        )
    sentences += [
        f"{_name_files(files)} begin in the same microsecond and do not differ in host or rank: if they are"
        " copies, their events count several times"
        for files in copies.values()
        if len(files) > 1
    ]
    return sentences


def _name_files(timed: Sequence[tuple[int, FileAccount]]) -> str:
    """Name the first of several files, with their hosts."""
    return name_some(
        [
            f"{account.file} (host {', '.join(sorted(account.hosts)[:3])})" if account.hosts else account.file
            for _, account in timed
        ]
    )


def _format_date(time_us: int) -> str:
    year = 1970 + time_us // _YEAR_US
    if not 1 <= year <= 9998:
        return f"the year {year:,}"
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M UTC")
