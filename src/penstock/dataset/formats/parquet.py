"""Parquet files with the requested columns, or with one column `data` of byte strings; read by row group.

Row groups follow each other in the content; within a row group, each column's elements are contiguous. A
sample is the bytes of a row's columns that are marked `read`. Memory holds one batch of row groups while a
file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.dataset.content import Content
from penstock.dataset.formats import file_objects
from penstock.dataset.formats import format_protocol as fp
from penstock.dataset.formats.file_writer import FormatSink
from penstock.errors import UsageError
from penstock.storage import Source
from penstock.workload.enums import Compression
from penstock.workload.sizing import column_bytes
from penstock.workload.spec import Dataset, ParquetColumn

_TEXT_TYPES: Final = {"string": pa.large_string(), "binary": pa.large_binary()}
_SMALL_INTEGERS: Final = ("int8", "uint8", "int16", "uint16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnType:
    """One column. `kind` is Arrow's; lists have `size` elements of `dtype` in a row."""

    name: str
    dtype: str
    size: int
    row_bytes: int
    read: bool
    kind: pa.DataType

    @property
    def field(self) -> pa.Field:
        """The column's field in an Arrow schema. No value is null, which saves about a byte per element."""
        return pa.field(self.name, self.kind, nullable=False)

    @property
    def path(self) -> str:
        """The path of the column's values in Parquet's schema."""
        return f"{self.name}.list.element" if pa.types.is_fixed_size_list(self.kind) else self.name

    @property
    def encoding(self) -> str:
        """The Parquet encoding of the column.

        Parquet has no integers of less than 4 bytes, so small ones are packed to about their size.
        """
        is_number = not pa.types.is_fixed_size_binary(self.kind)
        return "DELTA_BINARY_PACKED" if self.dtype in _SMALL_INTEGERS and is_number else "PLAIN"

    def valid(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return `rows` as valid bytes of the type: 64 ASCII characters, one-bit booleans, or unchanged."""
        if self.dtype == "string":
            return (rows & np.uint8(0x3F)) + np.uint8(0x30)
        return rows & np.uint8(1) if self.dtype == "bool" else rows

    def to_arrow(self, rows: NDArray[np.uint8]) -> pa.Array:
        """Convert rows of bytes to an array of the column."""
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
        """Convert a column of Arrow back to rows of bytes: the inverse of `to_arrow`."""
        blocks = [self._bytes_of(chunk) for chunk in column.chunks]
        return np.concatenate(blocks).reshape(-1, self.row_bytes)

    def _bytes_of(self, chunk: pa.Array) -> NDArray[np.uint8]:
        start, stop = chunk.offset * self.row_bytes, (chunk.offset + len(chunk)) * self.row_bytes
        if self.dtype in _TEXT_TYPES:
            offsets = np.frombuffer(chunk.buffers()[1], dtype=np.int64)[chunk.offset :][: len(chunk) + 1]
            if (np.diff(offsets) != self.row_bytes).any():
                raise ValueError(f"column {self.name} has values that are not {self.row_bytes} bytes long")
            text = np.frombuffer(chunk.buffers()[2], dtype=np.uint8)
            return text[int(offsets[0]) : int(offsets[-1])]
        if pa.types.is_fixed_size_binary(self.kind):
            return np.frombuffer(chunk.buffers()[1], dtype=np.uint8)[start:stop]
        values = chunk.flatten() if pa.types.is_fixed_size_list(self.kind) else chunk
        return np.asarray(values.to_numpy(zero_copy_only=False), dtype=self.dtype).view(np.uint8)


def column_type(column: ParquetColumn, *, as_bytes: bool = False) -> ColumnType:
    """Return the type of a column: byte strings for several one-byte elements, lists for larger ones."""
    size, row_bytes = column.size, column_bytes(column)
    if column.dtype in _TEXT_TYPES:
        kind = _TEXT_TYPES[column.dtype]
    else:
        try:
            kind = pa.from_numpy_dtype(np.dtype(column.dtype))
        except (pa.ArrowNotImplementedError, TypeError) as error:
            raise UsageError(
                f"Parquet has no {column.dtype}",
                where=f"dataset.parquet.columns, {column.name}",
                fix="Use a bool, int, uint or float of a size that numpy has, string or binary.",
            ) from error
        if kind in (pa.int8(), pa.uint8()) and (size > 1 or as_bytes):
            kind = pa.binary(size)
        elif size > 1:
            kind = pa.list_(pa.field("element", kind, nullable=False), size)
    return ColumnType(
        name=column.name, dtype=column.dtype, size=size, row_bytes=row_bytes, read=column.read, kind=kind
    )


_CODECS: Final[Mapping[Compression, str]] = MappingProxyType(
    {
        Compression.NONE: "NONE",
        Compression.SNAPPY: "SNAPPY",
        Compression.GZIP: "GZIP",
        Compression.LZ4: "LZ4",
        Compression.ZSTD: "ZSTD",
    }
)
_UNREADABLE: Final = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
"""The exceptions that pyarrow raises for damaged files; a few damaged footers end the process instead."""
_WITH_LEVEL: Final = (Compression.GZIP, Compression.ZSTD)


class ParquetFormat(fp.FileFormat):
    """Files that pyarrow opens. They are read by row group, and only in the columns marked `read`."""

    compressions = tuple(_CODECS)

    def __init__(self, dataset: Dataset, seed: int) -> None:
        super().__init__(dataset, seed)
        columns = dataset.parquet.columns
        if dataset.parquet.partition_by is not None:
            raise UsageError(
                "Data files are not split by a column's values: each value would make a folder of tiny files",
                where="dataset.parquet.partition_by",
                fix="Leave it out; num_subfolders_train spreads files over folders.",
            )
        if columns and not any(column.read for column in columns):
            raise UsageError(
                "No column is read", where="dataset.parquet.columns", fix="Mark at least one with read: true."
            )
        self._columns = tuple(column_type(column) for column in columns)

    def __reduce__(self) -> tuple[type[ParquetFormat], tuple[Dataset, int]]:
        # Pickling makes Arrow's types forget their element's name and nullability, so they are created again.
        return ParquetFormat, (self._dataset, self._seed)

    def _draw_shape(self, index: int) -> fp.SampleShape:
        """Return the shape of a sample, which decodes to the bytes of the columns that are read."""
        columns = self._columns or _byte_strings(super()._draw_shape(index).size_bytes)
        read_bytes = sum(column.row_bytes for column in columns if column.read)
        return fp.SampleShape((read_bytes,), "|u1", sum(column.row_bytes for column in columns))

    def _lay_out(self, plan: fp.FilePlan) -> tuple[int, tuple[fp.FilePart, ...]]:
        """Return blocks of one row group, and a single part whose size only the library knows."""
        return min(self._dataset.parquet.row_group_size, plan.num_samples), (fp.FilePart(size_bytes=None),)

    def emit(self, plan: fp.FilePlan, _part: int, out: FormatSink) -> None:
        """Encode a batch of row groups at a time; the footer comes last."""
        columns = self._columns_of(plan)
        schema = pa.schema([column.field for column in columns])
        groups = list(_groups(plan, range(plan.num_samples)))
        step = max(1, self._dataset.parquet.generation_batch_size // plan.block_samples)
        buffer = file_objects.GrowingBuffer()
        with self._writer(buffer, schema, columns) as writer:
            for start in range(0, len(groups), step):
                tables = []
                for group in groups[start : start + step]:
                    arrays = [
                        column.to_arrow(column.valid(_elements(plan, columns, group, number, out.content)))
                        for number, column in enumerate(columns)
                    ]
                    tables.append(pa.Table.from_arrays(arrays, schema=schema))
                writer.write_table(pa.concat_tables(tables), row_group_size=plan.block_samples)
                buffer.drain(out)
        buffer.drain(out)

    def survey(self, plan: fp.FilePlan, source: Source) -> fp.FileSurvey:
        """Read the footer: the file's last 64 KiB, and the rest of the footer if it is longer."""
        wanted = {column.name for column in self._columns_of(plan) if column.read}
        try:
            metadata = pq.read_metadata(file_objects.RangesFile(source.size_bytes, source.read_into))
            self._refuse_other_levels(plan, metadata.schema)
            blocks = tuple(
                fp.merge_ranges(_column_ranges(metadata.row_group(number), wanted))
                for number in range(metadata.num_row_groups)
            )
        except _UNREADABLE as error:
            raise fp.make_damage_error(plan, str(error)) from error
        if metadata.num_rows != plan.num_samples or len(blocks) != -(-plan.num_samples // plan.block_samples):
            raise fp.make_damage_error(plan, f"it has {metadata.num_rows} rows in {len(blocks)} row groups")
        return fp.FileSurvey(size_bytes=source.size_bytes, blocks=blocks, opened=metadata)

    def reads(self, plan: fp.FilePlan, survey: fp.FileSurvey, samples: range) -> Iterator[fp.RangeRead]:
        """Yield the ranges of whole columns to read, row group by row group; adjacent ones are merged."""
        if samples:
            first, last = samples.start // plan.block_samples, samples[-1] // plan.block_samples
            for block in survey.blocks[first : last + 1]:
                yield from block

    def decode(
        self, plan: fp.FilePlan, survey: fp.FileSurvey, pieces: Sequence[fp.Extent], samples: range
    ) -> fp.Sample:
        """Return rows of bytes from columns that Arrow decodes; the checksums of pages are verified."""
        if not samples:
            return np.empty((0, *plan.dims), dtype=np.uint8)
        columns = [column for column in self._columns_of(plan) if column.read]
        first, last = samples.start // plan.block_samples, samples[-1] // plan.block_samples
        try:
            # Without pre-buffering, Arrow reads the column chunks and never the gaps between them.
            file = pq.ParquetFile(
                file_objects.RangesFile(survey.size_bytes, fp.GatheredRanges(pieces).read_into),
                metadata=survey.opened,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            table = file.read_row_groups(
                list(range(first, last + 1)), columns=[column.name for column in columns], use_threads=False
            )
            rows = [column.to_rows(table.column(column.name)) for column in columns]
        except _UNREADABLE as error:
            raise fp.make_damage_error(plan, str(error)) from error
        before = samples.start - first * plan.block_samples
        wanted = [column[before : before + len(samples)] for column in rows]
        if any(len(column) != len(samples) for column in wanted):
            raise fp.make_damage_error(
                plan, f"row groups {first} to {last} do not have the planned numbers of rows"
            )
        return np.concatenate(wanted, axis=1)

    def expected(self, plan: fp.FilePlan, content: Content, samples: range) -> fp.Sample:
        """Return the rows' content, made valid for the types of their columns."""
        columns = self._columns_of(plan)
        blocks = [np.empty((0, *plan.dims), dtype=np.uint8)]
        for group in _groups(plan, samples):
            rows = [
                column.valid(_elements(plan, columns, group, number, content))
                for number, column in enumerate(columns)
                if column.read
            ]
            start, stop = max(samples.start, group.start), min(samples.stop, group.stop)
            joined = np.concatenate(rows, axis=1)
            blocks.append(joined[start - group.start : stop - group.start])
        return np.concatenate(blocks)

    def _refuse_other_levels(self, plan: fp.FilePlan, stored: pq.ParquetSchema) -> None:
        """Raise if a column's levels differ from those that were written.

        Arrow compares levels with the sizes of histograms when it is asked for a column chunk, and ends the
        process if they differ: a single flipped bit in a footer's schema has this effect.
        """
        ours = _written_levels(self._columns_of(plan))
        for path, levels in _levels(stored).items():
            if ours.get(path, levels) != levels:
                raise fp.make_damage_error(
                    plan, f"its schema gives column {path} levels that it was not written with"
                )

    def _columns_of(self, plan: fp.FilePlan) -> tuple[ColumnType, ...]:
        return self._columns or _byte_strings(plan.sample_bytes)

    def _writer(
        self, buffer: file_objects.GrowingBuffer, schema: pa.Schema, columns: Sequence[ColumnType]
    ) -> pq.ParquetWriter:
        compression, level = self._dataset.compression, self._dataset.compression_level
        return pq.ParquetWriter(
            buffer,
            schema,
            compression=_CODECS[compression],
            compression_level=level if compression in _WITH_LEVEL else None,
            use_dictionary=False,  # random values do not repeat enough
            column_encoding={column.path: column.encoding for column in columns},
            write_statistics=False,
            write_page_checksum=True,
        )


@lru_cache(maxsize=64)
def _written_levels(columns: tuple[ColumnType, ...]) -> dict[str, tuple[int, int]]:
    """Return the levels of these columns, as found in a file without rows."""
    buffer = pa.BufferOutputStream()
    pq.ParquetWriter(buffer, pa.schema([column.field for column in columns])).close()
    return _levels(pq.read_metadata(pa.BufferReader(buffer.getvalue())).schema)


def _levels(schema: pq.ParquetSchema) -> dict[str, tuple[int, int]]:
    columns = (schema.column(number) for number in range(len(schema)))
    return {column.path: (column.max_definition_level, column.max_repetition_level) for column in columns}


def _byte_strings(row_bytes: int) -> tuple[ColumnType, ...]:
    return (column_type(ParquetColumn(name="data", dtype="uint8", size=row_bytes), as_bytes=True),)


def _groups(plan: fp.FilePlan, samples: range) -> Iterator[range]:
    """Yield the row groups that hold `samples`."""
    for start in range(
        samples.start // plan.block_samples * plan.block_samples, samples.stop, plan.block_samples
    ):
        stop = min(start + plan.block_samples, plan.num_samples)
        yield range(start, stop)


def _elements(
    plan: fp.FilePlan, columns: Sequence[ColumnType], rows: range, number: int, content: Content
) -> fp.Sample:
    """Return the content of one column in one row group, as one row of bytes for each row."""
    num_rows, row_bytes = len(rows), columns[number].row_bytes
    before = sum(column.row_bytes for column in columns[:number])
    assert before + row_bytes <= plan.sample_bytes
    text = fp.make_content(content, rows.start * plan.sample_bytes + num_rows * before, num_rows * row_bytes)
    return np.frombuffer(text, dtype=np.uint8).reshape(num_rows, row_bytes)


def _column_ranges(group: pq.RowGroupMetaData, wanted: set[str]) -> Iterator[fp.RangeRead]:
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema.split(".")[0] in wanted:
            yield fp.RangeRead(offset=column.data_page_offset, size_bytes=column.total_compressed_size)
