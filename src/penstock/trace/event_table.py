"""The events table: trace files converted once to one Parquet file in order of time, which any tool opens.

    files, each on a thread -> batches -> gathered in memory or in parts on disk -> DuckDB sorts -> published

`convert` shows the whole way. Invariants: a table is complete or absent, whenever the process dies; events at
the same time are in the order of their files, and of their lines in each; a table carries its sources and
their accounts, so questions to it know what was lost and whether it is out of date.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import UsageError
from penstock.storage.files.durable import replace_durably
from penstock.storage.process_id import pid_exists
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_schema import SCHEMA, FileAccount, refuse_damaged, refuse_lost
from penstock.trace.reading.event_batch import TraceFile
from penstock.trace.reading.trace_file import read_trace_file

if TYPE_CHECKING:
    from penstock.progress import Progress


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
