"""Writers of torch's formats for `convert`: a DCP checkpoint of ours, or one `torch.save` archive.

DCP keeps the regions as they were sharded. Archives begin with the pickle, and the records follow in its
order, each with its CRC-32, so that one pass is enough.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from isal import isal_zlib

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.commit.transaction import begin_save
from penstock.checkpoint.formats import dcp_item
from penstock.checkpoint.formats.dcp_metadata import metadata_bytes
from penstock.checkpoint.formats.manifest import (
    WrittenFile,
    build_manifest,
    checksum_of,
    manifest_bytes,
    start_checksum,
)
from penstock.checkpoint.formats.torch_save import ZipRecord
from penstock.checkpoint.state.regions import (
    UNKNOWN,
    CheckpointIndex,
    Regions,
    StoredObject,
    StoredRegions,
    element_type,
)
from penstock.checkpoint.tools.tensor_slabs import Appender, Pieces, SlabReader
from penstock.cluster.comm import SoloComm
from penstock.storage import Storage

if TYPE_CHECKING:
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource

_FILE: Final = "__0_0.distcp"
_ALIGNMENT: Final = 64


def write_dcp(
    checkpoint: CheckpointSource,
    tensors: Sequence[int],
    objects: Sequence[StoredObject],
    storage: Storage,
    name: str,
    *,
    transforms: tuple[str, ...],
    appender: Appender,
) -> int:
    """Write the chosen parts as the checkpoint `name`; returns the bytes of its data file.

    With transforms, items are assembled in memory, and cannot be read in part or unbuffered afterwards.
    """
    index = checkpoint.index
    number_of = np.full(len(index.tensors), -1, dtype=np.int64)
    number_of[list(tensors)] = np.arange(len(tensors))
    rows = np.flatnonzero(number_of[index.stored.regions.tensor] >= 0)
    items: list[tuple[int, int, int]] = []
    """Offset, size and payload offset of each item, in the order of the file: objects first."""
    sums: list[bytes] = []

    def write_whole(item: bytes) -> None:
        items.append((appender.position, len(item), appender.position))
        sums.append(checksum_of(item))
        appender.write(item)

    transaction = begin_save(storage, name, SoloComm())
    with ExitStack() as undo:
        undo.callback(transaction.abandon)
        sink = transaction.data_storage.create(transaction.key(_FILE))
        undo.callback(sink.abort)
        appender.begin(sink)
        reader = undo.enter_context(closing(SlabReader(checkpoint)))
        for held in objects:
            write_whole(dcp_item.apply_transforms(_plain_object(checkpoint, held), transforms))
        for row in rows.tolist():
            facts = index.tensors[int(index.stored.regions.tensor[row])]
            around = dcp_item.envelope(facts.dtype, checkpoint.shape(row))
            if transforms:
                payload = bytearray(around.payload_bytes)
                reader.read_payload(row, 0, memoryview(payload))
                plain = b"".join((around.prefix, payload, around.suffix))
                write_whole(dcp_item.apply_transforms(plain, transforms))
                continue
            start, total = dcp_item.item_start(appender.position, around), start_checksum()
            appender.write(bytes(start - appender.position) + around.prefix)
            total.update(around.prefix)
            appender.copy(
                appender.pieces_of(around.payload_bytes, partial(reader.read_payload, row)), total.update
            )
            appender.write(around.suffix)
            total.update(around.suffix)
            items.append((start, around.item_bytes, start + len(around.prefix)))
            sums.append(total.digest())
        sink.finish()
        columns = np.array(items, dtype=np.int64).reshape(-1, 3).T.copy()
        file = WrittenFile(
            name=_FILE,
            size_bytes=appender.position,
            item_offset=columns[0],
            item_bytes=columns[1],
            payload_offset=columns[2],
            sums=b"".join(sums),
        )
        regions = index.stored.regions.take(rows)
        names = [*(index.tensors[number].name for number in tensors), *(held.name for held in objects)]
        written = CheckpointIndex(
            tuple(index.tensors[number] for number in tensors),
            StoredRegions(
                Regions(number_of[regions.tensor], regions.offsets, regions.sizes),
                file=np.zeros(len(rows), dtype=np.int64),
                item_offset=columns[0, len(objects) :],
                item_bytes=columns[1, len(objects) :],
                payload_offset=np.full(len(rows), UNKNOWN, dtype=np.int64),
                packed=np.full(len(rows), bool(transforms)),
            ),
            tuple(
                StoredObject(held.name, 0, offset, size, transforms)
                for held, (offset, size, _) in zip(objects, items, strict=False)
            ),
            (_FILE,) if items else (),
            paths=_paths(checkpoint, names),
            transforms=[transforms] * len(rows) if transforms else (),
        )

        def seal() -> Seal:
            metadata = metadata_bytes(written)
            step = checkpoint.manifest.step if checkpoint.manifest else None
            facts = {"converted_from": checkpoint.uri}
            manifest = build_manifest(written, [file], metadata, step=step, facts=facts)
            return Seal(manifest=manifest_bytes(manifest), metadata=metadata, sizes={_FILE: file.size_bytes})

        transaction.commit(seal)
        undo.pop_all()
        reader.close()
    return file.size_bytes


def _plain_object(checkpoint: CheckpointSource, held: StoredObject) -> bytes:
    """An object's archive, taken over unparsed if it was one."""
    if checkpoint.archive is not None:
        return dcp_item.object_bytes(checkpoint.value(held))
    item = checkpoint.read_object_item(held)
    return dcp_item.undo_transforms(item, held.transforms, f"{checkpoint.uri}, {held.name}")


