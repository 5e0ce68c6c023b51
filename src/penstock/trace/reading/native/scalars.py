"""Strings and numbers of JSON in memory, eight bytes a step: the lowest layer of the loop of `scan.py`.

Everything is an address: compiled functions that pass arrays to each other count references, which costs ten
times what the work on the bytes does.
Invariant: a string or number is accepted only if JSON would accept it, and none runs past a line's end: a
newline is no part of either. Loads may pass what is asked by up to seven bytes.
"""

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # it has no types
from numba.core import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

_QUOTES: Final = np.uint64(0x2222222222222222)
_BACKSLASHES: Final = np.uint64(0x5C5C5C5C5C5C5C5C)
_ONES: Final = np.uint64(0x0101010101010101)
_SPACES: Final = np.uint64(0x2020202020202020)
_HIGH: Final = np.uint64(0x8080808080808080)
_ZEROS: Final = np.uint64(0x3030303030303030)
_TENS: Final = np.uint64(0x7676767676767676)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_trailing_zeros: Any = trailing_zeros
_POWERS: Final = np.array([10**n for n in range(9)], dtype=np.int64)
_ZERO: Final = np.uint64(0)


def word_of(text: bytes) -> Any:
    """Up to eight bytes as the number that `load` would give for them, were zeros behind them."""
    return np.uint64(int.from_bytes(text, "little"))


_TRUE, _FALSE, _NULL = word_of(b"true"), word_of(b"false"), word_of(b"null")

# No tracer of lines sees compiled bodies run; tests hold them against the json module.


def _load(_typing: Any, _address: Any) -> Any:  # pragma: no cover - generates code
    """The eight bytes at any address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(types.int64), generate


def _byte(_typing: Any, _address: Any) -> Any:  # pragma: no cover - generates code
    """The byte at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(8).as_pointer()))

    return types.uint8(types.int64), generate


def _store(_typing: Any, _address: Any, _word: Any) -> Any:  # pragma: no cover - generates code
    """Put eight bytes at any address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        stored = builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


load: Any = intrinsic(_load)
byte: Any = intrinsic(_byte)
store: Any = intrinsic(_store)


# libc's searches use the widest vectors that the processor has, at ten and more gigabytes a second.
_memmem: Any = types.ExternalFunction(
    "memmem", types.int64(types.int64, types.int64, types.int64, types.int64)
)
_memchr: Any = types.ExternalFunction("memchr", types.int64(types.int64, types.int32, types.int64))


@numba.njit
def find(start: Any, stop: Any, needle: Any, length: Any) -> Any:  # pragma: no cover - compiled
    """Where the needle is first met; `stop` if it isn't."""
    found = _memmem(start, stop - start, needle, length)
    return found or stop


@numba.njit
def find_newline(start: Any, stop: Any) -> Any:  # pragma: no cover - compiled
    """Where the line ends; there must be a newline."""
    return _memchr(start, 0x0A, stop - start)


@numba.njit
def get(cells: Any, number: Any) -> Any:  # pragma: no cover - compiled
    """The signed number in a cell of those at an address."""
    return np.int64(load(cells + np.int64(8) * np.int64(number)))


@numba.njit
def put(cells: Any, number: Any, value: Any) -> None:  # pragma: no cover - compiled
    """Set a cell of those at an address."""
    store(cells + np.int64(8) * np.int64(number), np.uint64(value))


@numba.njit
def _first(marks: Any) -> Any:  # pragma: no cover - compiled
    """Which byte of a word has the lowest mark."""
    return np.int64(_trailing_zeros(marks) >> np.uint64(3))


@numba.njit
def low_bytes(number: Any) -> Any:  # pragma: no cover - compiled
    """A mask of the `number` (1 to 8) lowest bytes."""
    return _ALL >> (np.uint64(64) - np.uint64(number) * np.uint64(8))


@numba.njit
def _after_letter(at: Any) -> Any:  # pragma: no cover - compiled
    """Where the character beyond ASCII at `at` ends; -1 if that isn't UTF-8."""
    lead = byte(at)
    if 0xC2 <= lead <= 0xDF:
        more, low, high = 1, 0x80, 0xBF
    elif 0xE0 <= lead <= 0xEF:
        more = 2
        low, high = 0xA0 if lead == 0xE0 else 0x80, 0x9F if lead == 0xED else 0xBF
    elif 0xF0 <= lead <= 0xF4:
        more = 3
        low, high = 0x90 if lead == 0xF0 else 0x80, 0x8F if lead == 0xF4 else 0xBF
    else:
        return np.int64(-1)
    for position in range(at + 1, at + 1 + more):
        if not low <= byte(position) <= high:
            return np.int64(-1)
        low, high = 0x80, 0xBF
    return np.int64(at + 1 + more)


@numba.njit
def string_end(at: Any) -> Any:  # pragma: no cover - compiled
    """The closing quote of the string whose first byte is at `at`; -1 if it needs a closer look."""
    while True:
        word = load(at)
        quotes, slashes = word ^ _QUOTES, word ^ _BACKSLASHES
        marks = ((quotes - _ONES) & ~quotes) | ((slashes - _ONES) & ~slashes) | (word - _SPACES) | word
        marks &= _HIGH
        if marks == _ZERO:
            at += 8
            continue
        at += _first(marks)
        if byte(at) < 0x80:
            return np.int64(at) if byte(at) == 0x22 else np.int64(-1)
        at = _after_letter(at)
        if at < 0:
            return np.int64(-1)


