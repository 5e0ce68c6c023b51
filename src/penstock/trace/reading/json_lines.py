"""Traces of one JSON object per line, as DFTracer's three generations write them: chunks -> batches.

A scanner goes over the lines of each chunk. That of large inputs is machine code, takes whole lines by
itself, and hands the others back; that of small inputs hands every line back. What is handed back is parsed
by `lenient_json.py`. Invariants: the account's sum holds after every chunk; the events are the same whichever
scanner was used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow.compute as pc

from penstock.trace.event_schema import FileAccount
from penstock.trace.reading.chunks import Chunk
from penstock.trace.reading.event_batch import (
    EventOrigin,
    FileContext,
    ParsedLine,
    build_batch,
    count_line,
    parse_int64,
)
from penstock.trace.reading.event_filter import NO_PREFILTER, Prefilter
from penstock.trace.reading.lenient_json import HASH_KIND_NAMES, HashKind, UnexplainedHash, parse_line
from penstock.trace.reading.native import open_scanner

if TYPE_CHECKING:
    import pyarrow as pa

_FLUSHED_ROWS: Final = 1 << 16
_UNITS_NS: Final = {"NS": 1, "US": 1000, "MS": 1_000_000, "SEC": 1_000_000_000}
_KINDS: Final = {name.decode(): kind for name, kind in zip(HASH_KIND_NAMES, HashKind, strict=True)}
_RANK: Final = re.compile(r"Rank (\d{1,9})\b")
_FILE_HASH: Final = re.compile(rb'"fhash":[ \t]*("?)([^",}\s]+)\1')


class LineScanner(Protocol):
    """Parses the lines of one file that it supports, and keeps the texts of the file's hashes."""

    def open_chunk(self, chunk: Chunk) -> None:
        """Continue with another chunk."""

    def scan(self, position: int) -> tuple[int, bool]:
        """Take lines from `position` on; where it stopped, and whether rows must be taken to make room.

        It stops at the chunk's end, or at a line that must be parsed by Python.
        """

    def take_counts(self, account: FileAccount) -> None:
        """Add the lines it took, or skipped, to the account."""

    def take_batch(self, origin: EventOrigin, context: FileContext) -> tuple[pa.RecordBatch | None, int]:
        """The rows it gathered, and how many of them name a file or host that nothing explains."""

    def make_room(self) -> None:
        """Grow the buffers that are full, after their rows were taken."""

    def lookup(self, kind: HashKind, value: bytes) -> str | None:
        """The text of a hash; None before a line explains it."""

    def bind(self, kind: HashKind, value: bytes, text: bytes) -> None:
        """Set the text of a hash, from the line of metadata that explains it."""


class PlainScanner:
    """The scanner of small inputs: skips lines that the prefilter rules out, leaves the rest to Python."""

    def __init__(self, prefilter: Prefilter) -> None:
        self._prefilter = prefilter
        self._texts: dict[tuple[HashKind, bytes], str] = {}
        self._content = b""
        self._stop = 0
        self._is_filtering = False
        self._num_skipped = 0

    def open_chunk(self, chunk: Chunk) -> None:
        """Continue with another chunk."""
        self._content, self._stop = chunk.content, chunk.stop
        self._is_filtering = self._prefilter.is_active and not chunk.has_escapes()

    def scan(self, position: int) -> tuple[int, bool]:
        """Skip to the next line that must be parsed."""
        while self._is_filtering and position < self._stop:
            end = self._content.index(b"\n", position)
            if self._is_wanted(self._content[position:end]):
                break
            self._num_skipped += 1
            position = end + 1
        return position, False

    def take_counts(self, account: FileAccount) -> None:
        """Count the skipped lines."""
        account.lines += self._num_skipped
        account.skipped += self._num_skipped
        self._num_skipped = 0

    def take_batch(self, _origin: EventOrigin, _context: FileContext) -> tuple[None, int]:
        """All rows were made by Python."""
        return None, 0

    def make_room(self) -> None:
        """Do nothing: Python's lists grow by themselves."""

    def lookup(self, kind: HashKind, value: bytes) -> str | None:
        """The text of a hash; None before a line explains it."""
        return self._texts.get((kind, value))

    def bind(self, kind: HashKind, value: bytes, text: bytes) -> None:
        """Set the text of a hash."""
        self._texts[kind, value] = text.decode()

    def _is_wanted(self, line: bytes) -> bool:
        """Whether a line explains others, or has one pattern of each sort that there are patterns of."""
        names, paths = self._prefilter.name_patterns, self._prefilter.path_patterns
        if b'"dftracer"' in line:
            return True
        if names and not any(pattern in line for pattern in names):
            return False
        return not paths or any(pattern in line for pattern in paths) or self._is_hash_wanted(line)

    def _is_hash_wanted(self, line: bytes) -> bool:
        """Whether a line names its file by a hash of a wanted path, or by one not explained yet."""
        if b'"fhash":' not in line:
            return False
        file_hash = _FILE_HASH.search(line)
        path = None if file_hash is None else self.lookup(HashKind.FILE, file_hash[2])
        return path is None or any(pattern in path.encode() for pattern in self._prefilter.path_patterns)


