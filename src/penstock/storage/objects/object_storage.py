"""Objects of S3, Google and Azure as a `Storage`: keys below a bucket and prefix, through any of the clients.

Large reads become ranges, several in flight at once, straight into the caller's buffer. Invariants: what is
not in the counters was not sent; no key that passes `check_key` leaves the prefix; `read_into` returns or
raises only when no request still writes into the buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import cast

from penstock.errors import AlreadyThere, ShortTransfer
from penstock.storage.objects.client import (
    ObjectClient,
    RemoteObject,
    SupportsConditionalPut,
    SupportsStreamUpload,
    connect,
)
from penstock.storage.objects.client_settings import ObjectLocation
from penstock.storage.objects.errors_map import RequestContext, RequestFailed
from penstock.storage.objects.multipart_upload import PartUpload, StreamUpload, Upload, UploadSpec
from penstock.storage.objects.object_sink import NewObject, ObjectSink
from penstock.storage.objects.part_cutter import flat_bytes, split_range
from penstock.storage.objects.requests import MAX_BACKOFF_S, Endpoint, RetryingRequests
from penstock.storage.protocol import Counters, ObjectInfo, OptionValue
from penstock.storage.uri import check_key, check_prefix


class ObjectSource:
    """A `Source` on objects: the object as it was when opened, where the client can insist on that."""

    def __init__(
        self,
        found: RemoteObject,
        uri: str,
        requests: RetryingRequests,
        counters: Counters,
        *,
        range_bytes: int,
        pool: Callable[[], Executor],
    ) -> None:
        self._found = found
        self._uri = uri
        self._requests = requests
        self._counters = counters
        self._range_bytes = range_bytes
        self._pool = pool

    @property
    def size_bytes(self) -> int:
        """The object's size when it was opened."""
        return self._found.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset`."""
        view = flat_bytes(buffer)
        there = max(0, min(len(view), self.size_bytes - offset))
        if there < len(view):
            raise ShortTransfer(
                f"{len(view)} bytes at {offset} reach past the end of an object of {self.size_bytes}",
                uri=self._uri,
                expected_bytes=len(view),
                actual_bytes=there,
                fix="Ask for less; stat() tells the size.",
            )
        if view:
            self._read_ranges(offset, view)

    def _read_ranges(self, offset: int, view: memoryview) -> None:
        first, *others = split_range(offset, len(view), self._range_bytes)
        started = [
            self._pool().submit(self._read_one, start, view[start - offset : start - offset + length])
            for start, length in others
        ]
        try:
            self._read_one(first[0], view[: first[1]])
        finally:
            wait(started)
        for read in started:
            read.result()

    def _read_one(self, start: int, view: memoryview) -> None:
        self._requests.call(
            "GetObject",
            self._uri,
            lambda client: client.read_into(self._found.key, start, view, self._found.etag),
            wanted_bytes=len(view),
        )
        self._counters.add(read_bytes=len(view))
        copy = self._requests.any_client.read_copy
        if copy:
            self._counters.add_copy(copy, len(view))

    def close(self) -> None:
        """Nothing is held open between requests."""


PAGE_KEYS = 1000
"""Keys in one page of a listing, which is one request."""
_CONDITION_FAILED = (409, 412)
STALL_GRACE_S = 5.0
"""An upload is given up so long after its client should have given up by itself."""


class ObjectStorage:
    """A `Storage` on objects; a finished one is durable by the service's word."""

    def __init__(self, place: ObjectLocation, rank: int = 0) -> None:
        options = place.options
        self.uri = place.uri
        self.options: Mapping[str, OptionValue] = place.record()
        self.counters = Counters()
        self._place = place
        self._lock = threading.Lock()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._requests = RetryingRequests(
            [Endpoint(settings.endpoint or place.uri, connect(settings)) for settings in place.clients],
            bucket=place.bucket,
            counters=self.counters,
            attempts=options.attempts,
            backoff_s=options.backoff_s,
            rank=rank,
        )

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The URLs of the service; for Google and Azure, which have one each, the storage's own URI."""
        return self._requests.endpoint_urls

    def _remote(self, key: str) -> str:
        return f"{self._place.prefix}/{key}" if self._place.prefix else key

    def _uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def _pool(self, name: str, num_threads: int) -> Executor:
        """Threads for parts or ranges, started when first needed."""
        with self._lock:
            if name not in self._pools:
                self._pools[name] = ThreadPoolExecutor(num_threads, thread_name_prefix=f"penstock-{name}")
            return self._pools[name]

    def create(self, key: str, size_bytes: int | None = None) -> ObjectSink:
        """Begin an object; a size told beforehand saves requests and lets parts grow to fit it."""
        new = NewObject(
            key=check_key(key, self.uri),
            remote_key=self._remote(key),
            uri=self._uri_of(key),
            declared_bytes=size_bytes,
            target_part_bytes=self._place.options.part_bytes,
        )
        return ObjectSink(new, self._requests, self.counters, self._begin_upload)

    def _begin_upload(self, new: NewObject, part_bytes: int) -> Upload:
        options = self._place.options
        spec = UploadSpec(
            key=new.remote_key,
            uri=new.uri,
            bucket=self._place.bucket,
            part_bytes=part_bytes,
            in_flight=options.parts_in_flight,
            stall_s=options.attempts * (options.request_timeout_s + MAX_BACKOFF_S) + STALL_GRACE_S,
        )
        endpoint = self._requests.next_endpoint()
        if isinstance(endpoint.client, SupportsStreamUpload):
            return StreamUpload(spec, endpoint, self.counters)
        pool = self._pool("parts", options.parts_in_flight)
        return PartUpload(spec, self._requests, pool, self.counters)

    @property
    def has_conditions(self) -> bool:
        """Whether client and service can put on a condition."""
        client = self._requests.any_client
        return isinstance(client, SupportsConditionalPut) and client.has_conditions

    def write_if(self, key: str, content: bytes, *, replaces: str | None) -> ObjectInfo:
        """Write a small object in one request, if the service finds there what `replaces` says."""
        remote, uri = self._remote(check_key(key, self.uri)), self._uri_of(key)

        def put(client: ObjectClient) -> str | None:
            try:
                return cast("SupportsConditionalPut", client).put_if(
                    remote, memoryview(content), replaces=replaces
                )
            except RequestFailed as failure:
                is_gone = replaces is not None and failure.is_missing and failure.code != "NoSuchBucket"
                if failure.status not in _CONDITION_FAILED and not is_gone:
                    raise
                raise AlreadyThere(
                    f"Another object is there ({failure})", uri=uri, fix="Read it, and decide anew."
                ) from failure

        etag = self._requests.call("PutObject", uri, put)
        self.counters.add(written_bytes=len(content))
        return replace(self.stat(key), checksum=etag)

    def open(self, key: str) -> ObjectSource:
        """Open an object for ranged reads: one request, for its size."""
        options = self._place.options
        return ObjectSource(
            self._head(key),
            self._uri_of(key),
            self._requests,
            self.counters,
            range_bytes=options.range_bytes,
            pool=lambda: self._pool("ranges", options.ranges_in_flight),
        )

    def _head(self, key: str) -> RemoteObject:
        remote = self._remote(check_key(key, self.uri))
        return self._requests.call("HeadObject", self._uri_of(key), lambda client: client.head(remote))

    def stat(self, key: str) -> ObjectInfo:
        """One object's facts; the checksum is its ETag."""
        return _describe(key, self._head(key))

    def delete(self, key: str) -> None:
        """Remove one object; silent where there is none, because S3 does not tell."""
        remote = self._remote(check_key(key, self.uri))

        def delete(client: ObjectClient) -> None:
            try:
                client.delete(remote)
            except RequestFailed as failure:
                if failure.code == "NoSuchBucket" or not failure.is_missing:
                    raise

        self._requests.call("DeleteObject", self._uri_of(key), delete)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the folder `prefix`, in pages; one that fails is resumed after its last key."""
        folder = check_prefix(prefix, self.uri)
        uri = self._uri_of(folder) if folder else self.uri
        return self._list(f"{self._remote(folder)}/".lstrip("/") if folder else self._remote(""), uri)

    def _list(self, remote_prefix: str, uri: str) -> Iterator[ObjectInfo]:
        after, attempt, num_root = "", 1, len(self._remote(""))
        while True:
            endpoint = self._requests.next_endpoint()
            self.counters.add(requests=1, endpoint=endpoint.url)
            num_listed = 0
            try:
                for found in endpoint.client.list(remote_prefix, after):
                    after, attempt, num_listed = found.key, 1, num_listed + 1
                    if num_listed % PAGE_KEYS == 0:
                        self.counters.add(requests=1, endpoint=endpoint.url)
                    if not found.key.endswith(
                        "/"
                    ):  # a console's folder marker, which no storage of ours makes
                        yield _describe(found.key[num_root:], found)
            except RequestFailed as failure:
                asked = RequestContext(
                    "ListObjectsV2", uri, self._place.bucket, endpoint.url, attempts=attempt
                )
                self._requests.wait_for_retry(failure, asked)
                attempt += 1
            else:
                return

    def sync(self, prefix: str = "") -> None:
        """Nothing: a service that answered a PUT with success has promised to keep it."""
        check_prefix(prefix, self.uri)


def _describe(key: str, found: RemoteObject) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=found.size_bytes, modified_s=found.modified_s, checksum=found.etag)