@numba.njit
def integer(at: Any) -> Any:  # pragma: no cover - compiled
    """A whole number, quoted or not, and where it ends; -1 for the end if it is none."""
    is_quoted = byte(at) == 0x22
    at += is_quoted
    is_negative = byte(at) == 0x2D
    at += is_negative
    value, num_digits = np.int64(0), 0
    while True:
        word = load(at)
        digits = word ^ _ZEROS
        others = ((digits + _TENS) | digits) & _HIGH
        count = 8 if others == _ZERO else _first(others)
        if count:
            # Eight digits at once: neighbours are joined to pairs, pairs to fours, fours to eight.
            digits <<= np.uint64(64) - np.uint64(count) * np.uint64(8)
            digits = (digits * np.uint64(10)) + (digits >> np.uint64(8))
            low = (digits & np.uint64(0x000000FF000000FF)) * np.uint64(0x000F424000000064)
            high = ((digits >> np.uint64(16)) & np.uint64(0x000000FF000000FF)) * np.uint64(0x0000271000000001)
            value = value * _POWERS[count] + np.int64((low + high) >> np.uint64(32))
        at += count
        num_digits += count
        if count < 8:
            break
    if num_digits == 0 or num_digits > 18 or (is_quoted and byte(at) != 0x22):
        return value, np.int64(-1)
    return -value if is_negative else value, np.int64(at + is_quoted)


@numba.njit
def value_end(at: Any) -> Any:  # pragma: no cover - compiled
    """Where a string, number or word ends; -1 for anything else."""
    first = byte(at)
    if first == 0x22:
        at = string_end(at + 1)
        return at + 1 if at >= 0 else np.int64(-1)
    start = at
    while True:
        letter = byte(at)
        is_word = (0x30 <= letter <= 0x39) or (0x61 <= letter <= 0x7A) or letter in (0x2B, 0x2D, 0x2E, 0x45)
        if not is_word:
            break
        at += 1
    if at == start:
        return np.int64(-1)
    if first in (0x74, 0x66, 0x6E):  # true, false, null
        word = load(start) & low_bytes(min(at - start, 8))
        is_known = word in (_TRUE, _FALSE, _NULL)
        return np.int64(at) if is_known else np.int64(-1)
    return np.int64(at) if _is_number(start, at) else np.int64(-1)


@numba.njit
def _is_number(at: Any, end: Any) -> Any:  # pragma: no cover - compiled
    """Whether these bytes are a number as JSON writes it."""
    at += byte(at) == 0x2D
    digits = at
    while at < end and 0x30 <= byte(at) <= 0x39:
        at += 1
    if at == digits or (byte(digits) == 0x30 and at > digits + 1):
        return False
    if at < end and byte(at) == 0x2E:
        at += 1
        digits = at
        while at < end and 0x30 <= byte(at) <= 0x39:
            at += 1
        if at == digits:
            return False
    if at < end and byte(at) in (0x45, 0x65):
        at += 1
        at += byte(at) in (0x2B, 0x2D)
        digits = at
        while at < end and 0x30 <= byte(at) <= 0x39:
            at += 1
        if at == digits:
            return False
    return at == end


@numba.njit
def blanks(at: Any) -> Any:  # pragma: no cover - compiled
    """Where the blanks at `at` end."""
    while byte(at) == 0x20 or byte(at) == 0x09:
        at += 1
    return at


@numba.njit
def read_key(at: Any) -> Any:  # pragma: no cover - compiled
    """A key as its first eight bytes, its length, and where its value begins; -1 if there is no key."""
    if byte(at) != 0x22:
        return _ZERO, np.int64(0), np.int64(-1)
    at += 1
    word = load(at)
    quotes = word ^ _QUOTES
    marks = (quotes - _ONES) & ~quotes & _HIGH
    length = _first(marks) if marks != _ZERO else string_end(at) - at
    if length < 1:
        return _ZERO, np.int64(0), np.int64(-1)
    key = word & low_bytes(min(length, 8))
    if marks != _ZERO and string_end(at) < 0:
        return _ZERO, np.int64(0), np.int64(-1)
    at = blanks(at + length + 1)
    if byte(at) != 0x3A:
        return _ZERO, np.int64(0), np.int64(-1)
    return key, np.int64(length), np.int64(blanks(at + 1))


@numba.njit
def line_end(at: Any) -> Any:  # pragma: no cover - compiled
    """What follows the line's newline; -1 if there is more than a comma before it."""
    at = blanks(at)
    if byte(at) == 0x2C:
        at = blanks(at + 1)
    at += byte(at) == 0x0D
    return np.int64(at + 1) if byte(at) == 0x0A else np.int64(-1)


@numba.njit
def same_bytes(start: Any, end: Any, other: Any) -> Any:  # pragma: no cover - compiled
    """Whether the bytes from `start` to `end` are also at `other`."""
    while end - start >= 8:
        if load(start) != load(other):
            return False
        start += 8
        other += 8
    return start == end or (load(start) ^ load(other)) & low_bytes(end - start) == _ZERO


@numba.njit
def copy_bytes(start: Any, end: Any, target: Any) -> Any:  # pragma: no cover - compiled
    """Copy, and perhaps seven bytes more than asked; gives where the copy ends."""
    finish = target + end - start
    while start < end:
        store(target, load(start))
        start += 8
        target += 8
    return finish
