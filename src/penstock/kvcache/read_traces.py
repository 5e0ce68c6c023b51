"""Readers of request traces: block hashes (Mooncake, AIPerf, Bailian, Dynamo, Weka), CSV and ShareGPT.

Files may be gzipped. Every value is checked; an error names the file, the line, the field and the fix. Block
numbers of the formats become those of `BlockTrace`, which stand for a block with everything before it.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError, name_some
from penstock.kvcache.block_trace import BlockTrace, Integers, number_densely, offsets

DEFAULT_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16
_USUAL_BLOCK_TOKENS: Final = (512, 16, 64, 256, 128, 32, 1024, 2048)

_TIME: Final = ("timestamp", "created_time")
_INPUT: Final = ("input_length", "input_tokens")
_OUTPUT: Final = ("output_length", "output_tokens")
_DELAY: Final = ("delay", "delay_ms")


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests in the order of their file; `counts` are their numbers of blocks."""

    arrival_s: NDArray[np.float64]
    inputs: Integers
    outputs: Integers
    counts: Integers
    ids: Integers


def order_requests(path: Path, block_tokens: int, columns: Columns, notes: list[str]) -> BlockTrace:
    """The trace with its requests in the order of their arrival."""
    order, ids = np.argsort(columns.arrival_s, kind="stable"), columns.ids
    if (order[1:] < order[:-1]).any():
        notes.insert(0, "The requests of the file are not in the order of their times, and were sorted.")
        begin = offsets(columns.counts)
        ids = number_densely(np.concatenate([ids[begin[request] : begin[request + 1]] for request in order]))
    sorted_s = columns.arrival_s[order]
    return BlockTrace(
        name=path.name,
        block_tokens=block_tokens,
        arrival_s=sorted_s - sorted_s[0],
        input_tokens=columns.inputs[order],
        output_tokens=columns.outputs[order],
        first_block=offsets(columns.counts[order]),
        block_ids=ids,
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _Rows:
    """Columns while they are read. `hash_ids` are as in the file; `lines` are numbers for messages.

    `scopes` tell ids of different conversations apart where each counts its own.
    """

    arrivals_ms: list[float | None] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    sessions: list[object] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    hash_ids: list[Sequence[Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    scopes: list[int] = field(default_factory=list)
    without_output: list[int] = field(default_factory=list)
    stated_block_tokens: set[int] = field(default_factory=set)
    is_scoped: bool = False

    def add(self, request: Mapping[str, Any], line: int, where: str, *, scope: int = 0) -> None:
        """One request with Mooncake's names, or their other ones."""
        ids = request.get("hash_ids")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
            raise UsageError(
                f"hash_ids is {shorten(ids)}, not a list of whole numbers or texts",
                where=f"{where}: hash_ids",
                fix="Give the ids of the request's blocks, in order.",
            )
        self.inputs.append(whole_number(request, _INPUT, where))
        if find_value(request, _OUTPUT) is None:
            self.outputs.append(0)
            self.without_output.append(line)
        else:
            self.outputs.append(whole_number(request, _OUTPUT, where))
        session, delay = request.get("session_id"), find_value(request, _DELAY)
        is_timed = find_value(request, _TIME) is not None or (session is None and delay is None)
        self.arrivals_ms.append(time_value(request, _TIME, where) if is_timed else None)
        self.delays_ms.append(0.0 if delay is None else time_value(request, _DELAY, where))
        self.sessions.append(session)
        self.hash_ids.append(ids)
        self.lines.append(line)
        self.scopes.append(scope)

    def state_block_tokens(self, holder: Mapping[str, Any], name: str, where: str) -> None:
        """Note the block size that a line states; one size holds for a trace."""
        if (tokens := whole_number(holder, (name,), where)) < 1:
            raise UsageError(f"{name} is 0", where=f"{where}: {name}", fix="Give the tokens of a block.")
        self.stated_block_tokens.add(tokens)
        if len(self.stated_block_tokens) > 1:
            sizes = " and ".join(map(str, sorted(self.stated_block_tokens)))
            raise UsageError(
                f"Blocks have {sizes} tokens in one trace",
                where=f"{where}: {name}",
                fix="Divide it into one file for each size.",
            )


def read_block_lines(
    lines: Iterable[str], path: Path, block_tokens: int | None, *, is_chained: bool
) -> BlockTrace:
    """A trace of lines; `is_chained` says that a block's id stands for everything before it, too."""
    rows = _Rows()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _add_line(rows, _parse(line, f"{path}:{number}"), number, f"{path}:{number}")
    return _finish(rows, path, block_tokens, is_chained=is_chained)


def read_block_objects(
    objects: Sequence[Any], path: Path, block_tokens: int | None, *, is_chained: bool
) -> BlockTrace:
    """The same from a file that is one JSON document."""
    rows = _Rows()
    for number, found in enumerate(objects, start=1):
        _add_line(rows, found, number, f"{path}: request {number}")
    return _finish(rows, path, block_tokens, is_chained=is_chained)


def _finish(rows: _Rows, path: Path, block_tokens: int | None, *, is_chained: bool) -> BlockTrace:
    if not rows.inputs:
        raise UsageError("This trace has no requests", where=str(path), fix="Give a file with requests.")
    counts = np.array([len(ids) for ids in rows.hash_ids], np.int64)
    inputs = np.array(rows.inputs, np.int64)
    if block_tokens is None:
        stated = next(iter(rows.stated_block_tokens), None)
        usual = None if is_chained else BAILIAN_BLOCK_TOKENS
        block_tokens = stated or usual or _infer_block_tokens(inputs, counts)
    notes = _note_counts(rows, inputs, counts, block_tokens)
    if is_chained and not rows.is_scoped:
        ids = _number_ids(rows.hash_ids)
        notes += _note_unchained(ids, counts)
    else:
        ids = _chain_ids(rows.hash_ids, rows.scopes)
    # Bailian's times are in seconds.
    times = np.array(list(_arrivals(rows)), np.float64)
    arrival_s = (times - times.min()) / (1000 if is_chained else 1)
    outputs = np.array(rows.outputs, np.int64)
    return order_requests(path, block_tokens, Columns(arrival_s, inputs, outputs, counts, ids), notes)


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"This line is no JSON: {error}", where=where, fix="Repair or remove the line; one object a line."
        ) from error


def _add_line(rows: _Rows, found: Any, line: int, where: str) -> None:
    if not isinstance(found, dict):
        raise UsageError("This line is no JSON object", where=where, fix="Write one object a line.")
    event = found["event"] if isinstance(found.get("event"), dict) else found
    if str(event.get("schema", "")).startswith("dynamo."):
        _add_event(rows, event, line, where)
    elif isinstance(found.get("requests"), list):
        rows.is_scoped = True
        rows.state_block_tokens(found, "block_size", where)
        _add_turns(rows, found["requests"], line, f"{where}: requests")
    else:
        if "block_size" in found:
            rows.state_block_tokens(found, "block_size", where)
        rows.add(found, line, where)


def _add_event(rows: _Rows, event: Mapping[str, Any], line: int, where: str) -> None:
    """A record of Dynamo's; those of tools have no request."""
    request = event.get("request")
    if not isinstance(request, dict):
        return
    replay = request.get("replay")
    if not isinstance(replay, dict):
        raise UsageError(
            f"replay is {shorten(replay)}: this record does not say which blocks its request had",
            where=f"{where}: request: replay",
            fix="Record requests with their hashes of blocks.",
        )
    rows.state_block_tokens(replay, "trace_block_size", where)
    received = request.get("request_received_ms", event.get("event_time_unix_ms"))
    rows.add(
        {
            "timestamp": received,
            "input_length": replay.get("input_length", request.get("input_tokens")),
            "output_length": request.get("output_tokens"),
            "hash_ids": replay.get("input_sequence_hashes"),
        },
        line,
        where,
    )


def _add_turns(rows: _Rows, turns: Sequence[Any], line: int, where: str, *, after_s: float = 0.0) -> None:
    """The requests of one of Weka's conversations; their ids mean nothing in others."""
    for number, turn in enumerate(turns, start=1):
        at = f"{where} {number}"
        if not isinstance(turn, dict):
            raise UsageError("This is no JSON object", where=at, fix="Give requests as objects.")
        began_s = time_value(turn, ("t",), at)
        if isinstance(turn.get("requests"), list):
            # Some producers count a subagent's times from its beginning, others from the conversation's.
            times_s = [time_value(inner, ("t",), at) for inner in turn["requests"] if isinstance(inner, dict)]
            is_relative = min(times_s, default=0.0) < began_s
            _add_turns(
                rows, turn["requests"], line, at, after_s=after_s + began_s if is_relative else after_s
            )
            continue
        renamed = {"timestamp": 1000 * (began_s + after_s), "input_length": turn.get("in")}
        rows.add(
            renamed | {"output_length": turn.get("out"), "hash_ids": turn.get("hash_ids")},
            line,
            at,
            scope=line,
        )


def find_value(request: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of these names that is there."""
    return next((request[name] for name in names if name in request), None)


def whole_number(request: Mapping[str, Any], names: Sequence[str], where: str) -> int:
    """A number of tokens."""
    value = find_value(request, names)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise UsageError(
            f"{names[0]} is {shorten(value)}, not a number of tokens",
            where=f"{where}: {names[0]}",
            fix=f"Give {' or '.join(names)} as a whole number of at least 0.",
        )
    return value


def time_value(request: Mapping[str, Any], names: Sequence[str], where: str) -> float:
    """A time."""
    value = find_value(request, names)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_time(value):
        raise UsageError(
            f"{names[0]} is {shorten(value)}, not a time",
            where=f"{where}: {names[0]}",
            fix=f"Give {' or '.join(names)} as a number of at least 0.",
        )
    return float(value)


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def shorten(value: object) -> str:
    """A value as messages show it."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ceil(inputs: Integers, tokens: Integers | int) -> Integers:
    return -(-inputs // tokens)


def _floor(inputs: Integers, tokens: int) -> Integers:
    return inputs // tokens


_COUNTS: Final[tuple[Callable[[Integers, int], Integers], ...]] = (_ceil, _floor)
"""A request lists all of its blocks, or in some traces only those that are full."""


def _infer_block_tokens(inputs: Integers, counts: Integers) -> int:
    """The size of a block of which each request's tokens take as many as it lists.

    Without one that fits all requests, the usual size that fits the most.
    """
    is_whole = counts > 0
    if not is_whole.any():
        return DEFAULT_BLOCK_TOKENS
    least = int(_ceil(inputs[is_whole], counts[is_whole]).max())
    shares = []
    for count_blocks in _COUNTS:
        fits = [float(np.mean(counts == count_blocks(inputs, tokens))) for tokens in _USUAL_BLOCK_TOKENS]
        if max(fits) == 1:
            return _USUAL_BLOCK_TOKENS[int(np.argmax(fits))]
        shares.append(fits)
        if least > 0 and (counts == count_blocks(inputs, least)).all():
            return least
    return _USUAL_BLOCK_TOKENS[int(np.argmax(shares[0]))]


def _note_counts(rows: _Rows, inputs: Integers, counts: Integers, tokens: int) -> list[str]:
    notes = []
    if rows.without_output:
        notes.append(
            f"{len(rows.without_output):,} of {len(counts):,} requests do not say how long their answers "
            f"are; they count as 0 tokens: lines {name_some(rows.without_output)}."
        )
    if not any((counts == count_blocks(inputs, tokens)).all() for count_blocks in _COUNTS):
        off = np.flatnonzero(counts != _ceil(inputs, tokens))
        notes.append(
            f"{len(off):,} of {len(counts):,} requests have another number of blocks than they take in "
            f"blocks of {tokens}: lines {name_some([rows.lines[index] for index in off])}. "
            "Their blocks count as they are listed."
        )
    return notes


def _note_unchained(ids: Integers, counts: Integers) -> list[str]:
    """True if ids follow different ones: then they cannot stand for everything before them."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[offsets(counts)[:-1][counts > 0]] = -1
    num_unique = int(ids.max(initial=-1)) + 1
    pairs = np.unique(ids * (num_unique + 1) + before + 1)
    several = int((np.bincount(pairs // (num_unique + 1), minlength=1) > 1).sum())
    if not several:
        return []
    text = (
        f"{several:,} of {num_unique:,} ids stand after different blocks, so they do not stand for what is "
        "before them. They count as listed; --format bailian tells them apart (its times are in seconds)."
    )
    return [text]


def _number_ids(hash_ids: Sequence[Sequence[Any]]) -> Integers:
    """Dense numbers of ids that already stand for everything before them."""
    flat = list(chain.from_iterable(hash_ids))
    if set(map(type, flat)) <= {int}:
        try:
            return number_densely(np.array(flat, np.int64))
        except OverflowError:
            pass
    names: dict[Any, int] = {}
    return np.array([names.setdefault(block, len(names)) for block in flat], np.int64)


def _chain_ids(hash_ids: Sequence[Sequence[Any]], scopes: Sequence[int]) -> Integers:
    """Dense numbers of ids of single blocks, made to stand for everything before them in their scope."""
    names: dict[tuple[int, Any], int] = {}
    numbered: list[int] = []
    for ids, scope in zip(hash_ids, scopes, strict=True):
        prefix = -1 - scope
        for block in ids:
            prefix = names.setdefault((prefix, block), len(names))
            numbered.append(prefix)
    return np.array(numbered, np.int64)


def _arrivals(rows: _Rows) -> Iterator[float]:
    """The arrival of each request; in a session without times, its delay after the request before."""
    last: dict[object, float] = {}
    for arrival_ms, delay_ms, session in zip(rows.arrivals_ms, rows.delays_ms, rows.sessions, strict=True):
        known = arrival_ms if arrival_ms is not None else last.get(session, 0.0) + delay_ms
        last[session] = known
        yield known


FORMATS: Final = ("auto", "mooncake", "bailian", "burstgpt", "sharegpt")
SHAREGPT_CONTEXT: Final = 16_384
SHAREGPT_ANSWER: Final = 2_048
_CHARACTERS_PER_TOKEN: Final = 4
_CSV_COLUMNS: Final = (
    ("timestamp",),
    ("request tokens", "contexttokens"),
    ("response tokens", "generatedtokens"),
)
"""The names of BurstGPT, then those of Azure's LLM inference traces, which have dates."""
_GZIP: Final = b"\x1f\x8b"
_PACKED: Final = {
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"\xfd7zXZ": "xz -d",
    b"BZh": "bzip2 -d",
    b"PK\x03\x04": "unzip",
    b"PAR1": "duckdb -jsonlines -c \"FROM 'FILE'\"",
}


def read_trace(
    path: Path, *, kind: str = "auto", block_tokens: int | None = None, request_rate: float = 1.0
) -> BlockTrace:
    """Read a trace of any of the formats. `request_rate` is for formats that have no times."""
    try:
        with _open_text(path) as file:
            chosen = _detect_format(path, file.read(4096)) if kind == "auto" else kind
            file.seek(0)
            if chosen == "burstgpt":
                rows = _csv_rows(csv.reader(file), str(path))
                return _unshared(rows, path, block_tokens or DEFAULT_BLOCK_TOKENS)
            objects = _read_document(file)
            if chosen == "sharegpt" and not _has_blocks(objects):
                file.seek(0)
                return _read_sharegpt(file.read(), path, block_tokens or DEFAULT_BLOCK_TOKENS, request_rate)
            if objects is not None:
                return read_block_objects(objects, path, block_tokens, is_chained=chosen != "bailian")
            file.seek(0)
            return read_block_lines(file, path, block_tokens, is_chained=chosen != "bailian")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"This is no text: {error.reason} at byte {error.start}", where=str(path), fix="Unpack it first."
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(f"Cannot read this trace: {error}", where=str(path)) from error


def _open_text(path: Path) -> TextIO:
    with path.open("rb") as file:
        beginning = file.read(8)
    for magic, command in _PACKED.items():
        if beginning.startswith(magic):
            raise UsageError("This trace is packed", where=str(path), fix=f"Unpack it first: {command}.")
    # utf-8-sig: some programs begin a file with a byte order mark.
    if beginning.startswith(_GZIP):
        return cast("TextIO", gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _detect_format(path: Path, beginning: str) -> str:
    text = beginning.lstrip()
    if text.startswith("["):
        return "sharegpt"
    if text.startswith("{"):
        return "bailian" if '"chat_id"' in text.partition("\n")[0] else "mooncake"
    if "," in text.partition("\n")[0]:
        return "burstgpt"
    if not text:
        raise UsageError("This trace is empty", where=str(path), fix="Give a file with requests.")
    raise UsageError(
        "This file is no trace of a known format",
        where=str(path),
        fix=f"Give lines of JSON with hash_ids, or name the format: {', '.join(FORMATS[1:])}.",
    )


def _read_document(file: TextIO) -> Sequence[Any] | None:
    """The objects of a file that is one JSON document, not lines; None where it has lines."""
    first = file.readline()
    if _is_json_object(first):
        return None
    try:
        document = json.loads(first + file.read())
    except ValueError:
        return None  # reading its lines finds the wrong one
    return document if isinstance(document, list) else [document]


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _has_blocks(objects: Sequence[Any] | None) -> bool:
    """True if a list has requests with blocks, and no conversations."""
    first = objects[0] if objects else None
    return (
        isinstance(first, dict)
        and "conversations" not in first
        and bool({"hash_ids", "requests"} & first.keys())
    )


def _csv_rows(reader: Iterator[list[str]], path: str) -> Iterator[tuple[float, int, int]]:
    """Time, input tokens and output tokens of each row."""
    header = [name.strip().lower() for name in next(reader, [])]
    columns = {}
    for names in _CSV_COLUMNS:
        found = [header.index(name) for name in names if name in header]
        if not found:
            raise UsageError(
                f"The column {names[0]!r} is missing",
                where=f"{path}:1",
                fix="BurstGPT has Timestamp, Request tokens and Response tokens; Azure's traces TIMESTAMP, "
                "ContextTokens and GeneratedTokens.",
            )
        columns[names[0]] = found[0]
    time, inputs, outputs = columns
    for number, row in enumerate(reader, start=2):
        if not row:
            continue
        request: dict[str, Any] = {name: _cell(row, column) for name, column in columns.items()}
        where = f"{path}:{number}"
        yield (
            time_value(request, (time,), where),
            whole_number(request, (inputs,), where),
            whole_number(request, (outputs,), where),
        )


def _cell(row: Sequence[str], column: int) -> float | str | None:
    """A number, or the seconds that a date stands for; other text as it is."""
    text = row[column] if column < len(row) else None
    try:
        return None if text is None else float(text)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text or "")
    except ValueError:
        return text
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _unshared(rows: Iterable[tuple[float, int, int]], path: Path, block_tokens: int) -> BlockTrace:
    """A trace without contents: no request shares a block with another."""
    table = np.array(list(rows), np.float64).reshape(-1, 3)
    if not len(table):
        raise UsageError("This trace has no requests", where=str(path), fix="Give a file with requests.")
    inputs = table[:, 1].astype(np.int64)
    counts = -(-inputs // block_tokens)
    notes = ["The format does not say what requests have in common: no block of it is ever used again."]
    ids = np.arange(int(counts.sum()), dtype=np.int64)
    outputs = table[:, 2].astype(np.int64)
    return order_requests(path, block_tokens, Columns(table[:, 0], inputs, outputs, counts, ids), notes)


def _read_sharegpt(text: str, path: Path, block_tokens: int, request_rate: float) -> BlockTrace:
    try:
        conversations = json.loads(text)
    except ValueError as error:
        raise UsageError(f"This file is no JSON: {error}", where=str(path)) from error
    inputs: list[int] = []
    outputs: list[int] = []
    ids: list[int] = []
    num_blocks = 0
    for number, conversation in enumerate(conversations):
        where = f"{path}: conversation {number}"
        full = num_blocks
        for context, answer in _turns(conversation, where):
            inputs.append(min(context, SHAREGPT_CONTEXT))
            outputs.append(min(answer, SHAREGPT_ANSWER))
            whole, rest = divmod(inputs[-1], block_tokens)
            # Whole blocks are those of the turns before; one that is not full has other content each turn.
            ids.extend(range(full, full + whole))
            num_blocks = max(num_blocks, full + whole)
            if rest:
                ids.append(-len(inputs))
        num_blocks = max(num_blocks, full)
    if not inputs:
        raise UsageError("This trace has no requests", where=str(path), fix="Give a file with requests.")
    sizes = np.array(inputs, np.int64)
    columns = Columns(
        arrival_s=np.arange(len(sizes)) / request_rate,
        inputs=sizes,
        outputs=np.array(outputs, np.int64),
        counts=-(-sizes // block_tokens),
        ids=number_densely(np.array(ids, np.int64)),
    )
    text = (
        f"Tokens are characters / {_CHARACTERS_PER_TOKEN}; requests have no times: {request_rate:g} a second."
    )
    return order_requests(path, block_tokens, columns, [text])


def _turns(conversation: Any, where: str) -> Iterator[tuple[int, int]]:
    """The tokens before each answer, all turns before included, and those of the answer."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise UsageError(
            "conversations is no list", where=f"{where}: conversations", fix="Give turns with from and value."
        )
    context = 0
    for number, turn in enumerate(turns):
        value = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(value, str):
            raise UsageError(
                f"value is {shorten(value)}, not text",
                where=f"{where}: turn {number}: value",
                fix="Give each turn its text.",
            )
        tokens = -(-len(value) // _CHARACTERS_PER_TOKEN)
        if turn.get("from") in ("gpt", "assistant", "chatgpt", "bard", "bing") and context:
            yield context, tokens
        context += tokens
