"""A trace set: raw files, event tables or both, opened as one relation of DuckDB, with their losses.

    files, each on a thread -> batches -> gathered in memory or in parts on disk -> DuckDB sorts
        -> `convert`: an event table, one Parquet file in order of time, which any tool opens
        -> `open_trace_set`: a temporary table, which with event tables is the view `events`

Invariants: a table is complete or absent, whenever the process dies; events at the same time are in the order
of their files, and of their lines in each; a table carries its sources and their accounts, so questions to it
know what was lost; a table that is older than its sources is rebuilt before it is asked.
"""

from __future__ import annotations

import glob
import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import UsageError
from penstock.optional_libraries import explained_imports
from penstock.progress import Progress
from penstock.storage.files.durable import replace_durably
from penstock.storage.process_id import pid_exists
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import SCHEMA, FileAccount, refuse_damaged, refuse_lost
from penstock.trace.reading.event_batch import RANK_PATTERN, TraceFile
from penstock.trace.reading.find_files import find_trace_files, name_some
from penstock.trace.reading.trace_file import Dialect, read_trace_file


def refuse_overwriting(
    path: Path, inputs: Iterable[Path], *, kind: str, is_kind: Callable[[Path], bool]
) -> None:
    """Raise UsageError if writing `path` would destroy an input, or a file that is not of this `kind`."""
    if not path.exists():
        return
    if any(path.samefile(one) for one in inputs):
        raise UsageError("The output is one of the inputs", where=str(path), fix="Name another file.")
    if path.is_dir() or not is_kind(path):
        raise UsageError(f"File exists and is not {kind}", where=str(path), fix="Name another file.")


_MOST_THREADS: Final = 4
"""Files that are read at once: more threads would wait for the Python parts of reading."""
_MEMORY_EVENTS: Final = 1 << 21
"""Events that are gathered in memory; more are written to parts on disk before they are sorted."""
_SORT_MEMORY: Final = "1GB"
"""Memory that DuckDB may use for sorting; what does not fit goes to the scratch folder."""
_KEY: Final = "penstock.trace"
_VERSION: Final = 3
_READABLE: Final = (2, 3)
"""Versions of tables. The second, of Penstock 0.2.0, has columns and sums that are ignored today."""
COLUMNS_SQL: Final = ", ".join(f'"{name}"' for name in SCHEMA.names)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A trace file as it was when the table was made."""

    path: str
    name: str
    run: str
    rank_pattern: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def from_file(cls, file: TraceFile) -> SourceFile:
        """The file as it is now."""
        facts = file.path.stat()
        path = str(file.path.absolute())
        return cls(path, file.name, file.run, file.rank_pattern, facts.st_size, facts.st_mtime_ns)

    @property
    def file(self) -> TraceFile:
        """What to read to get the same events again."""
        return TraceFile(path=Path(self.path), name=self.name, run=self.run, rank_pattern=self.rank_pattern)

    def has_changed(self) -> bool:
        """Whether the file has changed since it was read; a missing file has not."""
        try:
            facts = os.stat(self.path)  # noqa: PTH116 - text in the table, used as it stands
        except FileNotFoundError:
            return False
        return (facts.st_size, facts.st_mtime_ns) != (self.size_bytes, self.mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTableFacts:
    """The origin of a table, stored in it."""

    sources: tuple[SourceFile, ...]
    accounts: tuple[FileAccount, ...]
    where: str = ""

    def is_stale(self) -> bool:
        """Whether a source has changed since the table was made."""
        return any(source.has_changed() for source in self.sources)

    def can_be_rebuilt(self) -> bool:
        """Whether all sources still exist."""
        return all(Path(source.path).exists() for source in self.sources)


def convert(
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    where: str = "",
    strict: bool = False,
    threads: int = 0,
) -> EventTableFacts:
    """Make the table `target` of these files, replacing an older one in one step; returns its facts.

    Files are read by `threads` at once (0: one per core, at most four). With `strict`, damaged files are an
    error, and there is no table. An older table is not replaced by one without any events.
    """
    check_target(target, files)
    sources = tuple(SourceFile.from_file(file) for file in files)
    with publishing(target) as (draft, scratch), duckdb.connect() as connection:
        gathered = GatheredEvents(scratch)
        accounts = read_events(files, gathered, progress=progress, where=where, threads=threads)
        facts = EventTableFacts(sources=sources, accounts=accounts, where=where)
        refuse_facts(facts, target, strict=strict)
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
) -> tuple[FileAccount, ...]:
    """Read files side by side, and gather the events for which `where` holds; returns the files' accounts."""
    check_where(where)
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

    with duckdb.connect(config={"threads": 1}) as filtering, ThreadPoolExecutor(num_threads, "trace") as pool:
        try:
            futures = [pool.submit(read, number, file) for number, file in enumerate(files)]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            is_stopped.set()
    failures = [error for future in futures if (error := future.exception()) is not None]
    # The failure that stopped the others comes before theirs.
    for error in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise error
    return tuple(future.result() for future in futures)


