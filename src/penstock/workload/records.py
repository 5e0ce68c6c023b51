"""How many bytes a sample is, and how many of them training reads: pure, exact."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from penstock.workload.choices import Format
from penstock.workload.values import element_bytes

if TYPE_CHECKING:
    from penstock.workload.spec import Column, Dataset


def record_bytes(dataset: Dataset) -> Fraction:
    """The mean size of a sample on storage, before compression: columns, else dimensions, else length."""
    row_bytes = parquet_row_bytes(dataset)
    if row_bytes is not None:
        return Fraction(row_bytes)
    if dataset.record_dims:
        return Fraction(math.prod(dataset.record_dims) * element_bytes(dataset.record_element_type))
    return dataset.record_length_bytes


def read_bytes_per_sample(dataset: Dataset) -> Fraction:
    """What training reads of a sample: of Parquet only the columns that are marked to be read."""
    if parquet_row_bytes(dataset) is None:
        return record_bytes(dataset)
    return Fraction(sum(column_bytes(column) for column in dataset.parquet.columns if column.read))


def parquet_row_bytes(dataset: Dataset) -> int | None:
    """The size of a row by its columns; None where the data set has none."""
    if dataset.format is not Format.PARQUET or not dataset.parquet.columns:
        return None
    return sum(column_bytes(column) for column in dataset.parquet.columns)


def column_bytes(column: Column) -> int:
    """What one row holds of this column."""
    return column.size * element_bytes(column.dtype)
