"""PNG images of exactly the size asked for: RGB noise that any decoder shows, stored without compressing it.

One of the formats behind `FileFormat`. Invariant: pixels are content at their place in the file, cut by the
few bytes that begin each row; a file is made in memory, whole, and its bytes depend on no library.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from penstock.dataset.formats.format_protocol import ContentSource
from penstock.dataset.formats.image_format import ImageFormat

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK_BYTES: Final = 12
_LARGEST_CHUNK: Final = 2**31 - 1
_ROW_HEAD_BYTES: Final = 6
"""A stored block of zlib, final or not, its length twice, and the row's filter, none."""
_ZLIB_BYTES: Final = 6
_WIDEST: Final = (0xFFFF - 1) // 3
_FIXED_BYTES: Final = len(_SIGNATURE) + (_CHUNK_BYTES + 13) + (_CHUNK_BYTES + _ZLIB_BYTES) + _CHUNK_BYTES
_SMALLEST: Final = _FIXED_BYTES + _ROW_HEAD_BYTES + 3 + _CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class PngGrid:
    """An image, and the bytes of the chunk that fills the file up: none, or `_CHUNK_BYTES` and more."""

    width: int
    height: int
    padding: int


class PngFormat(ImageFormat):
    """Files that decode to RGB noise."""

    smallest_bytes = _SMALLEST
    largest_bytes = _LARGEST_CHUNK

    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Rows, columns, colours."""
        grid = fit(size_bytes)
        return grid.height, grid.width, 3

    def encode(self, size_bytes: int, content: ContentSource) -> memoryview:
        """Header, one chunk of stored rows, a private chunk of content that fills the file up, end."""
        grid = fit(size_bytes)
        image = memoryview(bytearray(size_bytes))
        content.fill(image, 0)
        header = struct.pack(">IIBBBBB", grid.width, grid.height, 8, 2, 0, 0, 0)
        rows_bytes = grid.height * _row_bytes(grid.width)
        image[:8] = _SIGNATURE
        end = _close_chunk(image, 8, b"IHDR", header)
        _stamp_rows(image[end + 8 : end + 8 + rows_bytes + _ZLIB_BYTES], grid)
        end = _close_chunk(image, end, b"IDAT", rows_bytes + _ZLIB_BYTES)
        if grid.padding:
            # By the case of its letters: ancillary, private, and safe to copy.
            end = _close_chunk(image, end, b"paDd", grid.padding - _CHUNK_BYTES)
        _close_chunk(image, end, b"IEND", b"")
        return image


@lru_cache(maxsize=4096)
def fit(size_bytes: int) -> PngGrid:
    """The image, about as wide as it is high, which leaves least to be filled up."""
    room = size_bytes - _FIXED_BYTES
    middle = min(math.isqrt(room // 3), _WIDEST)
    widths = range(min(_WIDEST, middle + middle // 4), middle - middle // 4 - 1, -1)
    grids = (_highest(room, max(1, width)) for width in widths)
    single = PngGrid(1, 1, room - _row_bytes(1))
    return min((grid for grid in grids if grid.height > 0), key=lambda one: one.padding, default=single)


def _highest(room: int, width: int) -> PngGrid:
    """As many rows as there is room for; what is left has room for a chunk, or is nothing."""
    height, left = divmod(room, _row_bytes(width))
    while 0 < left < _CHUNK_BYTES:
        height, left = height - 1, left + _row_bytes(width)
    return PngGrid(width, height, left)


def _row_bytes(width: int) -> int:
    return _ROW_HEAD_BYTES + 3 * width


def _stamp_rows(stream: memoryview, grid: PngGrid) -> None:
    """Make a zlib stream of what is there: a stored block each row, behind them the sum of all rows."""
    length = 1 + 3 * grid.width
    rows = np.frombuffer(stream[2:-4], dtype=np.uint8).reshape(grid.height, -1)
    head = struct.pack("<BHHB", 0, length, length ^ 0xFFFF, 0)
    rows[:, :_ROW_HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    rows[-1, 0] = 1  # the final block
    adler = 1
    for row in rows:
        adler = zlib.adler32(row[_ROW_HEAD_BYTES - 1 :].data, adler)
    stream[:2] = b"\x78\x01"
    stream[-4:] = struct.pack(">I", adler)


def _close_chunk(image: memoryview, start: int, kind: bytes, body: bytes | int) -> int:
    """Write length, kind and checksum around a body, given or already in place; where the chunk ends."""
    length = body if isinstance(body, int) else len(body)
    image[start : start + 8] = struct.pack(">I4s", length, kind)
    if not isinstance(body, int):
        image[start + 8 : start + 8 + length] = body
    crc = zlib.crc32(image[start + 4 : start + 8 + length])
    image[start + 8 + length : start + 12 + length] = struct.pack(">I", crc)
    return start + 12 + length
