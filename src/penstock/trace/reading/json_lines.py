"""Traces of one JSON object per line, as DFTracer's three generations write them: chunks -> batches.

    lines, gathered into blocks -> one query of DuckDB: the columns of plain events
                                -> every other line -> `parse_line`, one by one     -> batches

A plain event is a line whose numbers are whole and whose texts have no escapes; DuckDB parses a million of
them a second. Hashes are named a block at a time: an event's hash stands for the last name that a line
before it has explained, or the first one after it. Invariants: the account's sum holds after every block;
events are the same whether DuckDB or Python parsed them.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.trace.event_schema import (
    BATCH_SCHEMA,
    BYTE_LAYERS,
    BYTE_MOVERS,
    ITEM_MOVERS,
    SIZE_LIMIT,
    FileAccount,
    LineFate,
    ParsedLine,
    TraceFile,
    canonical,
    open_database,
    parse_int64,
    spellings_of,
    transfer_size,
)
from penstock.trace.reading.trace_files import find_lines

_HASH_KINDS: Final = {"FH": "fhash", "HH": "hhash"}
"""Names of the lines of metadata that explain hashes, and the arguments that have such a hash."""
_GLOBAL_HASH: Final = re.compile(r"[0-9a-f]{16}")
_UNEXPLAINED: Final = "hash:"
"""The prefix of a path or host whose hash the file never explains."""

Hash = tuple[str, str]
"""The argument that holds a hash (`fhash`, `hhash`), and the hash."""
NameFile = Callable[[str], str]
"""Returns the name of the file for which a hash stands, as far as the lines so far have explained it."""

METADATA_PHASES: Final = ("M", "4")
COMPLETE_PHASES: Final = ("X", "1")
PASSING_PHASES: Final = ("2", "3", *"CiIstfbneNODPRcvV(),")
"""Counters, marks and flows. They have no duration, and the table holds only events that have one."""

_SALVAGE_TEXT: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"(.*?)(?:"\s*(?=,\s*"|\}}|$)|(\Z))', re.DOTALL)
    for key in ("name", "cat", "fname", "hostname", "fhash", "hhash")
}
_SALVAGE_NUMBER: Final = {
    key: re.compile(rf'"{key}"\s*:\s*"?(-?\d{{1,20}})"?\s*(?=[,}}])')
    for key in ("pid", "tid", "ts", "dur", "ret", "offset", "epoch", "step", "size", "fhash", "hhash")
}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f]")
_STRING_OR_LAST_COMMA: Final = re.compile(r'("(?:[^"\\]|\\.)*"?)|,(?=\s*[}\]])')
_TIME_LIMIT_US: Final = 1 << 61
"""Times below this limit can be added without overflow."""
_TICKS_LIMIT: Final = 2.0**62


def parse_line(line: bytes, name_file: NameFile, ns_per_tick: int, base_ns: int = 0) -> ParsedLine:
    """Parse one line of a JSON-lines trace, with or without its newline. Times count from `base_ns`."""
    bare = line.strip(b" \t\r\n")
    bare = bare[1:].lstrip() if bare.startswith((b"[", b"]")) else bare
    bare = bare.rstrip(b"],").rstrip() if bare.endswith((b",", b"]")) else bare
    if not bare:
        return ParsedLine(LineFate.BLANK)
    try:
        document = load_json(bare.decode())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            reason = "bad UTF-8"
        elif isinstance(error, RecursionError):
            reason = "nested too deeply"
        elif _CONTROL.search(bare.decode(errors="replace")):
            reason = "control character"
        elif not bare.startswith(b"{"):
            reason = "not JSON"
        else:
            reason = "malformed" if bare.endswith(b"}") else "cut short"
        return _salvage(bare, reason, name_file, ns_per_tick, base_ns)
    if not isinstance(document, dict):
        return ParsedLine(LineFate.DROPPED, reason="not an object")
    return parse_event(document, name_file, ns_per_tick, base_ns)


def parse_event(
    document: Mapping[str, Any], name_file: NameFile, ns_per_tick: int, base_ns: int = 0
) -> ParsedLine:
    """Parse a JSON object: an event, metadata, or damage."""
    phase = str(document.get("ph", "X"))
    if phase in METADATA_PHASES:
        return ParsedLine(LineFate.METADATA, document=document)
    if phase in PASSING_PHASES:
        return ParsedLine(LineFate.METADATA)
    if phase not in COMPLETE_PHASES:
        return ParsedLine(LineFate.DROPPED, reason="unknown phase")
    row = _build_row(document, name_file, ns_per_tick, base_ns)
    if isinstance(row, str):
        return ParsedLine(LineFate.DROPPED, reason=row)
    return ParsedLine(LineFate.EVENT, row=row, document=document)


def load_json(text: str) -> Any:
    """Parse a JSON value. A comma after the last member is accepted: the earliest tracers wrote it."""
    try:
        return json.loads(text, parse_constant=str, object_pairs_hook=_first_of_each)
    except ValueError:
        bare = _STRING_OR_LAST_COMMA.sub(lambda found: found[1] or "", text)
        if bare == text:
            raise
        return json.loads(bare, parse_constant=str, object_pairs_hook=_first_of_each)


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object. If several have the same key, the first counts, as in DuckDB."""
    members = dict(pairs)
    return members if len(members) == len(pairs) else dict(reversed(pairs))


