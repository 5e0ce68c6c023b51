"""Traces of one JSON object a line, of DFTracer's three generations and kin: pages -> batches, all accounted.

Place in the flow: the loop of `scan.py` takes whole lines, `odd.py` the others, `columns.py` makes batches.
Invariant: the account's sum holds after every page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.trace.reading.book import Book
from penstock.trace.reading.columns import Clock, Origin, batch_of, take_batch, whole
from penstock.trace.reading.needles import NO_NEEDLES, Needles
from penstock.trace.reading.odd import Fate, OddLine, read_odd
from penstock.trace.reading.scan import Stop
from penstock.trace.reading.texts import Kind, State

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.event import FileAccount
    from penstock.trace.reading.pages import Page

_UNITS_NS: Final = {"NS": 1, "US": 1000, "MS": 1_000_000, "SEC": 1_000_000_000}
_KINDS: Final = {"FH": Kind.FILE, "HH": Kind.HOST, "SH": Kind.STRING}
_RANK: Final = re.compile(r"Rank (\d{1,9})\b")


class JsonLines:
    """Reads one file's pages; `account` tells afterwards what became of its lines."""

    def __init__(self, origin: Origin, account: FileAccount, needles: Needles = NO_NEEDLES) -> None:
        self._origin = origin
        self._account = account
        self._book = Book(needles)
        self._clock = Clock(ranks={})
        self._odd_rows: list[Mapping[str, Any]] = []
        self._num_ends = self._num_announced = 0
        self._num_unexplained = 0

    def batches(self, pages: Iterator[Page]) -> Iterator[pa.RecordBatch]:
        """The file's events, roughly in the order of its lines."""
        for page in pages:
            yield from self._take_page(page)
        yield from self._flush()
        self._account.faults.extend(self._faults())

    def _faults(self) -> Iterator[str]:
        """What is wrong with the file as a whole, after its last line."""
        account = self._account
        if self._num_unexplained:
            yield f"{self._num_unexplained} events name files or hosts by hashes that no line explains"
        if self._num_ends:
            # A count beside the file is older than the ending: its process was killed between the two.
            account.announced_events = self._num_announced
        if account.announced_events is None or account.skipped:
            return
        num_events = account.events + account.salvaged - self._num_ends
        account.missing = max(account.announced_events - num_events, 0)
        if account.missing:
            yield (
                f"its writer counted {account.announced_events} events, {num_events} are here:"
                f" {account.missing} missing"
            )

    def _take_page(self, page: Page) -> Iterator[pa.RecordBatch]:
        content = np.frombuffer(page.content, np.uint8)
        base = content.ctypes.data
        at, stop = base + page.start, base + page.stop
        # An escape may hide what is searched for, so a page that has one is read whole.
        has_escapes = page.content.find(b"\\", page.start, page.stop) >= 0
        take = self._book.run if has_escapes else self._book.search
        while True:
            came_back = take(at, stop)
            at = int(self._book.state[State.AT])
            if came_back == Stop.END:
                break
            if came_back == Stop.FULL:
                yield from self._flush()
                self._book.make_room()
                continue
            end = page.content.index(b"\n", at - base) + 1
            yield from self._take_odd(page.content[at - base : end])
            at = base + end
        self._count()

    def _count(self) -> None:
        """Bring the account up to date with the loop's own counters, which start anew."""
        state, account = self._book.state, self._account
        cells = [State.LINES, State.BLANK, State.METADATA, State.SKIPPED]
        lines, blank, metadata, skipped = (int(state[cell]) for cell in cells)
        account.lines += lines
        account.blank += blank
        account.metadata += metadata
        account.skipped += skipped
        account.events += lines - blank - metadata - skipped
        state[cells] = 0

    def _take_odd(self, line: bytes) -> Iterator[pa.RecordBatch]:
        self._count()
        self._account.lines += 1
        odd = read_odd(line, self._book.bound, self._clock.ns_per_tick)
        match odd.fate:
            case Fate.BLANK:
                self._account.blank += 1
            case Fate.METADATA:
                self._account.metadata += 1
                if odd.document is not None and self._changes_clock(odd.document):
                    yield from self._flush()
                self._learn(odd.document or {})
            case Fate.EVENT:
                self._account.events += 1
            case Fate.SALVAGED | Fate.DROPPED:
                self._count_damage(odd, line)
        if odd.row is not None:
            self._odd_rows.append(odd.row)
            self._note_end(odd)
        if len(self._odd_rows) >= self._book.rows.shape[1]:
            yield from self._flush()

    def _count_damage(self, odd: OddLine, line: bytes) -> None:
        text = line.rstrip(b"\r\n")[:400].decode(errors="backslashreplace")
        is_salvaged = odd.fate is Fate.SALVAGED
        self._account.count_damage(self._account.lines, odd.reason, text, salvaged=is_salvaged)

    def _changes_clock(self, document: Mapping[str, Any]) -> bool:
        return bool(_argument(document, "name") == "time_metric")

    def _learn(self, document: Mapping[str, Any]) -> None:
        """Metadata that the loop leaves to Python: units, ranks, and hashes of unusual texts."""
        name, value = _argument(document, "name"), _argument(document, "value")
        if name == "time_metric":
            self._set_unit(str(value))
        kind = _KINDS.get(str(document.get("name")))
        if kind is not None and isinstance(name, str):
            code = self._book.code_of(name.encode(errors="backslashreplace"))
            self._book.bind(kind, str(value).encode(errors="backslashreplace"), code)
        rank = _RANK.match(str(value)) or _RANK.match(str(_argument(document, "process_name")))
        pid = whole(document.get("pid"))
        if rank and pid is not None and self._clock.ranks is not None:
            self._clock.ranks[pid] = int(rank[1])

    def _set_unit(self, unit: str) -> None:
        if unit not in _UNITS_NS:
            self._account.faults.append(
                f"its time_metric {unit!r} is unknown: times are read as microseconds"
            )
        self._clock.ns_per_tick = _UNITS_NS.get(unit, 1000)

    def _note_end(self, odd: OddLine) -> None:
        """The closing event of DFTracer tells how many came before it."""
        document = odd.document or {}
        announced = whole(_argument(document, "num_events"))
        if document.get("name") == "end" and announced is not None:
            self._num_announced += announced
            self._num_ends += 1

    def _flush(self) -> Iterator[pa.RecordBatch]:
        if self._book.num_rows:
            batch, num_unexplained = take_batch(self._book, self._origin, self._clock)
            self._num_unexplained += num_unexplained
            yield batch
        if self._odd_rows:
            yield batch_of(self._odd_rows, self._origin, self._clock)
            self._odd_rows = []


def _argument(document: Mapping[str, Any], key: str) -> Any:
    arguments = document.get("args")
    return arguments.get(key) if isinstance(arguments, dict) else None
