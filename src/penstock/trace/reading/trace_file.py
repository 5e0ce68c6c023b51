"""One trace file of any dialect as batches of events and an account: what tables and their workers call.

    bytes -> decompressed pieces -> dialect, by the first bytes -> chunks of lines -> events, batch by batch

To add a dialect: a member of `Dialect`, its first bytes in `detect_dialect`, a reader in `_read_dialect`.
Invariant: after the last batch the account is complete, and what is wrong with the file stands in it; only a
file that cannot be read at all is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.trace.arrow_functions import find_unique
from penstock.trace.capture.trace_writer import read_event_count
from penstock.trace.event_schema import ALL_COLUMNS, FileAccount
from penstock.trace.reading.chrome import ChromeDocument
from penstock.trace.reading.chunks import read_pieces, split_chunks
from penstock.trace.reading.content_guess import RECORDER, UTF8_MARK, guess_content, is_of_recorder
from penstock.trace.reading.darshan_dxt import MARK, DarshanDxt
from penstock.trace.reading.darshan_log import DarshanLog, is_darshan_log
from penstock.trace.reading.event_batch import FEW_ROWS, EventOrigin, read_lines
from penstock.trace.reading.hash_names import find_name_in_siblings
from penstock.trace.reading.json_lines import QUERY_LINES, JsonLines
from penstock.trace.reading.strace import FIRST_LINE, open_strace

if TYPE_CHECKING:
    import pyarrow as pa


class Dialect(StrEnum):
    """The forms of traces that can be read."""

    JSON_LINES = "json lines"
    CHROME = "chrome"
    STRACE = "strace"
    DARSHAN = "darshan dxt"
    DARSHAN_LOG = "darshan log"


_HEAD_BYTES: Final = 1 << 16
_DOCUMENT: Final = re.compile(
    rb'\s*\{\s*(?:\n|"(?:schemaVersion|displayTimeUnit|otherData|deviceProperties|metadata)")'
)
"""How an object begins that is no line: on a line of its own, or with a key that no event has."""
_TRACE_EVENTS: Final = re.compile(rb'"traceEvents"\s*:')


def detect_dialect(head: bytes) -> Dialect:
    """The dialect of a file that begins with `head`; anything unknown is JSON lines, dropped one by one."""
    head = head[:_HEAD_BYTES]
    if is_darshan_log(head):
        return Dialect.DARSHAN_LOG
    if FIRST_LINE.match(head):
        return Dialect.STRACE
    if MARK.search(head[:4096]):
        return Dialect.DARSHAN
    if _is_document(head) or _is_one_array(head):
        return Dialect.CHROME
    return Dialect.JSON_LINES


def _is_document(head: bytes) -> bool:
    return head.lstrip().startswith(b"{") and bool(_DOCUMENT.match(head) or _TRACE_EVENTS.search(head))


def _is_one_array(head: bytes) -> bool:
    """Whether a line does not hold one event: it holds several, or a part of one."""
    bare = head.lstrip()
    if not bare.startswith(b"["):
        return False
    line = bare[1:].lstrip().partition(b"\n")[0].rstrip(b", \r]")
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return b"},{" in line or b"}, {" in line or b'"' not in line or line.endswith((b"{", b'"', b":"))
    return False


RANK_PATTERN = r"(?:^|[^a-z])(?:trace-|rank[-_.]?)(\d{1,9})(?![0-9a-z])"
"""Finds the rank in a file's name: `trace-3-of-16.pfw`, `run_rank3.pfw`; not digits of a longer word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file to read: its path, its name in tables, its run, and how its file name gives the rank."""

    path: Path
    name: str = ""
    run: str = ""
    rank_pattern: str = RANK_PATTERN

    @property
    def origin(self) -> EventOrigin:
        """What all its events have in common."""
        match = re.search(self.rank_pattern, self.path.name, re.IGNORECASE)
        return EventOrigin(self.run, self.name or self.path.name, int(match[1]) if match else None)


