"""The memory that the loop of `scan.py` works on, for one file: rows, arguments, texts, hashes.

Invariant: every address in the state belongs to an array that this object holds, and growing an array sets
its address before the loop runs again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.trace.reading.needles import NO_NEEDLES, Needles
from penstock.trace.reading.scan import (
    LINE_ROOM,
    SLACK,
    TEXT_LIMIT,
    Cell,
    Role,
    load_note,
    load_scan,
    load_scan_wanted,
)
from penstock.trace.reading.texts import KIND_NAMES, Kind, State

ROWS: Final = 1 << 16
"""Rows that are gathered before they become a batch of events."""

UNEXPLAINED: Final = "hash:"
"""How a path or host begins whose hash its file never explains."""
ABSENT: Final = -(1 << 62)
"""The code of a text that a row doesn't have."""

_ARGS_BYTES: Final = 4 << 20
_FIRST_TEXTS: Final = 1 << 12
_FIRST_POOL_BYTES: Final = 1 << 20

Numbers = NDArray[np.int64]


class Book:
    """What is known of one file while it is read."""

    def __init__(self, needles: Needles = NO_NEEDLES) -> None:
        self.state: Numbers = np.zeros(len(State), np.int64)
        self.rows: Numbers = np.empty((len(Cell), ROWS), np.int64)
        self.args = np.empty(_ARGS_BYTES, np.uint8)
        self._slots: Numbers = np.full(2 * _FIRST_TEXTS, -1, np.int64)
        self._hashes: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._ends: Numbers = np.zeros(_FIRST_TEXTS + 1, np.int64)
        self._pool = np.empty(_FIRST_POOL_BYTES, np.uint8)
        self._keys: Numbers = np.zeros(2 * _FIRST_TEXTS, np.int64)
        self._codes: Numbers = np.zeros(2 * _FIRST_TEXTS, np.int64)
        self._redirects: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._wanted: Numbers = np.zeros(_FIRST_TEXTS, np.int64)
        self._needle_bytes, self._needles = _needle_cells(needles)
        self._loop = load_scan()
        self._search = load_scan_wanted() if needles.is_asked else self._loop
        self._set_addresses()
        self._name_kinds()

    def _set_addresses(self) -> None:
        state = self.state
        state[State.ROWS_AT], state[State.ROWS_ROOM] = self.rows.ctypes.data, self.rows.shape[1]
        state[State.ARGS_AT], state[State.ARGS_ROOM] = self.args.ctypes.data, self.args.size
        state[State.SLOTS_AT], state[State.SLOTS] = self._slots.ctypes.data, self._slots.size
        state[State.POOL_AT], state[State.POOL_ROOM] = self._pool.ctypes.data, self._pool.size
        state[State.KEYS_AT], state[State.KEYS] = self._keys.ctypes.data, self._keys.size
        state[State.HASHES_AT], state[State.ENDS_AT] = self._hashes.ctypes.data, self._ends.ctypes.data
        state[State.NEEDLES_AT], state[State.NEEDLES] = self._needles.ctypes.data, len(self._needles)
        state[State.WANTED_AT] = self._wanted.ctypes.data
        state[State.CODES_AT], state[State.REDIRECTS_AT] = (
            self._codes.ctypes.data,
            self._redirects.ctypes.data,
        )

    def _name_kinds(self) -> None:
        for kind, name in zip(Kind, KIND_NAMES, strict=True):
            code = self.code_of(name)
            assert code == kind

    def run(self, address: int, stop: int) -> int:
        """Let the loop take lines from `address` up to `stop`; it says why it came back."""
        self.state[State.AT] = address
        return self._loop(self.state.ctypes.data, stop)

    def search(self, address: int, stop: int) -> int:
        """The same for lines that have the needles, where there are any."""
        self.state[State.AT] = address
        return self._search(self.state.ctypes.data, stop)

    @property
    def num_rows(self) -> int:
        """Rows gathered since they were cleared."""
        return int(self.state[State.ROWS])

    def clear_rows(self) -> None:
        """Begin a new batch; texts and hashes stay."""
        self.state[State.ROWS] = self.state[State.ARGS] = 0

    def make_room(self) -> None:
        """Grow whichever store of texts or hashes is short; rows are cleared by their reader."""
        state = self.state
        num_texts, num_bound = int(state[State.TEXTS]), int(state[State.BOUND])
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

    def code_of(self, text: bytes) -> int:
        """The code of a text, for lines that Python reads."""
        return self._note(text[:TEXT_LIMIT].decode(errors="ignore").encode(), -1, -1)

    def bind(self, kind: Kind, value: bytes, code: int) -> None:
        """A line of metadata explains a hash."""
        self._note(value[:TEXT_LIMIT], kind, code)

    def bound(self, kind: Kind, value: bytes) -> str:
        """The text that a hash stands for, as far as the file has explained it."""
        code = self._note(value[:TEXT_LIMIT], kind, -1)
        redirect = int(self._redirects[code])
        return UNEXPLAINED + self.text(code) if redirect < 0 else self.text(redirect)

    def _note(self, text: bytes, kind: int, code: int) -> int:
        self.make_room()
        held = np.frombuffer(text + bytes(SLACK), np.uint8)
        start = held.ctypes.data
        return load_note()(start, start + len(text), kind, code, self.state.ctypes.data)

    def text(self, code: int) -> str:
        """The text of a code."""
        return self._pool[self._ends[code] : self._ends[code + 1]].tobytes().decode()

    def texts(self, codes: Numbers) -> pa.Array:
        """The texts of many codes."""
        num_texts = int(self.state[State.TEXTS])
        pool = pa.py_buffer(self._pool[: self._ends[num_texts]])
        ends = pa.py_buffer(self._ends[: num_texts + 1])
        everything = pa.Array.from_buffers(pa.large_string(), num_texts, [None, ends, pool])
        return everything.take(pa.array(codes)).cast(pa.string())

    def redirected(self, codes: Numbers) -> Numbers:
        """Codes of texts, where hashes were explained later; `-1 - code` for what was not; -1 stays."""
        return np.where(codes < 0, np.int64(ABSENT), self._redirects[codes])


def _needle_cells(needles: Needles) -> tuple[list[NDArray[np.uint8]], Numbers]:
    """The needles where the loop finds them, and the bytes that must be kept for that."""
    roles = [(b'"fhash":', Role.HASH_KEY), (b'"dftracer"', Role.EXPLAINING)]
    roles += [(needle, Role.NAMING) for needle in needles.naming]
    roles += [(needle, Role.PLACING) for needle in needles.placing]
    held = [np.frombuffer(needle, np.uint8) for needle, _ in roles]
    cells = [(one.ctypes.data, one.size, int(role), 0) for one, (_, role) in zip(held, roles, strict=True)]
    return held, np.array(cells, np.int64)


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
