"""The events table: trace files converted once to one sorted Parquet file, which any tool opens.

    files, each on a thread -> batches -> sorted by time -> written in the order of files -> published

`convert` shows the whole way. Rows are in the order of files and, within each file, of time; row groups have
statistics of all columns. Invariants: a table is complete or absent, whenever the process dies; it carries
its sources and their accounts, so questions to it know what was lost and whether it is out of date.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial as partial_function
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition
from typing import TYPE_CHECKING, Any, Final, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import UsageError
from penstock.storage.files.durable import replace_durably
from penstock.storage.process_id import pid_exists
from penstock.trace.event_schema import FileAccount, refuse_damaged
from penstock.trace.reading.event_batch import BATCH_SCHEMA
from penstock.trace.reading.event_filter import ALL_EVENTS, EventFilter
from penstock.trace.reading.native import needs_compiling
from penstock.trace.reading.trace_file import TraceFile, TraceReading, are_large, read_matching_events

if TYPE_CHECKING:
    from penstock.progress import Progress


ROW_GROUP_ROWS: Final = 1 << 17
SORTED_ROWS: Final = 1 << 19
"""Rows of a file that are sorted in memory; larger files are sorted in runs, which are merged from disk."""

_MERGE_MEMORY: Final = "200MB"
"""What DuckDB may use to merge runs."""
_MOST_THREADS: Final = 4
"""More would wait for the one that writes, and each holds up to `SORTED_ROWS` rows."""
_KEY: Final = b"penstock.trace"
_VERSION: Final = 1
_DICTIONARIES: Final = [
    "op", "name", "cat", "host", "path", "run", "file", "pid", "tid", "rank", "args", "ret", "size_bytes",
    "epoch", "step",
]  # fmt: skip
_DELTAS: Final = dict.fromkeys(("ts_us", "dur_us", "end_us", "offset"), "DELTA_BINARY_PACKED")


class TableForm(Enum):
    """What a table is made for."""

    PERMANENT = "permanent"
    """Sorted by time within each file, and well compressed."""
    TEMPORARY = "temporary"
    """For one command: in the order of lines, lightly compressed."""


class OpenReading(Protocol):
    """Begins to read a file."""

    def __call__(self, file: TraceFile, *, advance: Callable[[int], None]) -> TraceReading:
        """`advance` is called with the bytes that are taken from disk."""


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
    event_filter: EventFilter = ALL_EVENTS,
    strict: bool = False,
    form: TableForm = TableForm.PERMANENT,
    threads: int = 0,
) -> EventTableFacts:
    """Make the table `target` of these files, replacing an older one in one step; returns its facts.

    Files are read by `threads` at once (0: one per core, at most four) and written in their order. With
    `strict`, damaged files are an error, and there is no table.
    """
    sources = tuple(SourceFile.from_file(file) for file in files)
    is_large = are_large(files)
    if is_large and needs_compiling():
        progress.begin("compiling the trace scanner, once for this machine", 1)
    progress.begin("reading traces", float(sum(source.size_bytes for source in sources)))
    num_threads = max(1, min(threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS), len(files)))
    with (
        event_filter.open() as batch_filter,
        _publish(target) as (partial, scratch),
        _open_writer(partial, form) as writer,
    ):
        read = partial_function(
            read_matching_events, event_filter=event_filter, batch_filter=batch_filter, is_large=is_large
        )
        ordered = _OrderedWriter(writer, scratch, progress, read, form)
        with ThreadPoolExecutor(num_threads, "trace") as pool:
            try:
                futures = [pool.submit(ordered.convert, number, file) for number, file in enumerate(files)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                ordered.stop()
        accounts = _collect_accounts(futures)
        if strict:
            refuse_damaged(accounts)
        facts = EventTableFacts(sources=sources, accounts=accounts, where=event_filter.where)
        writer.add_key_value_metadata({_KEY: _serialize_facts(facts)})
    return facts


def join_tables(
    tables: Sequence[Path], facts: Sequence[EventTableFacts], target: Path, *, strict: bool = False
) -> EventTableFacts:
    """Copy several tables, in their order, into one; returns its facts."""
    joined = EventTableFacts(
        sources=tuple(source for part in facts for source in part.sources),
        accounts=tuple(account for part in facts for account in part.accounts),
        where=facts[0].where,
    )
    if strict:
        refuse_damaged(joined.accounts)
    with _publish(target) as (partial, _), _open_writer(partial, TableForm.PERMANENT) as writer:
        for table in tables:
            with pq.ParquetFile(table) as source:
                for number in range(source.num_row_groups):
                    writer.write_table(_encode_texts(source.read_row_group(number)), ROW_GROUP_ROWS)
        writer.add_key_value_metadata({_KEY: _serialize_facts(joined)})
    return joined


def read_facts(path: Path) -> EventTableFacts | None:
    """The facts of a table; None if the file is not a Parquet file."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return None
    if _KEY not in metadata:
        raise UsageError(
            "This Parquet file is not an event table",
            where=str(path),
            fix="Create one with penstock trace load.",
        )
    document = json.loads(metadata[_KEY])
    if document["version"] != _VERSION:
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


