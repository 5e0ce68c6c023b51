"""Archives of `torch.save` as checkpoints: every tensor as a byte range of the file, none of them read.

Names are the keys of the nested state joined by dots, as in DCP. Invariant: a tensor with a payload offset
lies there whole, in row-major order, inside its record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.checkpoint.formats.restricted_pickle import Opaque, TensorRef, read_torch_pickle
from penstock.checkpoint.state.leaves import flatten_state
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
from penstock.errors import DataDamaged, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


ReadRange = Callable[[int, int], bytes | bytearray]
"""(offset, size) -> so many bytes of the archive, exactly."""

_END: Final = struct.Struct("<IHHHHIIH")
_LOCATOR64: Final = struct.Struct("<IIQI")
_END64: Final = struct.Struct("<IQHHIIQQQQ")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_LONGEST_END: Final = _END.size + 0xFFFF + _LOCATOR64.size
_FULL: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """One record: where its local header begins, and its length. `is_stored`: not compressed.

    `crc32` is 0 where the writer did not compute it.
    """

    name: str
    header_offset: int
    size_bytes: int
    is_stored: bool
    crc32: int


def read_directory(read: ReadRange, size_bytes: int, where: str) -> Mapping[str, ZipRecord]:
    """All records by name; `DataDamaged` where the archive is cut short or was never one."""
    try:
        begin, length = _find_directory(read, size_bytes)
        if begin + length > size_bytes:
            raise _not_whole("its directory lies outside of it", where)
        return dict(_entries(read(begin, length), size_bytes))
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise _not_whole(str(error), where) from error


def data_offset(read: ReadRange, record: ZipRecord, where: str) -> int:
    """Where a record's bytes begin."""
    header = _LOCAL.unpack(read(record.header_offset, _LOCAL.size))
    if header[0] != 0x04034B50:
        raise _not_whole(f"no record begins where {record.name} should", where)
    return record.header_offset + _LOCAL.size + int(header[9]) + int(header[10])


def _not_whole(what: str, where: str) -> DataDamaged:
    return DataDamaged(
        f"This is no whole archive of torch.save: {what}",
        where=where,
        fix="It was cut short, or another program wrote it.",
    )


def _find_directory(read: ReadRange, size_bytes: int) -> tuple[int, int]:
    tail_offset = max(size_bytes - _LONGEST_END, 0)
    tail = bytes(read(tail_offset, size_bytes - tail_offset))
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise ValueError("its end is missing")
    end = _END.unpack_from(tail, at)
    length, begin = int(end[5]), int(end[6])
    if at >= _LOCATOR64.size and tail[at - _LOCATOR64.size : at].startswith(b"PK\x06\x07"):
        end64_offset = int(_LOCATOR64.unpack_from(tail, at - _LOCATOR64.size)[2])
        if end64_offset + _END64.size <= size_bytes:
            end64 = _END64.unpack(read(end64_offset, _END64.size))
            length, begin = int(end64[8]), int(end64[9])
    return begin, length


def _entries(directory: bytes | bytearray, archive_bytes: int) -> list[tuple[str, ZipRecord]]:
    entries, at = [], 0
    while at < len(directory):
        fields = _CENTRAL.unpack_from(directory, at)
        if fields[0] != 0x02014B50:
            raise ValueError("its directory is garbled")
        name_end = at + _CENTRAL.size + fields[10]
        name = bytes(directory[at + _CENTRAL.size : name_end]).decode()
        extra = bytes(directory[name_end : name_end + fields[11]])
        size, header_offset = _long_fields(extra, stored=fields[8], size=fields[9], offset=fields[16])
        if header_offset + _LOCAL.size + size > archive_bytes:
            raise ValueError(f"{name} lies outside of it")
        entries.append(
            (name, ZipRecord(name, header_offset, size, is_stored=fields[4] == 0, crc32=fields[7]))
        )
        at = name_end + fields[11] + fields[12]
    return entries


def _long_fields(extra: bytes, *, stored: int, size: int, offset: int) -> tuple[int, int]:
    """Size and position of a record, from the ZIP64 field where they are beyond 4 GiB."""
    numbers = _zip64_numbers(extra)
    if size == _FULL:
        size = numbers.pop(0)
    if stored == _FULL:
        numbers.pop(0)
    if offset == _FULL:
        offset = numbers.pop(0)
    return size, offset


