"""Readers of request traces: block hashes (Mooncake, AIPerf, Bailian, Dynamo, Weka), CSV and ShareGPT.

Files may be gzipped. Every value is checked; an error names the file, the line, the field and the fix. The
formats' block ids are converted to the block numbers of `BlockTrace`, which stand for a block with everything
before it.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, cast

import numpy as np

from penstock.errors import UsageError, name_some
from penstock.kvcache.block_trace import BlockTrace, Integers, number_densely, offsets
from penstock.storage.files.local_files import open_to_read, parse_json
from penstock.trace.reading.trace_files import LARGEST_RATIO, UNPACKED_BYTES

DEFAULT_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16
_USUAL_BLOCK_TOKENS: Final = (512, 16, 64, 256, 128, 32, 1024, 2048)

_TIME: Final = ("timestamp", "created_time")
_INPUT: Final = ("input_length", "input_tokens")
_OUTPUT: Final = ("output_length", "output_tokens")
_DELAY: Final = ("delay", "delay_ms")


class _Request(NamedTuple):
    """One request. `line` is its line in the file, for messages.

    If `arrival` is None, the request arrives `delay` after the one before it. `scope` separates the ids of
    conversations that each have their own numbering.
    """

    arrival: float | None
    inputs: int
    outputs: int | None
    hash_ids: Sequence[Any]
    line: int
    scope: int = 0
    delay: float = 0.0
    session: object = None


def _read_request(request: Mapping[str, Any], line: int, where: str, *, scope: int = 0) -> _Request:
    """Read a request by Mooncake's field names or their synonyms."""
    ids = request.get("hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        raise UsageError(
            f"hash_ids is {shorten(ids)}, not a list of whole numbers or strings",
            where=f"{where}: hash_ids",
            fix="Give the ids of the request's blocks, in order.",
        )
    session, delay = request.get("session_id"), find_value(request, _DELAY)
    is_timed = find_value(request, _TIME) is not None or (session is None and delay is None)
    has_output = find_value(request, _OUTPUT) is not None
    return _Request(
        arrival=time_value(request, _TIME, where) if is_timed else None,
        delay=0.0 if delay is None else time_value(request, _DELAY, where),
        session=session,
        inputs=whole_number(request, _INPUT, where),
        outputs=whole_number(request, _OUTPUT, where) if has_output else None,
        hash_ids=ids,
        line=line,
        scope=scope,
    )


def _state_block_tokens(stated: set[int], holder: Mapping[str, Any], name: str, where: str) -> None:
    """Add the block size that a line states; all lines of a trace must give the same size."""
    if (tokens := whole_number(holder, (name,), where)) < 1:
        raise UsageError(f"{name} is 0", where=f"{where}: {name}", fix="Give the number of tokens per block.")
    stated.add(tokens)
    if len(stated) > 1:
        raise UsageError(
            f"Blocks have {' and '.join(map(str, sorted(stated)))} tokens in one trace",
            where=f"{where}: {name}",
            fix="Divide it into one file for each size.",
        )


def _parse_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[int, str, Any]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            if line.strip():
                yield number, where, parse_json(line, has_nan=True)
        except ValueError as error:
            raise UsageError(
                f"This line is not JSON: {error}",
                where=where,
                fix="Repair or remove the line; write one object per line.",
            ) from error


def _read_object(found: Any, line: int, where: str, stated: set[int]) -> Iterator[_Request]:
    """Yield the requests of one line: one request, a record of Dynamo's, or one of Weka's conversations."""
    if not isinstance(found, dict):
        raise UsageError("This line is not a JSON object", where=where, fix="Write one object per line.")
    event = found["event"] if isinstance(found.get("event"), dict) else found
    if str(event.get("schema", "")).startswith("dynamo."):
        request = event.get("request")
        if not isinstance(request, dict):
            return  # a record of a tool's use
        replay = request.get("replay")
        if not isinstance(replay, dict):
            raise UsageError(
                f"replay is {shorten(replay)}: this record does not say which blocks its request had",
                where=f"{where}: request: replay",
                fix="Record requests with their hashes of blocks.",
            )
        _state_block_tokens(stated, replay, "trace_block_size", where)
        renamed = {
            "timestamp": request.get("request_received_ms", event.get("event_time_unix_ms")),
            "input_length": replay.get("input_length", request.get("input_tokens")),
            "output_length": request.get("output_tokens"),
            "hash_ids": replay.get("input_sequence_hashes"),
        }
        yield _read_request(renamed, line, where)
    elif isinstance(found.get("requests"), list):
        _state_block_tokens(stated, found, "block_size", where)
        yield from _read_turns(found["requests"], line, f"{where}: requests", after_s=0.0)
    else:
        if "block_size" in found:
            _state_block_tokens(stated, found, "block_size", where)
        yield _read_request(found, line, where)


