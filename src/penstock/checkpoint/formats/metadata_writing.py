"""Writes the `.metadata` of a torch distributed checkpoint (DCP) from columns, whole or in spans.

Needs no torch; with it, `pickle.load` returns the same objects for our files as for its own. Invariant: only
names that torch's own metadata has are written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np

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

Field = bytes | Literal["name", "number"]
"""Of a row: words that all rows have, a name that is fetched from the memo, or a number."""
MEMOIZE: Final = b"\x940"


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
        self.num_remembered = 0
        self._front: list[bytes] = [b"\x80\x04"]
        known = {word: self._remember(_global(*path)) for word, path in _GLOBALS.items()}
        self.words = words = {word: self._remember(_text(word)) for word in _WORDS}
        size = known["Size"]
        strided = self._remember(known["layout"] + _text("torch.strided") + b"\x85R")
        contiguous = self._remember(known["format"] + b"K\x00\x85R")
        self.tensor = known["tensor"] + b")\x81}(" + _text("properties") + known["properties"] + b")\x81("
        self.before_shape = strided + b"\x89" + contiguous + b"\x89tb" + words["size"] + size
        self.before_chunks = b"\x85R" + words["chunks"] + b"]("
        self.object = known["bytes"] + b")\x81"
        self._chunk = known["chunk"] + b")\x81}(" + words["offsets"] + size, words["sizes"] + size
        self.index = known["index"] + b")\x81}(" + words["fqn"]
        self._index_offset = _text("index") + b"N" + words["offset"] + size
        self.without_offset = _text("index") + b"Nub"
        self.info = known["info"] + b")\x81}(" + words["relative_path"]
        self.front = b"".join(self._front)
        """What the file begins with, before its element types."""
        self.dtypes = {name: self._remember(_global("torch", name)) for name in dtypes}
        """What fetches each of them."""

    def chunk_fields(self, width: int) -> list[Field]:
        """A part of a tensor: its offsets and its sizes."""
        offsets, sizes = self._chunk
        dims = _dimension_fields(width)
        return [offsets, *dims, b"\x85R" + sizes, *dims, b"\x85Rub"]

    def place_fields(self, width: int) -> list[Field]:
        """Where a part is: tensor, offsets in it, file, offset and bytes; its transforms follow."""
        dims, word = _dimension_fields(width), self.words
        of_part: list[Field] = [self.index, "name", self._index_offset, *dims, b"\x85Rub"]
        return [*of_part, self.info, "name", word["offset"], "number", word["length"], "number"]

    def _remember(self, value: bytes) -> bytes:
        """Put a value into the memo, and return the bytes that fetch it."""
        self._front.append(value + MEMOIZE)
        number, self.num_remembered = self.num_remembered, self.num_remembered + 1
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def frames(self, metadata: DcpMetadata) -> list[bytes]:
        """What stands before, between and after the spans; of `metadata`, only what is not in them."""
        texts = (metadata.checkpoint_id, metadata.save_id, metadata.version, None)
        ending = [
            part
            for words, text in zip(ENDING, texts, strict=True)
            for part in (words, b"N" if text is None else _text(text))
        ]
        return [
            b"".join(self._front),
            b"",
            b"",
            STATE,
            b"",
            PLANNER_DATA,
            STORAGE_DATA,
            b"",
            b"".join(ending[:-1]),
        ]

    def spans(self, part: DcpMetadata, first: SpanNumbers) -> list[bytes]:
        """One writer's spans: `part.index` has what it describes, with numbers of its own, from 0 on.

        Rows of `part.index.stored` may be in the files of other writers, whose numbers then are below 0 or
        beyond its own.
        """
        index = part.index
        remembered = [_text(name) + MEMOIZE for name in (facts.name for facts in index.tensors)]
        objects = [_text(stored.name) + MEMOIZE for stored in index.objects]
        files = [_text(name) + MEMOIZE for name in index.files]
        return [
            b"".join(remembered),
            b"".join(objects),
            b"".join(files),
            b"".join(self._state(part, first.tensor)),
            b"".join(self._name(first.object + each, "object") + self.object for each in range(len(objects))),
            b"".join(self._planner_data(part, first)),
            b"".join(self._objects_stored(part, first)),
            b"".join(self._boxes_stored(part, first)),
        ]

    def _name(self, number: int, kind: Literal["tensor", "object", "file"]) -> bytes:
        """Fetch a name from the memo."""
        return b"j" + struct.pack("<I", self._place(kind) + number)

    def _place(self, kind: Literal["tensor", "object", "file"]) -> int:
        before = {"tensor": 0, "object": self._num_tensors, "file": self._num_tensors + self._num_objects}
        return self.num_remembered + before[kind]

    def _state(self, part: DcpMetadata, first: int) -> list[bytes]:
        """Each tensor's name, properties, shape and chunks."""
        tensors = part.index.tensors
        parts: list[bytes] = []
        for number, (facts, chunks) in enumerate(
            zip(tensors, self._chunks(tensors, part.index.stored.regions), strict=True)
        ):
            parts += (self._name(first + number, "tensor"), self.tensor, self.dtypes[facts.dtype])
            parts += (self.before_shape, _dimensions(facts.shape), self.before_chunks, chunks, b"eub")
        return parts

    def _chunks(self, tensors: Sequence[TensorFacts], regions: Regions) -> list[bytes]:
        """Each tensor's chunks, in the order of the rows."""
        chunks = [b""] * len(tensors)
        for width, rows in _by_width(tensors, regions):
            rows = rows[np.argsort(regions.tensor[rows], kind="stable")]  # noqa: PLW2901 - the same rows
            tensor = regions.tensor[rows]
            offsets, sizes = (column[rows, :width] for column in (regions.offsets, regions.sizes))
            content, row_bytes = _write_rows(self.chunk_fields(width), [*offsets.T, *sizes.T], len(rows))
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
            parts += (self.index, self._name(first.object + number, "object"), self.without_offset)
            parts += (self.info, self._name(first.file + one.file, "file"), self.words["offset"])
            parts += (_number(one.offset), self.words["length"], _number(one.size_bytes))
            parts += (self._transforms(part.object_transforms.get(one.name, ())), b"ub")
        return parts

    def _boxes_stored(self, part: DcpMetadata, first: SpanNumbers) -> Iterator[bytes]:
        """The place of each region."""
        stored = part.index.stored
        through = np.zeros(len(stored), dtype=np.int64) if part.row_transform is None else part.row_transform
        for width, of_width in _by_width(part.index.tensors, stored.regions):
            for transform in np.flatnonzero(np.bincount(through[of_width])).tolist():
                rows = of_width[through[of_width] == transform]
                ending = self._transforms(part.transforms[transform]) + b"ub"
                name = stored.regions.tensor[rows] + self._place("tensor") + first.tensor
                file = stored.file[rows] + self._place("file") + first.file
                columns = [name, *stored.regions.offsets[rows, :width].T, file]
                columns += [stored.item_offset[rows], stored.item_bytes[rows]]
                yield _write_rows([*self.place_fields(width), ending], columns, len(rows))[0]

    def _transforms(self, descriptors: Descriptors) -> bytes:
        """The field of transforms; left out if there are none, as older versions of torch lack it."""
        if not descriptors:
            return b""
        return self.words["transform_descriptors"] + b"](" + b"".join(map(_text, descriptors)) + b"e"


