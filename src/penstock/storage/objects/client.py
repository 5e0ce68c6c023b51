"""The base of object clients: what the adapter of each client library implements.

An adapter makes one attempt at one request on one endpoint and raises `RequestFailed`; retries, endpoints,
splitting, verification and counting are done above it. An adapter uploads large objects in one of two ways:
`PartClient` or `StreamClient`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import cast

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


class ObjectClient(ABC):
    """One endpoint and bucket through one library. Any thread may call; each call is one attempt."""

    read_copy = ""
    """The reason under which a read's copy is counted; empty if reads need none."""
    write_copy = ""
    """Likewise for writes."""
    gets_whole = False
    """Has `get_whole`."""
    has_conditions = False
    """Has `put_if`, and this service checks the condition."""

    @abstractmethod
    def head(self, key: str) -> RemoteObject:
        """Describe one object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill `buffer` from `offset`, of the object with this `etag` if the library can require that."""

    @abstractmethod
    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects whose keys begin with `prefix` and come after `after`, page by page."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object."""

    @abstractmethod
    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object, in one request if the library can; its ETag."""

    def get_whole(self, key: str, limit_bytes: int) -> tuple[RemoteObject, bytes | None]:
        """Get an object with its size and ETag in one request; no bytes if it is larger than the limit."""
        raise AssertionError(f"{type(self).__name__} gets no whole objects ({key}, {limit_bytes})")

    def put_if(self, key: str, content: memoryview, *, replaces: str | None) -> str | None:
        """Like `put`, if the object there has the ETag `replaces`, or is absent for None; else 412 or 409."""
        raise AssertionError(f"{type(self).__name__} has no conditions ({key}, {len(content)}, {replaces})")


class PartClient(ObjectClient):
    """A client with separate parts: each is sent, retried and acknowledged by itself, on any endpoint."""

    @abstractmethod
    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload; its ID."""

    @abstractmethod
    def put_part(self, key: str, upload: str, number: int, content: memoryview) -> str:
        """Send part `number` (from 1); its ETag."""

    @abstractmethod
    def complete_upload(self, key: str, upload: str, etags: Sequence[str]) -> str | None:
        """Combine all parts into the object; its ETag."""

    @abstractmethod
    def abort_upload(self, key: str, upload: str) -> None:
        """Abort the upload and delete its parts."""


class StreamClient(ObjectClient):
    """A client that takes a whole stream of parts and reports only its end.

    The library retries parts itself: we cannot, because their buffers are already released.
    """

    @abstractmethod
    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`, each of `part_bytes` but the last; the object's ETag.

        Takes a part only when there is room for it, and keeps no reference to a view once its bytes are sent:
        that is how the sink learns of it. An exception from `parts` aborts the upload and is raised again.
        """


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
