"""The narrow waist of storage: the protocols that every back end implements and every caller uses.

Everything that transfers bytes (probe, loaders, checkpoint pipeline, traces) uses only `Storage`, `Sink` and
`Source`; wrappers (tracing, faults, rate limits) implement them around another `Storage`. Invariants: a
buffer that is passed down is never copied, unless the copy is counted by reason in `Counters.copied_bytes`;
no key that passes `check_key` leads out of its root.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from typing import Any, Final, Protocol, Self, runtime_checkable

from penstock.errors import AccessRefused, DataDamaged, ObjectNotFound

MOST_BYTES: Final = 64 << 20
"""The largest document that is read whole; the facts of ten thousand hosts have 50 MB."""
MOST_WHOLE: Final = 512 << 20
"""The largest object of any kind that is read whole: what describes a checkpoint of two million parts."""

OptionValue = str | int | float | bool | tuple[str, ...]

Release = Callable[[], None]
"""Called once, from any thread, when a sink is done with a submitted buffer: its owner may refill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object of `size_bytes`, last changed at `modified_s` (seconds since 1970).

    `key` is relative to the storage's root; `checksum` is the service's own, None if it has none.
    """

    key: str
    size_bytes: int
    modified_s: float
    checksum: str | None = None


class Sink(Protocol):
    """One object that one thread writes front to back: `submit` repeatedly, then `finish` or `abort`.

    The object becomes visible when `finish` returns; after `abort`, a crash or an error, it never does.
    """

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`, which the caller must not change until `release` is called.

        Blocks while as many buffers are in flight as the options allow. Without `release`, the caller must
        leave the buffer unchanged until `finish`. Raises the error of an earlier buffer as soon as it is
        known; even then this buffer is released, once, by `abort` at the latest.
        """

    def finish(self) -> ObjectInfo:
        """Wait for all bytes, compare stored and submitted size, make the object durable, then visible."""

    def abort(self) -> None:
        """Abandon the object: release every buffer and leave nothing behind.

        May be called twice, and after any failure.
        """


class Source(Protocol):
    """One object opened for reading; any number of threads may read from it at once."""

    @property
    def size_bytes(self) -> int:
        """The object's size when it was opened."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset`, or raise: `ShortTransfer` if the object ends too early."""

    def close(self) -> None:
        """Release the object. May be called twice."""


class Storage(Protocol):
    """A tree of objects under one root.

    Keys are relative, `/`-separated paths that cannot lead out of the root. All methods may be called from
    any thread. They raise only `StorageError` and its subclasses, or `Unavailable` if this machine lacks what
    the storage needs.
    """

    uri: str
    options: Mapping[str, OptionValue]
    """All options in effect, including defaults, for the record of a run."""
    counters: Counters

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin an object; an existing one with this key stays readable until `finish`.

        Declaring `size_bytes` saves requests; `finish` checks it.
        """

    def open(self, key: str) -> Source:
        """Open the object `key` for ranged reads; raise `ObjectNotFound` if there is none."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Return all objects below the folder `prefix` ("": all): an unordered stream, in bounded memory.

        A missing folder counts as empty, because object storage cannot tell the two apart. A missing root may
        raise `ObjectNotFound`, because a mistyped path should not look like an empty storage.
        """

    def stat(self, key: str) -> ObjectInfo:
        """Describe the object `key`; raise `ObjectNotFound` if there is none."""

    def delete(self, key: str) -> None:
        """Remove the object `key`; raise `ObjectNotFound` if there is none and the service reports it."""

    def sync(self, prefix: str = "") -> None:
        """Make every finished object under `prefix`, and its name, survive a power failure."""


@dataclass(slots=True)
class Counters:
    """Counts of what a `Storage` really did, for the record of a run. Threads call only `add` and `add_copy`.

    `requests` counts all that were sent, including `retries` and `errors`; `written_bytes` and `read_bytes`
    were transferred. `copied_bytes` is keyed by the reason of the copy, `requests_by_endpoint` by the
    endpoint's URL. Counts never decrease.
    """

    requests: int = 0
    retries: int = 0
    errors: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    copied_bytes: Counter[str] = field(default_factory=Counter)
    requests_by_endpoint: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self,
        *,
        requests: int = 0,
        retries: int = 0,
        errors: int = 0,
        written_bytes: int = 0,
        read_bytes: int = 0,
        endpoint: str = "",
    ) -> None:
        """Count one event: by how much each counter grows, and at which `endpoint`."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.errors += errors
            self.written_bytes += written_bytes
            self.read_bytes += read_bytes
            if endpoint:
                self.requests_by_endpoint[endpoint] += requests

    def add_copy(self, reason: str, size_bytes: int) -> None:
        """Count `size_bytes` that had to be copied, under the `reason`."""
        with self._lock:
            self.copied_bytes[reason] += size_bytes

    def _counts(self) -> dict[str, Any]:
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "_lock"}

    def snapshot(self) -> Self:
        """Return a consistent copy, to subtract from or to record."""
        with self._lock:
            return type(self)(**{name: count.__class__(count) for name, count in self._counts().items()})

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        # Ranks send their counters to each other, and a lock cannot be pickled.
        return type(self), tuple(self.snapshot()._counts().values())  # noqa: SLF001 - its own class

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: count + getattr(other, name) for name, count in self._counts().items()})

    def __sub__(self, other: Self) -> Self:
        return type(self)(**{name: count - getattr(other, name) for name, count in self._counts().items()})

    def record(self) -> dict[str, int | dict[str, int]]:
        """Return all counts as plain data, for the record of a run."""
        counts = self._counts().items()
        return {name: dict(count) if isinstance(count, Counter) else count for name, count in counts}


