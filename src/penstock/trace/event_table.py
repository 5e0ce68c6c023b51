"""The events table: trace files converted once to one Parquet file in order of time, which any tool opens.

    files, each on a thread -> batches -> `event_store`: sorted over all files -> row groups -> published

`convert` shows the whole way. Row groups have statistics of all numbers. Invariants: a table is complete or
absent, whenever the process dies; it carries its sources and their accounts, so questions to it know what was
lost and whether it is out of date.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import UsageError
from penstock.progress import Silent
from penstock.storage.files.durable import replace_durably
from penstock.storage.process_id import pid_exists
from penstock.trace.event_schema import ALL_COLUMNS, FileAccount, refuse_damaged, refuse_lost
from penstock.trace.event_store import TABLE_SCHEMA, EventStore, columns_to_read
from penstock.trace.reading.event_batch import BATCH_SCHEMA, TEXT_COLUMNS
from penstock.trace.reading.event_filter import ALL_EVENTS, EventFilter
from penstock.trace.reading.trace_file import TraceFile, read_trace_file
from penstock.trace.stored_sums import SumsToStore

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
"""More would wait for the one that numbers texts."""
_KEY: Final = b"penstock.trace"
_VERSION: Final = 2
_DICTIONARIES: Final = [
    "op", "name", "cat", "host", "path", "run", "file", "pid", "tid", "rank", "args", "ret", "size_bytes",
    "epoch", "step", "kind_id",
]  # fmt: skip
_NUMBERS: Final = [field.name for field in TABLE_SCHEMA if pa.types.is_integer(field.type)]
"""Columns whose least and greatest value each row group has; to find those of texts takes as long as to
write them."""
_DELTAS: Final = dict.fromkeys(("ts_us", "dur_us", "end_us", "offset", "path_id"), "DELTA_BINARY_PACKED")


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
    threads: int = 0,
) -> EventTableFacts:
    """Make the table `target` of these files, replacing an older one in one step; returns its facts.

    Files are read by `threads` at once (0: one per core, at most four). With `strict`, damaged files are an
    error, and there is no table. An older table is not replaced by one without any events.
    """
    check_target(target, files)
    sources = tuple(SourceFile.from_file(file) for file in files)
    with _publish(target) as (partial, scratch):
        store = EventStore(ALL_COLUMNS, scratch)
        accounts = read_events(files, store, progress=progress, event_filter=event_filter, threads=threads)
        _refuse(accounts, target, strict=strict)
        facts = EventTableFacts(sources=sources, accounts=accounts, where=event_filter.where)
        write_events(store, partial, facts, progress)
    return facts


def read_events(
    files: Sequence[TraceFile],
    store: EventStore,
    *,
    progress: Progress,
    event_filter: EventFilter = ALL_EVENTS,
    columns: frozenset[str] = ALL_COLUMNS,
    threads: int = 0,
) -> tuple[FileAccount, ...]:
    """Read files side by side into `store`; returns their accounts, in the files' order."""
    progress.begin("reading traces", float(sum(file.path.stat().st_size for file in files)))
    num_threads = max(1, min(threads or min(len(os.sched_getaffinity(0)), _MOST_THREADS), len(files)))
    stopped = Event()

    def advance(num_bytes: int) -> None:
        if stopped.is_set():
            raise _Stopped
        progress.advance(num_bytes)

    def read(number: int, file: TraceFile) -> FileAccount:
        reading = read_trace_file(file, advance, columns_to_read(columns))
        for batch in batch_filter.apply(reading.batches, reading.account):
            store.add(number, batch)
        return reading.account

    with event_filter.open() as batch_filter, ThreadPoolExecutor(num_threads, "trace") as pool:
        try:
            futures = [pool.submit(read, number, file) for number, file in enumerate(files)]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
    return _collect_accounts(futures)


def join_tables(
    tables: Sequence[Path], facts: Sequence[EventTableFacts], target: Path, *, strict: bool = False
) -> EventTableFacts:
    """Bring the events of several tables together in one; returns its facts."""
    joined = EventTableFacts(
        sources=tuple(source for part in facts for source in part.sources),
        accounts=tuple(account for part in facts for account in part.accounts),
        where=facts[0].where,
    )
    _refuse(joined.accounts, target, strict=strict)
    check_target(target, ())
    with _publish(target) as (partial, scratch):
        store = EventStore(ALL_COLUMNS, scratch)
        for number, table in enumerate(tables):
            with pq.ParquetFile(table, read_dictionary=list(TEXT_COLUMNS)) as source:
                for batch in source.iter_batches(columns=BATCH_SCHEMA.names):
                    store.add(number, batch.cast(BATCH_SCHEMA))
        write_events(store, partial, joined, Silent())
    return joined


def check_target(target: Path, files: Sequence[TraceFile]) -> None:
    """Raise UsageError unless a table of these files may be written to `target`."""
    refuse_overwriting(
        target, (file.path for file in files), kind="a Penstock event table", is_kind=_is_table
    )


def _refuse(accounts: Sequence[FileAccount], target: Path, *, strict: bool) -> None:
    if strict:
        refuse_damaged(accounts)
    if target.exists():
        refuse_lost(accounts)


def write_events(store: EventStore, path: Path, facts: EventTableFacts, progress: Progress) -> None:
    """Write all events of `store`, in order, as a table with these facts."""
    progress.begin("writing the table", float(len(store)))
    with pq.ParquetWriter(
        path,
        TABLE_SCHEMA,
        store_schema=False,
        use_dictionary=_DICTIONARIES,
        column_encoding=_DELTAS,
        write_statistics=_NUMBERS,
        compression="zstd",
        compression_level=1,
    ) as writer:
        # One thread sorts and names the next events while another compresses these.
        sums = SumsToStore(store.threads, store.kinds, store.paths)
        with ThreadPoolExecutor(1, "table") as pool:
            writing: Future[None] | None = None
            for table in store.tables(look=sums.add):
                if writing is not None:
                    writing.result()
                writing = pool.submit(writer.write_table, table)
                progress.advance(table.num_rows)
            if writing is not None:
                writing.result()
        writer.add_key_value_metadata({_KEY: _serialize_facts(facts).encode(), **sums.metadata()})


def _is_table(path: Path) -> bool:
    """Whether a file is an event table, of whatever version."""
    try:
        return _KEY in (pq.read_metadata(path).metadata or {})
    except (pa.ArrowInvalid, OSError):
        return False


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


def _collect_accounts(futures: Sequence[Future[FileAccount]]) -> tuple[FileAccount, ...]:
    """The accounts of all files, or the failure that stopped them."""
    failures = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise error
    return tuple(future.result() for future in futures)


class _Stopped(Exception):
    """Another file's failure, or an interrupt, ended the conversion."""


@contextmanager
def _publish(target: Path) -> Iterator[tuple[Path, Path]]:
    """A file to write to, which becomes `target` when the block ends, and a folder beside it to work in."""
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
