"""Any checkpoint as a distributed one of ours: aligned payloads, a sum of every item, committed in one step.

Boxes stay as they were cut. Invariant: the item's sum is over the bytes that were written, as they were read.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.checkpoint.commit.protocol import Seal
from penstock.checkpoint.commit.transaction import Place, begin
from penstock.checkpoint.converting.outlet import Buffers, Outlet
from penstock.checkpoint.converting.slabs import Elements
from penstock.checkpoint.dcp.envelope import envelope, item_start
from penstock.checkpoint.dcp.metadata import DcpMetadata
from penstock.checkpoint.dcp.metadata_text import metadata_bytes
from penstock.checkpoint.dcp.objects import object_bytes
from penstock.checkpoint.dcp.transforms import pack, unpack
from penstock.checkpoint.manifest import manifest_bytes, manifest_of
from penstock.checkpoint.pieces import UNKNOWN, Contents, StoredBoxes, StoredObject
from penstock.checkpoint.staging.base import WrittenFile
from penstock.checkpoint.sums import running_sum, sum_of
from penstock.cluster.base_comm import SoloComm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.converting.selection import Selection
    from penstock.checkpoint.opened import Opened
    from penstock.progress import Progress
    from penstock.storage import Storage

_FILE: Final = "__0_0.distcp"


def write_dcp(
    opened: Opened,
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
    place = begin(storage, name, SoloComm())
    with ExitStack() as undo:
        undo.callback(place.abandon)
        writing = _Writing(opened, chosen, tuple(descriptors), progress)
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


class _Writing:
    def __init__(
        self, opened: Opened, chosen: Selection, descriptors: tuple[str, ...], progress: Progress
    ) -> None:
        self._opened = opened
        self._objects = chosen.objects
        self._descriptors = descriptors
        self._progress = progress
        self._tensors = tuple(opened.contents.tensors[number] for number in chosen.tensors)
        new_number = np.full(len(opened.contents.tensors), -1, dtype=np.int64)
        new_number[list(chosen.tensors)] = np.arange(len(chosen.tensors))
        self._new_number = new_number
        self._rows = np.flatnonzero(new_number[opened.contents.stored.boxes.tensor] >= 0)
        self._items = _Items()

    def write(self, place: Place) -> WrittenFile:
        """The data file: objects first, then boxes."""
        sink = place.for_data.create(place.key(_FILE))
        with ExitStack() as undo, closing(Elements(self._opened)) as elements:
            undo.callback(sink.abort)
            outlet = Outlet(sink, Buffers())
            for one in self._objects:
                self._write_whole(outlet, self._object_item(one))
            for row in self._rows.tolist():
                if self._descriptors:
                    self._write_whole(outlet, pack(self._plain_item(elements, row), self._descriptors))
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
        plain = unpack(item, packed, f"{opened.uri}, {one.name}") if packed else item
        return pack(plain, self._descriptors)

    def _write_whole(self, outlet: Outlet, item: bytes) -> None:
        self._items.add(outlet.position, len(item), outlet.position, sum_of(item))
        outlet.write(item)

    def _dtype(self, row: int) -> str:
        contents = self._opened.contents
        return contents.tensors[int(contents.stored.boxes.tensor[row])].dtype

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
        total = running_sum()
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
        manifest = manifest_of(
            metadata.contents,
            [file],
            content,
            step=source.step if source else None,
            facts={"converted_from": self._opened.uri},
        )
        return Seal(manifest=manifest_bytes(manifest), metadata=content, sizes={file.name: file.size_bytes})

    def _metadata(self, file: WrittenFile) -> DcpMetadata:
        opened, num_objects = self._opened, len(self._objects)
        old, num_rows = opened.contents.stored, len(self._rows)
        boxes = old.boxes.take(self._rows)
        is_packed = bool(self._descriptors)
        stored = StoredBoxes(
            type(boxes)(self._new_number[boxes.tensor], boxes.offsets, boxes.sizes),
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
            contents=Contents(self._tensors, stored, objects, files),
            paths=_paths(opened, names),
            transforms=((), self._descriptors) if is_packed else ((),),
            row_transform=np.ones(num_rows, dtype=np.int64) if is_packed else None,
            object_transforms={one.name: self._descriptors for one in objects} if is_packed else {},
        )


def _paths(opened: Opened, names: Sequence[str]) -> Mapping[str, tuple[str | int, ...]]:
    """Every name needs a path, in the order of the state: stock readers build whole states from them."""
    order = {name: place for place, name in enumerate(opened.paths)}
    ordered = sorted(names, key=lambda name: order.get(name, len(order)))
    return {name: opened.paths.get(name, (name,)) for name in ordered}
