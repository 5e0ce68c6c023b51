"""Parts of tensors and the index of a checkpoint, as numpy columns.

Planners, the readers and writers of every format, and loading exchange these records. Invariant: a region is
in the global coordinates of its tensor, and all columns of a record have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNKNOWN = -1
"""A payload's position that only its item's own header tells."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is the same of a tensor on all ranks. `dtype` is torch's name without `torch.`: `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    """Of one element."""

    @property
    def size_bytes(self) -> int:
        """Of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.item_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Rectangular parts of numbered tensors, one a row.

    `tensor` (n) counts in a tuple of `TensorFacts` kept beside; `offsets` and `sizes` are (n, width), where
    width is the largest number of dimensions. A tensor of fewer dimensions is padded behind its last one with
    offset 0 and size 1, so volumes need no case for 0-d, and rows can be compared whole.
    """

    tensor: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        """Width of `offsets` and `sizes`."""
        return int(self.offsets.shape[1])

    @property
    def num_elements(self) -> Ints:
        """Of each box; 0 for an empty one."""
        return np.asarray(np.prod(self.sizes, axis=1, dtype=np.int64))

    def num_bytes(self, item_bytes: Ints) -> Ints:
        """Of each box; `item_bytes` is by tensor number, see `item_bytes_of`."""
        return self.num_elements * item_bytes[self.tensor]

    def take(self, rows: Ints | Bools | slice) -> Boxes:
        """Some of the boxes, in the order of `rows`; these very ones where `rows` are all in order."""
        if isinstance(rows, np.ndarray) and len(rows) == len(self) and _is_all(rows):
            return self
        return Boxes(self.tensor[rows], self.offsets[rows], self.sizes[rows])

    def widened(self, num_dims: int) -> Boxes:
        """The same boxes with columns for `num_dims` dimensions, not fewer than now."""
        extra = num_dims - self.num_dims
        if extra == 0:
            return self
        room = ((0, 0), (0, extra))
        offsets = np.pad(self.offsets, room)
        return Boxes(self.tensor, offsets, np.pad(self.sizes, room, constant_values=1))

    def box(self, row: int, num_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one box of a tensor of `num_dims` dimensions."""
        return (
            tuple(self.offsets[row, :num_dims].tolist()),
            tuple(self.sizes[row, :num_dims].tolist()),
        )

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Self:
        """From (tensor number, offsets, sizes) of each box."""
        width = max((len(offsets) for _, offsets, _ in rows), default=0)
        offsets = np.zeros((len(rows), width), dtype=np.int64)
        sizes = np.ones((len(rows), width), dtype=np.int64)
        for row, (_, begin, extent) in enumerate(rows):
            offsets[row, : len(begin)] = begin
            sizes[row, : len(extent)] = extent
        return cls(np.array([tensor for tensor, _, _ in rows], dtype=np.int64), offsets, sizes)

    @classmethod
    def concatenated(cls, parts: Sequence[Boxes]) -> Self:
        """All boxes of `parts`, which count in the same tensors, one after another."""
        width = max((part.num_dims for part in parts), default=0)
        wide = [part.widened(width) for part in parts]
        if not wide:
            return cls.from_rows(())
        return cls(
            np.concatenate([part.tensor for part in wide]),
            np.concatenate([part.offsets for part in wide]),
            np.concatenate([part.sizes for part in wide]),
        )


def _is_all(rows: Ints | Bools) -> bool:
    """Whether rows are everything, as they stand: looking costs far less than copying a million boxes."""
    return bool(rows.all() if rows.dtype == np.bool_ else (rows == np.arange(len(rows))).all())


def item_bytes_of(tensors: Sequence[TensorFacts]) -> Ints:
    """Bytes of one element, by tensor number."""
    return np.array([tensor.item_bytes for tensor in tensors], dtype=np.int64)


def whole_boxes(tensors: Sequence[TensorFacts]) -> Boxes:
    """One box for each tensor, all of it."""
    return Boxes.from_rows(
        [(number, (0,) * len(facts.shape), facts.shape) for number, facts in enumerate(tensors)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class StoredBoxes:
    """Where the boxes of a checkpoint lie: row by row beside `boxes`.

    An item is what a file holds for one box: an envelope and the payload, which is the box's elements in
    row-major order. `payload_offset` is in the file, or `UNKNOWN`. Of a `packed` item (a stream transform,
    a compressed archive member) only the whole can be read; its payload has no place of its own.
    """

    boxes: Boxes
    file: Ints
    """Counts in a tuple of file names kept beside."""
    item_offset: Ints
    item_bytes: Ints
    payload_offset: Ints
    packed: Bools

    def __len__(self) -> int:
        return len(self.boxes)

    def take(self, rows: Ints | Bools | slice) -> StoredBoxes:
        """Some of the rows, in the order of `rows`."""
        return StoredBoxes(
            self.boxes.take(rows),
            self.file[rows],
            self.item_offset[rows],
            self.item_bytes[rows],
            self.payload_offset[rows],
            self.packed[rows],
        )


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An item that is no tensor: its name in the checkpoint, and where its bytes lie."""

    name: str
    file: int
    offset: int
    size_bytes: int
    packed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """All that a checkpoint holds and where, whatever format it was written in."""

    tensors: tuple[TensorFacts, ...]
    stored: StoredBoxes
    objects: tuple[StoredObject, ...]
    files: tuple[str, ...]
    """Keys relative to the checkpoint's folder."""
