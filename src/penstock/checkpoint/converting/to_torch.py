"""Any checkpoint as one file of `torch.save`, which `torch.load(weights_only=True)` reads; streamed.

Invariant: the pickle comes first and refers to records that follow in its order, each with its checksum.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch
from isal import isal_zlib

from penstock.checkpoint.converting.outlet import Buffers, Outlet
from penstock.checkpoint.converting.slabs import Elements, slab_bytes, slabs
from penstock.checkpoint.dcp.archive import Record, begin_record, directory, end_record, small_record
from penstock.checkpoint.dcp.envelope import contiguous_strides
from penstock.checkpoint.dtypes import element_type

if TYPE_CHECKING:
    from penstock.checkpoint.converting.selection import Selection
    from penstock.checkpoint.opened import Opened
    from penstock.progress import Progress
    from penstock.storage import Storage

_ALIGNMENT = 64


class _StorageOf:
    """Stands for the record of one tensor in the pickle."""

    def __init__(self, number: int, dtype: str, num_elements: int) -> None:
        self.number = number
        self.kind = element_type(dtype)
        self.num_elements = num_elements

    def pid(self) -> tuple[Any, ...]:
        """How torch's pickles refer to a record."""
        typed = self.kind.typed_storage
        if typed is not None:
            return ("storage", getattr(torch, typed), str(self.number), "cpu", self.num_elements)
        num_bytes = self.num_elements * self.kind.size_bytes
        return ("storage", torch.storage.UntypedStorage, str(self.number), "cpu", num_bytes)


class _TensorOf:
    """Stands for one tensor in the pickle: what is pickled is how torch rebuilds it."""

    def __init__(self, number: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._storage = _StorageOf(number, dtype, torch.Size(shape).numel())
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        kind = self._storage.kind
        place: tuple[Any, ...] = (
            self._storage,
            0,
            self._shape,
            contiguous_strides(self._shape),
            False,
            OrderedDict(),
        )
        if kind.typed_storage is not None:
            return torch._utils._rebuild_tensor_v2, place  # noqa: SLF001 - the name that archives hold
        return torch._utils._rebuild_tensor_v3, (*place, getattr(torch, kind.name))  # noqa: SLF001


class _Pickler(pickle.Pickler):
    """Refers to records by number, and gathers those of tensors inside objects in `inner`."""

    def __init__(self, file: io.BytesIO, num_tensors: int) -> None:
        super().__init__(file, protocol=2)
        self._num_tensors = num_tensors
        self.inner: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """A record for storages, None for all else."""
        if isinstance(obj, _StorageOf):
            return obj.pid()
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # torch.save itself asks these private methods
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001
            return ("storage", kind, self._record(typed._untyped_storage), "cpu", typed._size())  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.storage.UntypedStorage, self._record(obj), "cpu", obj.nbytes())
        return None

    def _record(self, storage: torch.UntypedStorage) -> str:
        for place, known in enumerate(self.inner):
            if known.data_ptr() == storage.data_ptr() and known.nbytes() == storage.nbytes():
                return str(self._num_tensors + place)
        self.inner.append(storage)
        return str(self._num_tensors + len(self.inner) - 1)


def write_torch(
    opened: Opened, chosen: Selection, storage: Storage, key: str, *, trust: bool, progress: Progress
) -> int:
    """Write the chosen parts as the nested state that they were; the file's bytes."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, len(chosen.tensors))
    pickler.dump(_state(opened, chosen, trust=trust))
    sink = storage.create(key)
    with ExitStack() as undo, closing(Elements(opened)) as elements:
        undo.callback(sink.abort)
        archive = _Archive(Outlet(sink, Buffers()))
        archive.add("data.pkl", pickled.getvalue())
        for name, content in (
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ):
            archive.add(name, content)
        for number, tensor in enumerate(chosen.tensors):
            archive.add_tensor(f"data/{number}", opened, elements, tensor, progress)
        for number, inner in enumerate(pickler.inner, start=len(chosen.tensors)):
            archive.add(f"data/{number}", bytes(torch.tensor(inner, dtype=torch.uint8).numpy()))
        archive.add("version", b"3\n")
        archive.close()
        sink.finish()
        undo.pop_all()
    return archive.outlet.position


def _state(opened: Opened, chosen: Selection, *, trust: bool) -> Any:
    """The nested state, with stand-ins for tensors."""
    leaves: dict[str, Any] = {}
    for number, tensor in enumerate(chosen.tensors):
        facts = opened.contents.tensors[tensor]
        leaves[facts.name] = _TensorOf(number, facts.dtype, facts.shape)
    for one in chosen.objects:
        leaves[one.name] = opened.value(one, trust=trust)
    order = {name: place for place, name in enumerate(opened.paths)}
    tree: dict[Any, Any] = {}
    for name in sorted(leaves, key=lambda name: order.get(name, len(order))):
        *above, last = opened.paths.get(name, (name,))
        at = tree
        for step in above:
            at = at.setdefault(step, {})
        at[last] = leaves[name]
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """Mappings whose keys are places of a list become that list; places that were left out are closed up."""
    if not isinstance(tree, dict) or not tree:
        return tree
    inner = {key: _with_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


class _Archive:
    """The archive as it grows."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self._records: list[Record] = []

    def add(self, name: str, content: bytes) -> None:
        """A record that is in memory."""
        offset = self.outlet.position
        if name.startswith("data/"):
            self.outlet.write(begin_record(f"archive/{name}", offset, align=_ALIGNMENT))
            self.outlet.write(content)
            crc32 = isal_zlib.crc32(content)
            self.outlet.write(end_record(len(content), crc32))
            self._records.append(Record(f"archive/{name}", offset, len(content), crc32))
            return
        body, record = small_record(f"archive/{name}", content, offset)
        self.outlet.write(body)
        self._records.append(record)

    def add_tensor(
        self, name: str, opened: Opened, elements: Elements, tensor: int, progress: Progress
    ) -> None:
        """A tensor's elements, slab by slab."""
        facts, offset, crc32 = opened.contents.tensors[tensor], self.outlet.position, 0
        elements.require_whole(tensor)
        self.outlet.write(begin_record(f"archive/{name}", offset, align=_ALIGNMENT))
        for slab in slabs(facts.shape, facts.item_bytes, self.outlet.room_bytes):
            buffer, num_bytes = self.outlet.buffer(), slab_bytes(slab, facts)
            elements.read_slab(tensor, slab, buffer[:num_bytes])
            crc32 = isal_zlib.crc32(buffer[:num_bytes], crc32)
            self.outlet.append(buffer, num_bytes)
            progress.advance(num_bytes)
        self.outlet.write(end_record(facts.size_bytes, crc32))
        self._records.append(Record(f"archive/{name}", offset, facts.size_bytes, crc32))

    def close(self) -> None:
        """Write the directory."""
        self.outlet.write(directory(self._records, self.outlet.position))
