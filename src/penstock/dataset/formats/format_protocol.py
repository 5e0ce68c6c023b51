"""The base of data file formats: plans of files, sizes of samples, and what each format must support.

Connects a data set's specification with everything that writes, reads or verifies files. A `FilePlan` is a
pure function of (data set, seed, index), so each file is determined independently; only `survey` opens a
stored file. A sample that is contained in one range is not copied: arrays are views.

The size of a file's samples is drawn from (seed, file index) alone, exact to the byte. Other programs can
reproduce the draw: u = (h + 1/2) / 2**64, where h is the little-endian BLAKE2b digest of 8 bytes of
"penstock sample size SEED INDEX"; the size is mean + stdev x the normal quantile of u, rounded to whole
elements, and never below one element or the format's minimum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import StorageError, UsageError
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.spec import Dataset

_KNOWN_LAYOUTS: Final = 4096
_SEARCHED_ROWS: Final = 1 << 16
"""The largest number of row counts that `near_square` tries, which takes a few hundred microseconds for each
size.
"""

Sample = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One object of a data file: the file itself or an index of it.

    A size that only an encoder knows is None.
    """

    pattern: str = "{}"
    size_bytes: int | None

    def key(self, name: str) -> str:
        """Return the key of this part of the file `name`."""
        return self.pattern.replace("{}", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One data file before it exists. Its samples have `sample_bytes` each, and decode to `dims` of `dtype`.

    `block_samples` consecutive samples are read together: shuffling reorders blocks, then samples within a
    window.
    """

    name: str
    index: int
    num_samples: int
    dims: tuple[int, ...]
    dtype: str
    sample_bytes: int
    block_samples: int
    parts: tuple[FilePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRead:
    """A range of one part that training requests from storage."""

    part: int = 0
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes that were read from a stored file, and their offset in it."""

    offset: int
    content: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSurvey:
    """Facts from the stored file alone: its size, `known` bytes, the ranges of blocks, a library's view."""

    size_bytes: int = 0
    known: tuple[Extent, ...] = ()
    blocks: tuple[tuple[RangeRead, ...], ...] = ()
    opened: object = None


COMPUTED = FileSurvey()  # for formats whose layout is computed: there is nothing to find out


class FileFormat(ABC):
    """A kind of data file for one data set and seed.

    Pure except for `survey`; any thread may call any method.
    """

    compressions: ClassVar[tuple[Compression, ...]] = ()
    """The compressions that the format supports."""

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
        self._elements_multiple = 1
        self._common_shape: SampleShape | None = None
        self._layouts: dict[SampleShape, FilePlan] = {}

    def plan(self, index: int, name: str) -> FilePlan:
        """Return the plan of file `index`, to be stored under `name`.

        Indexes are unique over training and evaluation.
        """
        shape = self._common_shape or self._draw_shape(index)
        if not self._dataset.record_length_bytes_stdev:
            self._common_shape = shape
        layout = self._layouts.get(shape)
        if layout is None:
            # The same for all files with samples of this shape.
            num_samples = self._dataset.num_samples_per_file
            layout = FilePlan(
                name="",
                index=0,
                num_samples=num_samples,
                dims=shape.dims,
                dtype=shape.dtype,
                sample_bytes=shape.size_bytes,
                block_samples=num_samples,
                parts=(),
            )
            block_samples, parts = self._lay_out(layout)
            layout = replace(layout, block_samples=block_samples, parts=parts)
            if len(self._layouts) < _KNOWN_LAYOUTS:
                self._layouts[shape] = layout
        return replace(layout, name=name, index=index)

    def _draw_shape(self, index: int) -> SampleShape:
        return draw_shape(self._dataset, self._seed, index, elements_multiple=self._elements_multiple)

    @abstractmethod
    def _lay_out(self, plan: FilePlan) -> tuple[int, tuple[FilePart, ...]]:
        """Return the samples per block and the parts of a file, which depend on the format."""

    @abstractmethod
    def emit(self, plan: FilePlan, part: int, out: FormatSink) -> None:
        """Emit the bytes of one part to `out`, front to back."""

    def survey(self, _plan: FilePlan, _source: Source) -> FileSurvey:
        """Read what `reads` and `decode` must know about the stored file. Called once for each opened file.

        Reads nothing if the layout follows from the plan alone.
        """
        return COMPUTED

    @abstractmethod
    def reads(self, plan: FilePlan, survey: FileSurvey, samples: range) -> Iterator[RangeRead]:
        """Return the ranges to read for these samples, in order, in addition to what `survey` has read."""

    @abstractmethod
    def decode(self, plan: FilePlan, survey: FileSurvey, pieces: Sequence[Extent], samples: range) -> Sample:
        """Decode these samples, along the first axis, from the pieces of part 0 that `reads` named."""

    def check_sums(self, plan: FilePlan, pieces: Sequence[Extent]) -> None:  # noqa: B027 - most have none
        """Raise `StorageError` for a wrong checksum that readers detect but `decode` does not."""

    def expected(self, plan: FilePlan, content: Content, samples: range) -> Sample:
        """Return the samples that `decode` must return.

        By default, they are consecutive content from offset 0 onward.
        """
        text = make_content(content, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))


class ReadWhole(FileFormat):
    """A format whose readers take whole files."""

    def reads(self, plan: FilePlan, _survey: FileSurvey, samples: range) -> Iterator[RangeRead]:
        """Yield the whole file, whichever samples are wanted."""
        size_bytes = plan.parts[0].size_bytes
        assert size_bytes is not None
        if samples:
            yield RangeRead(offset=0, size_bytes=size_bytes)


