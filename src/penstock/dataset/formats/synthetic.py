"""Samples without files: `format: synthetic` measures everything but storage.

A plan has no parts, nothing is read, and samples are zeros.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import UsageError


class SyntheticFormat(fp.FileFormat):
    """Files that exist only as names."""

    def _lay_out(self, _plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        return 1, ()

    def emit(self, plan: fp.FilePlan, _part: int, _out: FormatSink) -> None:
        """Raise an error, because a synthetic file has no bytes."""
        raise UsageError(
            f"{plan.name} is synthetic: it has no bytes",
            where="dataset.format",
            fix="Leave generation out, or choose a format of files.",
        )

    def reads(self, _plan: fp.FilePlan, _survey: fp.FileSurvey, _samples: range) -> Iterator[fp.RangeRead]:
        """Return no ranges."""
        return iter(())

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, _pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Return zeros, which take no memory until they are written to."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)

    def expected(self, plan: fp.FilePlan, _content: Content, samples: range) -> fp.Sample:
        """Return the same zeros as `decode` returns."""
        return np.zeros((len(samples), *plan.dims), dtype=plan.dtype)