def _zip64_numbers(extra: bytes) -> list[int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
        at += 4 + length
    return []


Path = tuple[str | int, ...]

_LARGEST_PICKLE: Final = 1 << 32
SOLE_NAME: Final = "value"
"""What the one value of an archive is called that holds no mapping."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchSaveArchive:
    """One archive: its contents, the values that are no tensors, and tensors that are not row-major."""

    index: CheckpointIndex
    paths: Mapping[str, Path]
    values: Mapping[str, Any]
    """By object name; `Opaque` where torch alone could say what it is."""
    strided: Mapping[int, TensorRef] = field(default_factory=dict)
    """By row: tensors whose elements lie in another order, or stand for conjugates or negatives.

    Their items are their whole records.
    """
    value: Any = None
    """All of it, as it was nested."""
    records: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and size of every tensor's record, by key."""


def read_archive(read: ReadRange, size_bytes: int, file_name: str, where: str) -> TorchSaveArchive:
    """Look into an archive without reading its tensors."""
    if bytes(read(0, min(4, size_bytes))) != b"PK\x03\x04":
        raise DataDamaged(
            "This is no archive that torch.save writes since 1.6",
            where=where,
            fix="Open it once with torch.load and save it again, if torch can read it.",
        )
    records = read_directory(read, size_bytes, where)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise DataDamaged("This archive holds no state that torch.save wrote", where=where)
    root = pickles[0].removesuffix("data.pkl")
    archive = _Archive(read, records, root, where)
    archive.check_byte_order()
    value = read_torch_pickle(archive.content("data.pkl"), where)
    return _as_checkpoint(archive, value, file_name)


@dataclass(frozen=True, slots=True, eq=False)
class _Archive:
    """The records of one archive, by their names below its root."""

    read: ReadRange
    records: Mapping[str, ZipRecord]
    root: str
    where: str

    def record(self, name: str) -> ZipRecord:
        """A record that must be there, as it is."""
        record = self.records.get(self.root + name)
        if record is None or not record.is_stored:
            raise DataDamaged(f"Its record {name} is missing or compressed", where=self.where)
        return record

    def offset(self, name: str) -> int:
        """Where a record's bytes begin in the file."""
        return data_offset(self.read, self.record(name), self.where)

    def content(self, name: str) -> bytes:
        """A small record's bytes."""
        record = self.record(name)
        if record.size_bytes > _LARGEST_PICKLE:
            raise DataDamaged(f"Its record {name} has {record.size_bytes} bytes", where=self.where)
        return bytes(self.read(self.offset(name), record.size_bytes))

    def check_byte_order(self) -> None:
        """Elements are taken as they lie."""
        if f"{self.root}byteorder" in self.records and self.content("byteorder") != b"little":
            raise UsageError("Its numbers are big-endian", where=self.where, fix="Convert it with torch.")


def _as_checkpoint(archive: _Archive, value: Any, file_name: str) -> TorchSaveArchive:
    state = value if isinstance(value, Mapping) else {SOLE_NAME: value}
    leaves = flatten_state(state, lambda leaf: isinstance(leaf, TensorRef))
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, TensorRef)]
    others = [leaf for leaf in leaves if not isinstance(leaf.value, TensorRef)]
    facts = tuple(_facts(leaf.name, leaf.value) for leaf in tensors)
    places = list(_places(archive, [leaf.value for leaf in tensors]))
    keys = {tensor.storage.key for tensor in tensors_inside(value)}
    columns = np.array([place[:3] for place in places], dtype=np.int64).reshape(-1, 3)
    pickle_offset = archive.offset("data.pkl")
    pickle_bytes = archive.record("data.pkl").size_bytes
    return TorchSaveArchive(
        index=CheckpointIndex(
            facts,
            StoredRegions(
                whole_regions(facts),
                file=np.zeros(len(places), dtype=np.int64),
                item_offset=columns[:, 0],
                item_bytes=columns[:, 1],
                payload_offset=columns[:, 2],
                packed=columns[:, 2] == UNKNOWN,
            ),
            tuple(StoredObject(leaf.name, 0, pickle_offset, pickle_bytes, packed=True) for leaf in others),
            (file_name,),
        ),
        paths={leaf.name: leaf.path for leaf in leaves},
        values={leaf.name: leaf.value for leaf in others},
        value=value,
        records={
            key: (archive.offset(f"data/{key}"), archive.record(f"data/{key}").size_bytes) for key in keys
        },
        strided={row: leaf.value for row, leaf in enumerate(tensors) if places[row][2] == UNKNOWN},
    )


