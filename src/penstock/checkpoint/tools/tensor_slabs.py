"""Tensors as slabs (runs of elements in row-major order), read from any format and appended to a file.

Invariant: the slabs of a tensor, one after another, are all of its bytes; memory is that of the buffers,
however large a tensor or file is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.checkpoint.formats.dcp_item import HEAD_BYTES
from penstock.checkpoint.state.regions import UNKNOWN, Ints, TensorFacts
from penstock.errors import DataDamaged
from penstock.storage.protocol import Sink, Source
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from penstock.checkpoint.formats.checkpoint_source import CheckpointSource


@dataclass(frozen=True, slots=True)
class Slab:
    """Indices `begin` to `end` of dimension `len(prefix)`, below fixed indices of the dimensions before."""

    prefix: tuple[int, ...]
    begin: int
    end: int


def cut_into_slabs(shape: Sequence[int], element_bytes: int, most_bytes: int) -> Iterator[Slab]:
    """Cut a tensor of this shape into slabs, in row-major order. A tensor without dimensions is one slab."""
    if 0 in shape:
        return
    shape = tuple(shape) or (1,)
    dim, inner = 0, math.prod(shape[1:]) * element_bytes
    while inner > most_bytes and dim + 1 < len(shape):
        dim += 1
        inner = math.prod(shape[dim + 1 :]) * element_bytes
    step = max(most_bytes // inner, 1)
    for prefix in product(*map(range, shape[:dim])):
        for begin in range(0, shape[dim], step):
            yield Slab(prefix, begin, min(begin + step, shape[dim]))


def slab_bytes(slab: Slab, facts: TensorFacts) -> int:
    """How many bytes a slab has."""
    shape = facts.shape or (1,)
    return (slab.end - slab.begin) * math.prod(shape[len(slab.prefix) + 1 :]) * facts.element_bytes


class SlabReader:
    """Reads the elements of a checkpoint's tensors by slabs. For one thread; close it."""

    def __init__(self, checkpoint: CheckpointSource) -> None:
        self._checkpoint = checkpoint
        self._storage = checkpoint.storage_of_files()
        self._sources: dict[int, Source] = {}
        self._decoded: tuple[int, memoryview] | None = None
        self._begins: dict[int, int | None] = {}
        tensor = checkpoint.index.stored.regions.tensor
        self._order = np.argsort(tensor, kind="stable")
        self._first = np.searchsorted(tensor[self._order], np.arange(len(checkpoint.index.tensors) + 1))

    def rows(self, tensor: int) -> Ints:
        """The stored regions of a tensor."""
        return np.asarray(self._order[self._first[tensor] : self._first[tensor + 1]])

    def require_whole(self, tensor: int) -> None:
        """`DataDamaged` unless all elements of a tensor are stored, each once."""
        facts = self._checkpoint.index.tensors[tensor]
        regions = self._checkpoint.index.stored.regions.take(self.rows(tensor))
        if int(regions.num_elements.sum()) != math.prod(facts.shape):
            raise DataDamaged(
                f"Of {facts.name} {int(regions.num_elements.sum())} elements are stored, it has "
                f"{math.prod(facts.shape)}",
                where=self._checkpoint.uri,
            )

    def read_slab(self, tensor: int, slab: Slab, target: memoryview) -> None:
        """Fill `target`, which is as long as the slab."""
        facts = self._checkpoint.index.tensors[tensor]
        dim, shape = len(slab.prefix), facts.shape or (1,)
        element = np.dtype({16: "c16"}.get(facts.element_bytes, f"u{facts.element_bytes}"))
        whole = np.frombuffer(target, dtype=element).reshape(slab.end - slab.begin, *shape[dim + 1 :])
        for row in self.rows(tensor).tolist():
            offsets, sizes = self._box(row, len(shape))
            begin, end = max(slab.begin, offsets[dim]), min(slab.end, offsets[dim] + sizes[dim])
            local = [index - offset for index, offset in zip(slab.prefix, offsets, strict=False)]
            if begin >= end or not all(0 <= index < size for index, size in zip(local, sizes, strict=False)):
                continue
            start = _linear((*local, begin - offsets[dim]), sizes) * facts.element_bytes
            inside = tuple(
                slice(offset, offset + size)
                for offset, size in zip(offsets[dim + 1 :], sizes[dim + 1 :], strict=True)
            )
            part = whole[(slice(begin - slab.begin, end - slab.begin), *inside)]
            self._fill(row, start, part)

    def _fill(self, row: int, start: int, part: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        """Read a run of a region's payload into a part of a slab; directly if that is contiguous, too."""
        if part.flags.c_contiguous:
            self.read_payload(row, start, part.reshape(-1).view(np.uint8).data)
            return
        between = np.empty(part.shape, dtype=part.dtype)
        self.read_payload(row, start, between.reshape(-1).view(np.uint8).data)
        part[...] = between

    def _box(self, row: int, num_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offsets, sizes = self._checkpoint.index.stored.regions.region(row, num_dims)
        # Of tensors without dimensions the columns may be empty.
        return offsets or (0,), sizes or (1,)

    def read_payload(self, row: int, start: int, target: memoryview) -> None:
        """Read bytes of a region's elements from `start` on."""
        begin = self._payload_begin(row)
        if begin is not None:
            self._source(row).read_into(begin + start, target)
            return
        # It can be read only as a whole. The last one is kept, as slabs of one tensor follow each other.
        if self._decoded is None or self._decoded[0] != row:
            self._decoded = None
            self._decoded = (row, self._checkpoint.tensor_bytes(row, self.read_item(row)))
        target[:] = self._decoded[1][start : start + len(target)]

    def read_item(self, row: int) -> bytearray:
        """The whole item of a region."""
        stored = self._checkpoint.index.stored
        item = bytearray(int(stored.item_bytes[row]))
        self._source(row).read_into(int(stored.item_offset[row]), memoryview(item))
        return item

    def close(self) -> None:
        """Close the files."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _payload_begin(self, row: int) -> int | None:
        stored = self._checkpoint.index.stored
        if stored.payload_offset[row] != UNKNOWN:
            return int(stored.payload_offset[row])
        if row not in self._begins:
            begin = int(stored.item_offset[row])
            head = bytearray(min(int(stored.item_bytes[row]), HEAD_BYTES))
            self._source(row).read_into(begin, memoryview(head))
            inside = self._checkpoint.payload_in(row, head)
            self._begins[row] = None if inside is None else begin + inside
        return self._begins[row]

    def _source(self, row: int) -> Source:
        number = int(self._checkpoint.index.stored.file[row])
        if number not in self._sources:
            key = self._checkpoint.key(self._checkpoint.index.files[number])
            self._sources[number] = self._storage.open(key)
        return self._sources[number]


def _linear(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major position of the first element below `index`."""
    position = 0
    for coordinate, size in zip(index, sizes, strict=False):
        position = position * size + coordinate
    return position * math.prod(sizes[len(index) :])


BUFFER_BYTES: Final = 8 << 20
NUM_BUFFERS: Final = 6
_POLL_S: Final = 1.0


class WriteBuffers:
    """Warm buffers, reused for one file after another."""

    def __init__(self, size_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self.size_bytes = size_bytes
        memory = WarmMemory(size_bytes * num_buffers)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for start in range(0, size_bytes * num_buffers, size_bytes):
            self._free.put(memory.view[start : start + size_bytes])

    def take(self, sink: Sink) -> memoryview:
        """A free buffer; raises the error of `sink` if that is why no buffer becomes free."""
        while True:
            try:
                return self._free.get(timeout=_POLL_S)
            except Empty:
                sink.submit(memoryview(b""))

    def give_back(self, buffer: memoryview) -> None:
        """Return a whole buffer."""
        self._free.put(buffer)


class SinkAppender:
    """Appends to one sink through `WriteBuffers`. `position` is where the next byte goes."""

    def __init__(self, sink: Sink, buffers: WriteBuffers) -> None:
        self._sink = sink
        self._buffers = buffers
        self.position = 0

    @property
    def room_bytes(self) -> int:
        """The most that one `buffer` holds."""
        return self._buffers.size_bytes

    def buffer(self) -> memoryview:
        """A buffer to fill and pass to `append`."""
        return self._buffers.take(self._sink)

    def append(self, buffer: memoryview, num_bytes: int) -> None:
        """Write the first bytes of a buffer that came from `buffer`, which is not touched afterwards."""
        self._sink.submit(buffer[:num_bytes], lambda: self._buffers.give_back(buffer))
        self.position += num_bytes

    def write(self, content: bytes) -> None:
        """Write bytes that do not change afterwards."""
        if content:
            self._sink.submit(memoryview(content))
            self.position += len(content)