def _serialize_facts(facts: EventTableFacts) -> str:
    return json.dumps(
        {
            "version": _VERSION,
            "where": facts.where,
            "sources": [asdict(source) for source in facts.sources],
            "accounts": [account.document() for account in facts.accounts],
        }
    )


def _open_writer(path: Path, form: TableForm) -> pq.ParquetWriter:
    packing = (
        {"compression": "zstd", "compression_level": 1}
        if form is TableForm.PERMANENT
        else {"compression": "lz4"}
    )
    return pq.ParquetWriter(
        path,
        BATCH_SCHEMA,
        store_schema=False,
        use_dictionary=_DICTIONARIES,
        column_encoding=_DELTAS,
        **packing,
    )


def _collect_accounts(futures: Sequence[Future[FileAccount]]) -> tuple[FileAccount, ...]:
    """The accounts of all files, or the failure that stopped them."""
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise error
    return tuple(future.result() for future in futures)


class _Stopped(Exception):
    """Another file's failure, or an interrupt, ended the conversion."""


class _OrderedWriter:
    """Files that are read side by side and written one after another."""

    def __init__(
        self, writer: pq.ParquetWriter, scratch: Path, progress: Progress, read: OpenReading, form: TableForm
    ) -> None:
        self._writer = writer
        self._scratch = scratch
        self._progress = progress
        self._read = read
        self._form = form
        self._turn = 0
        self._is_stopped = False
        self._changed = Condition()

    def convert(self, number: int, file: TraceFile) -> FileAccount:
        """Read one file, and write its events when all files before it are written."""
        scratch = self._scratch / str(number)
        scratch.mkdir()
        is_done = False
        # Others wait for this file's turn: if anything ends it early, even an interrupt, they must wake up.
        try:
            reading = self._read(file, advance=self._advance)
            for table in self._sort(reading.batches, scratch):
                self._wait_for_turn(number)
                self._writer.write_table(_encode_texts(table), ROW_GROUP_ROWS)
            self._wait_for_turn(number)
            is_done = True
        finally:
            if not is_done:
                self.stop()
        with self._changed:
            self._turn = number + 1
            self._changed.notify_all()
        return reading.account

    def _sort(self, batches: Iterator[pa.RecordBatch], scratch: Path) -> Iterator[pa.Table]:
        if self._form is TableForm.PERMANENT:
            yield from sorted_tables(batches, scratch, SORTED_ROWS)
            return
        for batch in batches:
            yield pa.Table.from_batches([batch])

    def stop(self) -> None:
        """Stop all files; those still being read raise `_Stopped`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _advance(self, num_bytes: int) -> None:
        if self._is_stopped:
            raise _Stopped
        self._progress.advance(num_bytes)

    def _wait_for_turn(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._turn == number)
            if self._is_stopped:
                raise _Stopped


def _encode_texts(table: pa.Table) -> pa.Table:
    """Dictionary-encode texts, as the writer's schema has them."""
    for number, (field, expected) in enumerate(zip(table.schema, BATCH_SCHEMA, strict=True)):
        if field.type != expected.type:
            table = table.set_column(number, expected, table.column(number).dictionary_encode())
    return table.cast(BATCH_SCHEMA)


