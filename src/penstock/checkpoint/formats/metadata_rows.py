"""Reads a `.metadata` that `metadata_writing` wrote as the tables of bytes that it consists of.

A pickle of a million records takes seconds to rebuild record by record, and as long again to take apart into
columns. Ours has the same words in each row, so all rows are compared with the first one at once, and numbers
are taken out as columns. Invariant: only what is known to the last byte is read in this way; for anything
else the answer is None, and `dcp_metadata` reads it as a pickle.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.formats.dcp_metadata import (
    DcpMetadata,
    Descriptors,
    Path,
    check_file_names,
    check_items,
    check_regions,
    read_pickle,
)
from penstock.checkpoint.formats.metadata_writing import (
    ENDING,
    MEMOIZE,
    PLANNER_DATA,
    STATE,
    STORAGE_DATA,
    Field,
    MetadataWriting,
    SpanNumbers,
)
from penstock.checkpoint.state.regions import (
    ELEMENT_TYPES,
    UNKNOWN,
    CheckpointIndex,
    Ints,
    Regions,
    StoredObject,
    StoredRegions,
    TensorFacts,
)

LEAST_ROWS, MOST_ROWS = 256, 1 << 16
"""Rows that are compared at a time."""
_KINDS: Final = {ord("K"): "<u1", ord("M"): "<u2", ord("J"): "<i4", 0x8A: "<i8"}
_ENDS_OF_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
_DIMENSIONS: Final = rb"(\(?(?:K.|M..|J.{4}|\x8a\x08.{8})*[t)\x85-\x87])"


_BEGINNING: Final = MetadataWriting(dtypes=(), num_tensors=0, num_objects=0).front


class _Column(NamedTuple):
    """Where in a row a number begins, and its type."""

    begin: int
    kind: str

    def values(self, rows: NDArray[np.uint8]) -> Ints:
        """The numbers of all rows."""
        part = np.ascontiguousarray(rows[:, self.begin : self.begin + int(self.kind[-1])])
        return part.view(self.kind)[:, 0].astype(np.int64)


class _OtherLayoutError(Exception):
    """The file is not one of ours."""


def read_metadata(content: bytes | bytearray | memoryview, where: str) -> DcpMetadata:
    """Parse a `.metadata` that torch 2.x or we wrote; `where` names it in errors."""
    return read_rows(bytes(content), where) or read_pickle(content, where)


def read_rows(content: bytes, where: str) -> DcpMetadata | None:
    """The content of a file of ours; None for any other. `DataDamaged` where its numbers cannot be right."""
    if not content.startswith(_BEGINNING):
        return None
    try:
        return _Reading(content, where).result()
    except (_OtherLayoutError, IndexError, struct.error, UnicodeDecodeError):
        return None


class _Cursor:
    """A place in a pickle, and what is read there."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def _require(self, is_ours: object) -> None:
        if not is_ours:
            raise _OtherLayoutError

    def _expect(self, words: bytes) -> None:
        self._require(self._content.startswith(words, self._at))
        self._at += len(words)

    def _follows(self, words: bytes) -> bool:
        """Whether these words are next; then they are passed."""
        follows = self._content.startswith(words, self._at)
        self._at += len(words) if follows else 0
        return follows

    def _text(self) -> str:
        opcode = self._content[self._at]
        self._require(opcode in b"\x8cX")
        begin = self._at + (2 if opcode == 0x8C else 5)
        size = (
            self._content[begin - 1]
            if opcode == 0x8C
            else struct.unpack_from("<I", self._content, begin - 4)[0]
        )
        self._at = begin + size
        self._require(self._at <= len(self._content))
        return self._content[begin : self._at].decode("utf-8", "surrogatepass")

    def _number(self) -> int:
        kind = np.dtype(_KINDS[self._content[self._at]]) if self._content[self._at] in _KINDS else None
        self._require(kind is not None)
        assert kind is not None, "as required"
        begin = self._at + 1
        if kind.itemsize == 8:
            # Of the integers that a pickle writes with their length, only those of eight bytes are ours.
            self._require(self._content[begin] == 8)
            begin += 1
        self._at = begin + kind.itemsize
        return int.from_bytes(self._content[begin : self._at], "little", signed=kind.kind == "i")

    def _checked(self, number: int, limit: int) -> int:
        self._require(0 <= number < limit)
        return number

    def _dimensions(self) -> tuple[int, ...]:
        """The argument of a `torch.Size`."""
        has_mark = self._follows(b"(")
        numbers = []
        while self._content[self._at] in _KINDS:
            numbers.append(self._number())
        self._expect(b"t" if has_mark else _ENDS_OF_TUPLES[len(numbers)])
        return tuple(numbers)

    def all_dimensions(self) -> tuple[int, ...]:
        """The dimensions, with nothing behind them."""
        found = self._dimensions()
        self._require(self._at == len(self._content))
        return found


