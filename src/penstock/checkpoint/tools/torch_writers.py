"""Writers of torch's formats for `convert`: a DCP of ours, or one `torch.save` archive.

DCP keeps the regions as they were sharded. Archives begin with the pickle, and the records follow in its
order, each with its CRC-32, so one pass is enough.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from isal import isal_zlib

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.commit.transaction import SaveTransaction, begin_save
from penstock.checkpoint.engine import WrittenFile
from penstock.checkpoint.formats.dcp_item import (
    Record,
    apply_transforms,
    begin_record,
    directory,
    end_record,
    envelope,
    item_start,
    object_bytes,
    small_record,
    undo_transforms,
)
from penstock.checkpoint.formats.dcp_metadata import DcpMetadata, metadata_bytes
from penstock.checkpoint.formats.manifest import build_manifest, checksum_of, manifest_bytes, start_checksum
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    StoredObject,
    StoredRegions,
    contiguous_strides,
    element_type,
)
from penstock.checkpoint.tools.tensor_slabs import Elements, Outlet, WriteBuffers, slab_bytes, slabs
from penstock.cluster.comm import SoloComm
from penstock.storage import Storage

if TYPE_CHECKING:
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.tools.convert import Selection
    from penstock.progress import Progress


_FILE: Final = "__0_0.distcp"


def write_dcp(
    opened: CheckpointSource,
    chosen: Selection,
    storage: Storage,
    name: str,
    *,
    descriptors: Sequence[str] = (),
    progress: Progress,
) -> int:
    """Write the chosen parts as the checkpoint `name`; the bytes of its data file.

    With transforms, items are put together in memory, and cannot be read in part or directly afterwards.
    """
    place = begin_save(storage, name, SoloComm())
    with ExitStack() as undo:
        undo.callback(place.abandon)
        writing = _DcpWriting(opened, chosen, tuple(descriptors), progress)
        written = writing.write(place)
        place.commit(lambda: writing.seal(written))
        undo.pop_all()
    return written.size_bytes


@dataclass(slots=True)
class _Items:
    """Columns of what was written, in the order of the file."""

    offset: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    payload: list[int] = field(default_factory=list)
    sums: list[bytes] = field(default_factory=list)

    def add(self, offset: int, num_bytes: int, payload: int, item_sum: bytes) -> None:
        self.offset.append(offset)
        self.num_bytes.append(num_bytes)
        self.payload.append(payload)
        self.sums.append(item_sum)


class _DcpWriting:
    def __init__(
        self, opened: CheckpointSource, chosen: Selection, descriptors: tuple[str, ...], progress: Progress
    ) -> None:
        self._opened = opened
        self._objects = chosen.objects
        self._descriptors = descriptors
        self._progress = progress
        self._tensors = tuple(opened.index.tensors[number] for number in chosen.tensors)
        new_number = np.full(len(opened.index.tensors), -1, dtype=np.int64)
        new_number[list(chosen.tensors)] = np.arange(len(chosen.tensors))
        self._new_number = new_number
        self._rows = np.flatnonzero(new_number[opened.index.stored.regions.tensor] >= 0)
        self._items = _Items()

    def write(self, place: SaveTransaction) -> WrittenFile:
        """The data file: objects first, then boxes."""
        sink = place.data_storage.create(place.key(_FILE))
        with ExitStack() as undo, closing(Elements(self._opened)) as elements:
            undo.callback(sink.abort)
            outlet = Outlet(sink, WriteBuffers())
            for one in self._objects:
                self._write_whole(outlet, self._object_item(one))
            for row in self._rows.tolist():
                if self._descriptors:
                    self._write_whole(
                        outlet, apply_transforms(self._plain_item(elements, row), self._descriptors)
                    )
                else:
                    self._write_row(outlet, elements, row)
            sink.finish()
            undo.pop_all()
        return WrittenFile(
            name=_FILE,
            size_bytes=outlet.position,
            item_offset=np.array(self._items.offset, dtype=np.int64),
            item_bytes=np.array(self._items.num_bytes, dtype=np.int64),
            payload_offset=np.array(self._items.payload, dtype=np.int64),
            sums=b"".join(self._items.sums),
        )

    def _object_item(self, one: StoredObject) -> bytes:
        """An object's archive: as it is, if it was one, without asking what is in it."""
        opened = self._opened
        if opened.archive is not None:
            return object_bytes(opened.value(one), descriptors=self._descriptors)
        item, packed = bytes(opened.read_object_item(one)), opened.descriptors(one)
        plain = undo_transforms(item, packed, f"{opened.uri}, {one.name}") if packed else item
        return apply_transforms(plain, self._descriptors)

    def _write_whole(self, outlet: Outlet, item: bytes) -> None:
        self._items.add(outlet.position, len(item), outlet.position, checksum_of(item))
        outlet.write(item)

    def _dtype(self, row: int) -> str:
        contents = self._opened.index
        return contents.tensors[int(contents.stored.regions.tensor[row])].dtype

    def _plain_item(self, elements: Elements, row: int) -> bytes:
        around = envelope(self._dtype(row), self._opened.shape(row))
        payload = bytearray(around.payload_bytes)
        elements.read_payload(row, 0, memoryview(payload))
        self._progress.advance(len(payload))
        return b"".join((around.prefix, payload, around.suffix))

    def _write_row(self, outlet: Outlet, elements: Elements, row: int) -> None:
        around = envelope(self._dtype(row), self._opened.shape(row))
        start = item_start(outlet.position, len(around.prefix))
        outlet.write(bytes(start - outlet.position))
        total = start_checksum()
        total.update(around.prefix)
        outlet.write(around.prefix)
        for begin_bytes in range(0, around.payload_bytes, outlet.room_bytes):
            buffer = outlet.buffer()
            num_bytes = min(outlet.room_bytes, around.payload_bytes - begin_bytes)
            elements.read_payload(row, begin_bytes, buffer[:num_bytes])
            total.update(buffer[:num_bytes])
            outlet.append(buffer, num_bytes)
            self._progress.advance(num_bytes)
        total.update(around.suffix)
        outlet.write(around.suffix)
        self._items.add(start, around.item_bytes, start + len(around.prefix), total.digest())

    def seal(self, file: WrittenFile) -> Seal:
        """Metadata and manifest of what was written."""
        metadata = self._metadata(file)
        content = metadata_bytes(metadata)
        source = self._opened.manifest
        manifest = build_manifest(
            metadata.index,
            [file],
            content,
            step=source.step if source else None,
            facts={"converted_from": self._opened.uri},
        )
        return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes={file.name: file.size_bytes})

    def _metadata(self, file: WrittenFile) -> DcpMetadata:
        opened, num_objects = self._opened, len(self._objects)
        old, num_rows = opened.index.stored, len(self._rows)
        regions = old.regions.take(self._rows)
        is_packed = bool(self._descriptors)
        stored = StoredRegions(
            type(regions)(self._new_number[regions.tensor], regions.offsets, regions.sizes),
            file=np.zeros(num_rows, dtype=np.int64),
            item_offset=file.item_offset[num_objects:],
            item_bytes=file.item_bytes[num_objects:],
            payload_offset=np.full(num_rows, UNKNOWN, dtype=np.int64),
            packed=np.full(num_rows, is_packed),
        )
        columns = zip(self._objects, file.item_offset.tolist(), file.item_bytes.tolist(), strict=False)
        objects = tuple(
            StoredObject(one.name, 0, offset, num_bytes, is_packed) for one, offset, num_bytes in columns
        )
        files = (file.name,) if len(file.item_offset) else ()
        names = [*(facts.name for facts in self._tensors), *(one.name for one in objects)]
        return DcpMetadata(
            index=CheckpointIndex(self._tensors, stored, objects, files),
            paths=_paths(opened, names),
            transforms=((), self._descriptors) if is_packed else ((),),
            row_transform=np.ones(num_rows, dtype=np.int64) if is_packed else None,
            object_transforms={one.name: self._descriptors for one in objects} if is_packed else {},
        )