class GatheredRanges:
    """Pieces of a file that were read, in any order; finds the bytes at an offset."""

    def __init__(self, pieces: Iterable[Extent]) -> None:
        self._pieces = sorted(pieces, key=lambda one: one.offset)
        self._starts = [piece.offset for piece in self._pieces]

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """Return a view of a piece, or a copy joined from several; raise `OSError` for a byte not read."""
        joined = bytearray()
        while True:
            at, piece = offset + len(joined), memoryview(b"")
            for number in range(bisect_right(self._starts, at) - 1, -1, -1):
                piece = memoryview(self._pieces[number].content)[at - self._starts[number] :]
                if piece.nbytes:
                    break
            piece = piece[: size_bytes - len(joined)]
            if piece.nbytes == size_bytes:
                return piece
            joined += piece
            if len(joined) == size_bytes:
                return memoryview(joined)
            if not piece.nbytes:
                # Never a zero instead: decoding needs only bytes that were read.
                raise OSError(f"byte {at} was not read")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that `read` returns."""
        buffer[:] = self.read(offset, buffer.nbytes)


def read_range(
    plan: FilePlan, pieces: Sequence[Extent] | GatheredRanges, offset: int, size_bytes: int
) -> memoryview:
    """Return a range of the file from the pieces that were read of it, as in `GatheredRanges.read`."""
    gathered = pieces if isinstance(pieces, GatheredRanges) else GatheredRanges(pieces)
    try:
        return gathered.read(offset, size_bytes)
    except OSError as error:
        raise StorageError(
            f"{plan.name}: {error}",
            uri=plan.name,
            fix="Pass all pieces that the format's reads() asked for.",
        ) from error


def merge_ranges(reads: Iterable[RangeRead]) -> tuple[RangeRead, ...]:
    """Return the ranges of part 0 in file order, with adjacent ranges merged."""
    ranges: list[RangeRead] = []
    for read in sorted(reads, key=lambda read: read.offset):
        if ranges and read.offset == ranges[-1].offset + ranges[-1].size_bytes:
            last = ranges.pop()
            ranges.append(RangeRead(offset=last.offset, size_bytes=last.size_bytes + read.size_bytes))
        else:
            ranges.append(read)
    return tuple(ranges)


def make_damage_error(plan: FilePlan, why: str) -> StorageError:
    """Return the error for a file that cannot be decoded."""
    return StorageError(
        f"{plan.name} is damaged: {why}",
        uri=plan.name,
        fix="Verify the data set; delete what is damaged and generate again.",
    )


def as_array(plan: FilePlan, text: memoryview, num_samples: int = 1) -> Sample:
    """Return `text` as an array of `num_samples` samples along the first axis."""
    return np.frombuffer(text, dtype=plan.dtype).reshape(num_samples, *plan.dims)


def make_content(content: Content, offset: int, size_bytes: int) -> memoryview:
    """Return content in newly allocated memory."""
    buffer = memoryview(bytearray(size_bytes))
    content.fill(buffer, offset)
    return buffer


@dataclass(frozen=True, slots=True)
class SampleShape:
    """The shape of a sample: `dims` elements of the numpy type `dtype`, from `size_bytes` of its file."""

    dims: tuple[int, ...]
    dtype: str
    size_bytes: int


def draw_bytes(dataset: Dataset, seed: int, index: int) -> int:
    """Return the size of the samples of file `index`, not yet rounded to elements, and possibly below 1."""
    mean, stdev = dataset.record_length_bytes, dataset.record_length_bytes_stdev
    if not stdev:
        return round(mean)
    digest = blake2b(f"penstock sample size {seed} {index}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    # The largest digests round to 1.0, for which the quantile is infinite.
    return round(NormalDist(float(mean), float(stdev)).inv_cdf(min(uniform, 1 - 2**-53)))


def draw_shape(dataset: Dataset, seed: int, index: int, *, elements_multiple: int = 1) -> SampleShape:
    """Return the shape of samples in file `index`: the requested dimensions, or two nearly equal ones.

    The product of the two is exactly the drawn size. DLIO instead squares the integer root, and loses up to
    two rows.
    """
    # Little-endian numbers, for which any bytes are valid.
    kind = np.dtype(dataset.record_element_type).newbyteorder("<")
    if kind.kind not in "iufc":
        raise UsageError(
            f"Samples of {dataset.record_element_type} cannot be filled with arbitrary bytes",
            where="dataset.record_element_type",
            fix="Choose a number type: uint8, int32, float32, ...",
        )
    dims = dataset.record_dims
    if not dims:
        step_bytes = kind.itemsize * elements_multiple
        rows, columns = near_square(max(1, round(draw_bytes(dataset, seed, index) / step_bytes)))
        dims = (rows * elements_multiple, columns)
    return SampleShape(dims, kind.str, math.prod(dims) * kind.itemsize)


@lru_cache(maxsize=4096)
def near_square(number: int) -> tuple[int, int]:
    """Return two factors of `number`.

    The first is at most the second, and as close to it as a limited search finds.
    """
    top = math.isqrt(number)
    candidates = np.arange(max(1, top - _SEARCHED_ROWS + 1), top + 1, dtype=np.int64)
    divisors = candidates[number % candidates == 0]
    rows = int(divisors[-1]) if divisors.size else 1
    return rows, number // rows
