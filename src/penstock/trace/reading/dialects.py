"""Which dialect a trace file speaks, by its first bytes, whatever its name."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Final

from penstock.trace.reading.darshan import MARK
from penstock.trace.reading.strace import FIRST_LINE


class Dialect(StrEnum):
    """The forms of traces that are read."""

    JSON_LINES = "json lines"
    CHROME = "chrome"
    STRACE = "strace"
    DARSHAN = "darshan dxt"


_HEAD_BYTES: Final = 1 << 16
_TRACE_EVENTS: Final = re.compile(
    rb'\s*\{[^\n]*?"traceEvents"\s*:|\s*\{\s*("(?:schemaVersion|displayTimeUnit|otherData|deviceProperties|metadata|traceEvents)")'
)


def detect(head: bytes) -> Dialect:
    """The dialect of a file that begins so. What is none of them is read as JSON lines, and dropped."""
    head = head[:_HEAD_BYTES]
    if FIRST_LINE.match(head):
        return Dialect.STRACE
    if MARK.search(head[:4096]):
        return Dialect.DARSHAN
    if _TRACE_EVENTS.match(head) or _is_one_array(head):
        return Dialect.CHROME
    return Dialect.JSON_LINES


def _is_one_array(head: bytes) -> bool:
    """Whether events are not one a line: several on one, or one on several."""
    bare = head.lstrip()
    if not bare.startswith(b"["):
        return False
    line = bare[1:].lstrip().partition(b"\n")[0].rstrip(b", \r]")
    if not line.startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return b"},{" in line or b"}, {" in line or b'"' not in line or line.endswith((b"{", b'"', b":"))
    return False
