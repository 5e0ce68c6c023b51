"""The events table: trace files converted once to one sorted Parquet file, which any tool opens.

Place in the flow: reading -> this -> questions. Rows lie in the order of files and, within each, of time; row
groups have statistics of all columns. Invariants: a table is whole or absent, whenever the process dies; it
carries its sources and their accounts, so that loss and age are known to whoever asks it.
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
from functools import partial as with_fixed
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import UsageError
from penstock.storage.files.durable import replace_durably
from penstock.storage.process_id import pid_exists
from penstock.trace.event import FileAccount, refuse_damaged
from penstock.trace.reading.columns import BATCH_SCHEMA
from penstock.trace.reading.files import Reading, TraceFile, read_selected
from penstock.trace.reading.selection import EVERYTHING, Selection
from penstock.trace.sorting import sorted_tables

if TYPE_CHECKING:
    from penstock.progress import Progress

ROW_GROUP_ROWS: Final = 1 << 17
SORTED_ROWS: Final = 1 << 19
"""Rows of a file that are sorted in memory; larger files are sorted in runs, which are merged from disk."""

_MOST_THREADS: Final = 4
"""More would wait for the one that writes, and each holds up to `SORTED_ROWS` rows."""
_KEY: Final = b"penstock.trace"
_VERSION: Final = 1
_DICTIONARIES: Final = [
    "op", "name", "cat", "host", "path", "run", "file", "pid", "tid", "rank", "args", "ret", "size_bytes",
    "epoch", "step",
]  # fmt: skip
_DELTAS: Final = dict.fromkeys(("ts_us", "dur_us", "end_us", "offset"), "DELTA_BINARY_PACKED")


class Form(Enum):
    """What a table is made for."""

    KEPT = "kept"
    """Sorted by time within each file, and packed."""
    PASSING = "passing"
    """For the questions of the moment: in the order of lines, packed lightly."""


class Read(Protocol):
    """Begins to read a file."""

    def __call__(self, file: TraceFile, *, advance: Callable[[int], None]) -> Reading:
        """`advance` hears of the bytes that are taken from disk."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trace file as it was when the table was made."""

    path: str
    name: str
    run: str
    rank_pattern: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: TraceFile) -> Source:
        """The file as it is now."""
        found = file.path.stat()
        path = str(file.path.absolute())
        return cls(path, file.name, file.run, file.rank_pattern, found.st_size, found.st_mtime_ns)

    @property
    def file(self) -> TraceFile:
        """What to read to get the same events again."""
        return TraceFile(path=Path(self.path), name=self.name, run=self.run, rank_pattern=self.rank_pattern)

    def is_older_than_its_file(self) -> bool:
        """Whether the file has changed since; a file that is gone has not."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - text in the table, used as it stands
        except FileNotFoundError:
            return False
        return (found.st_size, found.st_mtime_ns) != (self.size_bytes, self.mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFacts:
    """What a table says of itself."""

    sources: tuple[Source, ...]
    accounts: tuple[FileAccount, ...]
    where: str = ""

    def is_stale(self) -> bool:
        """Whether a source has changed since the table was made."""
        return any(source.is_older_than_its_file() for source in self.sources)

    def can_be_made_again(self) -> bool:
        """Whether all sources are still there."""
        return all(Path(source.path).exists() for source in self.sources)


def convert(
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    selection: Selection = EVERYTHING,
    strict: bool = False,
    form: Form = Form.KEPT,
    threads: int = 0,
) -> TableFacts:
    """Make the table `target` of these files, replacing an older one in one step; what it says of itself.

    Files are read by `threads` at once (0: one a core, at most four) and written in their order. With
    `strict`, damaged files are an error, and there is no table.
    """
    sources = tuple(Source.of(file) for file in files)
    progress.begin("reading traces", float(sum(source.size_bytes for source in sources)))
    num_threads = max(1, min(threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS), len(files)))
    with (
        selection.judge() as judge,
        _publishing(target) as (partial, scratch),
        _writer(partial, form) as writer,
    ):
        turns = _Turns(
            writer, scratch, progress, with_fixed(read_selected, selection=selection, judge=judge), form
        )
        with ThreadPoolExecutor(num_threads, "trace") as pool:
            try:
                futures = [pool.submit(turns.convert, number, file) for number, file in enumerate(files)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                turns.stop()
        accounts = _results(futures)
        if strict:
            refuse_damaged(accounts)
        facts = TableFacts(sources=sources, accounts=accounts, where=selection.where)
        writer.add_key_value_metadata({_KEY: _facts_text(facts)})
    return facts


def join(
    tables: Sequence[Path], facts: Sequence[TableFacts], target: Path, *, strict: bool = False
) -> TableFacts:
    """One table of several, in their order, which stay; what it says of itself."""
    joined = TableFacts(
        sources=tuple(source for each in facts for source in each.sources),
        accounts=tuple(account for each in facts for account in each.accounts),
        where=facts[0].where,
    )
    if strict:
        refuse_damaged(joined.accounts)
    with _publishing(target) as (partial, _), _writer(partial, Form.KEPT) as writer:
        for table in tables:
            with pq.ParquetFile(table) as part:
                for number in range(part.num_row_groups):
                    writer.write_table(_encoded(part.read_row_group(number)), ROW_GROUP_ROWS)
        writer.add_key_value_metadata({_KEY: _facts_text(joined)})
    return joined


def read_facts(path: Path) -> TableFacts | None:
    """What a table says of itself; None if the file is no Parquet file."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return None
    if _KEY not in metadata:
        raise UsageError(
            "This Parquet file is no table of events",
            where=str(path),
            fix="Make one with penstock trace load.",
        )
    document = json.loads(metadata[_KEY])
    if document["version"] != _VERSION:
        raise UsageError(
            f"Another version of Penstock made this table (form {document['version']}, not {_VERSION})",
            where=str(path),
            fix="Make it again with penstock trace load.",
        )
    return TableFacts(
        sources=tuple(Source(**each) for each in document["sources"]),
        accounts=tuple(FileAccount.of_document(each) for each in document["accounts"]),
        where=document["where"],
    )


