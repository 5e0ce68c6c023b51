"""One line that the loop did not take: read by the json module, or searched for what is left of an event.

Invariant: every line becomes exactly one of event, salvaged event, metadata, blank or dropped, with a reason
where it is damaged; whatever bytes it holds, this never fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from penstock.trace.reading.columns import size_of, whole
from penstock.trace.reading.texts import Kind

Bound = Callable[[Kind, bytes], str]
"""The text that a hash stands for."""


class Fate(Enum):
    """What became of a line."""

    EVENT = "event"
    SALVAGED = "salvaged"
    METADATA = "metadata"
    BLANK = "blank"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class OddLine:
    """A line read by Python: its fate, the event's row or the metadata's document, and what is wrong."""

    fate: Fate
    row: Mapping[str, Any] | None = None
    document: Mapping[str, Any] | None = None
    reason: str = ""


_METADATA_PHASES: Final = ("M", 4)
_COMPLETE_PHASES: Final = ("X", 1)
_PASSING_PHASES: Final = (2, 3, *"CiIstfbneNODPRcvV(),")
"""Counters, marks and flows: they take no time, and the table holds what does."""

_TAKEN: Final = frozenset(("fname", "fhash", "hostname", "hhash", "ret", "offset", "epoch", "step"))
_SALVAGE_TEXT: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"(.*?)"\s*(?=,\s*"|\}}|$)', re.DOTALL)
    for key in ("name", "cat", "fname", "hostname", "fhash", "hhash")
}
_SALVAGE_NUMBER: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"?(-?\d{{1,18}})"?\s*(?=[,}}])')
    for key in (
        "pid",
        "tid",
        "ts",
        "dur",
        "ret",
        "offset",
        "epoch",
        "step",
        "size",
        "image_size",
        "fhash",
        "hhash",
    )
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")


def read_odd(line: bytes, bound: Bound, ns_per_tick: int) -> OddLine:
    """Tell what a line is that the loop did not take."""
    bare = line.strip(b" \t\r\n")
    bare = bare[1:].lstrip() if bare.startswith((b"[", b"]")) else bare
    bare = bare.rstrip(b"],").rstrip() if bare.endswith((b",", b"]")) else bare
    if not bare:
        return OddLine(Fate.BLANK)
    try:
        text = bare.decode()
        document = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError) as error:
        return _salvage(bare, _reason(bare, error), bound, ns_per_tick)
    if not isinstance(document, dict):
        return OddLine(Fate.DROPPED, reason="not an object")
    return read_document(document, bound, ns_per_tick)


def read_document(document: Mapping[str, Any], bound: Bound, ns_per_tick: int) -> OddLine:
    """Tell what a whole JSON object is."""
    phase = document.get("ph", "X")
    if phase in _METADATA_PHASES:
        return OddLine(Fate.METADATA, document=document)
    if not isinstance(phase, str | int) or phase not in _COMPLETE_PHASES:
        is_passing = isinstance(phase, str | int) and phase in _PASSING_PHASES
        return OddLine(Fate.METADATA) if is_passing else OddLine(Fate.DROPPED, reason="unknown phase")
    row = _row(document, bound, ns_per_tick)
    if row is None:
        return OddLine(Fate.DROPPED, reason="no name or no time")
    return OddLine(Fate.EVENT, row=row, document=document)


def _reason(bare: bytes, error: Exception) -> str:
    """The kind of damage, in the words of accounts."""
    if isinstance(error, UnicodeDecodeError):
        return "bad UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if _CONTROL.search(bare.decode(errors="replace")):
        return "control character"
    if not bare.startswith(b"{"):
        return "not JSON"
    return "malformed" if bare.endswith(b"}") else "cut short"


def _salvage(bare: bytes, reason: str, bound: Bound, ns_per_tick: int) -> OddLine:
    """Search a damaged line for an event's keys; without a name, a time and a duration it is lost."""
    text = bare.decode(errors="backslashreplace")
    found: dict[str, Any] = {
        key: match[1] for key, pattern in _SALVAGE_TEXT.items() if (match := pattern.search(text))
    }
    found |= {
        key: int(match[1]) for key, pattern in _SALVAGE_NUMBER.items() if (match := pattern.search(text))
    }
    if not bare.startswith(b"{") or not {"name", "ts", "dur", "pid"} <= found.keys():
        return OddLine(Fate.DROPPED, reason=reason)
    found = {
        key: _UNPRINTABLE.sub(lambda letter: f"\\x{ord(letter[0]):02x}", value)
        if isinstance(value, str)
        else value
        for key, value in found.items()
    }
    top: dict[str, Any] = {
        key: found.pop(key) for key in ("name", "cat", "pid", "tid", "ts", "dur") if key in found
    }
    row = _row({**top, "args": found}, bound, ns_per_tick)
    if row is None:
        return OddLine(Fate.DROPPED, reason=reason)
    return OddLine(Fate.SALVAGED, row=row, reason=reason)


