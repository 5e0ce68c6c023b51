"""Events of many files on their way into one table: columns of numbers, sorted by time over all files.

    batches of any file -> texts numbered -> sorted in memory, if they are few -> tables, in order
                                          -> sorted runs on disk, merged by DuckDB -> tables, in order

Two numbers stand for texts: `kind_id` for op, name and category, `path_id` for a path. Invariants: about
`limit` events are in memory at once; events at the same time are in the order of their files, and of their
lines in each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, TypeVar

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.trace.arrow_functions import cast, encode, find_distinct, find_unique, number_texts, take
from penstock.trace.reading.event_batch import BATCH_SCHEMA, FEW_ROWS

Numbers = npt.NDArray[np.int64]

_PARTS: Final = {
    "kind_id": ("op", "name", "cat"),
    "path_id": ("path",),
}
KEYS: Final = tuple(_PARTS)
"""Integer columns of a table that stand for its texts: what depends on those is joined by them cheaply."""

TABLE_SCHEMA: Final = pa.schema(
    [*BATCH_SCHEMA, *(pa.field(key, pa.int32(), key == "path_id") for key in KEYS)]
)

SLICE_ROWS: Final = 1 << 17
SORTED_ROWS: Final = 1 << 21
"""Events that are sorted in memory; more are sorted in runs, which are merged from disk."""
_MERGE_MEMORY: Final = "200MB"
"""What DuckDB may use to merge runs."""
KIND: Final = _PARTS["kind_id"]
THREAD: Final = ("run", "host", "rank", "pid", "tid")
"""What tells threads apart."""
_PLAIN: Final = ("ts_us", "dur_us", "size_bytes", "offset", "ret", "epoch", "step", "args")
"""Columns that are kept as they come."""

_KEY_OF: Final = {
    **dict.fromkeys(KIND, "kind_id"),
    **dict.fromkeys(THREAD, "thread_id"),
    "path": "path_id",
    "file": "file_number",
}
"""The column of numbers that stands for a column until all events are here."""

Value = TypeVar("Value", bound=Hashable)


class Numbering(Generic[Value]):
    """Values, numbered as they come."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        """The number of a value, from 0 on."""
        return self.number_all((value,))[0]

    def number_all(self, values: Iterable[Value]) -> list[int]:
        """The number of each value."""
        numbers, known = self._numbers, self.values
        found = []
        for value in values:
            number = numbers.setdefault(value, len(known))
            if number == len(known):
                known.append(value)
            found.append(number)
        return found


class EventStore:
    """Gathers batches of several files, from several threads; `tables` then has all events in order."""

    def __init__(self, columns: frozenset[str], scratch: Path, limit: int = SORTED_ROWS) -> None:
        self._columns = columns
        self._read = columns_to_read(columns)
        self._paths: Numbering[str] = Numbering()
        self._scratch = scratch
        self._limit = limit
        self._lock = Lock()
        self._kinds: Numbering[tuple[Any, ...]] = Numbering()
        self._threads: Numbering[tuple[Any, ...]] = Numbering()
        self._files: dict[int, str] = {}
        self._pending: list[tuple[int, int, pa.Table]] = []
        self._num_pending = self._num_events = 0
        self._num_of_file: dict[int, int] = {}
        self._runs: list[Path] = []
        self._named: dict[str, _Texts] = {}

    def __len__(self) -> int:
        return self._num_events

    def add(self, file: int, batch: pa.RecordBatch) -> None:
        """Add events of the file of this number."""
        if not batch.num_rows:
            return
        with self._lock:
            line = self._num_of_file.get(file, 0)
            self._num_of_file[file] = line + batch.num_rows
            self._pending.append((file, line, self._number_texts(file, line, batch)))
            self._num_pending += batch.num_rows
            self._num_events += batch.num_rows
            if self._num_pending >= self._limit:
                self._spill()

    @property
    def is_spilled(self) -> bool:
        """Whether there were more events than are kept in memory."""
        return bool(self._runs)

    def read_all(self) -> pa.Table:
        """All events in order, in memory."""
        return pa.concat_tables([self._empty(), *self.tables()])

    def write(self, path: Path) -> frozenset[str]:
        """Write all events in order, lightly compressed, for one command; the names of the columns."""
        with pq.ParquetWriter(path, self._empty().schema, compression="lz4", store_schema=False) as writer:
            for table in self.tables():
                writer.write_table(table)
            return frozenset(writer.schema.names)

    def _empty(self) -> pa.Table:
        return self._schema().empty_table()

    def _schema(self) -> pa.Schema:
        wanted = [field for field in BATCH_SCHEMA if field.name in self._columns]
        keys = [key for key, parts in _PARTS.items() if self._read & set(parts)]
        return pa.schema([*wanted, *(pa.field(key, pa.int32(), key == "path_id") for key in keys)])

    def tables(
        self, slice_rows: int = SLICE_ROWS, look: Callable[[pa.Table], None] = lambda _: None
    ) -> Iterator[pa.Table]:
        """All events in order, in tables of so many rows; texts are dictionary-encoded.

        `look` is called with the numbers of each table: its times and sizes, and what stands for its texts,
        which `threads`, `kinds` and `paths` list.
        """
        if self._runs and self._pending:
            self._spill()
        # Numbers of lines are for runs alone, which DuckDB would merge in any order.
        source = self._merge(slice_rows) if self._runs else self._sort_pending(slice_rows, without="line")
        for numbers in source:
            look(numbers)
            yield self._name_texts(numbers)
        for run in self._runs:
            run.unlink()

    @property
    def threads(self) -> Sequence[tuple[Any, ...]]:
        """What each `thread_id` stands for."""
        return self._threads.values

    @property
    def kinds(self) -> Sequence[tuple[Any, ...]]:
        """What each `kind_id` stands for."""
        return self._kinds.values

    @property
    def paths(self) -> Sequence[str]:
        """What each `path_id` stands for."""
        return self._paths.values

    def _number_texts(self, file: int, line: int, batch: pa.RecordBatch) -> pa.Table:
        num_rows = batch.num_rows
        names = self._read & set(batch.schema.names)
        columns: dict[str, Any] = {name: batch[name] for name in _PLAIN if name in names}
        if "file" in names:
            self._files[file] = batch["file"][0].as_py()
        if names & set(_PARTS["kind_id"]):
            columns["kind_id"] = _number_tuples(batch, KIND, self._kinds)
        if names & set(THREAD):
            columns["thread_id"] = _number_tuples(batch, THREAD, self._threads)
        if "path" in names:
            encoded = batch["path"]
            numbers = self._paths.number_all(encoded.dictionary.to_pylist())
            columns["path_id"] = take(pa.array(numbers, pa.int32()), encoded.indices)
        columns["file_number"] = pa.array(np.full(num_rows, file, dtype=np.int32))
        columns["line"] = pa.array(np.arange(line, line + num_rows))
        return pa.table(columns)

    def _in_order_of_files(self, without: str) -> pa.Table:
        self._pending.sort(key=lambda part: part[:2])
        pending = [dict(zip(table.column_names, table.columns, strict=True)) for _, _, table in self._pending]
        self._pending, self._num_pending = [], 0
        # Column by column, so that no more than one of them is in memory twice.
        columns = {}
        for name in [name for name in pending[0] if name != without]:
            chunks = [chunk for table in pending for chunk in table.pop(name).chunks]
            columns[name] = pa.chunked_array(chunks).unify_dictionaries().combine_chunks()
        return pa.table(columns)

    def _sort_pending(self, slice_rows: int, without: str = "") -> Iterator[pa.Table]:
        if not self._pending:
            return
        table = self._in_order_of_files(without)
        order = None
        if "ts_us" in table.column_names:
            ts_us = table["ts_us"].to_numpy()
            if np.any(ts_us[1:] < ts_us[:-1]):
                order = np.argsort(ts_us, kind="stable")
        for begin in range(0, table.num_rows, slice_rows):
            if order is None:
                yield table.slice(begin, slice_rows)
            else:
                yield _take_rows(table, order[begin : begin + slice_rows])

    def _spill(self) -> None:
        run = self._scratch / f"run-{len(self._runs):05d}.parquet"
        schema = self._pending[0][2].schema
        with pq.ParquetWriter(run, schema, compression="lz4", store_schema=False) as writer:
            for table in self._sort_pending(SLICE_ROWS):
                writer.write_table(table)
        self._runs.append(run)

    def _merge(self, slice_rows: int) -> Iterator[pa.Table]:
        settings: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": _MERGE_MEMORY,
            "temp_directory": str(self._scratch),
            "threads": 2,
        }
        with duckdb.connect(config=settings) as connection:
            order = "ts_us, file_number, line" if "ts_us" in self._read else "file_number, line"
            merged: Any = connection.sql(
                f"SELECT * FROM read_parquet(?) ORDER BY {order}",
                params=[[str(run) for run in self._runs]],
            )
            for batch in merged.to_arrow_reader(slice_rows):
                yield pa.Table.from_batches([batch])

    def _name_texts(self, numbers: pa.Table) -> pa.Table:
        """The wanted columns of these events, and their keys."""
        schema = self._schema()
        arrays = [
            numbers[field.name] if field.name in KEYS else cast(self._column(field.name, numbers), field.type)
            for field in schema
        ]
        return pa.table(arrays, schema=schema)

    def _column(self, name: str, numbers: pa.Table) -> Any:
        if name == "end_us":
            return pa.array(numbers["ts_us"].to_numpy() + numbers["dur_us"].to_numpy())
        key = _KEY_OF.get(name)
        return numbers[name] if key is None else self._texts_of(name).look_up(numbers[key])

    def _texts_of(self, name: str) -> _Texts:
        """What the numbers in place of this column mean, once all events are here."""
        if name not in self._named:
            if name == "file":
                values: Sequence[Any] = [self._files.get(n, "") for n in range(max(self._files) + 1)]
            elif name == "path":
                values = self._paths.values
            else:
                parts, numbering = (KIND, self._kinds) if name in KIND else (THREAD, self._threads)
                values = [tuples[parts.index(name)] for tuples in numbering.values]
            self._named[name] = _Texts(values)
        return self._named[name]


def _take_rows(table: pa.Table, rows: npt.NDArray[Any]) -> pa.Table:
    """Rows of a table; a column of which all values are missing is not looked into."""
    columns = [
        pa.nulls(len(rows), column.type) if column.null_count == table.num_rows else take(column, rows)
        for column in table.columns
    ]
    return pa.table(columns, schema=table.schema)


def columns_to_read(columns: frozenset[str]) -> frozenset[str]:
    """The columns that must be read of a trace to have these."""
    needed = {"ts_us", "dur_us"} if "end_us" in columns else set()
    return columns | needed


def _number_tuples(
    batch: pa.RecordBatch, names: Sequence[str], numbering: Numbering[tuple[Any, ...]]
) -> pa.Array:
    """The number of each row's values in these columns; those that were not read are missing in all rows."""
    if batch.num_rows <= FEW_ROWS:
        return _number_rows(batch, names, numbering)
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    num_codes = 1
    parts: list[tuple[list[Any], int]] = []
    for name in names:
        if name not in batch.schema.names:
            parts.append(([None], 1))
            continue
        column = batch[name]
        encoded = encode(column)
        values = [*encoded.dictionary.to_pylist(), None]
        codes = codes * len(values) + number_texts(encoded)
        num_codes *= len(values)
        parts.append((values, len(values)))
    if num_codes > _MOST_CODES:
        return _number_rows(batch, names, numbering)
    known, places = find_distinct(codes, num_codes)
    numbers = []
    for code in known.tolist():
        rest, values_of_code = code, []
        for values, size in reversed(parts):
            rest, place = divmod(rest, size)
            values_of_code.append(values[place])
        numbers.append(numbering.number(tuple(reversed(values_of_code))))
    return pa.array(np.array(numbers, dtype=np.int32)[places])


