"""Pickles read as data: no class or function that a file names is ever imported or called.

`.metadata` files may name only the records in a list; `torch.save` archives may name anything, and unknown
names become `Opaque`. torch is not imported. Invariants: everything that a pickle names becomes one of the
stand-ins in this module, and stand-ins never create more data than the length of the pickle: a part to which
a pickle refers repeatedly is not copied each time.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.checkpoint.state.regions import (
    BY_STORAGE,
    ELEMENT_TYPES,
    MOST_DIMENSIONS,
    QUANTIZED,
    Bytes,
    element_type,
    require,
)
from penstock.errors import DataDamaged

StandIns = Mapping[tuple[str, str], Any]
"""Maps (module, name), as in a pickle, to the stand-in."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
"""The module of tensor properties in torch before 2.3."""

_RECORDS = (
    *(
        (_METADATA, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
        )
    ),
    (_SHARDED, "TensorProperties"),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
    # Megatron keeps the plans of all ranks with the metadata.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
)
"""Classes whose instances are attributes and nothing more."""

_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "MetadataIndex": {"offset": None},
    "_StorageInfo": {"transform_descriptors": None},
}
"""Attributes that older versions of torch lack, or that newer ones leave out if they are None."""


def _itself(kind: type) -> Callable[[Any], Any]:
    """Return a stand-in for a class that is called with one value of type `kind`; it returns that value."""

    def value(part: Any) -> Any:
        require(type(part) is kind, f"a {kind.__name__} is made of a {type(part).__name__}")
        return part

    return value


def _path(*parts: str) -> str:
    require(sum(map(len, parts)) <= _LONGEST_PATH, "a path is too long")
    return "/".join(parts).replace("//", "/", 1)


_LONGEST_PATH = 4096
_METADATA_CALLABLES: StandIns = {
    ("torch", "Size"): _itself(tuple),
    ("torch.serialization", "_get_layout"): _itself(str),
    (_METADATA, "_MEM_FORMAT_ENCODING"): _itself(int),
    (_SHARDED, "MEM_FORMAT_ENCODING"): _itself(int),
    (_PLANNER, "WriteItemType"): _itself(int),
    # Containers are called without arguments, and filled by the pickle.
    ("collections", "OrderedDict"): dict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    **{
        (module, kind): _path
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class PickledRecord:
    """An instance of one of torch's records: its attributes as they were pickled."""

    kind: str

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A record of elements: `dtype` is None if the archive calls them plain bytes."""

    key: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a record. `offset` and `strides` count elements."""

    storage: StorageRef
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conjugate: bool = False
    """True if the elements represent their complex conjugates."""
    is_negative: bool = False
    """True if the elements represent their negatives."""
    is_parameter: bool = False
    requires_grad: bool = False
    subclass: str = ""
    """The class of a tensor that has attributes, or whose class is not torch's own."""


@dataclass(frozen=True, slots=True, repr=False)
class QuantizedRef:
    """A quantized tensor: its integers, and what they represent. It has no bytes of its own."""

    dtype: str
    integers: TensorRef
    quantizer: tuple[Any, ...]
    """The scheme, scales, zero points and axis, as torch's rebuilding function takes them."""

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.integers.shape)}>"


class TorchName(str):
    """The name of an element type, a layout or a quantization scheme of torch."""

    __slots__ = ()


class _StorageKind(str):
    """A torch storage class in an archive: the type of its elements, empty for bytes."""

    __slots__ = ()


class DeviceName(str):
    """The name of a torch device."""

    __slots__ = ()


class TorchSize(tuple[int, ...]):
    """A shape that was saved as torch's own class."""

    __slots__ = ()


