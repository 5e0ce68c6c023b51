"""The protocols of object clients: what the adapter of each client library implements.

An adapter makes one attempt at one request on one endpoint and raises `RequestFailed`; retries, endpoints,
splitting, verification and counting are done above it. There are two kinds of multipart uploads; each adapter
supports one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable

from penstock.errors import Unavailable
from penstock.optional_libraries import install_command
from penstock.storage.objects.client_settings import ClientName, ClientSettings


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """The service's description of one object. `key` includes the storage's prefix."""

    key: str
    size_bytes: int
    modified_s: float
    etag: str | None


def bare_etag(etag: str | None) -> str | None:
    """An ETag without its quotes; None for an empty one."""
    return (etag or "").strip('"') or None


class ObjectClient(Protocol):
    """One endpoint and bucket through one library. Any thread may call; each call is one attempt."""

    read_copy: str
    """The reason under which a read's copy is counted, or "" where reads need none."""
    write_copy: str
    """Likewise for writes."""

    def head(self, key: str) -> RemoteObject:
        """Describe one object."""

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill `buffer` from `offset`; of the object with this `etag`, if the library can require that."""

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects whose keys begin with `prefix` and come after `after`, page by page."""

    def delete(self, key: str) -> None:
        """Remove one object."""

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object, in one request if the library can; its ETag."""


@runtime_checkable
class SupportsPartUpload(Protocol):
    """A client with separate parts: each is sent, retried and acknowledged by itself, on any endpoint."""

    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload; its ID."""

    def put_part(self, key: str, upload: str, number: int, content: memoryview) -> str:
        """Send part `number` (from 1); its ETag."""

    def complete_upload(self, key: str, upload: str, etags: Sequence[str]) -> str | None:
        """Combine all parts into the object; its ETag."""

    def abort_upload(self, key: str, upload: str) -> None:
        """Abort the upload and delete its parts."""


@runtime_checkable
class SupportsStreamUpload(Protocol):
    """A client that takes a whole stream of parts and reports only its end."""

    stream_retries: bool
    """Whether the library retries a part of a stream; we cannot, because its buffer is already released."""

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`, each of `part_bytes` but the last; the object's ETag.

        Takes a part only when there is room for it, and keeps no reference to a view once its bytes are sent:
        that is how the sink learns of it. An exception from `parts` aborts the upload and is raised again.
        """


@runtime_checkable
class SupportsWholeGet(Protocol):
    """A client that learns an object's size and ETag together with its bytes."""

    def get_whole(self, key: str, limit_bytes: int) -> tuple[RemoteObject, bytes | None]:
        """An object in one request; no bytes of one that is larger than the limit."""


@runtime_checkable
class SupportsConditionalPut(Protocol):
    """A client that can store an object on a condition, which the service checks."""

    has_conditions: bool
    """Whether this service supports that."""

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
    """The adapter for `settings.options.client`; `Unavailable` where its library is not installed."""
    name = settings.options.client
    try:
        module = import_module(CLIENTS[name])
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"The S3 client {name} is not installed: no module {error.name!r}",
            fix=f"Run: {install_command(name)} (or use client=obstore).",
        ) from error
    return cast("Connect", module.connect)(settings)