class JsonLines:
    """Reads the chunks of one file; `account` then has the fate of its lines."""

    def __init__(
        self,
        origin: EventOrigin,
        account: FileAccount,
        prefilter: Prefilter = NO_PREFILTER,
        *,
        is_large: bool = False,
    ) -> None:
        self._origin = origin
        self._account = account
        self._scanner: LineScanner = open_scanner(prefilter) if is_large else PlainScanner(prefilter)
        self._context = FileContext()
        self._rows: list[dict[str, Any]] = []
        self._num_endings = self._num_announced = 0
        self._num_unexplained = 0

    def read(self, chunks: Iterator[Chunk]) -> Iterator[pa.RecordBatch]:
        """The file's events, roughly in the order of its lines."""
        for chunk in chunks:
            yield from self._read_chunk(chunk)
        yield from self._flush()
        self._account.faults.extend(self._find_faults())

    def _read_chunk(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        scanner, position = self._scanner, chunk.start
        scanner.open_chunk(chunk)
        while True:
            position, is_full = scanner.scan(position)
            if is_full:
                yield from self._flush()
                scanner.make_room()
            elif position >= chunk.stop:
                break
            else:
                end = chunk.content.index(b"\n", position) + 1
                # Samples of damage carry the number of their line, so the scanner's lines are counted first.
                scanner.take_counts(self._account)
                parsed = self._parse(chunk.content[position:end])
                if self._must_flush(parsed):
                    yield from self._flush()
                self._learn(parsed)
                position = end
        scanner.take_counts(self._account)

    def _parse(self, line: bytes) -> ParsedLine:
        self._account.lines += 1
        parsed = parse_line(line, self._resolve, self._context.ns_per_tick)
        count_line(parsed, line, self._account)
        return parsed

    def _resolve(self, kind: HashKind, value: bytes) -> str:
        text = self._scanner.lookup(kind, value)
        return UnexplainedHash(kind, value) if text is None else text

    def _must_flush(self, parsed: ParsedLine) -> bool:
        """A new unit of time holds for later rows only."""
        is_new_unit = parsed.row is None and _argument(parsed, "name") == "time_metric"
        return is_new_unit or len(self._rows) >= _FLUSHED_ROWS

    def _learn(self, parsed: ParsedLine) -> None:
        """Keep an event's row; learn units, ranks and hashes from a line of metadata."""
        if parsed.row is not None:
            self._rows.append(dict(parsed.row))
            return
        document = parsed.document or {}
        name, value = _argument(parsed, "name"), _argument(parsed, "value")
        if name == "time_metric":
            self._set_unit(str(value))
        kind = _KINDS.get(str(document.get("name")))
        if kind is not None and isinstance(name, str):
            text = name.encode(errors="backslashreplace")
            self._scanner.bind(kind, str(value).encode(errors="backslashreplace"), text)
        rank = _RANK.match(str(value)) or _RANK.match(str(_argument(parsed, "process_name")))
        pid = parse_int64(document.get("pid"))
        if rank and pid is not None:
            self._context.ranks[pid] = int(rank[1])

    def _set_unit(self, unit: str) -> None:
        if unit not in _UNITS_NS:
            self._account.faults.append(
                f"its time_metric {unit!r} is unknown: times are read as microseconds"
            )
        self._context.ns_per_tick = _UNITS_NS.get(unit, 1000)

    def _flush(self) -> Iterator[pa.RecordBatch]:
        """The rows so far, those of the scanner first."""
        batch, num_unexplained = self._scanner.take_batch(self._origin, self._context)
        self._num_unexplained += num_unexplained
        if batch is not None:
            self._count_endings(batch)
            yield batch
        if self._rows:
            self._num_unexplained += sum(map(self._is_left_unexplained, self._rows))
            batch = build_batch(self._rows, self._origin, self._context)
            self._count_endings(batch)
            yield batch
            self._rows = []

    def _count_endings(self, batch: pa.RecordBatch) -> None:
        """DFTracer's last event has the number of events before it."""
        if "end" not in batch.column("name").dictionary.to_pylist():
            return
        endings = batch.filter(pc.equal(batch.column("name"), "end"))
        for arguments in endings.column("args").to_pylist():
            announced = parse_int64(json.loads(arguments).get("num_events"))
            if announced is not None:
                self._num_announced += announced
                self._num_endings += 1

    def _is_left_unexplained(self, row: dict[str, Any]) -> bool:
        """Resolve hashes that were explained after their row; whether one never was."""
        for column in ("path", "host"):
            text = row[column]
            if isinstance(text, UnexplainedHash):
                row[column] = self._resolve(text.kind, text.value)
        return any(isinstance(row[column], UnexplainedHash) for column in ("path", "host"))

    def _find_faults(self) -> Iterator[str]:
        """What is wrong with the file as a whole, after its last line."""
        account = self._account
        if self._num_unexplained:
            yield f"{self._num_unexplained} events name files or hosts by hashes that no line explains"
        if self._num_endings:
            # A count beside the file is older than the ending: its process was killed between the two.
            account.announced_events = self._num_announced
        if account.announced_events is None or account.skipped:
            return
        num_events = account.events + account.salvaged - self._num_endings
        account.missing = max(account.announced_events - num_events, 0)
        if account.missing:
            yield (
                f"its writer counted {account.announced_events} events, {num_events} are here:"
                f" {account.missing} missing"
            )


def _argument(parsed: ParsedLine, key: str) -> Any:
    arguments = (parsed.document or {}).get("args")
    return arguments.get(key) if isinstance(arguments, dict) else None
