"""Uploads in parts: `PartUpload` sends each part itself, `StreamUpload` feeds a library's own stream.

The sink passes whole parts in order to either. Invariant: `release` of a part is called once its bytes are no
longer needed, at the latest when `finish` or `abort` returns; a failed upload is aborted at the service, too.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import StorageError, StorageTimeout
from penstock.storage.objects.client import ObjectClient, PartClient, StreamClient
from penstock.storage.objects.object_requests import (
    Endpoint,
    RequestContext,
    RequestFailed,
    RetryingRequests,
    map_request_error,
)
from penstock.storage.protocol import Counters

logger = logging.getLogger(__name__)

RELEASE_LIMIT_S = 10.0
"""How long an abandoned client library may keep buffers before they are released regardless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadSpec:
    """The object of an upload, and its limits."""

    key: str
    uri: str
    bucket: str
    part_bytes: int
    in_flight: int
    stall_s: float
    """How long an upload may make no progress before it is given up."""


class Upload(Protocol):
    """An upload part by part."""

    def send(self, part: memoryview, release: Callable[[], None]) -> None:
        """Pass on the next part; blocks while too many are in flight, raises an earlier part's error."""

    def finish(self) -> str | None:
        """Wait for all parts and complete the object; its ETag."""

    def abort(self) -> None:
        """Abort the upload. Safe after a failure."""


