"""Arithmetic of bytes as elements of GF(2^8), on plain integers: what the coefficients of parity follow from.

The field is the one of RAID 6: polynomials modulo x^8 + x^4 + x^3 + x^2 + 1, in which 2 generates all
elements but zero. Bytes themselves are added and scaled by `kernels.py`; here are only single numbers.
"""

from __future__ import annotations

from typing import Final

MODULUS: Final = 0x11D
ORDER: Final = 255
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
    for _ in range(exponent % ORDER):
        result = multiply(result, 2)
    return result


def inverse(element: int) -> int:
    """What `element` times gives 1. Zero has none."""
    if element == 0:
        raise ZeroDivisionError("zero has no inverse in a field")
    result = 1
    for _ in range(ORDER - 1):
        result = multiply(result, element)
    return result
