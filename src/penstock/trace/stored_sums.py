"""Sums of a table's events, stored in the table: questions read these few instead of adding up the events.

    events in order -> SumsToStore -> the table's metadata -> StoredSums -> `DerivedRelations.find_cells`

They lie in the Parquet file's metadata, as small Parquet files in base64, because metadata is text.
Invariant: stored sums are those that `event_cells.sums_sql` gives of the table's events, or there are none.
Where they would be many, or not fit in 64 bits, and in tables of other writers, events are added up as asked.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.trace.arrow_functions import Numbers, encode, fill_missing, number_texts
from penstock.trace.dimensions import sql_literal
from penstock.trace.event_cells import EACH_SIZE, MEASURES
from penstock.trace.event_store import KEYS, KIND, THREAD, Numbering

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from penstock.trace.ordered_events import ParquetEvents

_KEY: Final = b"penstock.sums"
_VERSION: Final = 1
_MOST_SUMS: Final = 1 << 17
_MOST_CODES: Final = 1 << 20
_LARGEST: Final = 1 << 62
_KEYS_OF_A_TABLE: Final = 1 << 32
"""More than any table has."""
_THREADS, _PATHS, _SIZES = "by_thread", "by_path", "by_size"
_KEY_OF: Final = {"kinds": "kind_id", "paths": "path_id"}
"""The tables of what a key stands for."""
_TYPES: Final = {"rank": pa.int32(), "pid": pa.int64(), "tid": pa.int64(), EACH_SIZE: pa.int64()}
"""Of columns that are not texts."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What is added up of some events."""

    starts: Numbers
    durations: Numbers
    ends: Numbers
    sized: Any
    """The places of events that have a size: an array, or a slice of all."""
    sizes: Numbers

    @classmethod
    def of(cls, numbers: pa.Table) -> _Measured:
        starts, durations = numbers["ts_us"].to_numpy(), numbers["dur_us"].to_numpy()
        sizes = fill_missing(numbers["size_bytes"], -1).to_numpy()
        sized: Any = slice(None)
        if numbers["size_bytes"].null_count:
            sized = np.flatnonzero(sizes >= 0)
            sizes = sizes[sized]
        return cls(starts, durations, starts + durations, sized, sizes)


class _Sums:
    """Measures of events by a code; codes that are larger than all before may come later."""

    def __init__(self) -> None:
        self._of_code = {name: np.zeros(0, dtype=np.int64) for name in (*MEASURES, "num_sized")}

    def add(self, codes: Numbers, num_codes: int, events: _Measured) -> None:
        """Add events by their codes, which are below `num_codes`."""
        self._grow(num_codes)
        sums, sized = self._of_code, codes[events.sized]
        np.add.at(sums["num_events"], codes, 1)
        np.add.at(sums["sum_us"], codes, events.durations)
        np.maximum.at(sums["longest_us"], codes, events.durations)
        np.minimum.at(sums["first_us"], codes, events.starts)
        np.maximum.at(sums["last_us"], codes, events.ends)
        np.add.at(sums["size_bytes"], sized, events.sizes)
        np.add.at(sums["num_sized"], sized, 1)

    def find_codes(self) -> Numbers:
        """The codes that occur."""
        return np.flatnonzero(self._of_code["num_events"])

    def columns(self, codes: Numbers) -> Mapping[str, pa.Array]:
        """The measures of these codes; of events without sizes, their sum is missing."""
        columns = {name: pa.array(self._of_code[name][codes]) for name in MEASURES}
        has_none = self._of_code["num_sized"][codes] == 0
        return columns | {"size_bytes": pa.array(self._of_code["size_bytes"][codes], mask=has_none)}

    def _grow(self, num_codes: int) -> None:
        before = len(self._of_code["num_events"])
        if num_codes <= before:
            return
        for name, values in self._of_code.items():
            nothing = _LARGEST if name == "first_us" else 0
            more = np.full(max(num_codes, 2 * before) - before, nothing, dtype=np.int64)
            self._of_code[name] = np.concatenate((values, more))


