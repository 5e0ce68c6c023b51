"""Base classes and helpers of formats: plans of files, sizes of samples, arrays over the bytes read.

Nothing here copies a sample if one of the ranges holds it: arrays are views.

The size of a file's samples is drawn by (seed, file index) alone, exactly to the byte. The draw, so that
others can repeat it: u = (h + 1/2) / 2**64, where h is the little-endian BLAKE2b digest of 8 bytes of
"penstock sample size SEED INDEX"; the size is mean + stdev x the normal quantile of u, rounded to whole
elements, and never below one element or what the format needs at least.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist
from typing import ClassVar, Final

import numpy as np

from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_objects import GatheredRanges
from penstock.errors import StorageError, UsageError
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.spec import Dataset

_KNOWN_LAYOUTS: Final = 4096
_SEARCHED_ROWS: Final = 1 << 16
"""How many row counts `near_square` tries at most: a few hundred microseconds, once a size."""


class BaseFormat(ABC):
    """What formats share: the data set and seed, and the plan of a file of equal samples."""

    compressions: ClassVar[tuple[Compression, ...]] = ()
    """What the format can compress by."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        if dataset.compression not in (Compression.NONE, *self.compressions):
            names = ", ".join(choice.value for choice in (Compression.NONE, *self.compressions))
            raise UsageError(
                f"Files of format {dataset.format.value} cannot be compressed by {dataset.compression.value}",
                where="dataset.compression",
                fix=f"Choose from: {names}.",
            )
        self._dataset = dataset
        self._seed = seed
        self._common_shape: SampleShape | None = None
        self._layouts: dict[SampleShape, tuple[int, tuple[fp.FilePart, ...]]] = {}

    def plan(self, index: int, name: str) -> fp.FilePlan:
        """File `index`, with samples of the shape drawn for it."""
        shape = self._common_shape or self._draw_shape(index)
        if not self._dataset.record_length_bytes_stdev:
            self._common_shape = shape
        block_samples, parts = self._layouts.get(shape) or self._lay_out(shape)
        return fp.FilePlan(
            name=name,
            index=index,
            num_samples=self._dataset.num_samples_per_file,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=block_samples,
            parts=parts,
        )

    def _lay_out(self, shape: SampleShape) -> tuple[int, tuple[fp.FilePart, ...]]:
        """The blocks and parts of files with such samples: the same, whichever file it is."""
        num_samples = self._dataset.num_samples_per_file
        plan = fp.FilePlan(
            name="",
            index=0,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=num_samples,
            parts=(),
        )
        plan = replace(plan, block_samples=self._block_samples(plan))
        layout = plan.block_samples, self._parts(plan)
        if len(self._layouts) < _KNOWN_LAYOUTS:
            self._layouts[shape] = layout
        return layout

    def _draw_shape(self, index: int) -> SampleShape:
        return draw_shape(self._dataset, self._seed, index)

    def _block_samples(self, plan: fp.FilePlan) -> int:
        """How many samples in a row are read together: all of a file."""
        return plan.num_samples

    def _parts(self, plan: fp.FilePlan) -> tuple[fp.FilePart, ...]:
        return (fp.FilePart(size_bytes=self._file_bytes(plan)),)

    @abstractmethod
    def _file_bytes(self, plan: fp.FilePlan) -> int | None:
        """The size of a file; None where only its encoder knows."""

    def expected(self, plan: fp.FilePlan, content: fp.ContentSource, samples: range) -> fp.Sample:
        """The content of samples that follow each other from offset 0 on."""
        text = make_content(content, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))


class ComputedLayout(BaseFormat):
    """A format whose layout follows from the plan alone, without a look into the stored file."""

    def survey(self, _plan: fp.FilePlan, _source: Source) -> fp.FileSurvey:
        """Nothing, without a read."""
        return fp.COMPUTED


