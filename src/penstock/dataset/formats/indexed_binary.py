"""Raw records one after the other, and two index files beside them: offsets and sizes, little-endian uint64.

Both `indexed_binary` and `mmap_indexed_binary`, which differ in how others open them. Invariant: offset i is
the sum of all sizes before it, over the whole file; records are content at their place in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.dataset.formats.format_base import ComputedLayout, as_array, bytes_at, made, refuse_compression
from penstock.dataset.formats.format_protocol import Content, Extent, FileMap, Part, Pen, Plan, Read, Sample
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

    def plan(self, index: int, name: str) -> Plan:
        """Three parts: records, offsets, sizes."""
        shape = draw_shape(self._dataset, self._seed, index)
        num_samples = self._dataset.num_samples_per_file
        index_bytes = num_samples * _ENTRY_BYTES
        return Plan(
            name=name,
            index=index,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=1,
            parts=(
                Part(size_bytes=num_samples * shape.size_bytes),
                Part(pattern="{}.off.idx", size_bytes=index_bytes),
                Part(pattern="{}.sz.idx", size_bytes=index_bytes),
            ),
        )

    def lay(self, plan: Plan, part: int, pen: Pen) -> None:
        """Content, or an index in steps."""
        if part == _RECORDS:
            pen.fill(plan.num_samples * plan.sample_bytes)
            return
        for start in range(0, plan.num_samples, _STEP):
            numbers = np.arange(start, min(start + _STEP, plan.num_samples), dtype="<u8")
            entries = (
                numbers * plan.sample_bytes if part == _OFFSETS else np.full_like(numbers, plan.sample_bytes)
            )
            pen.literal(entries.data.cast("B"))

    def reads(self, plan: Plan, _found: FileMap, samples: range) -> Iterator[Read]:
        """Both indexes whole, as readers load them, and the records: neighbours in one range."""
        if not samples:
            return
        for part in (_OFFSETS, _SIZES):
            yield Read(part=part, offset=0, size_bytes=plan.num_samples * _ENTRY_BYTES)
        yield Read(offset=samples.start * plan.sample_bytes, size_bytes=len(samples) * plan.sample_bytes)

    def decode(self, plan: Plan, _found: FileMap, pieces: Sequence[Extent], samples: range) -> Sample:
        """Views of the records."""
        text = bytes_at(plan, pieces, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))

    def expected(self, plan: Plan, content: Content, samples: range) -> Sample:
        """The records' content."""
        text = made(content, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes)
        return as_array(plan, text, len(samples))
