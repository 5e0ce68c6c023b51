"""Base classes and helpers of formats: computed layouts, reading whole files, arrays over the bytes read.

Nothing here copies a sample if one of the ranges holds it: arrays are views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.formats.file_objects import GatheredRanges
from penstock.dataset.formats.format_protocol import COMPUTED, Extent, FilePlan, FileSurvey, RangeRead
from penstock.errors import StorageError, UsageError
from penstock.workload.choices import Compression

if TYPE_CHECKING:
    from penstock.dataset.formats.format_protocol import ContentSource, Sample
    from penstock.storage import Source
    from penstock.workload.spec import Dataset


class ComputedLayout:
    """A format whose layout follows from the plan alone: there is nothing to find out in a stored file."""

    def survey(self, _plan: FilePlan, _source: Source) -> FileSurvey:
        """Nothing, without a read."""
        return COMPUTED


class ReadWhole(ComputedLayout):
    """A format whose readers take whole files."""

    def reads(self, plan: FilePlan, _found: FileSurvey, samples: range) -> Iterator[RangeRead]:
        """The whole file, whichever samples are wanted."""
        size_bytes = plan.parts[0].size_bytes
        assert size_bytes is not None
        if samples:
            yield RangeRead(offset=0, size_bytes=size_bytes)


def refuse_compression(dataset: Dataset, *offered: Compression) -> None:
    """Say what can be had instead of a compression that a format does not know."""
    if dataset.compression not in (Compression.NONE, *offered):
        names = ", ".join(choice.value for choice in (Compression.NONE, *offered))
        raise UsageError(
            f"Files of format {dataset.format.value} cannot be compressed by {dataset.compression.value}",
            where="dataset.compression",
            fix=f"Choose of: {names}.",
        )


def read_range(plan: FilePlan, pieces: Sequence[Extent], offset: int, size_bytes: int) -> memoryview:
    """That range of the file as the pieces hold it: a view of one piece, joined bytes across several."""
    return gather_range(plan, GatheredRanges(pieces), offset, size_bytes)


def gather_range(plan: FilePlan, gathered: GatheredRanges, offset: int, size_bytes: int) -> memoryview:
    """As `read_range`, for many ranges of the same pieces."""
    found = gathered.bytes_from(offset)[:size_bytes]
    if found.nbytes == size_bytes:
        return found
    joined = bytearray(found)
    while found.nbytes and len(joined) < size_bytes:
        found = gathered.bytes_from(offset + len(joined))[: size_bytes - len(joined)]
        joined += found
    if len(joined) < size_bytes:
        raise StorageError(
            f"Byte {offset + len(joined)} of {plan.name} was not read",
            uri=plan.name,
            fix="Hand over all pieces that the format's reads() asked for.",
        )
    return memoryview(joined)


def merge_ranges(reads: Iterable[RangeRead]) -> tuple[RangeRead, ...]:
    """Ranges of part 0 in the order of the file, neighbours as one."""
    ranges: list[RangeRead] = []
    for read in sorted(reads, key=lambda one: one.offset):
        if ranges and read.offset == ranges[-1].offset + ranges[-1].size_bytes:
            last = ranges.pop()
            ranges.append(RangeRead(offset=last.offset, size_bytes=last.size_bytes + read.size_bytes))
        else:
            ranges.append(read)
    return tuple(ranges)


def make_damage_error(plan: FilePlan, why: str) -> StorageError:
    """The error of a file that cannot be decoded."""
    return StorageError(
        f"{plan.name} is damaged: {why}",
        uri=plan.name,
        fix="Verify the data set; delete what is damaged and generate again.",
    )


def as_array(plan: FilePlan, text: memoryview, num_samples: int = 1) -> Sample:
    """`text` as that many samples, first axis."""
    return np.frombuffer(text, dtype=plan.dtype).reshape(num_samples, *plan.dims)


def make_content(content: ContentSource, offset: int, size_bytes: int) -> memoryview:
    """Content in memory of its own."""
    buffer = memoryview(bytearray(size_bytes))
    content.fill(buffer, offset)
    return buffer
