"""The waist below the object storage: what a client library must offer, in one adapter module each.

An adapter makes one attempt at one request on one endpoint and raises `RequestFailed`; retries, endpoints,
splitting, verification and counting live above. Uploads in parts come in two shapes, and each adapter has
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable

from penstock.errors import Unavailable
from penstock.storage.objects.client_settings import ClientName, ClientSettings


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """What the service says about one object. `key` is whole, with the storage's prefix."""

    key: str
    size_bytes: int
    modified_s: float
    etag: str | None


class ObjectClient(Protocol):
    """One endpoint and bucket through one library. Any thread may call; each call is one attempt."""

    read_copy: str
    """The name under which a read's copy is accounted, or "" where bytes land in the caller's buffer."""
    write_copy: str
    """Likewise for writes."""

    def head(self, key: str) -> RemoteObject:
        """One object's facts."""

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill `buffer` from `offset`, of the object with this `etag` where the library can insist on it."""

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects whose keys begin with `prefix` and come after `after`, page by page."""

    def delete(self, key: str) -> None:
        """Remove one object."""

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object in one request (or as good as); its ETag."""


@runtime_checkable
class SupportsPartUpload(Protocol):
    """A client that shows parts: each is sent, retried and acknowledged alone, on any endpoint."""

    def begin_upload(self, key: str) -> str:
        """Open a multipart upload; its identity."""

    def put_part(self, key: str, upload: str, number: int, content: memoryview) -> str:
        """Send part `number` (from 1); its ETag."""

    def complete_upload(self, key: str, upload: str, etags: Sequence[str]) -> str | None:
        """Make the object of all parts, in order; its ETag."""

    def abort_upload(self, key: str, upload: str) -> None:
        """Drop the upload and its parts."""


@runtime_checkable
class SupportsStreamUpload(Protocol):
    """A client that takes a whole stream of parts and tells only at the end."""

    stream_retries: bool
    """Whether the library itself retries a part of a stream; we cannot, its bytes are gone by then."""

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`, each of `part_bytes` but the last; the object's ETag.

        Pulls a part only when there is room for it and keeps no reference to a view once it is done with its
        memory: that is how the sink learns of it. An exception out of `parts` abandons the upload, leaves
        nothing behind and comes out again.
        """


@runtime_checkable
class SupportsConditionalPut(Protocol):
    """A client that can put on a condition, which the service itself judges."""

    has_conditions: bool
    """Whether this service does."""

    def put_if(self, key: str, content: memoryview, *, replaces: str | None) -> str | None:
        """Like `put`, if the object there has the ETag `replaces`, or is absent for None; else 412 or 409."""


Connect = Callable[[ClientSettings], ObjectClient]

CLIENTS: Mapping[ClientName, str] = MappingProxyType(
    {
        "obstore": "penstock.storage.objects.client_obstore",
        "minio": "penstock.storage.objects.client_minio",
        "s3dlio": "penstock.storage.objects.client_s3dlio",
        "s3torchconnector": "penstock.storage.objects.client_s3torchconnector",
    }
)
"""Client name -> the adapter's module, whose `connect` makes an `ObjectClient`."""


def connect(settings: ClientSettings) -> ObjectClient:
    """The adapter that `settings` ask for; `Unavailable` where its library is not installed."""
    name = settings.options.client
    try:
        module = import_module(CLIENTS[name])
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"The S3 client {name} is not installed: no module {error.name!r}",
            fix=f"Run: pip install 'penstock[{name}]' (or use client=obstore).",
        ) from error
    return cast("Connect", module.connect)(settings)