@dataclass(slots=True)
class TraceReading:
    """A file that is being read: iterate over `batches`, then look at `account`."""

    account: FileAccount
    batches: Iterator[pa.RecordBatch] = field(repr=False)


def read_trace_file(
    file: TraceFile,
    advance: Callable[[int], None] = lambda _: None,
    columns: frozenset[str] = ALL_COLUMNS,
    query_lines: int = QUERY_LINES,
) -> TraceReading:
    """Begin to read these columns; `advance` is called with bytes taken from disk.

    OSError if the file cannot be read. Dialects that Python parses give all columns. Fewer lines than
    `query_lines` are parsed by Python, which changes nothing but the speed.
    """
    account = FileAccount(file=file.name or file.path.name, size_bytes=file.path.stat().st_size)
    return TraceReading(account, _read_batches(file, account, advance, columns, query_lines))


def _read_batches(
    file: TraceFile,
    account: FileAccount,
    advance: Callable[[int], None],
    columns: frozenset[str],
    query_lines: int,
) -> Iterator[pa.RecordBatch]:
    # Read before the trace: what a program that still runs records meanwhile must not count as missing.
    account.announced_events = read_event_count(file.path)
    pieces = read_pieces(file.path, account.faults.append, advance)
    head = next(pieces, b"").removeprefix(UTF8_MARK)
    dialect = detect_dialect(head)
    account.dialect = dialect.value
    if dialect is Dialect.JSON_LINES:
        find_elsewhere = partial(find_name_in_siblings, file.path)
        json_lines = JsonLines(file.origin, account, columns, query_lines, find_elsewhere)
        batches = json_lines.read(split_chunks(chain([head], pieces)))
    else:
        batches = _read_dialect(dialect, file, head, chain([head], pieces), account)
    for batch in batches:
        _note_hosts_and_ranks(batch, account)
        _note_times(batch, account)
        yield batch
    if not head:
        account.notes.append("it is empty")
    # Damaged JSON explains itself, line by line; Darshan's text without segments is known.
    is_damaged = account.dropped or (account.faults and dialect is not Dialect.DARSHAN)
    if is_damaged and account.is_without_events and head and not head.lstrip().startswith((b"{", b"[")):
        seems = RECORDER if is_of_recorder(file.path.name) else guess_content(head)
        account.faults.append(f"not one event: it seems to be {seems}")


def _read_dialect(
    dialect: Dialect, file: TraceFile, head: bytes, pieces: Iterable[bytes], account: FileAccount
) -> Iterator[pa.RecordBatch]:
    """The events of a dialect that Python parses."""
    if dialect is Dialect.DARSHAN_LOG:
        return DarshanLog(file.path, file.origin, account).read()
    if dialect is Dialect.CHROME:
        return ChromeDocument(file.origin, account).read(pieces)
    parser = open_strace(file.path, head) if dialect is Dialect.STRACE else DarshanDxt()
    return read_lines(split_chunks(pieces), parser, file.origin, account)


def _note_hosts_and_ranks(batch: pa.RecordBatch, account: FileAccount) -> None:
    names = batch.schema.names
    if "host" in names:
        account.hosts |= _distinct(batch["host"])
    if "rank" in names:
        account.ranks |= _distinct(batch["rank"])


def _distinct(column: pa.Array) -> set[Any]:
    """The values of a column, without those that are missing."""
    values = column.to_pylist() if len(column) <= FEW_ROWS else find_unique(column)
    return {value for value in values if value is not None}


def _note_times(batch: pa.RecordBatch, account: FileAccount) -> None:
    if batch.num_rows and "ts_us" in batch.schema.names:
        times = batch.column("ts_us").to_numpy()
        firsts = [time for time in (account.first_us, int(np.min(times))) if time is not None]
        lasts = [time for time in (account.last_us, int(np.max(times))) if time is not None]
        account.first_us, account.last_us = min(firsts), max(lasts)
