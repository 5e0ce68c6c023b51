"""Writes the `.metadata` of a torch distributed checkpoint (DCP) from columns, whole or in spans.

Needs no torch; with it, `pickle.load` returns the same objects for our files as for its own. Invariant: only
names that torch's own metadata has are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, Descriptors, Path
from penstock.checkpoint.state.regions import Ints, Regions, TensorFacts

_METADATA = "torch.distributed.checkpoint.metadata"
_GLOBALS: Final = {
    "chunk": (_METADATA, "ChunkStorageMetadata"),
    "tensor": (_METADATA, "TensorStorageMetadata"),
    "bytes": (_METADATA, "BytesStorageMetadata"),
    "properties": (_METADATA, "TensorProperties"),
    "format": (_METADATA, "_MEM_FORMAT_ENCODING"),
    "index": (_METADATA, "MetadataIndex"),
    "info": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    "Size": ("torch", "Size"),
    "layout": ("torch.serialization", "_get_layout"),
}
_WORDS: Final = (
    *("offsets", "sizes", "size", "chunks", "fqn", "offset", "relative_path", "length"),
    *("transform_descriptors",),
)


def metadata_bytes(metadata: DcpMetadata) -> bytes:
    """The whole file."""
    index = metadata.index
    writing = MetadataWriting(
        dtypes=tuple(dict.fromkeys(facts.dtype for facts in index.tensors)),
        num_tensors=len(index.tensors),
        num_objects=len(index.objects),
    )
    spans = writing.spans(metadata, SpanNumbers())
    return b"".join(frame + span for frame, span in zip(writing.frames(metadata), [*spans, b""], strict=True))


@dataclass(frozen=True, slots=True)
class SpanNumbers:
    """The numbers, among those of all spans, of the first tensor, object and file that one span describes."""

    tensor: int = 0
    object: int = 0
    file: int = 0


class MetadataWriting:
    """Writes one file, whole or in spans by several writers: each describes a part of the checkpoint.

    The file is `frames` with `spans` between them: after each frame come the spans of that number of all
    writers, in the order of their tensors, objects and files. What recurs is put into the pickle's memo at
    the front, in an order that all know, and fetched from there: a row is then a few fixed words and numbers,
    and all rows are written at once, as a table of bytes.
    """

    def __init__(self, *, dtypes: Sequence[str], num_tensors: int, num_objects: int) -> None:
        self._num_tensors, self._num_objects = num_tensors, num_objects
        self._num_remembered = 0
        self._front: list[bytes] = [b"\x80\x04"]
        known = {word: self._remember(_global(*path)) for word, path in _GLOBALS.items()}
        words = {word: self._remember(_text(word)) for word in _WORDS}
        self._size = known["Size"]
        strided = self._remember(known["layout"] + _text("torch.strided") + b"\x85R")
        contiguous = self._remember(known["format"] + b"K\x00\x85R")
        self._after_dtype = strided + b"\x89" + contiguous + b"\x89tb"
        self._before_dtype = _text("properties") + known["properties"] + b")\x81("
        self._tensor = known["tensor"] + b")\x81}("
        self._object = known["bytes"] + b")\x81"
        self._chunk = known["chunk"] + b")\x81}(" + words["offsets"] + self._size
        self._index = known["index"] + b")\x81}(" + words["fqn"]
        self._index_offset = _text("index") + b"N" + words["offset"] + self._size
        self._info = known["info"] + b")\x81}(" + words["relative_path"]
        self._word = words
        self._dtypes = {name: self._remember(_global("torch", name)) for name in dtypes}

    def _remember(self, value: bytes) -> bytes:
        """Put a value into the memo, and return the bytes that fetch it."""
        self._front.append(value + _MEMOIZE)
        number, self._num_remembered = self._num_remembered, self._num_remembered + 1
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def frames(self, metadata: DcpMetadata) -> list[bytes]:
        """What stands before, between and after the spans; of `metadata`, only what is not in them."""
        ending = [
            b"u" + _text("storage_meta") + _global(_METADATA, "StorageMeta") + b")\x81}(",
            _text("checkpoint_id") + _optional_text(metadata.checkpoint_id),
            _text("save_id") + _optional_text(metadata.save_id),
            _text("load_id") + b"N" + _text("modules") + b"]ub",
            _text("version") + _optional_text(metadata.version),
            b"ub.",
        ]
        return [
            b"".join(self._front),
            b"",
            b"",
            _global(_METADATA, "Metadata") + b")\x81}(" + _text("state_dict_metadata") + b"}(",
            b"",
            b"u" + _text("planner_data") + b"}(",
            b"u" + _text("storage_data") + b"}(",
            b"",
            b"".join(ending),
        ]

    def spans(self, part: DcpMetadata, first: SpanNumbers) -> list[bytes]:
        """One writer's spans: `part.index` has what it describes, with numbers of its own, from 0 on.

        Rows of `part.index.stored` may be in the files of other writers, whose numbers then are below 0 or
        beyond its own.
        """
        index = part.index
        remembered = [_text(name) + _MEMOIZE for name in (facts.name for facts in index.tensors)]
        objects = [_text(stored.name) + _MEMOIZE for stored in index.objects]
        files = [_text(name) + _MEMOIZE for name in index.files]
        return [
            b"".join(remembered),
            b"".join(objects),
            b"".join(files),
            b"".join(self._state(part, first.tensor)),
            b"".join(
                self._name(first.object + each, "object") + self._object for each in range(len(objects))
            ),
            b"".join(self._planner_data(part, first)),
            b"".join(self._objects_stored(part, first)),
            b"".join(self._boxes_stored(part, first)),
        ]

    def _name(self, number: int, kind: Literal["tensor", "object", "file"]) -> bytes:
        """Fetch a name from the memo."""
        return b"j" + struct.pack("<I", self._place(kind) + number)

    def _place(self, kind: Literal["tensor", "object", "file"]) -> int:
        before = {"tensor": 0, "object": self._num_tensors, "file": self._num_tensors + self._num_objects}
        return self._num_remembered + before[kind]

    def _state(self, part: DcpMetadata, first: int) -> list[bytes]:
        """Each tensor's name, properties, shape and chunks."""
        tensors, word = part.index.tensors, self._word
        parts: list[bytes] = []
        for number, (facts, chunks) in enumerate(
            zip(tensors, self._chunks(tensors, part.index.stored.regions), strict=True)
        ):
            parts += (self._name(first + number, "tensor"), self._tensor, self._before_dtype)
            parts += (self._dtypes[facts.dtype], self._after_dtype, word["size"], self._size)
            parts += (_dimensions(facts.shape), b"\x85R", word["chunks"], b"](", chunks, b"eub")
        return parts

    def _chunks(self, tensors: Sequence[TensorFacts], regions: Regions) -> list[bytes]:
        """Each tensor's chunks, in the order of the rows."""
        chunks = [b""] * len(tensors)
        between = b"\x85R" + self._word["sizes"] + self._size
        for width, rows in _by_width(tensors, regions):
            rows = rows[np.argsort(regions.tensor[rows], kind="stable")]  # noqa: PLW2901 - the same rows
            tensor = regions.tensor[rows]
            offsets, sizes = (column[rows, :width] for column in (regions.offsets, regions.sizes))
            table = _Table(len(rows))
            table.words(self._chunk).dimensions(offsets).words(between).dimensions(sizes).words(b"\x85Rub")
            content, row_bytes = table.content()
            numbers, begins = np.unique(tensor, return_index=True)
            for number, begin, end in zip(
                numbers.tolist(), begins.tolist(), [*begins.tolist(), len(rows)][1:], strict=True
            ):
                chunks[number] = content[begin * row_bytes : end * row_bytes]
        return chunks

    def _planner_data(self, part: DcpMetadata, first: SpanNumbers) -> list[bytes]:
        """The path of each name."""
        index = part.index
        fetch = {
            facts.name: self._name(first.tensor + number, "tensor")
            for number, facts in enumerate(index.tensors)
        }
        for number, stored in enumerate(index.objects):
            fetch[stored.name] = self._name(first.object + number, "object")
        return [(fetch.get(name) or _text(name)) + _path(path) for name, path in part.paths.items()]

    def _objects_stored(self, part: DcpMetadata, first: SpanNumbers) -> list[bytes]:
        parts: list[bytes] = []
        for number, one in enumerate(part.index.objects):
            parts += (self._index, self._name(first.object + number, "object"), _text("index"), b"Nub")
            parts += (self._info, self._name(first.file + one.file, "file"), self._word["offset"])
            parts += (_number(one.offset), self._word["length"], _number(one.size_bytes))
            parts += (self._transforms(part.object_transforms.get(one.name, ())), b"ub")
        return parts

    def _boxes_stored(self, part: DcpMetadata, first: SpanNumbers) -> Iterator[bytes]:
        """The place of each region."""
        stored, word = part.index.stored, self._word
        through = np.zeros(len(stored), dtype=np.int64) if part.row_transform is None else part.row_transform
        for width, of_width in _by_width(part.index.tensors, stored.regions):
            for transform in np.unique(through[of_width]).tolist():
                rows = of_width[through[of_width] == transform]
                ending = self._transforms(part.transforms[transform]) + b"ub"
                name = stored.regions.tensor[rows] + self._place("tensor") + first.tensor
                file = stored.file[rows] + self._place("file") + first.file
                table = _Table(len(rows))
                table.words(self._index).fetched(name).words(self._index_offset)
                table.dimensions(stored.regions.offsets[rows, :width]).words(b"\x85Rub" + self._info)
                table.fetched(file).words(word["offset"]).numbers(stored.item_offset[rows])
                table.words(word["length"]).numbers(stored.item_bytes[rows]).words(ending)
                yield table.content()[0]

    def _transforms(self, descriptors: Descriptors) -> bytes:
        """The field of transforms; left out if there are none, as older versions of torch lack it."""
        if not descriptors:
            return b""
        return self._word["transform_descriptors"] + b"](" + b"".join(map(_text, descriptors)) + b"e"