def _salvage(bare: bytes, reason: str, name_file: NameFile, ns_per_tick: int, base_ns: int) -> ParsedLine:
    """Search a damaged line for an event's keys; without name, time and duration, the event is lost."""
    text = bare.decode(errors="backslashreplace")
    found: dict[str, Any] = {
        key: int(match[1]) for key, pattern in _SALVAGE_NUMBER.items() if (match := pattern.search(text))
    }
    # A hash in quotes is a string, in which leading zeros count. An unterminated string reaches to the end of
    # the line, so the search does not start again from each position in it.
    matches = {key: pattern.search(text) for key, pattern in _SALVAGE_TEXT.items()}
    found |= {key: match[1] for key, match in matches.items() if match and match[2] is None}
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
    if isinstance(row, str):
        return ParsedLine(LineFate.DROPPED, reason=reason)
    return ParsedLine(LineFate.SALVAGED, row=row, reason=reason)


def _build_row(
    document: Mapping[str, Any], name_file: NameFile, ns_per_tick: int, base_ns: int
) -> dict[str, Any] | str:
    """Build an event's row, or say why there is none: the document has no name, or no time that fits."""
    name, cat = document.get("name"), document.get("cat", "")
    if not isinstance(name, str) or document.get("ts") is None:
        return "no name or no time"
    ts_ns, dur_ns = (_parse_ns(document.get(key, 0), ns_per_tick) for key in ("ts", "dur"))
    if ts_ns is None:
        return "ts is not a time"
    if dur_ns is None:
        return "dur is not a time"
    if dur_ns < 0:
        return "dur is negative"
    ts_ns += base_ns
    # Starts and ends are truncated to the microsecond, so that contiguous calls add up to their total time.
    ts_us = ts_ns // 1000
    dur_us = (ts_ns + dur_ns) // 1000 - ts_us
    if abs(ts_us) >= _TIME_LIMIT_US or dur_us >= _TIME_LIMIT_US:
        return "time out of range"
    given = document.get("args")
    arguments: Mapping[str, Any] = given if isinstance(given, dict) else {}
    taken = {key: take(arguments.get(key)) for key, take in _TAKEN.items()}
    # Values that fit in no column stay among the arguments.
    rest = {key: value for key, value in arguments.items() if taken.get(key) is None}
    if "newpath_hash" in rest:
        rest["newpath"] = name_file(clean_text(str(rest.pop("newpath_hash"))))
    pid, tid = parse_int64(document.get("pid")) or 0, parse_int64(document.get("tid"))
    name, cat = clean_text(name), clean_text(cat if isinstance(cat, str) else str(cat))
    return {
        "ts_us": ts_us,
        "dur_us": dur_us,
        "name": name,
        "cat": cat,
        "pid": pid,
        "tid": pid if tid is None else tid,
        "host": taken.pop("hostname"),
        "path": taken.pop("fname"),
        "size_bytes": transfer_size(name, cat, arguments),
        "args": _dump_arguments(rest),
        **taken,
    }


