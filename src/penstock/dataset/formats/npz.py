"""NumPy files as DLIO writes them: single arrays (a header and content), or archives of two arrays.

All samples of a file are one array (rows, columns, samples), called `x` in archives, which also have the
labels `y`, int64. Uncompressed, the bytes of both arrays are content at their offset in the file, and the
CRC-32 follows each array (a ZIP "data descriptor"), so a file is written in one pass. The length of every ZIP
record depends only on sizes and offsets, so the file's size is known in advance. Members of 4 GiB or more use
ZIP64. Labels are content, too, because thousands of zeros would deduplicate across files.
"""

import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np
from isal import isal_zlib

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_objects import GrowingBuffer
from penstock.dataset.formats.file_writer import Checksum, FormatSink
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.spec import Dataset

_STREAMED: Final = 0x08
_LARGE: Final = 0xFFFFFFFF
_DATE_1980: Final = 0x21
_PLAIN_VERSION: Final = 20
_ZIP64_VERSION: Final = 45


class StackedFormat(fp.ReadWhole):
    """A format with all samples of a file in one array, along its last axis; a file is one block."""

    def _content_offset(self, _plan: fp.FilePlan) -> int:
        """Return the offset of the array's content in the file."""
        return 0

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Return views of the array, samples first."""
        text = fp.read_range(plan, pieces, self._content_offset(plan), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text, samples)

    def expected(self, plan: fp.FilePlan, content: Content, samples: range) -> fp.Sample:
        """Return the samples within the whole array."""
        text = fp.make_content(content, self._content_offset(plan), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text, samples)


class NpyFormat(StackedFormat):
    """Files from which `numpy.load` returns an array of (rows, columns, samples)."""

    def _content_offset(self, plan: fp.FilePlan) -> int:
        return len(stacked_header(plan))

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        size_bytes = len(stacked_header(plan)) + plan.num_samples * plan.sample_bytes
        return plan.num_samples, (fp.FilePart(size_bytes=size_bytes),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Emit a header, then content."""
        out.raw(stacked_header(plan))
        out.fill(plan.num_samples * plan.sample_bytes)


@lru_cache(maxsize=4096)
def array_header(dtype: str, dims: tuple[int, ...]) -> bytes:
    """Return a header of version 1.0, padded so that the array begins at a multiple of 64 bytes."""
    shape = f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padding = -(10 + len(text) + 1) % 64
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(text) + padding + 1)
        + text.encode()
        + b" " * padding
        + b"\n"
    )


def stacked_header(plan: fp.FilePlan) -> bytes:
    """Return the header of an array of all samples of a file."""
    return array_header(plan.dtype, (*plan.dims, plan.num_samples))


def unstack(plan: fp.FilePlan, text: memoryview, samples: range) -> fp.Sample:
    """Return views of samples in an array that has them along its last axis."""
    stacked = np.frombuffer(text, dtype=plan.dtype).reshape(*plan.dims, plan.num_samples)
    return np.moveaxis(stacked, -1, 0)[samples.start : samples.stop : samples.step]


@dataclass(frozen=True, slots=True)
class Member:
    """One stored member: the offset of its local header, and how many bytes follow the header.

    Of these bytes, `head` is the header of an array, and the rest is content.
    """

    name: str
    offset: int
    size_bytes: int
    head: bytes = b""

    @property
    def is_large(self) -> bool:
        """True if the size needs 64 bits."""
        return self.size_bytes >= _LARGE


def local_header(member: Member) -> bytes:
    """Return the record before a member. The member's checksum and sizes follow after it."""
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
    """Return the record after a member: its checksum and sizes."""
    layout = "<4sIQQ" if member.is_large else "<4sIII"
    return struct.pack(layout, b"PK\x07\x08", crc, member.size_bytes, member.size_bytes)


def directory_entry(member: Member, crc: int) -> bytes:
    """Return a member's entry in the directory, with its checksum."""
    wide = [member.size_bytes] * 2 * member.is_large + [member.offset] * (member.offset >= _LARGE)
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = _ZIP64_VERSION if wide else _PLAIN_VERSION
    size_bytes = min(member.size_bytes, _LARGE)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", version, version, _STREAMED, 0, 0, _DATE_1980),
        *(crc, size_bytes, size_bytes, len(member.name), len(extra)),
        *(0, 0, 0, 0, min(member.offset, _LARGE)),
    )
    return fixed + member.name.encode("ascii") + extra


def end_of_archive(num_members: int, directory_bytes: int, directory_offset: int) -> bytes:
    """Return the end of an archive, which says where its directory is."""
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


LABEL_BYTES: Final = 8
_METHODS: Final[Mapping[Compression, int]] = MappingProxyType(
    {
        Compression.ZIP: zipfile.ZIP_DEFLATED,
        Compression.GZIP: zipfile.ZIP_DEFLATED,
        Compression.BZ2: zipfile.ZIP_BZIP2,
        Compression.XZ: zipfile.ZIP_LZMA,
    }
)
_UNPACKING: Final = (lzma.LZMAError, OSError, KeyError, ValueError, NotImplementedError, RuntimeError)
"""The exceptions that zipfile and its decompressors raise for damaged members."""
_STEP_BYTES: Final = 1 << 20
_INFLATED_BYTES: Final = 1 << 12