def _row(document: Mapping[str, Any], bound: Bound, ns_per_tick: int) -> dict[str, Any] | None:
    """An event's row; None if the document has no name or no time that fits."""
    given = document.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    name, cat = document.get("name"), document.get("cat", "")
    ts_us, dur_us = (
        _microsecond(document.get("ts"), ns_per_tick),
        _microsecond(document.get("dur", 0), ns_per_tick),
    )
    if not isinstance(name, str) or ts_us is None or dur_us is None or dur_us < 0:
        return None
    pid = whole(document.get("pid")) or 0
    tid = whole(document.get("tid"))
    name, cat = _clean(name), _clean(cat if isinstance(cat, str) else str(cat))
    rest = {key: value for key, value in arguments.items() if key not in _TAKEN or not _fits(key, value)}
    if "newpath_hash" in rest:
        rest["newpath"] = bound(Kind.FILE, _clean(str(rest.pop("newpath_hash"))).encode())
    return {
        "ts_us": ts_us,
        "dur_us": dur_us,
        "name": name,
        "cat": cat,
        "pid": pid,
        "tid": pid if tid is None else tid,
        "host": _named(arguments, "hostname", "hhash", Kind.HOST, bound),
        "path": _named(arguments, "fname", "fhash", Kind.FILE, bound),
        "size_bytes": size_of(name, cat, arguments),
        "offset": whole(arguments.get("offset")),
        "ret": whole(arguments.get("ret")),
        "epoch": _small(arguments.get("epoch")),
        "step": _small(arguments.get("step")),
        "args": json.dumps(rest, separators=(",", ":")),
    }


def _fits(key: str, value: Any) -> bool:
    """Whether a column holds the value; what it doesn't hold stays among the arguments."""
    if key in ("fname", "hostname"):
        return isinstance(value, str)
    if key in ("fhash", "hhash"):
        return isinstance(value, str | int)
    return (_small(value) if key in ("epoch", "step") else whole(value)) is not None


def _named(arguments: Mapping[str, Any], name: str, hashed: str, kind: Kind, bound: Bound) -> str | None:
    if isinstance(arguments.get(name), str):
        return _clean(arguments[name])
    value = arguments.get(hashed)
    return bound(kind, _clean(str(value)).encode()) if isinstance(value, str | int) else None


def _clean(text: str) -> str:
    """The text as UTF-8 can carry it: JSON's escapes can spell halves of characters."""
    return text.encode(errors="backslashreplace").decode()


def _small(value: Any) -> int | None:
    number = whole(value)
    return number if number is not None and -(1 << 31) <= number < 1 << 31 else None


_TIME_LIMIT: Final = 1 << 61
"""Times beyond this would overflow when they are added."""


def _microsecond(value: Any, ns_per_tick: int) -> int | None:
    """A time in microseconds; None if it is none, or none that fits."""
    time_us = _rounded(value, ns_per_tick)
    return time_us if time_us is not None and abs(time_us) < _TIME_LIMIT else None


def _rounded(value: Any, ns_per_tick: int) -> int | None:
    """The same for any size of number; the fraction that some writers add is rounded away."""
    if isinstance(value, float) and abs(value) < 2.0**62:
        return round(value * ns_per_tick / 1000)
    number = whole(value)
    if number is None and isinstance(value, str):
        try:
            return _rounded(float(value), ns_per_tick)
        except ValueError:
            return None
    return None if number is None else number * ns_per_tick // 1000
