"""JPEG images of exactly the size asked for: coloured noise, about 2 bits a pixel as photographs have.

One of the formats behind `FileFormat`. Coded data is content, bent to be valid: the only Huffman code, "0",
stands before each value, which is a DC difference of 10 bits or, behind 8 zeros, an AC value of 10 bits; so a
block is 1 + 7 values of 11 bits: 11 bytes. Six blocks are a unit of 16 x 16 pixels with halved colours.
Invariant: no coded byte is 0xFF, so nothing is stuffed and sizes are exact; bytes depend on no library.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.formats.format_protocol import ContentSource
from penstock.dataset.formats.image_format import ImageFormat

_BLOCK_BYTES: Final = 11
_UNIT_BYTES: Final = 6 * _BLOCK_BYTES
_PAIR_BYTES: Final = 2 * _UNIT_BYTES
_MOST_UNITS: Final = 65535 // 16
_LARGEST_SEGMENT: Final = 65533
"""What a comment holds at most; 4 bytes come before it."""
_COMMENT_HEAD_BYTES: Final = 4
_FREE_COLUMNS: Final = (3, 7, 10)
"""The bytes of a block in which no value begins: only these could be 0xFF."""


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _single_code(table: int, symbol: int) -> bytes:
    """A Huffman table whose one code is "0"."""
    return bytes([table, 1, *[0] * 15, symbol])


def _head(rows: int, columns: int) -> bytes:
    """All before the coded data: JFIF, flat quantization, the frame, codes, the scan."""
    frame = struct.pack(">BHHB", 8, rows, columns, 3) + bytes([1, 0x22, 0, 2, 0x11, 0, 3, 0x11, 0])
    scan = bytes([3, 1, 0x00, 2, 0x00, 3, 0x00, 0, 63, 0])
    return b"".join(
        (
            b"\xff\xd8",
            _segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"),
            _segment(0xDB, bytes([0, *[1] * 64])),
            _segment(0xC0, frame),
            _segment(0xC4, _single_code(0x00, 0x0A) + _single_code(0x10, 0x8A)),
            _segment(0xDA, scan),
        )
    )


_END: Final = b"\xff\xd9"
_FIXED_BYTES: Final = len(_head(16, 16)) + len(_END)
_SMALLEST: Final = _FIXED_BYTES + _PAIR_BYTES + _COMMENT_HEAD_BYTES
_LARGEST: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class JpegGrid:
    """An image in units of 16 pixels, and the bytes of comments behind it: none, or a head at least."""

    across: int
    down: int
    padding: int


class JpegFormat(ImageFormat):
    """Files that decode to coloured noise."""

    smallest_bytes = _SMALLEST
    largest_bytes = _LARGEST

    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Rows, columns, colours."""
        grid = fit(size_bytes)
        return 16 * grid.down, 16 * grid.across, 3

    def encode(self, size_bytes: int, content: ContentSource) -> memoryview:
        """Head, coded content, comments of content that fill the file up, end."""
        grid = fit(size_bytes)
        image = memoryview(bytearray(size_bytes))
        content.fill(image, 0)
        head = _head(16 * grid.down, 16 * grid.across)
        coded_end = len(head) + grid.across * grid.down * _UNIT_BYTES
        image[: len(head)] = head
        _bend(np.frombuffer(image[len(head) : coded_end], dtype=np.uint8))
        _stamp_comments(image[coded_end : -len(_END)])
        image[-len(_END) :] = _END
        return image


@lru_cache(maxsize=4096)
def fit(size_bytes: int) -> JpegGrid:
    """The image of about 4:3, an even number of units across, which leaves least to comments."""
    room = size_bytes - _FIXED_BYTES
    middle = max(1, min(_MOST_UNITS, math.isqrt(room // _UNIT_BYTES * 3 // 4)))
    heights = range(max(1, middle - middle // 8), min(_MOST_UNITS, middle + middle // 8) + 1)
    grids = (_widest(room, down) for down in heights)
    smallest = JpegGrid(2, 1, room - _PAIR_BYTES)
    return min((grid for grid in grids if grid.across > 0), key=lambda one: one.padding, default=smallest)


def _widest(room: int, down: int) -> JpegGrid:
    """As many units across as there is room for; what is left has room for a comment, or is nothing."""
    pairs = min(room // (down * _PAIR_BYTES), _MOST_UNITS // 2)
    left = room - pairs * down * _PAIR_BYTES
    if 0 < left < _COMMENT_HEAD_BYTES:
        pairs, left = pairs - 1, left + down * _PAIR_BYTES
    return JpegGrid(2 * pairs, down, left)


@lru_cache(maxsize=1)
def _code_mask() -> NDArray[np.uint8]:
    """Zeros where the codes are, every 11 bits, for a step of pairs of units."""
    bits = np.ones(_BLOCK_BYTES * 8, dtype=np.uint8)
    bits[::11] = 0
    return np.tile(np.packbits(bits), 512 * _PAIR_BYTES // _BLOCK_BYTES)


def _bend(coded: NDArray[np.uint8]) -> None:
    """Make valid coded data of content, in place."""
    mask, cancel = _code_mask(), _load_cancel()
    for start in range(0, len(coded), len(mask)):
        step = coded[start : start + len(mask)]
        step &= mask[: len(step)]
        cancel(step)


def _cancel(coded: Any) -> None:  # pragma: no cover - compiled
    """Let every second DC difference of a component be the negative of the one before: its bits turned.

    Without this the sum of thousands of differences would leave the range of DC values. A DC value is bits 1
    to 10 of a block: seven of byte 0 and three of byte 1.
    """
    for pair in range(0, coded.size, _PAIR_BYTES):
        # The luminance of a unit has four blocks; each of its two colours has one, and turns the next unit's.
        for number in range(6):
            first = pair + (number // 2 * _UNIT_BYTES + number % 2 * 2 * _BLOCK_BYTES)
            second = first + _BLOCK_BYTES
            if number >= 4:
                first = pair + number * _BLOCK_BYTES
                second = first + _UNIT_BYTES
            coded[second] = coded[first] ^ np.uint8(0x7F)
            high = ~coded[first + 1] & np.uint8(0xE0)
            coded[second + 1] = (coded[second + 1] & np.uint8(0x1F)) | high
        for block in range(pair, pair + _PAIR_BYTES, _BLOCK_BYTES):
            for column in _FREE_COLUMNS:
                if coded[block + column] == np.uint8(0xFF):
                    coded[block + column] = np.uint8(0xFE)


@lru_cache(maxsize=1)
def _load_cancel() -> Callable[[NDArray[np.uint8]], None]:
    from penstock.compiling import compile_loop  # noqa: PLC0415 - it takes a third of a second, to encode only

    return compile_loop(_cancel, "void(Array(uint8, 1, 'C', False, aligned=True))")


def _stamp_comments(room: memoryview) -> None:
    """Cut what is left into comments, each at least a head long."""
    start = 0
    while start < room.nbytes:
        left = room.nbytes - start - _COMMENT_HEAD_BYTES
        body = min(left, _LARGEST_SEGMENT)
        if 0 < left - body < _COMMENT_HEAD_BYTES:
            body -= _COMMENT_HEAD_BYTES
        room[start : start + _COMMENT_HEAD_BYTES] = struct.pack(">BBH", 0xFF, 0xFE, body + 2)
        start += _COMMENT_HEAD_BYTES + body
