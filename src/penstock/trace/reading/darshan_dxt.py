"""Darshan's extended traces (DXT) as text of `darshan-dxt-parser`: every read and write of each rank.

Times are seconds since the job began, whose start is in the text's head. MPI-IO's segments have a category of
their own, because the same bytes are seen again as POSIX below it.
"""

import re
from collections.abc import Iterable
from typing import Final

from penstock.trace.reading.event_batch import LineFate, ParsedLine, parse_int64

MARK: Final = re.compile(rb"#\s*(?:DXT,|darshan log version|Module\s+Rank\s+Wt/Rd)")
"""What the head of a text of this dialect contains."""

_FILE: Final = re.compile(r"#\s*DXT,\s*file_id:\s*\d+,\s*file_name:\s*(.*?)\s*")
_PLACE: Final = re.compile(r"#\s*DXT,\s*rank:\s*(-?\d+),\s*hostname:\s*(\S+)\s*")
_START: Final = re.compile(r"#\s*start_time:\s*(\d+)(?:\.(\d+))?.*")
_SEGMENT: Final = re.compile(
    r"\s*X_(\w+)\s+(-?\d+)\s+(read|write)\s+(\d+)\s+(-?\d+)\s+(\d+)\s+(\d+\.?\d*)\s+(\d+\.?\d*)"
    r"(?:\s+\[.*\])?(?:\s+(N/A|\d+))?\s*"
)


class DarshanDxt:
    """Reads the lines of one text."""

    def __init__(self) -> None:
        self._start_us: int | None = None
        self._path: str | None = None
        self._host: str | None = None
        self._num_relative = self._num_segments = 0

    def parse(self, line: str) -> ParsedLine:
        """Parse a line: a segment, an explanation, or damage."""
        if not line.strip():
            return ParsedLine(LineFate.BLANK)
        if line.lstrip().startswith("#"):
            self._learn(line)
            return ParsedLine(LineFate.METADATA)
        segment_line = _SEGMENT.fullmatch(line)
        if segment_line is None:
            return ParsedLine(LineFate.DROPPED, reason="not a segment")
        module, rank, verb, segment, offset, length, begin, end, thread = segment_line.groups()
        begin_us, end_us = _microseconds(begin), _microseconds(end)
        size_bytes = parse_int64(length)
        if (
            end_us < begin_us
            or size_bytes is None
            or parse_int64(offset) is None
            or len(begin) > 18
            or len(rank) > 9
        ):
            return ParsedLine(LineFate.DROPPED, reason="impossible numbers")
        self._num_segments += 1
        self._num_relative += self._start_us is None
        return ParsedLine(
            LineFate.EVENT,
            row={
                "ts_us": (self._start_us or 0) + begin_us,
                "dur_us": end_us - begin_us,
                "name": verb,
                "cat": module,
                "pid": int(rank),
                "tid": _thread_number(thread, int(rank)),
                "rank": int(rank) if int(rank) >= 0 else None,
                "host": self._host,
                "path": self._path,
                "size_bytes": size_bytes,
                "offset": parse_int64(offset) if int(offset) >= 0 else None,
                "ret": size_bytes,
                "args": f'{{"segment":{int(segment)}}}',
            },
        )

    def finish(self) -> Iterable[ParsedLine]:
        """Nothing spans lines here."""
        return ()

    def faults(self) -> Iterable[str]:
        """Whether there are no calls, or their times are relative."""
        if not self._num_segments:
            yield "it has no segments: Darshan traced no reads and no writes"
        if self._num_relative:
            yield f"{self._num_relative} events have times since the job began: there is no start_time"

    def _learn(self, line: str) -> None:
        if match := _FILE.fullmatch(line):
            self._path = match[1]
        elif match := _PLACE.fullmatch(line):
            self._host = match[2]
        elif (match := _START.fullmatch(line)) and len(match[1]) < 12:
            self._start_us = int(match[1]) * 1_000_000 + int((match[2] or "0").ljust(6, "0")[:6])


def _thread_number(thread: str | None, rank: int) -> int:
    """The thread, where Darshan recorded it (since 3.5); else there is one for each rank."""
    number = parse_int64(thread) if thread else None
    return rank if number is None else number


def _microseconds(seconds: str) -> int:
    whole_seconds, _, fraction = seconds.partition(".")
    digits = fraction.ljust(7, "0")
    return int(whole_seconds) * 1_000_000 + int(digits[:6]) + (digits[6] >= "5")
