"""Samples without files: `format: synthetic` measures everything but storage.

A plan has no parts, nothing is read, and samples are zeros.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.format_base import ComputedLayout
from penstock.errors import UsageError


class SyntheticFormat(ComputedLayout):
    """Files by name only."""

    def _block_samples(self, _plan: fp.FilePlan) -> int:
        return 1

    def _file_bytes(self, _plan: fp.FilePlan) -> int:
        return 0

    def _parts(self, _plan: fp.FilePlan) -> tuple[fp.FilePart, ...]:
        return ()

    def emit(self, plan: fp.FilePlan, _part: int, _out: fp.FormatSink) -> None:
        """Refused: a synthetic file has no bytes."""
        raise UsageError(
            f"{plan.name} is synthetic: it has no bytes",
            where="dataset.format",
            fix="Leave generation out, or choose a format of files.",
        )

    def reads(self, _plan: fp.FilePlan, _survey: fp.FileSurvey, _samples: range) -> Iterator[fp.RangeRead]:
        """None."""
        return iter(())

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, _pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Zeros, which take no memory until they are written to."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)

    def expected(self, plan: fp.FilePlan, _content: fp.ContentSource, samples: range) -> fp.Sample:
        """The same zeros."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)
