"""Buffers with owners: FREE -> FILLING -> READY -> IN_FLIGHT -> FREE, the only way round.

All threads of a phase meet here. Invariant: a buffer is taken again only after the storage has let go of it,
so no byte can change between being made and being written; whoever steps out of order gets an error.
"""

from __future__ import annotations

import threading
import time
from enum import Enum
from typing import TYPE_CHECKING

from penstock.checkpoint.pipe.base import MIN_BUFFERS_PER_STREAM
from penstock.errors import PenstockError, StorageTimeout
from penstock.storage.aligned import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from penstock.checkpoint.pipe.base import PipeSettings
    from penstock.checkpoint.pipe.memory import WarmMemory
    from penstock.storage.protocol import Release


class Ownership(Enum):
    """Who may touch a buffer: nobody, who makes or reads bytes, the next in line, the storage."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_FLIGHT = "in flight"


class PipeStopped(PenstockError):
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


class Buffers:
    """All buffers of one phase, shared by its streams.

    A stream takes what is free as long as every other one can still have `MIN_BUFFERS_PER_STREAM`: a storage
    that keeps buffers for long on one stream cannot starve the others for good.
    """

    def __init__(self, memory: WarmMemory, settings: PipeSettings) -> None:
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
                raise PipeStopped
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
        """Whoever takes, or waits to take, gets `PipeStopped`."""
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
