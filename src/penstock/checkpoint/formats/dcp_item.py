"""Items of `.distcp` files: one `torch.save` archive per stored region or object, possibly compressed.

An item is `prefix + payload + suffix`: the archive that `torch.save` could have written for one contiguous
tensor. Items are written and located without torch, which is imported only to unpickle objects. An item
behind a stream transform (compression) has no aligned payload and is read as a whole.

Objects are rebuilt by `saved_objects`, and by torch itself only with `trust`.

Invariants: payloads of 64 KiB or more that Penstock writes are aligned to 4 KiB, for direct I/O; in items of
other writers, a payload offset is given only if the bytes from there onward are the tensor's own, in
row-major order.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from penstock.checkpoint.formats.restricted_pickle import UNREADABLE, TensorRef, read_torch_pickle
from penstock.checkpoint.formats.saved_objects import Rebuilding, names_beyond_data
from penstock.checkpoint.formats.torch_save import (
    TorchSaveArchive,
    ZipRecord,
    is_row_major,
    read_archive,
    row_major,
)
from penstock.checkpoint.state.regions import UNKNOWN, Bytes, ElementType, contiguous_strides, element_type
from penstock.errors import DataDamaged, Unavailable, UsageError

ZSTD: Final = "stream.zstd/1"
"""The only transform that is built into torch."""
_PART_BYTES: Final = 1 << 20
"""The bytes unpacked at a time. The archive around a tensor's elements has fewer."""
_LARGEST_OBJECT: Final = 256 << 20
_LARGEST_RATIO: Final = 100


def apply_transforms(content: Bytes, transforms: Sequence[str]) -> bytes:
    """Apply the transforms to `content` in order, the first one innermost."""
    require_known_transforms(transforms)
    packed = bytes(content)
    for _ in transforms:
        import zstandard  # noqa: PLC0415 - takes 20 ms, and few checkpoints are compressed

        packed = zstandard.ZstdCompressor().compress(packed)
    return packed


def undo_transforms(content: Bytes, transforms: Sequence[str], where: str, *, at_most: int | None) -> bytes:
    """Undo the transforms of `content`; raise `Unavailable` with the name of one that is not supported.

    Raise `DataDamaged` if more than `at_most` bytes come out: a few bytes can unpack to any number.
    """
    plain = bytes(content)
    require_known_transforms(transforms, Unavailable)
    for _ in transforms:
        import zstandard  # noqa: PLC0415 - as above

        try:
            parts, num_bytes = [], 0
            with zstandard.ZstdDecompressor().stream_reader(plain) as stream:
                while part := stream.read(_PART_BYTES):
                    parts.append(part)
                    num_bytes += len(part)
                    if at_most is not None and num_bytes > at_most:
                        raise DataDamaged(f"A compressed item unpacks to over {at_most} bytes", where=where)
            plain = b"".join(parts)
        except zstandard.ZstdError as error:
            raise DataDamaged(f"A compressed item cannot be unpacked: {error}", where=where) from error
    return plain


def most_unpacked(item: Bytes, payload_bytes: int | None = None) -> int:
    """Return the largest size to which an item may unpack: for a tensor, just above the size of its payload.

    The size of an object is not recorded, so its limit is a multiple of the item's size; with `trust`, an
    object has no limit.
    """
    if payload_bytes is None:
        return max(_LARGEST_OBJECT, _LARGEST_RATIO * len(item))
    return payload_bytes + _PART_BYTES


def require_known_transforms(
    transforms: Sequence[str], error: type[UsageError | Unavailable] = UsageError
) -> None:
    """Raise `error` unless all transforms are supported."""
    for transform in transforms:
        name, _, version = transform.partition("/")
        if name != "stream.zstd" or version.partition(".")[0] != "1":
            raise error(
                f"The stream transform {transform!r} is not supported",
                fix=f"Use {ZSTD}. Load checkpoints with other transforms with torch and their extension.",
            )


