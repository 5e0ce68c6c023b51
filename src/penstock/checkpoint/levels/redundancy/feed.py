"""The bytes of a rank's files on their way to storage, for whoever wants to see them without reading files.

`FedStorage` stands before a storage while a save writes through it, and shows each buffer to a `ByteFeed`, in
the order in which buffers arrive. Files that a program has written itself are read once, for their checksums,
and seen then. Invariant: a buffer is released when both the storage and the feed's reader are done with it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import StorageError
from penstock.storage.aligned import copy_bytes, flat
from penstock.storage.protocol import (
    Release,
    Sink,
    Source,
    Storage,
    WrappedSink,
    WrappedSource,
    WrappedStorage,
)

if TYPE_CHECKING:
    from penstock.checkpoint.formats.manifest import WrittenFile
    from penstock.checkpoint.levels.redundancy.redundancy_record import Order
    from penstock.storage import ObjectInfo


@dataclass(slots=True)
class _Arrival:
    """What is unread of a buffer."""

    content: memoryview
    release: Release


class ByteFeed:
    """An endless sequence of bytes: those that any thread puts in, and zeros after `close` or `abandon`.

    One thread takes them, at most as many at once as fit into `gathered`.
    """

    def __init__(self, gathered: memoryview) -> None:
        self._changed = threading.Condition()
        self._arrived: deque[_Arrival] = deque()
        self._read: deque[Release] = deque()
        self._gathered = gathered
        self._is_closed = self._is_abandoned = False
        self._extents: list[tuple[str, int]] = []

    def put(self, key: str, content: memoryview, release: Release) -> None:
        """Add the next bytes of a file; `release` is called once they were taken, or nobody will."""
        if content.nbytes:
            with self._changed:
                if self._extents and self._extents[-1][0] == key:
                    self._extents[-1] = key, self._extents[-1][1] + content.nbytes
                else:
                    self._extents.append((key, content.nbytes))
                if not self._is_abandoned:
                    self._arrived.append(_Arrival(content, release))
                    self._changed.notify_all()
                    return
        release()

    def take(self, size_bytes: int) -> memoryview:
        """The next `size_bytes`, waiting for them; unchanged until `release_taken`."""
        first = self._await_unread()
        if first is not None and first.content.nbytes >= size_bytes:
            return self._cut(first, size_bytes)
        block = self._gathered[:size_bytes]
        filled = 0
        while filled < size_bytes and (arrival := self._await_unread()) is not None:
            part = self._cut(arrival, min(size_bytes - filled, arrival.content.nbytes))
            copy_bytes(block[filled : filled + part.nbytes], part)
            filled += part.nbytes
            self.release_taken()
        np.frombuffer(block[filled:], np.uint8)[:] = 0
        return block

    def release_taken(self) -> None:
        """Release the buffers of which everything was taken."""
        while self._read:
            self._read.popleft()()

    def close(self) -> None:
        """Nothing more will be put in."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Release everything: nobody will take it, or the save has failed. May be called twice."""
        with self._changed:
            self._is_abandoned = True
            left = list(self._arrived)
            self._arrived.clear()
            self._changed.notify_all()
        for arrival in left:
            arrival.release()

    def order_of(self, files: Sequence[WrittenFile], keys: Sequence[str]) -> Order:
        """In which order the bytes of these files came; `StorageError` if they were not all seen once."""
        numbers = {key: number for number, key in enumerate(keys)}
        seen: Counter[str] = Counter()
        for key, length in self._extents:
            seen[key] += length
        for key, file in zip(keys, files, strict=True):
            if seen.pop(key, 0) != file.size_bytes:
                raise StorageError(
                    f"Parity has not seen the {file.size_bytes} bytes of {file.name} once, in their order",
                    uri=key,
                    fix="Write each file of a save once, from its beginning to its end.",
                )
        if seen:
            raise StorageError("A save wrote a file that it does not name", uri=next(iter(seen)))
        order = tuple((numbers[key], length) for key, length in self._extents)
        return () if [number for number, _ in order] == sorted({number for number, _ in order}) else order

    def _await_unread(self) -> _Arrival | None:
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._is_closed or self._is_abandoned)
            return self._arrived[0] if self._arrived else None

    def _cut(self, arrival: _Arrival, size_bytes: int) -> memoryview:
        part = arrival.content[:size_bytes]
        with self._changed:
            arrival.content = arrival.content[size_bytes:]
            if not arrival.content.nbytes and self._arrived and self._arrived[0] is arrival:
                self._arrived.popleft()
                self._read.append(arrival.release)
        return part


class _SecondRelease:
    """Calls `release` when it is called for the second time."""

    def __init__(self, release: Release | None) -> None:
        self._release = release
        self._first = threading.Lock()
        self.done = threading.Event()

    def __call__(self) -> None:
        if not self._first.acquire(blocking=False):
            if self._release is not None:
                self._release()
            self.done.set()


class FedStorage(WrappedStorage):
    """A storage whose new objects, and those that are read from beginning to end, are shown to a feed."""

    def __init__(self, inside: Storage, feed: ByteFeed) -> None:
        super().__init__(inside)
        self._feed = feed

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin an object."""
        return _FedSink(super().create(key, size_bytes), self._feed, key)

    def open(self, key: str) -> Source:
        """Open an object that is read once."""
        return _FedSource(super().open(key), self._feed, key)


class _FedSink(WrappedSink):
    def __init__(self, inside: Sink, feed: ByteFeed, key: str) -> None:
        super().__init__(inside)
        self._feed = feed
        self._key = key
        self._last: _SecondRelease | None = None

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        self._last = _SecondRelease(release)
        # The feed first: the storage may write before it returns.
        self._feed.put(self._key, flat(buffer), self._last)
        self.inside.submit(buffer, self._last)

    def finish(self) -> ObjectInfo:
        info = self.inside.finish()
        if self._last is not None:
            # Buffers are taken in order, and what is finished has released all of its buffers.
            self._last.done.wait()
        return info


class _FedSource(WrappedSource):
    def __init__(self, inside: Source, feed: ByteFeed, key: str) -> None:
        super().__init__(inside)
        self._feed = feed
        self._key = key

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.inside.read_into(offset, buffer)
        taken = threading.Event()
        self._feed.put(self._key, flat(buffer), taken.set)
        taken.wait()