def _members(plan: fp.FilePlan) -> tuple[Member, Member]:
    """Return `x` at the beginning of the archive and the labels `y` after it."""
    head = stacked_header(plan)
    samples = Member("x.npy", 0, len(head) + plan.num_samples * plan.sample_bytes, head)
    end = len(local_header(samples)) + samples.size_bytes + len(trailer(samples, 0))
    head = array_header("<i8", (plan.num_samples,))
    return samples, Member("y.npy", end, len(head) + plan.num_samples * LABEL_BYTES, head)


class NpzFormat(StackedFormat):
    """Files without compression, from which `numpy.load` returns `x` and `y`."""

    def _content_offset(self, plan: fp.FilePlan) -> int:
        samples, _ = _members(plan)
        return len(local_header(samples)) + len(samples.head)

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        members = _members(plan)
        labels = members[1]
        end = labels.offset + len(local_header(labels)) + labels.size_bytes + len(trailer(labels, 0))
        directory_bytes = sum(len(directory_entry(member, 0)) for member in members)
        size_bytes = end + directory_bytes + len(end_of_archive(len(members), directory_bytes, end))
        return plan.num_samples, (fp.FilePart(size_bytes=size_bytes),)

    def check_sums(self, plan: fp.FilePlan, pieces: Sequence[fp.Extent]) -> None:
        """Compare the CRC-32 of `x` with that in the archive, as numpy does when it loads an archive."""
        member = _members(plan)[0]
        start = len(local_header(member))
        text = fp.read_range(plan, pieces, start, member.size_bytes)
        behind = fp.read_range(plan, pieces, start + member.size_bytes, len(trailer(member, 0)))
        if trailer(member, isal_zlib.crc32(text)) != behind:
            raise fp.make_damage_error(plan, f"the CRC-32 of {member.name} is wrong")

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Emit both arrays, each followed by its CRC-32, then the directory."""
        members, directory, behind = _members(plan), b"", b""
        for member in members:
            # As few pieces as possible: in small files, pieces cost more than their bytes.
            out.raw(behind + local_header(member))
            out.start_sum(Checksum.CRC32)
            out.raw(member.head)
            out.fill(member.size_bytes - len(member.head))
            crc = out.end_sum()
            behind = trailer(member, crc)
            directory += directory_entry(member, crc)
        end = end_of_archive(len(members), len(directory), out.offset + len(behind))
        out.raw(behind + directory + end)


class CompressedNpzFormat(StackedFormat):
    """Compressed archives of `x` and `y`, whose sizes are known only once they are written.

    The content of `x` begins at offset 0 and that of `y` follows it, as if nothing else were in the file.
    """

    compressions = tuple(_METHODS)

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        return plan.num_samples, (fp.FilePart(size_bytes=None),)

    def survey(self, _plan: fp.FilePlan, source: Source) -> fp.FileSurvey:
        """Find the size, which takes no read from an open file."""
        return fp.FileSurvey(blocks=((fp.RangeRead(offset=0, size_bytes=source.size_bytes),),))

    def reads(self, _plan: fp.FilePlan, survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """Yield the whole file."""
        if samples:
            yield from survey.blocks[0]

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Compress in steps, so that only a part of the file is in memory."""
        packed, offset = GrowingBuffer(), 0
        with zipfile.ZipFile(packed, "w") as archive:
            for member in _members(plan):
                entry = zipfile.ZipInfo(member.name)
                entry.compress_type = _METHODS[self._dataset.compression]
                # zipfile reads the level of an entry from here, and from nothing else when it streams.
                entry._compresslevel = self._dataset.compression_level  # type: ignore[attr-defined]  # noqa: SLF001
                with archive.open(entry, "w", force_zip64=member.is_large) as file:
                    file.write(member.head)
                    end = offset + member.size_bytes - len(member.head)
                    for start in range(offset, end, _STEP_BYTES):
                        file.write(fp.make_content(out.content, start, min(_STEP_BYTES, end - start)))
                        packed.drain(out)
                offset = end
        packed.drain(out)

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Inflate `x`; its CRC-32 is checked on the way."""
        whole = io.BytesIO(pieces[0].content)
        head, inflated = stacked_header(plan), bytearray()
        size_bytes = len(head) + plan.num_samples * plan.sample_bytes
        try:
            with zipfile.ZipFile(whole) as archive, archive.open("x.npy") as file:
                # The archive may lie about its size, and bzip2 unpacks a whole read at once.
                while len(inflated) <= size_bytes and (piece := file.read(_INFLATED_BYTES)):
                    inflated += piece
        except (zipfile.BadZipFile, zlib.error, EOFError, *_UNPACKING) as error:
            raise fp.make_damage_error(plan, str(error)) from error
        text = memoryview(inflated).toreadonly()
        if text[: len(head)] != head or text.nbytes != size_bytes:
            raise fp.make_damage_error(plan, "its array has a different shape than planned")
        return unstack(plan, text[len(head) :], samples)


def open_npz(dataset: Dataset, seed: int) -> StackedFormat:
    """Return stored or compressed archives, as the data set requests."""
    is_stored = dataset.compression is Compression.NONE
    return NpzFormat(dataset, seed) if is_stored else CompressedNpzFormat(dataset, seed)
