"""The native scanner of one trace file: the memory that the compiled loop works on, and its rows as batches.

Invariant: every address in the state belongs to an array that this object holds, and growing an array sets
its address before the loop runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.trace.event_schema import FileAccount, canonical
from penstock.trace.reading.chunks import SLACK, Chunk
from penstock.trace.reading.event_batch import (
    BATCH_SCHEMA,
    BYTE_LAYERS,
    BYTE_MOVERS,
    ITEM_MOVERS,
    UNEXPLAINED,
    EventOrigin,
    FileContext,
)
from penstock.trace.reading.lenient_json import HASH_KIND_NAMES, HashKind
from penstock.trace.reading.native.interner import StateCell
from penstock.trace.reading.native.native_scan import (
    LINE_ROOM,
    MISSING,
    TEXT_LIMIT,
    PatternRole,
    RowCell,
    StopReason,
    load_note,
    load_scan,
    load_scan_wanted,
)

if TYPE_CHECKING:
    from penstock.trace.reading.event_filter import Prefilter

ROWS: Final = 1 << 16
"""Rows that are gathered before they become a batch of events."""
ABSENT: Final = -(1 << 62)
"""The code of a text that a row doesn't have."""

_ARGS_BYTES: Final = 4 << 20
_FIRST_TEXTS: Final = 1 << 12
_FIRST_POOL_BYTES: Final = 1 << 20

Numbers = NDArray[np.int64]


