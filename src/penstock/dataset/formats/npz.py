"""NumPy archives of two arrays, as DLIO writes them: `x` (rows, columns, samples) and the labels `y`, int64.

Uncompressed, the bytes of both arrays are content at their offset in the file, and the CRC-32 follows each
array (a ZIP "data descriptor"), so a file is written in one pass. The length of every ZIP record depends on
sizes and offsets only, so the file's size is known beforehand. Members of 4 GiB and more use ZIP64. Labels
are content, too: thousands of zeros would deduplicate across files.
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

from isal import isal_zlib

from penstock.dataset.formats import format_base, npy
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_objects import GrowingBuffer
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.spec import Dataset

_STREAMED: Final = 0x08
_LARGE: Final = 0xFFFFFFFF
_DATE_1980: Final = 0x21
_PLAIN_VERSION: Final = 20
_ZIP64_VERSION: Final = 45
_SUM_AT: Final = 16
"""Where the sum of a member stands in its entry of the directory."""


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
    """What precedes a member; its sum and sizes follow it."""
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
    """What follows a member: its sum and sizes."""
    layout = "<4sIQQ" if member.is_large else "<4sIII"
    return struct.pack(layout, b"PK\x07\x08", crc, member.size_bytes, member.size_bytes)


def central_directory(entries: Sequence[tuple[Member, int]]) -> bytes:
    """The directory of members and their sums."""
    return _directory([directory_entry(member) for member, _ in entries], [crc for _, crc in entries])


def directory_entry(member: Member) -> tuple[bytes, bytes]:
    """What stands before and after the sum of a member in the directory: equal in all files of a layout."""
    wide = [member.size_bytes] * 2 * member.is_large + [member.offset] * (member.offset >= _LARGE)
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size_bytes = min(member.size_bytes, _LARGE)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", member.version, member.version, _STREAMED, 0, 0, _DATE_1980),
        *(0, size_bytes, size_bytes, len(member.name), len(extra)),
        *(0, 0, 0, 0, min(member.offset, _LARGE)),
    )
    return fixed[:_SUM_AT], fixed[_SUM_AT + 4 :] + member.name.encode("ascii") + extra


def _directory(entries: Sequence[tuple[bytes, bytes]], sums: Sequence[int]) -> bytes:
    return b"".join(
        before + crc.to_bytes(4, "little") + after for (before, after), crc in zip(entries, sums, strict=True)
    )


def end_of_archive(num_members: int, directory_bytes: int, directory_offset: int) -> bytes:
    """What ends an archive and says where its directory is."""
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
"""What zipfile and its decompressors raise for damaged members."""
_STEP_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Array:
    """One member: where in the stored archive its parts are."""

    member: Member
    header: bytes
    head: bytes
    body_bytes: int
    entry: tuple[bytes, bytes]

    @property
    def body_offset(self) -> int:
        return self.member.offset + len(self.header) + len(self.head)

    @property
    def end(self) -> int:
        return self.body_offset + self.body_bytes + len(trailer(self.member, 0))


def _arrays(plan: fp.FilePlan) -> tuple[_Array, _Array]:
    """Both members, `x` at the beginning of the archive and `y` after it."""
    return _arrays_of(plan.dims, plan.dtype, plan.num_samples, plan.sample_bytes)


@lru_cache(maxsize=4096)
def _arrays_of(
    dims: tuple[int, ...], dtype: str, num_samples: int, sample_bytes: int
) -> tuple[_Array, _Array]:
    head = npy.array_header(dtype, (*dims, num_samples))
    samples = _array("x.npy", 0, head, num_samples * sample_bytes)
    labels_head = npy.array_header("<i8", (num_samples,))
    return samples, _array("y.npy", samples.end, labels_head, num_samples * LABEL_BYTES)


def _array(name: str, offset: int, head: bytes, body_bytes: int) -> _Array:
    member = Member(name, offset, len(head) + body_bytes)
    return _Array(member, local_header(member), head, body_bytes, directory_entry(member))


class NpzFormat(npy.StackedFormat):
    """`numpy.load` gives `x` and `y`; stored, without compression."""

    compressions = tuple(_METHODS)

    def _content_offset(self, plan: fp.FilePlan) -> int:
        return _arrays(plan)[0].body_offset

    def _file_bytes(self, plan: fp.FilePlan) -> int | None:
        arrays = _arrays(plan)
        end = arrays[1].end
        directory = _directory([array.entry for array in arrays], (0, 0))
        return end + len(directory) + len(end_of_archive(len(arrays), len(directory), end))

    def check_sums(self, plan: fp.FilePlan, pieces: Sequence[fp.Extent]) -> None:
        """Compare the CRC-32 of `x` with that of the archive, as numpy does when it loads one."""
        member = _arrays(plan)[0].member
        start = len(local_header(member))
        text = format_base.read_range(plan, pieces, start, member.size_bytes)
        behind = format_base.read_range(plan, pieces, start + member.size_bytes, len(trailer(member, 0)))
        if trailer(member, isal_zlib.crc32(text)) != behind:
            raise format_base.make_damage_error(plan, f"the CRC-32 of {member.name} is wrong")

    def emit(self, plan: fp.FilePlan, _part: int, out: fp.FormatSink) -> None:
        """Both arrays, each with the CRC-32 behind it, then the directory."""
        arrays, sums, behind = _arrays(plan), [], b""
        for array in arrays:
            # As few pieces as there can be: of small files they cost more than their bytes.
            out.raw(behind + array.header)
            out.start_sum(fp.Checksum.CRC32)
            out.raw(array.head)
            out.fill(array.body_bytes)
            sums.append(out.end_sum())
            behind = trailer(array.member, sums[-1])
        directory, offset = _directory([array.entry for array in arrays], sums), out.offset + len(behind)
        out.raw(behind + directory + end_of_archive(len(arrays), len(directory), offset))


class CompressedNpzFormat(NpzFormat):
    """The same arrays, compressed: their sizes are known once they are written.

    The content of `x` begins at offset 0 and that of `y` after it, as if nothing else were in the file.
    """

    def _content_offset(self, plan: fp.FilePlan) -> int:
        del plan
        return 0

    def _file_bytes(self, plan: fp.FilePlan) -> None:
        del plan

    def survey(self, _plan: fp.FilePlan, source: Source) -> fp.FileSurvey:
        """The size, which an open file knows without a read."""
        return fp.FileSurvey(blocks=((fp.RangeRead(offset=0, size_bytes=source.size_bytes),),))

    def reads(self, _plan: fp.FilePlan, survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """The whole file."""
        if samples:
            yield from survey.blocks[0]

    def emit(self, plan: fp.FilePlan, _part: int, out: fp.FormatSink) -> None:
        """Compress in steps; memory holds one of them."""
        buffer = GrowingBuffer()
        method = _METHODS[self._dataset.compression]
        offset = 0
        with zipfile.ZipFile(buffer, "w") as archive:
            for array in _arrays(plan):
                entry = zipfile.ZipInfo(array.member.name)
                entry.compress_type = method
                # zipfile reads the level of an entry from here, and from nowhere else when it streams.
                entry._compresslevel = self._dataset.compression_level  # type: ignore[attr-defined]  # noqa: SLF001
                with archive.open(entry, "w", force_zip64=array.member.is_large) as member:
                    member.write(array.head)
                    for text in _steps(out.content, offset, array.body_bytes):
                        member.write(text)
                        buffer.drain(out)
                offset += array.body_bytes
        buffer.drain(out)

    def check_sums(self, plan: fp.FilePlan, pieces: Sequence[fp.Extent]) -> None:
        """Nothing: inflating checks them."""

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Inflate `x`; its CRC-32 is checked on the way."""
        whole = io.BytesIO(pieces[0].content)
        head = npy.stacked_header(plan)
        try:
            with zipfile.ZipFile(whole) as archive:
                text = memoryview(archive.read("x.npy"))
        except (zipfile.BadZipFile, zlib.error, EOFError, *_UNPACKING) as error:
            raise format_base.make_damage_error(plan, str(error)) from error
        if text[: len(head)] != head or text.nbytes != len(head) + plan.num_samples * plan.sample_bytes:
            raise format_base.make_damage_error(plan, "its array has another shape than planned")
        return npy.unstack(plan, text[len(head) :], samples)


def _steps(content: fp.ContentSource, offset: int, size_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size_bytes, _STEP_BYTES)))
    for start in range(0, size_bytes, _STEP_BYTES):
        piece = buffer[: min(_STEP_BYTES, size_bytes - start)]
        content.fill(piece, offset + start)
        yield piece


def open_npz(dataset: Dataset, seed: int) -> NpzFormat:
    """Stored or compressed archives, whichever the data set asks for."""
    is_stored = dataset.compression is Compression.NONE
    return NpzFormat(dataset, seed) if is_stored else CompressedNpzFormat(dataset, seed)
