"""Objects of S3, Google Cloud and Azure as a `Storage`: keys below a bucket and prefix, through any client.

Large reads become ranges, several in flight at once, directly into the caller's buffer. Invariants: every
request is counted; no key that passes `check_key` leads out of the prefix; `read_into` returns or raises only
when no request writes into the buffer any more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from copy import copy
from dataclasses import asdict, replace

from penstock.environment import Environment
from penstock.errors import AlreadyThere, ShortTransfer
from penstock.storage.aligned import flat
from penstock.storage.capabilities import Deferred
from penstock.storage.objects.client import (
    ObjectClient,
    RemoteObject,
    RequestFailed,
    attempt,
    connect,
    require_later,
)
from penstock.storage.objects.client_settings import resolve_settings
from penstock.storage.objects.object_requests import RetryingRequests
from penstock.storage.objects.object_sink import NewObject, ObjectSink
from penstock.storage.protocol import (
    MOST_WHOLE,
    Counters,
    ObjectInfo,
    OptionValue,
    check_key,
    check_prefix,
    require_small,
)
from penstock.storage.uri import Location


class ObjectSource:
    """A `Source` that reads an object as it was when opened, if the client can require its ETag."""

    def __init__(self, described: RemoteObject, uri: str, requests: RetryingRequests) -> None:
        self._object = described
        self.size_bytes = described.size_bytes
        self._uri = uri
        self._requests = requests

    def read_into(self, offset: int, buffer: memoryview) -> None:
        view = flat(buffer)
        available = max(0, min(len(view), self.size_bytes - offset))
        if available < len(view):
            raise ShortTransfer(
                f"{len(view)} bytes at offset {offset} reach past the end at {self.size_bytes}",
                uri=self._uri,
                expected_bytes=len(view),
                actual_bytes=available,
                fix="Request ranges inside size_bytes.",
            )
        if not view:
            return
        step = self._requests.options.range_bytes
        started = [
            self._requests.ranges.get().submit(self._read_one, offset + start, view[start : start + step])
            for start in range(step, len(view), step)
        ]
        # This thread reads the first range, so that small reads need no pool.
        try:
            self._read_one(offset, view[:step])
        finally:
            # Even after an error: requests that are still running write into the buffer.
            wait(started)
        for read in started:
            read.result()

    def _read_one(self, start: int, view: memoryview) -> None:
        self._requests.call(
            "GetObject",
            self._uri,
            lambda client: client.read_into(self._object.key, start, view, self._object.etag),
            wanted_bytes=len(view),
        )
        self._requests.counters.add(read_bytes=len(view))
        if copy := self._requests.clients[0].read_copy:
            self._requests.counters.add_copy(copy, len(view))

    def close(self) -> None:
        """Do nothing: requests leave nothing open."""


SMALL_BYTES = 8 << 20
"""Objects larger than this are read in ranges."""
PAGE_KEYS = 1000
"""The number of keys in one page of a listing, which is one request."""
_CONDITION_FAILED = (409, 412)


class ObjectStorage:
    """A `Storage` of objects. A finished object is durable, as the service promises.

    Creating it sends no request. Raises `Unavailable` if the endpoint or the credentials are missing, or if
    the client's library is not installed; `rank` decides which of several endpoints is used first.
    """

    def __init__(self, location: Location, environment: Environment, rank: int = 0) -> None:
        settings = resolve_settings(location, environment)
        bucket, _, self._prefix = location.root.partition("/")
        options = settings[0].options
        self.uri = location.uri
        self.options: Mapping[str, OptionValue] = asdict(options)
        self.counters = Counters()
        self._confirms = True
        self._known_services: set[str] = set()
        clients = [connect(each) for each in settings]
        for client, each in zip(clients, settings, strict=True):
            client.url = each.endpoint or self.uri
        self.endpoints = tuple(client.url for client in clients)
        """The URLs of the service; for Google Cloud and Azure, the storage's own URI."""
        self.has_conditions = clients[0].has_conditions
        self._requests = RetryingRequests(
            clients, bucket=bucket, counters=self.counters, options=options, rank=rank
        )

    def _remote(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def create(self, key: str, size_bytes: int | None = None) -> ObjectSink:
        """Begin an object. A declared size saves requests, and lets parts grow to suit it."""
        new = NewObject(
            key=check_key(key, self.uri),
            remote_key=self._remote(key),
            uri=self._uri_of(key),
            declared_bytes=size_bytes,
            confirms=self._confirms,
        )
        return ObjectSink(new, self._requests)

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        remote, uri = self._remote(check_key(key, self.uri)), self._uri_of(key)

        def put(client: ObjectClient) -> str | None:
            try:
                with attempt(client):
                    return client.put_if(remote, memoryview(content), replaces=replaces)
            except RequestFailed as failure:
                is_gone = replaces is not None and failure.is_missing and failure.code != "NoSuchBucket"
                if failure.status not in _CONDITION_FAILED and not is_gone:
                    raise
                raise AlreadyThere(
                    f"Another writer came first ({failure})",
                    uri=uri,
                    fix="Read the object again, then retry.",
                ) from failure

        etag = self._requests.call("PutObject", uri, put)
        self.counters.add(written_bytes=len(content))
        if not self._confirms:
            return ObjectInfo(key=key, size_bytes=len(content), modified_s=time.time(), checksum=etag)
        return replace(self.stat(key), checksum=etag)

    def open(self, key: str) -> ObjectSource:
        """Open an object for ranged reads. Sends one request, for its size."""
        return ObjectSource(self._head(key), self._uri_of(key), self._requests)

    def read_whole(self, key: str) -> tuple[ObjectInfo, bytearray]:
        """Return an object and its description; a small one in one request if the client supports that."""
        if self._requests.clients[0].gets_whole:
            remote = self._remote(check_key(key, self.uri))
            found, small = self._requests.call(
                "GetObject", self._uri_of(key), lambda client: client.get_whole(remote, SMALL_BYTES)
            )
            if small is not None:
                self.counters.add(read_bytes=len(small))
                return _describe(key, found), bytearray(small)
        else:
            found = self._head(key)
        require_small(found.size_bytes, self._uri_of(key), MOST_WHOLE)
        content = bytearray(found.size_bytes)
        ObjectSource(found, self._uri_of(key), self._requests).read_into(0, memoryview(content))
        return _describe(key, found), content

    def deferring(self, what: Deferred) -> ObjectStorage:  # noqa: ARG002 - there is one way
        """Return the same storage, but `finish` requests no size: the caller compares sizes in a listing."""
        other = copy(self)
        other._confirms = False  # noqa: SLF001 - its own class
        return other

    def _head(self, key: str) -> RemoteObject:
        remote = self._remote(check_key(key, self.uri))
        return self._requests.call("HeadObject", self._uri_of(key), lambda client: client.head(remote))

    def stat(self, key: str) -> ObjectInfo:
        """Describe one object; its checksum is the ETag."""
        return _describe(key, self._head(key))

    def delete(self, key: str) -> None:
        """Remove one object. If there is none, nothing is raised, because S3 does not report that."""
        remote = self._remote(check_key(key, self.uri))

        def delete(client: ObjectClient) -> None:
            try:
                with attempt(client):
                    client.delete(remote)
            except RequestFailed as failure:
                if failure.code == "NoSuchBucket" or not failure.is_missing:
                    raise

        self._requests.call("DeleteObject", self._uri_of(key), delete)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below the folder `prefix`; a listing that fails is resumed after its last key."""
        folder = check_prefix(prefix, self.uri)
        uri = self._uri_of(folder) if folder else self.uri
        remote_prefix = f"{self._remote(folder)}/".lstrip("/") if folder else self._remote("")
        after, number, num_root = "", 1, len(self._remote(""))
        while True:
            client = self._requests.next_client()
            self.counters.add(requests=1, endpoint=client.url)
            num_listed = 0
            try:
                with attempt(client):
                    for remote in client.list(remote_prefix, after):
                        require_later(remote, after)
                        # Progress resets the attempts: a long listing may fail now and then.
                        after, number, num_listed = remote.key, 1, num_listed + 1
                        if num_listed % PAGE_KEYS == 0:
                            self.counters.add(requests=1, endpoint=client.url)
                        # Consoles create empty objects with such keys as folders.
                        if not remote.key.endswith("/"):
                            yield _describe(remote.key[num_root:], remote)
                    if after:
                        self._known_services.add(client.url)
                self._require_service(client)
            except RequestFailed as failure:
                self._requests.wait_for_retry(failure, "ListObjectsV2", uri, client.url, number)
                number += 1
            else:
                return

    def _require_service(self, client: ObjectClient) -> None:
        """Raise if an endpoint that has listed nothing so far accepts any request, as web servers do.

        Clients mistake a web page for an empty listing, so an existing run would look like a new one.
        """
        if client.url in self._known_services:
            return
        self.counters.add(requests=1, endpoint=client.url)
        absent = self._remote(f".penstock-{secrets.token_hex(16)}")
        try:
            with attempt(client):
                if client.gets_whole:
                    client.get_whole(absent, 0)
                else:
                    client.head(absent)
        except RequestFailed as failure:
            if failure.is_transient or failure.kind == "foreign":
                raise
            self._known_services.add(client.url)
        else:
            raise RequestFailed("foreign", "an object that does not exist was found")

    def sync(self, prefix: str = "") -> None:
        """Do nothing: a service that has acknowledged an object has promised durability."""
        check_prefix(prefix, self.uri)


def _describe(key: str, remote: RemoteObject) -> ObjectInfo:
    return ObjectInfo(
        key=key, size_bytes=remote.size_bytes, modified_s=remote.modified_s, checksum=remote.etag
    )