def _facts(name: str, tensor: TensorRef) -> TensorFacts:
    return TensorFacts(name, tensor.dtype, tensor.shape, element_type(tensor.dtype).size_bytes)


def _places(archive: _Archive, tensors: list[TensorRef]) -> Iterator[tuple[int, int, int]]:
    """Item offset, item bytes and payload offset of each tensor."""
    begins: dict[str, int] = {}
    for tensor in tensors:
        name = f"data/{tensor.storage.key}"
        if name not in begins:
            begins[name] = archive.offset(name)
        record, width = archive.record(name), element_type(tensor.dtype).size_bytes
        first, last = _extent(tensor)
        if min(first, *tensor.shape, 0) < 0 or last * width > record.size_bytes:
            raise DataDamaged(f"A tensor reaches outside of its record {name}", where=archive.where)
        if _is_row_major(tensor) and not (tensor.is_conjugate or tensor.is_negative):
            offset = begins[name] + first * width
            yield offset, math.prod(tensor.shape) * width, offset
        else:
            yield begins[name], record.size_bytes, UNKNOWN


def _extent(tensor: TensorRef) -> tuple[int, int]:
    """The first element in its record, and the one behind the last."""
    if len(tensor.shape) != len(tensor.strides) or 0 in tensor.shape:
        return tensor.offset, tensor.offset
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.offset, tensor.offset + reach + 1


def _is_row_major(tensor: TensorRef) -> bool:
    """Whether elements follow one another; the stride of a dimension of one element does not matter."""
    wanted = contiguous_strides(tensor.shape)
    if tensor.strides == wanted:
        return True
    rows = zip(tensor.shape, tensor.strides, wanted, strict=True)
    return 0 in tensor.shape or all(size == 1 or have == want for size, have, want in rows)


def row_major(tensor: TensorRef, record: memoryview) -> memoryview:
    """The elements of a tensor that does not lie there as it is, in row-major order: a copy."""
    width = element_type(tensor.dtype).size_bytes
    elements = np.frombuffer(record, dtype=np.dtype((np.void, width)))[tensor.offset :]
    strides = tuple(stride * width for stride in tensor.strides)
    view = np.lib.stride_tricks.as_strided(elements, tensor.shape, strides, writeable=False)
    content = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    if tensor.is_conjugate or tensor.is_negative:
        # frombuffer views of bytes are read-only, and contiguous ones were not copied.
        content = content.copy()
        _flip_signs(tensor, content.reshape(-1, width))
    return content.data


def _flip_signs(tensor: TensorRef, elements: NDArray[np.uint8]) -> None:
    """Of imaginary parts, of all parts, or of real ones where both are asked for."""
    imaginary, real = elements.shape[1] - 1, elements.shape[1] // 2 - 1
    if tensor.is_conjugate != tensor.is_negative:
        elements[:, imaginary] ^= 0x80
    if tensor.is_negative and tensor.dtype.startswith("complex"):
        elements[:, real] ^= 0x80


def is_plain(value: object) -> bool:
    """Whether a value is known whole, without a class that only its own program can rebuild."""
    return not any(isinstance(inner, Opaque) for inner in _inside(value))


def tensors_inside(value: object) -> list[TensorRef]:
    """All tensors in a value that is none."""
    return [inner for inner in _inside(value) if isinstance(inner, TensorRef)]


def with_elements(value: Any, elements: Callable[[TensorRef], bytearray]) -> Any:
    """A value with (type, shape, bytes) for each tensor in it."""
    if isinstance(value, TensorRef):
        return value.dtype, value.shape, bytes(elements(value))
    if isinstance(value, Mapping):
        return {key: with_elements(inner, elements) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_elements(inner, elements) for inner in value]
    return value


def _inside(value: object) -> Iterator[object]:
    """A value and all that it holds."""
    yield value
    if isinstance(value, Mapping):
        for pair in value.items():
            yield from _inside(pair)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _inside(inner)
