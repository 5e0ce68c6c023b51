"""One block of JSON lines through DuckDB's JSON reader: a row of columns for each line.

The block lies in a file in memory, because DuckDB reads files. A row is plain if its line is an event whose
numbers are whole and fit a double exactly, so that nothing was rounded on the way; all other rows tell where
lines are that need a closer look.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.trace.event_schema import canonical
from penstock.trace.reading.chunks import LINE_LIMIT_BYTES, PIECE_BYTES
from penstock.trace.reading.event_batch import (
    BYTE_LAYERS,
    BYTE_MOVERS,
    ITEM_MOVERS,
    SIZE_LIMIT,
    EventOrigin,
    FileContext,
    select_schema,
)
from penstock.trace.reading.lenient_json import (
    COMPLETE_PHASES,
    HASH_KINDS,
    METADATA_PHASES,
    PASSING_PHASES,
    HashKind,
    name_new_path,
)

Numbers = npt.NDArray[np.int64]

_EXACT: Final = 1 << 53
"""Doubles hold all whole numbers below."""
_TIME_LIMIT_US: Final = 1 << 61
_LONGEST_LINE: Final = LINE_LIMIT_BYTES + PIECE_BYTES
"""No chunk has a longer one. DuckDB takes memory for two."""
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "size_bytes": ("ret", "size"),
    "ret": ("ret",),
    "offset": ("offset",),
    "epoch": ("epoch",),
    "step": ("step",),
    "host": ("hostname", "hhash", "name", "value"),
    "path": ("fname", "fhash", "name", "value"),
}
"""Which of an event's arguments a column needs; `name` and `value` are those of lines that explain hashes."""
_TEXTS: Final = ("hostname", "hhash", "fname", "fhash", "name", "value")
_NUMBERS: Final = {
    "ret": "BIGINT",
    "size": "BIGINT",
    "offset": "BIGINT",
    "epoch": "INTEGER",
    "step": "INTEGER",
}
_EXPLAINING: Final = (*HASH_KINDS, "SH")
_ODD_TEXT: Final = re.compile(r"[\[{\d-]|(?:true|false)\Z")
_OWN_COLUMNS: Final = ("ret", "offset", "epoch", "step")


