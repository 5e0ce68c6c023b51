"""Archives of `torch.save` as checkpoints: every tensor is a byte range of the file, and none is read.

Names are the keys of the nested state joined by dots, as in DCP. Invariant: a tensor with a payload offset is
present in full, in row-major order, inside its record.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.checkpoint.formats.restricted_pickle import (
    DeviceName,
    QuantizedRef,
    TensorRef,
    TorchName,
    TorchSize,
    parts_of,
    read_torch_pickle,
)
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    StoredObject,
    StoredRegions,
    TensorFacts,
    contiguous_strides,
    element_type,
    whole_regions,
)
from penstock.checkpoint.state.walk import Owner, is_optimizer_dict, walk
from penstock.errors import DataDamaged, UsageError

ReadRange = Callable[[int, int], bytes | bytearray]
"""Called with (offset, size); returns exactly `size` bytes of the archive from `offset` onward."""

_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""The signature of a local header, and the lengths of the name and the extra field that follow it."""
_LARGEST_DIRECTORY: Final = 32 << 20
"""Enough for 350,000 tensors. A directory of that size takes seconds to read."""
_PAGE_BYTES: Final = 1 << 16
_SHORTEST_ARCHIVE: Final = 98
"""The size of an empty archive with a ZIP64 end, which torch always writes."""


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record: the offset of its local header, and its length. `is_stored` means not compressed.

    `crc32` is 0 if the writer did not compute it.
    """

    name: str
    header_offset: int
    size_bytes: int
    crc32: int = 0
    is_stored: bool = True


class _Ranges:
    """The part of a file's interface that `zipfile` needs to read a directory; no record is read."""

    def __init__(self, read: ReadRange, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._position = 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to `offset` from the beginning (0), the position (1) or the end (2)."""
        self._position = offset + (0, self._position, self._size_bytes)[whence]
        if self._position < 0:
            raise ValueError("its directory is outside of the file")
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, fewer at the end; a damaged directory may ask for any number."""
        remaining = max(self._size_bytes - self._position, 0)
        size = remaining if size < 0 else min(size, remaining)
        if size > _LARGEST_DIRECTORY:
            raise ValueError(f"its directory has {size:,} bytes, more than {_LARGEST_DIRECTORY:,}")
        content = bytes(self._read(self._position, size))
        self._position += size
        return content


def in_pages(read: ReadRange, size_bytes: int) -> ReadRange:
    """Return a reader that keeps the page around its last range, so that small headers cost little."""
    begin, page = 0, b""

    def read_range(offset: int, size: int) -> bytes:
        nonlocal begin, page
        end = offset + size
        if not begin <= offset <= end <= begin + len(page):
            begin = offset - offset % _PAGE_BYTES
            page = bytes(read(begin, max(end, min(begin + _PAGE_BYTES, size_bytes)) - begin))
        return page[offset - begin : end - begin]

    return read_range


def read_directory(read: ReadRange, size_bytes: int, where: str) -> Mapping[str, ZipRecord]:
    """Return all records by name; raise `DataDamaged` if the file is truncated or not an archive."""
    if size_bytes < _SHORTEST_ARCHIVE:
        raise _not_whole("its end is missing", where)
    try:
        listed = zipfile.ZipFile(_Ranges(read, size_bytes)).infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, IndexError) as error:
        raise _not_whole(str(error), where) from error
    for info in listed:
        # `zipfile` corrects positions for bytes before the archive, so damaged ones may be negative.
        if not 0 <= info.header_offset <= size_bytes - _LOCAL_HEADER.size - info.file_size:
            raise _not_whole(f"{info.filename} is outside of the file", where)
    return {
        info.filename: ZipRecord(
            info.filename,
            info.header_offset,
            info.file_size,
            is_stored=info.compress_type == zipfile.ZIP_STORED,
            crc32=info.CRC,
        )
        for info in listed
    }


def data_offset(read: ReadRange, record: ZipRecord, where: str) -> int:
    """Return where a record's bytes begin, from its local header: lengths in the directory may differ."""
    begin = record.header_offset
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(read(begin, _LOCAL_HEADER.size))
    if signature != b"PK\x03\x04":
        raise _not_whole(f"no record begins where {record.name} should", where)
    return begin + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _not_whole(what: str, where: str) -> DataDamaged:
    return DataDamaged(
        f"This is not a complete archive of torch.save: {what}",
        where=where,
        fix="The file was cut short, or another program wrote it.",
    )


