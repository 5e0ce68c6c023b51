"""Parsed lines become batches of events, the Arrow record batches that every dialect's reader yields.

Readers of text dialects give one `ParsedLine` per line; blocks that DuckDB parsed (`block_query.py`) are
columns already. Invariant: a batch has the wanted columns of `event_schema.SCHEMA` in their order. Most texts
repeat within a file, so they are dictionary-encoded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

import pyarrow as pa

from penstock.trace.event_schema import ALL_COLUMNS, COLUMNS, FileAccount, canonical
from penstock.trace.reading.chunks import Chunk

BATCH_ROWS: Final = 1 << 15
"""Rows that readers of text dialects gather into one batch."""
FEW_ROWS: Final = 64
"""Up to this many, a loop in Python takes less time than calls of Arrow's functions: runs of thousands of
processes have thousands of small files."""
UNEXPLAINED: Final = "hash:"
"""Prefix of a path or host whose hash its file never explains."""

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
"""Operations of STDIO that return a number of items, whose size is an argument."""

SIZE_LIMIT: Final = 1 << 50
"""No call moves a pebibyte: such a number is damage, and sums of sizes stay within 64 bits without it."""


class LineFate(Enum):
    """What became of a line. Every line has exactly one fate, so that an account adds up."""

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


@dataclass(frozen=True, slots=True)
class EventOrigin:
    """What all events of a file have in common."""

    run: str
    file: str
    rank: int | None = None


@dataclass(slots=True)
class FileContext:
    """The metadata so far: the unit of times, and the rank of each process."""

    ns_per_tick: int = 1000
    ranks: dict[int, int] = field(default_factory=dict)


class LineDialect(Protocol):
    """A dialect of text lines. `parse` is called once per line, in order; `finish` once, at the end."""

    def parse(self, line: str) -> ParsedLine:
        """Parse one line, without its newline."""

    def finish(self) -> Iterable[ParsedLine]:
        """Lines that were counted as metadata because they began something that never ended."""

    def faults(self) -> Iterable[str]:
        """What is wrong with the file as a whole."""


def read_lines(
    chunks: Iterator[Chunk], dialect: LineDialect, origin: EventOrigin, account: FileAccount
) -> Iterator[pa.RecordBatch]:
    """The events of a file of text lines, batch by batch."""
    rows: list[Mapping[str, Any]] = []
    for chunk in chunks:
        for line in chunk.content[chunk.start : chunk.stop].split(b"\n")[:-1]:
            parsed = dialect.parse(line.decode(errors="backslashreplace"))
            account.lines += 1
            count_line(parsed, line, account)
            if parsed.row is not None:
                rows.append(parsed.row)
        if len(rows) >= BATCH_ROWS:
            yield build_batch(rows, origin, FileContext())
            rows = []
    for parsed in dialect.finish():
        account.metadata -= 1
        count_line(parsed, b"", account)
        if parsed.row is not None:
            rows.append(parsed.row)
    account.faults.extend(dialect.faults())
    if rows:
        yield build_batch(rows, origin, FileContext())


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


def select_schema(columns: frozenset[str]) -> pa.Schema:
    """The schema of batches that have only these columns."""
    return (
        BATCH_SCHEMA if columns == ALL_COLUMNS else pa.schema([f for f in BATCH_SCHEMA if f.name in columns])
    )


def build_batch(
    rows: Sequence[Mapping[str, Any]],
    origin: EventOrigin,
    context: FileContext,
    columns: frozenset[str] = ALL_COLUMNS,
) -> pa.RecordBatch:
    """Rows that Python parsed, as a batch. Each row has at least the columns that must not be missing."""
    filled: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in columns}
    filled["end_us"] = [row["ts_us"] + row["dur_us"] for row in rows]
    filled["op"] = [row.get("op") or canonical(row["name"]) for row in rows]
    # A rank in the event itself, even None, takes precedence over the file's name and metadata.
    filled["rank"] = [
        row["rank"] if "rank" in row else context.ranks.get(row["pid"], origin.rank) for row in rows
    ]
    if "size_bytes" in filled:
        filled["size_bytes"] = [size if (size or 0) < SIZE_LIMIT else None for size in filled["size_bytes"]]
    filled["run"], filled["file"] = [origin.run] * len(rows), [origin.file] * len(rows)
    schema = select_schema(columns)
    return pa.RecordBatch.from_arrays([pa.array(filled[f.name], f.type) for f in schema], schema=schema)


def transfer_size(name: str, cat: str, arguments: Mapping[str, Any]) -> int | None:
    """The bytes that an event moved; `block_query` applies the same rule to columns."""
    ret, op = parse_int64(arguments.get("ret")), canonical(name)
    if cat in BYTE_LAYERS and op in BYTE_MOVERS and ret is not None:
        return ret if ret >= 0 else None
    item_bytes = parse_int64(arguments.get("size"))
    if cat == "STDIO" and op in ITEM_MOVERS and ret is not None and item_bytes is not None:
        return ret * item_bytes if ret >= 0 else None
    return None


def parse_int64(value: Any) -> int | None:
    """A whole number of 64 bits, quoted or not, however it is written; None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = _parse_float(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return int(value) if isinstance(value, int) and -(1 << 63) < value < 1 << 63 else None


def _parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