def load_object(item: Bytes, name: str, *, transforms: Sequence[str] = (), trust: bool, where: str) -> Any:
    """Load the object of one item. Without `trust`, raise `UsageError` unless all of it is plain data."""
    plain = undo_transforms(item, transforms, where, at_most=None if trust else most_unpacked(item))
    pickled = _pickled_scalar(plain)
    if pickled is None and not trust:
        try:
            archive, record = open_item(plain, where)
        except DataDamaged as error:
            raise DataDamaged(f"The object {name} cannot be read: {error.what}", where=where) from error
        return read_data(archive.value, record, name, where)
    try:
        if pickled is not None:
            return pickle.loads(pickled)  # noqa: S301 - None, a Boolean, a number or text
        import torch  # noqa: PLC0415 - see `object_bytes`

        return torch.load(io.BytesIO(plain), map_location="cpu", weights_only=False)
    except (MemoryError, *UNREADABLE) as error:
        raise DataDamaged(f"The object {name} cannot be unpickled: {error!r}", where=where) from error


_SCALAR: Final = re.compile(
    rb"\x80\x02(?:[N\x88\x89]|K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})|G.{8}|X.{4}.*q\0)\.",
    re.DOTALL,
)


def _pickled_scalar(item: bytes) -> bytes | None:
    """Return the pickle in an item if torch saved a single scalar, or None.

    Avoids reading an archive, which takes a while.
    """
    name, begin = next(_records_in(item[:HEAD_BYTES]), (b"", 0))
    end = item.find(_AFTER_RECORD, begin, HEAD_BYTES)
    pickled = item[begin:end]
    if end < 0 or not name.endswith(b"/data.pkl") or not _SCALAR.fullmatch(pickled):
        return None
    if pickled[2:3] == b"X" and int.from_bytes(pickled[3:7], "little") != len(pickled) - 10:
        return None
    return pickled


def read_data(value: Any, record: Callable[[TensorRef], bytearray], name: str, where: str) -> Any:
    """Rebuild an object from its archive's value; raise `UsageError` unless all of it is plain data."""
    if beyond := names_beyond_data(value):
        raise UsageError(
            f"The object {name} is more than data: it is made of {', '.join(beyond)}",
            where=where,
            fix="If you trust the source of this checkpoint, load it with trust=True, which runs its code.",
        )
    try:
        return Rebuilding(record).made(value)
    except (DataDamaged, MemoryError, *UNREADABLE) as error:
        raise DataDamaged(f"The object {name} cannot be read: {error}", where=where) from error


def object_bytes(value: Any) -> bytes:
    """Return the item for an object, in the form that stock torch reads."""
    import torch  # noqa: PLC0415 - other tools than loads and saves do without it

    item = io.BytesIO()
    torch.save(value, item)
    return item.getvalue()


_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")

_FULL = 0xFFFFFFFF
_PADDING_ID = b"FB"
"""The ID of the extra field with which torch itself pads its headers."""
_FLAGS = 0x0808
"""Bit 3: checksum and sizes follow the record, because the payload's are not known earlier. Bit 11:
UTF-8.
"""


def begin_record(name: str, offset: int, *, align: int = 1) -> bytes:
    """Return the local header of a record that starts at `offset`; its bytes are aligned to `align`."""
    encoded = name.encode()
    num_bytes, extra = -(offset + _LOCAL.size + len(encoded)) % align, b""
    if num_bytes:
        # An extra field has at least its own header of four bytes.
        while num_bytes < 4:
            num_bytes += align
        extra = _PADDING_ID + struct.pack("<H", num_bytes - 4) + bytes(num_bytes - 4)
    header = _LOCAL.pack(0x04034B50, 0, 0, _FLAGS, 0, 0, 0, 0, 0, len(encoded), len(extra))
    return header + encoded + extra


def end_record(size_bytes: int, crc32: int = 0) -> bytes:
    """Return the descriptor that follows a record's bytes."""
    sizes = "QQ" if size_bytes >= _FULL else "II"
    return struct.pack(f"<II{sizes}", 0x08074B50, crc32, size_bytes, size_bytes)


def small_record(name: str, content: bytes, offset: int) -> tuple[bytes, ZipRecord]:
    """Return a complete record, including its checksum, and its entry for the directory."""
    crc32 = zlib.crc32(content)
    body = begin_record(name, offset) + content + end_record(len(content), crc32)
    return body, ZipRecord(name, offset, len(content), crc32)