_LARGEST_PICKLE: Final = 1 << 32
SOLE_NAME: Final = "value"
"""The name of the only value in an archive that does not hold a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchSaveArchive:
    """One archive: its index, its values that are not tensors, and its tensors that are not row-major."""

    index: CheckpointIndex
    values: Mapping[str, Any]
    """The values that are not tensors, by name; `Opaque` for classes that only torch can rebuild."""
    strided: Mapping[int, TensorRef] = field(default_factory=dict)
    """The tensors, by row, whose elements are in a different order, or represent conjugates or negatives.

    The items of these tensors are their whole records.
    """
    value: Any = None
    """The whole value, nested as it was saved."""
    key_types: Mapping[str, str] = field(default_factory=dict)
    """The types of keys; see `state.walk.walk`."""
    records: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The offset and size of every tensor's record, by key."""

    def record(self, read: ReadRange, tensor: TensorRef) -> bytearray:
        """Return the whole record of a tensor inside an object."""
        return bytearray(read(*self.records[tensor.storage.key]))


def read_archive(read: ReadRange, size_bytes: int, file_name: str, where: str) -> TorchSaveArchive:
    """Read an archive's directory and pickle, but not its tensors."""
    if bytes(read(0, min(4, size_bytes))) != b"PK\x03\x04":
        raise DataDamaged(
            "This is not an archive of the form that torch.save has written since 1.6",
            where=where,
            fix="If torch can read it, load it with torch.load and save it again.",
        )
    records = read_directory(read, size_bytes, where)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise DataDamaged("This archive was not written by torch.save", where=where)
    root = pickles[0].removesuffix("data.pkl")

    def find(name: str) -> tuple[int, int]:
        """Return the offset in the file and the size of a record's bytes; the record must be uncompressed."""
        record = records.get(root + name)
        if record is None or not record.is_stored:
            raise DataDamaged(f"Its record {name} is missing or compressed", where=where)
        return data_offset(read, record, where), record.size_bytes

    if f"{root}byteorder" in records and bytes(read(*find("byteorder"))) != b"little":
        raise UsageError("Its numbers are big-endian", where=where, fix="Convert it with torch.")
    pickle_offset, pickle_bytes = find("data.pkl")
    if pickle_bytes > _LARGEST_PICKLE:
        raise DataDamaged(f"Its record data.pkl has {pickle_bytes} bytes", where=where)
    value = read_torch_pickle(bytes(read(pickle_offset, pickle_bytes)), where)
    state = value if isinstance(value, Mapping) else {SOLE_NAME: value}
    leaves, key_types = walk(
        state,
        lambda leaf: isinstance(leaf, TensorRef),
        lambda part: Owner.OPTIMIZER if is_optimizer_dict(part) else Owner.PLAIN,
    )
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, TensorRef)]
    others = [leaf for leaf in leaves if not isinstance(leaf.value, TensorRef)]
    facts = tuple(
        TensorFacts(leaf.name, leaf.value.dtype, leaf.value.shape, element_type(leaf.value.dtype).size_bytes)
        for leaf in tensors
    )
    num_elements = sum(math.prod(leaf.value.shape) for leaf in tensors)
    places: dict[str, tuple[int, int]] = {}
    for tensor in (inner for inner in inside(value) if isinstance(inner, TensorRef)):
        key = tensor.storage.key
        places[key] = places.get(key) or find(f"data/{key}")
        require_in_record(tensor, places[key][1], where)
        num_elements += math.prod(tensor.shape)
    if num_elements > (1 << 26) + 100 * size_bytes:
        raise DataDamaged(
            f"Its tensors repeat the {size_bytes:,} bytes of the archive to {num_elements:,} elements",
            where=where,
            fix="If you trust it, load it with torch.load, and save clones of its tensors.",
        )
    rows = []
    for leaf in tensors:
        tensor, (begin, record_bytes) = leaf.value, places[leaf.value.storage.key]
        width = element_type(tensor.dtype).size_bytes
        if is_row_major(tensor) and not (tensor.is_conjugate or tensor.is_negative):
            offset = begin + tensor.offset * width
            rows.append((offset, math.prod(tensor.shape) * width, offset))
        else:
            rows.append((begin, record_bytes, UNKNOWN))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return TorchSaveArchive(
        index=CheckpointIndex(
            facts,
            StoredRegions(
                whole_regions(facts),
                file=np.zeros(len(rows), dtype=np.int64),
                item_offset=columns[:, 0],
                item_bytes=columns[:, 1],
                payload_offset=columns[:, 2],
                packed=columns[:, 2] == UNKNOWN,
            ),
            tuple(StoredObject(leaf.name, 0, pickle_offset, pickle_bytes) for leaf in others),
            (file_name,),
            paths={leaf.name: leaf.path for leaf in leaves},
        ),
        key_types=key_types,
        values={leaf.name: leaf.value for leaf in others},
        value=value,
        records=places,
        strided={row: leaf.value for row, leaf in enumerate(tensors) if rows[row][2] == UNKNOWN},
    )


