"""The base of object clients: what the adapter of each client library implements.

An adapter makes one attempt at one request on one endpoint and lets its library's errors pass; `attempt`
turns them into `RequestFailed`. Callers handle retries, endpoints, splitting, verification and counting. An
adapter uploads large objects in one of two ways: `PartClient` or `StreamClient`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import ClassVar, Final, Generic, Literal, TypeVar, cast

from penstock.errors import Unavailable, UsageError
from penstock.optional_libraries import install_command
from penstock.storage.objects.client_settings import ClientName, ClientSettings

FailureKind = Literal["answer", "foreign", "connect", "reset", "timeout", "truncated"]
"""`foreign` is a 200 response that no object storage sends, such as the web page of a console or a login
proxy.
"""

_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "IncompleteBody",
        "InternalError",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)


_LONGEST_MESSAGE: Final = 2000
_CREDENTIAL: Final = re.compile(
    r"((?:security[-_]token|signature|credential|authorization)[\"']?\s*[:=]\s*)[^|,;<&\n]+", re.IGNORECASE
)


@dataclass(slots=True)
class RequestFailed(Exception):
    """One failed attempt. `status` and `code` are from the service's response, if there was one."""

    kind: FailureKind
    message: str
    status: int | None = None
    code: str = ""
    received_bytes: int = 0
    """The number of requested bytes that arrived, if a body was cut short."""
    hidden_retries: int = 0
    """The number of attempts that the library itself had made before."""

    def __str__(self) -> str:
        answer = " ".join(str(word) for word in (self.status, self.code) if word)
        # The responses of some services and proxies repeat the headers that they were sent.
        message = _CREDENTIAL.sub(r"\1***", self.message[:_LONGEST_MESSAGE])
        return f"{answer}: {message}" if answer else message

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed a moment later."""
        if self.kind in ("answer", "foreign"):
            return self.status in _TRANSIENT_STATUS or self.code in _TRANSIENT_CODES
        return True

    @property
    def is_missing(self) -> bool:
        """True if the service has no such object."""
        return self.status == 404 or self.code in ("NoSuchKey", "NoSuchBucket", "NoSuchUpload")


def require_length(received_bytes: int, expected_bytes: int) -> None:
    """Raise `RequestFailed` if a body ended too early."""
    if received_bytes != expected_bytes:
        message = f"{received_bytes} of {expected_bytes} bytes arrived"
        raise RequestFailed("truncated", message, received_bytes=received_bytes)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """The service's description of an object. `key` includes the storage's prefix."""

    key: str
    size_bytes: int
    modified_s: float
    etag: str | None


def require_later(found: RemoteObject, after: str) -> None:
    """Raise `RequestFailed` if a listing goes back, as if it began again with every page."""
    # A folder marker (`a/`) may be listed as `a`, after `a!`.
    if found.key + "/" * (not found.size_bytes) <= after:
        raise RequestFailed("foreign", f"a listing goes back from {after} to {found.key}")


def bare_etag(etag: str | None) -> str | None:
    """Return an ETag without its quotes; None for an empty one."""
    return (etag or "").strip('"') or None


class ObjectClient(ABC):
    """One endpoint and bucket through one library. Any thread may call it; each call is one attempt."""

    url = ""
    """The endpoint in the form used by counters and errors."""
    read_copy = ""
    """The reason under which the copies of reads are counted; empty if reads need no copy."""
    write_copy = ""
    """The reason under which the copies of writes are counted; empty if writes need no copy."""
    gets_whole = False
    """True if the client has `get_whole`."""
    has_conditions = False
    """True if the client has `put_if` and this service checks the condition."""
    threads_of: ClassVar[str] = ""
    """The library's name, if it starts threads at its first request and cannot start them again in a fork."""
    errors: ClassVar[tuple[type[Exception], ...]] = ()
    """The errors that the library raises."""

    @staticmethod
    @abstractmethod
    def explain(error: Exception) -> RequestFailed:
        """Convert one of `errors` to a `RequestFailed`."""

    @abstractmethod
    def head(self, key: str) -> RemoteObject:
        """Describe one object."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fill `buffer` from `offset` of the object. If the library can, require that it has this `etag`."""

    @abstractmethod
    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Return objects whose keys begin with `prefix` and come after `after`, page by page."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object."""

    @abstractmethod
    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object, in one request if the library can; return its ETag."""

    def get_whole(self, key: str, limit_bytes: int) -> tuple[RemoteObject, bytes | None]:
        """Get an object with its size and ETag in one request; its bytes are None if it exceeds the limit."""
        raise AssertionError(f"{type(self).__name__} gets no whole objects ({key}, {limit_bytes})")

    def put_if(self, key: str, content: memoryview, *, replaces: str | None) -> str | None:
        """Do what `put` does, but only if the object has the ETag `replaces` or, for None, does not exist.

        Otherwise, the attempt fails with status 412 or 409.
        """
        raise AssertionError(f"{type(self).__name__} has no conditions ({key}, {len(content)}, {replaces})")


class PartClient(ObjectClient):
    """A client with separate parts: each is sent, retried and acknowledged by itself, on any endpoint."""

    @abstractmethod
    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload; return its ID."""

    @abstractmethod
    def put_part(self, key: str, upload: str, number: int, content: memoryview) -> str:
        """Send part `number` (from 1); return its ETag."""

    @abstractmethod
    def complete_upload(self, key: str, upload: str, etags: Sequence[str]) -> str | None:
        """Combine all parts into the object; return its ETag."""

    @abstractmethod
    def abort_upload(self, key: str, upload: str) -> None:
        """Abort the upload and delete its parts."""


