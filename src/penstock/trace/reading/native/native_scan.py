"""The loop over the bytes of a chunk, as machine code: whole lines of JSON become rows of numbers.

`scan_state.py` holds the memory it works on and is its only caller. It takes what trace writers write when
nothing went wrong, and hands every other line back (`StopReason.ODD`) for Python to parse: a line is either
understood to the last byte or not touched. Invariant: no load or store passes the arrays by more than `SLACK`
bytes, which callers leave.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numba
import numpy as np

from penstock.compiling import compile_loop, is_cached
from penstock.trace.reading.chunks import SLACK
from penstock.trace.reading.lenient_json import HashKind
from penstock.trace.reading.native import interner, scalars
from penstock.trace.reading.native.interner import StateCell, bind, binding, bound, intern
from penstock.trace.reading.native.scalars import (
    blanks,
    byte,
    copy_bytes,
    find,
    find_newline,
    get,
    integer,
    line_end,
    load,
    low_bytes,
    put,
    read_key,
    store,
    string_end,
    value_end,
    word_of,
)

TEXT_LIMIT: Final = 1 << 14
"""Longest name or path that the loop takes; longer ones are odd."""
LINE_ROOM: Final = 4 * TEXT_LIMIT + SLACK
"""Bytes that every pool must have free when a line begins."""
MISSING: Final = -(1 << 63)
"""A number that the line doesn't tell."""
_NEEDLE_CELLS: Final = 4


class StopReason(IntEnum):
    """Why the loop came back."""

    END = 0
    ODD = 1
    FULL = 2


class PatternRole(IntEnum):
    """What a needle is searched for. Each is four cells: address, length, role, where it was met last."""

    HASH_KEY = 0
    EXPLAINING = 1
    NAMING = 2
    PLACING = 3


class RowCell(IntEnum):
    """Rows of the matrix of numbers: one column of the events each."""

    TS = 0
    DUR = 1
    PID = 2
    TID = 3
    RET = 4
    OFFSET = 5
    EPOCH = 6
    STEP = 7
    UNIT = 8
    IMAGE = 9
    NAME = 10
    CAT = 11
    PATH = 12
    HOST = 13
    ARGS_END = 14


_TOP_NAME, _TOP_CAT, _TOP_PID, _TOP_TID = word_of(b"name"), word_of(b"cat"), word_of(b"pid"), word_of(b"tid")
_TOP_TS, _TOP_DUR, _TOP_PH, _TOP_ARGS = word_of(b"ts"), word_of(b"dur"), word_of(b"ph"), word_of(b"args")
_TOP_ID, _TOP_TYPE = word_of(b"id"), word_of(b"type")
_FHASH, _HHASH, _FNAME, _HOSTNAME = (
    word_of(b"fhash"),
    word_of(b"hhash"),
    word_of(b"fname"),
    word_of(b"hostname"),
)
_RET, _OFFSET, _EPOCH, _STEP = word_of(b"ret"), word_of(b"offset"), word_of(b"epoch"), word_of(b"step")
_SIZE, _NAME, _VALUE = word_of(b"size"), word_of(b"name"), word_of(b"value")
_IMAGE_SIZE, _NEWPATH_HASH = word_of(b"image_si"), word_of(b"newpath_")

_COMPLETE, _METADATA = np.int64(1), np.int64(4)
_BRACE, _COMMA, _CLOSING, _EMPTY = word_of(b"{"), word_of(b","), word_of(b"}"), word_of(b"{}")
_COMPLETE_WORD, _METADATA_WORD = word_of(b'"X"'), word_of(b'"M"')

# No tracer of lines sees compiled bodies run; tests hold them against the json module.


@numba.njit
def _top_cell(key: Any) -> Any:  # pragma: no cover - compiled
    if key == _TOP_TS:
        return np.int64(RowCell.TS)
    if key == _TOP_DUR:
        return np.int64(RowCell.DUR)
    if key == _TOP_PID:
        return np.int64(RowCell.PID)
    if key == _TOP_TID:
        return np.int64(RowCell.TID)
    return np.int64(-1)


