"""Pickles read as data: no class or function that a file names is ever imported or called.

`.metadata` files may only name the records in a list; `torch.save` archives may name anything, and what is
unknown becomes an `Opaque`. torch is not imported. Invariant: everything that a pickle names becomes one of
the stand-ins in this module.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.checkpoint.state.regions import BY_STORAGE, ELEMENT_TYPES, QUANTIZED, Bytes, element_type
from penstock.errors import DataDamaged

StandIns = Mapping[tuple[str, str], Any]
"""(module, name) as a pickle has them -> what takes their place."""

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
"""Where torch before 2.3 had its tensor properties."""

_RECORDS = (
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, "TensorProperties"), (_SHARDED, "TensorProperties")),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
    # Megatron keeps all ranks' plans with the metadata.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
)
"""Classes whose instances are attributes and nothing more."""

_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "MetadataIndex": {"offset": None},
    "_StorageInfo": {"transform_descriptors": None},
}
"""Attributes that older versions of torch lack, or that newer ones leave out where they are None."""

_METADATA_CALLABLES: StandIns = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    (_SHARDED, "MEM_FORMAT_ENCODING"): int,
    (_PLANNER, "WriteItemType"): int,
    ("collections", "OrderedDict"): dict,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    **{
        (module, kind): lambda *parts: "/".join(parts).replace("//", "/", 1)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class TorchName(str):
    """A dtype, a device or a scheme of quantization in an archive, as torch names it."""

    __slots__ = ()


class TorchSize(tuple[int, ...]):
    """A `torch.Size` in an archive."""

    __slots__ = ()


class _StorageKind(str):
    """A class of storages in an archive: the type of their elements, empty for bytes."""

    __slots__ = ()


class PickledRecord:
    """An instance of one of torch's records: its attributes, as they were pickled."""

    kind: str

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A record of elements: `dtype` is None where the archive calls them plain bytes."""

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
    """The elements stand for their complex conjugates."""
    is_negative: bool = False
    """The elements stand for their negatives."""


@dataclass(frozen=True, slots=True, repr=False)
class QuantizedRef:
    """A quantized tensor: its integers, and what they stand for. It has no bytes of its own."""

    dtype: str
    integers: TensorRef
    quantizer: tuple[Any, ...]
    """Its scheme, scales, zero points and axis, as torch's rebuilding function takes them."""

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.integers.shape)}>"


class Opaque:
    """A value of a class that is not rebuilt here; `kind` names it. Its state and items are dropped."""

    kind = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Accept any arguments, as the real class may."""
        return super().__new__(cls)

    def _drop(self, *_: object) -> None:
        """Ignore what the pickle would put into the real object."""

    # The names by which the unpickler fills instances, subclasses of list and of dict.
    __setstate__ = append = extend = __setitem__ = _drop

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def read_metadata_pickle(content: Bytes, where: str) -> Any:
    """The value of a pickle whose classes are torch's metadata; `DataDamaged` for anything else."""
    # Classes are made for each file, so that no file can leave anything behind in them. Only two records may
    # have another state than a dictionary: the others are filled several times faster without a method.
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
    """The value of an archive, with `TensorRef` for tensors and `Opaque` for instances of unknown classes."""
    return _Unpickler(content, _ARCHIVE_NAMES, where, is_archive=True).read()


class _Unpickler(pickle.Unpickler):
    """Looks up every class in a table of stand-ins. Only archives of `torch.save` may refer to records."""

    def __init__(self, content: Bytes, stand_ins: StandIns, where: str, *, is_archive: bool) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._stand_ins = dict(stand_ins)
        self._where = where
        self._is_archive = is_archive

    def read(self) -> Any:
        """The pickle's value; whatever else the unpickler raises is damage, too."""
        try:
            return self.load()
        except DataDamaged:
            raise
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            MemoryError,
            OverflowError,
        ) as error:
            raise DataDamaged(
                f"The pickle cannot be read: {error}",
                where=self._where,
                fix="The file is damaged or of another format; load an older checkpoint.",
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; never the thing itself."""
        if module == "__builtin__":
            # Archives have the names of Python 2.
            module, name = "builtins", "range" if name == "xrange" else name
        if module == "torch" and (name in ELEMENT_TYPES or name in QUANTIZED):
            return TorchName(name)
        if (module, name) not in self._stand_ins:
            if not self._is_archive:
                raise DataDamaged(
                    f"It names {module}.{name}, which no checkpoint's metadata needs",
                    where=self._where,
                    fix="Nothing of it was run. Do not open it with torch, which would run it.",
                )
            self._stand_ins[module, name] = type(name, (Opaque,), {"kind": f"{module}.{name}"})
        return self._stand_ins[module, name]

    def persistent_load(self, pid: Any) -> StorageRef:
        """A record of the archive."""
        if not self._is_archive:
            raise DataDamaged("It refers to something outside of itself", where=self._where)
        match pid:
            case ("storage", _StorageKind() as kind, key, _, int(num_elements), *_) if num_elements >= 0:
                return StorageRef(str(key), str(kind) or None)
        raise DataDamaged(f"It refers to {pid!r}, which is no record of its archive", where=self._where)


def _rebuild_typed(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    _, _, *notes = rest
    if storage.dtype is None or storage.dtype in QUANTIZED:
        raise DataDamaged("A tensor has elements without a type")
    return _view_of(TensorRef(storage, storage.dtype, tuple(size), tuple(strides), int(offset)), notes)


def _rebuild_untyped(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    _, _, dtype, *notes = rest
    kind = element_type(dtype)
    return _view_of(TensorRef(storage, kind.name, tuple(size), tuple(strides), int(offset)), notes)


_SCHEMES = ("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams")


class _UnknownQuantized(Opaque):
    """A quantized tensor with several elements in a byte, or of a scheme that torch cannot save either."""

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
    return QuantizedRef(dtype, TensorRef(held, integers, tuple(size), tuple(strides), int(offset)), quantizer)


def _view_of(tensor: TensorRef, notes: list[Any]) -> TensorRef | Opaque:
    """Apply torch's notes on a tensor; one with notes that are unknown here is opaque, never guessed."""
    if not notes or not notes[0]:
        return tensor
    if not isinstance(notes[0], dict) or not notes[0].keys() <= {"conj", "neg"}:
        return Opaque()
    flags = notes[0]
    return replace(tensor, is_conjugate=bool(flags.get("conj")), is_negative=bool(flags.get("neg")))


def _rebuild_subclass(function: Callable[..., Any], _: object, arguments: Any, __: object) -> Any:
    return function(*arguments) if function in (_rebuild_typed, _rebuild_untyped) else Opaque()


def _inner_class(outer: object, name: object) -> type:
    """A class that was defined inside another one, which pickles look up by name."""
    return type(str(name), (Opaque,), {"kind": f"{getattr(outer, 'kind', outer)}.{name}"})


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
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_subclass,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): TorchSize,
    ("torch", "device"): lambda *parts: TorchName(":".join(map(str, parts))),
    ("builtins", "getattr"): _inner_class,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, complex, bytearray, slice, range)},
    ("_codecs", "encode"): lambda text, _: text.encode("latin-1"),
}
