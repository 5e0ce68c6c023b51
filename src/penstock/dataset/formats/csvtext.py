"""CSV files like DLIO's: one row of numbers per sample, without a header; all numbers have the same width.

Invariant: because of leading zeros, the position of each row is known, and sizes are exact in advance.
Numbers are made from content, too: an element's bytes are read as an unsigned integer, without the sign bit
for signed types. For floats, this integer gives the digits after "0.", as many as the type holds.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import UsageError

_STEP_ELEMENTS: Final = 1 << 18
"""The count of numbers converted to text at a time, so that memory need not hold a whole file."""
_ZERO, _COMMA, _NEWLINE = b"0,\n"


class CsvFormat(fp.ReadWhole):
    """Files that any CSV reader parses as numbers."""

    def _draw_shape(self, index: int) -> fp.SampleShape:
        """Return the shape of a sample, which is a row of numbers, whatever its dimensions."""
        shape = super()._draw_shape(index)
        if np.dtype(shape.dtype).kind == "c":
            raise UsageError(
                "CSV files cannot hold complex numbers",
                where="dataset.record_element_type",
                fix="Use float64.",
            )
        return replace(shape, dims=(math.prod(shape.dims),))

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        _, _, width = _measure(np.dtype(plan.dtype))
        size_bytes = plan.num_samples * plan.dims[0] * width
        return plan.num_samples, (fp.FilePart(size_bytes=size_bytes),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Emit rows in steps; a step may be a part of a row."""
        num_elements = plan.num_samples * plan.dims[0]
        for start in range(0, num_elements, _STEP_ELEMENTS):
            numbers = _numbers(plan, out.content, start, min(_STEP_ELEMENTS, num_elements - start))
            text = _text(numbers, np.dtype(plan.dtype))
            text[:, -1] = _COMMA
            row_ends = np.arange(-(start + 1) % plan.dims[0], len(text), plan.dims[0])
            text[row_ends, -1] = _NEWLINE
            out.raw(text.reshape(-1).data)

    def decode(
        self, plan: fp.FilePlan, _survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Parse the rows."""
        kind = np.dtype(plan.dtype)
        _, prefix, width = _measure(kind)
        row_bytes = plan.dims[0] * width
        text = fp.read_range(plan, pieces, samples.start * row_bytes, len(samples) * row_bytes)
        digits = np.frombuffer(text, dtype=np.uint8).reshape(-1, width)[:, prefix:-1]
        if ((digits < _ZERO) | (digits > _ZERO + 9)).any():
            raise fp.make_damage_error(plan, "it has characters other than digits where its numbers are")
        numbers = np.zeros(len(digits), dtype=np.uint64)
        for column in digits.T:
            numbers = numbers * np.uint64(10) + (column - _ZERO)
        return _values(numbers, kind).reshape(len(samples), *plan.dims)

    def expected(self, plan: fp.FilePlan, content: Content, samples: range) -> fp.Sample:
        """Return the numbers that the text represents."""
        numbers = _numbers(plan, content, samples.start * plan.dims[0], len(samples) * plan.dims[0])
        return _values(numbers, np.dtype(plan.dtype)).reshape(len(samples), *plan.dims)


def _measure(kind: np.dtype[np.generic]) -> tuple[int, int, int]:
    """Return the number of values of a type, and the lengths of a number's prefix and of its whole text."""
    is_float = kind.kind == "f"
    limit = int(10 ** np.finfo(kind.str).precision) if is_float else int(np.iinfo(kind.str).max) + 1
    prefix = len(b"0.") if is_float else 0
    return limit, prefix, prefix + len(str(limit - 1)) + 1


def _numbers(plan: fp.FilePlan, content: Content, start: int, count: int) -> NDArray[np.uint64]:
    kind = np.dtype(plan.dtype)
    text = fp.make_content(content, start * kind.itemsize, count * kind.itemsize)
    numbers = np.frombuffer(text, dtype=f"<u{kind.itemsize}").astype(np.uint64)
    limit, _, _ = _measure(kind)
    return numbers if limit == 2**64 else numbers % np.uint64(limit)


def _values(numbers: NDArray[np.uint64], kind: np.dtype[np.generic]) -> fp.Sample:
    if kind.kind == "f":
        return (numbers.astype(np.float64) / _measure(kind)[0]).astype(kind)
    return numbers.astype(kind)


def _text(numbers: NDArray[np.uint64], kind: np.dtype[np.generic]) -> NDArray[np.uint8]:
    """Return one row of characters for each number; the last column is free for the separator."""
    limit, prefix, width = _measure(kind)
    text = np.empty((len(numbers), width), dtype=np.uint8)
    text[:, :prefix] = np.frombuffer(b"0."[:prefix], dtype=np.uint8)
    rest = numbers.astype(np.uint32) if limit <= 2**32 else numbers
    for column in range(width - 2, prefix - 1, -1):
        rest, digit = np.divmod(rest, rest.dtype.type(10))
        text[:, column] = digit + _ZERO
    return text
