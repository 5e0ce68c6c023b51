"""One trace file of any dialect as batches of events and an account: what tables and their workers call.

    bytes -> decompressed pieces -> dialect, by the first bytes -> chunks of lines -> events, batch by batch

To add a dialect: a member of `Dialect`, its first bytes in `detect_dialect`, a reader in `_read_batches`.
Invariant: after the last batch the account is complete, and what is wrong with the file stands in it; only a
file that cannot be read at all is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from penstock.trace.event_schema import FileAccount
from penstock.trace.reading.chrome import ChromeDocument
from penstock.trace.reading.chunks import read_event_count, read_pieces, split_chunks
from penstock.trace.reading.content_guess import (
    RECORDER,
    UTF8_MARK,
    guess_content,
    is_darshan_log,
    is_of_recorder,
)
from penstock.trace.reading.darshan_dxt import MARK, DarshanDxt
from penstock.trace.reading.event_batch import TraceFile, read_lines
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


@dataclass(slots=True)
class TraceReading:
    """A file that is being read: iterate over `batches`, then look at `account`."""

    account: FileAccount
    batches: Iterator[pa.RecordBatch] = field(repr=False)


def read_trace_file(
    file: TraceFile, advance: Callable[[int], None] = lambda _: None, query_lines: int = QUERY_LINES
) -> TraceReading:
    """Begin to read a file; `advance` is called with the number of bytes that were taken from disk.

    OSError if the file cannot be read. Fewer lines than `query_lines` are parsed by Python, which changes
    nothing but the speed.
    """
    account = FileAccount(file=file.name or file.path.name, size_bytes=file.path.stat().st_size)
    return TraceReading(account, _read_batches(file, account, advance, query_lines))


def _read_batches(
    file: TraceFile, account: FileAccount, advance: Callable[[int], None], query_lines: int
) -> Iterator[pa.RecordBatch]:
    # Read before the trace: what a program that still runs records meanwhile must not count as missing.
    account.announced_events = read_event_count(file.path)
    pieces = read_pieces(file.path, account.faults.append, advance)
    head = next(pieces, b"").removeprefix(UTF8_MARK)
    pieces = chain([head], pieces)
    dialect = detect_dialect(head)
    account.dialect = dialect.value
    match dialect:
        case Dialect.JSON_LINES:
            find_elsewhere = partial(find_name_in_siblings, file.path)
            batches = JsonLines(file, account, query_lines, find_elsewhere).read(split_chunks(pieces))
        case Dialect.CHROME:
            batches = ChromeDocument(file, account).read(pieces)
        case Dialect.STRACE:
            batches = read_lines(split_chunks(pieces), open_strace(file.path, head), file, account)
        case Dialect.DARSHAN:
            batches = read_lines(split_chunks(pieces), DarshanDxt(), file, account)
        case Dialect.DARSHAN_LOG:
            from penstock.trace.reading.darshan_log import DarshanLog  # noqa: PLC0415 - few have such logs

            batches = DarshanLog(file, account).read()
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
    # Damaged JSON explains itself, line by line; Darshan's text without segments is known.
    is_damaged = account.dropped or (account.faults and dialect is not Dialect.DARSHAN)
    if is_damaged and account.is_without_events and head and not head.lstrip().startswith((b"{", b"[")):
        seems = RECORDER if is_of_recorder(file.path.name) else guess_content(head)
        account.faults.append(f"not one event: it seems to be {seems}")
