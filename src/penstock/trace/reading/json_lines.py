"""Traces of one JSON object per line, as DFTracer's three generations write them: chunks -> batches.

    lines, gathered into blocks -> `block_query`: DuckDB gives a row for each line -> events, by column
                                -> lines that are no plain events -> `lenient_json`, one by one

DuckDB gives exactly one row for each line that is not blank, all NULL where the line is no JSON, so a row's
number tells its line. Invariants: the account's sum holds after every block; the events are the same whether
DuckDB or Python parsed them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from penstock.trace.arrow_functions import Numbers
from penstock.trace.event_schema import ALL_COLUMNS, FileAccount
from penstock.trace.reading.block_arguments import count_lines
from penstock.trace.reading.block_query import BlockQuery, BlockRows, build_block_batch
from penstock.trace.reading.chunks import Chunk
from penstock.trace.reading.event_batch import (
    BATCH_ROWS,
    EventOrigin,
    FileContext,
    ParsedLine,
    build_batch,
    count_line,
    parse_int64,
)
from penstock.trace.reading.lenient_json import HASH_KINDS, HashKind, UnexplainedHash, clean_text, parse_line

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES: Final = 16 << 20
"""Parsed at a time: small enough for a cache, large enough that a query's fixed cost does not count."""
QUERY_LINES: Final = 400
"""Python parses fewer lines than these sooner than DuckDB plans a query."""
_MANY_ODD: Final = 1 / 8
"""The share of odd rows from which on commas behind the objects are looked for."""
_UNITS_NS: Final = {"NS": 1, "US": 1000, "MS": 1_000_000, "SEC": 1_000_000_000}
_NEWLINE: Final = ord("\n")
_RANK: Final = re.compile(r"Rank (\d{1,9})\b")


FindName = Callable[[HashKind, str], str | None]