def _dump_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the JSON text of these arguments, ordered by key, because DuckDB preserves no other order."""
    ordered = dict(sorted(arguments.items()))
    return clean_text(json.dumps(ordered, separators=(",", ":"), ensure_ascii=False))


def clean_text(text: str) -> str:
    """Return the text without unpaired surrogates, which JSON's escapes can spell but UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()


def _take_text(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) else None


def _take_hash(value: Any) -> str | None:
    return clean_text(str(value)) if isinstance(value, str | int | float) else None


def _parse_int32(value: Any) -> int | None:
    number = parse_int64(value)
    return number if number is not None and -(1 << 31) <= number < 1 << 31 else None


_TAKEN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "fname": _take_text, "fhash": _take_hash, "hostname": _take_text, "hhash": _take_hash,
    "ret": parse_int64, "offset": parse_int64, "epoch": _parse_int32, "step": _parse_int32,
}  # fmt: skip
"""Arguments with their own columns, and the function that gives the column's value, or None if the column
cannot hold it.
"""


def _parse_ns(value: Any, ns_per_tick: int) -> int | None:
    """Parse a time in nanoseconds; None if the value is not a time."""
    number = parse_int64(value)
    if number is not None:
        return number * ns_per_tick
    try:
        ticks = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if not isinstance(ticks, float) or not abs(ticks) < _TICKS_LIMIT:
        return None
    # The whole ticks are multiplied separately, because their nanoseconds since 1970 do not fit in a double.
    whole = math.floor(ticks)
    return whole * ns_per_tick + round((ticks - whole) * ns_per_tick)


BLOCK_BYTES: Final = 16 << 20
"""The bytes that are parsed at a time: enough to make a query's fixed cost negligible."""
QUERY_LINES: Final = 400
"""Python parses fewer lines than this in less time than DuckDB needs to plan a query."""
_UNITS_NS: Final = {"NS": 1, "US": 1000, "MS": 1_000_000, "SEC": 1_000_000_000}
_NEWLINE: Final = ord("\n")
_RANK: Final = re.compile(r"Rank (\d{1,9})\b")

_INT64: Final = ("line", "ts_us", "dur_us", "pid", "tid", "size_bytes", "offset", "ret")
_INT32: Final = ("epoch", "step")
_TEXTS: Final = ("name", "cat", "host", "hhash", "path", "fhash", "args")
_BLOCK_SCHEMA: Final = pa.schema(
    [(name, pa.int64()) for name in _INT64]
    + [(name, pa.int32()) for name in _INT32]
    + [(name, pa.string()) for name in _TEXTS]
)
"""The events of a block, from either parser; hashes have no names yet. `line` counts from the block's start.
"""


