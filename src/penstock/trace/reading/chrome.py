"""Chrome traces as one JSON document, as browsers, Perfetto and PyTorch's profiler write them.

An event is an object in the array `traceEvents`, or in the array that is the whole document. Before the
events, PyTorch's profiler (Kineto) writes what applies to all of them: the time from which their times count,
the host, the rank. Accounts count objects as lines. Invariants: memory is bounded; a damaged object does not
affect those after it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Final

from penstock.trace.event_schema import FileAccount, LineFate, ParsedLine, parse_int64
from penstock.trace.reading.json_lines import clean_text, parse_event, parse_line

_OBJECT_LIMIT: Final = 1 << 20
"""The number of characters after which an object without an end counts as damaged."""
_LONGEST_HEAD: Final = 16 << 20
"""The number of characters after which the search for an array of events ends."""
_MOST_OPEN: Final = 1 << 16
"""The most spans that may be open at a time."""
_MOST_DAMAGED: Final = 1 << 12
"""The most objects that may be damaged: after each, the beginning of another is searched for."""
_ARRAY: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_BARE_ARRAY: Final = re.compile(r"\s*\[")
_ROUNDING_NOTED: Final = 0.01
_BETWEEN: Final = re.compile(r"[\s,]*")
_NEXT: Final = re.compile(r"\{\s*\"")

_BASE_TIME: Final = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_HOST: Final = re.compile(
    r'"host_?name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[\da-fA-F]{4}))*")', re.ASCII
)
_RANK: Final = re.compile(r'"distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*(\d{1,9})\b')
_LAUNCHING_CATEGORIES: Final = ("cuda_runtime", "cuda_driver")
_DEVICE_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")


class ChromeDocument:
    """Reads one document, piece by piece; `file_rank` is the rank in the file's name."""

    def __init__(self, account: FileAccount, file_rank: int | None) -> None:
        self._account = account
        self._file_rank = file_rank
        self._decoder = json.JSONDecoder(parse_constant=str)
        self._spans: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        self._num_open = self._num_damaged = 0
        self._is_ended = False
        # What the text before the events says about all of them.
        self._base_ns = 0
        self._host: str | None = None
        self._rank: int | None = None
        self._profiled_pid: int | None = None
        self._launching_pids: set[int | None] = set()
        self._sum_us = self._written_sum_us = 0.0

    def read(self, pieces: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of the document's events, roughly in the document's order."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        text, is_inside = "", False
        for piece in pieces:
            text += decoder.decode(piece)
            begin = None if is_inside else _ARRAY.search(text) or _BARE_ARRAY.match(text)
            if begin:
                is_inside = True
                base, host, rank = (find.search(text, 0, begin.end()) for find in (_BASE_TIME, _HOST, _RANK))
                self._base_ns = int(base[1]) if base else 0
                self._host = clean_text(json.loads(host[1])) if host else None
                self._rank = int(rank[1]) if rank else None
                text = text[begin.end() :]
            if is_inside:
                text = yield from self._take(text, is_last=False)
            elif len(text) > _LONGEST_HEAD:
                break
            if self._is_ended:
                text = text[:_OBJECT_LIMIT]
        text += decoder.decode(b"", final=True)
        text = yield from self._take(text, is_last=True)
        self._find_faults(text, is_inside=is_inside)

    def _find_faults(self, rest: str, *, is_inside: bool) -> None:
        """Report the faults of the document, and facts that come too late, after the events they concern."""
        account = self._account
        if _BASE_TIME.search(rest) and not self._base_ns:
            account.faults.append(
                "its baseTimeNanoseconds comes after the events, so their times are not since 1970"
            )
        late = _RANK.search(rest)
        if late and self._rank is None and self._file_rank is None:
            account.notes.append(
                f"its rank {late[1]} comes after the events, which have none: put rank{late[1]} into the"
                " file's name"
            )
        if not is_inside:
            account.faults.append("it is JSON, but has no array of events")
        elif not self._is_ended:
            account.faults.append("the document ends before its array of events does")
        if abs(self._sum_us - self._written_sum_us) > _ROUNDING_NOTED * self._written_sum_us:
            account.notes.append(
                f"its durations add up to {self._written_sum_us:,.3f} us, but after all times are cut to"
                f" whole microseconds, to {self._sum_us:,.0f} us"
            )
        if self._num_open:
            account.faults.append(f"{self._num_open} spans begin and never end")

    def _take(self, text: str, *, is_last: bool) -> Generator[Mapping[str, Any], None, str]:
        """Yield the rows of the objects at the beginning of the text; return the rest of the text."""
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
                self._num_damaged += 1
                if self._num_damaged > _MOST_DAMAGED:
                    self._account.faults.append("too many objects are damaged: the rest was not read")
                    self._is_ended = True
                    break
                match = _NEXT.search(text, at + 1)
                end = match.start() if match else len(text)
                parsed = parse_line(text[at:end].encode(), str, 1000, self._base_ns)
            else:
                parsed = self._parse_object(document)
            self._account.lines += 1
            self._account.count(parsed, text[at:end][:400].encode())
            if parsed.row is not None:
                yield self._place(parsed.row)
            at = end
        return text[at:]

    def _parse_object(self, document: Any) -> ParsedLine:
        if not isinstance(document, dict):
            return ParsedLine(LineFate.DROPPED, reason="not an object")
        phase, thread = document.get("ph"), (str(document.get("pid")), str(document.get("tid")))
        if phase == "B":
            if self._num_open == _MOST_OPEN:
                return ParsedLine(LineFate.DROPPED, reason="too many spans are open")
            self._num_open += 1
            self._spans.setdefault(thread, []).append(document)
            return ParsedLine(LineFate.METADATA)
        if phase == "E":
            opened = self._spans.get(thread)
            if not opened:
                return ParsedLine(LineFate.DROPPED, reason="ends a span that never began")
            begin = opened.pop()
            self._num_open -= 1
            try:
                dur = document["ts"] - begin["ts"]
            except (KeyError, TypeError):
                dur = None
            document = {**begin, "ph": "X", "dur": dur, "args": {**_arguments(begin), **_arguments(document)}}
        if document.get("cat") == "Trace" and document.get("pid") == "Spans":
            # The time for which the profiler itself ran, which belongs to no process.
            return ParsedLine(LineFate.METADATA)
        if document.get("name") == "process_labels" and _arguments(document).get("labels") == "CPU":
            self._profiled_pid = parse_int64(document.get("pid"))
        if document.get("cat") in _LAUNCHING_CATEGORIES:
            self._launching_pids.add(parse_int64(document.get("pid")))
        parsed = parse_event(document, str, 1000, self._base_ns)
        if parsed.row is not None:
            self._sum_us += parsed.row["dur_us"]
            self._written_sum_us += float(document.get("dur", 0))
        return parsed

    def _place(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add to an event's row what the document's head says: its host, rank and process."""
        # Chrome's traces do not explain hashes, so a hash is used unchanged.
        host = row["host"] or row["hhash"] or self._host
        placed = {**row, "host": host, "path": row["path"] or row["fhash"]}
        if self._rank is not None:
            placed["rank"] = self._rank
        process = self._profiled_pid
        if process is None and len(self._launching_pids) == 1:
            (process,) = self._launching_pids
        if process is not None and row["cat"] in _DEVICE_CATEGORIES:
            # Devices are numbered as if they were processes. What runs on them belongs to the process that is
            # labeled as profiled, or otherwise to the only process that has called CUDA.
            placed["pid"] = process
        return placed


def _arguments(document: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = document.get("args")
    return arguments if isinstance(arguments, dict) else {}
