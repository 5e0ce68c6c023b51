"""NumPy files: a header and one array, with the samples along its last axis, as DLIO stores them.

All of the array's bytes are content.
"""

import struct
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.format_base import ReadWhole, make_content, read_range


class StackedFormat(ReadWhole):
    """A format with all samples of a file in one array, along its last axis; a file is one block."""

    @abstractmethod
    def _content_offset(self, plan: fp.FilePlan) -> int:
        """Where the array's content begins in the file."""

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Views of the array, samples first."""
        text = read_range(plan, pieces, self._content_offset(plan), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text, samples)

    def expected(self, plan: fp.FilePlan, content: fp.ContentSource, samples: range) -> fp.Sample:
        """The samples out of the whole array."""
        text = make_content(content, self._content_offset(plan), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text, samples)


class NpyFormat(StackedFormat):
    """`numpy.load` gives an array of (rows, columns, samples)."""

    def _content_offset(self, plan: fp.FilePlan) -> int:
        return len(stacked_header(plan))

    def _file_bytes(self, plan: fp.FilePlan) -> int:
        return self._content_offset(plan) + plan.num_samples * plan.sample_bytes

    def emit(self, plan: fp.FilePlan, _part: int, out: fp.FormatSink) -> None:
        """Header, then content."""
        out.raw(stacked_header(plan))
        out.fill(plan.num_samples * plan.sample_bytes)


@lru_cache(maxsize=4096)
def array_header(dtype: str, dims: tuple[int, ...]) -> bytes:
    """A header of version 1.0, padded so that the array begins at a multiple of 64 bytes."""
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
    """The header of all samples of a file as one array."""
    return array_header(plan.dtype, (*plan.dims, plan.num_samples))


def unstack(plan: fp.FilePlan, text: memoryview, samples: range) -> fp.Sample:
    """Samples of an array that has them along its last axis, without a copy."""
    stacked = np.frombuffer(text, dtype=plan.dtype).reshape(*plan.dims, plan.num_samples)
    return np.moveaxis(stacked, -1, 0)[samples.start : samples.stop : samples.step]