class StreamClient(ObjectClient):
    """A client that takes a whole stream of parts and reports only the end of the upload.

    The library itself retries parts: callers cannot, because their buffers have already been released.
    """

    @abstractmethod
    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`, each of `part_bytes` except the last; return the object's ETag.

        Takes a part only when there is room for it. Keeps no reference to a view once its bytes are sent,
        which is how the sink learns of it. An exception from `parts` aborts the upload and is raised again.
        """


@contextmanager
def attempt(client: ObjectClient) -> Iterator[None]:
    """Make one attempt at a request: whatever the library raises becomes `RequestFailed`.

    Raises `UsageError` in a forked process if its parent has used a library with threads: the child has none
    of the threads, so a request would wait forever.
    """
    pid = os.getpid()
    if client.threads_of and (first_pid := _FIRST_USERS.setdefault(client.threads_of, pid)) != pid:
        raise UsageError(
            f"The client {client.threads_of} cannot work in a forked process: process {first_pid}, "
            "which it was forked from, has used it before",
            where=f"process {pid}",
            fix="Start the process with 'spawn' or 'forkserver' (multiprocessing_context of a DataLoader), "
            "or fork before the first request; for s3://, ?client=minio can read in a fork.",
        )
    try:
        yield
    except client.errors as error:
        raise client.explain(error) from error


_FIRST_USERS: dict[str, int] = {}
"""The ID of the process that sent the first request, by library."""

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Connections or a thread pool that each process creates for itself: the parent's fail after a fork."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made = {os.getpid(): make()}
        """The object of each process, by PID. The parent's object is kept, because its destructor could wait
        for threads that do not exist here.
        """

    def get(self) -> T:
        """Return the object of the calling process; a forked child creates it at the first call."""
        pid = os.getpid()
        if pid not in self._made:
            self._made[pid] = self._make()
        return self._made[pid]


CLIENTS: Mapping[ClientName, str] = MappingProxyType(
    {
        "obstore": "penstock.storage.objects.client_obstore",
        "minio": "penstock.storage.objects.client_minio",
        "s3dlio": "penstock.storage.objects.client_s3dlio",
        "s3torchconnector": "penstock.storage.objects.client_s3torchconnector",
    }
)
"""The module of each client's adapter. Its `connect` makes an `ObjectClient`."""


def connect(settings: ClientSettings) -> ObjectClient:
    """Return the adapter for `settings.options.client`; raise `Unavailable` if its library is missing."""
    name = settings.options.client
    try:
        module = import_module(CLIENTS[name])
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"The S3 client {name} is not installed: no module {error.name!r}",
            fix=f"Run: {install_command(name)} (or use client=obstore).",
        ) from error
    return cast("ObjectClient", module.connect(settings))