def require_in_record(tensor: TensorRef, record_bytes: int, where: str = "") -> None:
    """Raise `DataDamaged` unless all of a tensor's elements are in its record."""
    steps = zip(tensor.shape, tensor.strides, strict=False)
    reach = 0 if 0 in tensor.shape else 1 + sum((size - 1) * stride for size, stride in steps)
    end_bytes = (tensor.offset + reach) * element_type(tensor.dtype).size_bytes
    is_view = len(tensor.shape) == len(tensor.strides)
    is_view &= min(tensor.offset, *tensor.shape, *tensor.strides, 0) == 0
    # An expanded tensor repeats elements, and becomes as large as its shape when it is compared or converted.
    is_view &= math.prod(tensor.shape) <= (1 << 25) + 100 * record_bytes
    if not is_view or end_bytes > record_bytes:
        raise DataDamaged(
            f"A tensor reaches outside of its record data/{tensor.storage.key} or repeats it without end",
            where=where,
        )


def is_row_major(tensor: TensorRef) -> bool:
    """Return whether elements are contiguous. The stride of a dimension with one element does not matter."""
    rows = zip(tensor.shape, tensor.strides, contiguous_strides(tensor.shape), strict=True)
    return 0 in tensor.shape or all(size == 1 or have == want for size, have, want in rows)


def row_major(tensor: TensorRef, record: memoryview) -> memoryview:
    """Return a copy of a tensor's elements in row-major order, from its whole record."""
    width = element_type(tensor.dtype).size_bytes
    elements = np.frombuffer(record, dtype=np.dtype((np.void, width)))[tensor.offset :]
    strides = tuple(stride * width for stride in tensor.strides)
    view = np.lib.stride_tricks.as_strided(elements, tensor.shape, strides, writeable=False)
    content = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    if tensor.is_conjugate or tensor.is_negative:
        # frombuffer views of bytes are read-only, and contiguous ones were not copied.
        content = content.copy()
        parts = content.reshape(-1, width)
        # Change the signs of imaginary parts (conjugate), of all parts (negative), or of real parts (both).
        if tensor.is_conjugate != tensor.is_negative:
            parts[:, width - 1] ^= 0x80
        if tensor.is_negative and tensor.dtype.startswith("complex"):
            parts[:, width // 2 - 1] ^= 0x80
    return content.data


PLAIN: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice),
        *(list, tuple, set, frozenset, dict, OrderedDict),
        *(TensorRef, QuantizedRef, TorchName, DeviceName, TorchSize),
    }
)


def is_plain(value: object) -> bool:
    """Return whether a value is complete: it contains no class, function or instance named by the pickle."""
    return all(type(inner) in PLAIN for inner in inside(value))


def with_elements(value: Any, record: Callable[[TensorRef], bytearray]) -> Any:
    """Return a value with each tensor in it replaced by (type, shape, bytes)."""
    if isinstance(value, TensorRef):
        return value.dtype, value.shape, bytes(row_major(value, memoryview(record(value))))
    if isinstance(value, QuantizedRef):
        return value.dtype, with_elements((value.integers, value.quantizer), record)
    if isinstance(value, Mapping):
        return {key: with_elements(inner, record) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([with_elements(inner, record) for inner in value])
    return value


def inside(value: object) -> Iterator[object]:
    """Yield a value and all values inside it, each once."""
    found, known = [value], {id(value)}
    while found:
        held = found.pop()
        yield held
        for inner in parts_of(held):
            if id(inner) not in known:
                known.add(id(inner))
                found.append(inner)