class PartUpload:
    """Parts sent by a pool of threads, each on the endpoint whose turn it is, each with its own retries."""

    def __init__(
        self, spec: UploadSpec, requests: RetryingRequests, pool: Executor, counters: Counters
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._pool = pool
        self._counters = counters
        self._slots = threading.BoundedSemaphore(spec.in_flight)
        self._failure: StorageError | None = None
        self._parts: list[Future[str]] = []
        self._upload = requests.call(
            "CreateMultipartUpload", spec.uri, lambda client: _by_parts(client).begin_upload(spec.key)
        )

    def send(self, part: memoryview, release: Callable[[], None]) -> None:
        # The limit covers all attempts of a part, so beyond it the client hangs.
        if not self._slots.acquire(timeout=self._spec.stall_s):
            raise _stalled(self._spec)
        if self._failure is not None:
            self._slots.release()
            release()
            raise self._failure
        number = len(self._parts) + 1
        self._parts.append(self._pool.submit(self._send_one, number, part, release))

    def _send_one(self, number: int, part: memoryview, release: Callable[[], None]) -> str:
        try:
            if self._failure is not None:
                raise self._failure
            etag = self._requests.call(
                "UploadPart",
                self._spec.uri,
                lambda client: _by_parts(client).put_part(self._spec.key, self._upload, number, part),
            )
            self._counters.add(written_bytes=len(part))
        except StorageError as error:
            self._failure = self._failure or error
            raise
        else:
            return etag
        finally:
            release()
            self._slots.release()

    def finish(self) -> str | None:
        """Wait for all parts, each of which is bounded by its attempts, and complete."""
        etags = [part.result() for part in self._parts]
        return self._requests.call(
            "CompleteMultipartUpload",
            self._spec.uri,
            lambda client: _by_parts(client).complete_upload(self._spec.key, self._upload, etags),
        )

    def abort(self) -> None:
        """Wait for running parts, then abort the upload at the service."""
        self._failure = self._failure or StorageError("The upload was given up", uri=self._spec.uri)
        # A part that arrived after the abort would stay stored, and billed.
        wait(self._parts)
        try:
            self._requests.call(
                "AbortMultipartUpload",
                self._spec.uri,
                lambda client: _by_parts(client).abort_upload(self._spec.key, self._upload),
            )
        except StorageError as error:
            _warn_of_orphan(self._spec, error)


def _by_parts(client: ObjectClient) -> PartClient:
    assert isinstance(client, PartClient), "a storage uploads in the way of its client"
    return client


def _warn_of_orphan(spec: UploadSpec, error: StorageError) -> None:
    logger.warning(
        "Parts of an unfinished upload may remain at %s, invisible but billed (%s). "
        "A lifecycle rule that aborts incomplete uploads removes them.",
        spec.uri,
        error,
    )


class _Abandoned(Exception):
    """Raised inside the library's stream to make it abort the upload."""


_END = None


class _Feed:
    """The queue between `send` and the library's stream. As an iterator it keeps no reference to a part."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[memoryview | type[_Abandoned] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_unreleased = 0
        self._all_done = threading.Condition(self._lock)
        self.moved = 0

    def put(self, part: memoryview, done: Callable[[], None]) -> None:
        """Queue `part`; `done` is called when the last reference to it is gone."""
        with self._lock:
            self._num_unreleased += 1
        # Not at exit: the library may still be reading then, and the owner would refill the buffer.
        weakref.finalize(part, self._note_done, done).atexit = False
        self._queue.put(part)

    def _note_done(self, done: Callable[[], None]) -> None:
        done()
        with self._lock:
            self._num_unreleased -= 1
            self.moved += 1
            self._all_done.notify_all()

    def end(self) -> None:
        """Mark the end of the stream."""
        self._queue.put(_END)

    def abandon(self) -> None:
        """Make the stream fail, wherever it is."""
        self._queue.put(_Abandoned)

    def drain(self) -> None:
        """Drop the parts that were not read yet."""
        while not self._queue.empty():
            self._queue.get()

    def wait_until_done(self, limit_s: float) -> bool:
        """Whether all parts were released within the limit."""
        with self._lock:
            return self._all_done.wait_for(lambda: self._num_unreleased == 0, limit_s)

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> memoryview:
        part = self._queue.get()
        if part is _END:
            raise StopIteration
        if isinstance(part, memoryview):
            return part
        raise _Abandoned


class StreamUpload:
    """A library's own upload, run in a thread and fed part by part through a bounded queue.

    Libraries do not report which part is acknowledged, but they drop their reference to its memory when they
    are done with it, and a finalizer observes that: a stream far larger than memory passes through a few
    buffers, uncopied.
    """

    def __init__(self, spec: UploadSpec, endpoint: Endpoint, counters: Counters) -> None:
        self._spec = spec
        self._endpoint = endpoint
        self._counters = counters
        self._feed = _Feed()
        self._slots = threading.BoundedSemaphore(spec.in_flight)
        self._sent_bytes = 0
        self._etag: str | None = None
        self._failure: StorageError | None = None
        self._ended = threading.Event()
        counters.add(requests=2, endpoint=endpoint.url)  # begin and complete
        threading.Thread(target=self._run, name=f"upload {spec.key}", daemon=True).start()

    def _run(self) -> None:
        client = self._endpoint.client
        assert isinstance(client, StreamClient), "a storage uploads in the way of its client"
        failure: StorageError | None = StorageError(
            "The client library ended without a result", uri=self._spec.uri
        )
        try:
            self._etag = client.put_stream(self._spec.key, self._feed, self._spec.part_bytes)
            failure = None
        except _Abandoned:
            failure = StorageError("The upload was given up", uri=self._spec.uri)
        except RequestFailed as refused:
            request = RequestContext("UploadPart", self._spec.uri, self._spec.bucket, self._endpoint.url)
            self._counters.add(errors=1, retries=refused.hidden_retries)
            failure = map_request_error(refused, request)
        finally:
            self._failure = failure
            # In this order: a part that is queued after the drain finds the event set, and `send` drains it.
            self._ended.set()
            self._feed.drain()

    def send(self, part: memoryview, release: Callable[[], None]) -> None:
        self._wait_for_slot()
        if self._failure is not None:
            self._slots.release()
            release()
            raise self._failure

        def done() -> None:
            release()
            self._slots.release()

        self._sent_bytes += len(part)
        self._counters.add(requests=1, endpoint=self._endpoint.url)
        self._feed.put(part[:], done)  # a new view: when it is collected, the library is done
        if self._ended.is_set():  # it failed meanwhile and will not read this part
            self._feed.drain()

    def _wait_for_slot(self) -> None:
        moved = self._feed.moved
        while not self._slots.acquire(timeout=self._spec.stall_s):
            if self._feed.moved == moved:
                raise _stalled(self._spec)
            moved = self._feed.moved

    def finish(self) -> str | None:
        """Wait for the library to complete the object."""
        self._feed.end()
        self._wait_for_end()
        if self._failure is not None:
            raise self._failure
        self._counters.add(written_bytes=self._sent_bytes)
        if self._endpoint.client.write_copy:
            self._counters.add_copy(self._endpoint.client.write_copy, self._sent_bytes)
        if not self._feed.wait_until_done(RELEASE_LIMIT_S):
            raise _stalled(self._spec)
        return self._etag

    def _wait_for_end(self) -> None:
        moved = self._feed.moved
        while not self._ended.wait(self._spec.stall_s):
            if self._feed.moved == moved:
                raise _stalled(self._spec)
            moved = self._feed.moved

    def abort(self) -> None:
        """Make the library abort the upload, and wait a while until it has released its parts."""
        self._feed.drain()
        self._feed.abandon()
        if not self._ended.wait(RELEASE_LIMIT_S):
            _warn_of_orphan(self._spec, _stalled(self._spec))
        self._feed.wait_until_done(RELEASE_LIMIT_S)


def _stalled(spec: UploadSpec) -> StorageTimeout:
    return StorageTimeout(
        f"The upload made no progress for {spec.stall_s:.0f} s",
        uri=spec.uri,
        fix="Check whether the service is overloaded or the network stalls; raise request_timeout_s.",
    )
