"""JSON traces line by line, through the json module: every line, however damaged, gets exactly one fate.

All lines of a small trace are parsed here; of a large one only those that are no plain events for DuckDB.
Chrome documents use `parse_event` for their objects. Invariant: whatever bytes a line holds, parsing never
fails; what can still be found of a damaged event is salvaged.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.trace.reading.event_batch import LineFate, ParsedLine, parse_int64, transfer_size

HASH_KINDS: Final = {"FH": "fhash", "HH": "hhash"}
"""Names of the lines of metadata that explain hashes, and the arguments that have such a hash."""
UNEXPLAINED: Final = "hash:"
"""Prefix of a path or host whose hash its file never explains."""

NameFile = Callable[[str], str]
"""Returns the name of the file that a hash stands for, as far as the lines so far have explained it."""


METADATA_PHASES: Final = ("M", "4")
COMPLETE_PHASES: Final = ("X", "1")
PASSING_PHASES: Final = ("2", "3", *"CiIstfbneNODPRcvV(),")
"""Counters, marks and flows: they take no time, and the table holds what does."""

TAKEN_ARGUMENTS: Final = ("fname", "fhash", "hostname", "hhash", "ret", "offset", "epoch", "step")
"""Arguments that have columns of their own."""
_SALVAGE_TEXT: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"(.*?)"\s*(?=,\s*"|\}}|$)', re.DOTALL)
    for key in ("name", "cat", "fname", "hostname", "fhash", "hhash")
}
_SALVAGE_NUMBER: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"?(-?\d{{1,20}})"?\s*(?=[,}}])')
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
        "fhash",
        "hhash",
    )
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")
_STRING_OR_LAST_COMMA: Final = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
_TIME_LIMIT_US: Final = 1 << 61
"""Times below can be added without overflow."""
_TICKS_LIMIT: Final = 2.0**62


def parse_line(line: bytes, name_file: NameFile, ns_per_tick: int, base_ns: int = 0) -> ParsedLine:
    """Parse one line of a JSON-lines trace, with or without its newline; times count from `base_ns`."""
    bare = line.strip(b" \t\r\n")
    bare = bare[1:].lstrip() if bare.startswith((b"[", b"]")) else bare
    bare = bare.rstrip(b"],").rstrip() if bare.endswith((b",", b"]")) else bare
    if not bare:
        return ParsedLine(LineFate.BLANK)
    try:
        document = load_json(bare.decode())
    except (ValueError, RecursionError) as error:
        return _salvage(bare, _describe_damage(bare, error), name_file, ns_per_tick, base_ns)
    if not isinstance(document, dict):
        return ParsedLine(LineFate.DROPPED, reason="not an object")
    return parse_event(document, name_file, ns_per_tick, base_ns)


def parse_event(
    document: Mapping[str, Any], name_file: NameFile, ns_per_tick: int, base_ns: int = 0
) -> ParsedLine:
    """Tell what a JSON object is."""
    phase = str(document.get("ph", "X"))
    if phase in METADATA_PHASES:
        return ParsedLine(LineFate.METADATA, document=document)
    if phase in PASSING_PHASES:
        return ParsedLine(LineFate.METADATA)
    if phase not in COMPLETE_PHASES:
        return ParsedLine(LineFate.DROPPED, reason="unknown phase")
    row = _build_row(document, name_file, ns_per_tick, base_ns)
    if row is None:
        return ParsedLine(LineFate.DROPPED, reason=_describe_lack(document, ns_per_tick))
    return ParsedLine(LineFate.EVENT, row=row, document=document)


def _describe_lack(document: Mapping[str, Any], ns_per_tick: int) -> str:
    """Why an object of a complete event is none, in the words of accounts."""
    if not isinstance(document.get("name"), str) or document.get("ts") is None:
        return "no name or no time"
    if _parse_ns(document["ts"], ns_per_tick) is None:
        return "ts is no time"
    dur_ns = _parse_ns(document.get("dur", 0), ns_per_tick)
    if dur_ns is None:
        return "dur is no time"
    return "dur is negative" if dur_ns < 0 else "time out of range"


def load_json(text: str) -> Any:
    """A JSON value. A comma behind the last member is no damage: the earliest tracers wrote it."""
    try:
        return json.loads(text, parse_constant=str, object_pairs_hook=_first_of_each)
    except ValueError:
        bare = _STRING_OR_LAST_COMMA.sub(lambda found: found[1] or "", text)
        if bare == text:
            raise
        return json.loads(bare, parse_constant=str, object_pairs_hook=_first_of_each)


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object; of those with the same key the first counts, as for DuckDB."""
    members = dict(pairs)
    return members if len(members) == len(pairs) else dict(reversed(pairs))


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