@contextmanager
def _publish(target: Path) -> Iterator[tuple[Path, Path]]:
    """A file to write to, which becomes `target` when the block ends, and a folder beside it to work in."""
    if target.exists() and (target.is_dir() or read_facts(target) is None):
        raise UsageError(
            "File exists and is not a Penstock event table", where=str(target), fix="Name another file."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    with TemporaryDirectory(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent) as folder:
        partial = Path(folder) / "table"
        yield partial, Path(folder)
        replace_durably(partial, target)


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of killed conversions into the same table."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*"):
        owner = leftover.name.removeprefix(f".{target.name}.").partition(".")[0]
        if owner.isdecimal() and leftover.is_dir() and not pid_exists(int(owner)):
            shutil.rmtree(leftover, ignore_errors=True)


def sorted_tables(batches: Iterator[pa.RecordBatch], scratch: Path, limit: int) -> Iterator[pa.Table]:
    """The events of one file in the order of time, in tables of about `limit` rows.

    No more than `limit` rows are in memory at once: what fits is sorted there, a larger file is sorted in
    runs on disk, which DuckDB merges. Events at the same time keep the order of their lines.
    """
    runs: list[Path] = []
    pending: list[pa.RecordBatch] = []
    num_rows, last_us = 0, None
    is_in_order = True
    for batch in chain(batches, [None]):
        if batch is not None:
            pending.append(batch)
            num_rows += batch.num_rows
        if not pending or (batch is not None and num_rows < limit):
            continue
        table = _sort(pending)
        if batch is None and not runs:
            yield table
            return
        # Most writers append as time passes: their runs need no merge.
        first_us, end_us = table["ts_us"][0].as_py(), table["ts_us"][-1].as_py()
        is_in_order &= last_us is None or first_us >= last_us
        last_us = end_us
        runs.append(_spill(table, scratch, len(runs)))
        pending, num_rows = [], 0
    yield from _read(runs) if is_in_order else _merge(runs, scratch, limit)
    for run in runs:
        run.unlink()


def _sort(batches: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(batches)
    ts_us = table["ts_us"].to_numpy()
    if np.all(ts_us[1:] >= ts_us[:-1]):
        return table.unify_dictionaries()
    order = np.argsort(ts_us, kind="stable")
    return table.unify_dictionaries().take(pa.array(order))


def _spill(table: pa.Table, scratch: Path, number: int) -> Path:
    path = scratch / f"run-{number:05d}.parquet"
    pq.write_table(table, path, compression="lz4", store_schema=False, row_group_size=1 << 17)
    return path


def _read(runs: list[Path]) -> Iterator[pa.Table]:
    for run in runs:
        with pq.ParquetFile(run) as file:
            for batch in file.iter_batches(1 << 17):
                yield pa.Table.from_batches([batch])


def _merge(runs: list[Path], scratch: Path, limit: int) -> Iterator[pa.Table]:
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": _MERGE_MEMORY,
        "temp_directory": str(scratch),
        "threads": 1,
        "preserve_insertion_order": True,
    }
    with duckdb.connect(config=settings) as connection:
        merge_intervals: Any = connection.sql(
            "SELECT * EXCLUDE (file_row_number, filename)"
            " FROM read_parquet(?, filename = true, file_row_number = true)"
            " ORDER BY ts_us, filename, file_row_number",
            params=[[str(run) for run in runs]],
        )
        for batch in merge_intervals.to_arrow_reader(min(limit, 1 << 17)):
            yield pa.Table.from_batches([batch])