_MOST_CODES: Final = 1 << 62
"""More combinations of values than these have no codes of 64 bits, as where damage is in all columns."""


def _number_rows(
    batch: pa.RecordBatch, names: Sequence[str], numbering: Numbering[tuple[Any, ...]]
) -> pa.Array:
    nothing = [None] * batch.num_rows
    given = (batch[name].to_pylist() if name in batch.schema.names else nothing for name in names)
    return pa.array(numbering.number_all(zip(*given, strict=True)), pa.int32())


_MANY: Final = 4096
"""Values from which on a table's dictionary has only those that occur in it."""


class _Texts:
    """What numbers stand for: texts, of which several numbers may have the same, or other values."""

    def __init__(self, values: Sequence[Any]) -> None:
        distinct: Numbering[Any] = Numbering()
        of_number = [None if value is None else distinct.number(value) for value in values]
        self._number_of = pa.array(of_number, pa.int32())
        self._values = pa.array(distinct.values)
        self._are_texts = pa.types.is_string(self._values.type) or not distinct.values

    def look_up(self, numbers: pa.ChunkedArray) -> pa.Array:
        """The value of each number; texts are dictionary-encoded."""
        numbers = numbers.combine_chunks() if isinstance(numbers, pa.ChunkedArray) else numbers
        indices, values = take(self._number_of, numbers), self._values
        if not self._are_texts:
            return take(values, indices)
        if len(values) > _MANY:
            used = np.array([place for place in find_unique(indices) if place is not None], dtype=np.int32)
            places = np.zeros(len(values), dtype=np.int32)
            places[used] = np.arange(len(used), dtype=np.int32)
            indices, values = take(pa.array(places), indices), take(values, used)
        return pa.DictionaryArray.from_arrays(indices, cast(values, pa.string()))