class ScanState:
    """Scans the chunks of one file, in order; the `LineScanner` of large inputs."""

    def __init__(self, prefilter: Prefilter) -> None:
        self._state: Numbers = np.zeros(len(StateCell), np.int64)
        self._rows: Numbers = np.empty((len(RowCell), ROWS), np.int64)
        self._args = np.empty(_ARGS_BYTES, np.uint8)
        self._slots: Numbers = np.full(2 * _FIRST_TEXTS, -1, np.int64)
        self._hashes: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._ends: Numbers = np.zeros(_FIRST_TEXTS + 1, np.int64)
        self._pool = np.empty(_FIRST_POOL_BYTES, np.uint8)
        self._keys: Numbers = np.zeros(2 * _FIRST_TEXTS, np.int64)
        self._codes: Numbers = np.zeros(2 * _FIRST_TEXTS, np.int64)
        self._redirects: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._wanted: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._pattern_bytes, self._patterns = _pattern_cells(prefilter)
        self._scan_all = load_scan()
        self._scan_wanted = load_scan_wanted() if prefilter.is_active else self._scan_all
        self._loop = self._scan_all
        self._content = np.zeros(0, np.uint8)
        self._base = self._stop = 0
        self._set_addresses()
        self._name_kinds()

    def _set_addresses(self) -> None:
        state = self._state
        state[StateCell.ROWS_AT], state[StateCell.ROWS_ROOM] = self._rows.ctypes.data, self._rows.shape[1]
        state[StateCell.ARGS_AT], state[StateCell.ARGS_ROOM] = self._args.ctypes.data, self._args.size
        state[StateCell.SLOTS_AT], state[StateCell.SLOTS] = self._slots.ctypes.data, self._slots.size
        state[StateCell.POOL_AT], state[StateCell.POOL_ROOM] = self._pool.ctypes.data, self._pool.size
        state[StateCell.KEYS_AT], state[StateCell.KEYS] = self._keys.ctypes.data, self._keys.size
        state[StateCell.HASHES_AT], state[StateCell.ENDS_AT] = (
            self._hashes.ctypes.data,
            self._ends.ctypes.data,
        )
        state[StateCell.NEEDLES_AT], state[StateCell.NEEDLES] = (
            self._patterns.ctypes.data,
            len(self._patterns),
        )
        state[StateCell.WANTED_AT] = self._wanted.ctypes.data
        state[StateCell.CODES_AT], state[StateCell.REDIRECTS_AT] = (
            self._codes.ctypes.data,
            self._redirects.ctypes.data,
        )

    def _name_kinds(self) -> None:
        for kind, name in zip(HashKind, HASH_KIND_NAMES, strict=True):
            code = self._intern(name)
            assert code == kind

    def open_chunk(self, chunk: Chunk) -> None:
        """Continue with another chunk."""
        self._content = np.frombuffer(chunk.content, np.uint8)
        self._base = self._content.ctypes.data
        self._stop = self._base + chunk.stop
        self._loop = self._scan_all if chunk.has_escapes() else self._scan_wanted

    def scan(self, position: int) -> tuple[int, bool]:
        """Take lines from `position` on; where it stopped, and whether rows must be taken to make room.

        It stops at the chunk's end, or at a line that the loop does not understand.
        """
        self._state[StateCell.AT] = self._base + position
        reason = self._loop(self._state.ctypes.data, self._stop)
        return int(self._state[StateCell.AT]) - self._base, reason == StopReason.FULL

    def take_counts(self, account: FileAccount) -> None:
        """Add what the loop has counted to the account."""
        cells = [StateCell.LINES, StateCell.BLANK, StateCell.METADATA, StateCell.SKIPPED]
        lines, blank, metadata, skipped = (int(self._state[cell]) for cell in cells)
        account.lines += lines
        account.blank += blank
        account.metadata += metadata
        account.skipped += skipped
        account.events += lines - blank - metadata - skipped
        self._state[cells] = 0

    def lookup(self, kind: HashKind, value: bytes) -> str | None:
        """The text of a hash; None before a line explains it."""
        redirect = int(self._redirects[self._note(value[:TEXT_LIMIT], kind, -1)])
        return None if redirect < 0 else self._text(redirect)

    def bind(self, kind: HashKind, value: bytes, text: bytes) -> None:
        """Set the text of a hash, from the line of metadata that explains it."""
        self._note(value[:TEXT_LIMIT], kind, self._intern(text))

    def _intern(self, text: bytes) -> int:
        # A text may be cut inside of a character, which Arrow would refuse.
        return self._note(text[:TEXT_LIMIT].decode(errors="ignore").encode(), -1, -1)

    def take_batch(self, origin: EventOrigin, context: FileContext) -> tuple[pa.RecordBatch | None, int]:
        """The gathered rows as a batch, and how many of them name a file or host that nothing explains."""
        num_rows = int(self._state[StateCell.ROWS])
        if not num_rows:
            return None, 0
        batch = self._build_batch(self._rows[:, :num_rows], origin, context)
        num_unexplained = self._count_unexplained(self._rows[:, :num_rows])
        self._state[StateCell.ROWS] = self._state[StateCell.ARGS] = 0
        return batch, num_unexplained

    def make_room(self) -> None:
        """Grow whichever store of texts or hashes is short. Rows must have been taken."""
        state = self._state
        num_texts, num_bound = int(state[StateCell.TEXTS]), int(state[StateCell.BOUND])
        if 2 * (num_texts + 8) > self._slots.size:
            self._hashes, self._redirects = _doubled(self._hashes), _doubled(self._redirects)
            self._wanted = _doubled(self._wanted)
            self._ends = np.concatenate([self._ends, np.zeros(self._ends.size - 1, np.int64)])
            self._slots = _filled(self._hashes[:num_texts], num_texts, 2 * self._slots.size)
        if self._ends[num_texts] + LINE_ROOM > self._pool.size:
            self._pool = np.concatenate([self._pool, np.empty_like(self._pool)])
        if 2 * (num_bound + 4) > self._keys.size:
            self._keys, self._codes = _rehashed(self._keys, self._codes)
        self._set_addresses()

    def _note(self, text: bytes, kind: int, code: int) -> int:
        self.make_room()
        padded = np.frombuffer(text + bytes(SLACK), np.uint8)
        start = padded.ctypes.data
        return load_note()(start, start + len(text), kind, code, self._state.ctypes.data)

    def _text(self, code: int) -> str:
        return self._pool[self._ends[code] : self._ends[code + 1]].tobytes().decode()

    def _texts(self, codes: Numbers) -> pa.Array:
        num_texts = int(self._state[StateCell.TEXTS])
        pool = pa.py_buffer(self._pool[: self._ends[num_texts]])
        ends = pa.py_buffer(self._ends[: num_texts + 1])
        texts = pa.Array.from_buffers(pa.large_string(), num_texts, [None, ends, pool])
        return texts.take(pa.array(codes)).cast(pa.string())

    def _redirect(self, codes: Numbers) -> Numbers:
        """Codes of texts, also where hashes were explained later; `-1 - code` for what was not."""
        return np.where(codes < 0, np.int64(ABSENT), self._redirects[codes])

    def _count_unexplained(self, rows: Numbers) -> int:
        path, host = self._redirect(rows[RowCell.PATH]), self._redirect(rows[RowCell.HOST])
        return int(np.count_nonzero(((path < 0) & (path != ABSENT)) | ((host < 0) & (host != ABSENT))))

    def _build_batch(self, rows: Numbers, origin: EventOrigin, context: FileContext) -> pa.RecordBatch:
        num_rows = rows.shape[1]
        ts_us, dur_us = _microseconds(rows[RowCell.TS], rows[RowCell.DUR], context.ns_per_tick)
        name, names = self._encode_texts(rows[RowCell.NAME])
        cat, cats = self._encode_texts(rows[RowCell.CAT])
        path, _ = self._encode_texts(rows[RowCell.PATH])
        host, _ = self._encode_texts(rows[RowCell.HOST])
        columns = {
            "ts_us": pa.array(ts_us),
            "dur_us": pa.array(dur_us),
            "end_us": pa.array(ts_us + dur_us),
            "op": _operations(name, names),
            "name": name,
            "cat": cat,
            "pid": pa.array(rows[RowCell.PID].copy()),
            "tid": pa.array(rows[RowCell.TID].copy()),
            "rank": _find_ranks(rows[RowCell.PID], origin, context),
            "host": host,
            "path": path,
            "size_bytes": _optional(_transfer_sizes(rows, _indices(name), names, _indices(cat), cats)),
            "offset": _optional(rows[RowCell.OFFSET]),
            "ret": _optional(rows[RowCell.RET]),
            "epoch": _optional(rows[RowCell.EPOCH]).cast(pa.int32()),
            "step": _optional(rows[RowCell.STEP]).cast(pa.int32()),
            "args": self._arguments(num_rows),
            "run": _constant(origin.run, num_rows),
            "file": _constant(origin.file, num_rows),
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=BATCH_SCHEMA)

    def _encode_texts(self, codes: Numbers) -> tuple[pa.DictionaryArray, list[str]]:
        """A column of texts, and its dictionary."""
        codes = self._redirect(codes)
        used, indices = _compact(codes)
        known = self._texts(np.where(used < 0, -1 - used, used)).to_pylist()
        texts = [UNEXPLAINED + text if code < 0 else text for code, text in zip(used, known, strict=True)]
        mask = codes == ABSENT
        array = pa.DictionaryArray.from_arrays(
            pa.array(indices.astype(np.int32), mask=mask if mask.any() else None),
            pa.array(texts, pa.string()),
        )
        return array, texts

    def _arguments(self, num_rows: int) -> pa.Array:
        ends = np.zeros(num_rows + 1, np.int32)
        ends[1:] = self._rows[RowCell.ARGS_END, :num_rows]
        texts = self._args[: ends[-1]].copy()
        return pa.Array.from_buffers(pa.string(), num_rows, [None, pa.py_buffer(ends), pa.py_buffer(texts)])


