"""Traces the requests to a wrapped storage, with exact bytes and offsets, even past the page cache.

No system calls are intercepted. A write is traced from its submission until the storage releases the buffer,
so writes in flight overlap in the trace as they do in reality. Invariant: the wrapped storage gets exactly
the calls that it would get without a trace.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Final

from penstock.environment import Environment
from penstock.storage import protocol
from penstock.storage.capabilities import (
    Deferred,
    SpanValue,
    defer_sync,
    find_local_root,
    prefer_direct_access,
)
from penstock.trace.capture.recorder import TraceRecorder, clock_ns, recorder_of
from penstock.trace.capture.trace_writer import EventKind, Layer

FILES: Final = "POSIX"
OBJECTS: Final = "OBJECT"


_CALLS: Final = {
    "create": "creat64", "open": "open64", "write": "pwrite64", "read": "pread64", "finish": "fsync",
    "close": "close", "list": "opendir", "stat": "stat", "delete": "unlink", "sync": "syncfs",
}  # fmt: skip
"""Storage operations and the names they are traced under: those of system calls on files, even for objects.
"""
Kinds = Mapping[str, EventKind]


def storage_kinds(cat: str) -> Kinds:
    """Return the event kind of each operation of one storage; `cat` is their category."""
    return {act: EventKind(name, cat, Layer.LIBC_IO) for act, name in _CALLS.items()}


def trace_storage(storage: protocol.Storage, environment: Environment) -> protocol.Storage:
    """Return `storage`, traced into the folder in `PENSTOCK_TRACE`, with one trace per process."""
    recorder = recorder_of(environment)
    return storage if recorder is None else TracedStorage(storage, recorder)


class TracedStorage(protocol.WrappedStorage):
    """Traces every method of the wrapped storage."""

    def __init__(self, inside: protocol.Storage, recorder: TraceRecorder) -> None:
        super().__init__(inside, trace=str(recorder.folder))
        self._recorder = recorder
        root = find_local_root(inside)
        self._kinds = storage_kinds(OBJECTS if root is None else FILES)
        self._root = (inside.uri if root is None else str(root)).partition("?")[0].rstrip("/")

    def create(self, key: str, size_bytes: int | None = None) -> protocol.Sink:
        """Begin an object in the wrapped storage."""
        path = self._path(key)
        sink = self._recorder.trace(self._kinds["create"], path, lambda: self.inside.create(key, size_bytes))
        return TracedSink(sink, self._recorder, self._kinds, path)

    def open(self, key: str) -> protocol.Source:
        """Open the object in the wrapped storage."""
        path = self._path(key)
        source = self._recorder.trace(self._kinds["open"], path, lambda: self.inside.open(key))
        return TracedSource(source, self._recorder, self._kinds, path)

    def past_cache(self, reads: str | None = None) -> protocol.Storage:
        """Return a storage of this tree that bypasses the page cache, traced like this one."""
        return TracedStorage(prefer_direct_access(self.inside, reads=reads), self._recorder)

    def deferring(self, what: Deferred) -> protocol.Storage:
        """Return a storage of this tree that leaves syncing to the caller, traced like this one."""
        return TracedStorage(defer_sync(self.inside, what), self._recorder)

    def record_span(
        self, name: str, cat: str, began_ns: int, ended_ns: int, args: Mapping[str, SpanValue]
    ) -> None:
        """Record what the caller did between two moments, besides the requests that it made meanwhile."""
        self._recorder.record_span(name, cat, began_ns, ended_ns, args)

    def list(self, prefix: str = "") -> Iterator[protocol.ObjectInfo]:
        """Yield the objects of the wrapped storage; the event is recorded after the last one."""
        began_ns, num_entries = clock_ns(), 0
        for info in self.inside.list(prefix):
            num_entries += 1
            yield info
        self._recorder.record(
            self._kinds["list"], began_ns, self._path(prefix), args={"entries": num_entries}
        )

    def stat(self, key: str) -> protocol.ObjectInfo:
        """Describe an object of the wrapped storage."""
        return self._recorder.trace(
            self._kinds["stat"], self._path(key), lambda: self.inside.stat(key), ret=0
        )

    def delete(self, key: str) -> None:
        """Delete an object of the wrapped storage."""
        self._recorder.trace(self._kinds["delete"], self._path(key), lambda: self.inside.delete(key), ret=0)

    def sync(self, prefix: str = "") -> None:
        """Make the objects of the wrapped storage durable."""
        self._recorder.trace(self._kinds["sync"], self._path(prefix), lambda: self.inside.sync(prefix), ret=0)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


class TracedSink(protocol.WrappedSink):
    """Traces each buffer from submission to release, and the time that finishing takes."""

    def __init__(self, inside: protocol.Sink, recorder: TraceRecorder, kinds: Kinds, path: str) -> None:
        super().__init__(inside)
        self._recorder, self._kinds, self._path = recorder, kinds, path
        self._offset = 0
        self._failed = threading.Event()

    def submit(self, buffer: memoryview, release: protocol.Release | None = None) -> None:
        """Submit a buffer to the wrapped sink; the event ends when the buffer is released."""
        began_ns, offset, num_bytes = clock_ns(), self._offset, buffer.nbytes
        self._offset += num_bytes

        def released() -> None:
            if not self._failed.is_set():
                self._recorder.record(
                    self._kinds["write"], began_ns, self._path, offset, num_bytes, num_bytes
                )
            if release is not None:
                release()

        self.inside.submit(buffer, released)

    def finish(self) -> protocol.ObjectInfo:
        """Finish the wrapped sink."""
        return self._recorder.trace(self._kinds["finish"], self._path, self.inside.finish, ret=0)

    def abort(self) -> None:
        """Abort the wrapped sink; buffers released from now on were not written."""
        self._failed.set()
        self.inside.abort()


class TracedSource(protocol.WrappedSource):
    """Traces each range that is read."""

    def __init__(self, inside: protocol.Source, recorder: TraceRecorder, kinds: Kinds, path: str) -> None:
        super().__init__(inside)
        self._recorder, self._kinds, self._path = recorder, kinds, path

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read a range from the wrapped source."""
        began_ns = clock_ns()
        self.inside.read_into(offset, buffer)
        num_bytes = buffer.nbytes
        self._recorder.record(self._kinds["read"], began_ns, self._path, offset, num_bytes, num_bytes)

    def close(self) -> None:
        """Close the wrapped source."""
        self._recorder.trace(self._kinds["close"], self._path, self.inside.close, ret=0)
