"""Samples without files: `format: synthetic` measures everything but storage.

A plan has no parts, nothing is read, and samples are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.dataset.formats.format_base import ComputedLayout
from penstock.dataset.formats.format_protocol import (
    ContentSource,
    Extent,
    FilePlan,
    FileSink,
    FileSurvey,
    RangeRead,
    Sample,
)
from penstock.dataset.formats.sample_shape import draw_shape
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.workload.spec import Dataset


class SyntheticFormat(ComputedLayout):
    """Files by name only."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def plan(self, index: int, name: str) -> FilePlan:
        """As of other formats, without parts."""
        shape = draw_shape(self._dataset, self._seed, index)
        return FilePlan(
            name=name,
            index=index,
            num_samples=self._dataset.num_samples_per_file,
            dims=shape.dims,
            dtype=shape.dtype,
            sample_bytes=shape.size_bytes,
            block_samples=1,
            parts=(),
        )

    def emit(self, plan: FilePlan, _part: int, _pen: FileSink) -> None:
        """Refuse: there is nothing to write."""
        raise UsageError(
            f"{plan.name} is synthetic: it has no bytes",
            where="dataset.format",
            fix="Leave generation out, or choose a format of files.",
        )

    def reads(self, _plan: FilePlan, _found: FileSurvey, _samples: range) -> Iterator[RangeRead]:
        """None."""
        return iter(())

    def decode(self, plan: FilePlan, _found: FileSurvey, _pieces: Sequence[Extent], samples: range) -> Sample:
        """Zeros, which take no memory until they are written to."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)

    def expected(self, plan: FilePlan, _content: ContentSource, samples: range) -> Sample:
        """The same zeros."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)
