"""JSON traces line by line, through the json module: every line, however damaged, gets exactly one fate.

All lines of a small trace are parsed here; of a large one only those that the native scanner hands back.
Chrome documents use `parse_event` for their objects. Invariant: whatever bytes a line holds, parsing never
fails; what can still be found of a damaged event is salvaged.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, Self

from penstock.trace.reading.event_batch import UNEXPLAINED, LineFate, ParsedLine, parse_int64, transfer_size


class HashKind(IntEnum):
    """What a hash is of, in the order of `HASH_KIND_NAMES`."""

    FILE = 0
    HOST = 1
    STRING = 2


HASH_KIND_NAMES: Final = (b"FH", b"HH", b"SH")
"""Names of the lines of metadata that explain hashes."""

ResolveHash = Callable[[HashKind, bytes], str]
"""Returns the text of a hash, or an `UnexplainedHash`."""


class UnexplainedHash(str):  # noqa: SLOT000 - a text has room for none beside its letters
    """Text in place of a hash that no line has explained so far; a later line of the file may."""

    kind: HashKind
    value: bytes

    def __new__(cls, kind: HashKind, value: bytes) -> Self:
        """Make the text for the table if no line explains the hash."""
        made = super().__new__(cls, UNEXPLAINED + value.decode(errors="backslashreplace"))
        made.kind, made.value = kind, value
        return made


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
_ARGUMENTS: Final = re.compile(r'"args"[ \t]*:[ \t]*\{[ \t]*(\}?)')
_MEMBER: Final = re.compile(
    r'[ \t]*("([^"]*)"[ \t]*:[ \t]*'
    r'(?:"[^"]*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null))[ \t]*([,}])'
)
_TIME_LIMIT_US: Final = 1 << 61


def parse_line(line: bytes, resolve: ResolveHash, ns_per_tick: int) -> ParsedLine:
    """Parse one line of a JSON-lines trace, with or without its newline."""
    bare = line.strip(b" \t\r\n")
    bare = bare[1:].lstrip() if bare.startswith((b"[", b"]")) else bare
    bare = bare.rstrip(b"],").rstrip() if bare.endswith((b",", b"]")) else bare
    if not bare:
        return ParsedLine(LineFate.BLANK)
    try:
        text = bare.decode()
        document = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError) as error:
        return _salvage(bare, _describe_damage(bare, error), resolve, ns_per_tick)
    if not isinstance(document, dict):
        return ParsedLine(LineFate.DROPPED, reason="not an object")
    return parse_event(document, resolve, ns_per_tick, text)


def parse_event(
    document: Mapping[str, Any], resolve: ResolveHash, ns_per_tick: int, text: str = ""
) -> ParsedLine:
    """Tell what a JSON object is. `text` is its line, from which plain arguments are copied as they stand."""
    phase = document.get("ph", "X")
    if phase in _METADATA_PHASES:
        return ParsedLine(LineFate.METADATA, document=document)
    if not isinstance(phase, str | int) or phase not in _COMPLETE_PHASES:
        is_passing = isinstance(phase, str | int) and phase in _PASSING_PHASES
        if is_passing:
            return ParsedLine(LineFate.METADATA)
        return ParsedLine(LineFate.DROPPED, reason="unknown phase")
    row = _build_row(document, resolve, ns_per_tick, text)
    if row is None:
        return ParsedLine(LineFate.DROPPED, reason="no name or no time")
    return ParsedLine(LineFate.EVENT, row=row, document=document)


def _describe_damage(bare: bytes, error: Exception) -> str:
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


def _salvage(bare: bytes, reason: str, resolve: ResolveHash, ns_per_tick: int) -> ParsedLine:
    """Search a damaged line for an event's keys; without a name, a time and a duration it is lost."""
    text = bare.decode(errors="backslashreplace")
    found: dict[str, Any] = {
        key: match[1] for key, pattern in _SALVAGE_TEXT.items() if (match := pattern.search(text))
    }
    found |= {
        key: int(match[1]) for key, pattern in _SALVAGE_NUMBER.items() if (match := pattern.search(text))
    }
    if not bare.startswith(b"{") or not {"name", "ts", "dur", "pid"} <= found.keys():
        return ParsedLine(LineFate.DROPPED, reason=reason)
    found = {
        key: _UNPRINTABLE.sub(lambda letter: f"\\x{ord(letter[0]):02x}", value)
        if isinstance(value, str)
        else value
        for key, value in found.items()
    }
    top: dict[str, Any] = {
        key: found.pop(key) for key in ("name", "cat", "pid", "tid", "ts", "dur") if key in found
    }
    row = _build_row({**top, "args": found}, resolve, ns_per_tick)
    if row is None:
        return ParsedLine(LineFate.DROPPED, reason=reason)
    return ParsedLine(LineFate.SALVAGED, row=row, reason=reason)


