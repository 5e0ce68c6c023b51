"""The bytes of a `torch.save` archive around its payloads: a ZIP of stored records, made without torch.

`begin_record` is what stands before a record's bytes, `end_record` what follows them, `directory` the end of
the archive. Invariant: a size or position beyond 4 GiB is told in ZIP64 fields, and only such a one.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")

_FULL = 0xFFFFFFFF
_PADDING_ID = b"FB"
"""The extra field that torch itself pads its headers with."""
_FLAGS = 0x0808
"""Bit 3: sums and sizes follow the record, as the payload's are unknown before. Bit 11: names are UTF-8."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished record of an archive, as its directory lists it."""

    name: str
    header_offset: int
    size_bytes: int
    crc32: int = 0


def begin_record(name: str, offset: int, *, align: int = 1) -> bytes:
    """The local header of a record that starts at `offset`; its bytes begin at a multiple of `align`."""
    encoded = name.encode()
    extra = _padding(-(offset + _LOCAL.size + len(encoded)) % align, align)
    header = _LOCAL.pack(0x04034B50, 0, 0, _FLAGS, 0, 0, 0, 0, 0, len(encoded), len(extra))
    return header + encoded + extra


def _padding(num_bytes: int, align: int) -> bytes:
    """An extra field `num_bytes` long; one that is too short to be a field grows by `align`."""
    if num_bytes == 0:
        return b""
    while num_bytes < 4:
        num_bytes += align
    return _PADDING_ID + struct.pack("<H", num_bytes - 4) + bytes(num_bytes - 4)


def end_record(size_bytes: int, crc32: int = 0) -> bytes:
    """The descriptor that follows a record's bytes."""
    sizes = "QQ" if size_bytes >= _FULL else "II"
    return struct.pack(f"<II{sizes}", 0x08074B50, crc32, size_bytes, size_bytes)


def small_record(name: str, content: bytes, offset: int) -> tuple[bytes, Record]:
    """A whole record, checksum included, and its entry for the directory."""
    crc32 = zlib.crc32(content)
    body = begin_record(name, offset) + content + end_record(len(content), crc32)
    return body, Record(name, offset, len(content), crc32)


def directory(records: Sequence[Record], offset: int) -> bytes:
    """The central directory of an archive, which begins at `offset`, and the archive's end."""
    entries = b"".join(_central_entry(record) for record in records)
    num_records, end_offset = len(records), offset + len(entries)
    end64 = _END64.pack(
        0x06064B50, _END64.size - 12, 0x031E, 45, 0, 0, num_records, num_records, len(entries), offset
    )
    locator = _LOCATOR64.pack(0x07064B50, 0, end_offset, 1)
    short = [
        min(number, full) for number, full in ((num_records, 0xFFFF), (len(entries), _FULL), (offset, _FULL))
    ]
    end = _END.pack(0x06054B50, 0, 0, short[0], short[0], short[1], short[2], 0)
    return entries + end64 + locator + end


def _central_entry(record: Record) -> bytes:
    encoded = record.name.encode()
    long_fields = [number for number in (record.size_bytes,) * 2 if number >= _FULL]
    if record.header_offset >= _FULL:
        long_fields.append(record.header_offset)
    extra = (
        struct.pack(f"<HH{len(long_fields)}Q", 1, 8 * len(long_fields), *long_fields) if long_fields else b""
    )
    size, header_offset = min(record.size_bytes, _FULL), min(record.header_offset, _FULL)
    fields = (0x02014B50, 0, 0, _FLAGS, 0, 0, 0, record.crc32, size, size, len(encoded), len(extra))
    return _CENTRAL.pack(*fields, 0, 0, 0, 0, header_offset) + encoded + extra