def _pattern_cells(prefilter: Prefilter) -> tuple[list[NDArray[np.uint8]], Numbers]:
    """The patterns where the loop finds them, and the bytes that must stay alive for that."""
    roles = [(b'"fhash":', PatternRole.HASH_KEY), (b'"dftracer"', PatternRole.EXPLAINING)]
    roles += [(pattern, PatternRole.NAMING) for pattern in prefilter.name_patterns]
    roles += [(pattern, PatternRole.PLACING) for pattern in prefilter.path_patterns]
    contents = [np.frombuffer(pattern, np.uint8) for pattern, _ in roles]
    cells = [
        (one.ctypes.data, one.size, int(role), 0) for one, (_, role) in zip(contents, roles, strict=True)
    ]
    return contents, np.array(cells, np.int64)


def _doubled(numbers: Numbers) -> Numbers:
    return np.concatenate([numbers, np.zeros_like(numbers)])


def _filled(hashes: Numbers, num_texts: int, size: int) -> Numbers:
    """Slots of a larger table of texts; a text without a hash has none."""
    slots: Numbers = np.full(size, -1, np.int64)
    for code in range(num_texts):
        if hashes[code]:
            slot = int(hashes[code]) & (size - 1)
            while slots[slot] >= 0:
                slot = (slot + 1) & (size - 1)
            slots[slot] = code
    return slots


