"""Objects in this process's memory: `mem://name`, for tests and for measuring the harness limit.

A read or a write is one copy at memory speed, so any other time that a run takes is not due to storage.
Invariant: a published object never changes; overwriting creates a new one, and open sources keep the old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from penstock.environment import Environment
from penstock.errors import AlreadyThere, ObjectNotFound, ShortTransfer, UsageError
from penstock.storage.protocol import Counters, ObjectInfo, OptionValue, Release, check_key, check_prefix
from penstock.storage.uri import Location

Bytes = npt.NDArray[np.uint8]

FIRST_CAPACITY_BYTES = 64 * 1024
"""The size of the first buffer for an object of undeclared size; doubled whenever it is full."""


def open_memory(location: Location, _environment: Environment, _rank: int) -> MemoryStorage:
    """Return a new, empty store, which holds its objects; opening a name twice creates two stores."""
    if location.options:
        raise UsageError("mem:// has no options", where=location.text, fix="Leave out what follows the '?'.")
    return MemoryStorage(location.uri)


class MemoryStorage:
    """A `Storage` whose objects are arrays in this process. `sync` has nothing to do."""

    has_conditions = True

    def __init__(self, uri: str = "mem://store") -> None:
        self.uri = uri
        self.options: Mapping[str, OptionValue] = {}
        self.counters = Counters()
        self._objects: dict[str, tuple[ObjectInfo, Bytes]] = {}
        self._num_stored = 0
        self._lock = threading.RLock()

    def create(self, key: str, size_bytes: int | None = None) -> MemorySink:
        """Begin an object; memory for `size_bytes` is allocated immediately."""
        return MemorySink(self, check_key(key, self.uri), size_bytes)

    def open(self, key: str) -> MemorySource:
        """Open an object in its current state; later overwrites and deletes do not change the source."""
        return MemorySource(self._find(key)[1], f"{self.uri}/{key}", self.counters)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below `prefix` that exist when iteration begins."""
        folder = check_prefix(prefix, self.uri)
        start = f"{folder}/" if folder else ""
        with self._lock:
            listed = [info for info, _ in self._objects.values() if info.key.startswith(start)]
        yield from listed

    def stat(self, key: str) -> ObjectInfo:
        return self._find(key)[0]

    def delete(self, key: str) -> None:
        """Remove one object; open sources can still read it."""
        self._find(key)
        with self._lock:
            self._objects.pop(key, None)

    def sync(self, prefix: str = "") -> None:
        """Check the prefix. Memory cannot be made durable."""
        check_prefix(prefix, self.uri)

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        check_key(key, self.uri)
        with self._lock:
            current = self._objects.get(key)
            if (current and current[0].checksum) != replaces:
                raise AlreadyThere(
                    "Another writer came first",
                    uri=f"{self.uri}/{key}",
                    fix="Read the object again, then retry.",
                )
            info = self.publish(key, np.frombuffer(content, dtype=np.uint8))
        self.counters.add(requests=1, written_bytes=len(content))
        return info

    def publish(self, key: str, content: Bytes) -> ObjectInfo:
        """Make `content` the object of this key. A sink calls this once, with all bytes."""
        with self._lock:
            self._num_stored += 1
            info = ObjectInfo(
                key=key,
                size_bytes=content.nbytes,
                modified_s=time.time(),
                checksum=str(self._num_stored),
            )
            self._objects[key] = info, content
        return info

    def _find(self, key: str) -> tuple[ObjectInfo, Bytes]:
        check_key(key, self.uri)
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            raise ObjectNotFound(
                f"No object {key!r}",
                uri=f"{self.uri}/{key}",
                fix="Each mem:// store starts empty and ends with its process; write the object first.",
            )
        return stored


class MemorySink:
    """One object that is being copied into memory; each buffer is released before `submit` returns."""

    def __init__(self, storage: MemoryStorage, key: str, size_bytes: int | None) -> None:
        self._storage = storage
        self._key = key
        self._declared_bytes = size_bytes
        self._content: Bytes = np.empty(
            FIRST_CAPACITY_BYTES if size_bytes is None else size_bytes, dtype=np.uint8
        )
        self._filled_bytes = 0

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        end = self._filled_bytes + buffer.nbytes
        if end > self._content.nbytes:
            wider: Bytes = np.empty(max(end, 2 * self._content.nbytes), dtype=np.uint8)
            np.copyto(wider[: self._filled_bytes], self._content[: self._filled_bytes])
            self._content = wider
        if buffer.nbytes:
            np.copyto(self._content[self._filled_bytes : end], np.frombuffer(buffer, dtype=np.uint8))
        self._filled_bytes = end
        if release is not None:
            release()

    def finish(self) -> ObjectInfo:
        if self._declared_bytes not in (None, self._filled_bytes):
            raise ShortTransfer(
                f"{self._filled_bytes} bytes were submitted for an object declared as {self._declared_bytes}",
                uri=f"{self._storage.uri}/{self._key}",
                expected_bytes=self._declared_bytes or 0,
                actual_bytes=self._filled_bytes,
                fix="Submit exactly the size given to create(), or give it none.",
            )
        self._storage.counters.add(requests=1, written_bytes=self._filled_bytes)
        return self._storage.publish(self._key, self._content[: self._filled_bytes])

    def abort(self) -> None:
        self._content = np.empty(0, dtype=np.uint8)
        self._filled_bytes = 0


class MemorySource:
    """The bytes of an object as they were when it was opened."""

    def __init__(self, content: Bytes, uri: str, counters: Counters) -> None:
        self._content = content
        self.size_bytes = content.nbytes
        self._uri = uri
        self._counters = counters

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + buffer.nbytes
        if end > self.size_bytes:
            raise ShortTransfer(
                f"{buffer.nbytes} bytes at offset {offset} reach past the end at {self.size_bytes}",
                uri=self._uri,
                expected_bytes=buffer.nbytes,
                actual_bytes=max(0, self.size_bytes - offset),
                fix="Request ranges inside size_bytes.",
            )
        if buffer.nbytes:
            np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._content[offset:end])
        self._counters.add(requests=1, read_bytes=buffer.nbytes)

    def close(self) -> None:
        """Do nothing: the memory is freed with its last reference."""
