"""Warm, page-aligned blocks whose bytes no storage can shrink: random, and no 4 KiB twice.

A block is filled once and stamped afresh before each write: making content costs nothing while timing.
"""

from __future__ import annotations

import mmap
from itertools import count
from typing import Final

import numpy as np

_STAMPED_BYTES: Final = 4096
"""The smallest unit that storage systems compare when they look for duplicates."""


class Blocks:
    """`num_blocks` blocks of `block_bytes` each, for one stream on one thread."""

    def __init__(self, num_blocks: int, block_bytes: int, *, stream_id: int) -> None:
        self._memory = mmap.mmap(-1, num_blocks * _whole_pages(block_bytes))
        random = np.random.Generator(np.random.SFC64(stream_id))
        words = np.frombuffer(self._memory, dtype=np.uint64)
        words[:] = random.integers(0, 2**64, size=words.size, dtype=np.uint64)
        self._words = words.reshape(num_blocks, -1)
        self._views = [memoryview(row).cast("B")[:block_bytes] for row in self._words]  # type: ignore[arg-type]
        self._stamps = (np.uint64(stream_id + 1) << np.uint64(48)) + np.arange(
            self._words.shape[1] // (_STAMPED_BYTES // 8), dtype=np.uint64
        )
        self._next_stamp = count(0, self._stamps.size)

    def __len__(self) -> int:
        return len(self._views)

    def view(self, index: int) -> memoryview:
        """Block `index` as it is: the buffer to read into."""
        return self._views[index]

    def renew(self, index: int) -> memoryview:
        """Block `index` with content that was never written before by this stream."""
        self._words[index, :: _STAMPED_BYTES // 8] = self._stamps + np.uint64(next(self._next_stamp))
        return self._views[index]


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _STAMPED_BYTES) * _STAMPED_BYTES