def directory(records: Sequence[ZipRecord], offset: int) -> bytes:
    """Return the ZIP central directory of `records`, to be written at `offset`, and its end records."""
    entries = bytearray()
    for record in records:
        encoded = record.name.encode()
        long_fields = [number for number in (record.size_bytes,) * 2 if number >= _FULL]
        if record.header_offset >= _FULL:
            long_fields.append(record.header_offset)
        num_long = len(long_fields)
        extra = struct.pack(f"<HH{num_long}Q", 1, 8 * num_long, *long_fields) if num_long else b""
        size, header_offset = min(record.size_bytes, _FULL), min(record.header_offset, _FULL)
        fields = (0x02014B50, 0, 0, _FLAGS, 0, 0, 0, record.crc32, size, size, len(encoded), len(extra))
        entries += _CENTRAL.pack(*fields, 0, 0, 0, 0, header_offset) + encoded + extra
    num_records, end_offset = len(records), offset + len(entries)
    end64 = _END64.pack(
        0x06064B50, _END64.size - 12, 0x031E, 45, 0, 0, num_records, num_records, len(entries), offset
    )
    locator = _LOCATOR64.pack(0x07064B50, 0, end_offset, 1)
    num_short = min(num_records, 0xFFFF)
    end = _END.pack(0x06054B50, 0, 0, num_short, num_short, min(len(entries), _FULL), min(offset, _FULL), 0)
    return bytes(entries) + end64 + locator + end


PAYLOAD_ALIGNMENT = 4096
ALIGNED_BYTES = 64 * 1024
"""Payloads of at least this size are aligned. Gaps before smaller ones would be as large as the payloads."""
_PREFIX_ALIGNMENT = 64
"""The alignment of tensors in torch's archives. It also makes the prefixes of most shapes equally long."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a payload. All lengths are known before the first byte is written."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes
    """Contains 0 as the CRC-32 of the payload, which torch accepts."""

    @property
    def item_bytes(self) -> int:
        return len(self.prefix) + self.payload_bytes + len(self.suffix)


@lru_cache(maxsize=65536)
def envelope(dtype: str, shape: tuple[int, ...]) -> Envelope:
    """Return the envelope of a contiguous tensor of this element type and shape."""
    kind = element_type(dtype)
    payload_bytes = math.prod(shape) * kind.size_bytes
    prefix, records = b"", []
    for name, content in (
        ("data.pkl", tensor_pickle(kind, shape)),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", b"little"),
        ("version", b"3\n"),
    ):
        record_bytes, record = small_record(f"archive/{name}", content, len(prefix))
        prefix += record_bytes
        records.append(record)
    payload = ZipRecord("archive/data/0", len(prefix), payload_bytes)
    prefix += begin_record(payload.name, len(prefix), align=_PREFIX_ALIGNMENT)
    closing = end_record(payload_bytes)
    end = len(prefix) + payload_bytes + len(closing)
    return Envelope(prefix, payload_bytes, closing + directory([*records, payload], end))


def item_start(position: int, around: Envelope) -> int:
    """Return the first offset, `position` or later, where an item may begin: large payloads are aligned."""
    if around.payload_bytes < ALIGNED_BYTES:
        return position + -position % _PREFIX_ALIGNMENT
    return position + -(position + len(around.prefix)) % PAYLOAD_ALIGNMENT


def tensor_pickle(kind: ElementType, shape: Sequence[int]) -> bytes:
    """Return the pickle of one contiguous tensor in record 0, byte for byte as torch writes it."""
    pickled = io.BytesIO()
    ArchivePickler(pickled, protocol=2).dump(TensorStub(kind, tuple(shape), "0"))
    return pickled.getvalue()


class _RecordStub(tuple[Any, ...]):
    """Stands for a record of an archive in a pickle: the ID that refers to it."""

    __slots__ = ()


class TensorStub:
    """Stands for a contiguous tensor in a pickle: the call that rebuilds it from the record `key`."""

    def __init__(self, kind: ElementType, shape: tuple[int, ...], key: str) -> None:
        import torch  # noqa: PLC0415 - only writers need it

        storage, extent, version = torch.UntypedStorage, math.prod(shape) * kind.size_bytes, 3
        further: tuple[Any, ...] = (getattr(torch, kind.name),)
        if kind.typed_storage is not None:
            storage, extent, version = getattr(torch, kind.typed_storage), math.prod(shape), 2
            further = ()
        rebuild = getattr(torch._utils, f"_rebuild_tensor_v{version}")  # noqa: SLF001 - archives hold this name
        record = _RecordStub(("storage", storage, key, "cpu", extent))
        self._call: tuple[Any, ...] = (
            rebuild,
            (record, 0, shape, contiguous_strides(shape), False, OrderedDict(), *further),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class ArchivePickler(pickle.Pickler):
    """A pickler that refers to records by their IDs."""

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the reference to a record for its stand-in; None for everything else."""
        return tuple(obj) if isinstance(obj, _RecordStub) else None


