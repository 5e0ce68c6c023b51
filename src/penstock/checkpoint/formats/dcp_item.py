"""Items of `.distcp` files: one `torch.save` archive per stored region or object, perhaps compressed.

An item is `prefix + payload + suffix`: the archive that `torch.save` could have written of one contiguous
tensor. Items are written and located without torch, which is imported only to unpickle objects. An item
behind a stream transform (compression) has no aligned payload and is read whole.

What of an object is data is decided here, too: torch's `weights_only` allows tensors and Python's plain
values; arrays, numbers and generators of numpy, `BytesIO`, `frozenset`, and the program's own enums, named
tuples and dataclasses are added, if their module is already imported and they define no code of their own for
this. The same rules apply when an object is saved, to report then what will need `trust`.

Invariants: our payloads of 64 KiB and more are aligned to 4 KiB, so that direct I/O can move them; in items
of other writers a payload offset is given only where the bytes from there on are the tensor's own, in row-
major order; nothing is imported because a checkpoint names it, and none of its code runs without `trust`.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import pickle
import struct
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from penstock.checkpoint.formats.restricted_pickle import (
    QuantizedRef,
    TensorRef,
    TorchName,
    TorchSize,
    read_torch_pickle,
)
from penstock.checkpoint.formats.torch_save import (
    TorchSaveArchive,
    ZipRecord,
    is_plain,
    is_row_major,
    read_archive,
    row_major,
)
from penstock.checkpoint.state.regions import UNKNOWN, Bytes, ElementType, contiguous_strides, element_type
from penstock.errors import DataDamaged, Unavailable, UsageError

ZSTD: Final = "stream.zstd/1"
"""The only transform that torch has built in."""


def apply_transforms(content: Bytes, transforms: Sequence[str]) -> bytes:
    """Apply the transforms to `content` in order, the first one innermost."""
    require_known_transforms(transforms)
    packed = bytes(content)
    for _ in transforms:
        import zstandard  # noqa: PLC0415 - takes 20 ms, and few checkpoints are compressed

        packed = zstandard.ZstdCompressor().compress(packed)
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

    content = io.BytesIO(undo_transforms(item, transforms, where))
    try:
        return torch.load(content, map_location="cpu", weights_only=False) if trust else _load_data(content)
    except pickle.UnpicklingError as error:
        if trust:
            raise DataDamaged(f"The object {name} cannot be unpickled: {error}", where=where) from error
        # Of Python's own values, torch refuses integers of more than 255 bytes.
        archive, elements = open_item(content.getvalue(), where)
        if is_plain(archive.value):
            return with_tensors(archive.value, elements)
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
    if isinstance(value, TorchName):
        import torch  # noqa: PLC0415 - see `load_object`

        found = getattr(torch, value, None)
        return found if isinstance(found, torch.dtype | torch.qscheme) else torch.device(value)
    if isinstance(value, TorchSize):
        import torch  # noqa: PLC0415 - see `load_object`

        return torch.Size(value)
    if isinstance(value, Mapping):
        return type(value)(with_tensors(tuple(value.items()), elements))  # type: ignore[call-arg]
    if isinstance(value, list | tuple | set | frozenset):
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
    try:
        return rebuild(
            integers_as,
            storage_offset=0,
            size=integers.shape,
            stride=integers.stride(),
            quantizer_params=quantizer,
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


def begin_record(name: str, offset: int, *, align: int = 1) -> bytes:
    """The local header of a record that starts at `offset`; its bytes begin at a multiple of `align`."""
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
    """The descriptor that follows a record's bytes."""
    sizes = "QQ" if size_bytes >= _FULL else "II"
    return struct.pack(f"<II{sizes}", 0x08074B50, crc32, size_bytes, size_bytes)


def small_record(name: str, content: bytes, offset: int) -> tuple[bytes, ZipRecord]:
    """A whole record, checksum included, and its entry for the directory."""
    crc32 = zlib.crc32(content)
    body = begin_record(name, offset) + content + end_record(len(content), crc32)
    return body, ZipRecord(name, offset, len(content), crc32)


