"""The layout of a data file before it is written, and the producer that fills it.

Pure but for `LayoutFiller`: from one bucket of a save plan to the place of every item. Invariant: tensor
payloads begin at multiples of 4 KiB, items follow in the order of the bucket, every other byte is zero, and
an item's checksum is over the very bytes that are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.checkpoint.formats.checksums import RunningSum, running_sum
from penstock.checkpoint.formats.dcp_item import envelope, item_start
from penstock.checkpoint.formats.objects import pack
from penstock.checkpoint.saving.payloads import SupportsFetching, payload_of_bytes

if TYPE_CHECKING:
    from penstock.checkpoint.plan.save_plan import Bucket
    from penstock.checkpoint.saving.payloads import Links, Payload
    from penstock.checkpoint.saving.pipeline import PlannedObject
    from penstock.checkpoint.state.regions import Ints, TensorFacts


@dataclass(frozen=True, slots=True)
class Item:
    """One item in its file: `prefix`, `payload_bytes` from elsewhere, `suffix`, from `offset` on."""

    offset: int
    prefix: bytes
    payload_bytes: int
    suffix: bytes

    @property
    def payload_offset(self) -> int:
        """Where the payload begins in the file."""
        return self.offset + len(self.prefix)

    @property
    def payload_end(self) -> int:
        """Where the suffix begins."""
        return self.payload_offset + self.payload_bytes

    @property
    def end(self) -> int:
        """Where the next item may begin."""
        return self.payload_end + len(self.suffix)


@dataclass(frozen=True, slots=True)
class FileImage:
    """One data file: its items in order, objects first, as in the bucket."""

    name: str
    items: tuple[Item, ...]

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.items[-1].end if self.items else 0

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Offset, size and payload's offset of every item."""
        rows = [(each.offset, each.end - each.offset, each.payload_offset) for each in self.items]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def lay_out(bucket: Bucket, tensors: Sequence[TensorFacts]) -> FileImage:
    """The image of a bucket's file: its objects one after another, then each box in its envelope."""
    items: list[Item] = []
    position = 0
    for placed in bucket.objects:
        items.append(Item(position, b"", placed.size_bytes, b""))
        position += placed.size_bytes
    for row, number in enumerate(bucket.boxes.tensor.tolist()):
        facts = tensors[number]
        _, sizes = bucket.boxes.box(row, len(facts.shape))
        around = envelope(facts.dtype, sizes)
        start = item_start(position, len(around.prefix))
        items.append(Item(start, around.prefix, around.payload_bytes, around.suffix))
        position = items[-1].end
    return FileImage(bucket.file, tuple(items))


def pack_file(
    image: FileImage, payloads: Sequence[Payload], transforms: Sequence[str]
) -> tuple[FileImage, list[Payload]]:
    """A file with each of its items packed, one after another without gaps, and their payloads."""
    items: list[Item] = []
    packed: list[Payload] = []
    position = 0
    for item, payload in zip(image.items, payloads, strict=True):
        content = pack(_whole(item, payload), transforms)
        items.append(Item(position, b"", len(content), b""))
        packed.append(payload_of_bytes(content))
        position += len(content)
    return FileImage(image.name, tuple(items)), packed


def _whole(item: Item, payload: Payload) -> bytearray:
    """An item with its envelope."""
    content = bytearray(item.prefix) + bytearray(item.payload_bytes) + item.suffix
    start = len(item.prefix)
    if item.payload_bytes:
        payload.copy_into(0, memoryview(content)[start : start + item.payload_bytes])
    return content


Summing = Literal["while copying", "afterwards"]
"""Whether bytes are summed block by block as they are copied, or by `settle`, in a pass of their own."""


@dataclass(slots=True)
class _Cursor:
    """How far one file is: the item that its end so far stands in, or before."""

    image: FileImage
    number: int = 0

    @property
    def item(self) -> Item | None:
        return self.image.items[self.number] if self.number < len(self.image.items) else None


@dataclass(slots=True)
class _Sums:
    """The sums of one file's items, from its bytes in order."""

    cursor: _Cursor
    sum: RunningSum = field(default_factory=running_sum)
    done: list[bytes] = field(default_factory=list)

    def add(self, offset: int, content: memoryview) -> None:
        """The next bytes of the file; those of gaps belong to no item."""
        position, end = offset, offset + len(content)
        while (item := self.cursor.item) is not None and item.offset < end:
            begin, stop = max(position, item.offset), min(end, item.end)
            self.sum.update(content[begin - offset : stop - offset])
            if stop < item.end:
                return
            self.pass_item()
            position = stop

    def pass_item(self) -> None:
        self.done.append(self.sum.digest())
        self.sum = running_sum()
        self.cursor.number += 1


class ImageFiller:
    """A `Producer` of images: `payloads` has one for each item of each file, by file name.

    `links` bring the payloads of devices; where there is one, nothing can be summed while it is copied.
    """

    def __init__(
        self,
        images: Sequence[FileImage],
        payloads: Mapping[str, Sequence[Payload]],
        *,
        links: Links,
        summing: Summing,
    ) -> None:
        self._payloads = payloads
        self._links = links
        self._sums_hot = summing == "while copying" and not links.by_device
        self._cursors = {image.name: _Cursor(image) for image in images}
        self._sums = {image.name: _Sums(_Cursor(image)) for image in images}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """The next bytes of a file."""
        cursor, position, end = self._cursors[planned.key], offset, offset + len(buffer)
        while position < end:
            item = cursor.item
            assert item is not None, "a file ends with its last item"
            view = buffer[position - offset :]
            if position < item.offset:
                position += self._put(
                    planned.key, position, view, bytes(min(len(view), item.offset - position))
                )
            elif position < item.payload_offset:
                position += self._put(planned.key, position, view, item.prefix[position - item.offset :])
            elif position < item.payload_end:
                position += self._copy(planned.key, position, view[: item.payload_end - position])
            else:
                position += self._put(planned.key, position, view, item.suffix[position - item.payload_end :])
            while (item := cursor.item) is not None and position == item.end:
                cursor.number += 1

    def catch_up(self) -> None:
        """Return when the payloads of devices have come."""
        self._links.catch_up()

    def settle(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """Sum what was not summed while it was copied."""
        if not self._sums_hot:
            self._links.catch_up()
            self._sums[planned.key].add(offset, buffer)

    def sums(self, name: str) -> bytes:
        """The sums of a file's items, once it is filled and settled to its end."""
        sums = self._sums[name]
        while sums.cursor.item is not None and sums.cursor.item.end == sums.cursor.image.size_bytes:
            sums.pass_item()
        return b"".join(sums.done)

    def _put(self, name: str, position: int, view: memoryview, content: bytes) -> int:
        part = content[: len(view)]
        view[: len(part)] = part
        if self._sums_hot:
            self._sums[name].add(position, view[: len(part)])
        return len(part)

    def _copy(self, name: str, position: int, view: memoryview) -> int:
        cursor = self._cursors[name]
        item = cursor.item
        assert item is not None, "it has this payload"
        payload, start = self._payloads[name][cursor.number], position - item.payload_offset
        if isinstance(payload, SupportsFetching) and payload.device in self._links.by_device:
            payload.fetch_into(start, view, self._links.by_device[payload.device])
            return len(view)
        step = (payload.block_bytes if self._sums_hot else None) or len(view)
        for done in range(0, len(view), step):
            block = view[done : done + step]
            payload.copy_into(start + done, block)
            if self._sums_hot:
                self._sums[name].add(position + done, block)
        return len(view)