def _rehashed(keys: Numbers, codes: Numbers) -> tuple[Numbers, Numbers]:
    """The same bindings in a table of twice the size."""
    larger_keys: Numbers = np.zeros(2 * keys.size, np.int64)
    larger_codes: Numbers = np.zeros(2 * keys.size, np.int64)
    for old in np.flatnonzero(keys):
        slot = (int(keys[old]) >> 1) & (larger_keys.size - 1)
        while larger_keys[slot]:
            slot = (slot + 1) & (larger_keys.size - 1)
        larger_keys[slot], larger_codes[slot] = keys[old], codes[old]
    return larger_keys, larger_codes


def _microseconds(ts: Numbers, dur: Numbers, ns_per_tick: int) -> tuple[Numbers, Numbers]:
    """Beginnings are cut to the microsecond, durations rounded, so that sums of many stay true."""
    if ns_per_tick >= 1000:
        return ts * (ns_per_tick // 1000), dur * (ns_per_tick // 1000)
    ticks = 1000 // ns_per_tick
    return ts // ticks, (dur + ticks // 2) // ticks


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


def _transfer_sizes(
    rows: Numbers, name: NDArray[np.int32], names: Sequence[str], cat: NDArray[np.int32], cats: Sequence[str]
) -> Numbers:
    """Bytes moved: what a call returned, times an item's size if it counts items; or an image's size."""
    ops = [canonical(each) for each in names]
    moves = (
        np.array([op in BYTE_MOVERS for op in ops])[name]
        & np.array([each in BYTE_LAYERS for each in cats])[cat]
    )
    items = (
        np.array([op in ITEM_MOVERS for op in ops])[name] & np.array([each == "STDIO" for each in cats])[cat]
    )
    ret, unit = rows[RowCell.RET], rows[RowCell.UNIT]
    items &= (ret != MISSING) & (unit != MISSING)
    moves &= ret != MISSING
    sizes = np.where(moves, np.where(ret >= 0, ret, MISSING), rows[RowCell.IMAGE])
    if items.any():
        sizes = np.where(items, np.where(ret >= 0, ret * unit, MISSING), sizes)
    return sizes


def _find_ranks(pids: Numbers, origin: EventOrigin, context: FileContext) -> pa.Array:
    if not context.ranks:
        return (
            pa.array(np.full(pids.size, origin.rank), pa.int32())
            if origin.rank is not None
            else pa.nulls(pids.size, pa.int32())
        )
    distinct, inverse = np.unique(pids, return_inverse=True)
    return pa.array([context.ranks.get(int(pid), origin.rank) for pid in distinct], pa.int32()).take(
        pa.array(inverse)
    )


def _optional(numbers: Numbers) -> pa.Array:
    mask = numbers == MISSING
    return pa.nulls(numbers.size, pa.int64()) if mask.all() else pa.array(numbers, mask=mask)


def _constant(text: str, num_rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(num_rows, np.int32)), pa.array([text], pa.string())
    )