_MEMOIZE = b"\x940"


def _by_width(tensors: Sequence[TensorFacts], regions: Regions) -> Iterator[tuple[int, Ints]]:
    """The rows of tensors with each number of dimensions."""
    if len(regions):
        dims = np.array([len(facts.shape) for facts in tensors], dtype=np.int64)[regions.tensor]
        for width in np.unique(dims).tolist():
            yield width, np.flatnonzero(dims == width)


class _Table:
    """Rows of equally many bytes, written column by column."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._template = bytearray()
        self._columns: list[tuple[int, NDArray[np.uint8]]] = []

    def words(self, words: bytes) -> Self:
        """The same bytes in each row."""
        self._template += words
        return self

    def fetched(self, places: Ints) -> Self:
        """A value from the memo."""
        self.words(b"j")
        return self._numbers(places, "<u4")

    def numbers(self, numbers: Ints) -> Self:
        """A number, in as many bytes as the largest one needs."""
        largest, least = int(numbers.max(initial=0)), int(numbers.min(initial=0))
        for limit, opcode, kind in _NUMBERS:
            if least >= 0 and largest < limit:
                self.words(opcode)
                return self._numbers(numbers, kind)
        self.words(b"\x8a\x08")
        return self._numbers(numbers, "<i8")

    def dimensions(self, rows: Ints) -> Self:
        """The tuple that is the argument of a `torch.Size`."""
        width = rows.shape[1]
        if width > 3:
            self.words(b"(")
        for column in rows.T:
            self.numbers(column)
        return self.words((b")", b"\x85", b"\x86", b"\x87")[width] if width <= 3 else b"t")

    def _numbers(self, numbers: Ints, kind: str) -> Self:
        column = np.ascontiguousarray(numbers.astype(kind)).view(np.uint8).reshape(self._num_rows, -1)
        self._columns.append((len(self._template), column))
        self._template += bytes(column.shape[1])
        return self

    def content(self) -> tuple[bytes, int]:
        """All rows, and the bytes of each."""
        table = np.empty((self._num_rows, len(self._template)), dtype=np.uint8)
        table[:] = np.frombuffer(self._template, dtype=np.uint8)
        for begin, column in self._columns:
            table[:, begin : begin + column.shape[1]] = column
        return table.tobytes(), len(self._template)


_NUMBERS = ((1 << 8, b"K", "<u1"), (1 << 16, b"M", "<u2"), (1 << 31, b"J", "<i4"))


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) < 256:
        return b"\x8c" + bytes([len(encoded)]) + encoded
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _optional_text(text: str | None) -> bytes:
    return b"N" if text is None else _text(text)


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


@lru_cache(maxsize=1 << 16)
def _number(number: int) -> bytes:
    if 0 <= number < 1 << 8:
        return b"K" + bytes([number])
    if 0 <= number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if -(1 << 31) <= number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


@lru_cache(maxsize=1 << 16)
def _dimensions(numbers: tuple[int, ...]) -> bytes:
    """The tuple that is the argument of a `torch.Size`."""
    encoded = b"".join(map(_number, numbers))
    if 1 <= len(numbers) <= 3:
        return encoded + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1]
    return b"(" + encoded + b"t" if numbers else b")"


def _path(path: Path) -> bytes:
    return b"(" + b"".join(_text(key) if isinstance(key, str) else _number(key) for key in path) + b"t"
