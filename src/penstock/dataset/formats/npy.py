"""NumPy's own file: a header and one array, with the samples along its last axis as DLIO stores them.

One of the formats behind `FileFormat`. Invariant: the array's bytes are content, all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.formats.format_base import ReadWhole, bytes_at, made, refuse_compression
from penstock.dataset.formats.format_protocol import Content, Extent, FileMap, Part, Pen, Plan, Sample
from penstock.dataset.formats.sample_shape import draw_shape

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class NpyFormat(ReadWhole):
    """`numpy.load` gives an array of (rows, columns, samples)."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        refuse_compression(dataset)
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> Plan:
        """One block a file: its samples are interleaved, so none can be read alone."""
        shape = draw_shape(self._dataset, self._seed, index)
        num_samples = self._dataset.num_samples_per_file
        head = array_header(shape.dtype, (*shape.dims, num_samples))
        return Plan(
            name=name,
            index=index,
            num_samples=num_samples,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=num_samples,
            parts=(Part(size_bytes=len(head) + num_samples * shape.size_bytes),),
        )

    def lay(self, plan: Plan, _part: int, pen: Pen) -> None:
        """Header, then content."""
        pen.literal(stacked_header(plan))
        pen.fill(plan.num_samples * plan.sample_bytes)

    def decode(self, plan: Plan, _found: FileMap, pieces: Sequence[Extent], samples: range) -> Sample:
        """Views of the array, samples first."""
        text = bytes_at(plan, pieces, len(stacked_header(plan)), plan.num_samples * plan.sample_bytes)
        return unstack(plan, text)[samples.start : samples.stop : samples.step]

    def expected(self, plan: Plan, content: Content, samples: range) -> Sample:
        """The samples out of the whole array."""
        text = made(content, len(stacked_header(plan)), plan.num_samples * plan.sample_bytes)
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


def stacked_header(plan: Plan) -> bytes:
    """The header of all samples of a file as one array."""
    return array_header(plan.dtype, (*plan.dims, plan.num_samples))


def unstack(plan: Plan, text: memoryview) -> Sample:
    """The samples of an array that has them along its last axis, without a copy."""
    stacked = np.frombuffer(text, dtype=plan.dtype).reshape(*plan.dims, plan.num_samples)
    return np.moveaxis(stacked, -1, 0)
