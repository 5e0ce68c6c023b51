"""Images become bytes: envelopes, payloads and gaps in the pipe's buffers, summed while they are hot.

The pipe's producer on the side of saving. Invariant: an item's sum is over the very bytes that are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.sums import RunningSum, running_sum

if TYPE_CHECKING:
    from penstock.checkpoint.image import FileImage, Item
    from penstock.checkpoint.pipe.base import PlannedObject
    from penstock.checkpoint.staging.payloads import Payload


@dataclass(slots=True)
class _Cursor:
    """How far one file is: the item it stands in or before, and the sums so far."""

    image: FileImage
    payloads: Sequence[Payload]
    number: int = 0
    sum: RunningSum = field(default_factory=running_sum)
    sums: list[bytes] = field(default_factory=list)

    @property
    def item(self) -> Item | None:
        return self.image.items[self.number] if self.number < len(self.image.items) else None

    def pass_item(self) -> None:
        self.sums.append(self.sum.digest())
        self.sum = running_sum()
        self.number += 1


class ImageFiller:
    """A `Producer` of images: `payloads` has one for each item of each file, by file name."""

    def __init__(self, images: Sequence[FileImage], payloads: Mapping[str, Sequence[Payload]]) -> None:
        self._cursors = {image.name: _Cursor(image, payloads[image.name]) for image in images}

    def fill(self, planned: PlannedObject, offset: int, buffer: memoryview) -> None:
        """The next bytes of a file."""
        cursor, position, end = self._cursors[planned.key], offset, offset + len(buffer)
        while position < end:
            item = cursor.item
            assert item is not None, "a file ends with its last item"
            view = buffer[position - offset :]
            if position < item.offset:
                position += _zero(view[: item.offset - position])
            elif position < item.payload_offset:
                position += _put(cursor, view, item.prefix[position - item.offset :])
            elif position < item.payload_end:
                position += _copy(cursor, item, position, view)
            else:
                position += _put(cursor, view, item.suffix[position - item.payload_end :])
            while (item := cursor.item) is not None and position == item.end:
                cursor.pass_item()

    def sums(self, name: str) -> bytes:
        """The sums of a file's items, once it is filled to its end."""
        cursor = self._cursors[name]
        while cursor.item is not None and cursor.item.end == cursor.image.size_bytes:
            cursor.pass_item()
        return b"".join(cursor.sums)


def _zero(view: memoryview) -> int:
    np.frombuffer(view, dtype=np.uint8)[:] = 0
    return len(view)


def _put(cursor: _Cursor, view: memoryview, content: bytes) -> int:
    part = content[: len(view)]
    view[: len(part)] = part
    cursor.sum.update(part)
    return len(part)


def _copy(cursor: _Cursor, item: Item, position: int, view: memoryview) -> int:
    payload, start = cursor.payloads[cursor.number], position - item.payload_offset
    view = view[: item.payload_bytes - start]
    step = payload.block_bytes or len(view)
    for done in range(0, len(view), step):
        block = view[done : done + step]
        payload.copy_into(start + done, block)
        cursor.sum.update(block)
    return len(view)
