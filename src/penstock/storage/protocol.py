"""The narrow waist of storage: what every place that keeps bytes can do, whatever it is made of.

Everything that moves bytes (probe, loaders, checkpoint pipe, traces) speaks only these protocols; wrappers
(tracing, faults, bandwidth limits) implement them around another one. One invariant: a buffer that is handed
down is never copied, unless the copy is counted by name in `Counters.copied_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.storage.counters import Counters

OptionValue = str | int | float | bool | tuple[str, ...]

Release = Callable[[], None]
"""Called once, from any thread, when a sink is done with a submitted buffer: its owner may refill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object. `key` is relative to the storage's root; `checksum` is the service's own, if any."""

    key: str
    size_bytes: int
    modified_s: float
    checksum: str | None = None


class Sink(Protocol):
    """One object being written front to back by one thread: `submit` repeatedly, then `finish` or `abort`.

    Until `finish` returns nobody sees the object; after `abort`, a crash or an error nobody ever does.
    """

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`, which stays untouched by the caller until `release` is called.

        Blocks while as many buffers are in flight as the options allow. Without `release` the caller keeps
        the buffer as it is until `finish`. Raises the error of an earlier buffer as soon as it is known;
        also then this buffer is released, once, by `abort` at the latest.
        """

    def finish(self) -> ObjectInfo:
        """Wait for all bytes, check the stored size against the submitted one, make durable, publish."""

    def abort(self) -> None:
        """Give up: release every buffer and leave nothing behind. Safe after any failure, and twice."""


class Source(Protocol):
    """One object opened for reading; any number of threads may read from it at once."""

    @property
    def size_bytes(self) -> int:
        """The object's size when it was opened."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset`, or raise: `ShortTransfer` where the object ends too early."""

    def close(self) -> None:
        """Let go of the object. Safe twice."""


class Storage(Protocol):
    """A tree of objects under one root. Keys are relative, `/`-separated paths that cannot leave the root.

    All methods may be called from any thread. All raise `StorageError` and its kinds, or `Unavailable`
    where this machine lacks what the storage needs; nothing else.
    """

    uri: str
    options: Mapping[str, OptionValue]
    """How this storage was told to work, whole and with its defaults, for the record of a run."""
    counters: Counters

    def create(self, key: str, size_bytes: int | None = None) -> Sink:
        """Begin an object; an older one of this key stays readable until `finish`.

        A size told beforehand saves requests and is checked at `finish`.
        """

    def open(self, key: str) -> Source:
        """Open an object for ranged reads; `ObjectNotFound` if there is none."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the folder `prefix` ("": all): a stream without order, in bounded memory.

        An absent folder is an empty one, as object services know no other; an absent root may be
        `ObjectNotFound`, because a mistyped path should not look like an empty storage.
        """

    def stat(self, key: str) -> ObjectInfo:
        """One object's facts; `ObjectNotFound` if there is none."""

    def delete(self, key: str) -> None:
        """Remove one object; `ObjectNotFound` if there is none, silence where a service does not tell."""

    def sync(self, prefix: str = "") -> None:
        """Make every finished object under `prefix`, and its name, survive a power cut."""