def _salvage(bare: bytes, reason: str, name_file: NameFile, ns_per_tick: int, base_ns: int) -> ParsedLine:
    """Search a damaged line for an event's keys; without a name, a time and a duration it is lost."""
    text = bare.decode(errors="backslashreplace")
    found: dict[str, Any] = {
        key: int(match[1]) for key, pattern in _SALVAGE_NUMBER.items() if (match := pattern.search(text))
    }
    # A hash in quotes is a text, whose zeros in front count.
    found |= {key: match[1] for key, pattern in _SALVAGE_TEXT.items() if (match := pattern.search(text))}
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
    row = _build_row({**top, "args": found}, name_file, ns_per_tick, base_ns)
    if row is None:
        return ParsedLine(LineFate.DROPPED, reason=reason)
    return ParsedLine(LineFate.SALVAGED, row=row, reason=reason)


def _build_row(
    document: Mapping[str, Any], name_file: NameFile, ns_per_tick: int, base_ns: int
) -> dict[str, Any] | None:
    """An event's row; None if the document has no name or no time that fits."""
    given = document.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    name, cat = document.get("name"), document.get("cat", "")
    ts_ns, dur_ns = _parse_ns(document.get("ts"), ns_per_tick), _parse_ns(document.get("dur", 0), ns_per_tick)
    if not isinstance(name, str) or ts_ns is None or dur_ns is None or dur_ns < 0:
        return None
    ts_ns += base_ns
    # Starts and ends are cut to the microsecond, so that contiguous calls add up to the time of all of them.
    ts_us = ts_ns // 1000
    dur_us = (ts_ns + dur_ns) // 1000 - ts_us
    if abs(ts_us) >= _TIME_LIMIT_US or dur_us >= _TIME_LIMIT_US:
        return None
    pid = parse_int64(document.get("pid")) or 0
    tid = parse_int64(document.get("tid"))
    name, cat = clean_text(name), clean_text(cat if isinstance(cat, str) else str(cat))
    return {
        "ts_us": ts_us,
        "dur_us": dur_us,
        "name": name,
        "cat": cat,
        "pid": pid,
        "tid": pid if tid is None else tid,
        "host": _find_text(arguments, "hostname", str),
        "hhash": _find_text(arguments, "hhash", str | int | float),
        "path": _find_text(arguments, "fname", str),
        "fhash": _find_text(arguments, "fhash", str | int | float),
        "size_bytes": transfer_size(name, cat, arguments),
        "offset": parse_int64(arguments.get("offset")),
        "ret": parse_int64(arguments.get("ret")),
        "epoch": _parse_int32(arguments.get("epoch")),
        "step": _parse_int32(arguments.get("step")),
        "args": format_arguments(arguments, name_file),
    }


def format_arguments(arguments: Mapping[str, Any], name_file: NameFile | None = None) -> str:
    """JSON text of the arguments without a column of their own."""
    rest: Mapping[str, Any] = {
        key: value for key, value in arguments.items() if key not in TAKEN_ARGUMENTS or not _fits(key, value)
    }
    rest = rest if name_file is None else name_new_path(rest, name_file)
    return clean_text(dump_arguments(rest))


def dump_arguments(arguments: Mapping[str, Any]) -> str:
    """JSON text of these arguments, in the order of their keys: DuckDB does not tell another."""
    return json.dumps(dict(sorted(arguments.items())), separators=(",", ":"), ensure_ascii=False)


def name_new_path(arguments: Mapping[str, Any], name_file: NameFile) -> Mapping[str, Any]:
    """The arguments of a rename, with the new name in place of its hash."""
    if "newpath_hash" not in arguments:
        return arguments
    rest = dict(arguments)
    value = clean_text(str(rest.pop("newpath_hash")))
    return {**rest, "newpath": name_file(value)}


def _fits(key: str, value: Any) -> bool:
    """Whether a column holds the value; what it doesn't hold stays among the arguments."""
    if key in ("fname", "hostname"):
        return isinstance(value, str)
    if key in ("fhash", "hhash"):
        return isinstance(value, str | int | float)
    return (_parse_int32(value) if key in ("epoch", "step") else parse_int64(value)) is not None


def _find_text(arguments: Mapping[str, Any], key: str, kinds: Any) -> str | None:
    """The text of an argument of one of these types; None for another."""
    value = arguments.get(key)
    return clean_text(str(value)) if isinstance(value, kinds) else None


def clean_text(text: str) -> str:
    """The text as UTF-8 can carry it: JSON's escapes can spell halves of characters."""
    return text.encode(errors="backslashreplace").decode()


def _parse_int32(value: Any) -> int | None:
    number = parse_int64(value)
    return number if number is not None and -(1 << 31) <= number < 1 << 31 else None


def _parse_ns(value: Any, ns_per_tick: int) -> int | None:
    """A time in nanoseconds; None if it is none."""
    number = parse_int64(value)
    if number is not None:
        return number * ns_per_tick
    try:
        ticks = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if not isinstance(ticks, float) or not abs(ticks) < _TICKS_LIMIT:
        return None
    # The whole ticks are multiplied apart: their nanoseconds since 1970 fit no double.
    whole = math.floor(ticks)
    return whole * ns_per_tick + round((ticks - whole) * ns_per_tick)
