"""Memory for bytes on their way to or from storage: aligned, resident, and pinned if devices copy to it."""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any, Final

import numpy as np

from penstock.errors import Unavailable, UsageError, WaitTimeout
from penstock.storage.aligned import PAGE_BYTES, address_of, round_up
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20


class WarmMemory:
    """`size_bytes` of memory that begins at the boundary of a huge page.

    Touching it for the first time takes seconds per GiB, so reuse it. It has one user at a time, and is freed
    with the last view of it. If it `is_shared`, forked processes use the same memory; otherwise they get a
    copy, made when either side writes. Pinned pages must not be copied in this way.
    """

    def __init__(self, size_bytes: int, *, is_shared: bool = False) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        sharing = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        # Up to the end of the last huge page: the kernel provides only whole ones.
        mapped_bytes = round_up(self.size_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
        try:
            pages = mmap.mmap(-1, mapped_bytes, flags=sharing | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise Unavailable(
                f"There is no memory for buffers of {format_bytes(mapped_bytes)}: {error.strerror}",
                fix="Free memory, or raise the job's limit (ulimit -v); staging_bytes limits what saves use.",
            ) from error
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError) as error:
            logger.info("Huge pages are not available, so direct I/O takes more CPU time: %s", error)
        whole = memoryview(pages)
        lead = -address_of(whole) % HUGE_PAGE_BYTES
        self.view = whole[lead : lead + self.size_bytes]
        self._touched_bytes = 0
        self.is_pinned = False
        """True if devices can copy to and from this memory by DMA; see `pin_memory`."""

    def touch(self, size_bytes: int | None = None) -> None:
        """Make the first `size_bytes`, or all, resident. Memory that is already resident costs nothing."""
        end = self.size_bytes if size_bytes is None else min(size_bytes, self.size_bytes)
        if end > self._touched_bytes:
            # One byte per page is enough. A strided fill releases the GIL, whereas madvise(POPULATE) would
            # hold it.
            np.frombuffer(self.view[self._touched_bytes : end], dtype=np.uint8)[::PAGE_BYTES] = 0
            self._touched_bytes = end


class StagingMemory:
    """Lends memory to saves in any thread; each loan is returned with `give_back`.

    Without a budget, no save waits for another. If the memory `is_shared`, a forked process sees what is
    written to it without a copy.
    """

    def __init__(self, budget_bytes: int | None, *, is_shared: bool = False) -> None:
        self.budget_bytes = sys.maxsize if budget_bytes is None else budget_bytes
        self._has_budget = budget_bytes is not None
        self._is_shared = is_shared
        self._idle: list[WarmMemory] = []
        self._lent_bytes = 0
        self._changed = threading.Condition()

    def borrow(self, size_bytes: int, timeout_s: float) -> WarmMemory:
        """Lend at least `size_bytes`, after waiting for earlier saves if necessary.

        Memory that was used before is already resident.
        """
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        if size_bytes > self.budget_bytes:
            raise UsageError(
                f"{size_bytes} bytes do not fit into staging_bytes={self.budget_bytes}",
                fix="Raise staging_bytes, or use fewer writers.",
            )
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (memory := self._find(size_bytes)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    raise WaitTimeout("an earlier save to give back its staging memory", timeout_s)
            self._lent_bytes += memory.size_bytes
            return memory

    def give_back(self, memory: WarmMemory) -> None:
        """Make `memory` available to other saves."""
        with self._changed:
            self._lent_bytes -= memory.size_bytes
            self._idle.append(memory)
            self._changed.notify_all()

    def clear(self) -> None:
        """Free all idle memory."""
        with self._changed:
            self._idle.clear()

    def _find(self, size_bytes: int) -> WarmMemory | None:
        fitting = [memory for memory in self._idle if memory.size_bytes >= size_bytes]
        if fitting:
            smallest = min(fitting, key=lambda memory: memory.size_bytes)
            self._idle.remove(smallest)
            return smallest
        if self._lent_bytes + size_bytes > self.budget_bytes:
            return None
        # No idle memory is large enough: the memory that has been idle longest makes room for new memory.
        needed_bytes = self._lent_bytes + size_bytes
        limit_bytes = self.budget_bytes if self._has_budget else needed_bytes
        while needed_bytes + sum(memory.size_bytes for memory in self._idle) > limit_bytes:
            self._idle.pop(0)
        return WarmMemory(size_bytes, is_shared=self._is_shared)


def pin_memory(memory: WarmMemory, registrar: Any = None) -> bool:
    """Pin `memory` until it is freed, and return whether it is pinned. Takes as long as `touch`.

    If the system does not allow that much pinned memory, copies take longer. `registrar` is CUDA's runtime.
    """
    if memory.is_pinned:
        return True
    if registrar is None:
        # The benchmark's pipelines use this module without torch.
        import torch  # noqa: PLC0415

        registrar = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch leaves it untyped
    address = address_of(memory.view)
    error = int(registrar.cudaHostRegister(address, memory.size_bytes, 0))
    if error:
        logger.warning(
            "CUDA error %d: %d bytes of staging memory are not pinned, so copies to and from devices take"
            " longer. Check `ulimit -l`, or lower staging_bytes.",
            error,
            memory.size_bytes,
        )
        return False
    memory.is_pinned = True
    weakref.finalize(memory, partial(_unpin, registrar, address, os.getpid()))
    return True


def _unpin(registrar: Any, address: int, pid: int) -> None:
    if os.getpid() != pid:
        # A forked process has the memory, too, but must not call CUDA.
        return
    error = int(registrar.cudaHostUnregister(address))
    if error:
        logger.warning("CUDA error %d while unpinning staging memory", error)