def _build_row(
    document: Mapping[str, Any], resolve: ResolveHash, ns_per_tick: int, text: str = ""
) -> dict[str, Any] | None:
    """An event's row; None if the document has no name or no time that fits."""
    given = document.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    name, cat = document.get("name"), document.get("cat", "")
    ts_us = _parse_time(document.get("ts"), ns_per_tick)
    # Starts are cut to the microsecond, durations rounded, so that sums of many durations stay true.
    dur_us = _parse_time(document.get("dur", 0), ns_per_tick, added_ns=500)
    if not isinstance(name, str) or ts_us is None or dur_us is None or dur_us < 0:
        return None
    pid = parse_int64(document.get("pid")) or 0
    tid = parse_int64(document.get("tid"))
    name, cat = _clean(name), _clean(cat if isinstance(cat, str) else str(cat))
    return {
        "ts_us": ts_us,
        "dur_us": dur_us,
        "name": name,
        "cat": cat,
        "pid": pid,
        "tid": pid if tid is None else tid,
        "host": _resolve_name(arguments, "hostname", "hhash", HashKind.HOST, resolve),
        "path": _resolve_name(arguments, "fname", "fhash", HashKind.FILE, resolve),
        "size_bytes": transfer_size(name, cat, arguments),
        "offset": parse_int64(arguments.get("offset")),
        "ret": parse_int64(arguments.get("ret")),
        "epoch": _parse_int32(arguments.get("epoch")),
        "step": _parse_int32(arguments.get("step")),
        "args": _format_arguments(arguments, resolve, text),
    }


def _format_arguments(arguments: Mapping[str, Any], resolve: ResolveHash, text: str) -> str:
    """JSON text of the arguments without a column of their own."""
    rest = {key: value for key, value in arguments.items() if key not in _TAKEN or not _fits(key, value)}
    if "newpath_hash" in rest:
        rest["newpath"] = resolve(HashKind.FILE, _clean(str(rest.pop("newpath_hash"))).encode())
    elif (members := _plain_members(text)) is not None and {key for key, _ in members} == arguments.keys():
        # The native scanner copies bytes, so the same trace gives the same text whichever way it was read.
        return "{" + ",".join(member for key, member in members if key in rest) + "}"
    return json.dumps(rest, separators=(",", ":"))


def _plain_members(text: str) -> list[tuple[str, str]] | None:
    """Keys of a line's arguments and their members as they stand; None unless all are unescaped scalars."""
    begin = None if "\\" in text else _ARGUMENTS.search(text)
    if begin is None:
        return None
    if begin[1]:
        return []
    members = []
    at = begin.end()
    while (member := _MEMBER.match(text, at)) is not None:
        members.append((member[2], member[1]))
        at = member.end()
        if member[3] == "}":
            return members
    return None


def _fits(key: str, value: Any) -> bool:
    """Whether a column holds the value; what it doesn't hold stays among the arguments."""
    if key in ("fname", "hostname"):
        return isinstance(value, str)
    if key in ("fhash", "hhash"):
        return isinstance(value, str | int)
    return (_parse_int32(value) if key in ("epoch", "step") else parse_int64(value)) is not None


def _resolve_name(
    arguments: Mapping[str, Any], name: str, hashed: str, kind: HashKind, resolve: ResolveHash
) -> str | None:
    if isinstance(arguments.get(name), str):
        return _clean(arguments[name])
    value = arguments.get(hashed)
    return resolve(kind, _clean(str(value)).encode()) if isinstance(value, str | int) else None


def _clean(text: str) -> str:
    """The text as UTF-8 can carry it: JSON's escapes can spell halves of characters."""
    return text.encode(errors="backslashreplace").decode()


def _parse_int32(value: Any) -> int | None:
    number = parse_int64(value)
    return number if number is not None and -(1 << 31) <= number < 1 << 31 else None


def _parse_time(value: Any, ns_per_tick: int, *, added_ns: int = 0) -> int | None:
    """A time in microseconds; None if it is none, or beyond what can be added without overflow."""
    time_us = _parse_any_time(value, ns_per_tick, added_ns)
    return time_us if time_us is not None and abs(time_us) < _TIME_LIMIT_US else None


def _parse_any_time(value: Any, ns_per_tick: int, added_ns: int) -> int | None:
    if isinstance(value, float) and abs(value) < 2.0**62:
        return round(value * ns_per_tick / 1000)
    number = parse_int64(value)
    if number is None and isinstance(value, str):
        try:
            return _parse_any_time(float(value), ns_per_tick, added_ns)
        except ValueError:
            return None
    return None if number is None else (number * ns_per_tick + added_ns) // 1000