class _Stopped(Exception):
    """Another file's failure, or an interrupt, ended the conversion."""


@cache
def check_where(where: str) -> None:
    """Raise UsageError for an expression that DuckDB cannot apply to events."""
    if where:
        with duckdb.connect() as connection:
            _keep_wanted(connection, SCHEMA.empty_table(), where)


def _keep_wanted(connection: duckdb.DuckDBPyConnection, events: Any, where: str) -> Any:
    """The events for which an expression holds, in their order."""
    table = pa.Table.from_batches([events]) if isinstance(events, pa.RecordBatch) else events
    try:
        verdicts = connection.from_arrow(table).project(f"coalesce(({where})::BOOLEAN, false) AS wanted")
        return events.filter(verdicts.to_arrow_table()["wanted"].combine_chunks())
    except duckdb.Error as error:
        raise UsageError(
            str(error).strip().partition("\n")[0],
            where=f"--where {where}",
            fix="Write SQL over columns of events.",
        ) from error


class GatheredEvents:
    """Batches of several files, from several threads, for DuckDB: in memory, or in parts on disk if many."""

    def __init__(self, scratch: Path, most_in_memory: int = _MEMORY_EVENTS) -> None:
        self._scratch = scratch
        self._most_in_memory = most_in_memory
        self._lock = Lock()
        self._pending: list[pa.Table] = []
        self._num_pending = self._num_parts = 0
        self._num_of_file: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(self._num_of_file.values())

    @property
    def has_parts(self) -> bool:
        """Whether there were more events than are kept in memory."""
        return self._num_parts > 0

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        """Add events of the file of this number, in the order of its lines."""
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
        """A query for all events in the order of time."""
        relation = f"read_parquet({sql_literal(str(self._scratch / 'part-*.parquet'))})"
        if self.has_parts:
            self._write_part()
        else:
            empty = pa.schema([*SCHEMA, ("file_number", pa.int32()), ("line", pa.int64())]).empty_table()
            # Dictionaries of batches differ, so each batch is a chunk.
            connection.register(
                "penstock_gathered", pa.concat_tables(self._pending) if self._pending else empty
            )
            relation = "penstock_gathered"
        connection.execute("SET temp_directory = ?", [str(self._scratch)])
        return f"SELECT {COLUMNS_SQL} FROM {relation} ORDER BY ts_us, file_number, line"

    def _write_part(self) -> None:
        if self._pending:
            part = self._scratch / f"part-{self._num_parts:05d}.parquet"
            pq.write_table(pa.concat_tables(self._pending).unify_dictionaries(), part, compression="lz4")
            self._pending, self._num_pending = [], 0
            self._num_parts += 1


def write_table(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    path: Path,
    facts: EventTableFacts,
    compression: str = "zstd",
) -> None:
    """Write the events of a query, in its order, as a table with these facts."""
    document = {
        "version": _VERSION,
        "where": facts.where,
        "sources": [asdict(source) for source in facts.sources],
        "accounts": [account.document() for account in facts.accounts],
    }
    connection.execute("SET memory_limit = ?", [_SORT_MEMORY])
    connection.execute(
        f"COPY ({query}) TO {sql_literal(str(path))} (FORMAT parquet, COMPRESSION {compression},"
        f" ROW_GROUP_SIZE 131072, KV_METADATA {{{sql_literal(_KEY)}: $1}})",
        [json.dumps(document)],
    )
    connection.execute("RESET memory_limit")


def check_target(target: Path, files: Sequence[TraceFile]) -> None:
    """Raise UsageError unless a table of these files may be written to `target`."""
    refuse_overwriting(
        target, (file.path for file in files), kind="a Penstock event table", is_kind=_is_table
    )


def refuse_facts(facts: EventTableFacts, target: Path, *, strict: bool) -> None:
    """Raise TraceDamaged if a table of these facts must not be written to `target`."""
    if strict:
        refuse_damaged(facts.accounts)
    if target.exists():
        refuse_lost(facts.accounts)


def _is_table(path: Path) -> bool:
    """Return whether a file is an event table, of whatever version."""
    try:
        return _KEY.encode() in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowInvalid, OSError):
        return False


