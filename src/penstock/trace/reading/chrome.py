"""Chrome traces as one JSON document, as browsers, Perfetto and PyTorch's profiler write them.

An event is an object of the array `traceEvents`, or of the array that is the document. What accounts call
lines are objects here. Invariants: memory is bounded; a damaged object costs itself, never those behind it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.trace.reading.columns import Clock, Origin, batch_of
from penstock.trace.reading.odd import Fate, OddLine, read_document, read_odd
from penstock.trace.reading.rows import count

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.trace.event import FileAccount
    from penstock.trace.reading.texts import Kind

_ROWS: Final = 1 << 15
_OBJECT_LIMIT: Final = 1 << 20
"""Characters of the largest object that is waited for."""
_ARRAY: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN: Final = re.compile(r"[\s,]*")
_NEXT: Final = re.compile(r"\{\s*\"")


class ChromeDocument:
    """Reads the pieces of one document."""

    def __init__(self, origin: Origin, account: FileAccount) -> None:
        self._origin = origin
        self._account = account
        self._decoder = json.JSONDecoder(parse_constant=str)
        self._spans: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        self._ranks: dict[int, int] = {}
        self._is_ended = False

    def batches(self, pieces: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        """The document's events, roughly in its order."""
        rows: list[Mapping[str, Any]] = []
        for odd in self._objects(pieces):
            if odd.row is not None:
                rows.append(odd.row)
            if len(rows) >= _ROWS:
                yield batch_of(rows, self._origin, Clock(ranks=self._ranks))
                rows = []
        num_open = sum(map(len, self._spans.values()))
        if num_open:
            self._account.faults.append(f"{num_open} spans begin and never end")
        if rows:
            yield batch_of(rows, self._origin, Clock(ranks=self._ranks))

    def _objects(self, pieces: Iterable[bytes]) -> Iterator[OddLine]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        text, is_inside = "", False
        for piece in pieces:
            text += decoder.decode(piece)
            if not is_inside:
                start = _array_start(text)
                is_inside = start >= 0
                text = text[start:] if is_inside else text
            if is_inside:
                text = yield from self._take(text, is_last=False)
        text += decoder.decode(b"", final=True)
        yield from self._take(text, is_last=True)
        if not self._is_ended:
            self._account.faults.append("the document ends before its array of events does")

    def _take(self, text: str, *, is_last: bool) -> Generator[OddLine, None, str]:
        """Take whole objects from the text's beginning; gives what is left of it."""
        at = 0
        while not self._is_ended:
            between = _BETWEEN.match(text, at)
            at = between.end() if between else at
            if at >= len(text):
                break
            if text[at] == "]":
                self._is_ended = True
                break
            try:
                document, end = self._decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                if not is_last and len(text) - at < _OBJECT_LIMIT:
                    break
                found = _NEXT.search(text, at + 1)
                end = found.start() if found else len(text)
                yield self._counted(read_odd(text[at:end].encode(), _unbound, 1000), text[at:end])
            else:
                yield self._counted(self._whole(document), text[at:end])
            at = end
        return text[at:]

    def _counted(self, odd: OddLine, text: str) -> OddLine:
        self._account.lines += 1
        count(odd, text[:400].encode(), self._account)
        return odd

    def _whole(self, document: Any) -> OddLine:
        if not isinstance(document, dict):
            return OddLine(Fate.DROPPED, reason="not an object")
        phase, thread = document.get("ph"), (str(document.get("pid")), str(document.get("tid")))
        if phase == "B":
            self._spans.setdefault(thread, []).append(document)
            return OddLine(Fate.METADATA)
        if phase == "E":
            opened = self._spans.get(thread)
            if not opened:
                return OddLine(Fate.DROPPED, reason="ends what never began")
            document = _joined(opened.pop(), document)
        return read_document(document, _unbound, 1000)


def _joined(begin: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    """A span's two events as one complete event."""
    try:
        dur = end["ts"] - begin["ts"]
    except (KeyError, TypeError):
        dur = None
    arguments = {**_arguments(begin), **_arguments(end)}
    return {**begin, "ph": "X", "dur": dur, "args": arguments}


def _arguments(document: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = document.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _unbound(_kind: Kind, value: bytes) -> str:
    """Chrome's traces have no hashes; what looks like one stands for itself."""
    return value.decode()


def _array_start(text: str) -> int:
    """Where the first event of the array begins; -1 if the array doesn't begin here."""
    found = _ARRAY.search(text)
    if found:
        return found.end()
    bare = text.lstrip()
    return len(text) - len(bare) + 1 if bare.startswith("[") else -1
