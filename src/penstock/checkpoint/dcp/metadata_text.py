"""Columns become a `.metadata`: the pickle that torch's own would have been, but for its memo, and shorter.

Works row by row from ready-made pieces of pickle, so that a million parts take seconds. Invariant: only names
that torch's own metadata has are written.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.checkpoint.dcp.metadata import DcpMetadata, Descriptors, Path
    from penstock.checkpoint.pieces import Boxes

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
    return b"".join(_Pickling(metadata).parts())


class _Pickling:
    """One writing: what is said often is said once, at the front, and referred to from then on."""

    def __init__(self, metadata: DcpMetadata) -> None:
        self._metadata = metadata
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
        self._after_index = b"\x85Rub"
        self._info = known["info"] + b")\x81}(" + words["relative_path"]
        self._word = words
        contents = metadata.contents
        self._names = [self._remember(_text(facts.name)) for facts in contents.tensors]
        self._object_names = [self._remember(_text(stored.name)) for stored in contents.objects]
        self._files = [self._remember(_text(name)) for name in contents.files]
        self._dtypes = {
            name: self._remember(_global("torch", name))
            for name in dict.fromkeys(facts.dtype for facts in contents.tensors)
        }

    def _remember(self, value: bytes) -> bytes:
        """Put a value into the memo, and give what fetches it."""
        self._front.append(value + b"\x940")
        number, self._num_remembered = self._num_remembered, self._num_remembered + 1
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def parts(self) -> list[bytes]:
        """The pickle in order."""
        meta = self._metadata
        return [
            *self._front,
            _global(_METADATA, "Metadata") + b")\x81}(",
            *(_text("state_dict_metadata"), b"}(", *self._state(), b"u"),
            *(_text("planner_data"), b"}(", *self._planner_data(), b"u"),
            *(_text("storage_data"), b"}(", *self._objects_stored(), *self._boxes_stored(), b"u"),
            _text("storage_meta") + _global(_METADATA, "StorageMeta") + b")\x81}(",
            _text("checkpoint_id") + _optional_text(meta.checkpoint_id),
            _text("save_id") + _optional_text(meta.save_id),
            _text("load_id") + b"N" + _text("modules") + b"]ub",
            _text("version") + _optional_text(meta.version),
            b"ub.",
        ]

    def _state(self) -> list[bytes]:
        """Each name, and for a tensor its properties, shape and parts."""
        contents = self._metadata.contents
        chunks = self._chunks(contents.stored.boxes)
        parts: list[bytes] = []
        word = self._word
        for number, facts in enumerate(contents.tensors):
            parts += (self._names[number], self._tensor, self._before_dtype, self._dtypes[facts.dtype])
            parts += (self._after_dtype, word["size"], self._size, _dimensions(facts.shape), b"\x85R")
            parts += (word["chunks"], b"](", *chunks[number], b"eub")
        for name in self._object_names:
            parts += (name, self._object)
        return parts

    def _chunks(self, boxes: Boxes) -> list[list[bytes]]:
        """Each tensor's parts, in the order of the rows."""
        tensors = self._metadata.contents.tensors
        by_tensor: list[list[bytes]] = [[] for _ in tensors]
        opening, between = self._chunk, b"\x85R" + self._word["sizes"] + self._size
        dims = [len(facts.shape) for facts in tensors]
        rows = zip(boxes.tensor.tolist(), boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
        for number, offsets, sizes in rows:
            width = dims[number]
            begin, extent = _dimensions(tuple(offsets[:width])), _dimensions(tuple(sizes[:width]))
            by_tensor[number].append(b"".join((opening, begin, between, extent, b"\x85Rub")))
        return by_tensor

    def _planner_data(self) -> list[bytes]:
        contents = self._metadata.contents
        remembered = {facts.name: name for facts, name in zip(contents.tensors, self._names, strict=True)}
        remembered |= {one.name: name for one, name in zip(contents.objects, self._object_names, strict=True)}
        parts: list[bytes] = []
        for name, path in self._metadata.paths.items():
            parts += (remembered.get(name) or _text(name), _path(path))
        return parts

    def _objects_stored(self) -> list[bytes]:
        parts: list[bytes] = []
        transforms = self._metadata.object_transforms
        for name, one in zip(self._object_names, self._metadata.contents.objects, strict=True):
            parts += (self._index, name, _text("index"), b"Nub")
            parts += (self._info, self._files[one.file], self._word["offset"], _number(one.offset))
            parts += (self._word["length"], _number(one.size_bytes))
            parts += (self._transforms(transforms.get(one.name, ())), b"ub")
        return parts

    def _boxes_stored(self) -> list[bytes]:
        stored = self._metadata.contents.stored
        if not len(stored):
            return []
        begin = [self._index + name + self._index_offset for name in self._names]
        middle = self._after_index + self._info
        files, word = self._files, self._word
        dims = [len(facts.shape) for facts in self._metadata.contents.tensors]
        columns = (
            stored.boxes.tensor,
            stored.boxes.offsets,
            stored.file,
            stored.item_offset,
            stored.item_bytes,
        )
        parts: list[bytes] = []
        for tensor, offsets, file, offset, length in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            at = _dimensions(tuple(offsets[: dims[tensor]]))
            place = (files[file], word["offset"], _number(offset), word["length"], _number(length))
            parts.append(b"".join((begin[tensor], at, middle, *place, self._row_end(len(parts)))))
        return parts

    def _row_end(self, row: int) -> bytes:
        return self._transforms(self._metadata.descriptors(row)) + b"ub"

    def _transforms(self, descriptors: Descriptors) -> bytes:
        """Left out where there are none, as older versions of torch had no such field."""
        if not descriptors:
            return b""
        return self._word["transform_descriptors"] + b"](" + b"".join(map(_text, descriptors)) + b"e"


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
    """The argument of a `torch.Size`, wrapped for its call but for the wrapping itself."""
    encoded = b"".join(map(_number, numbers))
    if 1 <= len(numbers) <= 3:
        return encoded + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1]
    return b"(" + encoded + b"t" if numbers else b")"


def _path(path: Path) -> bytes:
    return b"(" + b"".join(_text(key) if isinstance(key, str) else _number(key) for key in path) + b"t"
