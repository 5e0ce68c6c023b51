"""Writers of torch's formats for `convert`: a DCP checkpoint of ours, or one `torch.save` archive.

DCP keeps the regions as they were sharded. Archives begin with the pickle, and the records follow in its
order, each with its CRC-32, so that one pass is enough.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from isal import isal_zlib

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.commit.transaction import SaveTransaction, begin_save
from penstock.checkpoint.formats import dcp_item
from penstock.checkpoint.formats.dcp_metadata import metadata_bytes
from penstock.checkpoint.formats.manifest import (
    WrittenFile,
    build_manifest,
    checksum_of,
    manifest_bytes,
    start_checksum,
)
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    StoredObject,
    StoredRegions,
    contiguous_strides,
    element_type,
)
from penstock.checkpoint.tools import tensor_slabs
from penstock.cluster.comm import SoloComm
from penstock.storage import Storage

if TYPE_CHECKING:
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource
    from penstock.checkpoint.tools.convert import PartSelection
    from penstock.progress import Progress


_FILE: Final = "__0_0.distcp"


def write_dcp(
    checkpoint: CheckpointSource,
    chosen: PartSelection,
    storage: Storage,
    name: str,
    *,
    descriptors: Sequence[str] = (),
    progress: Progress,
) -> int:
    """Write the chosen parts as the checkpoint `name`; returns the bytes of its data file.

    With transforms, items are assembled in memory, and cannot be read in part or unbuffered afterwards.
    """
    transaction = begin_save(storage, name, SoloComm())
    with ExitStack() as undo:
        undo.callback(transaction.abandon)
        writer = _DcpWriter(checkpoint, chosen, tuple(descriptors), progress)
        written = writer.write(transaction)
        transaction.commit(lambda: writer.seal(written))
        undo.pop_all()
    return written.size_bytes


class _DcpWriter:
    def __init__(
        self,
        checkpoint: CheckpointSource,
        chosen: PartSelection,
        descriptors: tuple[str, ...],
        progress: Progress,
    ) -> None:
        self._checkpoint = checkpoint
        self._objects = chosen.objects
        self._descriptors = descriptors
        self._progress = progress
        self._tensors = tuple(checkpoint.index.tensors[number] for number in chosen.tensors)
        new_number = np.full(len(checkpoint.index.tensors), -1, dtype=np.int64)
        new_number[list(chosen.tensors)] = np.arange(len(chosen.tensors))
        self._new_number = new_number
        self._rows = np.flatnonzero(new_number[checkpoint.index.stored.regions.tensor] >= 0)
        self._items: list[tuple[int, int, int, bytes]] = []
        """Offset, size, payload offset and checksum of each item, in the order of the file."""

    def write(self, transaction: SaveTransaction) -> WrittenFile:
        """Write the data file: objects first, then regions."""
        sink = transaction.data_storage.create(transaction.key(_FILE))
        with ExitStack() as undo, closing(tensor_slabs.SlabReader(self._checkpoint)) as reader:
            undo.callback(sink.abort)
            appender = tensor_slabs.SinkAppender(sink, tensor_slabs.WriteBuffers())
            for part in self._objects:
                self._write_whole(appender, self._object_item(part))
            for row in self._rows.tolist():
                if self._descriptors:
                    self._write_whole(
                        appender, dcp_item.apply_transforms(self._plain_item(reader, row), self._descriptors)
                    )
                else:
                    self._write_row(appender, reader, row)
            sink.finish()
            undo.pop_all()
        columns = np.array([item[:3] for item in self._items], dtype=np.int64).reshape(-1, 3).T.copy()
        return WrittenFile(
            name=_FILE,
            size_bytes=appender.position,
            item_offset=columns[0],
            item_bytes=columns[1],
            payload_offset=columns[2],
            sums=b"".join(item[3] for item in self._items),
        )

    def _object_item(self, part: StoredObject) -> bytes:
        """An object's archive, taken over unparsed if it was one."""
        checkpoint = self._checkpoint
        if checkpoint.archive is not None:
            return dcp_item.apply_transforms(dcp_item.object_bytes(checkpoint.value(part)), self._descriptors)
        item = checkpoint.read_object_item(part)
        plain = dcp_item.undo_transforms(item, part.transforms, f"{checkpoint.uri}, {part.name}")
        return dcp_item.apply_transforms(plain, self._descriptors)

    def _write_whole(self, appender: tensor_slabs.SinkAppender, item: bytes) -> None:
        self._items.append((appender.position, len(item), appender.position, checksum_of(item)))
        appender.write(item)

    def _dtype(self, row: int) -> str:
        contents = self._checkpoint.index
        return contents.tensors[int(contents.stored.regions.tensor[row])].dtype

    def _plain_item(self, reader: tensor_slabs.SlabReader, row: int) -> bytes:
        around = dcp_item.envelope(self._dtype(row), self._checkpoint.shape(row))
        payload = bytearray(around.payload_bytes)
        reader.read_payload(row, 0, memoryview(payload))
        self._progress.advance(len(payload))
        return b"".join((around.prefix, payload, around.suffix))

    def _write_row(
        self, appender: tensor_slabs.SinkAppender, reader: tensor_slabs.SlabReader, row: int
    ) -> None:
        around = dcp_item.envelope(self._dtype(row), self._checkpoint.shape(row))
        start = dcp_item.item_start(appender.position, around)
        appender.write(bytes(start - appender.position))
        total = start_checksum()
        total.update(around.prefix)
        appender.write(around.prefix)
        for begin_bytes in range(0, around.payload_bytes, appender.room_bytes):
            buffer = appender.buffer()
            num_bytes = min(appender.room_bytes, around.payload_bytes - begin_bytes)
            reader.read_payload(row, begin_bytes, buffer[:num_bytes])
            total.update(buffer[:num_bytes])
            appender.append(buffer, num_bytes)
            self._progress.advance(num_bytes)
        total.update(around.suffix)
        appender.write(around.suffix)
        self._items.append((start, around.item_bytes, start + len(around.prefix), total.digest()))

    def seal(self, file: WrittenFile) -> Seal:
        """Metadata and manifest of what was written."""
        index = self._index(file)
        content = metadata_bytes(index)
        source = self._checkpoint.manifest
        manifest = build_manifest(
            index,
            [file],
            content,
            step=source.step if source else None,
            facts={"converted_from": self._checkpoint.uri},
        )
        return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes={file.name: file.size_bytes})

    def _index(self, file: WrittenFile) -> CheckpointIndex:
        checkpoint, num_objects = self._checkpoint, len(self._objects)
        old, num_rows = checkpoint.index.stored, len(self._rows)
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
            StoredObject(part.name, 0, offset, num_bytes, self._descriptors)
            for part, offset, num_bytes in columns
        )
        files = (file.name,) if len(file.item_offset) else ()
        names = [*(facts.name for facts in self._tensors), *(part.name for part in objects)]
        return CheckpointIndex(
            self._tensors,
            stored,
            objects,
            files,
            paths=_paths(checkpoint, names),
            transforms=[self._descriptors] * num_rows if is_packed else (),
        )