class Opaque:
    """A value of a class that is not rebuilt here; `kind` names it. Its items are dropped."""

    kind = "a tensor with notes of a newer torch"
    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: object, **_: object) -> Self:
        """Accept any arguments, because the real class may."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state

    def _drop(self, *_: object) -> None:
        """Ignore what the pickle would put into the real object."""

    # The names by which the unpickler fills subclasses of list and dict.
    append = extend = __setitem__ = _drop

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def read_metadata_pickle(content: Bytes, where: str) -> Any:
    """Return the value of a pickle of torch's metadata; raise `DataDamaged` if it names any other class."""
    # The classes are created for each file, so that no file can leave anything behind in them. The state of
    # only two records may be something other than a dictionary; the other records have no method for it, and
    # are filled several times faster.
    records = {
        (module, name): type(
            name,
            (PickledRecord if name in ("TensorProperties", "Metadata") else object,),
            {"kind": name, **_LEFT_OUT.get(name, {})},
        )
        for module, name in _RECORDS
    }
    return _Unpickler(content, {**_METADATA_CALLABLES, **records}, where, is_archive=False).read()


def read_torch_pickle(content: Bytes, where: str) -> Any:
    """Return the value of an archive, with a `TensorRef` for each tensor and `Opaque` for unknown classes."""
    return _Unpickler(content, _ARCHIVE_NAMES, where, is_archive=True).read()


_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})


def parts_of(value: object) -> tuple[Any, ...]:
    """Return the values directly inside a value of an archive."""
    if type(value) in _LEAVES:
        return ()
    match value:
        case Mapping():
            return (*value.keys(), *value.values())
        case list() | tuple() | set() | frozenset():
            return tuple(value)
        case Opaque():
            return value.arguments, value.state
        case QuantizedRef():
            return value.integers, value.quantizer
        case slice():
            return value.start, value.stop, value.step
    return ()


_MOST_REPEATED = 1 << 20


def _require_tree(value: object) -> None:
    """Raise `ValueError` if a value contains itself, or repeats parts so often that it cannot be listed."""
    places: dict[int, int] = {}
    num_parts = 0

    def count(part: object) -> int:
        nonlocal num_parts
        number = id(part)
        if number not in places and (inner := parts_of(part)):
            places[number] = 0
            num_parts += len(inner)
            places[number] = len(inner) + sum(count(one) for one in inner)
        found = places.get(number, 1)
        require(found, "a container contains itself")
        return found if number in places else 0

    require(count(value) <= _MOST_REPEATED + 64 * num_parts, "its parts are repeated millions of times")


MOST_LEVELS = 200
"""A save refuses what is nested more deeply: a load takes up to three frames of the stack for each level."""


