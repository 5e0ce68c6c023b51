"""Memory, buffers and threads of the pipelines.

Buffers go FREE -> FILLING -> READY -> IN_FLIGHT -> FREE, and in no other order. Invariant: a buffer is taken
again only after the storage has released it, so no byte changes between being produced and being written.
"""

from __future__ import annotations

import logging
import mmap
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

from penstock.errors import PenstockError, StorageTimeout, WaitTimeout
from penstock.storage.aligned import PAGE_BYTES, address_of, round_up
from penstock.storage.protocol import Release

if TYPE_CHECKING:
    from penstock.checkpoint.saving.pipeline import PipelineSettings


class Ownership(Enum):
    """Who may touch a buffer: nobody, who makes or reads bytes, the next in line, the storage."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"


class PipelineStopped(PenstockError):
    """Another thread failed or the user interrupted: this one gives up, and is not the cause."""

    def __init__(self) -> None:
        super().__init__("Stopped because the phase as a whole stopped")


class Buffer:
    """One buffer, and which chunk of which object it holds. All of it belongs to the present owner."""

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
        """The part that holds bytes: all of it but for an object's last chunk."""
        return self.whole if self.size_bytes == len(self.whole) else self.whole[: self.size_bytes]

    def hand_on(self, come_from: Ownership, go_to: Ownership) -> None:
        """The owner gives the buffer to the next one."""
        if self.ownership is not come_from:
            raise PenstockError(
                f"A buffer that is {self.ownership.value} was treated as {come_from.value}",
                fix="A storage must release each buffer exactly once: this one does not.",
            )
        self.ownership = go_to


class PipelineBuffers:
    """All buffers of one phase, shared by its streams.

    A stream takes what is free as long as every other one can still have `MIN_BUFFERS_PER_STREAM`: a storage
    that keeps buffers for long on one stream cannot starve the others for good.
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
        """A free buffer, FILLING from now on; waits for one. `awaiting` names who keeps the others."""
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
        """`buffer` is free again; any thread may say so, once."""
        with self._changed:
            buffer.hand_on(come_from, Ownership.FREE)
            self._held[buffer.stream] -= 1
            self._free.append(buffer)
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def expect_returns(self) -> None:
        """From now on somebody takes buffers away, so silence means that something is dead."""
        with self._changed:
            self._last_return_s = time.monotonic()
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever takes, or waits to take, gets `PipelineStopped`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def retire(self, stream: int) -> None:
        """Free what is reserved for a stream that takes no more."""
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
                f"{awaiting} kept all {len(self.all)} buffers for {self._silence_s:g} s and let go of none",
                fix="Look at the server's load; have fewer parts in flight, or more buffer memory.",
            )
        self._changed.wait(left_s)


MIN_BUFFERS_PER_STREAM = 2
"""One buffer with the storage and one being filled: with fewer, one side always waits for the other."""


class WorkerGroup:
    """Up to `num_threads` at work; `stop`, called from any of them, makes all others give up soon."""

    def __init__(self, num_threads: int, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-pipe")
        self._started: list[Future[None]] = []

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Have a thread do `work`."""
        future = self._threads.submit(self._run, work, *arguments)
        self._started.append(future)
        return future

    def wait(self, some: Sequence[Future[None]], awaited: str, timeout_s: float | None = None) -> None:
        """Return when `some` are done; raises the failure that any thread of the crew had."""
        late = wait_for(some, timeout=timeout_s).not_done
        if late:
            raise WaitTimeout(awaited, timeout_s or 0.0)
        if any(each.exception() for each in some):
            # They may have stopped for the sake of one whose own end is not noted yet.
            wait_for(self._started)
        failures = [error for each in self._started if each.done() and (error := each.exception())]
        causes = [error for error in failures if not isinstance(error, PipelineStopped)]
        if failures:
            raise (causes or failures)[0]

    def dismiss(self) -> None:
        """Stop all and return when none is at work."""
        self._stop()
        self._threads.shutdown(wait=True)
        # The object that owns the crew is what `stop` belongs to: keeping it would make a cycle.
        self._stop = lambda: None

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        with ExitStack() as undo:
            undo.callback(self._stop)
            work(*arguments)
            undo.pop_all()


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


class Registrar(Protocol):
    """CUDA's runtime, as far as memory of ours is made known to it. Calls return 0, or an error's number."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> int:  # noqa: N802 - CUDA's name
        """Pin memory."""

    def cudaHostUnregister(self, address: int, /) -> int:  # noqa: N802 - CUDA's name
        """Let it go."""


def pin_memory(memory: WarmMemory, registrar: Registrar | None = None) -> bool:
    """Have `memory` pinned until it goes; whether it is. It takes as long as a first touch, once.

    The pool that memory comes from bounds what is pinned. Without leave to pin so much, copies take longer.
    """
    if memory.is_pinned:
        return True
    runtime: Registrar = registrar or _cuda_runtime()
    address = address_of(memory.view)
    error = int(runtime.cudaHostRegister(address, memory.size_bytes, 0))
    if error:
        logger.warning(
            "CUDA error %d: %d bytes of memory for checkpoints are not pinned, so copies to and from devices"
            " take longer. Look at `ulimit -l`, or stage through less memory: staging_bytes.",
            error,
            memory.size_bytes,
        )
        return False
    memory.is_pinned = True
    weakref.finalize(memory, partial(_unpin, runtime, address))
    return True


def _cuda_runtime() -> Registrar:
    # The benchmark's pipelines use this module without torch.
    import torch  # noqa: PLC0415

    return torch.cuda.cudart()  # type: ignore[no-untyped-call, no-any-return] # torch leaves it untyped


def _unpin(runtime: Registrar, address: int) -> None:
    error = int(runtime.cudaHostUnregister(address))
    if error:
        logger.warning("CUDA error %d when memory for checkpoints was let go of", error)
