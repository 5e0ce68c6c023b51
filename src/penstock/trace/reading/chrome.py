"""Chrome traces as one JSON document, as browsers, Perfetto and PyTorch's profiler write them.

An event is an object of the array `traceEvents`, or of the array that is the document. PyTorch's profiler
(Kineto) writes before it what holds for all events: the time that theirs count from, the host, the rank.
Accounts count objects as lines. Invariants: memory is bounded; a damaged object does not affect those
behind it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.trace.event_schema import FileAccount
from penstock.trace.reading.event_batch import (
    BATCH_ROWS,
    LineFate,
    ParsedLine,
    TraceFile,
    build_batch,
    count_line,
    parse_int64,
)
from penstock.trace.reading.json_lines import parse_event, parse_line

if TYPE_CHECKING:
    import pyarrow as pa


_OBJECT_LIMIT: Final = 1 << 20
"""Characters after which an object that does not end is taken for damaged."""
_ARRAY: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_ROUNDING_NOTED: Final = 0.01
_BETWEEN: Final = re.compile(r"[\s,]*")
_NEXT: Final = re.compile(r"\{\s*\"")


_BASE_TIME: Final = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_HOST: Final = re.compile(r'"host_?name"\s*:\s*("(?:[^"\\]|\\.)*")')
_RANK: Final = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})\b')
_LAUNCHING_CATEGORIES: Final = ("cuda_runtime", "cuda_driver")
_DEVICE_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


@dataclass(frozen=True, slots=True)
class _ProfiledRun:
    """What the head of a document says about all its events."""

    base_ns: int = 0
    host: str | None = None
    rank: int | None = None

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Find it in the text before or behind the array of events."""
        base, host, rank = (pattern.search(text) for pattern in (_BASE_TIME, _HOST, _RANK))
        return cls(
            base_ns=int(base[1]) if base else 0,
            host=json.loads(host[1]) if host else None,
            rank=int(rank[1]) if rank else None,
        )


