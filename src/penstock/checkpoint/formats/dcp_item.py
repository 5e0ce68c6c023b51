"""Items of `.distcp` files: one `torch.save` archive per stored region or object, perhaps compressed.

An item is `prefix + payload + suffix`: the archive that `torch.save` could have written of one contiguous
tensor. Items are written and located without torch, which is imported only to unpickle objects. An item
behind a stream transform (compression) has no aligned payload and is read whole. Invariants: our payloads of
64 KiB and more are aligned to 4 KiB, so that direct I/O can move them; in items of other writers a payload
offset is given only where the bytes from there on are the tensor's own, in row-major order; and no code of a
checkpoint runs unless the caller says `trust`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from penstock.checkpoint.formats.restricted_pickle import QuantizedRef, TensorRef
from penstock.checkpoint.formats.torch_save import TorchSaveArchive, is_plain, read_archive, row_major
from penstock.checkpoint.state.regions import UNKNOWN, Bytes, ElementType, contiguous_strides, element_type
from penstock.errors import DataDamaged, Unavailable, UsageError

ZSTD: Final = "stream.zstd/1"
"""The only transform that torch has built in."""


def apply_transforms(content: Bytes, transforms: Sequence[str]) -> bytes:
    """Apply the transforms to `content` in order, the first one innermost."""
    packed = bytes(content)
    for name in transforms:
        require_known_transforms([name])
        import zstandard  # noqa: PLC0415 - takes 20 ms, and few checkpoints are compressed

        stream = io.BytesIO()
        with zstandard.ZstdCompressor().stream_writer(stream, closefd=False) as compressor:
            compressor.write(packed)
        packed = stream.getvalue()
    return packed


def undo_transforms(content: Bytes, transforms: Sequence[str], where: str) -> bytes:
    """Undo the transforms of `content`; `Unavailable` names one that is not supported."""
    plain = bytes(content)
    require_known_transforms(transforms, Unavailable)
    for _ in transforms:
        import zstandard  # noqa: PLC0415 - as above

        try:
            with zstandard.ZstdDecompressor().stream_reader(plain) as stream:
                plain = stream.readall()
        except zstandard.ZstdError as error:
            raise DataDamaged(f"A compressed item cannot be unpacked: {error}", where=where) from error
    return plain


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
    """The object of one item. Without `trust`, `UsageError` names what torch does not know to be harmless."""
    import torch  # noqa: PLC0415 - other tools than loads do without it

    from penstock.checkpoint.formats.data_classes import load_data  # noqa: PLC0415 - it loads torch

    content = io.BytesIO(undo_transforms(item, transforms, where))
    try:
        return torch.load(content, map_location="cpu", weights_only=False) if trust else load_data(content)
    except pickle.UnpicklingError as error:
        if trust:
            raise DataDamaged(f"The object {name} cannot be unpickled: {error}", where=where) from error
        # Of Python's own values, torch refuses integers of more than 255 bytes.
        archive = open_item(content.getvalue(), where)
        if is_plain(archive.value):
            plain = content.getvalue()
            return with_tensors(
                archive.value,
                partial(archive.elements, lambda offset, size: plain[offset : offset + size]),
            )
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().split("\n")[0]
        raise UsageError(
            f"The object {name} is more than data: {reason or error}",
            where=where,
            fix="If you trust the source of this checkpoint, load it with trust=True, which runs its code.",
        ) from error
    except MemoryError as error:
        raise DataDamaged(f"The object {name} asks for more memory than there is", where=where) from error
    except (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise DataDamaged(f"The object {name} cannot be read: {error}", where=where) from error


def with_tensors(value: Any, elements: Callable[[TensorRef], bytearray]) -> Any:
    """A value with its references replaced by tensors; `elements` returns theirs in row-major order."""
    if isinstance(value, TensorRef):
        import torch  # noqa: PLC0415 - see `load_object`

        dtype = getattr(torch, value.dtype)
        content = elements(value)
        flat = (
            torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype, device="cpu")
        )
        return flat.reshape(value.shape)
    if isinstance(value, QuantizedRef):
        integers, quantizer = with_tensors((value.integers, value.quantizer), elements)
        return _quantized(value.dtype, integers, quantizer)
    if isinstance(value, Mapping):
        return type(value)((key, with_tensors(inner, elements)) for key, inner in value.items())  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(with_tensors(inner, elements) for inner in value)
    return value


def _quantized(dtype: str, integers: Any, quantizer: tuple[Any, ...]) -> Any:
    import torch  # noqa: PLC0415 - see `load_object`

    # torch has no public function that takes scales per channel; archives name this one.
    rebuild: Any = torch._utils._rebuild_qtensor  # noqa: SLF001 - as above
    make_storage: Any = torch.storage.TypedStorage
    integers_as = make_storage(
        wrap_storage=integers.untyped_storage(), dtype=getattr(torch, dtype), _internal=True
    )
    scheme, *parameters = quantizer
    try:
        return rebuild(
            integers_as,
            storage_offset=0,
            size=integers.shape,
            stride=integers.stride(),
            quantizer_params=(getattr(torch, scheme), *parameters),
            requires_grad=False,
            backward_hooks=OrderedDict(),
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataDamaged(f"A quantized tensor is not as torch writes them: {error}") from error


def object_bytes(value: Any) -> bytes:
    """An object as the item that stock torch reads."""
    import torch  # noqa: PLC0415 - see `load_object`

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
"""The extra field that torch itself pads its headers with."""
_FLAGS = 0x0808
"""Bit 3: checksum and sizes follow the record, because the payload's are not known before. Bit 11: UTF-8."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished record of an archive, as its directory lists it."""

    name: str
    header_offset: int
    size_bytes: int
    crc32: int = 0


