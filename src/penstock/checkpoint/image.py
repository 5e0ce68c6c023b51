"""A data file before it is written: which bytes of it are envelopes, which a tensor's, which only fill gaps.

Pure: from one bucket of a save plan to the place of every item. Invariant: payloads of tensors begin at
multiples of 4 KiB, items follow each other in the order of the bucket, and every other byte is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.dcp.envelope import envelope, item_start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.pieces import Ints, TensorFacts
    from penstock.checkpoint.plan.records import Bucket


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
