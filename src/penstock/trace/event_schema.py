"""The event schema: the columns of an event, one name for each operation, and the account of each file.

    trace files -> reading -> events (this schema) -> table -> questions -> comparison, findings

Readers make rows of this schema, and `batch_rows` turns them into Arrow batches. Questions query the table
and depend on no reader. Invariants: times are whole microseconds with `end_us = ts_us + dur_us`, and every
line of a file is counted exactly once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import duckdb
import pyarrow as pa

from penstock.errors import TraceDamaged, UsageError

_EXACT: Final = {"nullable": False}
SCHEMA: Final = pa.schema([
    pa.field("ts_us", pa.int64(), **_EXACT),  # start: microseconds since 1970 by the clock of its host
    pa.field("dur_us", pa.int64(), **_EXACT),
    pa.field("end_us", pa.int64(), **_EXACT),  # ts_us + dur_us
    pa.field("op", pa.string(), **_EXACT),  # operation, by one name for all spellings: open, stat, write
    pa.field("name", pa.string(), **_EXACT),  # operation as traced: open64, __xstat, write
    pa.field("cat", pa.string(), **_EXACT),  # the layer that traced it: POSIX, STDIO, OBJECT, checkpoint
    pa.field("pid", pa.int64(), **_EXACT),  # process, as traced (a rank in traces of DLIO)
    pa.field("tid", pa.int64(), **_EXACT),  # thread, as traced
    pa.field("rank", pa.int32()),  # of the process in its job
    pa.field("host", pa.string()),
    pa.field("path", pa.string()),
    pa.field("size_bytes", pa.int64()),  # moved by a read or a write
    pa.field("offset", pa.int64()),  # in the file
    pa.field("ret", pa.int64()),  # what the call returned
    pa.field("epoch", pa.int32()),
    pa.field("step", pa.int32()),
    pa.field("args", pa.string(), **_EXACT),  # everything else that was traced, as JSON text
    pa.field("run", pa.string(), **_EXACT),  # the run that the file belongs to
    pa.field("file", pa.string(), **_EXACT),  # the trace file that it was read from
])  # fmt: skip
TEXT_COLUMNS: Final = ("op", "name", "cat", "host", "path", "args", "run", "file")
"""Columns whose values repeat within a file, so batches store them as dictionaries."""
BATCH_SCHEMA: Final = pa.schema(
    field.with_type(pa.dictionary(pa.int32(), pa.string())) if field.name in TEXT_COLUMNS else field
    for field in SCHEMA
)
_BATCH_ROWS: Final = 1 << 15
"""The rows that readers of text dialects gather into one batch."""

ALL_RANKS: Final = -1
"""Stands for the process if a tracer has only sums over all ranks, as Darshan does for shared files."""
SUM: Final = '{"is_sum":'
"""The beginning of the arguments of an event that stands for many calls, such as those that Darshan did not
trace.
"""
RECORDING: Final = "recording"
"""The category of the event in which `trace record` notes the bytes that the system counted."""
_SAMPLES_KEPT: Final = 5
"""The number of damaged lines that a file's account shows; all are counted."""

BYTE_LAYERS: Final = ("POSIX", "OBJECT")
"""Categories whose reads and writes return a number of bytes: system calls on files, and requests to object
stores.
"""
BYTE_MOVERS: Final = frozenset((
    "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "pwritev",
    "sendfile", "copy_file_range", "splice", "recv", "send",
))  # fmt: skip
"""Operations of these layers that return the number of bytes transferred."""
ITEM_MOVERS: Final = frozenset(("fread", "fwrite"))
"""Operations of STDIO that return a number of items; the size of an item is an argument."""
SIZE_LIMIT: Final = 1 << 50
"""No call transfers a pebibyte: such a number is damage, and without it, sums of sizes fit in 64 bits."""