class JsonLines:
    """Reads the chunks of one file; `account` then has the fate of its lines.

    Blocks of fewer than `query_lines` lines are parsed in Python, which changes nothing but the speed.
    `find_elsewhere` gives names of hashes that this file does not explain.
    """

    def __init__(
        self,
        origin: EventOrigin,
        account: FileAccount,
        columns: frozenset[str] = ALL_COLUMNS,
        query_lines: int = QUERY_LINES,
        find_elsewhere: FindName = lambda _kind, _value: None,
    ) -> None:
        self._origin = origin
        self._account = account
        self._columns = columns
        self._query_lines = query_lines
        self._find_elsewhere = find_elsewhere
        self._query: BlockQuery | None = None
        self._context = FileContext()
        self._texts: dict[HashKind, dict[str, str]] = {kind: {} for kind in HashKind}
        self._rebound: set[tuple[HashKind, str]] = set()
        self._num_named: dict[HashKind, dict[str, int]] = {kind: {} for kind in HashKind}
        self._unexplained: Counter[tuple[HashKind, str]] = Counter()
        self._num_endings = self._num_announced = 0
        self._counts_metadata: bool | None = None

    def read(self, chunks: Iterator[Chunk]) -> Iterator[pa.RecordBatch]:
        """The file's events, roughly in the order of its lines."""
        try:
            for block in _gather_blocks(chunks):
                yield from self._read_block(block)
        finally:
            if self._query is not None:
                self._query.close()
        self._account.faults.extend(self._find_faults())

    def _read_block(self, block: _Block) -> Iterator[pa.RecordBatch]:
        if block.num_lines < self._query_lines:
            yield from self._parse_lines(block.lines())
            return
        rows = self._run_query(block)
        if len(rows.odd) > _MANY_ODD * block.num_lines and b"},\n" in block.join():
            block = _Block.from_bytes(block.join().replace(b"},\n", b"}\n"))
            rows = self._run_query(block)
        line_of = _number_lines(block, len(rows))
        if line_of is not None and self._query is not None and rows.may_lack_members:
            odd = b"\n".join(line for _, line in block.find_lines(line_of[rows.odd]))
            rows = self._query.complete(rows, block.parts, odd, self._context.ns_per_tick)
        ambiguous = self._learn_hashes(rows)
        if line_of is None or (ambiguous and b"newpath_hash" in block.join()):
            yield from self._parse_lines(block.lines())
            return
        if ambiguous:
            rows.set_aside(ambiguous)
        yield from self._take_rows(rows, block, line_of)

    def _run_query(self, block: _Block) -> BlockRows:
        if self._query is None:
            self._query = BlockQuery(self._columns)
        return self._query.run(block.parts, self._context.ns_per_tick)

    def _learn_hashes(self, rows: BlockRows) -> set[tuple[HashKind, str]]:
        """Bind the hashes that a block explains, but those that stand for something else as well.

        Which of two texts an event means depends on its line, so Python takes the lines of these.
        """
        bound: dict[tuple[HashKind, str], str] = {}
        ambiguous = set()
        for kind, value, text in rows.explained_hashes():
            if bound.setdefault((kind, value), text) != text or self._texts[kind].get(value, text) != text:
                ambiguous.add((kind, value))
        for kind, value in bound.keys() - ambiguous:
            self._texts[kind][value] = bound[kind, value]
        return ambiguous

    def _take_rows(self, rows: BlockRows, block: _Block, line_of: Numbers) -> Iterator[pa.RecordBatch]:
        """Count the block's lines, parse the odd ones, and make batches of the events."""
        account, lines_before, taken = self._account, self._account.lines, block.num_lines
        parsed_rows: list[Mapping[str, Any]] = []
        for number, line in block.find_lines(line_of[rows.odd]):
            account.lines = lines_before + number
            parsed = self._parse(line)
            if parsed.row is not None:
                parsed_rows.append(parsed.row)
            if self._learn(parsed):
                taken = number + 1
                break
        if self._counts_metadata is None:
            for _, line in block.find_lines(line_of[rows.metadata[:1]]):
                self._note_metadata(has_id=b'"id":' in line)
        rows.keep_first(int(np.searchsorted(line_of, taken)))
        account.lines = lines_before + taken
        account.events += len(rows.events)
        account.metadata += len(rows.metadata)
        account.blank += taken - len(rows)
        if len(rows.events):
            yield build_block_batch(rows, self._columns, self._origin, self._context, self._resolve_of_block)
        yield from self._build(parsed_rows)
        if taken < block.num_lines:
            # The unit of times has changed, so the lines behind are read anew.
            yield from self._read_block(_Block.from_bytes(b"\n".join([*block.lines()[taken:], b""])))

    def _parse_lines(self, lines: Sequence[bytes]) -> Iterator[pa.RecordBatch]:
        parsed_rows: list[Mapping[str, Any]] = []
        for line in lines:
            parsed = self._parse(line)
            if parsed.row is not None:
                parsed_rows.append(parsed.row)
            self._learn(parsed)
            if len(parsed_rows) >= BATCH_ROWS:
                yield from self._build(parsed_rows)
                parsed_rows = []
        yield from self._build(parsed_rows)

    def _parse(self, line: bytes) -> ParsedLine:
        self._account.lines += 1
        parsed = parse_line(line, self._resolve, self._context.ns_per_tick)
        count_line(parsed, line, self._account)
        return parsed

    def _learn(self, parsed: ParsedLine) -> bool:
        """Learn units, ranks and hashes from a line of metadata; whether the unit of times has changed."""
        if parsed.row is not None:
            self._count_ending(parsed.row)
        document = parsed.document if parsed.row is None else None
        if document is None:
            return False
        self._note_metadata(has_id="id" in document)
        name, value = _argument(document, "name"), _argument(document, "value")
        kind = HASH_KINDS.get(str(document.get("name")))
        if kind is not None and isinstance(name, str):
            self._bind(kind, str(value), name)
            return False
        rank = _RANK.match(str(value)) or _RANK.match(str(_argument(document, "process_name")))
        pid = parse_int64(document.get("pid"))
        if rank and pid is not None:
            self._context.ranks[pid] = int(rank[1])
        return name == "time_metric" and self._set_unit(str(value))

    def _note_metadata(self, *, has_id: bool) -> None:
        """Versions of DFTracer that give lines of metadata an id count them among the events."""
        if self._counts_metadata is None:
            self._counts_metadata = has_id

    def _bind(self, kind: HashKind, value: str, text: str) -> None:
        value, text = clean_text(value), clean_text(text)
        if self._texts[kind].setdefault(value, text) != text:
            self._rebound.add((kind, value))
            self._texts[kind][value] = text

    def _set_unit(self, unit: str) -> bool:
        if unit not in _UNITS_NS:
            self._account.faults.append(
                f"its time_metric {unit!r} is unknown: times are read as microseconds"
            )
        before, self._context.ns_per_tick = self._context.ns_per_tick, _UNITS_NS.get(unit, 1000)
        return self._context.ns_per_tick != before

    def _resolve(self, kind: HashKind, value: str) -> str:
        """The text of a hash of one line."""
        self._num_named[kind][value] = self._num_named[kind].get(value, 0) + 1
        return self._texts[kind].get(value) or UnexplainedHash(kind, value)

    def _resolve_of_block(
        self, kind: HashKind, values: Sequence[str], nums_events: Sequence[int]
    ) -> list[str]:
        """The texts of hashes, each of which so many events of a block have; of none, the hash."""
        named, texts = self._num_named[kind], self._texts[kind]
        for value, num_events in zip(values, nums_events, strict=True):
            named[value] = named.get(value, 0) + num_events
        return [
            texts.get(value) or (self._resolve_late(kind, value, num_events) if num_events else value)
            for value, num_events in zip(values, nums_events, strict=True)
        ]

    def _resolve_late(self, kind: HashKind, value: str, num_events: int) -> str:
        """The text of a hash that no line before its events has explained."""
        text = self._texts[kind].get(value)
        if text:
            return text
        elsewhere = self._find_elsewhere(kind, value)
        if elsewhere is None:
            self._unexplained[kind, value] += num_events
            return UnexplainedHash(kind, value)
        self._texts[kind][value] = elsewhere
        return elsewhere

    def _build(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
        """A batch of rows that Python parsed, their hashes resolved that were explained after them."""
        if not rows:
            return
        resolved = [self._name_late(row) for row in rows]
        yield build_batch(resolved, self._origin, self._context, self._columns)

    def _name_late(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        late: dict[str, Any] = {
            column: self._resolve_late(text.kind, text.value, 1)
            for column in ("path", "host")
            if column in self._columns and isinstance(text := row[column], UnexplainedHash)
        }
        return {**row, **late} if late else row

    def _count_ending(self, row: Mapping[str, Any]) -> None:
        """DFTracer's last event has the number of events before it."""
        if row["name"] == "end":
            announced = parse_int64(json.loads(row["args"]).get("num_events"))
            if announced is not None:
                self._num_announced += announced
                self._num_endings += 1

    def _find_faults(self) -> Iterator[str]:
        """What is wrong with the file as a whole, after its last line."""
        account = self._account
        if self._rebound:
            num_events = sum(self._num_named[kind].get(value, 0) for kind, value in self._rebound)
            yield (
                f"{len(self._rebound):,} hashes stand for two names: {num_events:,} events with them have the"
                " one that was explained last before them"
            )
        if self._unexplained:
            num_events = sum(self._unexplained.values())
            yield f"{num_events} events name files or hosts by hashes that no line explains"
        if self._num_endings:
            # A count beside the file is older than the ending: its process was killed between the two.
            account.announced_events = self._num_announced
        if account.announced_events is None:
            return
        num_events = account.events + account.salvaged - self._num_endings
        num_events += account.metadata if self._counts_metadata and self._num_endings else 0
        account.missing = max(account.announced_events - num_events, 0)
        if account.missing:
            yield (
                f"its writer counted {account.announced_events} events, {num_events} are here:"
                f" {account.missing} missing"
            )


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole lines that are parsed together."""

    parts: Sequence[memoryview | bytes]
    """Each has whole lines."""
    lines_of_parts: Sequence[int]

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        return cls([content], [count_lines(content)])

    @property
    def num_lines(self) -> int:
        return sum(self.lines_of_parts)

    def join(self) -> bytes:
        return b"".join(self.parts)

    def lines(self) -> list[bytes]:
        return self.join().split(b"\n")[:-1]

    def find_lines(self, numbers: Numbers) -> Iterator[tuple[int, bytes]]:
        """The lines of these numbers."""
        first = 0
        for part, num_lines in zip(self.parts, self.lines_of_parts, strict=True):
            inside = numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, first + num_lines)]
            if len(inside):
                ends = np.flatnonzero(np.frombuffer(part, dtype=np.uint8) == _NEWLINE)
                starts = np.concatenate(([0], ends + 1))
                for place in (inside - first).tolist():
                    yield first + place, bytes(part[starts[place] : ends[place]])
            first += num_lines


def _gather_blocks(chunks: Iterator[Chunk]) -> Iterator[_Block]:
    parts: list[memoryview] = []
    lines_of_parts: list[int] = []
    num_bytes = 0
    for chunk in chunks:
        parts.append(memoryview(chunk.content)[chunk.start : chunk.stop])
        lines_of_parts.append(count_lines(parts[-1]))
        num_bytes += len(parts[-1])
        if num_bytes >= BLOCK_BYTES:
            yield _Block(parts, lines_of_parts)
            parts, lines_of_parts, num_bytes = [], [], 0
    if parts:
        yield _Block(parts, lines_of_parts)


def _number_lines(block: _Block, num_rows: int) -> Numbers | None:
    """The line of each row; None if it is unknown, because DuckDB sees other lines than Python does."""
    if num_rows == block.num_lines:
        return np.arange(num_rows)
    written = np.flatnonzero([bool(line.strip()) for line in block.lines()])
    return written if len(written) == num_rows else None


def _argument(document: Mapping[str, Any], key: str) -> Any:
    arguments = document.get("args")
    return arguments.get(key) if isinstance(arguments, dict) else None