def _paths(checkpoint: CheckpointSource, names: Sequence[str]) -> Mapping[str, tuple[str | int, ...]]:
    """The path of each name, in the order of the state: stock readers build whole states from them."""
    paths = checkpoint.index.paths
    order = {name: position for position, name in enumerate(paths)}
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: paths.get(name, (name,)) for name in ordered}


def write_torch(
    checkpoint: CheckpointSource,
    tensors: Sequence[int],
    objects: Sequence[StoredObject],
    storage: Storage,
    key: str,
    *,
    trust: bool,
    appender: Appender,
) -> int:
    """Write the chosen parts as the nested state that was saved; returns the bytes of the file."""
    index, pickled = checkpoint.index, io.BytesIO()
    leaves: dict[str, Any] = {}
    for number, facts in enumerate(index.tensors[tensor] for tensor in tensors):
        leaves[facts.name] = dcp_item.TensorStub(element_type(facts.dtype), facts.shape, str(number))
    leaves |= {held.name: checkpoint.value(held, trust=trust) for held in objects}
    tree: dict[Any, Any] = {}
    for name, path in _paths(checkpoint, list(leaves)).items():
        *parents, last = path
        node = tree
        for step in parents:
            node = node.setdefault(step, {})
        node[last] = leaves[name]
    pickler = _Pickler(pickled, len(tensors))
    pickler.dump(_restore_lists(tree))
    records: list[ZipRecord] = []

    def add(name: str, content: bytes) -> None:
        body, record = dcp_item.small_record(f"archive/{name}", content, appender.position)
        appender.write(body)
        records.append(record)

    def add_data(number: int, size_bytes: int, pieces: Pieces) -> None:
        name, offset, crc32 = f"archive/data/{number}", appender.position, 0

        def look(part: memoryview) -> None:
            nonlocal crc32
            crc32 = isal_zlib.crc32(part, crc32)

        appender.write(dcp_item.begin_record(name, offset, align=_ALIGNMENT))
        appender.copy(pieces, look)
        appender.write(dcp_item.end_record(size_bytes, crc32))
        records.append(ZipRecord(name, offset, size_bytes, crc32))

    sink = storage.create(key)
    with ExitStack() as undo, closing(SlabReader(checkpoint)) as reader:
        undo.callback(sink.abort)
        appender.begin(sink)
        add("data.pkl", pickled.getvalue())
        add(".format_version", b"1")
        add(".storage_alignment", b"64")
        add("byteorder", b"little")
        for number, tensor in enumerate(tensors):
            facts = index.tensors[tensor]
            add_data(number, facts.size_bytes, appender.slabs_of(reader, tensor, facts))
        for number, inner in enumerate(pickler.inner, start=len(tensors)):
            content = torch.tensor(inner, dtype=torch.uint8, device="cpu").numpy().data

            def read(begin: int, target: memoryview, content: memoryview = content) -> None:
                target[:] = content[begin : begin + len(target)]

            add_data(number, content.nbytes, appender.pieces_of(content.nbytes, read))
        add("version", b"3\n")
        appender.write(dcp_item.directory(records, appender.position))
        sink.finish()
        undo.pop_all()
    return appender.position


def _restore_lists(tree: Any) -> Any:
    """Turn mappings whose keys are positions of a list into that list, without gaps for parts left out."""
    if not isinstance(tree, dict) or not tree:
        return tree
    inner = {key: _restore_lists(value) for key, value in tree.items()}
    if all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


class _Pickler(dcp_item.ArchivePickler):
    """Refers to records by number, and collects the storages of tensors inside objects in `inner`."""

    def __init__(self, file: io.BytesIO, num_tensors: int) -> None:
        super().__init__(file, protocol=2)
        self._num_tensors = num_tensors
        self.inner: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """A record for storages, None for everything else."""
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj  # torch.save itself asks these private methods
            kind = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001
            return ("storage", kind, self._record(typed._untyped_storage), "cpu", typed._size())  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, self._record(obj), "cpu", obj.nbytes())
        return super().persistent_id(obj)

    def _record(self, storage: torch.UntypedStorage) -> str:
        for number, known in enumerate(self.inner):
            if known.data_ptr() == storage.data_ptr() and known.nbytes() == storage.nbytes():
                return str(self._num_tensors + number)
        self.inner.append(storage)
        return str(self._num_tensors + len(self.inner) - 1)