@numba.njit
def _argument_cell(key: Any) -> Any:  # pragma: no cover - compiled
    if key == _RET:
        return np.int64(RowCell.RET)
    if key == _OFFSET:
        return np.int64(RowCell.OFFSET)
    if key == _EPOCH:
        return np.int64(RowCell.EPOCH)
    if key == _STEP:
        return np.int64(RowCell.STEP)
    return np.int64(-1)


@numba.njit
def _set(state: Any, cell: Any, value: Any) -> None:  # pragma: no cover - compiled
    """Set a number of the row that is being read."""
    room = get(state, StateCell.ROWS_ROOM)
    put(get(state, StateCell.ROWS_AT), np.int64(cell) * room + get(state, StateCell.ROWS), value)


@numba.njit
def _given(state: Any, cell: Any) -> Any:  # pragma: no cover - compiled
    """A number of the row that is being read."""
    room = get(state, StateCell.ROWS_ROOM)
    return get(get(state, StateCell.ROWS_AT), np.int64(cell) * room + get(state, StateCell.ROWS))


@numba.njit
def _text(at: Any) -> Any:  # pragma: no cover - compiled
    """The closing quote of the string that begins at `at` with its quote; -1 for anything else."""
    if byte(at) != 0x22:
        return np.int64(-1)
    end = string_end(at + 1)
    return end if end - at <= TEXT_LIMIT else np.int64(-1)