class _Dimensions(dict[bytes, tuple[int, ...]]):
    """The numbers of tuples, each parsed once: many are equal."""

    def __missing__(self, words: bytes) -> tuple[int, ...]:
        return self.setdefault(words, _Cursor(words).all_dimensions())


class _Parts:
    """Collects the parts of tensors, which come in the order of the tensors."""

    def __init__(self) -> None:
        self._single: dict[int, list[Iterable[int]]] = {}
        """By the number of dimensions: tensor, offsets and sizes of those that have one part."""
        self._tables: list[tuple[int, Ints]] = []
        """The others' offsets and sizes."""

    def add(self, tensor: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """The only part of a tensor."""
        self._single.setdefault(len(offsets), []).append((tensor, *offsets, *sizes))

    def add_table(self, tensor: int, table: Ints) -> None:
        """Several parts of one, each a row of offsets and sizes."""
        self._tables.append((tensor, table))

    def regions(self, num_tensors: int) -> Regions:
        """All of them."""
        single = [
            np.fromiter(chain.from_iterable(rows), dtype=np.int64).reshape(len(rows), 1 + 2 * dims)
            for dims, rows in self._single.items()
        ]
        count = np.zeros(num_tensors, dtype=np.int64)
        for rows in single:
            count[rows[:, 0]] = 1
        for tensor, table in self._tables:
            count[tensor] += len(table)
        begin = np.cumsum(count) - count
        tables: list[tuple[Ints | slice, Ints]] = [(begin[rows[:, 0]], rows[:, 1:]) for rows in single]
        for tensor, table in self._tables:
            first = int(begin[tensor])
            tables.append((slice(first, first + len(table)), table))
            begin[tensor] += len(table)
        width = max((table.shape[1] // 2 for _, table in tables), default=0)
        shape = int(count.sum()), width
        offsets, sizes = np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)
        for at, table in tables:
            dims = table.shape[1] // 2
            offsets[at, :dims], sizes[at, :dims] = table[:, :dims], table[:, dims:]
        return Regions(np.repeat(np.arange(num_tensors), count), offsets, sizes)


class _Reading(_Cursor):
    """Reads one file from its beginning to its end."""

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(content)
        self._where = where
        self._rows = MetadataWriting(dtypes=self._dtypes(), num_tensors=0, num_objects=0)

    def result(self) -> DcpMetadata:
        names = list(self._names())
        self._expect(STATE)
        tensors, chunks, num_objects = self._state(names)
        self._expect(PLANNER_DATA)
        paths = dict(self._paths(names))
        self._expect(STORAGE_DATA)
        first = SpanNumbers(0, len(tensors), len(tensors) + num_objects)
        files = names[first.file :]
        objects, object_transforms = self._objects(names, first)
        self._require(len(objects) == num_objects and len(set(names[: first.file])) == first.file)
        stored, transforms = self._stored(tensors, chunks.num_dims, first.file)
        checkpoint_id, save_id, version = self._ending()
        order = _match(chunks, stored)
        places = stored[order]
        number, used = self._number_files(files, objects, places[:, 1])
        regions = StoredRegions(
            chunks,
            number[places[:, 1]],
            places[:, 2].copy(),
            places[:, 3].copy(),
            np.full(len(places), UNKNOWN, dtype=np.int64),
            places[:, 4] > 0,
        )
        check_regions(tensors, chunks, self._where)
        check_items(tensors, regions, self._where)
        placed = tuple(replace(each, file=int(number[each.file])) for each in objects)
        return DcpMetadata(
            index=CheckpointIndex(tuple(tensors), regions, placed, used),
            paths=paths,
            transforms=transforms,
            row_transform=places[:, 4].copy() if len(transforms) > 1 else None,
            object_transforms=object_transforms,
            save_id=save_id,
            checkpoint_id=checkpoint_id,
            version=version,
        )

    def _number_files(
        self, files: Sequence[str], objects: Sequence[StoredObject], of_rows: Ints
    ) -> tuple[Ints, tuple[str, ...]]:
        """The numbers of files that hold something, in the order in which a pickle's reader meets them."""
        seen = np.concatenate([np.array([each.file for each in objects], dtype=np.int64), of_rows])
        self._require(not len(seen) or 0 <= int(seen.min()) <= int(seen.max()) < len(files))
        known, firsts = np.unique(seen, return_index=True)
        known = known[np.argsort(firsts)]
        number = np.zeros(len(files), dtype=np.int64)
        number[known] = np.arange(len(known))
        used = tuple(files[each] for each in known.tolist())
        check_file_names(used, self._where)
        return number, used

    def _name(self) -> int:
        """The number of a name that is fetched from the memo."""
        self._expect(b"j")
        (number,) = struct.unpack_from("<I", self._content, self._at)
        self._at += 4
        return int(number) - self._rows.num_remembered

    def _dtypes(self) -> tuple[str, ...]:
        """The element types, which follow what all our files begin with."""
        self._expect(_BEGINNING)
        dtypes, start = [], self._at
        while self._content[start] in b"\x8cX" and self._text() == "torch":
            # A name of something that is called so is not followed by another text.
            if self._content[self._at] != 0x8C:
                break
            dtypes.append(self._text())
            self._expect(b"\x93" + MEMOIZE)
            start = self._at
        self._at = start
        self._require(set(dtypes) <= ELEMENT_TYPES.keys())
        return tuple(dtypes)

    def _names(self) -> Iterator[str]:
        """Of tensors, objects and files."""
        while self._content[self._at] in b"\x8cX":
            start = self._at
            name = self._text()
            if not self._follows(MEMOIZE):
                self._at = start
                return
            yield name

    def _state(self, names: Sequence[str]) -> tuple[list[TensorFacts], Regions, int]:
        """Tensors, their parts, and the number of objects."""
        rows, content = self._rows, self._content
        kinds = {fetched: (dtype, ELEMENT_TYPES[dtype].size_bytes) for dtype, fetched in rows.dtypes.items()}
        match = _tensor_pattern(rows).match
        tensors: list[TensorFacts] = []
        parts = _Parts()
        # Shapes recur, so those of a hundred thousand tensors are few.
        dimensions = _Dimensions()
        while found := match(content, self._at):
            fetched, dtype, shape_text, offsets, sizes = found.groups()
            number = len(tensors)
            self._require(int.from_bytes(fetched, "little") == self._rows.num_remembered + number)
            shape = dimensions[shape_text]
            tensors.append(TensorFacts(names[number], kinds[dtype][0], shape, kinds[dtype][1]))
            self._at = found.end()
            if offsets is None:
                for table in self._table(rows.chunk_fields(len(shape))):
                    parts.add_table(number, table)
                self._expect(b"eub")
                continue
            part = dimensions[offsets], dimensions[sizes]
            self._require(len(part[0]) == len(part[1]) == len(shape))
            parts.add(number, *part)
        num_objects = 0
        while content[self._at] == ord("j"):
            self._require(self._name() == len(tensors) + num_objects)
            self._expect(rows.object)
            num_objects += 1
        return tensors, parts.regions(len(tensors)), num_objects

    def _paths(self, names: Sequence[str]) -> Iterator[tuple[str, Path]]:
        """The place of each name in the state."""
        content = self._content
        while content[self._at] != ord("u"):
            name = (
                names[self._checked(self._name(), len(names))]
                if content[self._at] == ord("j")
                else self._text()
            )
            self._expect(b"(")
            path: list[str | int] = []
            while not self._follows(b"t"):
                path.append(self._number() if content[self._at] in _KINDS else self._text())
            yield name, tuple(path)

    def _objects(
        self, names: Sequence[str], first: SpanNumbers
    ) -> tuple[list[StoredObject], dict[str, Descriptors]]:
        """The objects by name, each in a file whose number counts from 0."""
        rows = self._rows
        found: dict[int, StoredObject] = {}
        transforms: dict[str, Descriptors] = {}
        while self._content.startswith(rows.index, self._at):
            start = self._at
            self._expect(rows.index)
            number = self._name()
            if not self._follows(rows.without_offset):
                self._at = start
                break
            self._require(first.object <= number < first.file and number not in found)
            self._expect(rows.info)
            file = self._name() - first.file
            self._expect(rows.words["offset"])
            offset = self._number()
            self._expect(rows.words["length"])
            size_bytes, descriptors = self._number(), self._descriptors()
            name = names[number]
            self._require(offset >= 0 and size_bytes >= 0)
            found[number] = StoredObject(name, file, offset, size_bytes, bool(descriptors))
            if descriptors:
                transforms[name] = descriptors
        return [found[number] for number in sorted(found)], transforms

    def _descriptors(self) -> Descriptors:
        """The transforms at the end of a record."""
        found = []
        if self._follows(self._rows.words["transform_descriptors"] + b"]("):
            while not self._follows(b"e"):
                found.append(self._text())
        self._expect(b"ub")
        return tuple(found)

    def _stored(
        self, tensors: Sequence[TensorFacts], width: int, num_names: int
    ) -> tuple[Ints, tuple[Descriptors, ...]]:
        """Rows of tensor, file, offset and bytes, which of the transforms, and place in the tensor."""
        rows = self._rows
        kinds: dict[Descriptors, int] = {(): 0}
        tables = [np.zeros((0, 5 + width), dtype=np.int64)]
        while self._follows(rows.index):
            start = self._at - len(rows.index)
            dims = len(tensors[self._checked(self._name(), len(tensors))].shape)
            fields = rows.place_fields(dims)
            self._at = start
            self._row(fields)
            after_row = self._at
            kind = kinds.setdefault(self._descriptors(), len(kinds))
            ending = self._content[after_row : self._at]
            # The order of several would be that of the pickle's rows, not of ours.
            self._require(len(kinds) <= 2)
            self._at = start
            for part in self._table([*fields, ending]):
                table = np.zeros((len(part), 5 + width), dtype=np.int64)
                table[:, 0], table[:, 1] = part[:, 0], part[:, 1 + dims] - num_names
                table[:, 2:4], table[:, 4] = part[:, 2 + dims :], kind
                table[:, 5 : 5 + dims] = part[:, 1 : 1 + dims]
                tables.append(table)
        return np.concatenate(tables), tuple(kinds)

    def _ending(self) -> tuple[str | None, ...]:
        """Checkpoint ID, save ID and version."""
        texts = []
        for words in ENDING[:-1]:
            self._expect(words)
            texts.append(None if self._follows(b"N") else self._text())
        self._require(self._content[self._at :] == ENDING[-1])
        return tuple(texts)

    def _row(self, fields: Sequence[Field]) -> tuple[list[int], list[_Column]]:
        """The numbers of one row, and where each is in it."""
        start = self._at
        numbers, columns = [], []
        for each in fields:
            if isinstance(each, bytes):
                self._expect(each)
                continue
            kind = "<u4" if each == "name" else _KINDS.get(self._content[self._at], "")
            numbers.append(self._name() if each == "name" else self._number())
            columns.append(_Column(self._at - int(kind[-1]) - start, kind))
        return numbers, columns

    def _table(self, fields: Sequence[Field]) -> Iterator[Ints]:
        """All rows of these fields that follow; a column for each name and number."""
        few: list[list[int]] = []
        is_name = np.array([each == "name" for each in fields if isinstance(each, str)])
        first_words = fields[0]
        assert isinstance(first_words, bytes), "rows begin with words"
        while self._content.startswith(first_words, self._at):
            start = self._at
            try:
                numbers, columns = self._row(fields)
            except _OtherLayoutError:
                self._at = start
                break
            few.append(numbers)
            if not self._content.startswith(first_words, self._at):
                continue
            for block in self._equal_rows(start, self._at - start, columns):
                if few:
                    yield np.array(few, dtype=np.int64)
                    few = []
                yield block - is_name * self._rows.num_remembered
        if few:
            yield np.array(few, dtype=np.int64)

    def _equal_rows(self, start: int, size: int, columns: Sequence[_Column]) -> Iterator[Ints]:
        """The rows after the one at `start` that differ from it in nothing but their numbers."""
        template = np.frombuffer(self._content, dtype=np.uint8, count=size, offset=start)
        varies = np.zeros(size, dtype=np.bool_)
        for begin, kind in columns:
            varies[begin : begin + int(kind[-1])] = True
        num_rows = LEAST_ROWS
        while count := min(num_rows, (len(self._content) - self._at) // size):
            block = np.frombuffer(self._content, dtype=np.uint8, count=count * size, offset=self._at)
            block = block.reshape(count, size)
            differs = np.flatnonzero(~((block == template) | varies).all(axis=1))
            equal = int(differs[0]) if len(differs) else count
            if equal:
                table = np.empty((equal, len(columns)), dtype=np.int64)
                for number, column in enumerate(columns):
                    table[:, number] = column.values(block[:equal])
                yield table
                self._at += equal * size
            if equal < count:
                return
            num_rows = min(4 * num_rows, MOST_ROWS)


def _tensor_pattern(rows: MetadataWriting) -> re.Pattern[bytes]:
    """A tensor's name, element type and shape, and where its part lies if it has one; of others, up to it.

    What begins a number and what ends a tuple differ, so that there is one way at most to match.
    """
    dtypes = b"|".join(map(re.escape, rows.dtypes.values())) or b"(?!)"
    words = [*map(re.escape, (rows.tensor, rows.before_shape, rows.before_chunks))]
    fields = [re.escape(each) for each in rows.chunk_fields(0) if isinstance(each, bytes)]
    before_offsets, _, before_sizes, _, ending = fields
    one_part = before_offsets + _DIMENSIONS + before_sizes + _DIMENSIONS + ending + b"eub"
    return re.compile(
        b"j(.{4})%b(%b)%b%b%b(?:%b)?" % (words[0], dtypes, words[1], _DIMENSIONS, words[2], one_part),
        re.DOTALL,
    )


def _match(chunks: Regions, stored: Ints) -> Ints:
    """For each part of a tensor, the row that says where it is."""
    wanted = np.concatenate([chunks.tensor[:, None], chunks.offsets], axis=1)
    keys = np.concatenate([stored[:, :1], stored[:, 5:]], axis=1)
    if len(wanted) != len(keys):
        raise _OtherLayoutError
    order = np.argsort(keys[:, 0], kind="stable")
    if not np.array_equal(keys[order], wanted):
        order, place = np.lexsort(keys.T[::-1]), np.lexsort(wanted.T[::-1])
        order[place] = order.copy()
        if not np.array_equal(keys[order], wanted):
            raise _OtherLayoutError
    in_order = wanted[np.lexsort(wanted.T[::-1])]
    if (in_order[1:] == in_order[:-1]).all(axis=1).any():
        raise _OtherLayoutError
    return order
