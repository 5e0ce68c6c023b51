"""NumPy files: a header and one array, with the samples along its last axis, as DLIO stores them.

All of the array's bytes are content.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.formats.format_base import ReadWhole, make_content, read_range, refuse_compression
from penstock.dataset.formats.format_protocol import (
    ContentSource,
    Extent,
    FilePart,
    FilePlan,
    FileSink,
    FileSurvey,
    Sample,
)
from penstock.dataset.formats.sample_shape import draw_shape

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class NpyFormat(ReadWhole):
    """`numpy.load` gives an array of (rows, columns, samples)."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        refuse_compression(dataset)
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> FilePlan:
        """One block a file: its samples are interleaved, so none can be read alone."""
        shape = draw_shape(self._dataset, self._seed, index)
        num_samples = self._dataset.num_samples_per_file
        head = array_header(shape.dtype, (*shape.dims, num_samples))
        return FilePlan(
            name=name,
            index=index,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=num_samples,
            parts=(FilePart(size_bytes=len(head) + num_samples * shape.size_bytes),),
        )

    def emit(self, plan: FilePlan, _part: int, out: FileSink) -> None:
        """Header, then content."""
        out.raw(stacked_header(plan))
        out.fill(plan.num_samples * plan.sample_bytes)

    def decode(self, plan: FilePlan, _found: FileSurvey, pieces: Sequence[Extent], samples: range) -> Sample:
        """Views of the array, samples first."""
        text = read_range(plan, pieces, len(stacked_header(plan)), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]

    def expected(self, plan: FilePlan, content: ContentSource, samples: range) -> Sample:
        """The samples out of the whole array."""
        text = make_content(content, len(stacked_header(plan)), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]


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


def stacked_header(plan: FilePlan) -> bytes:
    """The header of all samples of a file as one array."""
    return array_header(plan.dtype, (*plan.dims, plan.num_samples))


def unstack(plan: FilePlan, text: memoryview) -> Sample:
    """The samples of an array that has them along its last axis, without a copy."""
    stacked = np.frombuffer(text, dtype=plan.dtype).reshape(*plan.dims, plan.num_samples)
    return np.moveaxis(stacked, -1, 0)
