"""Pickles read as data: what a `.metadata` may name becomes plain records here, and nothing else is let in.

torch is not imported and nothing that a file names is ever called, but for the stand-ins below. Invariant:
a name that is not in the list ends the reading, whatever it is.
"""

from __future__ import annotations

import gc
import io
import pickle
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.checkpoint.dtypes import ELEMENT_TYPES
from penstock.errors import DataDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


class Pickled:
    """An instance of one of torch's records: its attributes, as they were pickled."""

    kind: str

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.__dict__["state"] = state


def read_pickle(content: bytes | bytearray | memoryview, where: str) -> Any:
    """The value of a pickle whose classes are torch's metadata; `DataDamaged` for anything else."""
    reader = _Reader(io.BytesIO(content), where)
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


class _Reader(pickle.Unpickler):
    """Unpickles with stand-ins of its own, so that no file can leave anything behind in them."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file)
        self._where = where
        self._known: dict[tuple[str, str], Any] = dict(_CALLED)
        for module, name in _RECORDS:
            # Plain attribute dictionaries are filled several times faster without a method of our own.
            bases = (Pickled,) if name in ("TensorProperties", "Metadata") else (object,)
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


@contextmanager
def without_collections() -> Iterator[None]:
    """Without the garbage collector, which takes as long as the reading itself for a million records."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