class JsonLines:
    """Reads the chunks of one file; afterwards, `account` has the fate of its lines.

    Blocks of fewer than `query_lines` lines are parsed in Python, which changes only the speed.
    """

    def __init__(self, file: TraceFile, account: FileAccount, query_lines: int) -> None:
        self._file, self._file_rank = file, file.rank
        self._account = account
        self._query_lines = query_lines
        self._ranks: dict[int, int] = {}
        self._ns_per_tick = 1000
        # The names that lines have given to each hash, each with the number of its line.
        self._names: dict[Hash, list[tuple[int, str]]] = {}
        self._num_named: Counter[Hash] = Counter()
        self._unexplained: Counter[Hash] = Counter()
        self._num_endings = self._num_announced = 0
        self._counts_metadata: bool | None = None

    def read(self, chunks: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
        """Yield the file's events in the order of its lines."""
        for block in _gather_blocks(chunks):
            batch = self._read_block(block)
            if batch.num_rows:
                yield batch
        self._account.faults.extend(self._find_faults())

    def _read_block(self, block: bytes) -> pa.RecordBatch:
        account, first = self._account, self._account.lines
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
        starts = np.concatenate(([0], ends + 1))
        plain, is_empty = _BLOCK_SCHEMA.empty_table(), ends == starts[:-1]
        num_empty = int(is_empty.sum())
        account.blank += num_empty
        if len(ends) - num_empty >= self._query_lines:
            plain = self._query_block(block, starts)
        is_odd = np.ones(len(ends), dtype=bool)
        is_odd[plain["line"].to_numpy()] = False
        is_odd &= ~is_empty
        rows = []

        def parse(number: int, ns_per_tick: int) -> None:
            line = block[starts[number] : ends[number]]
            account.lines = first + number + 1
            parsed = parse_line(line, self._name_new_file, ns_per_tick)
            account.count(parsed, line)
            self._learn(parsed, account.lines)
            if parsed.row is not None:
                rows.append({**parsed.row, "line": number})

        # The lines from which on other units of time apply.
        changes, units_ns = [0], [self._ns_per_tick]
        for number in np.flatnonzero(is_odd).tolist():
            parse(number, self._ns_per_tick)
            if self._ns_per_tick != units_ns[-1]:
                changes.append(number)
                units_ns.append(self._ns_per_tick)
        if plain.num_rows:
            lines = plain["line"].to_numpy()
            ns_per_tick = np.array(units_ns)[np.searchsorted(changes, lines, side="right") - 1]
            plain, is_late = _convert_ticks(plain, ns_per_tick)
            for number, unit_ns in zip(lines[is_late].tolist(), ns_per_tick[is_late].tolist(), strict=True):
                parse(number, unit_ns)
        account.lines = first + len(ends)
        account.events += plain.num_rows
        events = plain
        if rows:
            events = pa.concat_tables([events, pa.Table.from_pylist(rows, _BLOCK_SCHEMA)]).sort_by("line")
        events = events.set_column(0, "line", pa.array(events["line"].to_numpy() + first + 1))
        return self._build_batch(events)

    def _query_block(self, block: bytes, starts: npt.NDArray[Any]) -> pa.Table:
        """Parse the plain events of a block, in which `line` counts from 0."""
        numbers = pa.array(np.arange(len(starts) - 1))
        try:
            block.decode()
        except UnicodeDecodeError:
            # Lines that are not UTF-8 are left to Python; to DuckDB, they are not JSON.
            lines = block.decode(errors="replace").split("\n")[:-1]
            texts = pa.array([None if "\ufffd" in line else line for line in lines], pa.string())
        else:
            # The lines of a block form an Arrow array without a copy, newlines included, because JSON ignores
            # them.
            offsets = pa.py_buffer(starts.astype(np.int32))
            texts = pa.StringArray.from_buffers(len(starts) - 1, offsets, pa.py_buffer(block))
        with open_database().cursor() as cursor:
            cursor.register("block", pa.table({"line": numbers, "text": texts}))
            # Some writers end each line as an element of an array: {...},
            has_commas = b"},\n" in block or b"},\r" in block
            query = _write_query("rtrim(text, ', \r\n')" if has_commas else "text")
            found = cursor.sql(query).to_arrow_table()
            cursor.unregister("block")
        events = found.filter(found["is_plain"]).select(_BLOCK_SCHEMA.names)
        args = events["args"].combine_chunks().dictionary_encode()
        # DuckDB keeps the members in the order of the line, whereas here, equal arguments must have equal
        # texts.
        rest = [_dump_arguments(load_json(text)) for text in args.dictionary.to_pylist()]
        texts = pa.array(rest, pa.string()).take(args.indices)
        return events.set_column(events.column_names.index("args"), "args", texts).cast(_BLOCK_SCHEMA)

    def _build_batch(self, events: pa.Table) -> pa.RecordBatch:
        """Add operations, names, ranks, run and file to the events of a block."""
        columns: dict[str, Any] = {
            name: array.combine_chunks()
            for name, array in zip(events.column_names, events.columns, strict=True)
        }
        names = columns["name"].dictionary_encode()
        ops = pa.array(map(canonical, names.dictionary.to_pylist()), pa.string())
        pids = columns["pid"].dictionary_encode()
        ranks = [self._ranks.get(pid, self._file_rank) for pid in pids.dictionary.to_pylist()]
        constant = np.zeros(events.num_rows, dtype=np.int32)
        columns |= {
            "end_us": pa.array(columns["ts_us"].to_numpy() + columns["dur_us"].to_numpy()),
            "op": pa.DictionaryArray.from_arrays(names.indices, ops),
            "name": names,
            "cat": columns["cat"].dictionary_encode(),
            "rank": pa.array(ranks, pa.int32()).take(pids.indices),
            "host": self._name_hashes(columns, "host", "hhash"),
            "path": self._name_hashes(columns, "path", "fhash"),
            "args": columns["args"].dictionary_encode(),
            "run": pa.DictionaryArray.from_arrays(constant, pa.array([self._file.run])),
            "file": pa.DictionaryArray.from_arrays(
                constant, pa.array([self._file.name or self._file.path.name])
            ),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in BATCH_SCHEMA.names], schema=BATCH_SCHEMA)

    def _name_hashes(self, columns: Mapping[str, Any], plain: str, hashed: str) -> pa.DictionaryArray:
        """Return the traced names, or else the names for which hashes stand."""
        names = columns[plain]
        if columns[hashed].null_count == len(columns[hashed]):
            return names.dictionary_encode()
        encoded = pa.compute.if_else(names.is_valid(), None, columns[hashed]).dictionary_encode()
        hashes = encoded.dictionary.to_pylist()
        counts = np.bincount(encoded.indices.drop_null().to_numpy(), minlength=len(hashes)).tolist()
        texts, rebound = [], []
        for number, (value, num_events) in enumerate(zip(hashes, counts, strict=True)):
            named = (hashed, value)
            self._num_named[named] += num_events
            if named not in self._names:
                name = find_name_in_siblings(self._file.path, *named)
                if name is not None:
                    self._names[named] = [(0, name)]
            bindings = self._names.get(named, [])
            if not bindings:
                self._unexplained[named] += num_events
            if len(bindings) > 1:
                rebound.append(number)
            texts.append(bindings[-1][1] if bindings else _UNEXPLAINED + value)
        if names.null_count == len(names) and not rebound:
            return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))
        of_hashes = pa.array(texts, pa.string()).take(encoded.indices)
        if rebound:
            found = of_hashes.to_pylist()
            places = np.flatnonzero(np.isin(encoded.indices.fill_null(-1).to_numpy(), rebound))
            for place in places.tolist():
                bindings = self._names[hashed, hashes[encoded.indices[place].as_py()]]
                before = bisect_right(bindings, columns["line"][place].as_py(), key=lambda bound: bound[0])
                found[place] = bindings[max(before - 1, 0)][1]
            of_hashes = pa.array(found, pa.string())
        return pa.compute.coalesce(names, of_hashes).dictionary_encode()

    def _name_new_file(self, value: str) -> str:
        """Return the new name of a renamed file, which is among the arguments."""
        self._num_named["fhash", value] += 1
        names = self._names.get(("fhash", value))
        return names[-1][1] if names else _UNEXPLAINED + value

    def _learn(self, parsed: ParsedLine, line: int) -> None:
        """Learn units, ranks and names from metadata, and the writer's count from its last event."""
        if parsed.row is not None:
            announced = parse_int64(json.loads(parsed.row["args"]).get("num_events"))
            if parsed.row["name"] == "end" and announced is not None:
                self._num_announced += announced
                self._num_endings += 1
            return
        document = parsed.document
        if document is None:
            return
        if self._counts_metadata is None:
            # Versions of DFTracer that give an id to lines of metadata count these lines among the events.
            self._counts_metadata = "id" in document
        arguments = document.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        name, value = arguments.get("name"), str(arguments.get("value"))
        kind = _HASH_KINDS.get(str(document.get("name")))
        if kind is not None and isinstance(name, str):
            text = clean_text(name)
            bindings = self._names.setdefault((kind, clean_text(value)), [])
            if not bindings or bindings[-1][1] != text:
                bindings.append((line, text))
            return
        rank = _RANK.match(value) or _RANK.match(str(arguments.get("process_name")))
        pid = parse_int64(document.get("pid"))
        if rank and pid is not None:
            self._ranks[pid] = int(rank[1])
        if name == "time_metric":
            if value not in _UNITS_NS:
                self._account.faults.append(
                    f"its time_metric {value!r} is unknown: times are read as microseconds"
                )
            self._ns_per_tick = _UNITS_NS.get(value, 1000)

    def _find_faults(self) -> Iterator[str]:
        """Yield the faults of the file as a whole, after its last line."""
        account = self._account
        rebound = [named for named, bindings in self._names.items() if len(bindings) > 1]
        if rebound:
            num_events = sum(self._num_named[named] for named in rebound)
            yield (
                f"{len(rebound):,} hashes stand for two names: {num_events:,} events with them have the"
                " one explained last before them"
            )
        if self._unexplained:
            num_events = sum(self._unexplained.values())
            yield f"{num_events} events name files or hosts by hashes that no line explains"
        if self._num_endings:
            # A count next to the file is older than the ending: the process was killed between the two
            # writes.
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