def _by_width(tensors: Sequence[TensorFacts], regions: Regions) -> Iterator[tuple[int, Ints]]:
    """The rows of tensors with each number of dimensions."""
    if len(regions):
        dims = np.array([len(facts.shape) for facts in tensors], dtype=np.int64)[regions.tensor]
        for width in np.flatnonzero(np.bincount(dims)).tolist():
            yield width, np.flatnonzero(dims == width)


def _dimension_fields(width: int) -> list[Field]:
    """The tuple that is the argument of a `torch.Size`."""
    numbers: list[Field] = ["number"] * width
    return [b"(", *numbers, b"t"] if width > 3 else [*numbers, (b")", b"\x85", b"\x86", b"\x87")[width]]


def _write_rows(fields: Sequence[Field], columns: Sequence[Ints], num_rows: int) -> tuple[bytes, int]:
    """Rows of equally many bytes, and how many; each number takes as many as the largest of its column."""
    template, written, numbers = bytearray(), [], iter(columns)
    for each in fields:
        if isinstance(each, bytes):
            template += each
            continue
        column = next(numbers)
        opcode, kind = (b"j", "<u4") if each == "name" else _kind_of(column)
        template += opcode
        content = np.ascontiguousarray(column.astype(kind)).view(np.uint8).reshape(num_rows, -1)
        written.append((len(template), content))
        template += bytes(content.shape[1])
    table = np.empty((num_rows, len(template)), dtype=np.uint8)
    table[:] = np.frombuffer(template, dtype=np.uint8)
    for begin, content in written:
        table[:, begin : begin + content.shape[1]] = content
    return table.tobytes(), len(template)


def _kind_of(numbers: Ints) -> tuple[bytes, str]:
    """The opcode that the largest number needs, and the type of what follows it."""
    largest, least = int(numbers.max(initial=0)), int(numbers.min(initial=0))
    for limit, opcode, kind in _NUMBERS:
        if least >= 0 and largest < limit:
            return opcode, kind
    return b"\x8a\x08", "<i8"


_NUMBERS = ((1 << 8, b"K", "<u1"), (1 << 16, b"M", "<u2"), (1 << 31, b"J", "<i4"))


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) < 256:
        return b"\x8c" + bytes([len(encoded)]) + encoded
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


STATE: Final = _global(_METADATA, "Metadata") + b")\x81}(" + _text("state_dict_metadata") + b"}("
PLANNER_DATA: Final = b"u" + _text("planner_data") + b"}("
STORAGE_DATA: Final = b"u" + _text("storage_data") + b"}("
ENDING: Final = (
    b"u" + _text("storage_meta") + _global(_METADATA, "StorageMeta") + b")\x81}(" + _text("checkpoint_id"),
    _text("save_id"),
    _text("load_id") + b"N" + _text("modules") + b"]ub" + _text("version"),
    b"ub.",
)
"""What stands around the texts of a file's ending."""


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
