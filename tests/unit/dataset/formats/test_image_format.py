"""Images byte by byte, read by decoders that are written here from the formats' own descriptions."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.dataset.content import Content, Reduction
from penstock.dataset.formats import images
from penstock.dataset.formats.images import JpegFormat, PngFormat, fit_jpeg, fit_png
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

JPEG = JpegFormat(Dataset(format=DataFormat.JPEG), 1)
PNG = PngFormat(Dataset(format=DataFormat.PNG), 1)
CONTENT = Content(3, 4)

png_sizes = st.integers(PngFormat.smallest_bytes, 40_000)
jpeg_sizes = st.integers(JpegFormat.smallest_bytes, 200_000)


def _chunks(image: bytes) -> Iterator[tuple[bytes, bytes]]:
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    start = 8
    while start < len(image):
        length, kind = struct.unpack_from(">I4s", image, start)
        body = image[start + 8 : start + 8 + length]
        assert len(body) == length
        (crc,) = struct.unpack_from(">I", image, start + 8 + length)
        assert crc == zlib.crc32(kind + body)
        yield kind, body
        start += length + 12


@example(size=PngFormat.smallest_bytes)
@given(size=png_sizes)
def test_a_png_is_its_header_its_rows_and_perhaps_one_chunk_of_padding(size: int) -> None:
    image = bytes(PNG.encode(size, CONTENT))
    assert len(image) == size
    kinds = [kind for kind, _ in _chunks(image)]
    assert kinds in ([b"IHDR", b"IDAT", b"IEND"], [b"IHDR", b"IDAT", b"paDd", b"IEND"])
    chunks = dict(_chunks(image))
    rows, columns, colours = PNG.dims(size)
    assert chunks[b"IHDR"] == struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    pixels = zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == rows * (1 + colours * columns)
    assert set(pixels[:: 1 + colours * columns]) == {0}  # each row's filter: none
    assert chunks[b"IEND"] == b""


@given(size=st.integers(20_000, 10**7))
def test_a_png_wastes_little_on_padding_and_is_no_stripe(size: int) -> None:
    width, height, padding = fit_png(size)
    assert padding < max(200, size // 200)
    assert 0.4 < width / height < 2.5


@given(size=st.integers(JpegFormat.smallest_bytes, 10**7))
def test_a_jpeg_wastes_little_on_comments_and_is_no_stripe(size: int) -> None:
    across, down, padding = fit_jpeg(size)
    assert across % 2 == 0
    assert 66 * across * down + padding == size - (JpegFormat.smallest_bytes - 132 - 4)
    assert padding == 0 or padding >= 4
    if size > 50_000:
        assert padding < size // 50
        assert 0.7 < across / down < 2.5


@dataclass(frozen=True)
class Segment:
    marker: int
    body: bytes


def _segments(image: bytes) -> tuple[list[Segment], bytes]:
    """All segments of a JPEG file in order, and its coded data."""
    assert image[:2] == b"\xff\xd8"
    assert image[-2:] == b"\xff\xd9"
    segments, coded, start = [], b"", 2
    while start < len(image) - 2:
        assert image[start] == 0xFF
        (length,) = struct.unpack_from(">H", image, start + 2)
        segments.append(Segment(image[start + 1], image[start + 4 : start + 2 + length]))
        start += 2 + length
        if segments[-1].marker == 0xDA:
            end = image.index(b"\xff", start)
            coded, start = image[start:end], end
    assert start == len(image) - 2
    return segments, coded


def _values(coded: bytes) -> np.ndarray:
    """The 8 values of each block: a code "0" and 10 bits each, as JPEG reads them: below 512 is negative."""
    bits = np.unpackbits(np.frombuffer(coded, dtype=np.uint8)).reshape(-1, 11)
    assert not bits[:, 0].any()
    values = bits[:, 1:].astype(np.int64) @ (1 << np.arange(9, -1, -1))
    return np.where(values < 512, values - 1023, values).reshape(-1, 8)


@example(size=JpegFormat.smallest_bytes)
@given(size=jpeg_sizes)
def test_a_jpeg_is_made_of_whole_segments_and_whole_blocks(size: int) -> None:
    image = bytes(JPEG.encode(size, CONTENT))
    assert len(image) == size
    segments, coded = _segments(image)
    assert [segment.marker for segment in segments[:5]] == [0xE0, 0xDB, 0xC0, 0xC4, 0xDA]
    assert {segment.marker for segment in segments[5:]} <= {0xFE}
    rows, columns, _ = JPEG.dims(size)
    assert segments[2].body[:6] == struct.pack(">BHHB", 8, rows, columns, 3)
    assert len(coded) == rows * columns // 256 * 66
    assert np.abs(_values(coded)).min() >= 512
    assert np.abs(_values(coded)).max() <= 1023


@pytest.mark.parametrize("size", [5000, 322_957])
def test_dc_values_never_leave_the_range_of_a_baseline_image(size: int) -> None:
    _, coded = _segments(bytes(JPEG.encode(size, CONTENT)))
    differences = _values(coded)[:, 0].reshape(-1, 6)
    for component in (differences[:, :4].reshape(-1), differences[:, 4], differences[:, 5]):
        levels = np.cumsum(component)
        assert np.abs(levels).max() <= 1023
        assert not levels[1::2].any()


def test_comments_that_need_several_segments_fill_the_file_to_the_byte() -> None:
    for padding in (4, 5, 65_536, 65_537, 65_538, 65_540, 65_541, 131_074, 131_077, 200_000):
        room = memoryview(bytearray(padding))
        images._stamp_comments(room)
        start = 0
        while start < padding:
            marker, length = struct.unpack_from(">HH", room, start)
            assert marker == 0xFFFE
            assert length >= 2
            start += 2 + length
        assert start == padding


@pytest.mark.parametrize("kind", [JPEG, PNG])
def test_images_of_other_content_share_no_row(kind: JpegFormat | PngFormat) -> None:
    one, other = (bytes(kind.encode(30_000, Content(3, name))) for name in (1, 2))
    head = 700
    assert not {one[at : at + 16] for at in range(head, 29_000)} & {
        other[at : at + 16] for at in range(head, 29_000, 16)
    }


@pytest.mark.parametrize("kind", [JPEG, PNG])
def test_images_of_compressible_content_compress_and_are_still_images(kind: JpegFormat | PngFormat) -> None:
    content = Content(3, 4, Reduction(compressible=0.5))
    image = bytes(kind.encode(100_000, content))
    assert len(image) == 100_000
    assert 0.4 < len(zlib.compress(image, 1)) / len(image) < 0.7
    if kind is JPEG:
        assert len(_segments(image)[1]) % 132 == 0
    else:
        assert len(list(_chunks(image))) >= 3
