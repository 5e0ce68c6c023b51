"""Memory, buffers and threads of the pipelines.

Buffers go FREE -> FILLING -> READY -> IN_FLIGHT -> FREE, and in no other order. Invariant: a buffer is taken
again only after the storage has released it, so no byte changes between being produced and being written.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from penstock.errors import PenstockError, StorageTimeout, Unavailable, UsageError, WaitTimeout
from penstock.storage.aligned import PAGE_BYTES, address_of, round_up
from penstock.storage.capabilities import no_thread
from penstock.storage.protocol import Release
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.transfer.pipeline import PipelineSettings


class Ownership(Enum):
    """Who may access a buffer: no one, its producer, the next stage, the storage."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"


class PipelineStopped(PenstockError):
    """Another thread failed or the user interrupted: this thread stops, but is not the cause."""

    def __init__(self) -> None:
        super().__init__("Stopped because the pipeline stopped")


class Buffer:
    """One buffer, and which chunk of which object it holds. Only its current owner may access it."""

    __slots__ = ("chunk", "job", "offset", "ownership", "release", "size_bytes", "stream", "whole")

    def __init__(self, whole: memoryview) -> None:
        self.whole = whole
        self.ownership = Ownership.FREE
        self.release: Release | None = None
        self.stream = 0
        self.job = 0
        self.chunk = 0
        self.offset = 0
        self.size_bytes = 0

    @property
    def filled(self) -> memoryview:
        """The part that holds the chunk: everything, except for an object's last chunk."""
        return self.whole if self.size_bytes == len(self.whole) else self.whole[: self.size_bytes]

    def hand_on(self, come_from: Ownership, go_to: Ownership) -> None:
        """Pass the buffer from its owner to the next."""
        if self.ownership is not come_from:
            raise PenstockError(
                f"A buffer that is {self.ownership.value} was treated as {come_from.value}",
                fix="A storage must release each buffer exactly once; this one does not.",
            )
        self.ownership = go_to


class PipelineBuffers:
    """All buffers of one phase, shared by its streams.

    A stream may take any free buffer as long as every other stream can still get `MIN_BUFFERS_PER_STREAM`, so
    a storage that keeps the buffers of one stream for long cannot starve the others.
    """

    def __init__(self, memory: WarmMemory, settings: PipelineSettings) -> None:
        size_bytes = settings.chunk_bytes
        spaced_bytes = round_up(size_bytes, PAGE_BYTES)
        starts = range(0, settings.buffer_memory_bytes - size_bytes + 1, spaced_bytes)
        self.all = tuple(Buffer(memory.view[start : start + size_bytes]) for start in starts)
        self._free = list(reversed(self.all))
        self._held = [0] * settings.streams
        self._changed = threading.Condition()
        self._silence_s = settings.silence_s
        self._is_stopped = False
        self._last_return_s: float | None = None

    def take(self, stream: int, awaiting: str) -> Buffer:
        """Wait for a free buffer and make it FILLING. `awaiting` says in errors what holds the others."""
        with self._changed:
            while not self._may_take(stream):
                self._wait(awaiting)
            if self._is_stopped:
                raise PipelineStopped
            buffer = self._free.pop()
            self._held[stream] += 1
            buffer.stream = stream
            buffer.hand_on(Ownership.FREE, Ownership.FILLING)
            return buffer

    def give_back(self, buffer: Buffer, come_from: Ownership) -> None:
        """Make `buffer` free again; called once, from any thread."""
        with self._changed:
            buffer.hand_on(come_from, Ownership.FREE)
            self._held[buffer.stream] -= 1
            self._free.append(buffer)
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def expect_returns(self) -> None:
        """From now on buffers are being returned, so if none is for `silence_s`, something is dead."""
        with self._changed:
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def stop(self) -> None:
        """Make all present and future `take` calls raise `PipelineStopped`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def retire(self, stream: int) -> None:
        """Free what is reserved for a stream that takes no more buffers."""
        with self._changed:
            self._held[stream] += len(self.all)
            self._changed.notify_all()

    def _may_take(self, stream: int) -> bool:
        if self._is_stopped:
            return True
        reserved = sum(
            max(0, MIN_BUFFERS_PER_STREAM - held) for other, held in enumerate(self._held) if other != stream
        )
        least = 0 if self._held[stream] < MIN_BUFFERS_PER_STREAM else reserved
        return len(self._free) > least

    def _wait(self, awaiting: str) -> None:
        if self._last_return_s is None:
            self._changed.wait()
            return
        left_s = self._last_return_s + self._silence_s - time.monotonic()
        if left_s <= 0:
            raise StorageTimeout(
                f"{awaiting} held all {len(self.all)} buffers for {self._silence_s:g} s and released none",
                fix="Check the server's load; use fewer parts in flight, or more buffer memory.",
            )
        self._changed.wait(left_s)


MIN_BUFFERS_PER_STREAM = 2
"""One buffer with the storage and one being filled: with fewer, one side always waits for the other."""


class WorkerGroup:
    """Up to `num_threads` threads; when one fails it calls `stop`, which must make the others end soon."""

    def __init__(self, num_threads: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-pipe")
        self._started: list[Future[None]] = []
        self._is_closed = False

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Run `work` in a thread; `Unavailable` where this process may have no more."""
        if self._is_closed:
            stopped: Future[None] = Future()
            stopped.set_exception(PipelineStopped())
            return stopped
        try:
            future = self._threads.submit(self._run, work, *arguments)
        except RuntimeError as error:
            raise no_thread(error) from error
        self._started.append(future)
        return future

    def wait(self, futures: Sequence[Future[None]], awaited: str, timeout_s: float | None = None) -> None:
        """Return when `futures` are done; raises the failure of any thread of the group."""
        if wait_for(futures, timeout=timeout_s).not_done:
            raise WaitTimeout(awaited, timeout_s or 0.0)
        if any(future.done() and future.exception() for future in self._started):
            # It may have stopped because of another thread, whose future is not done yet.
            wait_for(self._started)
            failures = [error for future in self._started if (error := future.exception())]
            causes = [error for error in failures if not isinstance(error, PipelineStopped)]
            raise (causes or failures)[0]

    def close(self) -> None:
        """Stop all threads and wait for them, also where stopping fails: they use memory of the next save."""
        try:
            self._stop()
        finally:
            self._is_closed = True
            self._threads.shutdown(wait=True)
            # `stop` belongs to the object that owns this group: keeping it would make a reference cycle.
            self._stop = lambda: None

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        with ExitStack() as undo:
            undo.callback(self._stop)
            work(*arguments)
            undo.pop_all()


logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20


class WarmMemory:
    """`size_bytes` of memory that begins at a huge page. Its first touch takes seconds per GiB, so reuse it.

    It has one user at a time, and is freed with the last view of it. Forked processes have the same memory if
    it `is_shared`, else a copy, made when either side writes; pinned pages must not be copied so.
    """

    def __init__(self, size_bytes: int, *, is_shared: bool = False) -> None:
        self.size_bytes = round_up(size_bytes, PAGE_BYTES)
        sharing = mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE
        # Up to the end of the last huge page, because only whole ones are given.
        mapped_bytes = round_up(self.size_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
        try:
            pages = mmap.mmap(-1, mapped_bytes, flags=sharing | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise Unavailable(
                f"There is no memory for buffers of {format_bytes(mapped_bytes)}: {error.strerror}",
                fix="Free memory, or raise the job's limit (ulimit -v); staging_bytes is of saves.",
            ) from error
        _ask_for_huge_pages(pages)
        whole = memoryview(pages)
        lead = -address_of(whole) % HUGE_PAGE_BYTES
        self.view = whole[lead : lead + self.size_bytes]
        self._touched_bytes = 0
        self.is_pinned = False
        """Whether devices can copy to and from it by DMA; see `pin_memory`."""

    def touch(self, size_bytes: int | None = None) -> None:
        """Make the first `size_bytes`, or all, resident. What was touched before costs nothing."""
        end = self.size_bytes if size_bytes is None else min(size_bytes, self.size_bytes)
        if end > self._touched_bytes:
            # One byte per page is enough. A strided fill releases the GIL; madvise(POPULATE) would hold it.
            np.frombuffer(self.view[self._touched_bytes : end], dtype=np.uint8)[::PAGE_BYTES] = 0
            self._touched_bytes = end


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError) as error:
        logger.info("Huge pages are not available, so direct I/O takes more CPU time: %s", error)


class StagingMemory:
    """Lends memory to saves in any thread; each loan is returned with `give_back`.

    Without a budget no save waits for another. A forked process can read what is written to memory that
    `is_shared`, which is then not copied.
    """

    def __init__(self, budget_bytes: int | None, *, is_shared: bool = False) -> None:
        self.budget_bytes = sys.maxsize if budget_bytes is None else budget_bytes
        self._has_budget = budget_bytes is not None
        self._is_shared = is_shared
        self._idle: list[WarmMemory] = []
        self._lent_bytes = 0
        self._changed = threading.Condition()

    def borrow(self, size_bytes: int, timeout_s: float) -> WarmMemory:
        """At least `size_bytes`, warm if it was used before; waits for earlier saves."""
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
        # No idle memory is large enough: the longest idle is freed to make room for a new one.
        needed_bytes = self._lent_bytes + size_bytes
        limit_bytes = self.budget_bytes if self._has_budget else needed_bytes
        while needed_bytes + sum(memory.size_bytes for memory in self._idle) > limit_bytes:
            self._idle.pop(0)
        return WarmMemory(size_bytes, is_shared=self._is_shared)


class Registrar(Protocol):
    """The functions of CUDA's runtime that pin memory. They return 0 or an error number."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:  # noqa: N802 - CUDA's name
        """Pin memory."""

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: N802 - CUDA's name
        """Unpin memory."""


def pin_memory(memory: WarmMemory, registrar: Registrar | None = None) -> bool:
    """Pin `memory` until it is freed; returns whether it is pinned. Takes as long as a first touch.

    Where the system does not allow to pin as much, copies take longer.
    """
    if memory.is_pinned:
        return True
    runtime: Registrar = registrar or _cuda_runtime()
    address = address_of(memory.view)
    error = int(runtime.cudaHostRegister(address, memory.size_bytes, 0))
    if error:
        logger.warning(
            "CUDA error %d: %d bytes of staging memory are not pinned, so copies to and from devices take"
            " longer. Check `ulimit -l`, or stage through less memory: staging_bytes.",
            error,
            memory.size_bytes,
        )
        return False
    memory.is_pinned = True
    weakref.finalize(memory, partial(_unpin, runtime, address, os.getpid()))
    return True


def _cuda_runtime() -> Registrar:
    # The benchmark's pipelines use this module without torch.
    import torch  # noqa: PLC0415

    return torch.cuda.cudart()  # type: ignore[no-untyped-call, no-any-return] # torch leaves it untyped


def _unpin(runtime: Registrar, address: int, pid: int) -> None:
    if os.getpid() != pid:
        # A forked process has the memory, but must not call CUDA.
        return
    error = int(runtime.cudaHostUnregister(address))
    if error:
        logger.warning("CUDA error %d while unpinning staging memory", error)
