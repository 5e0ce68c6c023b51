"""JPEG and PNG images of exactly the requested size, which show noise in any decoder.

A file is one sample and is read as a whole. Its bytes follow from its size and content and do not depend on
any library, so a lossy format is verified by its bytes, without decoding.

JPEG is colored noise with about 2 bits per pixel, like photographs. Coded data is content, modified to be
valid: the only Huffman code, "0", precedes each value, which is a DC difference of 10 bits or, after 8 zeros,
an AC value of 10 bits. A block is thus 1 + 7 values of 11 bits: 11 bytes. Six blocks are a unit of 16 x 16
pixels with halved colors. Invariant: no coded byte is 0xFF, so no bytes are stuffed and sizes are exact.

PNG is RGB noise, stored without compression. Invariant: pixels are content at their offset in the file,
interrupted by the few bytes that begin each row.
"""

import io
import math
import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import UsageError
from penstock.workload.sizing import record_bytes
from penstock.workload.spec import Dataset


class ImageFormat(fp.ReadWhole):
    """One image per file; memory holds one file."""

    smallest_bytes: ClassVar[int]
    largest_bytes: ClassVar[int]

    def __init__(self, dataset: Dataset, seed: int) -> None:
        super().__init__(dataset, seed)
        name = dataset.format.value
        if dataset.num_samples_per_file != 1:
            raise UsageError(
                f"A {name} file holds one image, not {dataset.num_samples_per_file}",
                where="dataset.num_samples_per_file",
                fix="Set it to 1, or choose a format of many samples.",
            )
        if not self.smallest_bytes <= record_bytes(dataset) <= self.largest_bytes:
            raise UsageError(
                f"A {name} file cannot have {float(record_bytes(dataset)):g} bytes",
                where="dataset.record_length_bytes",
                fix=f"Choose a size from {self.smallest_bytes} to {self.largest_bytes} bytes.",
            )

    def _draw_shape(self, index: int) -> fp.SampleShape:
        """Return the shape of an image of the drawn size, or of the nearest size that an image can have."""
        drawn = round(record_bytes(self._dataset))
        if not self._dataset.record_dims:
            drawn = fp.draw_bytes(self._dataset, self._seed, index)
        size_bytes = min(max(drawn, self.smallest_bytes), self.largest_bytes)
        return fp.SampleShape(self.dims(size_bytes), "|u1", size_bytes)

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        return 1, (fp.FilePart(size_bytes=plan.sample_bytes),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Emit the whole image."""
        out.raw(self.encode(plan.sample_bytes, out.content))

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Return pixels, as Pillow decodes them."""
        if not samples:
            return np.empty((0, *plan.dims), dtype=np.uint8)
        return _pixels(plan, fp.read_range(plan, pieces, 0, plan.sample_bytes))

    def expected(self, plan: fp.FilePlan, content: Content, samples: range) -> fp.Sample:
        """Return the pixels that the generated image should have."""
        return _pixels(plan, self.encode(plan.sample_bytes, content))[samples.start : samples.stop]

    @abstractmethod
    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Return the rows, columns and colors of the image that fills this many bytes."""

    @abstractmethod
    def encode(self, size_bytes: int, content: Content) -> memoryview:
        """Return the bytes of the file."""


def _pixels(plan: fp.FilePlan, text: memoryview) -> fp.Sample:
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - only decoding needs Pillow

    try:
        with Image.open(io.BytesIO(text)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise fp.make_damage_error(plan, str(error)) from error
    if pixels.shape != plan.dims:
        raise fp.make_damage_error(plan, f"its image is {pixels.shape} instead of {plan.dims}")
    return pixels[np.newaxis]


_BLOCK_BYTES: Final = 11
_UNIT_BYTES: Final = 6 * _BLOCK_BYTES
_PAIR_BYTES: Final = 2 * _UNIT_BYTES
_MOST_UNITS: Final = 65535 // 16
_LARGEST_SEGMENT: Final = 65533
"""The most bytes that a comment holds; 4 more precede them."""
_COMMENT_HEAD_BYTES: Final = 4
_FREE_COLUMNS: Final = (3, 7, 10)
"""The bytes of a block in which no value begins: only these could be 0xFF."""


def _segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def _head(rows: int, columns: int) -> bytes:
    """Return everything before the coded data: JFIF, flat quantization, the frame, codes, the scan."""
    frame = struct.pack(">BHHB", 8, rows, columns, 3) + bytes([1, 0x22, 0, 2, 0x11, 0, 3, 0x11, 0])
    only_code = [1, *[0] * 15]  # the number of Huffman codes of each length: a single one of one bit, "0"
    scan = bytes([3, 1, 0x00, 2, 0x00, 3, 0x00, 0, 63, 0])
    return b"".join(
        (
            b"\xff\xd8",
            _segment(0xE0, b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"),
            _segment(0xDB, bytes([0, *[1] * 64])),
            _segment(0xC0, frame),
            _segment(0xC4, bytes([0x00, *only_code, 0x0A, 0x10, *only_code, 0x8A])),
            _segment(0xDA, scan),
        )
    )


_END: Final = b"\xff\xd9"
_JPEG_BYTES: Final = len(_head(16, 16)) + len(_END)


class JpegFormat(ImageFormat):
    """Files that decode to colored noise."""

    smallest_bytes = _JPEG_BYTES + _PAIR_BYTES + _COMMENT_HEAD_BYTES
    largest_bytes = 1 << 30

    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Return the rows, columns and colors of the image that fills this many bytes."""
        across, down, _ = fit_jpeg(size_bytes)
        return 16 * down, 16 * across, 3

    def encode(self, size_bytes: int, content: Content) -> memoryview:
        """Return the head, coded content, comments of content that fill up the file, and the end."""
        across, down, _ = fit_jpeg(size_bytes)
        image = memoryview(bytearray(size_bytes))
        content.fill(image, 0)
        head = _head(16 * down, 16 * across)
        coded_end = len(head) + across * down * _UNIT_BYTES
        image[: len(head)] = head
        _bend(np.frombuffer(image[len(head) : coded_end], dtype=np.uint8))
        _stamp_comments(image[coded_end : -len(_END)])
        image[-len(_END) :] = _END
        return image


@lru_cache(maxsize=4096)
def fit_jpeg(size_bytes: int) -> tuple[int, int, int]:
    """Return the units across and down of the 4:3 image with the fewest bytes of comments, and that number.

    The number of units across is even. The number of bytes is 0, or enough for the head of a comment.
    """
    room = size_bytes - _JPEG_BYTES
    middle = max(1, min(_MOST_UNITS, math.isqrt(room // _UNIT_BYTES * 3 // 4)))
    best: tuple[int, int, int] | None = None
    for down in range(max(1, middle - middle // 8), min(_MOST_UNITS, middle + middle // 8) + 1):
        pairs = min(room // (down * _PAIR_BYTES), _MOST_UNITS // 2)
        left = room - pairs * down * _PAIR_BYTES
        if 0 < left < _COMMENT_HEAD_BYTES:
            pairs, left = pairs - 1, left + down * _PAIR_BYTES
        if pairs > 0 and (best is None or left < best[2]):
            best = 2 * pairs, down, left
    return best or (2, 1, room - _PAIR_BYTES)


@lru_cache(maxsize=1)
def _code_mask() -> NDArray[np.uint8]:
    """Return a mask with zeros at the positions of codes, every 11 bits, for a step of pairs of units."""
    bits = np.ones(_BLOCK_BYTES * 8, dtype=np.uint8)
    bits[::11] = 0
    return np.tile(np.packbits(bits), 512 * _PAIR_BYTES // _BLOCK_BYTES)


def _bend(coded: NDArray[np.uint8]) -> None:
    """Turn content into valid coded data, in place."""
    mask, cancel = _code_mask(), _load_cancel()
    for start in range(0, len(coded), len(mask)):
        step = coded[start : start + len(mask)]
        step &= mask[: len(step)]
        cancel(step)


def _cancel(coded: Any) -> None:  # pragma: no cover - compiled
    """Make every second DC difference of a component the negative of the one before, by inverting its bits.

    Otherwise, the sum of thousands of differences would leave the range of DC values. A DC value is bits 1 to
    10 of a block: seven of byte 0 and three of byte 1.
    """
    for pair in range(0, coded.size, _PAIR_BYTES):
        # The luminance of a unit has four blocks. Each of its two colors has one, which inverts that of the
        # next unit.
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
    from penstock.compiling import compile_loop  # noqa: PLC0415 - a third of a second, for encoding only

    return compile_loop(_cancel, "void(Array(uint8, 1, 'C', False, aligned=True))")


def _stamp_comments(room: memoryview) -> None:
    """Divide `room` into comments by writing their heads; each comment is at least as long as a head."""
    start = 0
    while start < room.nbytes:
        left = room.nbytes - start - _COMMENT_HEAD_BYTES
        body = min(left, _LARGEST_SEGMENT)
        if 0 < left - body < _COMMENT_HEAD_BYTES:
            body -= _COMMENT_HEAD_BYTES
        room[start : start + _COMMENT_HEAD_BYTES] = struct.pack(">BBH", 0xFF, 0xFE, body + 2)
        start += _COMMENT_HEAD_BYTES + body


_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK_BYTES: Final = 12
_LARGEST_CHUNK: Final = 2**31 - 1
_ROW_HEAD_BYTES: Final = 6
"""The head of a stored zlib block (final or not, its length twice), and the row's filter, none."""
_ZLIB_BYTES: Final = 6
_WIDEST: Final = (0xFFFF - 1) // 3
_PNG_BYTES: Final = len(_SIGNATURE) + (_CHUNK_BYTES + 13) + (_CHUNK_BYTES + _ZLIB_BYTES) + _CHUNK_BYTES


class PngFormat(ImageFormat):
    """Files that decode to RGB noise."""

    smallest_bytes = _PNG_BYTES + _ROW_HEAD_BYTES + 3 + _CHUNK_BYTES
    largest_bytes = _LARGEST_CHUNK

    def dims(self, size_bytes: int) -> tuple[int, int, int]:
        """Return the rows, columns and colors of the image that fills this many bytes."""
        width, height, _ = fit_png(size_bytes)
        return height, width, 3

    def encode(self, size_bytes: int, content: Content) -> memoryview:
        """Return the header, one chunk of stored rows, a private chunk that fills the file, and the end."""
        width, height, padding = fit_png(size_bytes)
        image = memoryview(bytearray(size_bytes))
        content.fill(image, 0)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        rows_bytes = height * (_ROW_HEAD_BYTES + 3 * width)
        image[:8] = _SIGNATURE
        end = _close_chunk(image, 8, b"IHDR", header)
        _stamp_rows(image[end + 8 : end + 8 + rows_bytes + _ZLIB_BYTES], width, height)
        end = _close_chunk(image, end, b"IDAT", rows_bytes + _ZLIB_BYTES)
        if padding:
            # The case of the letters says that the chunk is ancillary, private, and safe to copy.
            end = _close_chunk(image, end, b"paDd", padding - _CHUNK_BYTES)
        _close_chunk(image, end, b"IEND", b"")
        return image


@lru_cache(maxsize=4096)
def fit_png(size_bytes: int) -> tuple[int, int, int]:
    """Return the width and height of the nearly square image that leaves the fewest bytes, and their number.

    That number is 0, or enough for a chunk.
    """
    room = size_bytes - _PNG_BYTES
    middle = min(math.isqrt(room // 3), _WIDEST)
    best: tuple[int, int, int] | None = None
    for width in range(min(_WIDEST, middle + middle // 4), max(0, middle - middle // 4 - 1), -1):
        row_bytes = _ROW_HEAD_BYTES + 3 * width
        height, left = divmod(room, row_bytes)
        while 0 < left < _CHUNK_BYTES:
            height, left = height - 1, left + row_bytes
        if height > 0 and (best is None or left < best[2]):
            best = width, height, left
    return best or (1, 1, room - _ROW_HEAD_BYTES - 3)


def _stamp_rows(stream: memoryview, width: int, height: int) -> None:
    """Turn the existing bytes into a zlib stream: one stored block per row, then the checksum of all rows."""
    length = 1 + 3 * width
    rows = np.frombuffer(stream[2:-4], dtype=np.uint8).reshape(height, -1)
    head = struct.pack("<BHHB", 0, length, length ^ 0xFFFF, 0)
    rows[:, :_ROW_HEAD_BYTES] = np.frombuffer(head, dtype=np.uint8)
    rows[-1, 0] = 1  # the final block
    adler = 1
    for row in rows:
        adler = zlib.adler32(row[_ROW_HEAD_BYTES - 1 :].data, adler)
    stream[:2] = b"\x78\x01"
    stream[-4:] = struct.pack(">I", adler)


def _close_chunk(image: memoryview, start: int, kind: bytes, body: bytes | int) -> int:
    """Write length, kind and checksum around a body, given or already in place; return the chunk's end."""
    length = body if isinstance(body, int) else len(body)
    image[start : start + 8] = struct.pack(">I4s", length, kind)
    if not isinstance(body, int):
        image[start + 8 : start + 8 + length] = body
    crc = zlib.crc32(image[start + 4 : start + 8 + length])
    image[start + 8 + length : start + 12 + length] = struct.pack(">I", crc)
    return start + 12 + length
