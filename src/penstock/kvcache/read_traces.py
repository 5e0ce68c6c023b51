"""Readers of request traces: block hashes (Mooncake, AIPerf, Bailian, Dynamo, Weka), CSV and ShareGPT.

Files may be gzipped. Every value is checked; an error names the file, the line, the field and the fix. Block
numbers of the formats become those of `BlockTrace`, which stand for a block with everything before it.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO, cast

import numpy as np

from penstock.errors import UsageError
from penstock.kvcache.block_lines import (
    DEFAULT_BLOCK_TOKENS,
    Columns,
    order_requests,
    read_block_lines,
    read_block_objects,
    shorten,
    time_value,
    whole_number,
)
from penstock.kvcache.block_trace import BlockTrace, number_densely

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
    """Whether a list has requests with blocks, and no conversations."""
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
