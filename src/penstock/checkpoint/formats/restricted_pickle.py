"""Pickles read as data: no class or function that a file names is ever imported or called.

`.metadata` files may only name the records in a list; `torch.save` archives may name anything, and what is
unknown becomes an `Opaque`. torch is not imported. Invariant: everything that a pickle names becomes one of
the stand-ins in this module.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from penstock.checkpoint.state.regions import BY_STORAGE, ELEMENT_TYPES, element_type
from penstock.errors import DataDamaged

if TYPE_CHECKING:
    from penstock.checkpoint.formats.manifest import Bytes


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
    # Megatron keeps all ranks' plans beside the metadata.
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")),
)
"""Classes whose instances are attributes and nothing more."""

_CALLED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    (_SHARDED, "MEM_FORMAT_ENCODING"): int,
    (_PLANNER, "WriteItemType"): int,
    ("collections", "OrderedDict"): dict,
    **{
        (module, kind): lambda *parts: "/".join(parts).replace("//", "/", 1)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Callables, and what stands in for them."""


class PickledRecord:
    """An instance of one of torch's records: its attributes, as they were pickled."""

    kind: str

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state


def read_pickle(content: bytes | bytearray | memoryview, where: str) -> Any:
    """The value of a pickle whose classes are torch's metadata; `DataDamaged` for anything else."""
    reader = _MetadataUnpickler(io.BytesIO(content), where)
    try:
        return reader.load()
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
            f"This is no readable pickle: {error}",
            where=where,
            fix="The file is damaged or of another format; load an older checkpoint.",
        ) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles with stand-ins of its own, so that no file can leave anything behind in them."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where
        self._known: dict[tuple[str, str], Any] = dict(_CALLED)
        for module, name in _RECORDS:
            # Plain attribute dictionaries are filled several times faster without a method of our own.
            bases = (PickledRecord,) if name in ("TensorProperties", "Metadata") else (object,)
            self._known[module, name] = type(name, bases, {"kind": name})

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name; never the thing itself."""
        if module == "torch" and name in ELEMENT_TYPES:
            return name
        known = self._known.get((module, name))
        if known is None:
            raise DataDamaged(
                f"It names {module}.{name}, which no checkpoint's metadata needs",
                where=self._where,
                fix="Nothing of it was run. Do not open it with torch, which would run it.",
            )
        return known

    def persistent_load(self, pid: object) -> NoReturn:  # noqa: ARG002 - pickle's interface
        """Metadata refers to nothing outside itself."""
        raise DataDamaged("It refers to something outside of itself", where=self._where)


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A record of elements: `dtype` is None where the archive calls them plain bytes."""

    key: str
    dtype: str | None
    num_elements: int


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


class Opaque:
    """A value of a class that is not rebuilt here; `kind` names the class."""

    kind = ""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Take whatever the real one would have been made from."""
        return super().__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Let its state go."""

    def append(self, _: object) -> None:
        """Let an item go, as of a list of its own class."""

    def extend(self, _: object) -> None:
        """Let items go."""

    def __setitem__(self, _: object, __: object) -> None:
        """Let an item go, as of a mapping of its own class."""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def read_torch_pickle(content: Bytes, where: str) -> Any:
    """The value, with `TensorRef` for tensors and `Opaque` for what is not known here."""
    try:
        return _ArchiveUnpickler(io.BytesIO(content), where).load()
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
        raise DataDamaged(f"Its pickle cannot be read: {error}", where=where) from error


def _rebuild_typed(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    _, _, *about = rest
    if storage.dtype is None:
        raise DataDamaged("A tensor has elements without a type")
    return _view_of(TensorRef(storage, storage.dtype, tuple(size), tuple(strides), int(offset)), about)


def _rebuild_untyped(
    storage: StorageRef, offset: int, size: Any, strides: Any, *rest: Any
) -> TensorRef | Opaque:
    _, _, dtype, *about = rest
    kind = element_type(dtype)
    return _view_of(TensorRef(storage, kind.name, tuple(size), tuple(strides), int(offset)), about)


def _view_of(tensor: TensorRef, about: list[Any]) -> TensorRef | Opaque:
    """The tensor as what torch notes of it says; of notes that are unknown here nothing may be guessed."""
    notes = about[0] if about else None
    if not notes:
        return tensor
    if not isinstance(notes, dict) or not notes.keys() <= {"conj", "neg"}:
        return Opaque()
    return replace(tensor, is_conjugate=bool(notes.get("conj")), is_negative=bool(notes.get("neg")))


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_subclass(function: Callable[..., Any], _: object, arguments: Any, __: object) -> Any:
    return function(*arguments) if function in (_rebuild_typed, _rebuild_untyped) else Opaque()


_KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_typed,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_untyped,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_subclass,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda *parts: ":".join(map(str, parts)),
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "slice"): slice,
    ("builtins", "range"): range,
    ("__builtin__", "set"): set,
    ("__builtin__", "complex"): complex,
    ("__builtin__", "bytearray"): bytearray,
    ("_codecs", "encode"): lambda text, _: text.encode("latin-1"),
}


class _ArchiveUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="utf-8")
        self._where = where
        self._opaque: dict[tuple[str, str], type[Opaque]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands in for a name."""
        if module in ("torch", "torch.storage") and name in BY_STORAGE:
            return BY_STORAGE[name].name
        if module == "torch.storage" and name in ("UntypedStorage", "TypedStorage"):
            return None
        if module == "torch" and name in ELEMENT_TYPES:
            return name
        known = self._known(module, name)
        return known if known is not None else self._opaque_class(module, name)

    @staticmethod
    def _known(module: str, name: str) -> Any:
        return _KNOWN.get((module, name))

    def _opaque_class(self, module: str, name: str) -> type[Opaque]:
        made = self._opaque.get((module, name))
        if made is None:
            made = type(name, (Opaque,), {"kind": f"{module}.{name}"})
            self._opaque[module, name] = made
        return made

    def persistent_load(self, pid: Any) -> StorageRef:
        """A record of the archive."""
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
            self._refuse(f"It refers to {pid!r}")
        _, dtype, key, _, num_elements = pid[:5]
        if not (isinstance(dtype, str | None) and isinstance(num_elements, int) and num_elements >= 0):
            self._refuse(f"It refers to {pid!r}")
        return StorageRef(str(key), dtype, num_elements)

    def _refuse(self, what: str) -> NoReturn:
        raise DataDamaged(f"{what}, which is no record of its archive", where=self._where)