RANK_PATTERN: Final = r"(?:^|[^a-z])(?:trace-|rank[-_.]?)(\d{1,9})(?![0-9a-z])"
"""Finds the rank in a file's name, as in `trace-3-of-16.pfw` and `run_rank3.pfw`, but not the digits of a
longer word.
"""


def fix_sql(error: Exception, sql: str, usual: str) -> str:
    """Return the fix for an error in a user's SQL: `offset` is a column, and also an SQL keyword."""
    is_bare = re.search(r'(?<!["\w])offset(?!["\w])', sql, re.IGNORECASE)
    return 'Quote the column: "offset".' if is_bare and "syntax error" in str(error) else usual


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file to read: its path, its name in tables, its run, and the pattern for the rank in its name."""

    path: Path
    name: str = ""
    run: str = ""
    rank_pattern: str = RANK_PATTERN

    @property
    def rank(self) -> int | None:
        """The rank in the file's name; None if there is none."""
        if self.rank_pattern != RANK_PATTERN:
            return _find_rank(self.rank_pattern, self.path.name)
        match = re.search(RANK_PATTERN, self.path.name, re.IGNORECASE)
        return int(match[1]) if match else None


@cache
def open_database() -> duckdb.DuckDBPyConnection:
    """Open one database for all readers, because opening one takes longer than reading a small trace."""
    # Files are read in parallel, and a block of a file is too small to be divided.
    return duckdb.connect(config={"threads": 1})


@lru_cache
def _find_rank(pattern: str, name: str) -> int | None:
    """Return the number in the first group of a user's regular expression, or None.

    The expression may be somebody else's. DuckDB's engine takes linear time for any, unlike Python's.
    """
    query = "SELECT TRY_CAST(regexp_extract($1, $2, ['rank'], 'i').rank AS INTEGER)"
    try:
        with open_database().cursor() as cursor:
            rows = cursor.execute(query, [os.fsencode(name).decode(errors="replace"), pattern]).fetchall()
    except duckdb.Error as error:
        raise UsageError(
            f"{pattern!r:.200} finds no rank in a file's name: {error!s:.200}",
            fix=r"Write a regular expression of RE2 with a group: --rank-pattern 'node(\d+)'.",
        ) from error
    rank: int | None = rows[0][0]
    return rank