def read_facts(path: Path) -> EventTableFacts | None:
    """The facts of a table; None if the file is not a Parquet file."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return None
    if _KEY.encode() not in metadata:
        raise UsageError(
            "This Parquet file is not an event table",
            where=str(path),
            fix="Create one with penstock trace load.",
        )
    document = json.loads(metadata[_KEY.encode()])
    if document["version"] not in _READABLE:
        raise UsageError(
            f"Another version of Penstock wrote this table (format {document['version']}, not {_VERSION})",
            where=str(path),
            fix="Create it again with penstock trace load.",
        )
    return EventTableFacts(
        sources=tuple(SourceFile(**source) for source in document["sources"]),
        accounts=tuple(FileAccount.from_document(account) for account in document["accounts"]),
        where=document["where"],
    )


@contextmanager
def publishing(target: Path) -> Iterator[tuple[Path, Path]]:
    """A file to write to, which becomes `target` when the block ends, and a folder beside it to work in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A killed conversion into the same table leaves its folder.
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*"):
        owner = leftover.name.removeprefix(f".{target.name}.").partition(".")[0]
        if owner.isdecimal() and leftover.is_dir() and not pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)
    with TemporaryDirectory(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent.absolute()) as folder:
        draft = Path(folder) / "table"
        yield draft, Path(folder)
        replace_durably(draft, target)


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
    return convert([file], target, progress=Progress(), where=where, threads=1)


logger = logging.getLogger(__name__)


APART_US: Final = 30 * 86_400 * 1_000_000
"""Files of one run that are further apart than this were not recorded by clocks that agree."""

_YEAR_US: Final = 31_556_952 * 1_000_000
_PLAUSIBLE_US: Final = (30 * _YEAR_US, 130 * _YEAR_US)
"""From 2000 to 2100."""


def find_clock_mismatches(accounts: Sequence[FileAccount]) -> list[str]:
    """Files whose times cannot be right, alone or beside each other; one sentence each."""
    timed = sorted((account for account in accounts if account.first_us is not None), key=_first)
    return [*_find_wrong_units(timed), *_find_gaps(timed), *_find_copies(timed)]


def _first(account: FileAccount) -> int:
    return account.first_us or 0


def _find_wrong_units(timed: Sequence[FileAccount]) -> Iterator[str]:
    for unit, ratio in (("nanoseconds", 1000), ("milliseconds", 1 / 1000), ("seconds", 1 / 1_000_000)):
        wrong = [account for account in timed if _is_in_unit(account, ratio)]
        if wrong:
            yield (
                f"Times of {_name(wrong)} look like {unit} that were read as microseconds (the first is of"
                f" {_date(_first(wrong[0]))}): durations are wrong, too. A line of metadata time_metric tells"
                " DFTracer's unit"
            )


def _is_in_unit(account: FileAccount, ratio: float) -> bool:
    """Whether a first time is no date in our years, but one in this unit.

    Documents of Chrome often count from the start of the machine, so that small times are no mistake there.
    """
    if ratio < 1 and account.dialect != "json lines":
        return False
    low_us, high_us = _PLAUSIBLE_US
    first_us = _first(account)
    return not low_us <= first_us < high_us and low_us <= first_us / ratio < high_us


def _find_gaps(timed: Sequence[FileAccount]) -> Iterator[str]:
    groups: list[list[FileAccount]] = []
    last_us = 0
    for account in timed:
        if not groups or _first(account) - last_us > APART_US:
            groups.append([])
        groups[-1].append(account)
        last_us = max(last_us, account.last_us or 0)
    if len(groups) > 1:
        told = "; ".join(f"{_name(group)} from {_date(_first(group[0]))} on" for group in groups)
        yield (
            f"The clocks or units of these files do not agree, so spans, timelines and overlaps over all of"
            f" them are wrong: {told}"
        )


def _find_copies(timed: Sequence[FileAccount]) -> Iterator[str]:
    """Files whose events seem to be the same, so that each question counts them several times."""
    alike: dict[Hashable, list[FileAccount]] = {}
    for account in timed:
        num_events = account.events + account.salvaged
        if num_events < 2 or _first(account) < _PLAUSIBLE_US[0]:
            # Many times since the start of a job begin with nought.
            continue
        who = account.dialect, _first(account), frozenset(account.hosts), frozenset(account.ranks)
        # A copy that was cut ends earlier: where ranks are known, the first microsecond is enough.
        rest = () if account.ranks else (account.last_us, num_events)
        alike.setdefault((*who, *rest), []).append(account)
    for copies in alike.values():
        if len(copies) > 1:
            yield (
                f"{_name(copies)} begin in the same microsecond and do not differ in host or rank: if they"
                " are copies, their events count several times"
            )


def _name(accounts: Sequence[FileAccount]) -> str:
    """The first files of several, with their hosts."""
    names = []
    for account in accounts[:3]:
        hosts = ", ".join(sorted(account.hosts)[:3])
        names.append(f"{account.file} (host {hosts})" if hosts else account.file)
    more = f" and {len(accounts) - 3} more" if len(accounts) > 3 else ""
    return ", ".join(names) + more


def _date(time_us: int) -> str:
    year = 1970 + time_us // _YEAR_US
    if not 1 <= year <= 9998:
        return f"the year {year:,}"
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M UTC")