def is_too_deep(value: object) -> bool:
    """Return whether an archive's value has parts below `MOST_LEVELS` containers."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [part for each in level for part in parts_of(each)]
    return bool(level)


_MOST_ALIKE = 1000
_MOST_PARTS = 1 << 21
"""The most containers and instances in an archive; each takes up to 200 bytes in a load."""
_COSTS = {**dict.fromkeys("]}ldt\x85\x86\x87\x91oi\x81\x92R", 1), "\x8f": 2}
"""The weight of each operation that makes a container or an instance. Empty sets take over 200 bytes."""

UNREADABLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    OverflowError,
    RuntimeError,
)
"""The errors that a malformed pickle may raise in its reader, and objects of any class in a pickler."""


class _Unpickler(pickle.Unpickler):
    """Looks up every class in a table of stand-ins. Only archives of `torch.save` may refer to records."""

    def __init__(self, content: Bytes, stand_ins: StandIns, where: str, *, is_archive: bool) -> None:
        # In a single frame, every byte means to the unpickler what it means to pickletools: an operation in
        # which a frame ends would lose bytes.
        self._frame = pickle.FRAME + len(content).to_bytes(8, "little") + content
        super().__init__(io.BytesIO(self._frame), encoding="utf-8")
        self._stand_ins = dict(stand_ins)
        if is_archive:
            self._stand_ins.update(self._copying())
        # Twice, because a bytearray is made of bytes that are themselves made of text.
        self._unused = 2 * len(content)
        self._alike: dict[int, complex] = {}
        self._num_alike = 0
        self._where = where
        self._is_archive = is_archive

    def read(self) -> Any:
        """Return the pickle's value; errors of the unpickler become `DataDamaged`."""
        try:
            # The unpickler's table of parts has a place for every number up to the largest one.
            number: Any
            num_parts = 0
            most_parts = _MOST_PARTS if self._is_archive else min((1 << 20) + len(self._frame) // 4, 1 << 25)
            for operation, number, _ in pickletools.genops(self._frame):
                if operation.code in "pr":
                    require(0 <= number <= len(self._frame), "it numbers more parts than it can have")
                elif type(number) is int and hash(number) != number:
                    self._count_alike(number)
                elif cost := _COSTS.get(operation.code):
                    num_parts += cost
                    require(num_parts <= most_parts, "it has too many parts")
            value = self.load()
            if self._is_archive:
                _require_tree(value)
        except DataDamaged:
            raise
        except (MemoryError, *UNREADABLE) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise DataDamaged(
                f"The pickle cannot be read: {reason}",
                where=self._where,
                fix="The file is damaged or in a different format; load an older checkpoint.",
            ) from error
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name; never the named object itself."""
        if self._is_archive:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if module == "torch" and (name in ELEMENT_TYPES or name in QUANTIZED):
            return TorchName(name)
        if (module, name) not in self._stand_ins:
            if not self._is_archive:
                raise DataDamaged(
                    f"It names {module}.{name}, which no checkpoint's metadata needs",
                    where=self._where,
                    fix="None of it was run. Do not open it with torch, which would run it.",
                )
            self._stand_ins[module, name] = type(name, (Opaque,), {"kind": f"{module}.{name}"})
        return self._stand_ins[module, name]

    def _count_alike(self, number: complex) -> None:
        # As keys, numbers with the same hash take time that grows with the square of their number.
        self._num_alike += self._alike.setdefault(hash(number), number) != number
        require(self._num_alike <= _MOST_ALIKE, "its numbers are chosen to have the same hash")

    def _copying(self) -> StandIns:
        """Return stand-ins that copy their arguments: in total, at most twice the bytes of the pickle."""

        def complex_number(real: Any, imaginary: Any) -> complex:
            made = complex(real, imaginary)
            self._count_alike(made)
            return made

        def spend(part: Any, *kinds: type) -> Any:
            require(type(part) in kinds, f"it is made of a {type(part).__name__}")
            self._unused -= len(part)
            require(self._unused >= 0, "its parts are copied again and again")
            return part

        def encoded(text: Any, _: Any = None) -> bytes:
            return bytes(spend(text, str).encode("latin-1"))

        return {
            ("builtins", "complex"): complex_number,
            ("_codecs", "encode"): encoded,
            ("builtins", "bytes"): lambda: b"",
            ("builtins", "bytearray"): lambda content=b"", coding="": bytearray(
                encoded(content) if coding else spend(content, bytes)
            ),
            ("builtins", "set"): lambda items=(): set(spend(items, list, tuple)),
            ("builtins", "frozenset"): lambda items=(): frozenset(spend(items, list, tuple)),
            ("torch", "Size"): lambda sizes=(): TorchSize(spend(sizes, list, tuple)),
        }

    def persistent_load(self, pid: Any) -> StorageRef:
        """Return the record of the archive to which a pickle refers."""
        if not self._is_archive:
            raise DataDamaged("It refers to something outside of itself", where=self._where)
        match pid:
            case ("storage", _StorageKind() as kind, str(key), _, int(num_elements), *_) if num_elements >= 0:
                return StorageRef(key, str(kind) or None)
        raise DataDamaged(f"It refers to {pid!r}, which is not a record of its archive", where=self._where)


def _tensor(
    storage: StorageRef, dtype: str, offset: int, size: Any, strides: Any, *, requires_grad: bool = False
) -> TensorRef:
    for numbers in (size, strides, (offset,)):
        is_right = isinstance(numbers, tuple | list) and len(numbers) <= MOST_DIMENSIONS
        require(
            is_right and all(type(number) is int and abs(number) < 1 << 62 for number in numbers),
            "the shape of a tensor is invalid",
        )
    return TensorRef(storage, dtype, tuple(size), tuple(strides), offset, requires_grad=requires_grad)


def _rebuild_typed(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    needs_gradient, _, *notes = rest
    if storage.dtype is None or storage.dtype in QUANTIZED:
        raise DataDamaged("A tensor has elements without a type")
    made = _tensor(storage, storage.dtype, offset, size, strides, requires_grad=bool(needs_gradient))
    return _view_of(made, notes)


def _rebuild_untyped(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    needs_gradient, _, dtype, *notes = rest
    dtype = element_type(dtype).name
    return _view_of(_tensor(storage, dtype, offset, size, strides, requires_grad=bool(needs_gradient)), notes)


_SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")


class _UnknownQuantized(Opaque):
    """A quantized tensor with several elements in a byte, or of a scheme that torch itself cannot save."""

    kind = "quantized tensor"


def _rebuild_quantized(
    storage: StorageRef, offset: int, size: Any, strides: Any, quantizer: Any, *_: Any
) -> QuantizedRef | Opaque:
    dtype = storage.dtype or ""
    integers = QUANTIZED.get(dtype, ("", None))[1]
    is_known = isinstance(quantizer, tuple) and len(quantizer) > 2 and quantizer[0] in _SCHEMES
    if integers is None or not is_known:
        return _UnknownQuantized()
    held = replace(storage, dtype=integers)
    return QuantizedRef(dtype, _tensor(held, integers, offset, size, strides), quantizer)


def _view_of(tensor: TensorRef, notes: list[Any]) -> TensorRef | Opaque:
    """Apply the flags that torch saved with a tensor. With unknown flags, the tensor becomes opaque."""
    if not notes or not notes[0]:
        return tensor
    if not isinstance(notes[0], dict) or not notes[0].keys() <= {"conj", "neg"}:
        return Opaque()
    flags = notes[0]
    return replace(tensor, is_conjugate=bool(flags.get("conj")), is_negative=bool(flags.get("neg")))


def _rebuild_subclass(function: Callable[..., Any], kind: Any, arguments: Any, _: object) -> Any:
    subclass = str(getattr(kind, "kind", kind))
    made = function(*arguments) if function in (_rebuild_typed, _rebuild_untyped) else Opaque()
    if isinstance(made, TensorRef):
        return replace(made, subclass=subclass)
    made.kind = f"a tensor of class {subclass}"
    return made


def _rebuild_parameter(data: Any, needs_gradient: Any = True, *_: Any) -> Any:  # noqa: FBT002 - as torch calls it
    if not isinstance(data, TensorRef):
        return data
    return replace(data, is_parameter=True, requires_grad=bool(needs_gradient))


def _inner_class(outer: Any, name: str) -> type:
    """Return a stand-in for a class that was defined inside another one, which pickles look up by name."""
    kind = f"{outer.kind}.{name}"[:_LONGEST_PATH]
    return type(name[:_LONGEST_PATH], (Opaque,), {"kind": kind})


def _device(kind: str, number: int | None = None) -> DeviceName:
    require(type(kind) is str and len(kind) < 100 and type(number) in (int, type(None)), "no such device")
    return DeviceName(kind if number is None else f"{kind}:{number}")


def _layout(name: str) -> TorchName:
    require(name in _LAYOUTS, f"torch has no layout {name!r}")
    return TorchName(name.removeprefix("torch."))


_LAYOUTS = (
    "torch.strided",
    "torch.sparse_coo",
    "torch.sparse_csr",
    "torch.sparse_csc",
    "torch.sparse_bsr",
    "torch.sparse_bsc",
)

_ARCHIVE_NAMES: StandIns = {
    **{
        (module, storage): _StorageKind(kind.name)
        for module in ("torch", "torch.storage")
        for storage, kind in BY_STORAGE.items()
    },
    **{("torch", storage): _StorageKind(name) for name, (storage, _) in QUANTIZED.items()},
    **{("torch", scheme): TorchName(scheme) for scheme in _SCHEMES},
    ("torch.storage", "UntypedStorage"): _StorageKind(),
    ("torch.storage", "TypedStorage"): _StorageKind(),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_untyped,
    ("torch._utils", "_rebuild_qtensor"): _rebuild_quantized,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_subclass,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch", "device"): _device,
    ("builtins", "getattr"): _inner_class,
    ("collections", "OrderedDict"): lambda: OrderedDict(),  # noqa: PLW0108 - the class itself takes arguments
    **{("builtins", kind.__name__): kind for kind in (slice, range)},
}