def directory(records: Sequence[ZipRecord], offset: int) -> bytes:
    """The central directory of an archive, which begins at `offset`, and the archive's end."""
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
"""Payloads of at least this size are aligned; the gaps before smaller ones would be as large as they are."""
_PREFIX_ALIGNMENT = 64
"""The alignment of tensors in torch's archives. It also gives the prefixes of most shapes the same length."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The bytes around a payload. All lengths are known before a byte is written."""

    prefix: bytes
    payload_bytes: int
    suffix: bytes
    """Has 0 for the CRC-32 of the payload, which torch accepts."""

    @property
    def item_bytes(self) -> int:
        """The size of the whole item."""
        return len(self.prefix) + self.payload_bytes + len(self.suffix)


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
    payload = ZipRecord("archive/data/0", len(prefix), payload_bytes)
    prefix += begin_record(payload.name, len(prefix), align=_PREFIX_ALIGNMENT)
    closing = end_record(payload_bytes)
    end = len(prefix) + payload_bytes + len(closing)
    return Envelope(prefix, payload_bytes, closing + directory([*records, payload], end))


def item_start(position: int, around: Envelope) -> int:
    """The first offset from `position` on at which an item may begin: a large payload is then aligned."""
    if around.payload_bytes < ALIGNED_BYTES:
        return position + -position % _PREFIX_ALIGNMENT
    return position + -(position + len(around.prefix)) % PAYLOAD_ALIGNMENT


def tensor_pickle(kind: ElementType, shape: Sequence[int]) -> bytes:
    """The pickle of one contiguous tensor in record 0, byte for byte as torch writes it."""
    pickled = io.BytesIO()
    ArchivePickler(pickled, protocol=2).dump(TensorStub(kind, tuple(shape), "0"))
    return pickled.getvalue()


class _RecordStub:
    """A record of an archive in a pickle: the ID that refers to it."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


class TensorStub:
    """A contiguous tensor in a pickle: the call that rebuilds it from the record `key`."""

    def __init__(self, kind: ElementType, shape: tuple[int, ...], key: str) -> None:
        import torch  # noqa: PLC0415 - only writers need it

        storage, extent, version = torch.UntypedStorage, math.prod(shape) * kind.size_bytes, 3
        further: tuple[Any, ...] = (getattr(torch, kind.name),)
        if kind.typed_storage is not None:
            storage, extent, version = getattr(torch, kind.typed_storage), math.prod(shape), 2
            further = ()
        rebuild = getattr(torch._utils, f"_rebuild_tensor_v{version}")  # noqa: SLF001 - archives hold this name
        record = _RecordStub("storage", storage, key, "cpu", extent)
        self._call: tuple[Any, ...] = (
            rebuild,
            (record, 0, shape, contiguous_strides(shape), False, OrderedDict(), *further),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class ArchivePickler(pickle.Pickler):
    """Refers to records by their IDs."""

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """A record for its stand-in, None for everything else."""
        return obj.pid if isinstance(obj, _RecordStub) else None


_AFTER_RECORD: Final = b"PK\x07\x08"
HEAD_BYTES: Final = 4096
"""This much of an item's beginning is enough to locate its payload."""

_SIGNATURE: Final = b"PK\x03\x04"


def payload_in(head: Bytes, item_bytes: int, dtype: str, shape: Sequence[int]) -> int | None:
    """The offset of the payload in an item, from the item's first `HEAD_BYTES`.

    None if only `tensor_bytes` of the whole item can tell: elements in another order, a big-endian writer, or
    an archive in another layout than torch's.
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
    """The names of an archive's first records, and where their contents begin."""
    at = 0
    while head.startswith(_SIGNATURE, at) and len(head) >= at + _LOCAL.size:
        *_, name_bytes, extra_bytes = _LOCAL.unpack_from(head, at)
        begin = at + _LOCAL.size
        content = begin + name_bytes + extra_bytes
        yield head[begin : begin + name_bytes], content
        at = max(head.find(_SIGNATURE, content), 0) or len(head)


@lru_cache(maxsize=4096)
def _tensor_in(pickled: bytes) -> TensorRef | None:
    """The tensor that a pickle consists of, if its record is all of it in row-major order."""
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
    """A tensor's elements in row-major order, from its whole item; `DataDamaged` if it has another tensor."""
    plain = memoryview(undo_transforms(item, transforms, where) if transforms else item)
    archive, _ = open_item(plain, where)
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


def open_item(item: Bytes, where: str) -> tuple[TorchSaveArchive, Callable[[TensorRef], bytearray]]:
    """Open an item without transforms: its archive, and a function that reads a tensor's elements."""
    view = memoryview(item)

    def read(offset: int, size: int) -> bytes:
        content = bytes(view[offset : offset + size])
        if len(content) != size:
            raise DataDamaged("An item ends too early", where=where)
        return content

    archive = read_archive(read, len(view), "", where)
    return archive, partial(archive.elements, read)


