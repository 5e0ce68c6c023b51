"""Where the pipe's buffers lie: one region of huge pages, touched before it is timed and used again.

Huge pages decide direct I/O: the kernel pins a buffer page by page for each request, and with ordinary pages
that is half of the time (docs/decisions/007). Invariant: a region never moves or grows.
"""

from __future__ import annotations

import logging
import mmap
from typing import Final

import numpy as np

from penstock.storage.aligned import PAGE_BYTES, address_of, round_up

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20


class WarmMemory:
    """`size_bytes` of memory that begins at a huge page. Its first touch costs seconds per GiB: keep it.

    One user at a time. The memory goes with the last view of it.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        pages = mmap.mmap(-1, self.size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _ask_for_huge_pages(pages)
        whole = memoryview(pages)
        lead = -address_of(whole) % HUGE_PAGE_BYTES
        self.view = whole[lead : lead + self.size_bytes]
        self._touched_bytes = 0
        self.is_pinned = False
        """Whether a device copies to and from it by itself; whoever pins it says so."""

    def touch(self, size_bytes: int | None = None) -> None:
        """Have the first `size_bytes`, or all, in memory from now on. What is there already costs nothing."""
        end = self.size_bytes if size_bytes is None else min(size_bytes, self.size_bytes)
        if end > self._touched_bytes:
            # One byte a page is enough; a strided fill runs without the GIL, madvise(POPULATE) would not.
            np.frombuffer(self.view[self._touched_bytes : end], dtype=np.uint8)[::PAGE_BYTES] = 0
            self._touched_bytes = end


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError) as error:
        logger.info("No huge pages here, so direct I/O costs more of the processor: %s", error)
