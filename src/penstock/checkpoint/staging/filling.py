"""Images become bytes: envelopes, payloads and gaps in the pipe's buffers, summed while they are hot.

The pipe's producer on the side of saving. Payloads of a device only begin to come in `fill`; where the caller
waits for copies alone, sums wait until all of them are made. Invariant: an item's sum is over the very bytes
that are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.checkpoint.staging.payloads import SupportsFetching
from penstock.checkpoint.sums import RunningSum, running_sum

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoint.image import FileImage, Item
    from penstock.checkpoint.pipe.base import PlannedObject
    from penstock.checkpoint.staging.links import Links
    from penstock.checkpoint.staging.payloads import Payload

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
