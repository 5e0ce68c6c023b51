"""Readers of request traces: block-hash lines (Mooncake, Dynamo, AIPerf, Bailian), BurstGPT and ShareGPT.

Every value is checked; an error names the file, the line, the field and the fix. Block numbers of the formats
become those of `BlockTrace`, which stand for a block with everything before it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError, name_some
from penstock.kvcache.block_trace import BlockTrace, Integers, number_densely, offsets

FORMATS: Final = ("auto", "mooncake", "bailian", "burstgpt", "sharegpt")
DEFAULT_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16
_USUAL_BLOCK_TOKENS: Final = (512, 16, 64, 256, 128, 32, 1024, 2048)
SHAREGPT_CONTEXT: Final = 16_384
SHAREGPT_ANSWER: Final = 2_048
_CHARACTERS_PER_TOKEN: Final = 4

_TIME: Final = ("timestamp", "created_time")
_INPUT: Final = ("input_length", "input_tokens")
_OUTPUT: Final = ("output_length", "output_tokens")
_DELAY: Final = ("delay", "delay_ms")


def read_trace(
    path: Path, *, kind: str = "auto", block_tokens: int | None = None, request_rate: float = 1.0
) -> BlockTrace:
    """Read a trace of any of the formats. `request_rate` is for formats that have no times."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            chosen = _detect_format(path, file.read(4096)) if kind == "auto" else kind
            file.seek(0)
            if chosen == "burstgpt":
                rows = _burstgpt_rows(csv.reader(file), str(path))
                return _unshared(rows, path, block_tokens or DEFAULT_BLOCK_TOKENS)
            if chosen == "sharegpt":
                return _read_sharegpt(file.read(), path, block_tokens or DEFAULT_BLOCK_TOKENS, request_rate)
            return _read_block_lines(file, path, block_tokens, is_chained=chosen != "bailian")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"This is no text: {error.reason} at byte {error.start}", where=str(path), fix="Unpack it first."
        ) from error
    except (OSError, csv.Error) as error:
        raise UsageError(f"Cannot read this trace: {error}", where=str(path)) from error


def _detect_format(path: Path, beginning: str) -> str:
    text = beginning.lstrip("\ufeff \t\r\n")
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