def _convert_ticks(events: pa.Table, ns_per_tick: npt.NDArray[Any]) -> tuple[pa.Table, npt.NDArray[Any]]:
    """Convert the times of events to microseconds, as `_build_row` does.

    Returns the events whose times fit, and which events have other times.
    """
    ticks, lasting = events["ts_us"].to_numpy(), events["dur_us"].to_numpy()
    factors, divisors = np.maximum(ns_per_tick // 1000, 1), np.maximum(1000 // ns_per_tick, 1)
    is_late = np.maximum(ticks, lasting) >= np.where(ns_per_tick == 1, 1 << 62, _TIME_LIMIT_US // factors)
    begins = ticks * factors // divisors
    durations = (ticks + lasting) * factors // divisors - begins
    for name, values in (("ts_us", begins), ("dur_us", durations)):
        events = events.set_column(events.column_names.index(name), name, pa.array(values))
    return events.filter(~is_late), is_late


def _gather_blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Gather whole lines into blocks that are parsed together."""
    parts: list[bytes] = []
    num_bytes = 0
    for chunk in chunks:
        parts.append(chunk)
        num_bytes += len(chunk)
        if num_bytes >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if parts:
        yield b"".join(parts)


@cache
def _write_query(text: str) -> str:
    """Return the query for plain events of `text`: members as JSON text -> values -> whether all are exact.

    A JSON text keeps its type: `"5"` is a string, `5` a number. A number is exact if casting it to an integer
    and back changes nothing, which `1.5`, `1e3` and `007` do not survive. Times are still in the file's unit.
    """
    top = ("name", "cat", "ph", "pid", "tid", "ts", "dur", "args")
    inner = (*_TAKEN, "size")
    numbers = ("pid", "tid", "ts", "dur", "ret", "offset", "epoch", "step", "size")
    texts = ("name", "cat", "fname", "hostname")

    def structure(keys: tuple[str, ...]) -> str:
        return json.dumps(dict.fromkeys(keys, "JSON"))

    def members(keys: tuple[str, ...]) -> str:
        return ", ".join(f'm."{key}"::VARCHAR AS "{key}"' for key in keys)

    def bare(key: str) -> str:
        return f"""trim("{key}", '"')"""

    def names(ops: frozenset[str]) -> str:
        return "name IN (" + ", ".join(f"'{name}'" for name in spellings_of(ops)) + ")"

    limits = {"epoch": 1 << 31, "step": 1 << 31}
    exact = [
        f"""coalesce(n_{key}::VARCHAR = {bare(key)} AND abs(n_{key}) < {limits.get(key, 1 << 62)},
                     "{key}" IS NULL)"""
        for key in numbers
        if key != "size"
    ]
    exact += [
        f"""coalesce(starts_with("{key}", '"') AND NOT contains("{key}", '\\'), true)""" for key in texts
    ]
    exact += [
        f"""coalesce(NOT contains("{key}", '\\')
                 AND (starts_with("{key}", '"') OR TRY_CAST("{key}" AS HUGEINT)::VARCHAR = "{key}"),
                 "{key}" IS NULL)"""
        for key in ("fhash", "hhash")
    ]
    moves_bytes = f"cat IN {BYTE_LAYERS} AND {names(BYTE_MOVERS)}"
    moves_items = f"cat = 'STDIO' AND {names(ITEM_MOVERS)}"
    size = f"CASE WHEN {moves_bytes} THEN ret WHEN {moves_items} THEN ret::HUGEINT * n_size END"
    taken = json.dumps(dict.fromkeys(_TAKEN))
    phases = ", ".join(f"'\"{phase}\"', '{phase}'" for phase in COMPLETE_PHASES)
    return f"""
        WITH members AS (
            SELECT line, {members(top)}
            FROM (SELECT line, json_transform({text}, '{structure(top)}') AS m
                  FROM block WHERE json_valid({text}))
        ), arguments AS (
            SELECT * EXCLUDE (m), {members(inner)}
            FROM (SELECT *, json_transform(args, '{structure(inner)}') AS m,
                   CASE WHEN starts_with(args, '{{') THEN json_merge_patch(args, '{taken}') END AS rest
                  FROM members)
        ), valued AS (
            SELECT *, {", ".join(f"TRY_CAST({bare(key)} AS BIGINT) AS n_{key}" for key in numbers)}
            FROM arguments
        ), checked AS (
            SELECT line, n_ts AS ts_us, n_dur AS dur_us,
                   {bare("name")} AS name, {bare("cat")} AS cat,
                   coalesce(n_pid, 0) AS pid, coalesce(n_tid, n_pid, 0) AS tid,
                   {bare("hostname")} AS host, {bare("hhash")} AS hhash, {bare("fname")} AS path,
                   {bare("fhash")} AS fhash, n_ret AS ret, n_offset AS "offset", n_epoch AS epoch,
                   n_step AS step, n_size, rest::VARCHAR AS args, size AS written_size,
                   coalesce(
                       ph IN ({phases}) AND cat IS NOT NULL AND n_ts >= 0 AND n_dur >= 0
                       AND name <> '"end"' AND rest IS NOT NULL AND NOT contains(args, ':null')
                       AND NOT contains(args, 'newpath_hash') AND {" AND ".join(exact)}, false) AS is_exact
            FROM valued
        ), sized AS (
            SELECT *, {size} AS moved,
                   is_exact AND NOT ({moves_items} AND coalesce(n_size::VARCHAR <> {bare("written_size")},
                                                               written_size IS NOT NULL)) AS is_plain
            FROM checked
        )
        SELECT * REPLACE (CASE WHEN is_plain THEN epoch END::INTEGER AS epoch,
                          CASE WHEN is_plain THEN step END::INTEGER AS step),
               CASE WHEN moved BETWEEN 0 AND {SIZE_LIMIT - 1} THEN moved END::BIGINT AS size_bytes
        FROM sized"""


_searching: Final = Lock()


def find_name_in_siblings(path: Path, kind: str, value: str) -> str | None:
    """Return the name that files in the folder of `path` give to a hash; None if none does, or if two differ.

    A forked worker writes its own file, which does not repeat what its parent's file has explained. Hashes of
    16 digits are the same in every process; shorter ones, from early versions, mean nothing in other
    processes.
    """
    if _GLOBAL_HASH.fullmatch(value) is None:
        return None
    # Only one of the threads that read files searches. If a file appears meanwhile, it searches again.
    with _searching:
        return _find_names(path.parent, path.parent.stat().st_mtime_ns).get((kind, value))


@lru_cache(maxsize=8)
def _find_names(folder: Path, _mtime_ns: int) -> Mapping[Hash, str | None]:
    """Find the names of all hashes that the folder's files explain; None if the files disagree."""
    names: dict[Hash, str | None] = {}
    for path in (*sorted(folder.glob("*.pfw")), *sorted(folder.glob("*.pfw.gz"))):
        for line in find_lines(path, b'"FH"', b'"HH"'):
            # A damaged line explains nothing, and other lines only mention such a name.
            try:
                document = json.loads(line.strip(b" \t\r\n,[]"))
                kind, arguments = _HASH_KINDS[document["name"]], document["args"]
                name, value = arguments["name"], str(arguments["value"])
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
            if isinstance(name, str) and _GLOBAL_HASH.fullmatch(value):
                text = name.encode(errors="backslashreplace").decode()
                names[kind, value] = text if names.get((kind, value), text) == text else None
    return names
