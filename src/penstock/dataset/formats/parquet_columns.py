"""Parquet columns: from an element's bytes to arrow arrays, and back.

`to_rows` returns what `to_arrow` got, bit for bit, also for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.errors import UsageError
from penstock.workload.dataset_size import column_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.workload.spec import ParquetColumn

_TEXT_TYPES: Final = {"string": pa.large_string(), "binary": pa.large_binary()}
_SMALL_INTEGERS: Final = ("int8", "uint8", "int16", "uint16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnType:
    """One column. `kind` is arrow's; lists have `size` elements of `dtype` in a row."""

    name: str
    dtype: str
    size: int
    row_bytes: int
    read: bool
    kind: pa.DataType

    @property
    def field(self) -> pa.Field:
        """The column in a schema; nothing is ever null, which saves a byte an element or so."""
        return pa.field(self.name, self.kind, nullable=False)

    @property
    def path(self) -> str:
        """What Parquet calls the column's values."""
        return f"{self.name}.list.element" if pa.types.is_fixed_size_list(self.kind) else self.name

    @property
    def encoding(self) -> str:
        """Parquet has no integers of less than 4 bytes: small ones are packed, to about their size."""
        is_number = not pa.types.is_fixed_size_binary(self.kind)
        return "DELTA_BINARY_PACKED" if self.dtype in _SMALL_INTEGERS and is_number else "PLAIN"

    def valid(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes that the type can hold: text of 64 ASCII characters, truth of one bit, all else as it is."""
        if self.dtype == "string":
            return (rows & np.uint8(0x3F)) + np.uint8(0x30)
        return rows & np.uint8(1) if self.dtype == "bool" else rows

    def to_arrow(self, rows: NDArray[np.uint8]) -> pa.Array:
        """Rows of bytes as an array of the column."""
        flat = np.ascontiguousarray(rows).reshape(-1)
        if self.dtype in _TEXT_TYPES:
            offsets = np.arange(len(rows) + 1, dtype=np.int64) * self.row_bytes
            return pa.Array.from_buffers(
                self.kind, len(rows), [None, pa.py_buffer(offsets.data), pa.py_buffer(flat.data)]
            )
        if pa.types.is_fixed_size_binary(self.kind):
            return pa.Array.from_buffers(self.kind, len(rows), [None, pa.py_buffer(flat.data)])
        values = pa.array(flat.view(self.dtype))
        if not pa.types.is_fixed_size_list(self.kind):
            return values
        return pa.FixedSizeListArray.from_arrays(values, type=self.kind)

    def to_rows(self, column: pa.ChunkedArray) -> NDArray[np.uint8]:
        """The inverse of `to_arrow`."""
        blocks = [self._bytes_of(chunk) for chunk in column.chunks]
        return np.concatenate(blocks).reshape(-1, self.row_bytes)

    def _bytes_of(self, chunk: pa.Array) -> NDArray[np.uint8]:
        start, stop = chunk.offset * self.row_bytes, (chunk.offset + len(chunk)) * self.row_bytes
        if self.dtype in _TEXT_TYPES:
            offsets = np.frombuffer(chunk.buffers()[1], dtype=np.int64)[chunk.offset :][: len(chunk) + 1]
            if (np.diff(offsets) != self.row_bytes).any():
                raise ValueError(
                    f"column {self.name} has values of other lengths than {self.row_bytes} bytes"
                )
            text = np.frombuffer(chunk.buffers()[2], dtype=np.uint8)
            return text[int(offsets[0]) : int(offsets[-1])]
        if pa.types.is_fixed_size_binary(self.kind):
            return np.frombuffer(chunk.buffers()[1], dtype=np.uint8)[start:stop]
        values = chunk.flatten() if pa.types.is_fixed_size_list(self.kind) else chunk
        return np.asarray(values.to_numpy(zero_copy_only=False), dtype=self.dtype).view(np.uint8)


def column_type(column: ParquetColumn, *, as_bytes: bool = False) -> ColumnType:
    """The column's type: byte strings for several elements of one byte, lists for several of others."""
    size, row_bytes = column.size, column_bytes(column)
    if column.dtype in _TEXT_TYPES:
        kind = _TEXT_TYPES[column.dtype]
    else:
        kind = _number_type(column)
        if kind in (pa.int8(), pa.uint8()) and (size > 1 or as_bytes):
            kind = pa.binary(size)
        elif size > 1:
            kind = pa.list_(pa.field("element", kind, nullable=False), size)
    return ColumnType(
        name=column.name, dtype=column.dtype, size=size, row_bytes=row_bytes, read=column.read, kind=kind
    )


def _number_type(column: ParquetColumn) -> pa.DataType:
    try:
        return pa.from_numpy_dtype(np.dtype(column.dtype))
    except (pa.ArrowNotImplementedError, TypeError) as error:
        raise UsageError(
            f"Parquet has no {column.dtype}",
            where=f"dataset.parquet.columns, {column.name}",
            fix="Use a bool, int, uint or float of a size that numpy has, string or binary.",
        ) from error