def begin_record(name: str, offset: int, *, align: int = 1) -> bytes:
    """The local header of a record that starts at `offset`; its bytes begin at a multiple of `align`."""
    encoded = name.encode()
    extra = _padding(-(offset + _LOCAL.size + len(encoded)) % align, align)
    header = _LOCAL.pack(0x04034B50, 0, 0, _FLAGS, 0, 0, 0, 0, 0, len(encoded), len(extra))
    return header + encoded + extra


def _padding(num_bytes: int, align: int) -> bytes:
    """An extra field of `num_bytes`; if that is too short for a field, of `align` bytes more."""
    if num_bytes == 0:
        return b""
    while num_bytes < 4:
        num_bytes += align
    return _PADDING_ID + struct.pack("<H", num_bytes - 4) + bytes(num_bytes - 4)


def end_record(size_bytes: int, crc32: int = 0) -> bytes:
    """The descriptor that follows a record's bytes."""
    sizes = "QQ" if size_bytes >= _FULL else "II"
    return struct.pack(f"<II{sizes}", 0x08074B50, crc32, size_bytes, size_bytes)


def small_record(name: str, content: bytes, offset: int) -> tuple[bytes, Record]:
    """A whole record, checksum included, and its entry for the directory."""
    crc32 = zlib.crc32(content)
    body = begin_record(name, offset) + content + end_record(len(content), crc32)
    return body, Record(name, offset, len(content), crc32)


def directory(records: Sequence[Record], offset: int) -> bytes:
    """The central directory of an archive, which begins at `offset`, and the archive's end."""
    entries = b"".join(_central_entry(record) for record in records)
    num_records, end_offset = len(records), offset + len(entries)
    end64 = _END64.pack(
        0x06064B50, _END64.size - 12, 0x031E, 45, 0, 0, num_records, num_records, len(entries), offset
    )
    locator = _LOCATOR64.pack(0x07064B50, 0, end_offset, 1)
    short = [
        min(number, full) for number, full in ((num_records, 0xFFFF), (len(entries), _FULL), (offset, _FULL))
    ]
    end = _END.pack(0x06054B50, 0, 0, short[0], short[0], short[1], short[2], 0)
    return entries + end64 + locator + end