def _paths(checkpoint: CheckpointSource, names: Sequence[str]) -> Mapping[str, tuple[str | int, ...]]:
    """The path of each name, in the order of the state: stock readers build whole states from them."""
    order = {name: position for position, name in enumerate(checkpoint.index.paths)}
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: checkpoint.index.paths.get(name, (name,)) for name in ordered}


_ALIGNMENT = 64


class _RecordStub:
    """Stands for the record of one tensor in the pickle."""

    def __init__(self, number: int, dtype: str, num_elements: int) -> None:
        self.number = number
        self.kind = element_type(dtype)
        self.num_elements = num_elements

    def pid(self) -> tuple[Any, ...]:
        """The persistent ID by which torch's pickles refer to a record."""
        typed = self.kind.typed_storage
        if typed is not None:
            return ("storage", getattr(torch, typed), str(self.number), "cpu", self.num_elements)
        num_bytes = self.num_elements * self.kind.size_bytes
        return ("storage", torch.storage.UntypedStorage, str(self.number), "cpu", num_bytes)


class _TensorStub:
    """Stands for one tensor in the pickle, which holds the call that rebuilds it."""

    def __init__(self, number: int, dtype: str, shape: tuple[int, ...]) -> None:
        self._storage = _RecordStub(number, dtype, torch.Size(shape).numel())
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        kind = self._storage.kind
        arguments: tuple[Any, ...] = (
            self._storage,
            0,
            self._shape,
            contiguous_strides(self._shape),
            False,
            OrderedDict(),
        )
        if kind.typed_storage is not None:
            return torch._utils._rebuild_tensor_v2, arguments  # noqa: SLF001 - the name that archives hold
        return torch._utils._rebuild_tensor_v3, (*arguments, getattr(torch, kind.name))  # noqa: SLF001


class _Pickler(pickle.Pickler):
    """Refers to records by number, and collects the storages of tensors inside objects in `inner`."""

    def __init__(self, file: io.BytesIO, num_tensors: int) -> None:
        super().__init__(file, protocol=2)
        self._num_tensors = num_tensors
        self.inner: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """A record for storages, None for everything else."""
        if isinstance(obj, _RecordStub):
            return obj.pid()
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # torch.save itself asks these private methods
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001
            return ("storage", kind, self._record(typed._untyped_storage), "cpu", typed._size())  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.storage.UntypedStorage, self._record(obj), "cpu", obj.nbytes())
        return None

    def _record(self, storage: torch.UntypedStorage) -> str:
        for number, known in enumerate(self.inner):
            if known.data_ptr() == storage.data_ptr() and known.nbytes() == storage.nbytes():
                return str(self._num_tensors + number)
        self.inner.append(storage)
        return str(self._num_tensors + len(self.inner) - 1)