class SumsToStore:
    """Adds up the events of a table as it is written: by thread, by path and by size, each with the kind."""

    def __init__(
        self, threads: Sequence[tuple[Any, ...]], kinds: Sequence[tuple[Any, ...]], paths: Sequence[str]
    ) -> None:
        """What the integers of the events to come stand for, in the order of their numbers."""
        self._threads, self._kinds, self._paths = threads, kinds, paths
        self._sizes: Numbering[int | None] = Numbering()
        self._sums = {name: _Sums() for name in (_THREADS, _PATHS, _SIZES)}
        self._num_events, self._total = 0, 0.0

    def add(self, numbers: pa.Table) -> None:
        """Add events: their columns `thread_id`, `path_id` and `kind_id`, their times and their sizes."""
        events = _Measured.of(numbers)
        self._num_events += numbers.num_rows
        self._total += sum(float(one.sum(dtype=float)) for one in (events.durations, events.sizes))
        if self._total >= _LARGEST:
            self._sums.clear()
        kinds = numbers["kind_id"].to_numpy()
        for name in list(self._sums):
            values, num_values = self._number(name, numbers)
            num_codes = num_values * len(self._kinds)
            if num_codes > _MOST_CODES:
                del self._sums[name]
            else:
                self._sums[name].add(values.astype(np.int64) * len(self._kinds) + kinds, num_codes, events)

    def _number(self, name: str, numbers: pa.Table) -> tuple[npt.NDArray[Any], int]:
        """The number of what each event is counted under, and how many of them there are."""
        if name == _THREADS:
            return numbers["thread_id"].to_numpy(), len(self._threads)
        if name == _PATHS:
            return fill_missing(numbers["path_id"], -1).to_numpy() + 1, len(self._paths) + 1
        encoded = encode(numbers["size_bytes"])
        places = self._sizes.number_all([*encoded.dictionary.to_pylist(), None])
        return np.array(places, dtype=np.int32)[number_texts(encoded)], len(self._sizes.values)

    def metadata(self) -> Mapping[bytes, bytes]:
        """The sums as metadata of a Parquet file; empty where all of them would be many."""
        tables = dict(self._tables())
        if not tables:
            return {}
        by = {
            name: [key for key in table.column_names if key not in MEASURES]
            for name, table in tables.items()
            if name not in _KEY_OF
        }
        header = {"version": _VERSION, "num_events": self._num_events, "by": by}
        return {_KEY: json.dumps(header).encode()} | {
            _key_of(name): _pack(table) for name, table in tables.items()
        }

    def _tables(self) -> Iterator[tuple[str, pa.Table]]:
        # Of several runs, neither a path nor a size tells one.
        runs = {thread[0] for thread in self._threads}
        for name, sums in self._sums.items():
            codes = sums.find_codes()
            if not 0 < len(codes) <= _MOST_SUMS:
                continue
            numbers, kinds = np.divmod(codes, len(self._kinds))
            columns = {"kind_id": pa.array(kinds.astype(np.int32)), **self._name(name, numbers)}
            if len(runs) == 1 and name != _THREADS:
                columns["run"] = pa.array([*runs] * len(codes), pa.string())
            yield name, pa.table({**columns, **sums.columns(codes)})
            yield "kinds", _list_texts("kinds", KIND, self._kinds)
            if name == _PATHS:
                yield "paths", _list_texts("paths", ("path",), [(path,) for path in self._paths])

    def _name(self, name: str, numbers: Numbers) -> Mapping[str, pa.Array]:
        if name == _PATHS:
            return {"path_id": pa.array((numbers - 1).astype(np.int32), mask=numbers == 0)}
        if name == _SIZES:
            return _columns([(self._sizes.values[number],) for number in numbers.tolist()], (EACH_SIZE,))
        return _columns([self._threads[number] for number in numbers.tolist()], THREAD)


def _columns(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> dict[str, pa.Array]:
    return {
        name: pa.array([row[place] for row in rows], _TYPES.get(name, pa.string()))
        for place, name in enumerate(names)
    }


def _list_texts(name: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    return pa.table({_KEY_OF[name]: pa.array(range(len(rows)), pa.int32()), **_columns(rows, names)})


def _key_of(name: str) -> bytes:
    return _KEY + b"." + name.encode()


def _pack(table: pa.Table) -> bytes:
    packed = pa.BufferOutputStream()
    pq.write_table(table, packed, compression="zstd", store_schema=False, write_statistics=False)
    return base64.b64encode(packed.getvalue())


@dataclass(frozen=True)
class TableSums:
    """The sums that a table stores."""

    events: ParquetEvents

    @cached_property
    def by(self) -> Mapping[str, frozenset[str]]:
        """The columns that each of its sums is by; empty if it stores none."""
        stored = (self.events.metadata.metadata or {}).get(_KEY)
        header = {} if stored is None else json.loads(stored)
        # A program that writes other events with the metadata of these has not added them up.
        if header.get("version") != _VERSION or header["num_events"] != self.events.metadata.num_rows:
            return {}
        return {name: frozenset(keys) for name, keys in header["by"].items()}

    def read(self, name: str) -> pa.Table:
        """Sums, or what their keys stand for."""
        packed = base64.b64decode(self.events.metadata.metadata[_key_of(name)])
        return pq.read_table(pa.BufferReader(packed), use_threads=False)


class StoredSums:
    """The sums that all tables of a set store, as relations of its connection, made as they are asked for."""

    def __init__(self, connection: DuckDBPyConnection, tables: Sequence[tuple[str, TableSums]]) -> None:
        """The tables, with the names that their runs were opened by."""
        self._connection, self._tables = connection, tables
        self._made: set[str] = set()

    def find(self, columns: frozenset[str]) -> tuple[str, frozenset[str]] | None:
        """Sums by these columns at least, with what they are by; None if a table stores none."""
        for name in (_THREADS, _SIZES, _PATHS):
            named = [(sums.by.get(name), frozenset(("run",) if run else ())) for run, sums in self._tables]
            if named and all(by is not None and columns <= by | run for by, run in named):
                return name, frozenset.intersection(*(by | run for by, run in named if by is not None))
        return None

    def find_texts(self, name: str) -> str | None:
        """The relation of `kinds` or `paths`, with their keys; None if a table does not store it."""
        needed = {"kinds": (_THREADS, _PATHS, _SIZES), "paths": (_PATHS,)}[name]
        have = all(any(one in sums.by for one in needed) for _, sums in self._tables)
        return self.relation(name) if have else None

    def relation(self, name: str) -> str:
        """The relation of the sums, or texts, of all tables."""
        view = f"penstock_stored_{name}"
        if view not in self._made:
            self._made.add(view)
            parts = [self._register(view, name, number) for number in range(len(self._tables))]
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {view} AS {' UNION ALL '.join(parts)}")
        return view

    def _register(self, view: str, name: str, number: int) -> str:
        run, sums = self._tables[number]
        table = sums.read(name)
        self._connection.register(f"{view}_{number}", table)
        selected = [number_key(key, number) for key in table.column_names if key != "run" or not run]
        if run:
            selected.append(f"{sql_literal(run)} AS run")
        return f"SELECT {', '.join(selected)} FROM {view}_{number}"


def number_key(column: str, number: int) -> str:
    """SQL of a column in a set of tables, each of which numbers its texts from 0 on."""
    if column not in KEYS:
        return f'"{column}"'
    return f"{column}::BIGINT + {number * _KEYS_OF_A_TABLE} AS {column}"
