"""NumPy's archive of two arrays, as DLIO has them: `x` (rows, columns, samples) and the labels `y`, int64.

One of the formats behind `FileFormat`. Invariant: uncompressed, both arrays' bytes are content at their place
in the file; each is followed by its CRC-32, so that a file is written front to back in one pass. Labels are
content, too: thousands of zeros would be the same blocks in every file.
"""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.dataset.formats.base import Checksum, Content, Extent, FileMap, Part, Pen, Plan, Read, Sample
from penstock.dataset.formats.npy import array_header, stacked_header, unstack
from penstock.dataset.formats.outbox import Outbox
from penstock.dataset.formats.raw import ReadWhole, bytes_at, damaged, made, refuse_compression
from penstock.dataset.formats.sizes import draw_shape
from penstock.dataset.formats.zipped import Member, central_directory, end_of_archive, local_header, trailer
from penstock.workload.choices import Compression

if TYPE_CHECKING:
    from penstock.storage import Source
    from penstock.workload.spec import Dataset

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
    head: bytes
    body_bytes: int

    @property
    def body_offset(self) -> int:
        return self.member.offset + len(local_header(self.member)) + len(self.head)

    @property
    def end(self) -> int:
        return self.body_offset + self.body_bytes + len(trailer(self.member, 0))


def _arrays(plan: Plan) -> tuple[_Array, _Array]:
    """Both members, `x` at the archive's begin and `y` behind it."""
    samples = _array("x.npy", 0, stacked_header(plan), plan.num_samples * plan.sample_bytes)
    labels_head = array_header("<i8", (plan.num_samples,))
    return samples, _array("y.npy", samples.end, labels_head, plan.num_samples * LABEL_BYTES)


def _array(name: str, offset: int, head: bytes, body_bytes: int) -> _Array:
    return _Array(Member(name, offset, len(head) + body_bytes), head, body_bytes)


def _stored_size(plan: Plan) -> int:
    arrays = _arrays(plan)
    directory = central_directory([(array.member, 0) for array in arrays])
    return arrays[1].end + len(directory) + len(end_of_archive(len(arrays), len(directory), arrays[1].end))


class NpzFormat(ReadWhole):
    """`numpy.load` gives `x` and `y`; stored, without compression."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        refuse_compression(dataset, *_METHODS)
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> Plan:
        """One block a file: its samples are interleaved, so none can be read alone."""
        shape = draw_shape(self._dataset, self._seed, index)
        num_samples = self._dataset.num_samples_per_file
        plan = Plan(
            name=name,
            index=index,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=num_samples,
            parts=(Part(size_bytes=None),),
        )
        return replace(plan, parts=(Part(size_bytes=_stored_size(plan)),))

    def lay(self, plan: Plan, _part: int, pen: Pen) -> None:
        """Both arrays, each with the CRC-32 behind it, then the directory."""
        entries: list[tuple[Member, int]] = []
        for array in _arrays(plan):
            pen.literal(local_header(array.member))
            pen.start_sum(Checksum.CRC32)
            pen.literal(array.head)
            pen.fill(array.body_bytes)
            crc = pen.end_sum()
            pen.literal(trailer(array.member, crc))
            entries.append((array.member, crc))
        directory, offset = central_directory(entries), pen.offset
        pen.literal(directory)
        pen.literal(end_of_archive(len(entries), len(directory), offset))

    def decode(self, plan: Plan, _found: FileMap, pieces: Sequence[Extent], samples: range) -> Sample:
        """Views of `x`, samples first."""
        array = _arrays(plan)[0]
        text = bytes_at(plan, pieces, array.body_offset, array.body_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]

    def expected(self, plan: Plan, content: Content, samples: range) -> Sample:
        """The samples out of the whole array."""
        array = _arrays(plan)[0]
        text = made(content, array.body_offset, array.body_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]


class CompressedNpzFormat(NpzFormat):
    """The same arrays, compressed: their sizes are known once they are written.

    The content of `x` begins at offset 0, that of `y` behind it, as if there were nothing around them.
    """

    def plan(self, index: int, name: str) -> Plan:
        """As stored, but for the size."""
        return replace(NpzFormat.plan(self, index, name), parts=(Part(size_bytes=None),))

    def survey(self, _plan: Plan, source: Source) -> FileMap:
        """The size, which an open file knows without a read."""
        return FileMap(blocks=((Read(offset=0, size_bytes=source.size_bytes),),))

    def reads(self, _plan: Plan, found: FileMap, samples: range) -> Iterator[Read]:
        """The whole file."""
        if samples:
            yield from found.blocks[0]

    def lay(self, plan: Plan, _part: int, pen: Pen) -> None:
        """Compress in steps; memory holds one of them."""
        outbox = Outbox()
        method = _METHODS[self._dataset.compression]
        offset = 0
        with zipfile.ZipFile(outbox, "w") as archive:
            for array in _arrays(plan):
                entry = zipfile.ZipInfo(array.member.name)
                entry.compress_type = method
                # zipfile reads the level of an entry from here, and from nowhere else when it streams.
                entry._compresslevel = self._dataset.compression_level  # type: ignore[attr-defined]  # noqa: SLF001
                with archive.open(entry, "w", force_zip64=array.member.is_large) as member:
                    member.write(array.head)
                    for text in _steps(pen.content, offset, array.body_bytes):
                        member.write(text)
                        outbox.drain(pen)
                offset += array.body_bytes
        outbox.drain(pen)

    def decode(self, plan: Plan, _found: FileMap, pieces: Sequence[Extent], samples: range) -> Sample:
        """Inflate `x`; its CRC-32 is checked on the way."""
        whole = io.BytesIO(pieces[0].content)
        head = stacked_header(plan)
        try:
            with zipfile.ZipFile(whole) as archive:
                text = memoryview(archive.read("x.npy"))
        except (zipfile.BadZipFile, zlib.error, EOFError, *_UNPACKING) as error:
            raise damaged(plan, str(error)) from error
        if text[: len(head)] != head or text.nbytes != len(head) + plan.num_samples * plan.sample_bytes:
            raise damaged(plan, "its array has another shape than planned")
        return unstack(plan, text[len(head) :])[samples.start : samples.stop : samples.step]

    def expected(self, plan: Plan, content: Content, samples: range) -> Sample:
        """The samples out of the whole array."""
        text = made(content, 0, plan.num_samples * plan.sample_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]


def _steps(content: Content, offset: int, size_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size_bytes, _STEP_BYTES)))
    for start in range(0, size_bytes, _STEP_BYTES):
        piece = buffer[: min(_STEP_BYTES, size_bytes - start)]
        content.fill(piece, offset + start)
        yield piece