def _central_entry(record: Record) -> bytes:
    encoded = record.name.encode()
    long_fields = [number for number in (record.size_bytes,) * 2 if number >= _FULL]
    if record.header_offset >= _FULL:
        long_fields.append(record.header_offset)
    extra = (
        struct.pack(f"<HH{len(long_fields)}Q", 1, 8 * len(long_fields), *long_fields) if long_fields else b""
    )
    size, header_offset = min(record.size_bytes, _FULL), min(record.header_offset, _FULL)
    fields = (0x02014B50, 0, 0, _FLAGS, 0, 0, 0, record.crc32, size, size, len(encoded), len(extra))
    return _CENTRAL.pack(*fields, 0, 0, 0, 0, header_offset) + encoded + extra


PAYLOAD_ALIGNMENT = 4096
ALIGNED_BYTES = 64 * 1024
"""Payloads of at least this size are aligned; the gaps before smaller ones would be as large as they are."""
_PREFIX_ALIGNMENT = 64
"""The alignment of tensors in torch's archives. It also gives the prefixes of most shapes the same length."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a payload. All lengths are known before a byte is written."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes
    """Has no CRC-32 of the payload (0), which torch accepts; `with_crc32` adds one for strict readers."""
    _records: tuple[Record, ...]

    @property
    def item_bytes(self) -> int:
        """The size of the whole item."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)

    def with_crc32(self, crc32: int) -> bytes:
        """The suffix for a payload whose CRC-32 is known; as long as `suffix`."""
        *small, payload = self._records
        summed = Record(payload.name, payload.header_offset, payload.size_bytes, crc32)
        return _suffix((*small, summed), len(self.prefix))


@lru_cache(maxsize=65536)
def envelope(dtype: str, shape: tuple[int, ...]) -> Envelope:
    """The envelope of a contiguous tensor of this element type and shape."""
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
    payload = Record("archive/data/0", len(prefix), payload_bytes)
    prefix += begin_record(payload.name, len(prefix), align=_PREFIX_ALIGNMENT)
    ordered = (*records, payload)
    return Envelope(prefix, payload_bytes, _suffix(ordered, len(prefix)), ordered)


def item_start(position: int, around: Envelope) -> int:
    """The first offset from `position` on at which an item may begin: a large payload is then aligned."""
    if around.payload_bytes < ALIGNED_BYTES:
        return position + -position % _PREFIX_ALIGNMENT
    return position + -(position + len(around.prefix)) % PAYLOAD_ALIGNMENT


def _suffix(records: tuple[Record, ...], prefix_bytes: int) -> bytes:
    payload = records[-1]
    closing = end_record(payload.size_bytes, payload.crc32)
    return closing + directory(records, prefix_bytes + payload.size_bytes + len(closing))


