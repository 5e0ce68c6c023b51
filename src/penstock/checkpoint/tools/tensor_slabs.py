"""Tensors as slabs (runs of elements in row-major order), read from any format and appended to a file.

Invariant: the slabs of a tensor, one after another, are all of its bytes; only the buffers need memory,
however large a tensor or file is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np

from penstock.checkpoint.formats.checkpoint_source import CheckpointSource, locate_payloads
from penstock.checkpoint.state.regions import Ints, TensorFacts
from penstock.cluster.comm import SoloComm
from penstock.errors import DataDamaged
from penstock.storage.protocol import Sink, Source
from penstock.transfer.buffers import WarmMemory

Pieces = Iterator[tuple[int, Callable[[memoryview], None]]]
"""Consecutive pieces of bytes: the size of each, and a function that fills a buffer with it."""
Slab = tuple[tuple[int, ...], int, int]
"""Prefix, begin, end: a range of dimension `len(prefix)`, with fixed indices in the dimensions before it."""


def cut_into_slabs(shape: Sequence[int], element_bytes: int, most_bytes: int) -> Iterator[tuple[Slab, int]]:
    """Cut a tensor into slabs, in row-major order, each with its size in bytes. A scalar is one slab."""
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
            end = min(begin + step, shape[dim])
            yield (prefix, begin, end), (end - begin) * inner


class SlabReader:
    """Reads the elements of a checkpoint's tensors as slabs. For use by one thread; must be closed."""

    def __init__(self, checkpoint: CheckpointSource) -> None:
        self._checkpoint = locate_payloads(checkpoint, SoloComm())
        self._storage = checkpoint.storage_of_files()
        self._sources: dict[int, Source] = {}
        self._decoded: tuple[int, memoryview] | None = None
        tensor = checkpoint.index.stored.regions.tensor
        self._order = np.argsort(tensor, kind="stable")
        self._first = np.searchsorted(tensor[self._order], np.arange(len(checkpoint.index.tensors) + 1))

    def rows(self, tensor: int) -> Ints:
        """Return the rows of a tensor's stored regions."""
        return np.asarray(self._order[self._first[tensor] : self._first[tensor + 1]])

    def require_whole(self, tensor: int) -> None:
        """Raise `DataDamaged` unless all elements of a tensor are stored exactly once."""
        facts = self._checkpoint.index.tensors[tensor]
        num_stored = int(self._checkpoint.index.stored.regions.take(self.rows(tensor)).num_elements.sum())
        if num_stored != math.prod(facts.shape):
            raise DataDamaged(
                f"{num_stored} elements of {facts.name} are stored, but it has {math.prod(facts.shape)}",
                where=self._checkpoint.uri,
            )

    def read_slab(self, tensor: int, slab: Slab, target: memoryview) -> None:
        """Fill `target`, which must be as long as the slab."""
        facts, regions = self._checkpoint.index.tensors[tensor], self._checkpoint.index.stored.regions
        prefix, first, last = slab
        dim, shape = len(prefix), facts.shape or (1,)
        element = np.dtype({16: "c16"}.get(facts.element_bytes, f"u{facts.element_bytes}"))
        whole = np.frombuffer(target, dtype=element).reshape(last - first, *shape[dim + 1 :])
        for row in self.rows(tensor).tolist():
            offsets, sizes = regions.region(row, len(shape))
            # The columns of tensors without dimensions may be empty.
            offsets, sizes = offsets or (0,), sizes or (1,)
            begin, end = max(first, offsets[dim]), min(last, offsets[dim] + sizes[dim])
            local = [index - offset for index, offset in zip(prefix, offsets, strict=False)]
            if begin >= end or not all(0 <= index < size for index, size in zip(local, sizes, strict=False)):
                continue
            # The row-major position of the first element within the region.
            start = 0
            for coordinate, size in zip((*local, begin - offsets[dim]), sizes, strict=False):
                start = start * size + coordinate
            start *= math.prod(sizes[dim + 1 :]) * facts.element_bytes
            inside = (slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            part = whole[(slice(begin - first, end - first), *tuple(inside)[dim + 1 :])]
            direct = part if part.flags.c_contiguous else np.empty(part.shape, dtype=part.dtype)
            self.read_payload(row, start, direct.reshape(-1).view(np.uint8).data)
            if direct is not part:
                part[...] = direct

    def read_payload(self, row: int, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a region's elements from offset `start` onward."""
        index = self._checkpoint.index
        stored, number = index.stored, int(index.stored.file[row])
        if number not in self._sources:
            self._sources[number] = self._storage.open(self._checkpoint.key(index.files[number]))
        source = self._sources[number]
        if not stored.packed[row]:
            source.read_into(int(stored.payload_offset[row]) + start, target)
            return
        # The item can only be read as a whole. The last one is kept, because slabs of one tensor are
        # consecutive.
        if self._decoded is None or self._decoded[0] != row:
            self._decoded = None
            item = bytearray(int(stored.item_bytes[row]))
            source.read_into(int(stored.item_offset[row]), memoryview(item))
            self._decoded = (row, self._checkpoint.tensor_bytes(row, item))
        target[:] = self._decoded[1][start : start + len(target)]

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()


BUFFER_BYTES: Final = 8 << 20
NUM_BUFFERS: Final = 6
_POLL_S: Final = 1.0


class Appender:
    """Appends to one sink after another through buffers that are kept.

    `position` is where the next byte goes.
    """

    def __init__(
        self,
        advance: Callable[[int], None] = lambda _: None,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self._advance = advance
        self._buffer_bytes = buffer_bytes
        memory = WarmMemory(buffer_bytes * num_buffers)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for start in range(0, buffer_bytes * num_buffers, buffer_bytes):
            self._free.put(memory.view[start : start + buffer_bytes])
        self._sink: Sink | None = None
        self.position = 0

    @contextmanager
    def writing(self, sink: Sink) -> Iterator[None]:
        """Append to `sink` in this block. The block's end finishes the sink; an error aborts it."""
        self._sink, self.position = sink, 0
        with ExitStack() as undo:
            undo.callback(sink.abort)
            yield
            sink.finish()
            undo.pop_all()

    def write(self, content: bytes) -> None:
        """Write bytes that will not change afterwards."""
        assert self._sink is not None, "a sink is being written"
        if content:
            self._sink.submit(memoryview(content))
            self.position += len(content)

    def copy(
        self,
        pieces: Pieces,
        look: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """Write all pieces; `look` receives their bytes in order."""
        assert self._sink is not None, "a sink is being written"
        for num_bytes, read in pieces:
            while True:
                try:
                    buffer = self._free.get(timeout=_POLL_S)
                    break
                except Empty:
                    # Raises the sink's error, if that is why no buffer becomes free.
                    self._sink.submit(memoryview(b""))
            read(buffer[:num_bytes])
            look(buffer[:num_bytes])
            self._sink.submit(buffer[:num_bytes], partial(self._free.put, buffer))
            self.position += num_bytes
            self._advance(num_bytes)

    def slabs_of(self, reader: SlabReader, tensor: int, facts: TensorFacts) -> Pieces:
        """Return all elements of one tensor as pieces for `copy`."""
        reader.require_whole(tensor)
        for slab, num_bytes in cut_into_slabs(facts.shape, facts.element_bytes, self._buffer_bytes):
            yield num_bytes, partial(reader.read_slab, tensor, slab)

    def pieces_of(self, num_bytes: int, read: Callable[[int, memoryview], None]) -> Pieces:
        """Yield `num_bytes` bytes as pieces for `copy`; `read` fills a buffer from an offset onward."""
        for begin in range(0, num_bytes, self._buffer_bytes):
            yield min(self._buffer_bytes, num_bytes - begin), partial(read, begin)