class LineFate(StrEnum):
    """The outcome of reading a line, by its counter in the account. Every line has exactly one."""

    EVENT = "events"
    SALVAGED = "salvaged"
    METADATA = "metadata"
    BLANK = "blank"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A parsed line: its fate, the event's row or the metadata's document, and what is wrong with it."""

    fate: LineFate
    row: Mapping[str, Any] | None = None
    document: Mapping[str, Any] | None = None
    written: Mapping[str, Any] | None = None
    """The row of the write, if the line is a copy from one file to another; `row` is then the row of the
    read.
    """
    reason: str = ""
    begun: tuple[int, str] | None = None
    """The number and text of the line on which the call began, if that is not the line parsed last."""


def refuse_damaged(accounts: Sequence[FileAccount]) -> None:
    """Raise `TraceDamaged` if anything in these files was lost or guessed."""
    damaged = [account for account in accounts if not account.is_whole]
    if damaged:
        raise TraceDamaged(
            f"Of {len(accounts)} files, {len(damaged)} lost something: {damaged[0].losses()[0]}",
            fix="Read them without --strict to query the rest.",
        )


def refuse_lost(accounts: Sequence[FileAccount]) -> None:
    """Raise `TraceDamaged` if any of these files has no events, because an answer of zeros would mislead."""
    if accounts and all(account.is_without_events for account in accounts):
        raise TraceDamaged(
            f"There is not one event in {accounts[0].file}"
            + (f" or the other {len(accounts) - 1} files" if len(accounts) > 1 else ""),
            fix="Name traces of DFTracer, strace, Darshan, Chrome or PyTorch's profiler.",
        )


@dataclass(slots=True, kw_only=True)
class FileAccount:
    """The fate of every line: `lines = events + salvaged + metadata + blank + dropped`.

    `events` were intact, `salvaged` are events of damaged lines. Both are rows of the table; a copy between
    files is two rows. `metadata` lines explain other lines, `blank` lines are empty or a bracket. `unwanted`
    events were read and left out of the table. `announced_events` is the number that the file's writer
    counted, in the file's last event or in the file `.count` next to it; it is None without such a count.
    `missing` is how many of the announced events are not in the file. `samples` has the number, reason and
    beginning of damaged lines. `faults` concern the file as a whole, such as a torn end; `notes` say what
    readers of answers must know about a whole file. The starts of events lie between `first_us` and
    `last_us`.
    """

    file: str
    dialect: str = ""
    lines: int = 0
    events: int = 0
    salvaged: int = 0
    metadata: int = 0
    blank: int = 0
    dropped: int = 0
    unwanted: int = 0
    salvaged_reasons: dict[str, int] = field(default_factory=dict)
    dropped_reasons: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    announced_events: int | None = None
    missing: int = 0
    first_us: int | None = None
    last_us: int | None = None
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    size_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """True if nothing was lost and nothing had to be guessed."""
        return not (self.dropped or self.salvaged or self.faults)

    @property
    def is_without_events(self) -> bool:
        """True if not a single event was read, wanted or not."""
        return not (self.events or self.salvaged or self.unwanted)

    def count(self, parsed: ParsedLine, line: bytes = b"") -> None:
        """Count a line by its fate, and keep the first damaged ones as samples."""
        setattr(self, parsed.fate, getattr(self, parsed.fate) + 1)
        if parsed.reason:
            is_salvaged = parsed.fate is LineFate.SALVAGED
            reasons = self.salvaged_reasons if is_salvaged else self.dropped_reasons
            reasons[parsed.reason] = reasons.get(parsed.reason, 0) + 1
            if len(self.samples) < _SAMPLES_KEPT:
                text = line.rstrip(b"\r\n")[:400].decode(errors="backslashreplace")
                number, text = parsed.begun or (self.lines, text)
                self.samples.append({"line": number, "reason": parsed.reason, "text": text[:200]})

    def document(self) -> Mapping[str, Any]:
        """Return the account as JSON."""
        return {**asdict(self), "hosts": sorted(self.hosts), "ranks": sorted(self.ranks)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read an account from its JSON document; 0.2.0 also wrote a number of `skipped`, unparsed lines."""
        known = {**document, "hosts": set(document["hosts"]), "ranks": set(document["ranks"])}
        known["unwanted"] += known.pop("skipped", 0)
        return cls(**known)

    def losses(self) -> list[str]:
        """List losses and guesses for people, one line each."""
        losses = [f"{self.file}: {what}" for what in (*self.faults, *self.notes)]
        if self.dropped or self.salvaged:
            counts = {f"{reason}, dropped": count for reason, count in self.dropped_reasons.items()}
            counts |= {f"{reason}, salvaged": count for reason, count in self.salvaged_reasons.items()}
            kinds = "; ".join(f"{count:,} {reason}" for reason, count in counts.items())
            losses.append(
                f"{self.file}: {self.dropped + self.salvaged:,} of {self.lines:,} lines damaged: {kinds}"
            )
            losses += [f"  line {one['line']}: {one['reason']}: {one['text']!r}" for one in self.samples]
        return losses


