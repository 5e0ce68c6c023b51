"""Parsed lines become batches of events, the Arrow record batches that every dialect's reader yields.

Readers of text dialects give one `ParsedLine` per line. Invariant: a batch has the columns of
`event_schema.SCHEMA` in their order. Most texts repeat within a file, so they are dictionary-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

from penstock.trace.event_schema import COLUMNS, FileAccount, canonical
from penstock.trace.reading.chunks import Chunk

BATCH_ROWS: Final = 1 << 15
"""Rows that readers of text dialects gather into one batch."""

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())
TEXT_COLUMNS: Final = ("op", "name", "cat", "host", "path", "args", "run", "file")
BATCH_SCHEMA: Final = pa.schema(
    [
        pa.field(column.name, _TEXT if column.name in TEXT_COLUMNS else column.type, column.may_be_missing)
        for column in COLUMNS
    ]
)

BYTE_LAYERS: Final = ("POSIX", "OBJECT")
"""Categories whose reads and writes return bytes: system calls on files, requests to object stores."""
BYTE_MOVERS: Final = frozenset((
    "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "pwritev",
    "sendfile", "copy_file_range", "splice", "recv", "send",
))  # fmt: skip
"""Operations of these layers that return the number of bytes moved."""
ITEM_MOVERS: Final = frozenset(("fread", "fwrite"))
"""Operations of STDIO that return a number of items; the size of an item is an argument."""

SIZE_LIMIT: Final = 1 << 50
"""No call moves a pebibyte: such a number is damage, and sums of sizes stay within 64 bits without it."""

RANK_PATTERN: Final = r"(?:^|[^a-z])(?:trace-|rank[-_.]?)(\d{1,9})(?![0-9a-z])"
"""Finds the rank in a file's name: `trace-3-of-16.pfw`, `run_rank3.pfw`; not digits of a longer word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file to read: its path, its name in tables, its run, and how its file name gives the rank."""

    path: Path
    name: str = ""
    run: str = ""
    rank_pattern: str = RANK_PATTERN

    @property
    def rank(self) -> int | None:
        """The rank in the file's name, if it has one."""
        match = re.search(self.rank_pattern, self.path.name, re.IGNORECASE)
        return int(match[1]) if match else None


class LineFate(Enum):
    """The outcome of reading a line. Every line has exactly one, so that an account adds up."""

    EVENT = "event"
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
    reason: str = ""
    begun: tuple[int, str] | None = None
    """The number and the text of the line, if it is not the one that was parsed last."""


class LineDialect(Protocol):
    """A dialect of text lines. `parse` is called once per line, in order; `finish` once, at the end."""

    def parse(self, line: str) -> ParsedLine:
        """Parse one line, without its newline."""

    def finish(self) -> Iterable[ParsedLine]:
        """Lines that were counted as metadata because they began something that never ended."""

    def faults(self) -> Iterable[str]:
        """The faults of the file as a whole."""


def read_lines(
    chunks: Iterator[Chunk], dialect: LineDialect, file: TraceFile, account: FileAccount
) -> Iterator[pa.RecordBatch]:
    """Yield the events of a file of text lines, batch by batch."""
    rows: list[Mapping[str, Any]] = []
    for chunk in chunks:
        for line in chunk.content[chunk.start : chunk.stop].split(b"\n")[:-1]:
            parsed = dialect.parse(line.decode(errors="backslashreplace"))
            account.lines += 1
            count_line(parsed, line, account)
            if parsed.row is not None:
                rows.append(parsed.row)
        if len(rows) >= BATCH_ROWS:
            yield build_batch(rows, file)
            rows = []
    for parsed in dialect.finish():
        account.metadata -= 1
        count_line(parsed, b"", account)
        if parsed.row is not None:
            rows.append(parsed.row)
    account.faults.extend(dialect.faults())
    if rows:
        yield build_batch(rows, file)


def count_line(parsed: ParsedLine, line: bytes, account: FileAccount) -> None:
    """Count a line by its fate; a damaged one is also kept as a sample."""
    match parsed.fate:
        case LineFate.BLANK:
            account.blank += 1
        case LineFate.METADATA:
            account.metadata += 1
        case LineFate.EVENT:
            account.events += 1
        case LineFate.SALVAGED | LineFate.DROPPED:
            text = line.rstrip(b"\r\n")[:400].decode(errors="backslashreplace")
            number, text = parsed.begun or (account.lines, text)
            is_salvaged = parsed.fate is LineFate.SALVAGED
            account.count_damage(number, parsed.reason, text, salvaged=is_salvaged)


def build_batch(rows: Sequence[Mapping[str, Any]], file: TraceFile) -> pa.RecordBatch:
    """Rows that Python parsed, as a batch. Each row has at least the columns that must not be missing."""
    filled: dict[str, list[Any]] = {column.name: [row.get(column.name) for row in rows] for column in COLUMNS}
    filled["end_us"] = [row["ts_us"] + row["dur_us"] for row in rows]
    filled["op"] = [row.get("op") or canonical(row["name"]) for row in rows]
    # A rank in the event itself, even None, takes precedence over the file's name.
    rank = file.rank
    filled["rank"] = [row.get("rank", rank) for row in rows]
    # Readers of Darshan take sizes from its own counters.
    filled["size_bytes"] = [size if (size or 0) < SIZE_LIMIT else None for size in filled["size_bytes"]]
    filled["run"], filled["file"] = [file.run] * len(rows), [file.name or file.path.name] * len(rows)
    return pa.RecordBatch.from_arrays(
        [pa.array(filled[field.name], field.type) for field in BATCH_SCHEMA], schema=BATCH_SCHEMA
    )


def transfer_size(name: str, cat: str, arguments: Mapping[str, Any]) -> int | None:
    """The bytes that an event moved; the query of `json_lines` applies the same rule to columns."""
    moved, op = parse_int64(arguments.get("ret")), canonical(name)
    if cat == "STDIO" and op in ITEM_MOVERS and moved is not None:
        item_bytes = parse_int64(arguments.get("size"))
        moved = None if item_bytes is None or moved < 0 else moved * item_bytes
    elif cat not in BYTE_LAYERS or op not in BYTE_MOVERS:
        return None
    return moved if moved is not None and 0 <= moved < SIZE_LIMIT else None


def parse_int64(value: Any) -> int | None:
    """A whole number of 64 bits, quoted or not, however it is written; None for anything else."""
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
