"""Interns the texts and hashes of one trace file, so that the scanner's rows hold numbers instead of texts.

A text has one code for the whole file. A hash is bound to the code of the text that a line of metadata
explains; until then to a code of its own, which the explanation redirects. Invariant: hashes mean something
only within the file that explains them.
"""

from enum import IntEnum
from typing import Any, Final

import numba
import numpy as np

from penstock.trace.reading.native.scalars import copy_bytes, get, load, low_bytes, put, same_bytes


class StateCell(IntEnum):
    """Cells of the state array: addresses (`..._AT`), sizes, and how far the loop came."""

    AT = 0
    LINE = 1
    ROWS = 2
    LINES = 3
    BLANK = 4
    METADATA = 5
    ROWS_AT = 6
    ROWS_ROOM = 7
    ARGS_AT = 8
    ARGS = 9
    ARGS_ROOM = 10
    TEXTS = 11
    SLOTS_AT = 12
    SLOTS = 13
    HASHES_AT = 14
    ENDS_AT = 15
    POOL_AT = 16
    POOL_ROOM = 17
    BOUND = 18
    KEYS_AT = 19
    KEYS = 20
    CODES_AT = 21
    REDIRECTS_AT = 22
    PHASE = 23
    NAME_START = 24
    NAME_END = 25
    VALUE_START = 26
    VALUE_END = 27
    SKIPPED = 28
    NEEDLES_AT = 29
    NEEDLES = 30
    WANTED_AT = 31


_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_ZERO: Final = np.uint64(0)


@numba.njit
def _hash(start: Any, end: Any, salt: Any) -> Any:  # pragma: no cover - compiled
    mixed = np.uint64(salt) * _FACTOR + np.uint64(end - start) + np.uint64(1)
    at = start
    while at < end:
        word = load(at)
        if end - at < 8:
            word &= low_bytes(end - at)
        mixed = (mixed ^ word) * _FACTOR
        mixed ^= mixed >> np.uint64(32)
        at += 8
    mixed *= _FACTOR
    return mixed ^ (mixed >> np.uint64(29))


@numba.njit
def intern(start: Any, end: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """The code of this text: a new one if it was never met."""
    mixed = np.int64(_hash(start, end, np.int64(7)))
    slots, hashes, ends = (
        get(state, StateCell.SLOTS_AT),
        get(state, StateCell.HASHES_AT),
        get(state, StateCell.ENDS_AT),
    )
    last = get(state, StateCell.SLOTS) - 1
    slot = mixed & last
    while True:
        code = get(slots, slot)
        if code < 0:
            break
        if get(hashes, code) == mixed:
            begin = get(ends, code)
            length = get(ends, code + 1) - begin
            if length == end - start and same_bytes(start, end, get(state, StateCell.POOL_AT) + begin):
                return code
        slot = (slot + 1) & last
    code = _new_text(start, end, state)
    put(slots, slot, code)
    put(hashes, code, mixed)
    return code


@numba.njit
def _new_text(start: Any, end: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """A code that no slot leads to: no other text has or will be given it."""
    code, ends, pool = (
        get(state, StateCell.TEXTS),
        get(state, StateCell.ENDS_AT),
        get(state, StateCell.POOL_AT),
    )
    put(get(state, StateCell.HASHES_AT), code, 0)
    put(get(state, StateCell.REDIRECTS_AT), code, code)
    put(get(state, StateCell.WANTED_AT), code, 0)
    put(ends, code + 1, copy_bytes(start, end, pool + get(ends, code)) - pool)
    put(state, StateCell.TEXTS, code + 1)
    return code


@numba.njit
def binding(start: Any, end: Any, kind: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """The slot of a hash, and its key: the slot is empty if the hash was never met."""
    mixed = np.int64(_hash(start, end, kind)) | np.int64(1)
    keys, last = get(state, StateCell.KEYS_AT), get(state, StateCell.KEYS) - 1
    slot = (mixed >> 1) & last
    while True:
        key = get(keys, slot)
        if key in (0, mixed):
            return slot, mixed, key == mixed
        slot = (slot + 1) & last


@numba.njit
def bound(start: Any, end: Any, kind: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """The code of the text that this hash stands for. A hash not yet explained stands for itself."""
    slot, key, is_known = binding(start, end, kind, state)
    if is_known:
        return get(get(state, StateCell.CODES_AT), slot)
    code = _new_text(start, end, state)
    put(get(state, StateCell.REDIRECTS_AT), code, -1 - code)
    put(get(state, StateCell.KEYS_AT), slot, key)
    put(get(state, StateCell.CODES_AT), slot, code)
    put(state, StateCell.BOUND, get(state, StateCell.BOUND) + 1)
    return code


@numba.njit
def bind(start: Any, end: Any, kind: Any, code: Any, state: Any) -> None:  # pragma: no cover - compiled
    """From now on the hash stands for the text `code`; rows that named it too early follow."""
    slot, key, is_known = binding(start, end, kind, state)
    codes, redirects = get(state, StateCell.CODES_AT), get(state, StateCell.REDIRECTS_AT)
    if is_known:
        earlier = get(codes, slot)
        if get(redirects, earlier) < 0:
            put(redirects, earlier, code)
    else:
        put(get(state, StateCell.KEYS_AT), slot, key)
        put(state, StateCell.BOUND, get(state, StateCell.BOUND) + 1)
    put(codes, slot, code)
