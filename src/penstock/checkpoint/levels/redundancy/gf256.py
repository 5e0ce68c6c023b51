"""Arithmetic of bytes as elements of GF(2^8), on plain integers: what the coefficients of parity follow from.

The field is the one of RAID 6: polynomials modulo x^8 + x^4 + x^3 + x^2 + 1, in which 2 generates all
elements but zero. Bytes themselves are added and scaled by `kernels.py`; here are only single numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from penstock.compiling import compile_loop

MODULUS: Final = 0x11D
GROUP_ORDER: Final = 255
"""The powers of 2 repeat after so many: a code has at most so many members."""


def multiply(left: int, right: int) -> int:
    """The product of two elements."""
    product = 0
    while right:
        if right & 1:
            product ^= left
        left <<= 1
        if left & 0x100:
            left ^= MODULUS
        right >>= 1
    return product


def power_of_two(exponent: int) -> int:
    """2 to the `exponent`, which may be negative."""
    result = 1
    for _ in range(exponent % GROUP_ORDER):
        result = multiply(result, 2)
    return result


def inverse(element: int) -> int:
    """What `element` times gives 1. Zero has none."""
    if element == 0:
        raise ZeroDivisionError("zero has no inverse in a field")
    result = 1
    for _ in range(GROUP_ORDER - 1):
        result = multiply(result, element)
    return result


Words = NDArray[np.uint64]

WORD_BYTES: Final = 8

_ALL_BUT_LOWEST: Final = np.uint64(0xFEFEFEFEFEFEFEFE)
_LOWEST: Final = np.uint64(0x0101010101010101)
_REDUCED: Final = np.uint64(0x1D1D1D1D1D1D1D1D)
_ONE: Final = np.uint64(1)
_SEVEN: Final = np.uint64(7)
_EIGHT: Final = np.uint64(8)


def add(total: memoryview, piece: memoryview) -> None:
    """Add `piece` to `total`."""
    np.bitwise_xor(_words(total), _words(piece), out=_words(total))


def add_to_both(plain: memoryview, weighted: memoryview, piece: memoryview) -> None:
    """Add `piece` to `plain`; double `weighted`, then add `piece` to it: one pass over all three."""
    _loops().add_to_both(_words(plain), _words(weighted), _words(piece))


def double_and_add(weighted: memoryview, piece: memoryview) -> None:
    """Double `weighted`, then add `piece` to it."""
    _loops().double_and_add(_words(weighted), _words(piece))


def add_scaled(total: memoryview, piece: memoryview, factor: int) -> None:
    """Add `factor` times `piece` to `total`."""
    if factor == 1:
        add(total, piece)
    elif factor:
        masks = np.array([np.uint64(2**64 - 1) if factor >> bit & 1 else 0 for bit in range(8)], np.uint64)
        _loops().add_scaled(_words(total), _words(piece), masks)


def _words(buffer: memoryview) -> Words:
    return np.frombuffer(buffer, dtype=np.uint64)


# No tracer of lines sees compiled bodies run; tests hold them against the field's own arithmetic.


@numba.njit
def _doubled(word: Any) -> Any:  # pragma: no cover - compiled
    """Each of eight bytes times 2: a shift, and the modulus where a bit fell out."""
    carries = (word >> _SEVEN) & _LOWEST
    return ((word << _ONE) & _ALL_BUT_LOWEST) ^ (((carries << _EIGHT) - carries) & _REDUCED)


def _add_to_both(plain: Any, weighted: Any, piece: Any) -> None:  # pragma: no cover - compiled
    for position in range(piece.size):
        word = piece[position]
        plain[position] ^= word
        weighted[position] = _doubled(weighted[position]) ^ word


def _double_and_add(weighted: Any, piece: Any) -> None:  # pragma: no cover - compiled
    for position in range(piece.size):
        weighted[position] = _doubled(weighted[position]) ^ piece[position]


def _add_scaled(total: Any, piece: Any, masks: Any) -> None:  # pragma: no cover - compiled
    mask_0, mask_1, mask_2, mask_3 = masks[0], masks[1], masks[2], masks[3]
    mask_4, mask_5, mask_6, mask_7 = masks[4], masks[5], masks[6], masks[7]
    for position in range(piece.size):
        word = piece[position]
        scaled = word & mask_0
        word = _doubled(word)
        scaled ^= word & mask_1
        word = _doubled(word)
        scaled ^= word & mask_2
        word = _doubled(word)
        scaled ^= word & mask_3
        word = _doubled(word)
        scaled ^= word & mask_4
        word = _doubled(word)
        scaled ^= word & mask_5
        word = _doubled(word)
        scaled ^= word & mask_6
        word = _doubled(word)
        total[position] ^= scaled ^ (word & mask_7)


class _Loops(NamedTuple):
    add_to_both: Any
    double_and_add: Any
    add_scaled: Any


@cache
def _loops() -> _Loops:
    two, three = "(uint64[::1], uint64[::1])", "(uint64[::1], uint64[::1], uint64[::1])"
    return _Loops(
        add_to_both=compile_loop(_add_to_both, f"void{three}"),
        double_and_add=compile_loop(_double_and_add, f"void{two}"),
        add_scaled=compile_loop(_add_scaled, f"void{three}"),
    )