def _read_turns(turns: Sequence[Any], line: int, where: str, *, after_s: float) -> Iterator[_Request]:
    """Yield the requests of one of Weka's conversations; their ids mean nothing in other conversations."""
    for number, turn in enumerate(turns, start=1):
        at = f"{where} {number}"
        if not isinstance(turn, dict):
            raise UsageError("This is not a JSON object", where=at, fix="Give requests as objects.")
        began_s, inner = time_value(turn, ("t",), at), turn.get("requests")
        if isinstance(inner, list):
            # Some producers count a subagent's times from the subagent's beginning, others from the
            # conversation's.
            times_s = [time_value(one, ("t",), at) for one in inner if isinstance(one, dict)]
            is_relative = min(times_s, default=0.0) < began_s
            yield from _read_turns(inner, line, at, after_s=after_s + is_relative * began_s)
        else:
            renamed = {
                "timestamp": 1000 * (began_s + after_s),
                "input_length": turn.get("in"),
                "output_length": turn.get("out"),
                "hash_ids": turn.get("hash_ids"),
            }
            yield _read_request(renamed, line, at, scope=line)


def find_value(request: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these names that the request has."""
    return next((request[name] for name in names if name in request), None)


def whole_number(request: Mapping[str, Any], names: Sequence[str], where: str) -> int:
    """Return the whole number that is given under one of `names`."""
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
    """Return the time that is given under one of `names`."""
    value = find_value(request, names)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        raise UsageError(
            f"{names[0]} is {shorten(value)}, not a time",
            where=f"{where}: {names[0]}",
            fix=f"Give {' or '.join(names)} as a number of at least 0.",
        )
    return float(value)


def shorten(value: object) -> str:
    """Format a value for messages."""
    if value is None:
        return "missing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_COUNTS: Final[tuple[Callable[[Integers, int], Integers], ...]] = (
    lambda inputs, tokens: -(-inputs // tokens),
    lambda inputs, tokens: inputs // tokens,
)
"""Ways to count a request's blocks: all of them, or, in some traces, only the full ones."""


def _infer_block_tokens(inputs: Integers, counts: Integers) -> int:
    """Infer the block size at which each request's tokens fill as many blocks as it lists.

    If no size fits all requests, this is the usual size that fits the most.
    """
    is_whole = counts > 0
    if not is_whole.any():
        return DEFAULT_BLOCK_TOKENS
    least = int((-(-inputs[is_whole] // counts[is_whole])).max())
    shares = []
    for count_blocks in _COUNTS:
        fits = [float(np.mean(counts == count_blocks(inputs, tokens))) for tokens in _USUAL_BLOCK_TOKENS]
        if max(fits) == 1:
            return _USUAL_BLOCK_TOKENS[int(np.argmax(fits))]
        shares.append(fits)
        if least > 0 and (counts == count_blocks(inputs, least)).all():
            return least
    return _USUAL_BLOCK_TOKENS[int(np.argmax(shares[0]))]


def _note_counts(rows: Sequence[_Request], inputs: Integers, counts: Integers, tokens: int) -> list[str]:
    notes = []
    if without_output := [row.line for row in rows if row.outputs is None]:
        notes.append(
            f"{len(without_output):,} of {len(counts):,} requests do not say how long their outputs "
            f"are; they count as 0 tokens: lines {name_some(without_output)}."
        )
    if not any((counts == count_blocks(inputs, tokens)).all() for count_blocks in _COUNTS):
        off = np.flatnonzero(counts != -(-inputs // tokens))
        notes.append(
            f"{len(off):,} of {len(counts):,} requests list a different number of blocks than they take in "
            f"blocks of {tokens}: lines {name_some([rows[index].line for index in off.tolist()])}. "
            "Their blocks count as they are listed."
        )
    return notes


def _note_unchained(ids: Integers, counts: Integers) -> list[str]:
    """Return a note if an id follows different ids, and so cannot stand for everything before it."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[offsets(counts)[:-1][counts > 0]] = -1
    num_unique = int(ids.max(initial=-1)) + 1
    pairs = np.unique(ids * (num_unique + 1) + before + 1)
    several = int((np.bincount(pairs // (num_unique + 1), minlength=1) > 1).sum())
    if not several:
        return []
    text = (
        f"{several:,} of {num_unique:,} ids follow different blocks, so they do not stand for what is "
        "before them. They count as listed; --format bailian tells them apart (its times are in seconds)."
    )
    return [text]


def _number_ids(hash_ids: Sequence[Sequence[Any]]) -> Integers:
    """Number densely ids that already stand for everything before them."""
    flat = list(chain.from_iterable(hash_ids))
    if set(map(type, flat)) <= {int}:
        try:
            return number_densely(np.array(flat, np.int64))
        except OverflowError:
            pass
    # As text, because a file may be made of numbers that all have the same hash.
    names: dict[str, int] = {}
    return np.array([names.setdefault(repr(block), len(names)) for block in flat], np.int64)


def _chain_ids(rows: Sequence[_Request]) -> Integers:
    """Number the ids of single blocks so that each number stands for everything before it in its scope."""
    names: dict[tuple[int, str], int] = {}
    numbered: list[int] = []
    for row in rows:
        prefix = -1 - row.scope
        for block in row.hash_ids:
            prefix = names.setdefault((prefix, repr(block)), len(names))
            numbered.append(prefix)
    return np.array(numbered, np.int64)


FORMATS: Final = ("auto", "mooncake", "bailian", "burstgpt", "sharegpt")
SHAREGPT_CONTEXT: Final = 16_384
SHAREGPT_ANSWER: Final = 2_048
_CHARACTERS_PER_TOKEN: Final = 4
_MOST_BLOCKS: Final = 1 << 24
_BLOCKS_PER_ROW: Final = 32
"""A table has at most `_MOST_BLOCKS`, or this many per row if that is more: a row may claim any number."""
_CSV_COLUMNS: Final = (
    ("timestamp",),
    ("request tokens", "contexttokens"),
    ("response tokens", "generatedtokens"),
)
"""The column names of BurstGPT, then those of Azure's LLM inference traces (ISO 8601 timestamps)."""
_GZIP: Final = b"\x1f\x8b"
_PACKED: Final = {
    b"\x28\xb5\x2f\xfd": "zstd -d",
    b"\xfd7zXZ": "xz -d",
    b"BZh": "bzip2 -d",
    b"PK\x03\x04": "unzip",
    b"PAR1": "duckdb -jsonlines -c \"FROM 'FILE'\"",
}


def read_trace(path: Path, *, kind: str = "auto", block_tokens: int | None = None) -> BlockTrace:
    """Read a trace in any of the formats."""
    stated: set[int] = set()
    notes = []
    try:
        with _open_text(path) as file:
            chosen = _detect_format(path, file.read(4096)) if kind == "auto" else kind
            file.seek(0)
            objects = None if chosen == "burstgpt" else _read_document(file, path)
            keys = objects[0].keys() if objects and isinstance(objects[0], dict) else set()
            has_blocks = "conversations" not in keys and not keys.isdisjoint({"hash_ids", "requests"})
            has_turns = chosen == "sharegpt" and not has_blocks
            file.seek(0)
            found: Iterable[tuple[int, str, Any]] = _parse_lines(file, path)
            if objects is not None:
                kind_of_object = "conversation" if has_turns else "request"
                numbered = enumerate(objects, start=1)
                found = ((number, f"{path}: {kind_of_object} {number}", one) for number, one in numbered)
            units_per_s = 1
            if chosen == "burstgpt":
                block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
                rows = list(_csv_rows(csv.reader(file), str(path), block_tokens))
                notes.append("The format does not say what requests have in common: no block is used again.")
            elif has_turns:
                block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
                rows = list(_conversation_rows(found, block_tokens))
                notes.append(
                    f"Tokens are characters / {_CHARACTERS_PER_TOKEN}; requests have no times: 1 per second."
                )
            else:
                units_per_s = 1 if chosen == "bailian" else 1000
                rows = [
                    row for number, where, one in found for row in _read_object(one, number, where, stated)
                ]
    except UnicodeDecodeError as error:
        raise UsageError(
            f"This is not text: {error.reason} at byte {error.start}", where=str(path), fix="Unpack it first."
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(f"Cannot read this trace: {error}", where=str(path)) from error
    if not rows:
        raise UsageError("This trace has no requests", where=str(path), fix="Give a file with requests.")
    counts = np.array([len(row.hash_ids) for row in rows], np.int64)
    inputs = np.array([row.inputs for row in rows], np.int64)
    if block_tokens is None:
        usual = BAILIAN_BLOCK_TOKENS if chosen == "bailian" else None
        block_tokens = next(iter(stated), None) or usual or _infer_block_tokens(inputs, counts)
    notes += _note_counts(rows, inputs, counts, block_tokens)
    if chosen == "bailian" or any(row.scope for row in rows):
        ids = _chain_ids(rows)
    else:
        ids = _number_ids([row.hash_ids for row in rows])
        notes += _note_unchained(ids, counts)
    times, last = [], dict[object, float]()
    for row in rows:
        # In a session without times, the delay counts from the request before it.
        at = last.get(row.session, 0.0) + row.delay if row.arrival is None else row.arrival
        last[row.session] = at
        times.append(at)
    arrival_s = (np.array(times) - min(times)) / units_per_s
    order = np.argsort(arrival_s, kind="stable")
    if (order[1:] < order[:-1]).any():
        notes.insert(0, "The requests of the file are not in the order of their times, and were sorted.")
        begin = offsets(counts)
        ids = number_densely(np.concatenate([ids[begin[request] : begin[request + 1]] for request in order]))
    return BlockTrace(
        name=path.name,
        block_tokens=block_tokens,
        arrival_s=arrival_s[order],
        input_tokens=inputs[order],
        output_tokens=np.array([row.outputs or 0 for row in rows], np.int64)[order],
        first_block=offsets(counts[order]),
        block_ids=ids,
        notes=tuple(notes),
    )


def _open_text(path: Path) -> TextIO:
    with open_to_read(path) as file:
        beginning, size_bytes = file.read(8), os.fstat(file.fileno()).st_size
    for magic, command in _PACKED.items():
        if beginning.startswith(magic):
            raise UsageError("This trace is packed", where=str(path), fix=f"Unpack it first: {command}.")
    # utf-8-sig, because some programs begin a file with a byte order mark.
    if beginning.startswith(_GZIP):
        # Counted before it is read, because a whole document may be one line.
        most_bytes = max(UNPACKED_BYTES, LARGEST_RATIO * size_bytes)
        with gzip.open(path) as packed:
            if packed.seek(most_bytes + 1) > most_bytes:
                raise UsageError(
                    f"This trace unpacks to over {LARGEST_RATIO} times its size",
                    where=str(path),
                    fix="If you trust it, unpack it first: gzip -d.",
                )
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
        "This file is not a trace in a known format",
        where=str(path),
        fix=f"Give lines of JSON with hash_ids, or name the format: {', '.join(FORMATS[1:])}.",
    )


def _read_document(file: TextIO, path: Path) -> Sequence[Any] | None:
    """Return the objects of a file that is one JSON document; None if each line is a document."""
    first = file.readline()
    try:
        if isinstance(parse_json(first, has_nan=True), dict):
            return None
    except ValueError:
        pass  # the document has several lines
    try:
        document = parse_json(first + file.read(), has_nan=True)
    except ValueError as error:
        if first.lstrip().startswith("["):
            raise UsageError(f"This file is not JSON: {error}", where=str(path)) from error
        return None  # reading line by line finds the line that is wrong
    return document if isinstance(document, list) else [document]


def _csv_rows(reader: Iterator[list[str]], path: str, block_tokens: int) -> Iterator[_Request]:
    """Yield the requests of a table; they share no blocks."""
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
    num_blocks = 0
    for number, row in enumerate(reader, start=2):
        if not row:
            continue
        request: dict[str, Any] = {name: _cell(row, column) for name, column in columns.items()}
        where = f"{path}:{number}"
        arrival, tokens = time_value(request, (time,), where), whole_number(request, (inputs,), where)
        first, num_blocks = num_blocks, num_blocks + -(-tokens // block_tokens)
        if num_blocks > max(_MOST_BLOCKS, _BLOCKS_PER_ROW * number):
            raise UsageError(
                f"With this row of {tokens:,} tokens, there are {num_blocks:,} blocks, which is too many",
                where=where,
                fix="Correct the number, or give larger blocks with --block-tokens.",
            )
        answer = whole_number(request, (outputs,), where)
        yield _Request(arrival, tokens, answer, range(first, num_blocks), number)


def _cell(row: Sequence[str], column: int) -> float | str | None:
    """Parse a number, or a timestamp as seconds since 1970; return any other text unchanged."""
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


def _conversation_rows(found: Iterable[tuple[int, str, Any]], block_tokens: int) -> Iterator[_Request]:
    """Yield the requests of ShareGPT's conversations, one for each response."""
    num_requests = num_blocks = 0
    for number, where, conversation in found:
        first = num_blocks
        for context, answer in _turns(conversation, where):
            tokens = min(context, SHAREGPT_CONTEXT)
            whole, rest = divmod(tokens, block_tokens)
            # Full blocks are shared with the turns before; a block that is not full has different content in
            # each turn.
            num_blocks = max(num_blocks, first + whole)
            ids = [*range(first, first + whole), *([-1 - num_requests] if rest else [])]
            yield _Request(num_requests, tokens, min(answer, SHAREGPT_ANSWER), ids, number)
            num_requests += 1


def _turns(conversation: Any, where: str) -> Iterator[tuple[int, int]]:
    """Yield, for each response, the tokens of all turns before it, and its own tokens."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise UsageError(
            "conversations is not a list",
            where=f"{where}: conversations",
            fix="Give turns with from and value.",
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
