"""Rows of numbers become batches of events: times in microseconds, texts for codes, sizes of transfers.

Place in the flow: behind the loop, and behind every reader that makes rows in Python. Invariant: a batch has
the columns of `event.SCHEMA` in their order; texts are dictionaries here, because most repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from penstock.trace.event import COLUMNS
from penstock.trace.operation import canonical
from penstock.trace.reading.book import ABSENT, UNEXPLAINED, Book, Numbers
from penstock.trace.reading.scan import MISSING, Cell

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TEXT: Final = pa.dictionary(pa.int32(), pa.string())
_DICTIONARIES: Final = ("op", "name", "cat", "host", "path", "run", "file")
BATCH_SCHEMA: Final = pa.schema(
    [
        pa.field(each.name, _TEXT if each.name in _DICTIONARIES else each.type, each.may_be_missing)
        for each in COLUMNS
    ]
)

_BYTE_LAYERS: Final = ("POSIX", "OBJECT")
"""Categories whose reads and writes return bytes: calls for files, requests to object services."""
_MOVERS: Final = frozenset(
    [
        "read",
        "pread",
        "readv",
        "preadv",
        "write",
        "pwrite",
        "writev",
        "pwritev",
        "sendfile",
        "copy_file_range",
        "splice",
        "recv",
        "send",
    ]
)
_ITEM_MOVERS: Final = frozenset(("fread", "fwrite"))


@dataclass(frozen=True, slots=True)
class Origin:
    """What all events of a file have in common."""

    run: str
    file: str
    rank: int | None = None


@dataclass(slots=True)
class Clock:
    """The unit of a file's times, and the ranks its processes were told to be."""

    ns_per_tick: int = 1000
    ranks: dict[int, int] | None = None


def take_batch(book: Book, origin: Origin, clock: Clock) -> tuple[pa.RecordBatch, int]:
    """The book's rows as a batch, and how many of them name a file or host that nothing explains."""
    num_rows = book.num_rows
    rows = book.rows[:, :num_rows]
    ts_us, dur_us = _microseconds(rows[Cell.TS], rows[Cell.DUR], clock.ns_per_tick)
    name, names = _texts(book, rows[Cell.NAME])
    cat, cats = _texts(book, rows[Cell.CAT])
    path, _ = _texts(book, rows[Cell.PATH])
    host, _ = _texts(book, rows[Cell.HOST])
    columns = {
        "ts_us": pa.array(ts_us),
        "dur_us": pa.array(dur_us),
        "end_us": pa.array(ts_us + dur_us),
        "op": _operations(name, names),
        "name": name,
        "cat": cat,
        "pid": pa.array(rows[Cell.PID].copy()),
        "tid": pa.array(rows[Cell.TID].copy()),
        "rank": _ranks(rows[Cell.PID], origin, clock),
        "host": host,
        "path": path,
        "size_bytes": _optional(_sizes(rows, _indices(name), names, _indices(cat), cats)),
        "offset": _optional(rows[Cell.OFFSET]),
        "ret": _optional(rows[Cell.RET]),
        "epoch": _optional(rows[Cell.EPOCH]).cast(pa.int32()),
        "step": _optional(rows[Cell.STEP]).cast(pa.int32()),
        "args": _arguments(book, num_rows),
        "run": _constant(origin.run, num_rows),
        "file": _constant(origin.file, num_rows),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=BATCH_SCHEMA)
    num_unexplained = _num_unexplained(book, rows)
    book.clear_rows()
    return batch, num_unexplained


def batch_of(rows: Sequence[Mapping[str, Any]], origin: Origin, clock: Clock) -> pa.RecordBatch:
    """Events that Python read, as a batch. Each row has at least what `SCHEMA` demands."""
    ranks = clock.ranks or {}
    for_all: dict[str, Any] = {"run": origin.run, "file": origin.file}
    full = [
        {
            **dict.fromkeys(BATCH_SCHEMA.names),
            "rank": ranks.get(row["pid"], origin.rank),
            **row,
            **for_all,
            "end_us": row["ts_us"] + row["dur_us"],
            "op": row.get("op") or canonical(row["name"]),
        }
        for row in rows
    ]
    arrays = [pa.array([row[field.name] for row in full], field.type) for field in BATCH_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=BATCH_SCHEMA)


def size_of(name: str, cat: str, arguments: Mapping[str, Any]) -> int | None:
    """The bytes that an event moved: the same rule as for rows of numbers, for one event."""
    ret, op = whole(arguments.get("ret")), canonical(name)
    if cat in _BYTE_LAYERS and op in _MOVERS and ret is not None:
        return ret if ret >= 0 else None
    unit = whole(arguments.get("size"))
    if cat == "STDIO" and op in _ITEM_MOVERS and ret is not None and unit is not None:
        return ret * unit if ret >= 0 else None
    return whole(arguments.get("image_size"))