_ONE_AT_A_TIME: Final = threading.Lock()
"""torch keeps the allowed classes of `weights_only` for the whole process."""

_PYTHON: Final = frozenset(
    {
        "_io.BytesIO",
        *(f"builtins.{name}" for name in ("bytes", "dict", "float", "frozenset", "int", "list", "range")),
        *(f"builtins.{name}" for name in ("set", "slice", "str", "tuple")),
    }
)
_BIT_GENERATORS: Final = {
    "MT19937": "_mt19937",
    "PCG64": "_pcg64",
    "PCG64DXSM": "_pcg64",
    "Philox": "_philox",
    "SFC64": "_sfc64",
}
_NUMPY: Final = frozenset(
    {
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")),
        *("numpy.ndarray", "numpy.dtype"),
        *(f"numpy.random._pickle.__{name}_ctor" for name in ("generator", "randomstate", "bit_generator")),
        *(f"numpy.random.{module}.{name}" for name, module in _BIT_GENERATORS.items()),
        *(f"numpy.random.bit_generator.{name}" for name in ("__pyx_unpickle_SeedSequence", "SeedSequence")),
    }
)


def _load_data(item: io.BytesIO) -> Any:
    """An object, by `torch.load`; `UnpicklingError` if it is more than data."""
    import torch  # noqa: PLC0415 - see `load_object`

    try:
        return torch.load(item, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        item.seek(0)
        named = torch.serialization.get_unsafe_globals_in_checkpoint(item)
        allowed = [(found, name) for name in named if (found := _find_data(name)) is not None]
        if not allowed:
            raise
    item.seek(0)
    with _ONE_AT_A_TIME, torch.serialization.safe_globals([*allowed, *_numpy_types(named)]):
        return torch.load(item, map_location="cpu", weights_only=True)


def names_beyond_data(archive: bytes) -> list[str]:
    """The classes and functions in an archive of `torch.save` for which a load needs `trust`."""
    import torch  # noqa: PLC0415 - see `load_object`

    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(archive))
    except pickle.UnpicklingError as error:
        # Of Python's own values, torch refuses integers of more than 255 bytes.
        found, _ = open_item(archive, "an object")
        return [] if is_plain(found.value) else [f"what torch cannot check ({error})"]
    return [name for name in named if _find_data(name) is None]


def _find_data(name: str) -> Any:
    """The object that a pickle means by this name, if it is data; None for anything else."""
    steps = name.split(".")
    found: Any = None
    length = len(steps)
    # The longest name of a module that is already imported: nothing is imported for a pickle.
    for length in range(len(steps) - 1, 0, -1):
        if (found := sys.modules.get(".".join(steps[:length]))) is not None:
            break
    for step in steps[length:]:
        # Not getattr: a module may import something else when it is asked for a name.
        found = vars(found).get(step) if hasattr(found, "__dict__") else None
    is_known = name in _PYTHON or name in _NUMPY
    return found if is_known or (isinstance(found, type) and _is_data_class(found)) else None


def _numpy_types(named: Sequence[str]) -> list[Any]:
    """The classes whose instances numpy's functions make, and whose state is then set."""
    if not any(name.startswith("numpy.") for name in named):
        return []
    import numpy as np  # noqa: PLC0415 - named in the pickle, and loaded by now

    kinds = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    if any(name.startswith("numpy.random.") for name in named):
        kinds += [getattr(np.random, name) for name in ("Generator", "RandomState", *_BIT_GENERATORS)]
    return [kind for kind in kinds if isinstance(kind, type)]


def _is_data_class(kind: type) -> bool:
    if issubclass(kind, enum.Enum):
        return getattr(kind._missing_, "__func__", None) in (
            enum.Enum.__dict__["_missing_"].__func__,
            enum.Flag.__dict__["_missing_"].__func__,
        )
    own = vars(kind)
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
        return not own.keys() & {"__reduce__", "__reduce_ex__", "__setstate__", "__del__"}
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    # All that makes an instance must have been generated by `dataclass`.
    for base in kind.__mro__[:-1]:
        own = vars(base)
        if own.keys() & {"__new__", "__post_init__", "__reduce__", "__reduce_ex__", "__del__"}:
            return False
        for name in {"__init__", "__setattr__", "__setstate__"} & own.keys():
            code = getattr(own[name], "__code__", None)
            is_generated = own[name].__module__ == "dataclasses" or (code and code.co_filename == "<string>")
            if code is None or not is_generated:
                return False
    return True
