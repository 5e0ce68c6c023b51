"""What stands before and behind a tensor's bytes in a `.distcp` file, so that torch reads them as its own.

An item is `prefix + payload + suffix`: together the archive that `torch.save` could have written of one
contiguous tensor. Invariant: items placed by `item_start` have their payload at a multiple of 4 KiB, so it
goes to and from the device directly; the gaps before them are zeros.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.checkpoint.dcp.archive import Record, begin_record, directory, end_record, small_record
from penstock.checkpoint.dtypes import ElementType, element_type

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAYLOAD_ALIGNMENT = 4096
_PREFIX_ALIGNMENT = 64
"""As torch aligns tensors inside its archives; it also makes the prefixes of most shapes equally long."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a payload. All lengths are known before a byte is written."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes
    """With no CRC-32 for the payload (0), which torch accepts; `with_crc32` has one for stricter readers."""
    _records: tuple[Record, ...]

    @property
    def item_bytes(self) -> int:
        """Of the whole item."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)

    def with_crc32(self, crc32: int) -> bytes:
        """The suffix for a payload whose CRC-32 is known; as long as `suffix`."""
        *small, payload = self._records
        summed = Record(payload.name, payload.header_offset, payload.size_bytes, crc32)
        return _suffix((*small, summed), len(self.prefix))


@lru_cache(maxsize=65536)
def envelope(dtype: str, shape: tuple[int, ...]) -> Envelope:
    """The envelope of a contiguous tensor of this element type and shape."""
    kind = element_type(dtype)
    payload_bytes = math.prod(shape) * kind.size_bytes
    prefix, records = b"", []
    for name, content in (
        ("data.pkl", tensor_pickle(kind, shape)),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        record_bytes, record = small_record(f"archive/{name}", content, len(prefix))
        prefix += record_bytes
        records.append(record)
    payload = Record("archive/data/0", len(prefix), payload_bytes)
    prefix += begin_record(payload.name, len(prefix), align=_PREFIX_ALIGNMENT)
    ordered = (*records, payload)
    return Envelope(prefix, payload_bytes, _suffix(ordered, len(prefix)), ordered)


def item_start(position: int, prefix_bytes: int) -> int:
    """The first place at or behind `position` where an item's payload is aligned."""
    return position + -(position + prefix_bytes) % PAYLOAD_ALIGNMENT


def _suffix(records: tuple[Record, ...], prefix_bytes: int) -> bytes:
    payload = records[-1]
    closing = end_record(payload.size_bytes, payload.crc32)
    return closing + directory(records, prefix_bytes + payload.size_bytes + len(closing))


def tensor_pickle(kind: ElementType, shape: Sequence[int]) -> bytes:
    """The pickle that rebuilds one contiguous tensor from storage 0, byte for byte as torch writes it."""
    num_elements = math.prod(shape)
    typed = kind.typed_storage is not None
    storage = f"ctorch\n{kind.typed_storage}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    storage_length = num_elements if typed else num_elements * kind.size_bytes
    memo = 5

    def remembered() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes([memo - 1])

    parts = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v%d\nq\x00((" % (2 if typed else 3),
        b"X\x07\x00\x00\x00storageq\x01" + storage.encode() + b"q\x02",
        b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04",
        _pickled_int(storage_length) + b"t" + remembered() + b"QK\x00",
        _pickled_tuple(shape, remembered),
        _pickled_tuple(contiguous_strides(shape), remembered),
        b"\x89ccollections\nOrderedDict\n" + remembered() + b")R" + remembered(),
    ]
    if not typed:
        parts.append(f"ctorch\n{kind.name}\n".encode() + remembered())
    parts.append(b"t" + remembered() + b"R" + remembered() + b".")
    return b"".join(parts)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major tensor; as torch counts them where a dimension is 0."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _pickled_tuple(numbers: Sequence[int], remembered: Callable[[], bytes]) -> bytes:
    if not numbers:
        return b")"
    items = b"".join(_pickled_int(number) for number in numbers)
    if len(numbers) <= 3:
        return items + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1] + remembered()
    return b"(" + items + b"t" + remembered()


def _pickled_int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + struct.pack("<B", number)
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded
