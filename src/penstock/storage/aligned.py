"""Page-aligned, pre-faulted buffers, made once and used again, and the fast way to copy between buffers.

Direct I/O, the probe and the checkpoint pipe take their buffers here. Invariant: every buffer begins at
a page, is a whole number of pages long underneath, and its pages are in memory before it is handed out.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import cast

import numpy as np

PAGE_BYTES = mmap.PAGESIZE


def aligned_buffer(size_bytes: int) -> memoryview:
    """A writable buffer of `size_bytes` zeros at a page boundary; its memory goes with its last view."""
    pages = mmap.mmap(
        -1,
        round_up(max(size_bytes, 1), PAGE_BYTES),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE,
    )
    return memoryview(pages)[:size_bytes]


def round_up(number: int, step: int) -> int:
    """The least multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def flat(buffer: memoryview) -> memoryview:
    """`buffer` as plain bytes, without a copy, whatever its items and shape were."""
    if buffer.format == "B" and buffer.ndim == 1:
        return buffer
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


def address_of(buffer: memoryview) -> int:
    """Where `buffer` begins in memory."""
    if not buffer.nbytes:
        return 0
    return cast("int", np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` over `target` of the same length, four times as fast as slices do, without the GIL."""
    if source.nbytes:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class BufferPool:
    """Warm aligned buffers of one size, taken and given back from any thread.

    Taking never waits, so it cannot deadlock between writers that each hold one: at most `num_kept`
    idle buffers stay in memory, and what is in use is bounded by its users.
    """

    def __init__(self, size_bytes: int, num_kept: int) -> None:
        self.size_bytes = size_bytes
        self._idle: deque[memoryview] = deque(maxlen=num_kept)
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        """A buffer with whatever content its last user left."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return aligned_buffer(self.size_bytes)

    def give_back(self, buffer: memoryview) -> None:
        """Offer `buffer`, whole, to the next user."""
        with self._lock:
            self._idle.append(buffer)
