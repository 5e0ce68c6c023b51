"""The arguments of a block's events that no column holds, as JSON text.

DuckDB takes the members of an object that it is asked for, and does not say which others there are. But each
member has one `":` in the text of its line: where as many were taken as there are, nothing is left. Keys are
learned from the lines. Of a block with more, DuckDB gives the text of each object besides, and the few rows
that still have more go through the json module. Invariant: the texts are those of
`lenient_json.format_arguments`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from penstock.trace.arrow_functions import Flags, Numbers, find_distinct, number_texts, take
from penstock.trace.reading.lenient_json import format_arguments, load_json

_LEARNED_AT_MOST: Final = 32
"""Keys that are taken besides those of columns; the values of others would rarely be there."""
_SAMPLE_BYTES: Final = 1 << 16
_SAMPLE_ROWS: Final = 500
_PLAIN_KEY: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
_MOST_CODES: Final = 1 << 20
_MARK: Final = '":'
_QUOTE, _COLON = _MARK.encode()
_MARK_NUMBER: Final = int.from_bytes(_MARK.encode(), "little")
_SPACED_COLONS: Final = tuple(int.from_bytes(space + b":", "little") for space in (b" ", b"\t", b"\r"))
_CACHED_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class BlockArguments:
    """The arguments of a block's rows: which members columns hold, the others, and the objects' texts.

    There are no texts if all members are known to have been taken.
    """

    held: Sequence[Flags]
    rest: Mapping[str, pa.DictionaryArray]
    raw: pa.StringArray | None = None

    def count_taken(self, but: Numbers) -> int:
        """The members of all objects but these rows' that were taken, with those inside of their values."""
        num_taken = sum(count_but(flags, but) for flags in self.held)
        for column in self.rest.values():
            if column.null_count < len(column):
                num_members = _count_members(column)
                num_taken += int(num_members.sum()) - int(num_members[but].sum())
        return num_taken

    def find_unread(self) -> Numbers:
        """Rows whose objects have members that were not taken."""
        if self.raw is None:
            return np.zeros(0, dtype=np.int64)
        offsets = np.frombuffer(self.raw.buffers()[1], dtype=np.int32)[: len(self.raw) + 1]
        text = np.frombuffer(self.raw.buffers()[2] or b"", dtype=np.uint8)[: offsets[-1]]
        is_mark = (text[:-1] == _QUOTE) & (text[1:] == _COLON)
        of_row = np.searchsorted(offsets, np.flatnonzero(is_mark), side="right") - 1
        left = np.bincount(of_row, minlength=len(self.raw))
        for flags in self.held:
            left -= flags
        for column in self.rest.values():
            left -= _count_members(column)
        return np.flatnonzero(left)

    def texts(self, rows: Numbers) -> pa.DictionaryArray:
        """The text of what no column holds, for each of these rows."""
        codes, texts = self._join_rest(rows)
        others = np.flatnonzero(np.isin(rows, self.find_unread()))
        if len(others):
            codes[others] = np.arange(len(texts), len(texts) + len(others))
            texts += [_format_rest(text) for text in take(self.raw, rows[others]).to_pylist()]
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(texts, pa.string()))

    def _join_rest(self, rows: Numbers) -> tuple[Numbers, list[str]]:
        """The number of each row's text, and the texts."""
        used = {key: column for key, column in sorted(self.rest.items()) if column.null_count < len(column)}
        codes, num_codes = np.zeros(len(rows), dtype=np.int64), 1
        for column in used.values():
            size = len(column.dictionary)
            codes = codes * (size + 1) + number_texts(column)[rows]
            num_codes *= size + 1
            if num_codes > _MOST_CODES:
                known, codes = find_distinct(codes)
                num_codes = len(known)
        known, codes = find_distinct(codes, num_codes)
        example = np.zeros(len(known), dtype=np.int64)
        example[codes] = rows
        marks = [f'"{key}":' for key in used]
        values = [take(column, example).to_pylist() for column in used.values()]
        texts = [
            ",".join(mark + value for mark, value in zip(marks, found, strict=True) if value is not None)
            for found in zip(*values, strict=True)
        ]
        return codes, [f"{{{text}}}" for text in texts or [""] * len(known)]


def _count_members(column: pa.DictionaryArray) -> Numbers:
    """The members in each value and, with them, the member that has the value; 0 where there is none."""
    # A value may be an object, whose members are taken with it.
    marks = [1 + text.count(_MARK) for text in column.dictionary.to_pylist()]
    counts: Numbers = np.array([*marks, 0])[number_texts(column)]
    return counts


