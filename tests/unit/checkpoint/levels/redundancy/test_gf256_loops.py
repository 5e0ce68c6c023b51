"""The loops of parity, compiled and of numpy, compared with the arithmetic of single elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.levels.redundancy import gf256
from penstock.checkpoint.levels.redundancy.gf256 import multiply

if TYPE_CHECKING:
    from collections.abc import Iterator

sizes = st.integers(0, 40).map(lambda words: words * gf256.WORD_BYTES)


@pytest.fixture(autouse=True, scope="module", params=["compiled", "numpy"])
def _loops(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "compiled":
        pytest.importorskip("numba")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gf256, "load_loops", lambda: gf256.NUMPY_LOOPS)
        yield


def _buffer(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


@st.composite
def triples(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    size = draw(sizes)
    raw = draw(st.binary(min_size=3 * size, max_size=3 * size))
    return raw[:size], raw[size : 2 * size], raw[2 * size :]


@given(triples())
def test_a_sum_is_the_exclusive_or_and_the_piece_stays(buffers: tuple[bytes, bytes, bytes]) -> None:
    total, piece, _ = map(_buffer, buffers)
    gf256.add(total, piece)
    assert bytes(total) == bytes(a ^ b for a, b in zip(buffers[0], buffers[1], strict=True))
    assert bytes(piece) == buffers[1]


@given(triples())
def test_doubling_adds_the_piece_to_twice_every_byte(buffers: tuple[bytes, bytes, bytes]) -> None:
    weighted, piece, _ = map(_buffer, buffers)
    gf256.double_and_add(weighted, piece)
    assert bytes(weighted) == bytes(multiply(a, 2) ^ b for a, b in zip(buffers[0], buffers[1], strict=True))
    assert bytes(piece) == buffers[1]


@given(triples(), st.integers(0, 255))
def test_a_scaled_sum_multiplies_every_byte(buffers: tuple[bytes, bytes, bytes], factor: int) -> None:
    total, piece, _ = map(_buffer, buffers)
    gf256.add_scaled(total, piece, factor)
    expected = bytes(a ^ multiply(b, factor) for a, b in zip(buffers[0], buffers[1], strict=True))
    assert bytes(total) == expected


def test_every_factor_scales_every_byte_correctly() -> None:
    piece = memoryview(np.arange(256, dtype=np.uint8).tobytes())
    for factor in range(256):
        total = memoryview(bytearray(256))
        gf256.add_scaled(total, memoryview(bytearray(piece)), factor)
        assert bytes(total) == bytes(multiply(byte, factor) for byte in range(256))


def test_buffers_of_odd_length_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of element size"):
        gf256.add(memoryview(bytearray(9)), memoryview(bytearray(9)))


def test_buffers_beyond_one_cached_block_are_summed_to_their_end() -> None:
    random = np.random.default_rng(0)
    plain, weighted, piece = (bytearray(random.bytes(gf256.CACHED_BYTES + 24)) for _ in range(3))
    before = bytes(weighted[-24:])
    gf256.double_and_add(memoryview(weighted), memoryview(piece))
    expected = [multiply(b, 2) ^ c for b, c in zip(before, piece[-24:], strict=True)]
    assert list(weighted[-24:]) == expected
    summed = bytes(plain)
    for factor in (0x8E, 0x8F):
        gf256.add_scaled(memoryview(plain), memoryview(piece), factor)
    # The factors differ by 1, so what remains of both products is the piece itself.
    assert bytes(plain) == bytes(a ^ b for a, b in zip(summed, piece, strict=True))