def whole(value: Any) -> int | None:
    """A whole number of 64 bits, quoted or not; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if -(1 << 63) < number < 1 << 63 else None


def _microseconds(ts: Numbers, dur: Numbers, ns_per_tick: int) -> tuple[Numbers, Numbers]:
    """Beginnings are cut to the microsecond, durations rounded, so that sums of many stay true."""
    if ns_per_tick >= 1000:
        return ts * (ns_per_tick // 1000), dur * (ns_per_tick // 1000)
    ticks = 1000 // ns_per_tick
    return ts // ticks, (dur + ticks // 2) // ticks


def _texts(book: Book, codes: Numbers) -> tuple[pa.DictionaryArray, list[str]]:
    """A column of texts, and its dictionary."""
    codes = book.redirected(codes)
    used, indices = _compact(codes)
    known = book.texts(np.where(used < 0, -1 - used, used))
    texts = [
        UNEXPLAINED + text if code < 0 else text for code, text in zip(used, known.to_pylist(), strict=True)
    ]
    mask = codes == ABSENT
    array = pa.DictionaryArray.from_arrays(
        pa.array(indices.astype(np.int32), mask=mask if mask.any() else None),
        pa.array(texts, pa.string()),
    )
    return array, texts


def _compact(codes: Numbers) -> tuple[Numbers, Numbers]:
    """The codes that occur, and where among them each is; what is absent points at the first."""
    present = codes[codes != ABSENT]
    if present.size == 0:
        return np.zeros(0, np.int64), np.zeros(codes.size, np.int64)
    low = int(present.min())
    table = np.zeros(int(present.max()) - low + 1, np.int64)
    table[present - low] = 1
    used = np.flatnonzero(table)
    table[used] = np.arange(used.size)
    return used + low, table[np.where(codes == ABSENT, used[0], codes - low)]


def _indices(texts: pa.DictionaryArray) -> NDArray[np.int32]:
    indices: NDArray[np.int32] = texts.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return indices


def _operations(name: pa.DictionaryArray, names: Sequence[str]) -> pa.DictionaryArray:
    ops = [canonical(each) for each in names]
    numbers = {op: number for number, op in enumerate(dict.fromkeys(ops))}
    table = np.array([numbers[op] for op in ops], np.int32)
    return pa.DictionaryArray.from_arrays(
        pa.array(table[_indices(name)]), pa.array(list(numbers), pa.string())
    )


def _sizes(
    rows: Numbers, name: NDArray[np.int32], names: Sequence[str], cat: NDArray[np.int32], cats: Sequence[str]
) -> Numbers:
    """Bytes moved: what a call returned, times an item's size if it counts items; or an image's size."""
    ops = [canonical(each) for each in names]
    moves = (
        np.array([op in _MOVERS for op in ops])[name] & np.array([each in _BYTE_LAYERS for each in cats])[cat]
    )
    items = (
        np.array([op in _ITEM_MOVERS for op in ops])[name] & np.array([each == "STDIO" for each in cats])[cat]
    )
    ret, unit = rows[Cell.RET], rows[Cell.UNIT]
    items &= (ret != MISSING) & (unit != MISSING)
    moves &= ret != MISSING
    sizes = np.where(moves, np.where(ret >= 0, ret, MISSING), rows[Cell.IMAGE])
    if items.any():
        sizes = np.where(items, np.where(ret >= 0, ret * unit, MISSING), sizes)
    return sizes


def _ranks(pids: Numbers, origin: Origin, clock: Clock) -> pa.Array:
    if not clock.ranks:
        return (
            pa.array(np.full(pids.size, origin.rank), pa.int32())
            if origin.rank is not None
            else pa.nulls(pids.size, pa.int32())
        )
    distinct, inverse = np.unique(pids, return_inverse=True)
    return pa.array([clock.ranks.get(int(pid), origin.rank) for pid in distinct], pa.int32()).take(
        pa.array(inverse)
    )


def _optional(numbers: Numbers) -> pa.Array:
    mask = numbers == MISSING
    return pa.nulls(numbers.size, pa.int64()) if mask.all() else pa.array(numbers, mask=mask)


def _arguments(book: Book, num_rows: int) -> pa.Array:
    ends = np.zeros(num_rows + 1, np.int32)
    ends[1:] = book.rows[Cell.ARGS_END, :num_rows]
    texts = book.args[: ends[-1]].copy()
    return pa.Array.from_buffers(pa.string(), num_rows, [None, pa.py_buffer(ends), pa.py_buffer(texts)])


def _constant(text: str, num_rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(num_rows, np.int32)), pa.array([text], pa.string())
    )


def _num_unexplained(book: Book, rows: Numbers) -> int:
    path, host = book.redirected(rows[Cell.PATH]), book.redirected(rows[Cell.HOST])
    return int(np.count_nonzero(((path < 0) & (path != ABSENT)) | ((host < 0) & (host != ABSENT))))
