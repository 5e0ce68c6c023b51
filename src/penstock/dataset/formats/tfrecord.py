"""TFRecord files whose records, like DLIO's, are each a `tf.Example` with the features `size` and `image`.

A record is a length and its masked CRC-32C, then the example and its masked CRC-32C. Invariant: images are
content at their offset in the file, and all records of a file have the same length, so any record can be
found by its number.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import google_crc32c
import numpy as np

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import Checksum, FormatSink

_LENGTH_BYTES: Final = 12
_SUM_BYTES: Final = 4
_DELIMITED: Final = 2


class TFRecordFormat(fp.ReadWhole):
    """Files that TensorFlow and DALI read, front to back."""

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        size_bytes = plan.num_samples * record_bytes(plan.sample_bytes)
        return plan.num_samples, (fp.FilePart(size_bytes=size_bytes),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Emit record by record."""
        length, head = record_head(plan.sample_bytes)
        for _ in range(plan.num_samples):
            out.raw(length)
            out.start_sum(Checksum.CRC32C)
            out.raw(head)
            out.fill(plan.sample_bytes)
            out.raw(struct.pack("<I", mask(out.end_sum())))

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Decode the images; the lengths and checksums of their records are verified."""
        gathered, images = fp.GatheredRanges(pieces), []
        length, head = record_head(plan.sample_bytes)
        size_bytes = record_bytes(plan.sample_bytes)
        for sample in samples:
            record = fp.read_range(plan, gathered, sample * size_bytes, size_bytes)
            example = record[_LENGTH_BYTES:-_SUM_BYTES]
            (stored_sum,) = struct.unpack("<I", record[-_SUM_BYTES:])
            if record[:_LENGTH_BYTES] != length or stored_sum != mask(google_crc32c.value(bytes(example))):
                raise fp.make_damage_error(plan, f"record {sample} does not match its checksums")
            images.append(fp.as_array(plan, example[len(head) :]))
        return np.concatenate([np.empty((0, *plan.dims), dtype=plan.dtype), *images])

    def expected(self, plan: fp.FilePlan, content: Content, samples: range) -> fp.Sample:
        """Return the images' content."""
        before = sum(map(len, record_head(plan.sample_bytes)))
        starts = (before + sample * record_bytes(plan.sample_bytes) for sample in samples)
        images = [fp.as_array(plan, fp.make_content(content, start, plan.sample_bytes)) for start in starts]
        return np.concatenate([np.empty((0, *plan.dims), dtype=plan.dtype), *images])


def mask(crc: int) -> int:
    """Mask a CRC as TFRecord does, so that checksums of data that contains checksums remain effective."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record_bytes(image_bytes: int) -> int:
    """Return the size of one whole record."""
    length, head = record_head(image_bytes)
    return len(length) + len(head) + image_bytes + _SUM_BYTES


@lru_cache(maxsize=4096)
def record_head(image_bytes: int) -> tuple[bytes, bytes]:
    """Return the bytes before an image: the length with its checksum, and the example up to the first byte.

    The image is the example's last field, so only the checksum follows it.
    """
    size = _field(1, _field(1, b"size") + _field(2, _field(3, _field(1, _varint(image_bytes)))))
    image = _field(1, _field(1, b"", image_bytes), image_bytes)  # Feature.bytes_list, BytesList.value
    entry = _field(1, _field(1, b"image") + _field(2, image, image_bytes), image_bytes)
    head = _field(1, size + entry, image_bytes)
    length = struct.pack("<Q", len(head) + image_bytes)
    return length + struct.pack("<I", mask(google_crc32c.value(length))), head


def _field(number: int, body: bytes, more_bytes: int = 0) -> bytes:
    """Return a length-delimited field, whose body continues for `more_bytes`."""
    return _varint(number << 3 | _DELIMITED) + _varint(len(body) + more_bytes) + body


def _varint(number: int) -> bytes:
    text = bytearray()
    while number > 0x7F:
        text.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*text, number])
