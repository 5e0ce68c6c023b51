"""A storage around another one, by delegation: what tracing, faults and limits begin with.

A wrapper overrides the verbs it cares about. Invariant: `uri` and `counters` are those of the storage inside,
and `options` are its options with the wrapper's own added, so that a record shows the wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.storage.counters import Counters
    from penstock.storage.protocol import ObjectInfo, OptionValue, Release, Sink, Source, Storage


class WrappedStorage:
    """A `Storage` that passes every call on to the one `inside`."""

    def __init__(self, inside: Storage, **own_options: OptionValue) -> None:
        self.inside = inside
        self.uri = inside.uri
        self.options: Mapping[str, OptionValue] = {**inside.options, **own_options}
        self.counters: Counters = inside.counters

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin an object inside."""
        return self.inside.create(key, size_bytes)

    def open(self, key: str) -> Source:
        """Open the object inside."""
        return self.inside.open(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects inside."""
        return self.inside.list(prefix)

    def stat(self, key: str) -> ObjectInfo:
        """The facts inside."""
        return self.inside.stat(key)

    def delete(self, key: str) -> None:
        """Delete inside."""
        self.inside.delete(key)

    def sync(self, prefix: str = "") -> None:
        """Make durable inside."""
        self.inside.sync(prefix)


class WrappedSink:
    """A `Sink` that passes every call on to the one `inside`."""

    def __init__(self, inside: Sink) -> None:
        self.inside = inside

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Submit inside, which then owes the release."""
        self.inside.submit(buffer, release)

    def finish(self) -> ObjectInfo:
        """Finish inside."""
        return self.inside.finish()

    def abort(self) -> None:
        """Abort inside."""
        self.inside.abort()


class WrappedSource:
    """A `Source` that passes every call on to the one `inside`."""

    def __init__(self, inside: Source) -> None:
        self.inside = inside

    @property
    def size_bytes(self) -> int:
        """The size inside."""
        return self.inside.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read inside."""
        self.inside.read_into(offset, buffer)

    def close(self) -> None:
        """Close inside."""
        self.inside.close()
