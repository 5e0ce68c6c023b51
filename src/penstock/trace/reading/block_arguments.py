"""The arguments of a block's events that no column holds, as JSON text.

DuckDB takes the members of an object that it is asked for, and does not say which others there are. Each
member has one `":` in the text of its object, as DuckDB writes it: where as many were taken as there are,
nothing is left. Keys are learned from a file's first lines and from what was left later; the few rows that
still have more go through the json module. Invariant: the texts are those of `lenient_json.format_arguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.trace.reading.lenient_json import format_arguments, load_json

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LEARNED_AT_MOST: Final = 32
"""Keys that are taken apart; the values of others would rarely be there."""
_SAMPLE_BYTES: Final = 1 << 16
_SAMPLE_ROWS: Final = 500
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
_MOST_CODES: Final = 1 << 20
_QUOTE, _COLON = b'":'
_MARK: Final = '":'


@dataclass(frozen=True, slots=True)
class BlockArguments:
    """The arguments of a block's rows: the objects' texts, which members columns hold, and the others."""

    raw: pa.StringArray
    held: Sequence[Flags]
    rest: Mapping[str, pa.DictionaryArray]

    def find_unread(self) -> Numbers:
        """Rows whose objects have members that were not taken."""
        offsets = np.frombuffer(self.raw.buffers()[1], dtype=np.int32)[: len(self.raw) + 1]
        text = np.frombuffer(self.raw.buffers()[2] or b"", dtype=np.uint8)[: offsets[-1]]
        is_mark = (text[:-1] == _QUOTE) & (text[1:] == _COLON)
        num_taken = sum(map(int, map(np.count_nonzero, self.held)))
        num_taken += sum(len(column) - column.null_count for column in self.rest.values())
        if np.count_nonzero(is_mark) == num_taken:
            return np.zeros(0, dtype=np.int64)
        of_row = np.searchsorted(offsets, np.flatnonzero(is_mark), side="right") - 1
        left = np.bincount(of_row, minlength=len(self.raw))
        for flags in self.held:
            left -= flags
        for column in self.rest.values():
            # A value may be an object, whose members are taken with it.
            marks = [1 + text.count(_MARK) for text in column.dictionary.to_pylist()]
            left -= np.array([*marks, 0])[column.indices.fill_null(len(marks)).to_numpy()]
        return np.flatnonzero(left)

    def texts(self, rows: Numbers) -> pa.DictionaryArray:
        """The text of what no column holds, for each of these rows."""
        codes, texts, disordered = self._join_rest(rows)
        others = np.flatnonzero(np.isin(rows, np.concatenate([self.find_unread(), *disordered])))
        if len(others):
            objects = self.raw.take(pa.array(rows[others])).to_pylist()
            codes[others] = np.arange(len(texts), len(texts) + len(others))
            texts += [_format_rest(text) for text in objects]
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(texts, pa.string()))

    def _join_rest(self, rows: Numbers) -> tuple[Numbers, list[str], list[Numbers]]:
        """The number of each row's text, the texts, and the rows whose keys stand in another order."""
        used = {key: column for key, column in self.rest.items() if column.null_count < len(column)}
        codes, num_codes = np.zeros(len(rows), dtype=np.int64), 1
        for column in used.values():
            size = len(column.dictionary)
            codes = codes * (size + 1) + column.indices.fill_null(size).to_numpy()[rows]
            num_codes *= size + 1
            if num_codes > _MOST_CODES:
                known, codes = np.unique(codes, return_inverse=True)
                num_codes = len(known)
        known, codes = find_distinct(codes, num_codes)
        example = np.zeros(len(known), dtype=np.int64)
        example[codes] = rows
        values = [column.take(pa.array(example)).to_pylist() for column in used.values()]
        texts: list[str] = []
        orders: dict[frozenset[str], Sequence[str]] = {}
        alike: list[frozenset[str]] = []
        for row, *found in zip(example.tolist(), *values, strict=True):
            members = {key: value for key, value in zip(used, found, strict=True) if value is not None}
            alike.append(frozenset(members))
            order = orders.get(alike[-1])
            if order is None:
                order = orders.setdefault(alike[-1], self._order_keys(row, members))
            texts.append("{" + ",".join(_mark(key) + members[key] for key in order) + "}")
        numbers = {keys: number for number, keys in enumerate(orders)}
        number_of = np.array([numbers[keys] for keys in alike], dtype=np.int64)[codes]
        return (
            codes,
            texts,
            [
                self._find_disordered(rows[number_of == number], order)
                for number, order in enumerate(orders.values())
                if len(order) > 1
            ],
        )

    def _order_keys(self, row: int, keys: Iterable[str]) -> list[str]:
        text = self.raw[row].as_py() or ""
        return sorted(keys, key=lambda key: text.find(_mark(key)))

    def _find_disordered(self, rows: Numbers, keys: Sequence[str]) -> Numbers:
        """Those of these rows whose objects do not have these keys in this order."""
        import pyarrow.compute as pc  # noqa: PLC0415 - takes a tenth of the time that questions take

        texts = self.raw.take(pa.array(rows))
        places = [pc.find_substring(texts, pattern=_mark(key)).to_numpy() for key in keys]
        return rows[np.any([after <= before for before, after in pairwise(places)], axis=0)]


def _mark(key: str) -> str:
    """How the member of this key begins. Within a text its quotes would be escaped."""
    return f'"{key}":'


def encode(column: Any) -> pa.DictionaryArray:
    """A column of texts, each text once."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if isinstance(array, pa.DictionaryArray) else array.dictionary_encode()


def find_distinct(codes: Numbers, num_codes: int) -> tuple[Numbers, Numbers]:
    """The distinct codes, in order, and each code's place among them."""
    if num_codes > len(codes):
        return np.unique(codes, return_inverse=True)
    known = np.flatnonzero(np.bincount(codes, minlength=num_codes))
    place_of = np.zeros(num_codes, dtype=np.int64)
    place_of[known] = np.arange(len(known))
    return known, place_of[codes]


def sample_keys(block: memoryview | bytes) -> list[str]:
    """The keys of arguments in the first lines of a block."""
    lines = bytes(block[:_SAMPLE_BYTES]).split(b"\n")[:-1]
    return _keys_of(line.strip(b" \t\r,[]").decode(errors="replace") for line in lines)


def find_new_keys(known: Sequence[str], found: Iterable[str]) -> list[str]:
    """Keys that can be taken besides those that are known; DuckDB does not tell large letters from small."""
    seen, new = {key.lower() for key in known}, []
    for key in found:
        if key.lower() not in seen and _PLAIN_KEY.fullmatch(key):
            seen.add(key.lower())
            new.append(key)
    return new


def keys_of_rows(raw: pa.StringArray, rows: Numbers) -> list[str]:
    """The keys of some of these rows' objects."""
    objects = raw.take(pa.array(rows[:_SAMPLE_ROWS])).to_pylist()
    return _keys_of(f'{{"args":{text}}}' for text in objects)


def _keys_of(lines: Iterable[str]) -> list[str]:
    keys: dict[str, None] = {}
    for line in lines:
        try:
            arguments = json.loads(line)["args"]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(arguments, dict):
            keys.update(dict.fromkeys(arguments))
    return list(keys)


def _format_rest(text: str) -> str:
    arguments = load_json(text)
    return format_arguments(arguments if isinstance(arguments, dict) else {})
