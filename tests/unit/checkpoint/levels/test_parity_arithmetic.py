"""The field that parity is computed in: single elements, and buffers compared with single elements."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy import (
    CACHED_BYTES,
    add,
    add_scaled,
    double_and_add,
    inverse,
    multiply,
)

elements = st.integers(0, 255)


@given(elements, elements, elements)
def test_products_do_not_depend_on_order_and_distribute_over_sums(a: int, b: int, c: int) -> None:
    assert multiply(a, b) == multiply(b, a)
    assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)
    assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)


def test_products_are_those_of_polynomials() -> None:
    for left in range(256):
        for right in range(256):
            product, shifted = 0, left
            for bit in range(8):
                product ^= shifted if right >> bit & 1 else 0
                shifted = shifted << 1 ^ (0x11D if shifted & 0x80 else 0)
            assert multiply(left, right) == product


def test_every_element_but_zero_has_an_inverse() -> None:
    assert all(multiply(element, inverse(element)) == 1 for element in range(1, 256))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    size = 2 * draw(st.integers(0, 160))
    return draw(st.binary(min_size=size, max_size=size)), draw(st.binary(min_size=size, max_size=size))


@given(pairs(), elements)
def test_buffers_are_summed_byte_by_byte_and_the_piece_stays(
    buffers: tuple[bytes, bytes], factor: int
) -> None:
    total, piece = buffers
    for sum_up, expected in (
        (add, [a ^ b for a, b in zip(total, piece, strict=True)]),
        (double_and_add, [multiply(a, 2) ^ b for a, b in zip(total, piece, strict=True)]),
        (
            lambda x, y: add_scaled(x, y, factor),
            [a ^ multiply(b, factor) for a, b in zip(total, piece, strict=True)],
        ),
    ):
        changed, added = memoryview(bytearray(total)), memoryview(bytearray(piece))
        sum_up(changed, added)
        assert list(changed) == expected
        assert bytes(added) == piece


def test_buffers_beyond_one_cached_block_are_summed_to_their_end() -> None:
    random = np.random.default_rng(0)
    weighted, piece = (bytearray(random.bytes(CACHED_BYTES + 24)) for _ in range(2))
    before = bytes(weighted)
    double_and_add(memoryview(weighted), memoryview(piece))
    assert list(weighted) == [multiply(a, 2) ^ b for a, b in zip(before, piece, strict=True)]
