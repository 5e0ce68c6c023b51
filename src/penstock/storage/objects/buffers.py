"""Buffers on their way into an upload: cut into parts, and given back to their owners.

Invariant: an owner's `release` is called exactly once, when the last piece of its buffer is done with.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.storage.base import Release
    from penstock.storage.counters import Counters

GATHER_COPY = "objects-gather"
"""Name under which copies of buffers that are no whole parts are accounted."""


class SharedRelease:
    """Calls `release` once as many holders let go as have taken hold; `force` does not wait for them."""

    def __init__(self, release: Release | None) -> None:
        self._release = release
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> Callable[[], None]:
        """One more holder; what it calls to let go, once."""
        with self._lock:
            self._holders += 1
        return self.let_go

    def let_go(self) -> None:
        """A holder is done. The first one is the maker of this object."""
        with self._lock:
            self._holders -= 1
            due = self._release if self._holders <= 0 else None
            if due is not None:
                self._release = None
        if due is not None:
            due()

    def force(self) -> None:
        """Release now: whoever still holds will never publish what it read."""
        with self._lock:
            due, self._release = self._release, None
        if due is not None:
            due()


class GatherBuffers:
    """Part-sized memory for pieces that are too small to be parts; reused, so as many as are in flight."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def take(self) -> memoryview:
        """A free buffer, warm if there is one."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return np.empty(self.size_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """`buffer` may be taken again."""
        self._free.put(buffer)


def flat_bytes(buffer: memoryview) -> memoryview:
    """`buffer` as one row of bytes, as a view of its own."""
    return buffer[:] if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


@dataclass(slots=True)
class Part:
    """A piece of the object for one request; `let_go` says that its bytes are no longer needed."""

    content: memoryview
    let_go: Callable[[], None]


class Cutter:
    """Cuts submitted buffers into parts of exactly `part_bytes`; what is no whole part is gathered into one.

    An object that `is_single` is never sent in parts: all of it is the `rest`, uncopied if it came in one
    buffer.
    """

    def __init__(self, part_bytes: int, counters: Counters, *, is_single: bool) -> None:
        self.part_bytes = part_bytes
        self._is_single = is_single
        self._counters = counters
        self._buffers = GatherBuffers(part_bytes)
        self._filling: memoryview | None = None
        self._filled_bytes = 0
        self._rest: Part | None = None

    def cut(self, view: memoryview, shared: SharedRelease, *, ends_object: bool) -> Iterator[Part]:
        """The parts that `view` completes; `ends_object` promises that it is the last buffer."""
        while view:
            if self._filled_bytes == 0 and ends_object and self._is_single:
                self._rest = Part(view, shared.hold())
                return
            is_part = len(view) >= self.part_bytes or ends_object
            if self._filled_bytes == 0 and is_part and not self._is_single:
                yield Part(view[: self.part_bytes], shared.hold())
                view = view[self.part_bytes :]
            else:
                view = view[self._gather(view) :]
                if self._filled_bytes == self.part_bytes and not self._is_single:
                    yield self._take_gathered()

    def _gather(self, view: memoryview) -> int:
        if self._filling is None:
            self._filling = self._buffers.take()
        taken = min(len(view), self.part_bytes - self._filled_bytes)
        room = self._filling[self._filled_bytes : self._filled_bytes + taken]
        np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(view[:taken], np.uint8))
        self._filled_bytes += taken
        self._counters.add_copy(GATHER_COPY, taken)
        return taken

    def _take_gathered(self) -> Part:
        buffer, self._filling = self._filling, None
        size_bytes, self._filled_bytes = self._filled_bytes, 0
        assert buffer is not None
        return Part(buffer[:size_bytes], lambda: self._buffers.give_back(buffer))

    def rest(self) -> Part | None:
        """What is left when the object ends: the last part, or all of a single one; None if nothing is."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        return self._take_gathered() if self._filled_bytes else None
