"""Columns of numbers of events in the order of time, a part at a time, for threads that read side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.trace.arrow_functions import fill_missing

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_PART_ROWS: Final = 1 << 17
MISSING: Final = -(1 << 62)
"""In place of a number that an event does not have; of 32 bits, the lowest is."""

Part = Mapping[str, "npt.NDArray[Any]"]


class OrderedEvents(Protocol):
    """Events whose parts, one behind the other, are in the order of time."""

    def parts(self, columns: Sequence[str]) -> Iterator[Callable[[], Part]]:
        """A function for each part, which reads these columns; functions may run at once."""


@dataclass(frozen=True)
class ParquetEvents:
    """The events of an event table; a part is a row group."""

    path: Path

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The file's own."""
        return pq.read_metadata(self.path)

    def parts(self, columns: Sequence[str]) -> Iterator[Callable[[], Part]]:
        """See `OrderedEvents`."""
        return (partial(self._read, number, columns) for number in range(self.metadata.num_row_groups))

    def _read(self, number: int, columns: Sequence[str]) -> Part:
        with pq.ParquetFile(self.path, metadata=self.metadata) as file:
            return _to_numpy(file.read_row_group(number, columns=list(columns), use_threads=False))


@dataclass(frozen=True)
class TableEvents:
    """Events in memory."""

    table: pa.Table

    def parts(self, columns: Sequence[str]) -> Iterator[Callable[[], Part]]:
        """See `OrderedEvents`."""
        chosen = self.table.select(list(columns))
        for begin in range(0, chosen.num_rows, _PART_ROWS):
            yield partial(_to_numpy, chosen.slice(begin, _PART_ROWS))


def _to_numpy(table: pa.Table) -> Part:
    return {name: _numbers(table[name]) for name in table.column_names}


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    if column.null_count:
        lowest = MISSING if pa.types.is_int64(column.type) else np.iinfo(np.int32).min
        # Numbers of 32 bits are widened: a difference to the lowest of them may not fit.
        return fill_missing(column, lowest).to_numpy().astype(np.int64, copy=False)  # type: ignore[no-any-return]
    numbers: npt.NDArray[Any] = column.to_numpy()
    return numbers


def split_part(part: Part, rows: int) -> Iterator[Part]:
    """A part in pieces that fit in a cache."""
    num_rows = len(next(iter(part.values()), np.zeros(0)))
    for begin in range(0, num_rows, rows):
        yield {name: numbers[begin : begin + rows] for name, numbers in part.items()}