# Under different names, the same program would count `__xstat` on one system, `stat` on a newer one and
# `statx` under strace.
_SPELLINGS: Final = {
    "access": "faccessat faccessat2",
    "chmod": "fchmodat fchmodat2",
    "chown": "fchownat",
    "fadvise": "fadvise64 posix_fadvise posix_fadvise64",
    "fallocate": "fallocate64 posix_fallocate posix_fallocate64",
    "fcntl": "fcntl64",
    "fopen": "fopen64",
    "freopen": "freopen64",
    "fseek": "fseeko fseeko64",
    "fstat": "fstat64 fstatat fstatat64 newfstatat __fxstat __fxstat64 __fxstatat __fxstatat64",
    "fstatfs": "fstatfs64",
    "ftell": "ftello ftello64",
    "ftruncate": "ftruncate64",
    "getdents": "getdents64",
    "link": "linkat",
    "lseek": "lseek64 _llseek",
    "lstat": "lstat64 __lxstat __lxstat64",
    "mkdir": "mkdirat",
    "mknod": "mknodat",
    "mmap": "mmap64 mmap2",
    "open": "open64 openat openat64 openat2 creat creat64 __open __open64 __open_2 __open64_2",
    "pread": "pread64",
    "preadv": "preadv64 preadv2 preadv64v2",
    "pwrite": "pwrite64",
    "pwritev": "pwritev64 pwritev2 pwritev64v2",
    "readdir": "readdir64",
    "readlink": "readlinkat",
    "rename": "renameat renameat2",
    "sendfile": "sendfile64",
    "stat": "stat64 statx __xstat __xstat64",
    "statfs": "statfs64",
    "symlink": "symlinkat",
    "truncate": "truncate64",
    "unlink": "unlinkat",
    "utime": "utimes utimensat futimens futimesat",
}

_CANONICAL: Final = {
    spelling: canonical for canonical, spellings in _SPELLINGS.items() for spelling in spellings.split()
}


def canonical(name: str) -> str:
    """Return the operation of which `name` is a spelling, or `name` itself if it is unknown."""
    return _CANONICAL.get(name, name)


def spellings_of(operations: Iterable[str]) -> list[str]:
    """Return the names of these operations, and all their other spellings."""
    return [name for one in sorted(operations) for name in (one, *_SPELLINGS.get(one, "").split())]


def batch_rows(rows: Iterator[Mapping[str, Any]], file: TraceFile) -> Iterator[pa.RecordBatch]:
    """Batch rows that Python parsed. Each row has at least the required columns."""
    while gathered := list(islice(rows, _BATCH_ROWS)):
        filled: dict[str, list[Any]] = {name: [row.get(name) for row in gathered] for name in SCHEMA.names}
        filled["end_us"] = [row["ts_us"] + row["dur_us"] for row in gathered]
        filled["op"] = [row.get("op") or canonical(row["name"]) for row in gathered]
        # A rank in the event itself, even None, takes precedence over the one in the file's name.
        rank = file.rank
        filled["rank"] = [row.get("rank", rank) for row in gathered]
        # Readers of Darshan's files take sizes from its own counters.
        filled["size_bytes"] = [size if (size or 0) < SIZE_LIMIT else None for size in filled["size_bytes"]]
        filled["run"] = [file.run] * len(gathered)
        filled["file"] = [file.name or file.path.name] * len(gathered)
        arrays = [pa.array(filled[column.name], column.type) for column in BATCH_SCHEMA]
        yield pa.RecordBatch.from_arrays(arrays, schema=BATCH_SCHEMA)


def transfer_size(name: str, cat: str, arguments: Mapping[str, Any]) -> int | None:
    """Return the bytes that an event transferred, or None; the query of `json_lines` has the same rule."""
    moved, op = parse_int64(arguments.get("ret")), canonical(name)
    if cat == "STDIO" and op in ITEM_MOVERS and moved is not None:
        item_bytes = parse_int64(arguments.get("size"))
        moved = None if item_bytes is None or moved < 0 else moved * item_bytes
    elif cat not in BYTE_LAYERS or op not in BYTE_MOVERS:
        return None
    return moved if moved is not None and 0 <= moved < SIZE_LIMIT else None


def parse_int64(value: Any) -> int | None:
    """Parse a whole number of 64 bits, quoted or not, in any notation; None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and -(1 << 63) < value < 1 << 63 else None