def count_members(parts: Iterable[memoryview | bytes]) -> int | None:
    """The members of all objects in whole lines of JSON; None if marks do not tell."""
    num_members = 0
    for part in parts:
        num_marks = _count(part, (_MARK_NUMBER,), 2)
        if num_marks < _count(part, (_COLON,), 1) and _count(part, _SPACED_COLONS, 2):
            return None
        num_members += num_marks
    return num_members


def _count(content: memoryview | bytes, wanted: Sequence[int], width: int) -> int:
    """How often some bytes, or pairs of bytes (`width` 2), occur."""
    kind = f"<u{width}"
    found, flags = 0, np.empty(_CACHED_BYTES, dtype=bool)
    for begin in range(width):
        num_numbers = (len(content) - begin) // width
        numbers = np.frombuffer(content, kind, num_numbers, begin) if num_numbers > 0 else np.zeros(0, kind)
        for start in range(0, len(numbers), _CACHED_BYTES):
            piece = numbers[start : start + _CACHED_BYTES]
            for one in wanted:
                found += int(np.count_nonzero(np.equal(piece, one, out=flags[: len(piece)])))
    return found


def count_but(flags: Flags, rows: Numbers) -> int:
    """How many flags are set, besides those of these few rows."""
    return int(np.count_nonzero(flags)) - int(np.count_nonzero(flags[rows]))


def count_lines(content: memoryview | bytes) -> int:
    """The newlines of a text."""
    # Several times faster than bytes.count, and other threads run meanwhile.
    return _count(content, (ord("\n"),), 1)


@dataclass(slots=True)
class LearnedKeys:
    """The keys of a file's lines so far: of their objects, and of the arguments in them.

    `known` are keys of columns, whatever lines have.
    """

    known_members: Sequence[str]
    known_arguments: Sequence[str]
    members: dict[str, str] = field(default_factory=dict)
    """The type of each other member of a line in SQL."""
    arguments: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    """The arguments of columns that occur."""

    def copy(self) -> Self:
        """The same keys, to learn more."""
        return replace(self, members=dict(self.members), arguments=list(self.arguments), seen=set(self.seen))

    @property
    def has_room(self) -> bool:
        """Whether another file could have as many keys of its own."""
        return max(len(self.arguments), len(self.members)) <= _LEARNED_AT_MOST // 2

    def learn_lines(self, parts: Iterable[memoryview | bytes]) -> bool:
        """Learn the keys of the first lines of each part; whether there were new ones."""
        arguments: dict[str, None] = {}
        before = len(self.members)
        for part in parts:
            for line in bytes(part[:_SAMPLE_BYTES]).split(b"\n")[:-1]:
                document = _parse_object(line.strip(b" \t\r,[]").decode(errors="replace"))
                arguments.update(dict.fromkeys(_arguments_of(document)))
                for key in _find_new_keys((*self.known_members, *self.members), document)[:_LEARNED_AT_MOST]:
                    is_number = type(document[key]) in (int, float)
                    self.members[key] = "DOUBLE" if is_number else "VARCHAR"
        return self._learn_arguments(arguments) or len(self.members) > before

    def learn_objects(self, arguments: BlockArguments, unread: Numbers) -> bool:
        """Learn the keys of some of these rows' arguments; whether there were new ones."""
        found: dict[str, None] = {}
        for text in take(arguments.raw, unread[:_SAMPLE_ROWS]).to_pylist():
            found.update(dict.fromkeys(_parse_object(text)))
        return self._learn_arguments(found)

    def _learn_arguments(self, found: Iterable[str]) -> bool:
        seen = {key for key in found if key in self.known_arguments} - self.seen
        new = _find_new_keys((*self.known_arguments, *self.arguments), found)
        new = new[: _LEARNED_AT_MOST - len(self.arguments)]
        self.seen |= seen
        self.arguments += new
        return bool(new or seen)


def _parse_object(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _arguments_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = document.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _find_new_keys(known: Sequence[str], found: Iterable[str]) -> list[str]:
    """Keys that can be taken besides those that are known; DuckDB does not tell large letters from small."""
    seen, new = {key.lower() for key in known}, []
    for key in found:
        if key.lower() not in seen and _PLAIN_KEY.fullmatch(key):
            seen.add(key.lower())
            new.append(key)
    return new


def _format_rest(text: str) -> str:
    arguments = load_json(text)
    return format_arguments(arguments if isinstance(arguments, dict) else {})
