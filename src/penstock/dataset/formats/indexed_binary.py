"""Raw records one after the other, and two index files: offsets and sizes, little-endian uint64.

For `indexed_binary` and `mmap_indexed_binary`, which differ in how other programs open them. Invariant:
offset i is the sum of all sizes before it, over the whole file; records are content at their offset in the
file.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import FormatSink

_ENTRY_BYTES: Final = 8
_RECORDS, _OFFSETS, _SIZES = range(3)
_STEP: Final = 1 << 16
"""The number of index entries that are generated at a time."""


class IndexedFormat(fp.FileFormat):
    """A file of records with its `.off.idx` and `.sz.idx`; each record can be read alone."""

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        index_bytes = plan.num_samples * _ENTRY_BYTES
        return 1, (
            fp.FilePart(size_bytes=plan.num_samples * plan.sample_bytes),
            fp.FilePart(pattern="{}.off.idx", size_bytes=index_bytes),
            fp.FilePart(pattern="{}.sz.idx", size_bytes=index_bytes),
        )

    def emit(self, plan: fp.FilePlan, part: int, out: FormatSink) -> None:
        """Emit content, or an index in steps."""
        if part == _RECORDS:
            out.fill(plan.num_samples * plan.sample_bytes)
            return
        for start in range(0, plan.num_samples, _STEP):
            numbers = np.arange(start, min(start + _STEP, plan.num_samples), dtype="<u8")
            entries = (
                numbers * plan.sample_bytes if part == _OFFSETS else np.full_like(numbers, plan.sample_bytes)
            )
            out.raw(entries.data.cast("B"))

    def reads(self, plan: fp.FilePlan, _survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """Yield both whole indexes, as readers load them, then one range with all of the records."""
        if not samples:
            return
        for part in (_OFFSETS, _SIZES):
            yield fp.RangeRead(part=part, offset=0, size_bytes=plan.num_samples * _ENTRY_BYTES)
        yield fp.RangeRead(
            offset=samples.start * plan.sample_bytes, size_bytes=len(samples) * plan.sample_bytes
        )

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Return views of the records."""
        text = fp.read_range(
            plan, pieces, samples.start * plan.sample_bytes, len(samples) * plan.sample_bytes
        )
        return fp.as_array(plan, text, len(samples))