def tensor_pickle(kind: ElementType, shape: Sequence[int]) -> bytes:
    """The pickle of one contiguous tensor in storage 0, byte for byte as torch writes it.

    Equal bytes let `payload_in` recognise our own items and torch's by comparison, without unpickling.
    """
    num_elements = math.prod(shape)
    typed = kind.typed_storage is not None
    storage = f"ctorch\n{kind.typed_storage}\n" if typed else "ctorch.storage\nUntypedStorage\n"
    storage_length = num_elements if typed else num_elements * kind.size_bytes
    memo = 5

    def remembered() -> bytes:
        nonlocal memo
        memo += 1
        return b"q" + bytes([memo - 1])

    parts = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v%d\nq\x00((" % (2 if typed else 3),
        b"X\x07\x00\x00\x00storageq\x01" + storage.encode() + b"q\x02",
        b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04",
        _pickled_int(storage_length) + b"t" + remembered() + b"QK\x00",
        _pickled_tuple(shape, remembered),
        _pickled_tuple(contiguous_strides(shape), remembered),
        b"\x89ccollections\nOrderedDict\n" + remembered() + b")R" + remembered(),
    ]
    if not typed:
        parts.append(f"ctorch\n{kind.name}\n".encode() + remembered())
    parts.append(b"t" + remembered() + b"R" + remembered() + b".")
    return b"".join(parts)


def _pickled_tuple(numbers: Sequence[int], remembered: Callable[[], bytes]) -> bytes:
    if not numbers:
        return b")"
    items = b"".join(_pickled_int(number) for number in numbers)
    if len(numbers) <= 3:
        return items + (b"\x85", b"\x86", b"\x87")[len(numbers) - 1] + remembered()
    return b"(" + items + b"t" + remembered()


def _pickled_int(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + struct.pack("<B", number)
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    encoded = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


HEAD_BYTES: Final = 4096
"""This much of an item's beginning is enough to locate its payload."""

_SIGNATURE: Final = b"PK\x03\x04"


def payload_in(head: Bytes, item_bytes: int, dtype: str, shape: Sequence[int]) -> int | None:
    """The offset of the payload in an item, from the item's first `HEAD_BYTES`.

    None if only `tensor_bytes` of the whole item can tell: elements in another order, a big-endian writer, or
    an archive in another layout than torch's.
    """
    kind = element_type(dtype)
    head = bytes(head)
    pickled = tensor_pickle(kind, shape)
    content = _content_offset(head, 0)
    if content is None or head[content : content + len(pickled)] != pickled:
        return None
    at, is_little = content + len(pickled), True
    while (at := head.find(_SIGNATURE, at)) >= 0:
        content = _content_offset(head, at)
        if content is None:
            return None
        name = _name(head, at)
        if name.endswith(b"/byteorder"):
            is_little = head.startswith(b"little", content)
        if name.endswith(b"/data/0"):
            fits = content + math.prod(shape) * kind.size_bytes <= item_bytes
            return content if fits and is_little else None
        at = content
    return None


def _content_offset(head: bytes, at: int) -> int | None:
    """Where the content begins of the record whose local header is at `at`."""
    if not head.startswith(_SIGNATURE, at) or len(head) < at + _LOCAL.size:
        return None
    fields = _LOCAL.unpack_from(head, at)
    return at + _LOCAL.size + int(fields[9]) + int(fields[10])


def _name(head: bytes, at: int) -> bytes:
    length = int(_LOCAL.unpack_from(head, at)[9])
    return head[at + _LOCAL.size : at + _LOCAL.size + length]


def tensor_bytes(
    item: Bytes, dtype: str, shape: Sequence[int], *, transforms: Sequence[str] = (), where: str
) -> memoryview:
    """A tensor's elements in row-major order, from its whole item; `DataDamaged` if it has another tensor."""
    plain = memoryview(undo_transforms(item, transforms, where) if transforms else item)
    archive = open_item(plain, where)
    facts = archive.index.tensors
    if [(one.dtype, one.shape) for one in facts] != [(dtype, tuple(shape))]:
        held = ", ".join(f"{one.dtype}{list(one.shape)}" for one in facts) or "no tensor"
        raise DataDamaged(f"An item should hold {dtype}{list(shape)} and holds {held}", where=where)
    stored = archive.index.stored
    if stored.payload_offset[0] != UNKNOWN:
        begin = int(stored.payload_offset[0])
        return plain[begin : begin + facts[0].size_bytes]
    begin, size = int(stored.item_offset[0]), int(stored.item_bytes[0])
    return row_major(archive.strided[0], plain[begin : begin + size])


def open_item(item: Bytes, where: str) -> TorchSaveArchive:
    """Open an item without transforms as the archive of `torch.save` that it is."""
    view = memoryview(item)

    def read(offset: int, size: int) -> bytes:
        content = bytes(view[offset : offset + size])
        if len(content) != size:
            raise DataDamaged("An item ends too early", where=where)
        return content

    return read_archive(read, len(view), "", where)