@numba.njit
def _phase(at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Complete events and metadata, by number or letter; -1 for the end of any other."""
    word = load(at)
    if byte(at) == 0x22:
        word &= low_bytes(3)
        put(state, StateCell.PHASE, _COMPLETE if word == _COMPLETE_WORD else _METADATA)
        return at + 3 if word in (_COMPLETE_WORD, _METADATA_WORD) else np.int64(-1)
    value, end = integer(at)
    put(state, StateCell.PHASE, value)
    return end if value in (_COMPLETE, _METADATA) else np.int64(-1)


@numba.njit
def _top_value(key: Any, at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take the value of a key of the line; gives where it ends, -1 if it isn't understood."""
    cell = _top_cell(key)
    if cell >= 0:
        value, end = integer(at)
        _set(state, cell, value)
        return end
    if key in (_TOP_NAME, _TOP_CAT):
        end = _text(at)
        if end < 0:
            return end
        cell = np.int64(RowCell.NAME) if key == _TOP_NAME else np.int64(RowCell.CAT)
        _set(state, cell, intern(at + 1, end, state))
        return end + 1
    if key == _TOP_PH:
        return _phase(at, state)
    return value_end(at) if key in (_TOP_ID, _TOP_TYPE) else np.int64(-1)


@numba.njit
def _object(at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Read the object that begins at `at`; gives where it ends, -1 if it isn't understood."""
    while True:
        key, length, at = read_key(blanks(at + 1))
        if at < 0 or length > 4:
            return np.int64(-1)
        at = _arguments(at, state) if key == _TOP_ARGS else _top_value(key, at, state)
        if at < 0:
            return at
        at = blanks(at)
        if byte(at) != 0x2C:
            return at + 1 if byte(at) == 0x7D else np.int64(-1)


@numba.njit
def _arguments(at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Read the arguments: some have a column, the rest is copied as it stands."""
    pool, used = get(state, StateCell.ARGS_AT), _given(state, RowCell.ARGS_END)
    if byte(at) != 0x7B or used != get(state, StateCell.ARGS):  # no object, or a second one
        return np.int64(-1)
    begin, limit = pool + used, pool + get(state, StateCell.ARGS_ROOM) - SLACK
    target = begin
    if byte(blanks(at + 1)) == 0x7D:
        at = blanks(at + 1)
    while byte(at) != 0x7D:
        start = blanks(at + 1)
        key, length, value = read_key(start)
        if value < 0:
            return value
        at = _argument_value(key, length, value, state)
        if at < 0:
            at = _kept_value(key, length, value, state)
            if at < 0 or target + at - start > limit:
                return np.int64(-1)
            store(target, _COMMA if target > begin else _BRACE)
            target = copy_bytes(start, at, target + 1)
        at = blanks(at)
        if byte(at) not in (0x2C, 0x7D):
            return np.int64(-1)
    store(target, _CLOSING if target > begin else _EMPTY)
    _set(state, RowCell.ARGS_END, target - pool + (1 if target > begin else 2))
    return at + 1


@numba.njit
def _argument_value(key: Any, length: Any, at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take the value of an argument that has a column; -1 if it has none, or isn't what the column holds."""
    if length > 8:
        return np.int64(-1)
    if key in (_FHASH, _HHASH):
        return _hashed(key, at, state)
    if key in (_FNAME, _HOSTNAME):
        end = _text(at)
        if end < 0:
            return end
        cell = np.int64(RowCell.PATH) if key == _FNAME else np.int64(RowCell.HOST)
        _set(state, cell, intern(at + 1, end, state))
        return end + 1
    cell = _argument_cell(key)
    return _numbered(cell, at, state) if cell >= 0 else np.int64(-1)


@numba.njit
def _numbered(cell: Any, at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take a number, if its column can hold it."""
    value, end = integer(at)
    if end < 0 or (cell in (RowCell.EPOCH, RowCell.STEP) and not -(1 << 31) <= value < 1 << 31):
        return np.int64(-1)
    _set(state, cell, value)
    return end


@numba.njit
def _hashed(key: Any, at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take a path or host that is told by its hash."""
    end = value_end(at)
    if end < 0 or end - at > 64:
        return np.int64(-1)
    is_quoted = np.int64(byte(at) == 0x22)
    is_file = key == _FHASH
    kind = np.int64(HashKind.FILE) if is_file else np.int64(HashKind.HOST)
    cell = np.int64(RowCell.PATH) if is_file else np.int64(RowCell.HOST)
    _set(state, cell, bound(at + is_quoted, end - is_quoted, kind, state))
    return end


@numba.njit
def _kept_value(key: Any, length: Any, at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Where the value of an argument without a column ends, -1 if it isn't understood. Notes sizes."""
    end = value_end(at)
    if end < 0 or (key == _NEWPATH_HASH and length == 12):
        return np.int64(-1)
    is_quoted = np.int64(byte(at) == 0x22)
    if (key == _SIZE and length == 4) or (key == _IMAGE_SIZE and length == 10):
        value, stop = integer(at)
        if stop >= 0:
            _set(state, np.int64(RowCell.UNIT) if key == _SIZE else np.int64(RowCell.IMAGE), value)
    elif key == _NAME and length == 4:
        put(state, StateCell.NAME_START, at + 1)
        put(state, StateCell.NAME_END, end - 1 if is_quoted else -1)
    elif key == _VALUE and length == 5:
        put(state, StateCell.VALUE_START, at + is_quoted)
        put(state, StateCell.VALUE_END, end - is_quoted)
    return end


@numba.njit
def _explanation(state: Any) -> Any:  # pragma: no cover - compiled
    """Bind the hash that a line of metadata explains; whether it does."""
    kind = _given(state, RowCell.NAME)
    start, end = get(state, StateCell.NAME_START), get(state, StateCell.NAME_END)
    first, last = get(state, StateCell.VALUE_START), get(state, StateCell.VALUE_END)
    if not 0 <= kind <= 2 or not 0 < end - start <= TEXT_LIMIT or not 0 < last - first <= 64:
        return False
    bind(first, last, kind, intern(start, end, state), state)
    return True


@numba.njit
def _blank_row(state: Any) -> None:  # pragma: no cover - compiled
    for cell in range(np.int64(RowCell.NAME)):
        _set(state, cell, MISSING)
    for cell in range(np.int64(RowCell.NAME), np.int64(RowCell.ARGS_END)):
        _set(state, cell, -1)
    _set(state, RowCell.ARGS_END, get(state, StateCell.ARGS))
    for cell in range(np.int64(StateCell.PHASE), np.int64(StateCell.VALUE_END) + 1):
        put(state, cell, -1)


@numba.njit
def _is_event(state: Any) -> Any:  # pragma: no cover - compiled
    """Whether the row has what every event has; what may be absent gets its default."""
    if _given(state, RowCell.NAME) < 0 or _given(state, RowCell.CAT) < 0 or _given(state, RowCell.DUR) < 0:
        return False
    if _given(state, RowCell.TS) == MISSING or _given(state, RowCell.PID) == MISSING:
        return False
    if _given(state, RowCell.TID) == MISSING:
        _set(state, RowCell.TID, _given(state, RowCell.PID))
    used = get(state, StateCell.ARGS)
    if _given(state, RowCell.ARGS_END) == used:
        store(get(state, StateCell.ARGS_AT) + used, _EMPTY)
        _set(state, RowCell.ARGS_END, used + 2)
    return True


@numba.njit
def _take_line(at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take the line whose object begins at `at`; gives where the next one begins, -1 if it is odd."""
    _blank_row(state)
    at = _object(at, state)
    if at >= 0:
        at = line_end(at)
    if at < 0:
        return at
    if get(state, StateCell.PHASE) == _METADATA:
        is_known = _explanation(state)
        put(state, StateCell.METADATA, get(state, StateCell.METADATA) + is_known)
        return at if is_known else np.int64(-1)
    if get(state, StateCell.PHASE) != _COMPLETE or not _is_event(state):
        return np.int64(-1)
    used = _given(state, RowCell.ARGS_END)
    put(state, StateCell.ROWS, get(state, StateCell.ROWS) + 1)
    put(state, StateCell.ARGS, used)
    return at


@numba.njit
def _has_room(state: Any) -> Any:  # pragma: no cover - compiled
    """Whether any line that the loop takes would fit."""
    num_texts = get(state, StateCell.TEXTS)
    return (
        get(state, StateCell.ROWS) < get(state, StateCell.ROWS_ROOM)
        and get(state, StateCell.ARGS) + LINE_ROOM <= get(state, StateCell.ARGS_ROOM)
        and get(get(state, StateCell.ENDS_AT), num_texts) + LINE_ROOM <= get(state, StateCell.POOL_ROOM)
        and 2 * (num_texts + 8) <= get(state, StateCell.SLOTS)
        and 2 * (get(state, StateCell.BOUND) + 4) <= get(state, StateCell.KEYS)
    )


@numba.njit
def _any_line(at: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Take a line, or pass a blank one; gives where the next one begins, -1 if it is odd."""
    first = blanks(at)
    if byte(first) in (0x5B, 0x5D):
        first = blanks(first + 1)
    if byte(first) == 0x7B:
        at = _take_line(first, state)
    else:
        at = line_end(first)
        put(state, StateCell.BLANK, get(state, StateCell.BLANK) + (at >= 0))
    if at >= 0:
        put(state, StateCell.LINES, get(state, StateCell.LINES) + 1)
    return at


def _scan(state: Any, stop: Any) -> int:  # pragma: no cover - compiled
    """Take lines from `AT` up to `stop`, which is behind a newline, until one is odd or there is no room."""
    at = get(state, StateCell.AT)
    while at < stop:
        put(state, StateCell.AT, at)
        if not _has_room(state):
            return 2
        at = _any_line(at, state)
        if at < 0:
            return 1
    put(state, StateCell.AT, at)
    return 0


def _scan_wanted(state: Any, stop: Any) -> int:  # pragma: no cover - compiled
    """The same for lines that hold what is searched for; the others are counted as skipped."""
    at = get(state, StateCell.AT)
    needles = get(state, StateCell.NEEDLES_AT)
    for number in range(get(state, StateCell.NEEDLES)):
        put(needles, number * _NEEDLE_CELLS + 3, 0)
    while at < stop:
        end = find_newline(at, stop)
        if not _is_wanted(at, end, stop, state):
            put(state, StateCell.LINES, get(state, StateCell.LINES) + 1)
            put(state, StateCell.SKIPPED, get(state, StateCell.SKIPPED) + 1)
            at = end + 1
            continue
        put(state, StateCell.AT, at)
        if not _has_room(state):
            return 2
        at = _any_line(at, state)
        if at < 0:
            return 1
    put(state, StateCell.AT, at)
    return 0


@numba.njit
def _is_wanted(at: Any, end: Any, stop: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Whether a line explains others, or has a needle of each role that there are needles of."""
    needles, num_needles = get(state, StateCell.NEEDLES_AT), get(state, StateCell.NEEDLES)
    must_name, names, must_place, places = False, False, False, False
    for number in range(num_needles):
        needle = needles + np.int64(8 * _NEEDLE_CELLS) * number
        role, hit = get(needle, 2), get(needle, 3)
        if hit < at and role != PatternRole.HASH_KEY:
            hit = find(at, stop, get(needle, 0), get(needle, 1))
            put(needle, 3, hit)
        if role == PatternRole.EXPLAINING and hit < end:
            return True
        if role == PatternRole.NAMING:
            must_name, names = True, names or hit < end
        elif role == PatternRole.PLACING:
            must_place, places = True, places or hit < end
    if must_name and not names:
        return False
    return not must_place or places or _is_hash_wanted(at, end, state)


@numba.njit
def _is_hash_wanted(at: Any, end: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """Whether a line names its file by a hash that stands for a wanted path, or for one not known yet."""
    needle = get(state, StateCell.NEEDLES_AT)  # the first of them: the key of a file's hash
    value = find(at, end, get(needle, 0), get(needle, 1))
    if value == end:
        return False
    value = blanks(value + get(needle, 1))
    stop = value_end(value)
    if stop < 0:
        return True
    is_quoted = np.int64(byte(value) == 0x22)
    slot, _, is_known = binding(value + is_quoted, stop - is_quoted, np.int64(HashKind.FILE), state)
    if not is_known:
        return True
    code = get(get(state, StateCell.CODES_AT), slot)
    if get(get(state, StateCell.REDIRECTS_AT), code) < 0:
        return True
    wanted = get(get(state, StateCell.WANTED_AT), code)
    if wanted == 0:
        wanted = _judge(code, state)
        put(get(state, StateCell.WANTED_AT), code, wanted)
    return wanted == 1


@numba.njit
def _judge(code: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """1 if a path has one of the needles of paths, else 2."""
    ends, pool = get(state, StateCell.ENDS_AT), get(state, StateCell.POOL_AT)
    start, stop = pool + get(ends, code), pool + get(ends, code + 1)
    for number in range(get(state, StateCell.NEEDLES)):
        needle = get(state, StateCell.NEEDLES_AT) + np.int64(8 * _NEEDLE_CELLS) * number
        if get(needle, 2) == PatternRole.PLACING and find(start, stop, get(needle, 0), get(needle, 1)) < stop:
            return 1
    return 2


def _note(start: Any, end: Any, kind: Any, code: Any, state: Any) -> Any:  # pragma: no cover - compiled
    """For lines that Python reads: the code of a text (`kind` < 0) or of a hash, which `code` >= 0 binds."""
    if kind < 0:
        return intern(start, end, state)
    if code >= 0:
        bind(start, end, kind, code, state)
    return bound(start, end, kind, state)


def is_compiled() -> bool:
    """Whether the cache on disk has the loops."""
    return all(is_cached(loop, parts=(interner, scalars)) for loop in (_scan, _scan_wanted, _note))


@cache
def load_scan() -> Callable[[int, int], int]:
    """The loop over all lines, from the cache on disk, or compiled in some seconds."""
    return compile_loop(_scan, "int64(int64, int64)", parts=(interner, scalars))


@cache
def load_scan_wanted() -> Callable[[int, int], int]:
    """The loop over wanted lines."""
    return compile_loop(_scan_wanted, "int64(int64, int64)", parts=(interner, scalars))


@cache
def load_note() -> Callable[[int, int, int, int, int], int]:
    """What Python asks of texts and hashes."""
    return compile_loop(_note, "int64(int64, int64, int64, int64, int64)", parts=(interner, scalars))
