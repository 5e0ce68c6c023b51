"""Page-aligned, resident, reusable buffers, and the fast way to copy between buffers.

Used by direct I/O, the probe and the checkpoint pipeline. Invariant: every buffer begins at a page boundary,
and its pages are in memory before it is returned.
"""

import mmap
import threading
from collections import deque
from typing import cast

import numpy as np

from penstock.errors import Unavailable

PAGE_BYTES = mmap.PAGESIZE
FEW_BYTES = 4096
"""Up to this size, a plain assignment is faster than `copy_bytes`."""


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return a writable buffer of `size_bytes` zeros at a page boundary, freed with its last view."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    try:
        pages = mmap.mmap(-1, round_up(max(size_bytes, 1), PAGE_BYTES), flags=flags)
    except OSError as error:
        raise Unavailable(
            f"There is no memory for a buffer of {size_bytes:,} bytes: {error.strerror}",
            fix="Free memory, or raise the job's limit (ulimit -v).",
        ) from error
    return memoryview(pages)[:size_bytes]


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def flat(buffer: memoryview) -> memoryview:
    """Return `buffer` as plain bytes, without a copy, whatever its item type and shape."""
    if buffer.format == "B" and buffer.ndim == 1:
        return buffer
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


def address_of(buffer: memoryview) -> int:
    """Return the memory address of `buffer`."""
    if not buffer.nbytes:
        return 0
    return cast("int", np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy `source` to `target`, of equal length, without the GIL: four times as fast as assigning slices."""
    if source.nbytes:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


class BufferPool:
    """Aligned buffers of one size, taken and given back by any thread.

    Taking never waits, so writers that each hold a buffer cannot deadlock. At most `num_kept` idle buffers
    stay in memory; callers limit the number in use.
    """

    def __init__(self, size_bytes: int, num_kept: int) -> None:
        self.size_bytes = size_bytes
        self._idle: deque[memoryview] = deque(maxlen=num_kept)
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        """Take a buffer, whose content is arbitrary."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return aligned_buffer(self.size_bytes)

    def give_back(self, buffer: memoryview) -> None:
        """Return `buffer`, exactly as `take` returned it, to the pool."""
        with self._lock:
            self._idle.append(buffer)
