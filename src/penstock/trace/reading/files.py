"""One trace file of any dialect as batches of events and an account: what the table and its workers call.

Place in the flow: the door of this room. Invariant: after the last batch the account is complete, and what is
wrong with the file stands in it; only a file that cannot be read at all is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.trace.capture.segments import read_tally
from penstock.trace.event import FileAccount
from penstock.trace.reading.chrome import ChromeDocument
from penstock.trace.reading.columns import Origin
from penstock.trace.reading.darshan import Darshan
from penstock.trace.reading.dialects import Dialect, detect
from penstock.trace.reading.json_lines import JsonLines
from penstock.trace.reading.needles import NO_NEEDLES
from penstock.trace.reading.pages import pages_of, read_pieces
from penstock.trace.reading.rows import read_lines
from penstock.trace.reading.strace import Strace

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.reading.needles import Needles
    from penstock.trace.reading.selection import Judge, Selection

RANK_PATTERN = r"(?:^|[^a-z])(?:trace-|rank[-_.]?)(\d{1,9})(?![0-9a-z])"
"""Where a file's name tells the rank: `trace-3-of-16.pfw`, `run_rank3.pfw`. No digits of a longer word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file to read: where it lies, how it is called, which run it belongs to, how its name tells a rank."""

    path: Path
    name: str = ""
    run: str = ""
    rank_pattern: str = RANK_PATTERN

    @property
    def origin(self) -> Origin:
        """What all its events have in common."""
        found = re.search(self.rank_pattern, self.path.name, re.IGNORECASE)
        return Origin(self.run, self.name or self.path.name, int(found[1]) if found else None)


@dataclass(slots=True)
class Reading:
    """A file that is being read: iterate over `batches`, then look at `account`."""

    account: FileAccount
    batches: Iterator[pa.RecordBatch] = field(repr=False)


def read_file(
    file: TraceFile,
    advance: Callable[[int], None] = lambda _: None,
    needles: Needles = NO_NEEDLES,
) -> Reading:
    """Begin to read; `advance` hears of bytes taken from disk. OSError if the file cannot be read.

    With `needles`, events whose lines have none of them are left out where that is cheap.
    """
    size_bytes = file.path.stat().st_size
    account = FileAccount(file=file.name or file.path.name, size_bytes=size_bytes)
    return Reading(account, _batches(file, account, advance, needles))


def read_selected(
    file: TraceFile, selection: Selection, judge: Judge, advance: Callable[[int], None] = lambda _: None
) -> Reading:
    """The same for the events of a selection, of which `judge` is."""
    reading = read_file(file, advance, selection.needles())
    return Reading(reading.account, judge.filter(reading.batches, reading.account))


def _batches(
    file: TraceFile, account: FileAccount, advance: Callable[[int], None], needles: Needles
) -> Iterator[pa.RecordBatch]:
    # Taken first: of a program that still runs, nothing is called missing that it records meanwhile.
    account.announced_events = read_tally(file.path)
    pieces = read_pieces(file.path, account.faults.append, advance)
    head = next(pieces, b"")
    dialect = detect(head)
    account.dialect = dialect.value
    for batch in _read(dialect, chain([head], pieces), file.origin, account, needles):
        _note(batch, account)
        yield batch


def _read(
    dialect: Dialect, pieces: Iterable[bytes], origin: Origin, account: FileAccount, needles: Needles
) -> Iterator[pa.RecordBatch]:
    match dialect:
        case Dialect.JSON_LINES:
            return JsonLines(origin, account, needles).batches(pages_of(pieces))
        case Dialect.CHROME:
            return ChromeDocument(origin, account).batches(pieces)
        case Dialect.STRACE:
            return read_lines(pages_of(pieces), Strace(), origin, account)
        case Dialect.DARSHAN:
            return read_lines(pages_of(pieces), Darshan(), origin, account)


def _note(batch: pa.RecordBatch, account: FileAccount) -> None:
    """Hosts and ranks that the events tell."""
    account.hosts.update(host for host in batch.column("host").dictionary.to_pylist() if host is not None)
    account.ranks.update(rank for rank in batch.column("rank").unique().to_pylist() if rank is not None)
