"""The records of a ZIP archive of stored members, written front to back. Pure: sizes and sums to bytes.

A member's CRC-32 follows its bytes (a "data descriptor"), and sizes of 4 GiB and more use the ZIP64 records.
Invariant: a record's length depends on sizes and offsets, never on a sum: archives are measured beforehand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_STREAMED: Final = 0x08
_LARGE: Final = 0xFFFFFFFF
_DATE_1980: Final = 0x21
_PLAIN_VERSION: Final = 20
_ZIP64_VERSION: Final = 45


@dataclass(frozen=True, slots=True)
class Member:
    """One stored member: where its local header begins, and how many bytes follow the header."""

    name: str
    offset: int
    size_bytes: int

    @property
    def is_large(self) -> bool:
        """Whether its size needs 64 bits."""
        return self.size_bytes >= _LARGE

    @property
    def version(self) -> int:
        """The ZIP version that a reader must know."""
        return _ZIP64_VERSION if self.is_large or self.offset >= _LARGE else _PLAIN_VERSION


def local_header(member: Member) -> bytes:
    """What stands before a member: neither sum nor sizes, they follow."""
    sizes = (_LARGE, _LARGE) if member.is_large else (0, 0)
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if member.is_large else b""
    version = _ZIP64_VERSION if member.is_large else _PLAIN_VERSION
    fixed = struct.pack(
        "<4sHHHHHIIIHH",
        *(b"PK\x03\x04", version, _STREAMED, 0, 0, _DATE_1980),
        *(0, *sizes, len(member.name), len(extra)),
    )
    return fixed + member.name.encode("ascii") + extra


def trailer(member: Member, crc: int) -> bytes:
    """What stands behind a member: its sum and sizes."""
    layout = "<4sIQQ" if member.is_large else "<4sIII"
    return struct.pack(layout, b"PK\x07\x08", crc, member.size_bytes, member.size_bytes)


def central_directory(entries: Sequence[tuple[Member, int]]) -> bytes:
    """The directory of members and their sums."""
    return b"".join(_directory_entry(member, crc) for member, crc in entries)


def _directory_entry(member: Member, crc: int) -> bytes:
    wide = [member.size_bytes] * 2 * member.is_large + [member.offset] * (member.offset >= _LARGE)
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size_bytes = min(member.size_bytes, _LARGE)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", member.version, member.version, _STREAMED, 0, 0, _DATE_1980),
        *(crc, size_bytes, size_bytes, len(member.name), len(extra)),
        *(0, 0, 0, 0, min(member.offset, _LARGE)),
    )
    return fixed + member.name.encode("ascii") + extra


def end_of_archive(num_members: int, directory_bytes: int, directory_offset: int) -> bytes:
    """What closes an archive and tells where its directory is."""
    wide = b""
    if directory_offset >= _LARGE:
        record = struct.pack(
            "<4sQHHIIQQQQ",
            *(b"PK\x06\x06", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0),
            *(num_members, num_members, directory_bytes, directory_offset),
        )
        locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, directory_offset + directory_bytes, 1)
        wide = record + locator
    return wide + struct.pack(
        "<4sHHHHIIH",
        *(b"PK\x05\x06", 0, 0, num_members, num_members, directory_bytes),
        *(min(directory_offset, _LARGE), 0),
    )
