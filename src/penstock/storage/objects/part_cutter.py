"""How an object is cut into parts, and how the buffers that make up a part return to their owners.

All parts of an upload have the same size except the last, which every S3 service accepts. Invariant: an
owner's `release` is called exactly once, when the last piece of its buffer is no longer needed.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from penstock.storage.protocol import Counters, Release


MIN_PART_BYTES: Final = 5 * 1024 * 1024
MAX_PART_BYTES: Final = 5 * 1024**3
MAX_PARTS: Final = 10_000


def choose_part_bytes(target_bytes: int, first_buffer_bytes: int, size_bytes: int | None) -> int:
    """The part size for an object whose first buffer has `first_buffer_bytes`; `size_bytes` if known.

    It is the smallest that fits 10,000 parts or `target_bytes`, whichever is more; but where buffers of the
    first one's size divide into equal parts of between half and twice that, such a part: nothing is copied
    then.
    """
    least_bytes = max(MIN_PART_BYTES, -(-(size_bytes or 0) // MAX_PARTS))
    target_bytes = min(max(target_bytes, least_bytes), MAX_PART_BYTES)
    if first_buffer_bytes == size_bytes:
        return target_bytes
    nearest = max(1, round(first_buffer_bytes / target_bytes))
    for step in range(nearest + 1):
        for pieces in (nearest + step, nearest - step):
            if pieces < 1 or first_buffer_bytes % pieces:
                continue
            part_bytes = first_buffer_bytes // pieces
            fits = (
                max(least_bytes, -(-target_bytes // 2)) <= part_bytes <= min(2 * target_bytes, MAX_PART_BYTES)
            )
            if fits:
                return part_bytes
    return target_bytes


def split_range(offset: int, length: int, range_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the requests that together read `length` bytes from `offset`."""
    for start in itertools.takewhile(lambda start: start < length, itertools.count(0, range_bytes)):
        yield offset + start, min(range_bytes, length - start)


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
class UploadPart:
    """A piece of the object for one request; `let_go` says that its bytes are no longer needed."""

    content: memoryview
    let_go: Callable[[], None]


class PartCutter:
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
        self._rest: UploadPart | None = None

    def cut(self, view: memoryview, shared: SharedRelease, *, ends_object: bool) -> Iterator[UploadPart]:
        """The parts that `view` completes; `ends_object` promises that it is the last buffer."""
        while view:
            if self._filled_bytes == 0 and ends_object and self._is_single:
                self._rest = UploadPart(view, shared.hold())
                return
            is_part = len(view) >= self.part_bytes or ends_object
            if self._filled_bytes == 0 and is_part and not self._is_single:
                yield UploadPart(view[: self.part_bytes], shared.hold())
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

    def _take_gathered(self) -> UploadPart:
        buffer, self._filling = self._filling, None
        size_bytes, self._filled_bytes = self._filled_bytes, 0
        assert buffer is not None
        return UploadPart(buffer[:size_bytes], lambda: self._buffers.give_back(buffer))

    def rest(self) -> UploadPart | None:
        """What is left when the object ends: the last part, or all of a single one; None if nothing is."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        return self._take_gathered() if self._filled_bytes else None