def _facts_text(facts: TableFacts) -> str:
    return json.dumps(
        {
            "version": _VERSION,
            "where": facts.where,
            "sources": [asdict(source) for source in facts.sources],
            "accounts": [account.document() for account in facts.accounts],
        }
    )


def _writer(path: Path, form: Form) -> pq.ParquetWriter:
    packing = {"compression": "zstd", "compression_level": 1} if form is Form.KEPT else {"compression": "lz4"}
    return pq.ParquetWriter(
        path,
        BATCH_SCHEMA,
        store_schema=False,
        use_dictionary=_DICTIONARIES,
        column_encoding=_DELTAS,
        **packing,
    )


def _results(futures: Sequence[Future[FileAccount]]) -> tuple[FileAccount, ...]:
    """The accounts of all files, or the failure that stopped them."""
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda each: isinstance(each, _Stopped)):
        raise error
    return tuple(future.result() for future in futures)


class _Stopped(Exception):
    """Another file's failure, or an interrupt, ended the conversion."""


class _Turns:
    """Files that are read at once and written one after another."""

    def __init__(
        self, writer: pq.ParquetWriter, scratch: Path, progress: Progress, read: Read, form: Form
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
        try:
            reading = self._read(file, advance=self._advance)
            for table in self._tables(reading.batches, scratch):
                self._await(number)
                self._writer.write_table(_encoded(table), ROW_GROUP_ROWS)
            self._await(number)
            is_done = True
        finally:
            if not is_done:
                self.stop()
        with self._changed:
            self._turn = number + 1
            self._changed.notify_all()
        return reading.account

    def _tables(self, batches: Iterator[pa.RecordBatch], scratch: Path) -> Iterator[pa.Table]:
        if self._form is Form.KEPT:
            yield from sorted_tables(batches, scratch, SORTED_ROWS)
            return
        for batch in batches:
            yield pa.Table.from_batches([batch])

    def stop(self) -> None:
        """Let nobody go on."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _advance(self, num_bytes: int) -> None:
        if self._is_stopped:
            raise _Stopped
        self._progress.advance(num_bytes)

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._turn == number)
            if self._is_stopped:
                raise _Stopped


def _encoded(table: pa.Table) -> pa.Table:
    """Texts as dictionaries, which the writer was told to expect."""
    for number, (field, wanted) in enumerate(zip(table.schema, BATCH_SCHEMA, strict=True)):
        if field.type != wanted.type:
            table = table.set_column(number, wanted, table.column(number).dictionary_encode())
    return table.cast(BATCH_SCHEMA)


@contextmanager
def _publishing(target: Path) -> Iterator[tuple[Path, Path]]:
    """A file to write to, which becomes `target` when the block ends, and a folder beside it to work in."""
    if target.exists() and (target.is_dir() or read_facts(target) is None):
        raise UsageError(
            "There is something else than a table of events", where=str(target), fix="Name another file."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target)
    with TemporaryDirectory(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent) as folder:
        partial = Path(folder) / "table"
        yield partial, Path(folder)
        replace_durably(partial, target)


def _sweep(target: Path) -> None:
    """Remove what killed conversions into the same table left behind."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
        owner = left.name.removeprefix(f".{target.name}.").partition(".")[0]
        if owner.isdecimal() and left.is_dir() and not pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