def write_torch(
    checkpoint: CheckpointSource,
    chosen: PartSelection,
    storage: Storage,
    key: str,
    *,
    trust: bool,
    progress: Progress,
) -> int:
    """Write the chosen parts as the nested state that was saved; returns the bytes of the file."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, len(chosen.tensors))
    pickler.dump(_nested_state(checkpoint, chosen, trust=trust))
    sink = storage.create(key)
    with ExitStack() as undo, closing(tensor_slabs.SlabReader(checkpoint)) as reader:
        undo.callback(sink.abort)
        archive = _ArchiveWriter(tensor_slabs.SinkAppender(sink, tensor_slabs.WriteBuffers()))
        archive.add("data.pkl", pickled.getvalue())
        for name, content in (
            (".format_version", b"1"),
            (".storage_alignment", b"64"),
            ("byteorder", b"little"),
        ):
            archive.add(name, content)
        for number, tensor in enumerate(chosen.tensors):
            archive.add_tensor(f"data/{number}", checkpoint, reader, tensor, progress)
        for number, inner in enumerate(pickler.inner, start=len(chosen.tensors)):
            archive.add(f"data/{number}", bytes(torch.tensor(inner, dtype=torch.uint8, device="cpu").numpy()))
        archive.add("version", b"3\n")
        archive.close()
        sink.finish()
        undo.pop_all()
    return archive.appender.position


def _nested_state(checkpoint: CheckpointSource, chosen: PartSelection, *, trust: bool) -> Any:
    """The nested state, with stand-ins for tensors."""
    leaves: dict[str, Any] = {}
    for number, tensor in enumerate(chosen.tensors):
        facts = checkpoint.index.tensors[tensor]
        leaves[facts.name] = _TensorStub(number, facts.dtype, facts.shape)
    for part in chosen.objects:
        leaves[part.name] = checkpoint.value(part, trust=trust)
    tree: dict[Any, Any] = {}
    for name, path in _paths(checkpoint, list(leaves)).items():
        *parents, last = path
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaves[name]
    return _restore_lists(tree)


def _restore_lists(tree: Any) -> Any:
    """Turn mappings whose keys are positions of a list into that list, without gaps for parts left out."""
    if not isinstance(tree, dict) or not tree:
        return tree
    inner = {key: _restore_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


class _ArchiveWriter:
    """The archive as it grows."""

    def __init__(self, appender: tensor_slabs.SinkAppender) -> None:
        self.appender = appender
        self._records: list[dcp_item.Record] = []

    def add(self, name: str, content: bytes) -> None:
        """A record that is in memory."""
        offset = self.appender.position
        if name.startswith("data/"):
            self.appender.write(dcp_item.begin_record(f"archive/{name}", offset, align=_ALIGNMENT))
            self.appender.write(content)
            crc32 = isal_zlib.crc32(content)
            self.appender.write(dcp_item.end_record(len(content), crc32))
            self._records.append(dcp_item.Record(f"archive/{name}", offset, len(content), crc32))
            return
        body, record = dcp_item.small_record(f"archive/{name}", content, offset)
        self.appender.write(body)
        self._records.append(record)

    def add_tensor(
        self,
        name: str,
        checkpoint: CheckpointSource,
        reader: tensor_slabs.SlabReader,
        tensor: int,
        progress: Progress,
    ) -> None:
        """A tensor's elements, slab by slab."""
        facts, offset, crc32 = checkpoint.index.tensors[tensor], self.appender.position, 0
        reader.require_whole(tensor)
        self.appender.write(dcp_item.begin_record(f"archive/{name}", offset, align=_ALIGNMENT))
        for slab in tensor_slabs.cut_into_slabs(facts.shape, facts.element_bytes, self.appender.room_bytes):
            buffer, num_bytes = self.appender.buffer(), tensor_slabs.slab_bytes(slab, facts)
            reader.read_slab(tensor, slab, buffer[:num_bytes])
            crc32 = isal_zlib.crc32(buffer[:num_bytes], crc32)
            self.appender.append(buffer, num_bytes)
            progress.advance(num_bytes)
        self.appender.write(dcp_item.end_record(facts.size_bytes, crc32))
        self._records.append(dcp_item.Record(f"archive/{name}", offset, facts.size_bytes, crc32))

    def close(self) -> None:
        """Write the directory."""
        self.appender.write(dcp_item.directory(self._records, self.appender.position))
