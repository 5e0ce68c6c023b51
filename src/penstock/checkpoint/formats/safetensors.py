"""safetensors files as checkpoints: a single file, or a folder of them with or without an index.

Invariant: whatever is returned has been checked as the format requires: ranges are within the file, have the
length that dtype and shape need, and do not overlap; an index must agree with its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from penstock.checkpoint.state.regions import (
    BY_SAFETENSORS,
    MOST_DIMENSIONS,
    CheckpointIndex,
    StoredRegions,
    TensorFacts,
    require_few_values,
    whole_regions,
)
from penstock.errors import DataDamaged, Unavailable

if TYPE_CHECKING:
    from penstock.checkpoint.formats.torch_save import ReadRange

LARGEST_HEADER: Final = 100_000_000
"""The largest header that the format allows, in bytes."""
INDEX_NAME: Final = "model.safetensors.index.json"
_METADATA_KEY: Final = "__metadata__"

_MOST_VALUES: Final = 1 << 22
"""A header or an index has at most this many values, about ten per tensor, so that they fit into memory."""
_Size = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=MOST_DIMENSIONS)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


_FETCH: Final = "Fetch or save it again."
StoredTensor = tuple[TensorFacts, int]
"""One tensor of one file, and the offset of its payload."""


def read_header(read: ReadRange, size_bytes: int, where: str) -> list[StoredTensor]:
    """Return the tensors of one file, in the order of their payloads."""
    if size_bytes < 8:
        raise _damaged("it has no header", where)
    header_bytes = int.from_bytes(read(0, 8), "little")
    if header_bytes > min(LARGEST_HEADER, size_bytes - 8):
        raise _damaged(f"its header would have {header_bytes} bytes", where)
    content = bytes(read(8, header_bytes))
    try:
        require_few_values(content, _MOST_VALUES)
        header = from_json(content)
    except ValueError as error:
        raise _damaged(f"its header cannot be parsed: {error}", where) from error
    entries = {}
    for name, about in header.items() if isinstance(header, dict) else (("", header),):
        if name == _METADATA_KEY and isinstance(about, dict):
            for key, value in about.items():
                if not isinstance(value, str):
                    raise _damaged(f"{key} of {name!r} in its header is not text", where)
            continue
        try:
            entries[name] = _Entry.model_validate(about)
        except ValidationError as error:
            first = error.errors()[0]
            what = ".".join(map(str, first["loc"])) or "the entry"
            raise _damaged(f"{what} of {name!r} in its header: {first['msg']}", where) from error
    tensors, position = [], 0
    for name, entry in sorted(entries.items(), key=lambda named: named[1].data_offsets):
        begin, end = entry.data_offsets
        kind = BY_SAFETENSORS.get(entry.dtype)
        if kind is None:
            raise Unavailable(
                f"{name} has elements of type {entry.dtype}, which torch does not support", where=where
            )
        facts = TensorFacts(name, kind.name, tuple(entry.shape), kind.size_bytes)
        if begin != position or end - begin != facts.size_bytes:
            raise _damaged(
                f"the range of {name}, {begin} to {end}, does not match its neighbors or its shape", where
            )
        tensors.append((facts, 8 + header_bytes + begin))
        position = end
    if 8 + header_bytes + position != size_bytes:
        raise _damaged(
            f"it has {size_bytes} bytes, but its header needs {8 + header_bytes + position}", where
        )
    return tensors


def _damaged(what: str, where: str) -> DataDamaged:
    return DataDamaged(f"This is not a complete safetensors file: {what}", where=where, fix=_FETCH)


def build_index(files: Sequence[tuple[str, Sequence[StoredTensor]]], where: str) -> CheckpointIndex:
    """Return the index of a checkpoint of several files. A tensor in two files counts as damage."""
    tensors = [stored for _, of_file in files for stored in of_file]
    facts = tuple(facts for facts, _ in tensors)
    names: set[str] = set()
    for one in facts:
        if one.name in names:
            raise _damaged(f"{one.name} is in two of the files", where)
        names.add(one.name)
    offsets = np.array([offset for _, offset in tensors], dtype=np.int64)
    sizes = np.array([one.size_bytes for one in facts], dtype=np.int64)
    file = np.repeat(np.arange(len(files)), [len(of_file) for _, of_file in files])
    stored_boxes = StoredRegions(
        whole_regions(facts),
        file=file.astype(np.int64),
        item_offset=offsets,
        item_bytes=sizes,
        payload_offset=offsets,
        packed=np.zeros(len(facts), dtype=np.bool_),
    )
    return CheckpointIndex(facts, stored_boxes, (), tuple(name for name, _ in files))


def read_index(content: bytes | bytearray, where: str) -> Mapping[str, str]:
    """Return the file of each tensor, by name, from a Hugging Face index."""
    try:
        require_few_values(content, _MOST_VALUES)
        document: Any = from_json(content)
    except ValueError as error:
        raise DataDamaged(f"This index cannot be parsed: {error}", where=where, fix=_FETCH) from error
    file_of = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(file_of, dict):
        raise DataDamaged("This index does not list a file for each tensor", where=where, fix=_FETCH)
    for name, file in file_of.items():
        if not isinstance(file, str):
            raise DataDamaged(f"This index does not list a file for {name!r}", where=where, fix=_FETCH)
    return file_of


def check_index(file_of: Mapping[str, str], index: CheckpointIndex, where: str) -> None:
    """Raise `DataDamaged` unless every tensor is in the file that the Hugging Face index names."""
    actual = {
        facts.name: index.files[int(file)]
        for facts, file in zip(index.tensors, index.stored.file, strict=True)
    }
    wrong = [name for name, file in file_of.items() if actual.get(name) != file]
    if wrong:
        raise DataDamaged(
            f"{len(wrong)} tensors are not in the files that the index names, for example {wrong[0]}",
            where=where,
            fix="A file is missing or belongs to another checkpoint; fetch the files again.",
        )