@dataclass(slots=True)
class _Rows:
    """Columns while they are read. `hash_ids` are as in the file; `lines` are numbers for messages."""

    arrivals_ms: list[float | None] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    sessions: list[object] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    hash_ids: list[Sequence[Any]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


def _read_block_lines(
    lines: Iterable[str], path: Path, block_tokens: int | None, *, is_chained: bool
) -> BlockTrace:
    rows = _Rows()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _add_line(rows, line, f"{path}:{number}")
            rows.lines.append(number)
    if not rows.inputs:
        raise UsageError("This trace has no requests", where=str(path), fix="Give a file with requests.")
    counts = np.array([len(ids) for ids in rows.hash_ids], np.int64)
    inputs = np.array(rows.inputs, np.int64)
    notes: list[str] = []
    if block_tokens is None and not is_chained:
        block_tokens = BAILIAN_BLOCK_TOKENS
    tokens = _infer_block_tokens(inputs, counts) if block_tokens is None else block_tokens
    off = np.flatnonzero(counts != -(-inputs // tokens))
    if len(off):
        where = name_some([rows.lines[index] for index in off])
        notes.append(
            f"{len(off):,} of {len(counts):,} requests have another number of blocks than they take in "
            f"blocks of {tokens}: lines {where}. Their blocks count as they are listed."
        )
    ids = _number_ids(rows.hash_ids) if is_chained else _chain_ids(rows.hash_ids)
    # Bailian's times are in seconds.
    times = np.array(list(_arrivals(rows)), np.float64)
    arrival_s = (times - times.min()) / (1000 if is_chained else 1)
    outputs = np.array(rows.outputs, np.int64)
    return _ordered(path, tokens, _Columns(arrival_s, inputs, outputs, counts, ids), notes)


def _add_line(rows: _Rows, line: str, where: str) -> None:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"This line is no JSON: {error}", where=where, fix="Repair or remove the line; one object a line."
        ) from error
    if not isinstance(request, dict):
        raise UsageError("This line is no JSON object", where=where, fix="Write one object a line.")
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        raise UsageError(
            f"hash_ids is {_shorten(ids)}, not a list of whole numbers or texts",
            where=f"{where}: hash_ids",
            fix="Give the ids of the request's blocks, in order.",
        )
    rows.hash_ids.append(ids)
    rows.inputs.append(_whole(request, _INPUT, where))
    rows.outputs.append(_whole(request, _OUTPUT, where))
    session, delay = request.get("session_id"), _find(request, _DELAY)
    is_timed = _find(request, _TIME) is not None or (session is None and delay is None)
    rows.arrivals_ms.append(_time(request, _TIME, where) if is_timed else None)
    rows.delays_ms.append(0.0 if delay is None else _time(request, _DELAY, where))
    rows.sessions.append(session)


def _find(request: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((request[name] for name in names if name in request), None)


def _whole(request: Mapping[str, Any], names: Sequence[str], where: str) -> int:
    value = _find(request, names)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise UsageError(
            f"{names[0]} is {_shorten(value)}, not a number of tokens",
            where=f"{where}: {names[0]}",
            fix=f"Give {' or '.join(names)} as a whole number of at least 0.",
        )
    return value


def _time(request: Mapping[str, Any], names: Sequence[str], where: str) -> float:
    value = _find(request, names)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_time(value):
        raise UsageError(
            f"{names[0]} is {_shorten(value)}, not a time",
            where=f"{where}: {names[0]}",
            fix=f"Give {' or '.join(names)} as a number of at least 0.",
        )
    return float(value)


def _is_time(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _shorten(value: object) -> str:
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _infer_block_tokens(inputs: Integers, counts: Integers) -> int:
    """The size of a block of which each request's tokens take as many as it lists.

    Without one that fits all requests, the usual size that fits the most.
    """
    is_whole = counts > 0
    inputs, counts = inputs[is_whole], counts[is_whole]
    if not len(counts):
        return DEFAULT_BLOCK_TOKENS
    fits = [(counts == -(-inputs // tokens)).mean() for tokens in _USUAL_BLOCK_TOKENS]
    if max(fits) < 1:
        least = int((-(-inputs // counts)).max())
        if least > 0 and (counts == -(-inputs // least)).all():
            return least
    return _USUAL_BLOCK_TOKENS[int(np.argmax(fits))]


def _number_ids(hash_ids: Sequence[Sequence[Any]]) -> Integers:
    """Dense numbers of ids that already stand for everything before them."""
    flat = list(chain.from_iterable(hash_ids))
    try:
        return number_densely(np.array(flat, np.int64)) if flat else np.empty(0, np.int64)
    except (OverflowError, ValueError, TypeError):
        names: dict[Any, int] = {}
        return np.array([names.setdefault(block, len(names)) for block in flat], np.int64)


def _chain_ids(hash_ids: Sequence[Sequence[Any]]) -> Integers:
    """Dense numbers of ids of single blocks, made to stand for everything before them."""
    names: dict[tuple[int, Any], int] = {}
    numbered: list[int] = []
    for ids in hash_ids:
        prefix = -1
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


@dataclass(frozen=True, slots=True)
class _Columns:
    """Requests in the order of their file; `counts` are their numbers of blocks."""

    arrival_s: NDArray[np.float64]
    inputs: Integers
    outputs: Integers
    counts: Integers
    ids: Integers


def _ordered(path: Path, block_tokens: int, columns: _Columns, notes: list[str]) -> BlockTrace:
    """The trace with its requests in the order of their arrival."""
    order, ids = np.argsort(columns.arrival_s, kind="stable"), columns.ids
    if (order[1:] < order[:-1]).any():
        notes.append("The requests of the file are not in the order of their times, and were sorted.")
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


def _burstgpt_rows(reader: Iterator[list[str]], path: str) -> Iterator[tuple[float, int, int]]:
    """Time, input tokens and output tokens of each row."""
    header = [name.strip().lower() for name in next(reader, [])]
    columns = {}
    for name in ("timestamp", "request tokens", "response tokens"):
        if name not in header:
            raise UsageError(
                f"The column {name!r} is missing",
                where=f"{path}:1",
                fix="BurstGPT has Timestamp, Request tokens and Response tokens.",
            )
        columns[name] = header.index(name)
    for number, row in enumerate(reader, start=2):
        if not row:
            continue
        request: dict[str, Any] = {name: _cell(row, column) for name, column in columns.items()}
        where = f"{path}:{number}"
        yield (
            _time(request, ("timestamp",), where),
            _whole(request, ("request tokens",), where),
            _whole(request, ("response tokens",), where),
        )


def _cell(row: Sequence[str], column: int) -> float | str | None:
    text = row[column] if column < len(row) else None
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


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
    return _ordered(path, block_tokens, _Columns(table[:, 0], inputs, outputs, counts, ids), notes)


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
    columns = _Columns(
        arrival_s=np.arange(len(sizes)) / request_rate,
        inputs=sizes,
        outputs=np.array(outputs, np.int64),
        counts=-(-sizes // block_tokens),
        ids=number_densely(np.array(ids, np.int64)),
    )
    text = (
        f"Tokens are characters / {_CHARACTERS_PER_TOKEN}; requests have no times: {request_rate:g} a second."
    )
    return _ordered(path, block_tokens, columns, [text])


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
                f"value is {_shorten(value)}, not text",
                where=f"{where}: turn {number}: value",
                fix="Give each turn its text.",
            )
        tokens = -(-len(value) // _CHARACTERS_PER_TOKEN)
        if turn.get("from") in ("gpt", "assistant", "chatgpt", "bard", "bing") and context:
            yield context, tokens
        context += tokens
