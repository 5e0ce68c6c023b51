"""One block of JSON lines through DuckDB's JSON reader: a row of columns for each line.

The block lies in a file in memory, because DuckDB reads files. DuckDB parses and no more; what its columns
mean is found here, by column. A row is an event if its line is one whose numbers are whole and fit a double
exactly, so that nothing was rounded on the way; all other rows tell where lines are that need a closer look.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Final

import duckdb
import numpy as np
import pyarrow as pa

from penstock.trace.arrow_functions import (
    Flags,
    Numbers,
    decode,
    encode,
    fill_missing,
    find_distinct,
    find_valid,
    number_texts,
    take,
)
from penstock.trace.event_schema import canonical
from penstock.trace.reading.block_arguments import BlockArguments, LearnedKeys, count_but, count_members
from penstock.trace.reading.chunks import LINE_LIMIT_BYTES, PIECE_BYTES
from penstock.trace.reading.event_batch import (
    BYTE_LAYERS,
    BYTE_MOVERS,
    ITEM_MOVERS,
    SIZE_LIMIT,
    EventOrigin,
    FileContext,
    parse_int64,
    select_schema,
)
from penstock.trace.reading.lenient_json import (
    COMPLETE_PHASES,
    HASH_KINDS,
    METADATA_PHASES,
    PASSING_PHASES,
    HashKind,
    dump_arguments,
    name_new_path,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_EXACT: Final = 1 << 53
"""Doubles hold all whole numbers below."""
_TIME_LIMIT_US: Final = 1 << 61
_LONGEST_LINE: Final = LINE_LIMIT_BYTES + PIECE_BYTES
"""No chunk has a longer one."""
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
_TEXTS: Final = ("hostname", "hhash", "fname", "fhash")
_VALUES: Final = ("name", "value", "size")
"""Arguments that are read as JSON, because they have no column and stay among the others."""
_NUMBERS: Final = ("ret", "offset", "epoch", "step")
_TEXT_MEMBERS: Final = ("name", "ph", "cat")
_NUMBER_MEMBERS: Final = ("ts", "dur", "pid", "tid")
"""Members of a line that have a meaning, besides `args`."""
_OTHERS: Final = "num_others"
"""The number of other members of a line."""
_LIMITS: Final = dict.fromkeys(_NUMBERS, _EXACT) | dict.fromkeys(("epoch", "step"), 1 << 31)
"""Below which magnitudes a column holds a number."""
_EXPLAINING: Final = (*HASH_KINDS, "SH")
_ODD_TEXT: Final = re.compile(r"[\[{\d-]|(?:true|false)\Z")
_ODD_HASH: Final = re.compile(r"[\[{]|(?:true|false)\Z")
_MANY_UNREAD: Final = 1 / 64
"""The share of rows from which on it pays to parse a block again, with more keys."""
_MOST_MISSES: Final = 2
"""Blocks with members that could not be taken; after more of them, the others are taken to be like these."""


class BlockRows:
    """A row for each line of a block that is not blank."""

    def __init__(self, table: pa.Table, ns_per_tick: int, keys: Sequence[str] = ()) -> None:
        self._num_rows = int(table.num_rows)
        self._keys = keys
        self._table = table
        self.texts: dict[str, pa.DictionaryArray] = {}
        self.numbers: dict[str, npt.NDArray[Any]] = {}
        for name in table.column_names:
            if pa.types.is_string(table[name].type):
                if name != "raw":
                    self.texts[name] = encode(table[name])
            else:
                # Times in nanoseconds are integers, which are none where they are missing.
                column = table[name].combine_chunks()
                self.numbers[name] = (
                    fill_missing(column, -1) if pa.types.is_int64(column.type) else column
                ).to_numpy(zero_copy_only=False)
        is_plain = self._have_times(ns_per_tick) & self._have_whole_numbers(table) & self._have_plain_texts()
        self.events: Numbers = np.flatnonzero(is_plain)
        """Rows that are events."""
        others = np.flatnonzero(~is_plain)
        is_metadata = self._are_metadata(others)
        self.odd: Numbers = others[~is_metadata]
        """Rows of lines that Python must parse."""
        self.metadata: Numbers = others[is_metadata]
        """Rows of lines that explain hashes, or take no time."""

    def __len__(self) -> int:
        return self._num_rows

    def keep_first(self, num_rows: int) -> None:
        """Forget the rows from this number on."""
        self.events = self.events[self.events < num_rows]
        self.odd = self.odd[self.odd < num_rows]
        self.metadata = self.metadata[self.metadata < num_rows]
        self._num_rows = min(self._num_rows, num_rows)

    def set_aside(self, hashes: Collection[tuple[HashKind, str]]) -> None:
        """Make rows that have these hashes, or explain them, odd ones."""
        of_kind = {kind: {value for other, value in hashes if other is kind} for kind in HashKind}
        named = np.zeros(len(self._table), dtype=bool)
        for name, kind in (("arg_fhash", HashKind.FILE), ("arg_hhash", HashKind.HOST)):
            if name in self.texts and of_kind[kind]:
                named |= _are_in(self.texts[name], of_kind[kind].__contains__)
        either = set().union(*of_kind.values())
        explains = _are_in(self.texts["arg_value"], lambda value: _plain_text(value) in either)
        moved = (self.events[named[self.events]], self.metadata[explains[self.metadata]])
        self.odd = np.sort(np.concatenate((self.odd, *moved)))
        self.events = self.events[~named[self.events]]
        self.metadata = self.metadata[~explains[self.metadata]]

    def explained_hashes(self) -> Iterator[tuple[HashKind, str, str]]:
        """The hashes that lines of metadata explain, and their texts."""
        if "arg_value" not in self.texts:
            return
        rows = self.metadata
        columns = (take(self.texts[name], rows).to_pylist() for name in ("name", "arg_value", "arg_name"))
        for name, value, text in zip(*columns, strict=True):
            if name in HASH_KINDS and value is not None and text is not None:
                yield HASH_KINDS[name], _plain_text(value), _plain_text(text)

    @cached_property
    def arguments(self) -> BlockArguments:
        """The arguments; only if all columns were asked for."""
        held = [find_valid(self.text(f"arg_{key}").indices) for key in _TEXTS]
        held += [np.abs(self.number(f"arg_{name}")) < _LIMITS[name] for name in _NUMBERS]
        rest = {key: self.text(f"arg_{key}") for key in (*_VALUES, *self._keys)}
        raw = self._table["raw"].combine_chunks() if "raw" in self._table.column_names else None
        return BlockArguments(held, rest, raw)

    def count_taken(self) -> int:
        """The members of all lines but odd ones that were taken."""
        flags = [find_valid(self.texts[name].indices) for name in _TEXT_MEMBERS]
        # Of times, those that are missing are negative, or NaN as for all others.
        lowest = {"ts": 0, "dur": 0}
        flags += [self.numbers[name] >= lowest.get(name, -np.inf) for name in _NUMBER_MEMBERS]
        others = self.numbers[_OTHERS]
        num_taken = self.arguments.count_taken(self.odd) + int(others.sum()) - int(others[self.odd].sum())
        return num_taken + sum(count_but(one, self.odd) for one in flags)

    @property
    def may_lack_members(self) -> bool:
        """Whether lines may have members that were not taken."""
        return _OTHERS in self.numbers

    def text(self, name: str) -> pa.DictionaryArray:
        """A column of texts; missing ones if it was not asked for."""
        if name not in self.texts:
            nothing = pa.nulls(len(self._table), pa.int32())
            self.texts[name] = pa.DictionaryArray.from_arrays(nothing, pa.array([], pa.string()))
        return self.texts[name]

    def number(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers; NaN if it was not asked for."""
        if name not in self.numbers:
            self.numbers[name] = np.full(len(self._table), np.nan)
        return self.numbers[name]

    def _are_metadata(self, rows: Numbers) -> Flags:
        """Whether these rows, none of which is plain, explain hashes or are of events that take no time."""
        names, phases = self.texts["name"], self.texts["ph"]
        kinds = [
            [phase in PASSING_PHASES or (phase in METADATA_PHASES and name in _EXPLAINING) for name in of_all]
            for of_all in [[*names.dictionary.to_pylist(), None]]
            for phase in [*phases.dictionary.to_pylist(), None]
        ]
        are_metadata: Flags = np.array(kinds)[number_texts(phases)[rows], number_texts(names)[rows]]
        return are_metadata

    def _have_times(self, ns_per_tick: int) -> Flags:
        """Rows that begin, and last, whole ticks."""
        limit = min(_EXACT if ns_per_tick >= 1000 else _TIME_LIMIT_US, _TIME_LIMIT_US * 1000 // ns_per_tick)
        have = np.ones(len(self), dtype=bool)
        for name in ("ts", "dur"):
            ticks = self.numbers[name]
            # Comparisons with what is missing, NaN, are false.
            have &= (ticks >= 0) & (ticks < limit) & (ticks == np.trunc(ticks))
        return have

    def _have_whole_numbers(self, table: pa.Table) -> Flags:
        """Rows whose other numbers are missing, or whole and exact."""
        have = np.ones(len(self), dtype=bool)
        for name in self.numbers.keys() - {"ts", "dur", _OTHERS}:
            values, num_missing = self.numbers[name], table[name].null_count
            if num_missing == len(values):
                continue
            is_nan = np.isnan(values)
            if np.count_nonzero(is_nan) > num_missing:
                is_nan = ~find_valid(table[name].combine_chunks())
            have &= is_nan | ((np.abs(values) < _EXACT) & (values == np.trunc(values)))
        return have

    def _have_plain_texts(self) -> Flags:
        """Rows of complete events whose texts are none that DuckDB made of numbers, lists or objects."""
        have = _are_in(self.texts["ph"], lambda phase: phase in COMPLETE_PHASES)
        have &= _are_in(self.texts["name"], lambda name: name != "end" and not _ODD_TEXT.match(name))
        for name in ("arg_fname", "arg_hostname"):
            if name in self.texts and self.texts[name].null_count < len(self):
                have &= ~_are_in(self.texts[name], lambda text: _ODD_TEXT.match(text) is not None)
        for name in ("arg_fhash", "arg_hhash"):
            if name in self.texts:
                # Hashes are many: most need no more than a look at their first letter.
                have &= ~_are_in(
                    self.texts[name], lambda text: text[:1] in "[{tf" and _ODD_HASH.match(text) is not None
                )
        return have


def _are_in(column: pa.DictionaryArray, is_wanted: Callable[[str], bool]) -> Flags:
    """Rows with a text for which this holds; a missing text is none."""
    wanted = [is_wanted(text) for text in column.dictionary.to_pylist()]
    flags: Flags = np.array([*wanted, False])[number_texts(column)]
    return flags


def _plain_text(value: str) -> str:
    """The text of a JSON value, which may be a number."""
    if value.startswith('"') and "\\" not in value:
        return value[1:-1]
    text = json.loads(value)
    return text if isinstance(text, str) else value


class BlockQuery:
    """The query for blocks of one file, and the file in memory that it reads."""

    _last_keys: ClassVar[LearnedKeys | None] = None
    """The keys of a file read before: those of the same run are alike, and need not be learned again."""

    def __init__(self, columns: frozenset[str]) -> None:
        self._columns = columns
        self._keys: LearnedKeys | None = None
        self._num_misses = 0
        self._source = ""
        self._cursor = _share_database().cursor()
        self._file = os.memfd_create("penstock-trace-block")

    def run(self, parts: Sequence[memoryview | bytes], ns_per_tick: int) -> BlockRows:
        """A row for each line that is not blank, in order; `complete` must follow if it may lack members."""
        sizes_bytes = list(map(len, parts))
        size_bytes = sum(sizes_bytes)
        # No line is longer than its part. DuckDB takes memory for two, anew for each query.
        self._source = _describe_source(self._file, min(max(PIECE_BYTES, *sizes_bytes), _LONGEST_LINE))
        os.pwritev(self._file, parts, 0)
        # Cut behind the block, not before it: the pages of the last block are written again.
        os.ftruncate(self._file, size_bytes)
        if "args" not in self._columns:
            return self._select(self._build(_arguments_of(self._columns), ns_per_tick), ns_per_tick)
        if self._keys is None:
            known = (*_TEXT_MEMBERS, *_NUMBER_MEMBERS, "args"), list(_ALL_ARGUMENTS)
            last = BlockQuery._last_keys
            self._keys = LearnedKeys(*known) if last is None else last.copy()
            self._keys.learn_lines(parts[:1])
        keys = self._keys
        arguments = {key: kind for key, kind in _ALL_ARGUMENTS.items() if key in keys.seen}
        arguments |= dict.fromkeys(keys.arguments, "JSON")
        if not arguments or self._num_misses > _MOST_MISSES:
            return self._select_with_objects(ns_per_tick)
        return self._select(self._build(arguments, ns_per_tick, keys.members), ns_per_tick)

    def complete(
        self, rows: BlockRows, parts: Sequence[memoryview | bytes], odd: bytes, ns_per_tick: int
    ) -> BlockRows:
        """The rows of the block that was run last, with all members of its lines; `odd` are the odd lines."""
        num_members, num_odd = count_members(parts), count_members([odd] if odd else [])
        if None not in (num_members, num_odd) and num_members == rows.count_taken() + (num_odd or 0):
            return rows
        keys, is_new = self._keys, False
        whole = self._select_with_objects(ns_per_tick)
        if keys is not None:
            arguments = whole.arguments
            unread = arguments.find_unread()
            is_new = keys.learn_objects(arguments, unread)
            if is_new and len(unread) > _MANY_UNREAD * len(whole):
                whole = self._select_with_objects(ns_per_tick)
            is_new |= keys.learn_lines(parts)
        self._num_misses += not is_new
        return whole

    def _select_with_objects(self, ns_per_tick: int) -> BlockRows:
        """Rows with the text of each object of arguments, which tells what else is in it."""
        learned = dict.fromkeys(self._keys.arguments if self._keys is not None else (), "JSON")
        return self._select(self._build(_ALL_ARGUMENTS | learned, ns_per_tick), ns_per_tick)

    def _build(
        self, arguments: Mapping[str, str], ns_per_tick: int, others: Mapping[str, str] | None = None
    ) -> str:
        return _build_query(self._columns, ns_per_tick, self._source, arguments, others)

    def _select(self, query: str, ns_per_tick: int) -> BlockRows:
        keys = self._keys.arguments if self._keys is not None else ()
        return BlockRows(self._cursor.sql(query).to_arrow_table(), ns_per_tick, tuple(keys))

    def close(self) -> None:
        """Give back the memory."""
        if self._keys is not None and self._keys.has_room:
            BlockQuery._last_keys = self._keys
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
    events = _BlockEvents(rows, origin, context, resolve)
    schema = select_schema(columns)
    return pa.RecordBatch.from_arrays([events.column(field.name) for field in schema], schema=schema)


ResolveHashOfEvents = Callable[[HashKind, Sequence[str], Sequence[int]], list[str]]
"""Returns the texts of hashes, each of which so many events have."""


class _BlockEvents:
    """The events of a block by column. Texts are mapped once each, because most of them repeat."""

    def __init__(
        self, rows: BlockRows, origin: EventOrigin, context: FileContext, resolve: ResolveHashOfEvents
    ) -> None:
        self._rows = rows
        self._events = rows.events
        self._origin = origin
        self._context = context
        self._resolve = resolve

    def column(self, name: str) -> pa.Array:
        """One column of the event schema."""
        match name:
            case "op":
                return self._map(self._text("name"), canonical)
            case "name" | "cat":
                return _fill_missing(self._text(name))
            case "host":
                return self._resolve_names("arg_hostname", "arg_hhash", HashKind.HOST)
            case "path":
                return self._resolve_names("arg_fname", "arg_fhash", HashKind.FILE)
            case "args":
                return self._name_new_paths(self._rows.arguments.texts(self._events))
        return self._other_column(name)

    def _other_column(self, name: str) -> pa.Array:
        match name:
            case "ts_us" | "dur_us" | "end_us":
                return pa.array(self._times_us(name))
            case "pid" | "tid":
                return pa.array(self._ids(name))
            case "size_bytes":
                return self._transfer_sizes()
            case "rank":
                return self._ranks()
            case "run" | "file":
                zeros = np.zeros(len(self._events), dtype=np.int32)
                return pa.DictionaryArray.from_arrays(zeros, [getattr(self._origin, name)])
        values = self._number(f"arg_{name}")
        # What is missing, NaN, is not within the limit either.
        is_held = np.abs(values) < _LIMITS[name]
        kind = np.int32 if name in ("epoch", "step") else np.int64
        return pa.array(np.where(is_held, values, 0).astype(kind), mask=~is_held)

    def _number(self, name: str) -> npt.NDArray[Any]:
        values = self._rows.number(name)
        return values if len(self._events) == len(values) else values[self._events]

    def _times_us(self, name: str) -> Numbers:
        ns_per_tick = self._context.ns_per_tick
        start, duration = (self._number(ticks).astype(np.int64) for ticks in ("ts", "dur"))
        if ns_per_tick >= 1000:
            start, duration = start * (ns_per_tick // 1000), duration * (ns_per_tick // 1000)
        else:
            # Ends are cut like starts, see `lenient_json`.
            end, start = (start + duration) // 1000, start // 1000
            duration = end - start
        times: Numbers = {"ts_us": start, "dur_us": duration}.get(name, start + duration)
        return times

    def _ids(self, name: str) -> Numbers:
        values = self._number(name)
        if name == "tid":
            values = np.where(np.isnan(values), self._number("pid"), values)
        ids: Numbers = np.nan_to_num(values, nan=0.0).astype(np.int64)
        return ids

    def _text(self, name: str) -> pa.DictionaryArray:
        column = self._rows.text(name)
        return column if len(self._events) == len(column) else take(column, self._events)

    def _map(self, encoded: pa.DictionaryArray, function: Callable[[str], str]) -> pa.DictionaryArray:
        texts = [function(text) for text in encoded.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))

    def _name_new_paths(self, encoded: pa.DictionaryArray) -> pa.DictionaryArray:
        texts = encoded.dictionary.to_pylist()
        if not any('"newpath_hash"' in text for text in texts):
            return encoded
        counts = np.bincount(number_texts(encoded), minlength=len(texts)).tolist()
        named = list(map(self._name_new_path, texts, counts))
        return pa.DictionaryArray.from_arrays(encoded.indices, pa.array(named, pa.string()))

    def _name_new_path(self, text: str, num_events: int) -> str:
        if '"newpath_hash"' not in text:
            return text
        named = name_new_path(
            json.loads(text), lambda kind, value: self._resolve(kind, [value], [num_events])[0]
        )
        return dump_arguments(named)

    def _resolve_names(self, plain: str, hashed: str, kind: HashKind) -> pa.DictionaryArray:
        """Names as they were traced, else those that hashes stand for."""
        names, hashes = self._text(plain), self._text(hashed)
        if hashes.null_count == len(hashes):
            return names
        size = len(hashes.dictionary)
        numbers, is_named = number_texts(hashes), find_valid(names.indices)
        counts = np.bincount(numbers[~is_named], minlength=size + 1)
        texts = self._resolve(kind, hashes.dictionary.to_pylist(), counts[:size].tolist())
        if not is_named.any():
            return pa.DictionaryArray.from_arrays(hashes.indices, pa.array(texts, pa.string()))
        distinct: dict[str | None, int] = {}
        # Events with neither have the last number, that of None.
        for text in (*names.dictionary.to_pylist(), *texts):
            distinct.setdefault(text, len(distinct))
        place_of = [distinct[text] for text in (*names.dictionary.to_pylist(), *texts)]
        number_of = np.where(is_named, number_texts(names), len(names.dictionary) + numbers)
        return decode(np.array([*place_of, len(distinct)])[number_of], [*distinct, None])

    def _transfer_sizes(self) -> pa.Array:
        """The bytes that each event moved; `event_batch.transfer_size` is the same rule for one event."""
        names, cats = self._text("name"), _fill_missing(self._text("cat"))
        ops = [canonical(name) for name in names.dictionary.to_pylist()]
        layers = cats.dictionary.to_pylist()
        name_codes, cat_codes = names.indices.to_numpy(), cats.indices.to_numpy()
        moves_bytes = np.isin(ops, list(BYTE_MOVERS))[name_codes] & np.isin(layers, BYTE_LAYERS)[cat_codes]
        moves_items = np.isin(ops, list(ITEM_MOVERS))[name_codes] & np.isin(layers, ["STDIO"])[cat_codes]
        sizes = self._number("arg_ret")
        if moves_items.any():
            sizes = np.where(moves_items, sizes * self._item_sizes(), sizes)
        # Also false for what is missing.
        is_valid = (moves_bytes | moves_items) & (sizes >= 0) & (sizes < SIZE_LIMIT)
        return pa.array(np.where(is_valid, sizes, 0).astype(np.int64), mask=~is_valid)

    def _item_sizes(self) -> npt.NDArray[np.float64]:
        """The argument `size`; NaN where it is none."""
        column = self._text("arg_size")
        sizes = [parse_int64(json.loads(text)) for text in column.dictionary.to_pylist()]
        values = np.array([np.nan if size is None else size for size in (*sizes, None)], dtype=float)
        found: npt.NDArray[np.float64] = values[number_texts(column)]
        return found

    def _ranks(self) -> pa.Array:
        ranks, own = self._context.ranks, self._origin.rank
        if not ranks:
            return pa.repeat(pa.scalar(own, pa.int32()), len(self._events))
        known, places = find_distinct(self._ids("pid"))
        return take(pa.array([ranks.get(pid, own) for pid in known.tolist()], pa.int32()), places)


def _fill_missing(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """The column with an empty text wherever there is none."""
    if not column.null_count:
        return column
    return decode(number_texts(column), [*column.dictionary.to_pylist(), ""])


_DATABASE_LOCK: Final = Lock()


def _share_database() -> duckdb.DuckDBPyConnection:
    """One database for all readers, because opening one takes longer than reading a small trace."""
    with _DATABASE_LOCK:
        return _open_database()


@cache
def _open_database() -> duckdb.DuckDBPyConnection:
    # Files are read side by side; a block is too small to be divided.
    return duckdb.connect(config={"threads": 1})


def _describe_source(file: int, longest_line: int) -> str:
    """The arguments of DuckDB's reader that do not depend on the columns."""
    return (
        f"'/proc/self/fd/{file}', format = 'newline_delimited', ignore_errors = true,"
        f" compression = 'uncompressed', maximum_object_size = {longest_line}"
    )


def _build_query(
    columns: frozenset[str],
    ns_per_tick: int,
    source: str,
    arguments: Mapping[str, str],
    others: Mapping[str, str] | None,
) -> str:
    """SELECT what these columns need of each object, as DuckDB parses it.

    With `others`, how many of these members each object has; without, the text of `args`, if it is a column.
    """
    with_objects = "args" in columns and others is None
    types = {"name": "VARCHAR", "ph": "VARCHAR", **dict.fromkeys(("ts", "dur"), _time_type(ns_per_tick))}
    if columns & {"cat", "size_bytes"}:
        types["cat"] = "VARCHAR"
    if columns & {"pid", "tid", "rank"}:
        types["pid"] = "DOUBLE"
    if "tid" in columns:
        types["tid"] = "DOUBLE"
    selected = ["name", "ph", *(_time_sql(name, ns_per_tick) for name in ("ts", "dur"))]
    selected += [name for name in ("cat", "pid", "tid") if name in types]
    if others is not None:
        types |= others
        are_there = (f'("{name}" IS NOT NULL)::UTINYINT' for name in (*others, "args"))
        selected.append(f"{' + '.join(are_there)} AS {_OTHERS}")
    if with_objects:
        types["args"] = "JSON"
    elif arguments:
        types["args"] = "STRUCT(" + ", ".join(f'"{key}" {kind}' for key, kind in arguments.items()) + ")"
    listed = ", ".join(f"\"{name}\": '{kind}'" for name, kind in types.items())
    source = f"read_json({source}, columns = {{{listed}}})"
    for key, kind in arguments.items():
        value = f'args."{key}"'
        selected.append(f'{value}::VARCHAR AS "arg_{key}"' if kind == "JSON" else f'{value} AS "arg_{key}"')
    if with_objects:
        selected.append("raw::VARCHAR AS raw")
        source = f"(SELECT *, args AS raw FROM {source})"
        source = f"(SELECT * REPLACE (from_json(raw, '{json.dumps(dict(arguments))}') AS args) FROM {source})"
    return f"SELECT {', '.join(selected)} FROM {source}"


_ALL_ARGUMENTS: Final = (
    dict.fromkeys(_TEXTS, "VARCHAR") | dict.fromkeys(_VALUES, "JSON") | dict.fromkeys(_NUMBERS, "DOUBLE")
)
"""The arguments that have a meaning, and their types."""


def _arguments_of(columns: frozenset[str]) -> dict[str, str]:
    """The arguments that columns need, and their types."""
    needed = {key for column in columns for key in _ARGUMENTS.get(column, ())}
    return {key: kind for key, kind in _ALL_ARGUMENTS.items() if key in needed}


def _time_type(ns_per_tick: int) -> str:
    """Doubles hold microseconds since 1970, but not nanoseconds."""
    return "DOUBLE" if ns_per_tick >= 1000 else "DECIMAL(28, 3)"


def _time_sql(name: str, ns_per_tick: int) -> str:
    """A time in ticks. NULL where a decimal is no whole number that fits: numpy has no decimals."""
    if ns_per_tick >= 1000:
        return name
    limit = _EXACT if name == "dur" else _TIME_LIMIT_US
    is_whole = f"{name} = trunc({name}) AND {name} BETWEEN 0 AND {limit - 1}"
    return f"CASE WHEN {is_whole} THEN {name}::BIGINT END AS {name}"
