"""Arithmetic in GF(2^8): single elements, from which the coefficients of parity follow, and whole buffers.

The field is that of RAID 6: polynomials modulo x^8 + x^4 + x^3 + x^2 + 1, in which 2 generates all elements
but zero. Addition is XOR, which numpy does at the speed of memory. The second parity is summed by Horner's
rule, so that encoding only ever doubles; a rebuild multiplies by any factor with at most seven doublings.
Doubling uses machine code of numba if that is installed, and numpy otherwise, which takes several passes over
blocks that stay in the L1 cache (docs/decisions/012). A save without redundancy never gets here. Invariant:
buffers are whole 8-byte words of equal length, and only the first named ones are written.
"""

import logging
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MODULUS: Final = 0x11D
GROUP_ORDER: Final = 255
"""The powers of 2 repeat after this many, so a code has at most this many members."""
WORD_BYTES: Final = 8
CACHED_BYTES: Final = 64 << 10
"""Blocks of numpy's doubling: smaller ones cost more calls, larger ones do not fit into the cache."""

logger = logging.getLogger(__name__)


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
    """2 to the power of `exponent`, which may be negative."""
    result = 1
    for _ in range(exponent % GROUP_ORDER):
        result = multiply(result, 2)
    return result


def inverse(element: int) -> int:
    """The element whose product with `element` is 1. Zero has none."""
    if element == 0:
        raise ZeroDivisionError("zero has no inverse in a field")
    result = 1
    for _ in range(GROUP_ORDER - 1):
        result = multiply(result, element)
    return result


def add(total: memoryview, piece: memoryview) -> None:
    """Add `piece` to `total`."""
    np.bitwise_xor(_words(total), _words(piece), out=_words(total))


def double_and_add(weighted: memoryview, piece: memoryview) -> None:
    """Double `weighted`, then add `piece` to it."""
    load_loops().double_and_add(_words(weighted), _words(piece))


def add_scaled(total: memoryview, piece: memoryview, factor: int) -> None:
    """Add `factor` times `piece` to `total`."""
    if factor == 1:
        add(total, piece)
    elif factor:
        masks = np.array([np.uint64(2**64 - 1) if factor >> bit & 1 else 0 for bit in range(8)], np.uint64)
        load_loops().add_scaled(_words(total), _words(piece), masks)


class Loops(NamedTuple):
    """The loops that double, compiled or not. They take arrays of 64-bit words."""

    double_and_add: Any
    add_scaled: Any


@cache
def load_loops() -> Loops:
    """The fastest loops that are installed. Compiling them takes tenths of a second, once per machine."""
    try:
        from penstock.checkpoint.levels.redundancy import gf256_compiled  # noqa: PLC0415 - numba is optional
    except ModuleNotFoundError:
        logger.info("Double parity is computed by numpy: install numba for four times its speed")
        return NUMPY_LOOPS
    return Loops(*gf256_compiled.compile_loops())


def _words(buffer: memoryview) -> Words:
    return np.frombuffer(buffer, dtype=np.uint64)


# Numpy: bytes, because comparing and doubling them are single vector instructions; in cached blocks.


def _double(source: NDArray[np.uint8], target: NDArray[np.uint8], carries: NDArray[np.uint8]) -> None:
    # The top bit is the sign of the same byte as int8.
    np.less(source.view(np.int8), 0, out=carries.view(np.bool_))
    np.multiply(carries, np.uint8(MODULUS & 0xFF), out=carries)
    np.add(source, source, out=target)
    np.bitwise_xor(target, carries, out=target)


def _double_and_add_numpy(weighted: Words, piece: Words) -> None:
    doubled, added = weighted.view(np.uint8), piece.view(np.uint8)
    carries = np.empty(min(CACHED_BYTES, doubled.size), np.uint8)
    for start in range(0, doubled.size, CACHED_BYTES):
        block = doubled[start : start + CACHED_BYTES]
        _double(block, block, carries[: block.size])
        np.bitwise_xor(block, added[start : start + CACHED_BYTES], out=block)


def _add_scaled_numpy(total: Words, piece: Words, masks: Words) -> None:
    sums, factors = total.view(np.uint8), piece.view(np.uint8)
    bits = [bit for bit in range(8) if masks[bit]]
    scaled, carries = (np.empty(min(CACHED_BYTES, sums.size), np.uint8) for _ in range(2))
    for start in range(0, sums.size, CACHED_BYTES):
        block, power = sums[start : start + CACHED_BYTES], factors[start : start + CACHED_BYTES]
        for bit in range(bits[-1] + 1):
            if bit:
                _double(power, scaled[: block.size], carries[: block.size])
                power = scaled[: block.size]
            if bit in bits:
                np.bitwise_xor(block, power, out=block)


NUMPY_LOOPS: Final = Loops(_double_and_add_numpy, _add_scaled_numpy)
