"""`Storage` objects that are slow, full or broken: wrappers around any `Storage`, which can be nested.

Each wrapper has one effect. At its mildest setting it has none, and passes the contract suite. Invariant:
every submitted buffer is released exactly once, even if a fault occurs.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

from penstock.errors import ObjectNotFound, OutOfSpace, StorageError
from penstock.storage import protocol

Verb = Literal["create", "submit", "finish", "abort", "open", "read_into", "list", "stat", "delete", "sync"]
"""A call on a `Storage` object, or on one of its sinks or sources."""

Gate = Callable[[Verb, int], None]
"""Called before each call with its verb and number of bytes. It may wait, or raise the error of the call."""

Sleep = Callable[[float], None]


class Gated(protocol.WrappedStorage):
    """A `Storage` with a `gate` before every call: the base class of the faults below, and of your own."""

    def __init__(self, inside: protocol.Storage, gate: Gate, **own_options: str | float) -> None:
        super().__init__(inside, **own_options)
        self.gate = gate

    def create(self, key: str, size_bytes: int | None = None) -> protocol.Sink:
        """Pass the gate, then begin an object in the wrapped storage."""
        self.gate("create", 0)
        return _GatedSink(super().create(key, size_bytes), self.gate)

    def open(self, key: str) -> protocol.Source:
        """Pass the gate, then open the object in the wrapped storage."""
        self.gate("open", 0)
        return _GatedSource(super().open(key), self.gate)

    def list(self, prefix: str = "") -> Iterator[protocol.ObjectInfo]:
        """Pass the gate, then list the wrapped storage."""
        self.gate("list", 0)
        return super().list(prefix)

    def stat(self, key: str) -> protocol.ObjectInfo:
        """Pass the gate, then describe the object in the wrapped storage."""
        self.gate("stat", 0)
        return super().stat(key)

    def delete(self, key: str) -> None:
        """Pass the gate, then delete the object in the wrapped storage."""
        self.gate("delete", 0)
        super().delete(key)

    def sync(self, prefix: str = "") -> None:
        """Pass the gate, then make the wrapped storage durable."""
        self.gate("sync", 0)
        super().sync(prefix)


class _GatedSink(protocol.WrappedSink):
    def __init__(self, inside: protocol.Sink, gate: Gate) -> None:
        super().__init__(inside)
        self._gate = gate

    def submit(self, buffer: memoryview, release: protocol.Release | None = None) -> None:
        with _released_on_failure(release):
            self._gate("submit", buffer.nbytes)
        super().submit(buffer, release)

    def finish(self) -> protocol.ObjectInfo:
        self._gate("finish", 0)
        return super().finish()

    def abort(self) -> None:
        # The wrapped sink aborts first, because a fault here must not leave anything behind.
        super().abort()
        self._gate("abort", 0)


class _GatedSource(protocol.WrappedSource):
    def __init__(self, inside: protocol.Source, gate: Gate) -> None:
        super().__init__(inside)
        self._gate = gate

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._gate("read_into", buffer.nbytes)
        super().read_into(offset, buffer)


@contextmanager
def _released_on_failure(release: protocol.Release | None) -> Iterator[None]:
    with ExitStack() as undo:
        if release is not None:
            undo.callback(release)
        yield
        undo.pop_all()


class Slow(Gated):
    """Makes every call take `latency_s` longer; 0 has no effect."""

    def __init__(self, inside: protocol.Storage, latency_s: float, *, sleep: Sleep = time.sleep) -> None:
        super().__init__(inside, self._wait, slow_latency_s=latency_s)
        self._latency_s = latency_s
        self._sleep = sleep

    def _wait(self, _verb: Verb, _size_bytes: int) -> None:
        if self._latency_s:
            self._sleep(self._latency_s)


class FailAfter(Gated):
    """Works until `limit_bytes` have been transferred; then every call that transfers bytes fails (EIO)."""

    def __init__(self, inside: protocol.Storage, limit_bytes: int) -> None:
        super().__init__(inside, self._count, fail_after_bytes=limit_bytes)
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()

    def _count(self, verb: Verb, size_bytes: int) -> None:
        with self._lock:
            self._left_bytes -= size_bytes
            if size_bytes and self._left_bytes < 0:
                raise _injected(verb, self.uri)


class FailAtCall(Gated):
    """Makes the `number`-th call of `verb` fail (EIO), counted from 1 over all objects of the storage.

    Other calls work.
    """

    def __init__(self, inside: protocol.Storage, verb: Verb, number: int) -> None:
        super().__init__(inside, self._count, fail_at_verb=verb, fail_at_number=number)
        self._verb = verb
        self._left = number
        self._lock = threading.Lock()

    def _count(self, verb: Verb, _size_bytes: int) -> None:
        if verb != self._verb:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                raise _injected(verb, self.uri)


def _injected(verb: Verb, uri: str) -> StorageError:
    return StorageError(
        f"Injected fault in {verb}", uri=uri, fix="A test injected this failure.", errno=errno.EIO
    )


class Full(protocol.WrappedStorage):
    """Holds at most `capacity_bytes` written through it. Aborting, deleting and overwriting free space."""

    def __init__(self, inside: protocol.Storage, capacity_bytes: int) -> None:
        super().__init__(inside, full_capacity_bytes=capacity_bytes)
        self._free_bytes = capacity_bytes
        self._lock = threading.Lock()

    def create(self, key: str, size_bytes: int | None = None) -> protocol.Sink:
        """Begin an object in the wrapped storage. Submitted bytes take up space."""
        return _FullSink(super().create(key, size_bytes), self, key)

    def delete(self, key: str) -> None:
        """Delete an object in the wrapped storage, and free its space."""
        size_bytes = self.size_of(key)
        super().delete(key)
        self.give(size_bytes)

    def take(self, size_bytes: int) -> None:
        """Take up space, or raise `OutOfSpace`."""
        with self._lock:
            if size_bytes > self._free_bytes:
                raise OutOfSpace(
                    f"{size_bytes} bytes do not fit into {self._free_bytes}",
                    uri=self.uri,
                    fix="A test injected this failure.",
                    errno=errno.ENOSPC,
                )
            self._free_bytes -= size_bytes

    def give(self, size_bytes: int) -> None:
        """Free space."""
        with self._lock:
            self._free_bytes += size_bytes

    def size_of(self, key: str) -> int:
        """Return the space that an object takes up; 0 if it does not exist."""
        try:
            return self.stat(key).size_bytes
        except ObjectNotFound:
            return 0


class _FullSink(protocol.WrappedSink):
    def __init__(self, inside: protocol.Sink, storage: Full, key: str) -> None:
        super().__init__(inside)
        self._storage = storage
        self._key = key
        self._taken_bytes = 0

    def submit(self, buffer: memoryview, release: protocol.Release | None = None) -> None:
        with _released_on_failure(release):
            self._storage.take(buffer.nbytes)
        self._taken_bytes += buffer.nbytes
        super().submit(buffer, release)

    def finish(self) -> protocol.ObjectInfo:
        replaced_bytes = self._storage.size_of(self._key)
        info = super().finish()
        self._storage.give(replaced_bytes)
        self._taken_bytes = 0
        return info

    def abort(self) -> None:
        super().abort()
        self._storage.give(self._taken_bytes)
        self._taken_bytes = 0


class Late(protocol.WrappedStorage):
    """Releases buffers late: a sink keeps every buffer until `finish` or `abort`."""

    def __init__(self, inside: protocol.Storage) -> None:
        super().__init__(inside, late_release=True)

    def create(self, key: str, size_bytes: int | None = None) -> protocol.Sink:
        """Begin an object in the wrapped storage, with delayed releases."""
        return _LateSink(super().create(key, size_bytes))


class _LateSink(protocol.WrappedSink):
    def __init__(self, inside: protocol.Sink) -> None:
        super().__init__(inside)
        self._delayed: list[protocol.Release] = []

    def submit(self, buffer: memoryview, release: protocol.Release | None = None) -> None:
        if release is not None:
            self._delayed.append(release)
        super().submit(buffer)

    def finish(self) -> protocol.ObjectInfo:
        info = super().finish()
        self._release_all()
        return info

    def abort(self) -> None:
        super().abort()
        self._release_all()

    def _release_all(self) -> None:
        delayed, self._delayed = self._delayed, []
        for release in delayed:
            release()