class BlockRows:
    """A row for each line of a block that is not blank."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        plain: npt.NDArray[np.bool_] = table["is_plain"].to_numpy()
        self.is_plain = plain & ~self._have_odd_text()
        """Rows that are events."""
        others = np.flatnonzero(~self.is_plain)
        is_metadata = np.array(self._are_metadata(others), dtype=bool)
        self.odd: Numbers = others[~is_metadata]
        """Rows of lines that Python must parse."""
        self.metadata: Numbers = others[is_metadata]
        """Rows of lines that explain hashes, or take no time."""
        self.num_events = len(self) - len(others)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def first(self, num_rows: int) -> BlockRows:
        """The rows before the one of this number."""
        return self if num_rows >= len(self) else BlockRows(self.table.slice(0, num_rows))

    def explained_hashes(self) -> Iterator[tuple[HashKind, str, str]]:
        """The hashes that lines of metadata explain, and their texts."""
        if "arg_value" not in self.table.column_names:
            return
        rows = self.table.select(["name", "arg_value", "arg_name"]).take(pa.array(self.metadata))
        for name, value, text in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            if name in HASH_KINDS and value is not None and text is not None:
                yield HASH_KINDS[name], value, text

    def _are_metadata(self, rows: Numbers) -> list[bool]:
        """Whether these rows, none of which is plain, explain hashes or are of events that take no time."""
        others = self.table.select(["name", "phase"]).take(pa.array(rows))
        return [
            phase in PASSING_PHASES or (phase in METADATA_PHASES and name in _EXPLAINING)
            for name, phase in zip(others["name"].to_pylist(), others["phase"].to_pylist(), strict=True)
        ]

    def _have_odd_text(self) -> npt.NDArray[np.bool_]:
        """Rows whose texts may be numbers, lists or objects, of which DuckDB makes texts."""
        is_odd = np.zeros(len(self), dtype=bool)
        for name in ("name", "arg_fname", "arg_hostname"):
            if name not in self.table.column_names:
                continue
            column = self.table[name].combine_chunks().dictionary_encode()
            self.table = self.table.set_column(self.table.column_names.index(name), name, column)
            odd = [
                number for number, text in enumerate(column.dictionary.to_pylist()) if _ODD_TEXT.match(text)
            ]
            if odd:
                is_odd |= np.isin(column.indices.fill_null(-1).to_numpy(), odd)
        return is_odd


class BlockQuery:
    """The query for blocks of one file, and the file in memory that it reads."""

    def __init__(self, columns: frozenset[str]) -> None:
        self._columns = columns
        self._cursor = _share_database().cursor()
        self._file = os.memfd_create("penstock-trace-block")

    def run(self, parts: Sequence[memoryview | bytes], ns_per_tick: int) -> BlockRows:
        """A row for each line that is not blank, in order."""
        size_bytes = sum(map(len, parts))
        os.pwritev(self._file, parts, 0)
        # Cut behind the block, not before it: the pages of the last block are written again.
        os.ftruncate(self._file, size_bytes)
        source = (
            f"read_json('/proc/self/fd/{self._file}', format = 'newline_delimited', ignore_errors = true,"
            f" compression = 'uncompressed', maximum_object_size = {_LONGEST_LINE},"
            f" columns = {_json_columns(self._columns, ns_per_tick)})"
        )
        return BlockRows(self._cursor.sql(_build_query(self._columns, ns_per_tick, source)).to_arrow_table())

    def close(self) -> None:
        """Give back the memory."""
        self._cursor.close()
        os.close(self._file)


def build_block_batch(
    rows: BlockRows,
    columns: frozenset[str],
    origin: EventOrigin,
    context: FileContext,
    resolve: ResolveHashOfEvents,
) -> pa.RecordBatch:
    """The events of a block, as a batch."""
    table = rows.table
    if rows.num_events < len(rows):
        table = table.filter(pa.array(rows.is_plain))
    events = _BlockEvents(table, origin, context, resolve)
    schema = select_schema(columns)
    arrays = [events.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(
        [array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array for array in arrays],
        schema=schema,
    )


ResolveHashOfEvents = Callable[[HashKind, str, int], str]
"""Returns the text of a hash that so many events have."""


class _BlockEvents:
    """The events of a block by column. Texts are mapped once each, because most of them repeat."""

    def __init__(
        self, table: pa.Table, origin: EventOrigin, context: FileContext, resolve: ResolveHashOfEvents
    ) -> None:
        self._table = table
        self._origin = origin
        self._context = context
        self._resolve = resolve

    def column(self, name: str) -> Any:
        """One column of the event schema."""
        match name:
            case "op" | "name" | "cat":
                return self._map("name", canonical) if name == "op" else self._encode(name)
            case "host":
                return self._resolve_names("arg_hostname", "arg_hhash", HashKind.HOST)
            case "path":
                return self._resolve_names("arg_fname", "arg_fhash", HashKind.FILE)
            case "args":
                return self._name_new_paths()
            case "run" | "file":
                zeros = np.zeros(len(self._table), dtype=np.int32)
                return pa.DictionaryArray.from_arrays(zeros, [getattr(self._origin, name)])
        return self._number_column(name)

    def _number_column(self, name: str) -> Any:
        match name:
            case "end_us":
                return pa.array(self._table["ts_us"].to_numpy() + self._table["dur_us"].to_numpy())
            case "size_bytes":
                return self._transfer_sizes()
            case "rank":
                return self._ranks()
            case "offset" | "ret" | "epoch" | "step":
                return self._table[f"arg_{name}"]
            case _:
                return self._table[name]

    def _encode(self, column: str) -> pa.DictionaryArray:
        array = self._table[column].combine_chunks()
        return array if isinstance(array, pa.DictionaryArray) else array.dictionary_encode()

    def _map(self, column: str, function: Callable[[str], str]) -> pa.DictionaryArray:
        encoded = self._encode(column)
        texts = [function(text) for text in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))

    def _name_new_paths(self) -> pa.DictionaryArray:
        encoded = self._encode("args")
        texts = encoded.dictionary.to_pylist()
        if not any('"newpath_hash"' in text for text in texts):
            return encoded
        counts = np.bincount(encoded.indices.to_numpy(), minlength=len(texts)).tolist()
        named = list(map(self._name_new_path, texts, counts))
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(named, pa.string()))

    def _name_new_path(self, text: str, num_events: int) -> str:
        if '"newpath_hash"' not in text:
            return text
        named = name_new_path(json.loads(text), lambda kind, value: self._resolve(kind, value, num_events))
        return json.dumps(named, separators=(",", ":"))

    def _resolve_names(self, plain: str, hashed: str, kind: HashKind) -> pa.DictionaryArray:
        """Names as they were traced, else those that hashes stand for."""
        names, hashes = self._encode(plain), self._encode(hashed)
        if hashes.null_count == len(hashes):
            return names
        size = len(hashes.dictionary)
        numbers = hashes.indices.fill_null(size).to_numpy()
        is_named = names.indices.is_valid().to_numpy(zero_copy_only=False)
        counts = np.bincount(numbers[~is_named], minlength=size + 1)
        texts = [
            self._resolve(kind, text, int(count)) if count else text
            for text, count in zip(hashes.dictionary.to_pylist(), counts, strict=False)
        ]
        if not is_named.any():
            return pa.DictionaryArray.from_arrays(hashes.indices, pa.array(texts, pa.string()))
        named = names.dictionary.to_pylist()
        # Events with neither have the last number, that of None.
        number_of = np.where(is_named, names.indices.fill_null(0).to_numpy(), len(named) + numbers)
        both = pa.DictionaryArray.from_arrays(
            pa.array(number_of), pa.array([*named, *texts, None], pa.string())
        )
        resolved = pa.DictionaryArray.from_arrays(pa.array(number_of), both)
        return resolved.cast(pa.string()).dictionary_encode()

    def _transfer_sizes(self) -> pa.Array:
        """The bytes that each event moved; `event_batch.transfer_size` is the same rule for one event."""
        names, cats = self._encode("name"), self._encode("cat")
        ops = [canonical(name) for name in names.dictionary.to_pylist()]
        layers = cats.dictionary.to_pylist()
        name_codes, cat_codes = names.indices.to_numpy(), cats.indices.to_numpy()
        moves_bytes = np.isin(ops, list(BYTE_MOVERS))[name_codes] & np.isin(layers, BYTE_LAYERS)[cat_codes]
        moves_items = np.isin(ops, list(ITEM_MOVERS))[name_codes] & np.isin(layers, ["STDIO"])[cat_codes]
        ret = self._table["arg_ret"].combine_chunks()
        is_valid = ret.is_valid().to_numpy(zero_copy_only=False)
        sizes = ret.fill_null(-1).to_numpy()
        factors = np.ones(1, dtype=np.int64)
        if moves_items.any():
            item_bytes = self._table["arg_size"].combine_chunks()
            is_valid = is_valid & (moves_bytes | item_bytes.is_valid().to_numpy(zero_copy_only=False))
            factors = np.where(moves_items, item_bytes.fill_null(0).to_numpy(), 1)
        # A product of doubles, because that of integers may exceed 64 bits.
        is_valid = is_valid & (sizes.astype(float) * factors < SIZE_LIMIT)
        sizes = sizes * factors
        is_valid = is_valid & (moves_bytes | moves_items) & (sizes >= 0)
        return pa.array(sizes, mask=~is_valid)

    def _ranks(self) -> pa.Array:
        ranks, own = self._context.ranks, self._origin.rank
        if not ranks:
            return pa.repeat(pa.scalar(own, pa.int32()), len(self._table))
        known, places = np.unique(self._table["pid"].to_numpy(), return_inverse=True)
        return pa.array([ranks.get(pid, own) for pid in known.tolist()], pa.int32()).take(pa.array(places))


_DATABASE_LOCK: Final = Lock()


def _share_database() -> duckdb.DuckDBPyConnection:
    """One database for all readers, because opening one takes longer than reading a small trace."""
    with _DATABASE_LOCK:
        return _open_database()


@cache
def _open_database() -> duckdb.DuckDBPyConnection:
    # Files are read side by side; a block is too small to be divided.
    return duckdb.connect(config={"threads": 1})


def _arguments_of(columns: frozenset[str]) -> list[str]:
    needed = {key for column in columns for key in _ARGUMENTS.get(column, ())}
    if "args" in columns:
        needed |= {"hostname", "hhash", "fname", "fhash", *_OWN_COLUMNS}
    return [key for key in (*_TEXTS, *_NUMBERS) if key in needed]


def _json_columns(columns: frozenset[str], ns_per_tick: int) -> str:
    """What DuckDB takes of each object. Doubles hold microseconds since 1970, but not nanoseconds."""
    time = "DOUBLE" if ns_per_tick >= 1000 else "DECIMAL(28, 3)"
    types = {"name": "VARCHAR", "ph": "VARCHAR", "ts": time, "dur": time}
    if columns & {"cat", "size_bytes"}:
        types["cat"] = "VARCHAR"
    if columns & {"pid", "tid", "rank"}:
        types["pid"] = "DOUBLE"
    if "tid" in columns:
        types["tid"] = "DOUBLE"
    arguments = _arguments_of(columns)
    if "args" in columns:
        types["args"] = "JSON"
    elif arguments:
        fields = ", ".join(f'"{key}" {_type_of(key)}' for key in arguments)
        types["args"] = f"STRUCT({fields})"
    return "{" + ", ".join(f"{name}: '{kind}'" for name, kind in types.items()) + "}"


def _type_of(argument: str) -> str:
    return "VARCHAR" if argument in _TEXTS else "DOUBLE"


@cache
def _build_query(columns: frozenset[str], ns_per_tick: int, source: str) -> str:
    arguments = _arguments_of(columns)
    given = f"SELECT * FROM {source}"
    if "args" in columns:
        spec = json.dumps({key: _type_of(key) for key in arguments})
        given = f"SELECT * EXCLUDE (args), args AS raw, from_json(args, '{spec}') AS args FROM {source}"
    whole = [column for column in ("pid", "tid") if f"{column}: " in source]
    whole += [f'args."{key}"' for key in arguments if key in _NUMBERS]
    plain = [
        f"ph IN {_sql_list(COMPLETE_PHASES)}",
        "name <> 'end'",
        "ts >= 0",
        f"ts < {_EXACT if ns_per_tick >= 1000 else _TIME_LIMIT_US}",
        f"ts < {_TIME_LIMIT_US * 1000 // ns_per_tick}",
        "ts = trunc(ts)",
        "dur >= 0",
        f"dur < {_EXACT}",
        f"dur < {_TIME_LIMIT_US * 1000 // ns_per_tick}",
        "dur = trunc(dur)",
        *(
            f"({number} IS NULL OR ({number} = trunc({number}) AND abs({number}) < {_EXACT}))"
            for number in whole
        ),
    ]
    duration = _scale("dur", ns_per_tick)
    if ns_per_tick < 1000:
        # Ends are cut like starts, see `lenient_json`.
        duration = f"{_scale('ts + dur', ns_per_tick)} - {_scale('ts', ns_per_tick)}"
    selected = [
        "name",
        "is_plain",
        "CASE WHEN is_plain THEN NULL ELSE ph END AS phase",
        f"{_scale('ts', ns_per_tick)} AS ts_us",
        f"{duration} AS dur_us",
    ]
    if "cat: " in source:
        selected.append("coalesce(cat, '') AS cat")
    if "pid: " in source:
        selected.append("coalesce(TRY_CAST(pid AS BIGINT), 0) AS pid")
    if "tid: " in source:
        selected.append("coalesce(TRY_CAST(tid AS BIGINT), TRY_CAST(pid AS BIGINT), 0) AS tid")
    for key in arguments:
        value = f'args."{key}"'
        value = f"TRY_CAST({value} AS {_NUMBERS[key]})" if key in _NUMBERS else value
        selected.append(f'{value} AS "arg_{key}"')
    if "args" in columns:
        selected.append(f"{_rest_of_arguments()} AS args")
    return (
        f"SELECT {', '.join(selected)} FROM"
        f" (SELECT *, coalesce({' AND '.join(plain)}, false) AS is_plain FROM ({given}))"
    )


def _scale(time: str, ns_per_tick: int) -> str:
    """A plain row's time in microseconds, cut. Elsewhere the number may be too large to be scaled."""
    if ns_per_tick == 1000:
        return f"TRY_CAST({time} AS BIGINT)"
    whole = f"({time})::BIGINT"
    scaled = f"{whole} * {ns_per_tick // 1000}" if ns_per_tick > 1000 else f"{whole} // 1000"
    return f"CASE WHEN is_plain THEN {scaled} END"


def _rest_of_arguments() -> str:
    """The arguments without those that have a column, unless the column could not hold the value."""
    patch = '{"fname":null,"fhash":null,"hostname":null,"hhash":null'
    held = [
        f"CASE WHEN TRY_CAST(args.\"{key}\" AS {_NUMBERS[key]}) IS NULL THEN '' ELSE ',\"{key}\":null' END"
        for key in _OWN_COLUMNS
    ]
    merged = f"json_merge_patch(raw, concat('{patch}', {', '.join(held)}, '}}'))::VARCHAR"
    return f"CASE WHEN starts_with(raw, '{{') THEN {merged} ELSE '{{}}' END"


def _sql_list(texts: Sequence[str]) -> str:
    quoted = ", ".join("'" + text.replace("'", "''") + "'" for text in texts)
    return f"({quoted})"