def _paths(opened: CheckpointSource, names: Sequence[str]) -> Mapping[str, tuple[str | int, ...]]:
    """Every name needs a path, in the order of the state: stock readers build whole states from them."""
    order = {name: place for place, name in enumerate(opened.paths)}
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: opened.paths.get(name, (name,)) for name in ordered}


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
    opened: CheckpointSource,
    chosen: Selection,
    storage: Storage,
    key: str,
    *,
    trust: bool,
    progress: Progress,
) -> int:
    """Write the chosen parts as the nested state that they were; the file's bytes."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, len(chosen.tensors))
    pickler.dump(_nested_state(opened, chosen, trust=trust))
    sink = storage.create(key)
    with ExitStack() as undo, closing(Elements(opened)) as elements:
        undo.callback(sink.abort)
        archive = _ArchiveWriter(Outlet(sink, WriteBuffers()))
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


def _nested_state(opened: CheckpointSource, chosen: Selection, *, trust: bool) -> Any:
    """The nested state, with stand-ins for tensors."""
    leaves: dict[str, Any] = {}
    for number, tensor in enumerate(chosen.tensors):
        facts = opened.index.tensors[tensor]
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


class _ArchiveWriter:
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
        self, name: str, opened: CheckpointSource, elements: Elements, tensor: int, progress: Progress
    ) -> None:
        """A tensor's elements, slab by slab."""
        facts, offset, crc32 = opened.index.tensors[tensor], self.outlet.position, 0
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