class ChromeDocument:
    """Reads the pieces of one document."""

    def __init__(self, file: TraceFile, account: FileAccount) -> None:
        self._file = file
        self._account = account
        self._decoder = json.JSONDecoder(parse_constant=str)
        self._spans: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        self._is_ended = False
        self._profiled = _ProfiledRun()
        self._profiled_pid: int | None = None
        self._launching_pids: set[int | None] = set()
        self._sum_us = self._written_sum_us = 0.0

    def read(self, pieces: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        """The document's events, roughly in its order."""
        rows: list[Mapping[str, Any]] = []
        for parsed in self._objects(pieces):
            if parsed.row is not None:
                rows.append(self._place(parsed.row))
            if len(rows) >= BATCH_ROWS:
                yield build_batch(rows, self._file)
                rows = []
        self._note_rounding()
        num_open = sum(map(len, self._spans.values()))
        if num_open:
            self._account.faults.append(f"{num_open} spans begin and never end")
        if rows:
            yield build_batch(rows, self._file)

    def _objects(self, pieces: Iterable[bytes]) -> Iterator[ParsedLine]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        text, is_inside = "", False
        for piece in pieces:
            text += decoder.decode(piece)
            if not is_inside:
                start = _find_array(text)
                is_inside = start >= 0
                self._profiled = _ProfiledRun.from_text(text[:start]) if is_inside else self._profiled
                text = text[start:] if is_inside else text
            if is_inside:
                text = yield from self._take(text, is_last=False)
        text += decoder.decode(b"", final=True)
        text = yield from self._take(text, is_last=True)
        self._find_late_facts(_ProfiledRun.from_text(text))
        if not is_inside:
            self._account.faults.append("it is JSON, but has no array of events")
        elif not self._is_ended:
            self._account.faults.append("the document ends before its array of events does")

    def _find_late_facts(self, late: _ProfiledRun) -> None:
        """Report what stands behind the events, which were passed on before it was known."""
        if late.base_ns and not self._profiled.base_ns:
            self._account.faults.append(
                "its baseTimeNanoseconds stands behind the events, so their times are not since 1970"
            )
        if late.rank is not None and self._profiled.rank is None and self._file.rank is None:
            self._account.notes.append(
                f"its rank {late.rank} stands behind the events, which have none:"
                f" put rank{late.rank} into its name"
            )

    def _take(self, text: str, *, is_last: bool) -> Generator[ParsedLine, None, str]:
        """Parse the objects at the beginning of the text; returns the rest of it."""
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
                match = _NEXT.search(text, at + 1)
                end = match.start() if match else len(text)
                damaged = text[at:end].encode()
                yield self._count(parse_line(damaged, str, 1000, self._profiled.base_ns), text[at:end])
            else:
                yield self._count(self._parse_object(document), text[at:end])
            at = end
        return text[at:]

    def _count(self, parsed: ParsedLine, text: str) -> ParsedLine:
        self._account.lines += 1
        count_line(parsed, text[:400].encode(), self._account)
        return parsed

    def _parse_object(self, document: Any) -> ParsedLine:
        if not isinstance(document, dict):
            return ParsedLine(LineFate.DROPPED, reason="not an object")
        phase, thread = document.get("ph"), (str(document.get("pid")), str(document.get("tid")))
        if phase == "B":
            self._spans.setdefault(thread, []).append(document)
            return ParsedLine(LineFate.METADATA)
        if phase == "E":
            opened = self._spans.get(thread)
            if not opened:
                return ParsedLine(LineFate.DROPPED, reason="ends what never began")
            document = _join_span(opened.pop(), document)
        if document.get("cat") == "Trace" and document.get("pid") == "Spans":
            # How long the profiler itself ran; it has no process.
            return ParsedLine(LineFate.METADATA)
        if document.get("name") == "process_labels" and _arguments(document).get("labels") == "CPU":
            self._profiled_pid = parse_int64(document.get("pid"))
        if document.get("cat") in _LAUNCHING_CATEGORIES:
            self._launching_pids.add(parse_int64(document.get("pid")))
        parsed = parse_event(document, str, 1000, self._profiled.base_ns)
        if parsed.row is not None:
            self._sum_us += parsed.row["dur_us"]
            self._written_sum_us += float(document.get("dur", 0))
        return parsed

    def _note_rounding(self) -> None:
        """Say that durations are too short for whole microseconds, if their sum shows it."""
        if abs(self._sum_us - self._written_sum_us) > _ROUNDING_NOTED * self._written_sum_us:
            self._account.notes.append(
                f"its durations add up to {self._written_sum_us:,.3f} us, in whole microseconds, which all"
                f" times are cut to, to {self._sum_us:,.0f} us"
            )

    def _place(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The event's row with what the document's head says: its host, rank and process."""
        profiled = self._profiled
        # Chrome's traces explain no hashes, so a hash is used as it is.
        host = row["host"] or row["hhash"] or profiled.host
        placed = {**row, "host": host, "path": row["path"] or row["fhash"]}
        if profiled.rank is not None:
            placed["rank"] = profiled.rank
        process = self._find_process() if row["cat"] in _DEVICE_CATEGORIES else None
        if process is not None:
            # Devices are numbered as if they were processes; what runs on them belongs to the process.
            placed["pid"] = process
        return placed

    def _find_process(self) -> int | None:
        """The process labelled as profiled, else the only one that has called CUDA; None if unknown."""
        if self._profiled_pid is None and len(self._launching_pids) == 1:
            return next(iter(self._launching_pids))
        return self._profiled_pid


def _join_span(begin: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
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


def _find_array(text: str) -> int:
    """Where the first event of the array begins; -1 if the array doesn't begin here."""
    match = _ARRAY.search(text)
    if match:
        return match.end()
    bare = text.lstrip()
    return len(text) - len(bare) + 1 if bare.startswith("[") else -1
