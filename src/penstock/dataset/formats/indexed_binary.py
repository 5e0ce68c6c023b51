"""Raw records one after the other, and two index files beside them: offsets and sizes, little-endian uint64.

Both `indexed_binary` and `mmap_indexed_binary`, which differ in how others open them. Invariant: offset i is
the sum of all sizes before it, over the whole file; records are content at their place in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.dataset.formats.format_base import (
    ComputedLayout,
    as_array,
    make_content,
    read_range,
    refuse_compression,
)
from penstock.dataset.formats.format_protocol import (
    ContentSource,
    Extent,
    FilePart,
    FilePlan,
    FileSink,
    FileSurvey,
    RangeRead,
    Sample,
)
from penstock.dataset.formats.sample_shape import draw_shape

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset

_ENTRY_BYTES: Final = 8
_RECORDS, _OFFSETS, _SIZES = range(3)
_STEP: Final = 1 << 16
"""How many entries of an index are made at a time."""


class IndexedFormat(ComputedLayout):
    """A file of records with its `.off.idx` and `.sz.idx`; each record can be read alone."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        refuse_compression(dataset)
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> FilePlan:
        """Three parts: records, offsets, sizes."""
        shape = draw_shape(self._dataset, self._seed, index)
        num_samples = self._dataset.num_samples_per_file
        index_bytes = num_samples * _ENTRY_BYTES
        return FilePlan(
            name=name,
            index=index,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=1,
            parts=(
                FilePart(size_bytes=num_samples * shape.size_bytes),
                FilePart(pattern="{}.off.idx", size_bytes=index_bytes),
                FilePart(pattern="{}.sz.idx", size_bytes=index_bytes),
            ),
        )

    def emit(self, plan: FilePlan, part: int, out: FileSink) -> None:
        """Content, or an index in steps."""
        if part == _RECORDS:
            out.fill(plan.num_samples * plan.sample_bytes)
            return
        for start in range(0, plan.num_samples, _STEP):
            numbers = np.arange(start, min(start + _STEP, plan.num_samples), dtype="<u8")
            entries = (
                numbers * plan.sample_bytes if part == _OFFSETS else np.full_like(numbers, plan.sample_bytes)
            )
            out.raw(entries.data.cast("B"))

    def reads(self, plan: FilePlan, _found: FileSurvey, samples: range) -> Iterator[RangeRead]:
        """Both indexes whole, as readers load them, and the records: neighbours in one range."""
        if not samples:
            return
        for part in (_OFFSETS, _SIZES):
            yield RangeRead(part=part, offset=0, size_bytes=plan.num_samples * _ENTRY_BYTES)
        yield RangeRead(offset=samples.start * plan.sample_bytes, size_bytes=len(samples) * plan.sample_bytes)

    def decode(self, plan: FilePlan, _found: FileSurvey, pieces: Sequence[Extent], samples: range) -> Sample:
        """Views of the records."""
        text = read_range(plan, pieces, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))

    def expected(self, plan: FilePlan, content: ContentSource, samples: range) -> Sample:
        """The records' content."""
        text = make_content(content, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))