class ReadWhole(ComputedLayout):
    """A format whose readers take whole files."""

    def reads(self, plan: fp.FilePlan, _survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """The whole file, whichever samples are wanted."""
        size_bytes = plan.parts[0].size_bytes
        assert size_bytes is not None
        if samples:
            yield fp.RangeRead(offset=0, size_bytes=size_bytes)


def read_range(
    plan: fp.FilePlan, pieces: Sequence[fp.Extent] | GatheredRanges, offset: int, size_bytes: int
) -> memoryview:
    """A range of the file from the pieces read of it: a view of one piece, joined bytes across several."""
    gathered = pieces if isinstance(pieces, GatheredRanges) else GatheredRanges(pieces)
    piece = gathered.bytes_from(offset)[:size_bytes]
    if piece.nbytes == size_bytes:
        return piece
    joined = bytearray(piece)
    while piece.nbytes and len(joined) < size_bytes:
        piece = gathered.bytes_from(offset + len(joined))[: size_bytes - len(joined)]
        joined += piece
    if len(joined) < size_bytes:
        raise StorageError(
            f"Byte {offset + len(joined)} of {plan.name} was not read",
            uri=plan.name,
            fix="Pass all pieces that the format's reads() asked for.",
        )
    return memoryview(joined)


def merge_ranges(reads: Iterable[fp.RangeRead]) -> tuple[fp.RangeRead, ...]:
    """Ranges of part 0 in the order of the file, neighbours as one."""
    ranges: list[fp.RangeRead] = []
    for read in sorted(reads, key=lambda read: read.offset):
        if ranges and read.offset == ranges[-1].offset + ranges[-1].size_bytes:
            last = ranges.pop()
            ranges.append(fp.RangeRead(offset=last.offset, size_bytes=last.size_bytes + read.size_bytes))
        else:
            ranges.append(read)
    return tuple(ranges)


def make_damage_error(plan: fp.FilePlan, why: str) -> StorageError:
    """The error of a file that cannot be decoded."""
    return StorageError(
        f"{plan.name} is damaged: {why}",
        uri=plan.name,
        fix="Verify the data set; delete what is damaged and generate again.",
    )


def as_array(plan: fp.FilePlan, text: memoryview, num_samples: int = 1) -> fp.Sample:
    """`text` as that many samples, first axis."""
    return np.frombuffer(text, dtype=plan.dtype).reshape(num_samples, *plan.dims)


def make_content(content: fp.ContentSource, offset: int, size_bytes: int) -> memoryview:
    """Content in memory of its own."""
    buffer = memoryview(bytearray(size_bytes))
    content.fill(buffer, offset)
    return buffer


@dataclass(frozen=True, slots=True)
class SampleShape:
    """One sample: `dims` elements of the numpy type `dtype`, decoded from `size_bytes` of its file."""

    dims: tuple[int, ...]
    dtype: str
    size_bytes: int


def element_type(dataset: Dataset) -> np.dtype[np.generic]:
    """The type of a sample's elements, little-endian; only numbers, for which any bytes are valid."""
    kind = np.dtype(dataset.record_element_type).newbyteorder("<")
    if kind.kind not in "iufc":
        raise UsageError(
            f"Samples of {dataset.record_element_type} cannot be filled with arbitrary bytes",
            where="dataset.record_element_type",
            fix="Choose a number type: uint8, int32, float32, ...",
        )
    return kind


def draw_bytes(dataset: Dataset, seed: int, index: int) -> int:
    """The size of the samples of file `index`; not yet rounded to elements, and possibly below 1."""
    mean, stdev = dataset.record_length_bytes, dataset.record_length_bytes_stdev
    if not stdev:
        return round(mean)
    digest = blake2b(f"penstock sample size {seed} {index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    # The largest digests round to 1.0, where the quantile is infinite.
    return round(NormalDist(float(mean), float(stdev)).inv_cdf(min(uniform, 1 - 2**-53)))


def draw_shape(dataset: Dataset, seed: int, index: int, *, elements_multiple: int = 1) -> SampleShape:
    """The shape of file `index`: the dimensions asked for, or two nearly equal ones of the size drawn.

    Their product is the size exactly, where DLIO squares the whole root and loses up to two rows.
    """
    kind = element_type(dataset)
    dims = dataset.record_dims
    if not dims:
        step_bytes = kind.itemsize * elements_multiple
        rows, columns = near_square(max(1, round(draw_bytes(dataset, seed, index) / step_bytes)))
        dims = (rows * elements_multiple, columns)
    return SampleShape(dims, kind.str, math.prod(dims) * kind.itemsize)


@lru_cache(maxsize=4096)
def near_square(number: int) -> tuple[int, int]:
    """Two factors of `number`, the first at most the second and as close to it as a search finds."""
    top = math.isqrt(number)
    candidates = np.arange(max(1, top - _SEARCHED_ROWS + 1), top + 1, dtype=np.int64)
    divisors = candidates[number % candidates == 0]
    rows = int(divisors[-1]) if divisors.size else 1
    return rows, number // rows
