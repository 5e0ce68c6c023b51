"""Items that go through stream transforms, such as compression: made whole in memory, before staging.

How long a packed item is only packing tells, so its file cannot be laid out before. The cost: as much memory
as the rank's packed share, payloads that are not aligned, and no reading in part. Invariant: what is unpacked
is the very item that would have been written otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoint.dcp.transforms import pack
from penstock.checkpoint.image import FileImage, Item
from penstock.checkpoint.staging.payloads import payload_of_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.staging.payloads import Payload


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