_AFTER_RECORD: Final = b"PK\x07\x08"
HEAD_BYTES: Final = 4096
"""The length of an item's beginning that suffices to locate its payload."""

_SIGNATURE: Final = b"PK\x03\x04"


def payload_in(head: Bytes, item_bytes: int, dtype: str, shape: Sequence[int]) -> int | None:
    """Return the offset of the payload in an item, given its first `HEAD_BYTES`, or None.

    None if only `tensor_bytes` with the whole item can tell: the elements are in a different order, the
    writer was big-endian, or the archive's layout differs from torch's.
    """
    head, tensor, is_little = bytes(head), None, True
    for number, (name, content) in enumerate(_records_in(head)):
        if number == 0:
            tensor = _tensor_in(head[content : head.find(_AFTER_RECORD, content)])
            if tensor is None or (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
                return None
        elif name.endswith(b"/byteorder"):
            is_little = head.startswith(b"little", content)
        elif tensor is not None and name.endswith(f"/data/{tensor.storage.key}".encode()):
            fits = content + math.prod(shape) * element_type(dtype).size_bytes <= item_bytes
            return content if fits and is_little else None
    return None


def _records_in(head: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the names of an archive's first records, and the offsets of their contents."""
    at = 0
    while head.startswith(_SIGNATURE, at) and len(head) >= at + _LOCAL.size:
        *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        begin = at + _LOCAL.size
        content = begin + name_bytes + extra_bytes
        yield head[begin : begin + name_bytes], content
        at = max(head.find(_SIGNATURE, content), 0) or len(head)


@lru_cache(maxsize=4096)
def _tensor_in(pickled: bytes) -> TensorRef | None:
    """Return the tensor that a pickle consists of.

    Returns None unless the tensor's record begins with its elements in row-major order.
    """
    try:
        tensor = read_torch_pickle(pickled, "an item")
    except DataDamaged:
        return None
    if not isinstance(tensor, TensorRef) or tensor.is_conjugate or tensor.is_negative:
        return None
    return None if tensor.offset or not is_row_major(tensor) else tensor


def tensor_bytes(
    item: Bytes, dtype: str, shape: Sequence[int], *, transforms: Sequence[str] = (), where: str
) -> memoryview:
    """Return a tensor's elements in row-major order from its item.

    Raises `DataDamaged` if the item holds a tensor of another element type or shape.
    """
    plain = memoryview(item)
    if transforms:
        most = most_unpacked(item, math.prod(shape) * element_type(dtype).size_bytes)
        plain = memoryview(undo_transforms(item, transforms, where, at_most=most))
    archive, _ = open_item(plain, where)
    facts = archive.index.tensors
    if [(one.dtype, one.shape) for one in facts] != [(dtype, tuple(shape))]:
        held = ", ".join(f"{one.dtype}{list(one.shape)}" for one in facts) or "no tensor"
        raise DataDamaged(f"An item should hold {dtype}{list(shape)} but holds {held}", where=where)
    stored = archive.index.stored
    if stored.payload_offset[0] != UNKNOWN:
        begin = int(stored.payload_offset[0])
        return plain[begin : begin + facts[0].size_bytes]
    begin, size = int(stored.item_offset[0]), int(stored.item_bytes[0])
    return row_major(archive.strided[0], plain[begin : begin + size])


def open_item(item: Bytes, where: str) -> tuple[TorchSaveArchive, Callable[[TensorRef], bytearray]]:
    """Open an item without transforms: return its archive, and a function that reads a tensor's record."""
    view = memoryview(item)

    def read(offset: int, size: int) -> bytes:
        content = bytes(view[offset : offset + size])
        if len(content) != size:
            raise DataDamaged("An item ends too early", where=where)
        return content

    archive = read_archive(read, len(view), "", where)
    return archive, partial(archive.record, read)
