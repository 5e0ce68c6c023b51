"""Where the records of a `torch.save` archive lie: its ZIP directory, read by ranges and without the records.

Python's own reader insists on checksums that archives need not have. Invariant: no record is said to lie
outside of its archive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.errors import DataDamaged

ReadRange = Callable[[int, int], bytes | bytearray]
"""(offset, size) -> so many bytes of the archive, exactly."""

_END: Final = struct.Struct("<IHHHHIIH")
_LOCATOR64: Final = struct.Struct("<IIQI")
_END64: Final = struct.Struct("<IQHHIIQQQQ")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_LONGEST_END: Final = _END.size + 0xFFFF + _LOCATOR64.size
_FULL: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record: where its local header begins, and its length. `is_stored`: not compressed.

    `crc32` is 0 where the writer did not compute it.
    """

    name: str
    header_offset: int
    size_bytes: int
    is_stored: bool
    crc32: int


def read_directory(read: ReadRange, size_bytes: int, where: str) -> Mapping[str, ZipRecord]:
    """All records by name; `DataDamaged` where the archive is cut short or was never one."""
    try:
        begin, length = _find_directory(read, size_bytes)
        if begin + length > size_bytes:
            raise _damaged("its directory lies outside of it", where)
        return dict(_entries(read(begin, length), size_bytes))
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise _damaged(str(error), where) from error


def data_offset(read: ReadRange, record: ZipRecord, where: str) -> int:
    """Where a record's bytes begin."""
    header = _LOCAL.unpack(read(record.header_offset, _LOCAL.size))
    if header[0] != 0x04034B50:
        raise _damaged(f"no record begins where {record.name} should", where)
    return record.header_offset + _LOCAL.size + int(header[9]) + int(header[10])


def _damaged(what: str, where: str) -> DataDamaged:
    return DataDamaged(
        f"This is no whole archive of torch.save: {what}",
        where=where,
        fix="It was cut short, or another program wrote it.",
    )


def _find_directory(read: ReadRange, size_bytes: int) -> tuple[int, int]:
    tail_offset = max(size_bytes - _LONGEST_END, 0)
    tail = bytes(read(tail_offset, size_bytes - tail_offset))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise ValueError("its end is missing")
    end = _END.unpack_from(tail, at)
    length, begin = int(end[5]), int(end[6])
    if at >= _LOCATOR64.size and tail[at - _LOCATOR64.size : at].startswith(b"PK\x06\x07"):
        end64_offset = int(_LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2])
        if end64_offset + _END64.size <= size_bytes:
            end64 = _END64.unpack(read(end64_offset, _END64.size))
            length, begin = int(end64[8]), int(end64[9])
    return begin, length


def _entries(directory: bytes | bytearray, archive_bytes: int) -> list[tuple[str, ZipRecord]]:
    entries, at = [], 0
    while at < len(directory):
        fields = _CENTRAL.unpack_from(directory, at)
        if fields[0] != 0x02014B50:
            raise ValueError("its directory is garbled")
        name_end = at + _CENTRAL.size + fields[10]
        name = bytes(directory[at + _CENTRAL.size : name_end]).decode()
        extra = bytes(directory[name_end : name_end + fields[11]])
        size, header_offset = _long_fields(extra, stored=fields[8], size=fields[9], offset=fields[16])
        if header_offset + _LOCAL.size + size > archive_bytes:
            raise ValueError(f"{name} lies outside of it")
        entries.append(
            (name, ZipRecord(name, header_offset, size, is_stored=fields[4] == 0, crc32=fields[7]))
        )
        at = name_end + fields[11] + fields[12]
    return entries


def _long_fields(extra: bytes, *, stored: int, size: int, offset: int) -> tuple[int, int]:
    """Size and position of a record, from the ZIP64 field where they are beyond 4 GiB."""
    numbers = _zip64_numbers(extra)
    if size == _FULL:
        size = numbers.pop(0)
    if stored == _FULL:
        numbers.pop(0)
    if offset == _FULL:
        offset = numbers.pop(0)
    return size, offset


def _zip64_numbers(extra: bytes) -> list[int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
        at += 4 + length
    return []