class WrappedStorage:
    """A `Storage` that delegates to the one `inside`; tracing, faults and rate limits override some methods.

    `uri` and `counters` are those of the storage inside; the wrapper's own options are added to `options`, so
    that the record of a run shows the wrapping.
    """

    def __init__(self, inside: Storage, **own_options: OptionValue) -> None:
        self.inside = inside
        self.uri = inside.uri
        self.options: Mapping[str, OptionValue] = {**inside.options, **own_options}
        self.counters: Counters = inside.counters

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        return self.inside.create(key, size_bytes)

    def open(self, key: str) -> Source:
        return self.inside.open(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inside.list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        return self.inside.stat(key)

    def delete(self, key: str) -> None:
        self.inside.delete(key)

    def sync(self, prefix: str = "") -> None:
        self.inside.sync(prefix)


class WrappedSink:
    """A `Sink` that delegates to the one `inside`."""

    def __init__(self, inside: Sink) -> None:
        self.inside = inside

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Submit to the sink inside, which must then call `release`."""
        self.inside.submit(buffer, release)

    def finish(self) -> ObjectInfo:
        return self.inside.finish()

    def abort(self) -> None:
        self.inside.abort()


class WrappedSource:
    """A `Source` that delegates to the one `inside`."""

    def __init__(self, inside: Source) -> None:
        self.inside = inside
        self.size_bytes = inside.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.inside.read_into(offset, buffer)

    def close(self) -> None:
        self.inside.close()


def write_object(
    storage: Storage,
    key: str,
    buffers: Iterable[bytes | bytearray | memoryview],
    *,
    size_bytes: int | None = None,
) -> ObjectInfo:
    """Write `buffers`, one after the other, as one object; durable and visible once this returns."""
    sink = storage.create(key, size_bytes)
    with ExitStack() as undo:
        # Not only for a StorageError: Ctrl-C, too, must leave nothing behind.
        undo.callback(sink.abort)
        for buffer in buffers:
            sink.submit(memoryview(buffer))
        info = sink.finish()
        undo.pop_all()
    return info


@runtime_checkable
class SupportsWholeReads(Protocol):
    """A `Storage` that gets a small object and its description in one request."""

    def read_whole(self, key: str) -> tuple[ObjectInfo, bytearray]:
        """Return the object and its description; raise `ObjectNotFound` if there is none.

        Raises `DataDamaged` for an object of more than `MOST_WHOLE` bytes.
        """


@runtime_checkable
class SupportsWritesAtOnce(Protocol):
    """A `Storage` that makes many small objects durable together, at less cost than one `Sink` for each."""

    def write_at_once(self, objects: Iterable[tuple[str, memoryview]]) -> None:
        """Write each of these whole objects, by its key; all are durable and visible once this returns.

        A buffer may change as soon as the next object is requested. After an error, visible objects are
        complete and durable, and nothing is left of the other objects. Files stay open until the end, so pass
        about a hundred at a time.
        """


_NOT_PLAIN = frozenset(("", ".", ".."))


def check_key(key: str, root_uri: str) -> str:
    """Return `key` if it is a relative path of plain names; otherwise raise `AccessRefused`."""
    if "\0" in key or not _NOT_PLAIN.isdisjoint(key.split("/")):
        raise AccessRefused(
            f"The key {key!r} is not a plain path below its root",
            uri=root_uri,
            fix="Use relative names joined by single slashes, without '.' and '..'.",
        )
    return key


def check_prefix(prefix: str, root_uri: str) -> str:
    """Return `prefix` without a trailing slash.

    Raises `AccessRefused` unless it is empty or a folder below the root.
    """
    folder = prefix.removesuffix("/")
    return check_key(folder, root_uri) if folder else ""


def read_if_any(storage: Storage, key: str, *, at_most: int = MOST_BYTES) -> bytearray | None:
    """Return the content of a small object, or None if there is none."""
    try:
        return read_object(storage, key, at_most=at_most)
    except ObjectNotFound:
        return None


def read_described(storage: Storage, key: str) -> tuple[ObjectInfo, bytearray]:
    """Return a small object and its description; raise `ObjectNotFound` if there is none."""
    if isinstance(storage, SupportsWholeReads):
        return storage.read_whole(key)
    return storage.stat(key), read_object(storage, key)


def read_object(storage: Storage, key: str, *, at_most: int = MOST_BYTES) -> bytearray:
    """Return all bytes of one object, in new memory; raise `ObjectNotFound` if there is none.

    Raises `DataDamaged` for one of more than `at_most` bytes: a sparse file of any size costs nothing.
    """
    uri = f"{storage.uri}/{key}"
    if isinstance(storage, SupportsWholeReads):
        content = storage.read_whole(key)[1]
        require_small(len(content), uri, at_most)
        return content
    with closing(storage.open(key)) as source:
        require_small(source.size_bytes, uri, at_most)
        content = bytearray(source.size_bytes)
        source.read_into(0, memoryview(content))
    return content


def require_small(size_bytes: int, uri: str, at_most: int) -> None:
    """Raise `DataDamaged` for an object of more than `at_most` bytes, which are read at once."""
    if size_bytes > at_most:
        raise DataDamaged(
            f"It has {size_bytes:,} bytes, more than the {at_most:,} that are read at once",
            uri=uri,
            fix="Find out what wrote it: no document of this name is so large.",
        )


def exists(storage: Storage, key: str) -> bool:
    """Return True if the object exists now. Any failure other than its absence is raised."""
    try:
        storage.stat(key)
    except ObjectNotFound:
        return False
    return True
