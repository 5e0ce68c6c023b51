"""Writing one object: buffers are cut into parts, sent, and the finished object is verified.

An object of one part is one PUT at `finish`; a larger one is an upload in parts from its first whole part on:
`PartUpload` sends each part itself, `StreamUpload` feeds a library's own stream. All parts of an upload have
the same size except the last, which every S3 service accepts. Invariants: an owner's `release` is called
exactly once, when the last piece of its buffer is no longer needed; `finish` returns only after the service
itself has reported the submitted size, unless the caller asks for all sizes; a failed upload is aborted at
the service, too.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import numpy as np

from penstock.errors import ShortTransfer, StorageError, StorageTimeout
from penstock.storage.aligned import copy_bytes, flat
from penstock.storage.objects.client import PartClient, RemoteObject, RequestFailed, StreamClient, attempt
from penstock.storage.objects.client_settings import MIN_PART_BYTES, ObjectOptions
from penstock.storage.objects.object_requests import (
    MAX_BACKOFF_S,
    RequestContext,
    RetryingRequests,
    map_request_error,
)
from penstock.storage.protocol import Counters, ObjectInfo, Release
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PART_BYTES: Final = 5 * 1024**3
MAX_PARTS: Final = 10_000


def choose_part_bytes(target_bytes: int, first_buffer_bytes: int, size_bytes: int | None) -> int:
    """The part size for an object whose first buffer has `first_buffer_bytes`; `size_bytes` if known.

    It is the smallest that fits 10,000 parts or `target_bytes`, whichever is more; but where buffers of the
    first one's size divide into equal parts of between half and twice that, such a part: nothing is copied
    then.
    """
    least_bytes = max(MIN_PART_BYTES, -(-(size_bytes or 0) // MAX_PARTS))
    target_bytes = min(max(target_bytes, least_bytes), MAX_PART_BYTES)
    if first_buffer_bytes == size_bytes:
        return target_bytes
    # From the number of parts that comes closest to the target, outwards: the first that divides evenly.
    nearest = max(1, round(first_buffer_bytes / target_bytes))
    for step in range(nearest + 1):
        for pieces in (nearest + step, nearest - step):
            if pieces < 1 or first_buffer_bytes % pieces:
                continue
            part_bytes = first_buffer_bytes // pieces
            fits = (
                max(least_bytes, -(-target_bytes // 2)) <= part_bytes <= min(2 * target_bytes, MAX_PART_BYTES)
            )
            if fits:
                return part_bytes
    return target_bytes


def split_range(offset: int, length: int, range_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the requests that together read `length` bytes from `offset`."""
    for start in itertools.takewhile(lambda start: start < length, itertools.count(0, range_bytes)):
        yield offset + start, min(range_bytes, length - start)


GATHER_COPY = "objects-gather"
"""Reason under which copies of buffers that are not whole parts are counted."""


class SharedRelease:
    """Calls `release` once, when the last holder drops its hold; `force` does not wait for them."""

    def __init__(self, release: Release | None) -> None:
        self._release = release
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> Release:
        """Add a holder; the function that it calls once to drop its hold."""
        with self._lock:
            self._holders += 1
        return self.drop

    def drop(self) -> None:
        """Drop one hold. The first one belongs to the creator of this object."""
        with self._lock:
            self._holders -= 1
            is_last = self._holders <= 0
        if is_last:
            self.force()

    def force(self) -> None:
        """Release now: an upload that still holds a part will never be completed."""
        with self._lock:
            due, self._release = self._release, None
        if due is not None:
            due()


Part = tuple[memoryview, Release]
"""A piece of the object for one request, and what to call when its bytes are no longer needed."""


class PartCutter:
    """Cuts submitted buffers into parts of exactly `part_bytes`; smaller pieces are gathered into parts.

    An object that `is_single` is never sent in parts: all of it is the `rest`, uncopied if it came in one
    buffer. Gathered parts are released for reuse, so there are as many of their buffers as are in flight.
    """

    def __init__(self, part_bytes: int, counters: Counters, *, is_single: bool) -> None:
        self.part_bytes = part_bytes
        self._is_single = is_single
        self._counters = counters
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._filling: memoryview | None = None
        self._filled_bytes = 0
        self._rest: Part | None = None

    def cut(self, view: memoryview, shared: SharedRelease, *, ends_object: bool) -> Iterator[Part]:
        """The parts that `view` completes; `ends_object` promises that it is the last buffer."""
        while view:
            if self._filled_bytes == 0 and ends_object and self._is_single:
                self._rest = view, shared.hold()
                return
            is_part = len(view) >= self.part_bytes or ends_object
            if self._filled_bytes == 0 and is_part and not self._is_single:
                yield view[: self.part_bytes], shared.hold()
                view = view[self.part_bytes :]
            else:
                view = view[self._gather(view) :]
                if self._filled_bytes == self.part_bytes and not self._is_single:
                    yield self._take_gathered()

    def _gather(self, view: memoryview) -> int:
        if self._filling is None:
            try:
                # One that was used before if possible, because its pages are in memory.
                self._filling = self._free.get_nowait()
            except queue.Empty:
                self._filling = np.empty(self.part_bytes, np.uint8).data
        taken = min(len(view), self.part_bytes - self._filled_bytes)
        copy_bytes(self._filling[self._filled_bytes : self._filled_bytes + taken], view[:taken])
        self._filled_bytes += taken
        self._counters.add_copy(GATHER_COPY, taken)
        return taken

    def _take_gathered(self) -> Part:
        buffer, self._filling = self._filling, None
        size_bytes, self._filled_bytes = self._filled_bytes, 0
        assert buffer is not None
        return buffer[:size_bytes], lambda: self._free.put(buffer)

    def rest(self) -> Part | None:
        """The rest at the end of the object: the last part, or all of a single one; None for nothing."""
        rest, self._rest = self._rest, None
        return rest or (self._take_gathered() if self._filled_bytes else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """The object that a sink writes; `declared_bytes` is the size given to `create`, if any."""

    key: str
    """Relative to the storage's root; `remote_key` is relative to the bucket."""
    remote_key: str
    uri: str
    declared_bytes: int | None
    options: ObjectOptions
    confirms: bool = True
    """True if `finish` asks the service for the size of what it stored."""

    @property
    def stall_s(self) -> float:
        """The time that an upload may make no progress: longer than its client's own limits."""
        options = self.options
        return options.attempts * (options.request_timeout_s + MAX_BACKOFF_S) + STALL_GRACE_S

    def stalled(self) -> StorageTimeout:
        """The error of an upload without progress."""
        return StorageTimeout(
            f"The upload made no progress for {self.stall_s:.0f} s",
            uri=self.uri,
            fix="Check whether the service is overloaded or the network stalls; raise request_timeout_s.",
        )

    def warn_of_orphan(self, error: StorageError) -> None:
        """Log that an upload could not be aborted."""
        logger.warning(
            "Parts of an unfinished upload may remain at %s, invisible but billed (%s). "
            "A lifecycle rule that aborts incomplete uploads removes them.",
            self.uri,
            error,
        )


STALL_GRACE_S = 5.0
RELEASE_LIMIT_S = 10.0
"""The time that an abandoned client library may keep buffers before they are released regardless."""


class PartUpload:
    """Parts sent by a pool of threads, each on the endpoint whose turn it is, each with its own retries."""

    def __init__(
        self, new: NewObject, requests: RetryingRequests, pool: Executor, counters: Counters
    ) -> None:
        self._new = new
        self._requests = requests
        self._pool = pool
        self._counters = counters
        self._slots = threading.BoundedSemaphore(new.options.parts_in_flight)
        self._failure: StorageError | None = None
        self._parts: list[Future[str]] = []
        self._upload = self._call("CreateMultipartUpload", lambda client: client.begin_upload(new.remote_key))

    def _call(self, verb: str, action: Callable[[PartClient], T]) -> T:
        return self._requests.call(verb, self._new.uri, lambda client: action(cast("PartClient", client)))

    def send(self, part: memoryview, release: Release) -> None:
        """Pass on the next part; blocks while too many are in flight, raises an earlier part's error."""
        # The limit covers all attempts of a part, so beyond it the client hangs.
        if not self._slots.acquire(timeout=self._new.stall_s):
            raise self._new.stalled()
        if self._failure is not None:
            self._slots.release()
            release()
            raise self._failure
        number = len(self._parts) + 1
        self._parts.append(self._pool.submit(self._send_one, number, part, release))

    def _send_one(self, number: int, part: memoryview, release: Release) -> str:
        key, upload = self._new.remote_key, self._upload
        try:
            if self._failure is not None:
                raise self._failure
            etag = self._call("UploadPart", lambda client: client.put_part(key, upload, number, part))
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
        """Wait for all parts, each of which is bounded by its attempts, and complete; the object's ETag."""
        key, etags = self._new.remote_key, [part.result() for part in self._parts]
        return self._call(
            "CompleteMultipartUpload", lambda client: client.complete_upload(key, self._upload, etags)
        )

    def abort(self) -> None:
        """Wait for running parts, then abort the upload at the service. Safe after a failure."""
        self._failure = self._failure or StorageError("The upload was given up", uri=self._new.uri)
        # A part that arrived after the abort would stay stored, and billed.
        wait(self._parts)
        key, upload = self._new.remote_key, self._upload
        try:
            self._call("AbortMultipartUpload", lambda client: client.abort_upload(key, upload))
        except StorageError as error:
            self._new.warn_of_orphan(error)


class _Abandoned(Exception):
    """Raised inside the library's stream to make it abort the upload."""


class StreamUpload:
    """A library's own upload, run in a thread and fed part by part; the library iterates over this object.

    Libraries do not report which part is acknowledged, but they drop their reference to its memory when they
    are done with it, and a finalizer observes that: a stream far larger than memory passes through a few
    buffers, uncopied.
    """

    def __init__(
        self, new: NewObject, requests: RetryingRequests, part_bytes: int, counters: Counters
    ) -> None:
        self._new = new
        self._client = cast("StreamClient", requests.next_client())
        self._bucket = requests.bucket
        self._part_bytes = part_bytes
        self._counters = counters
        self._waiting: queue.SimpleQueue[memoryview | type[_Abandoned] | None] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(new.options.parts_in_flight)
        self._released = threading.Condition()
        self._num_unreleased = self._num_released = self._sent_bytes = 0
        self._etag: str | None = None
        self._failure: StorageError | None = None
        self._ended = threading.Event()
        counters.add(requests=2, endpoint=self._client.url)  # begin and complete
        threading.Thread(target=self._run, name=f"upload {new.remote_key}", daemon=True).start()

    def _run(self) -> None:
        failure: StorageError | None = StorageError(
            "The client library ended without a result", uri=self._new.uri
        )
        try:
            with attempt(self._client):
                self._etag = self._client.put_stream(self._new.remote_key, self, self._part_bytes)
            failure = None
        except _Abandoned:
            failure = StorageError("The upload was given up", uri=self._new.uri)
        except RequestFailed as refused:
            request = RequestContext("UploadPart", self._new.uri, self._bucket, self._client.url)
            self._counters.add(errors=1, retries=refused.hidden_retries)
            failure = map_request_error(refused, request)
        finally:
            self._failure = failure
            # In this order: a part that is queued after the drain finds the event set, and `send` drains it.
            self._ended.set()
            self._drain()

    def __iter__(self) -> StreamUpload:
        return self

    def __next__(self) -> memoryview:
        # No reference to the part may stay here.
        part = self._waiting.get()
        if part is None:
            raise StopIteration
        if isinstance(part, memoryview):
            return part
        raise _Abandoned

    def _drain(self) -> None:
        """Drop the parts that were not read yet."""
        while not self._waiting.empty():
            self._waiting.get()

    def send(self, part: memoryview, release: Release) -> None:
        """Pass on the next part; blocks while too many are in flight, raises an earlier part's error."""
        self._wait_for(lambda limit_s: self._slots.acquire(timeout=limit_s))
        if self._failure is not None:
            self._slots.release()
            release()
            raise self._failure

        def done() -> None:
            release()
            self._slots.release()
            with self._released:
                self._num_unreleased -= 1
                self._num_released += 1
                self._released.notify_all()

        self._sent_bytes += len(part)
        self._counters.add(requests=1, endpoint=self._client.url)
        with self._released:
            self._num_unreleased += 1
        view = part[:]  # a new one: when it is collected, the library is done
        # Not at exit: the library may still be reading then, and the owner would refill the buffer.
        weakref.finalize(view, done).atexit = False
        self._waiting.put(view)
        del view
        if self._ended.is_set():  # it failed meanwhile and will not read this part
            self._drain()

    def _wait_for(self, ready: Callable[[float], bool]) -> None:
        """Wait until `ready`; `StorageTimeout` once no part was released for as long as the limit."""
        before = self._num_released
        while not ready(self._new.stall_s):
            if self._num_released == before:
                raise self._new.stalled()
            before = self._num_released

    def _wait_until_released(self) -> bool:
        with self._released:
            return self._released.wait_for(lambda: self._num_unreleased == 0, RELEASE_LIMIT_S)

    def finish(self) -> str | None:
        """Wait for the library to complete the object; its ETag."""
        self._waiting.put(None)
        self._wait_for(self._ended.wait)
        if self._failure is not None:
            raise self._failure
        self._counters.add(written_bytes=self._sent_bytes)
        if self._client.write_copy:
            self._counters.add_copy(self._client.write_copy, self._sent_bytes)
        if not self._wait_until_released():
            raise self._new.stalled()
        return self._etag

    def abort(self) -> None:
        """Make the library abort the upload, and wait a while until it has released its parts."""
        self._drain()
        self._waiting.put(_Abandoned)
        if not self._ended.wait(RELEASE_LIMIT_S):
            self._new.warn_of_orphan(self._new.stalled())
        self._wait_until_released()


class ObjectSink:
    """A `Sink` on objects; `pool` gives the threads that send parts."""

    def __init__(
        self, new: NewObject, requests: RetryingRequests, counters: Counters, pool: Callable[[], Executor]
    ) -> None:
        self._new = new
        self._requests = requests
        self._counters = counters
        self._pool = pool
        self._submitted_bytes = 0
        self._num_parts = 0
        self._cutter: PartCutter | None = None
        self._upload: PartUpload | StreamUpload | None = None
        self._orphan: weakref.finalize[[], ObjectSink] | None = None
        self._owners: weakref.WeakSet[SharedRelease] = weakref.WeakSet()
        self._is_over = False

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`: whole parts of it go down as they are, the rest is gathered."""
        view = flat(buffer)
        shared = SharedRelease(release)
        self._owners.add(shared)
        declared = self._new.declared_bytes
        try:
            self._check_open()
            self._submitted_bytes += len(view)
            # Before anything is sent: of an object that is too long nothing should remain.
            self._check_declared()
            if self._cutter is None and view:
                part_bytes = choose_part_bytes(self._new.options.part_bytes, len(view), declared)
                is_single = declared is not None and declared <= part_bytes
                self._cutter = PartCutter(
                    declared if declared is not None and is_single else part_bytes,
                    self._counters,
                    is_single=is_single,
                )
            if self._cutter is not None:
                ends_object = self._submitted_bytes == declared
                for part, done in self._cutter.cut(view, shared, ends_object=ends_object):
                    self._send(part, done, self._cutter.part_bytes)
        finally:
            shared.drop()

    def _send(self, part: memoryview, release: Release, part_bytes: int) -> None:
        if self._num_parts == MAX_PARTS:
            release()
            raise StorageError(
                f"The object outgrew {MAX_PARTS:,} parts of {format_bytes(part_bytes)}",
                uri=self._new.uri,
                fix="Pass the size to create(), or raise part_bytes.",
            )
        try:
            if self._upload is None:
                if isinstance(self._requests.clients[0], StreamClient):
                    upload: PartUpload | StreamUpload = StreamUpload(
                        self._new, self._requests, part_bytes, self._counters
                    )
                else:
                    upload = PartUpload(self._new, self._requests, self._pool(), self._counters)
                # For a sink that is neither finished nor aborted.
                self._orphan = weakref.finalize(self, upload.abort)
                self._upload = upload
        except StorageError:
            release()
            raise
        self._num_parts += 1
        self._upload.send(part, release)

    def finish(self) -> ObjectInfo:
        """Complete the object, and compare the stored size with the submitted one."""
        self._check_open()
        self._check_declared(is_final=True)
        rest = self._cutter.rest() if self._cutter else None
        if self._upload is None:
            etag = self._put_whole(*rest) if rest else self._put_whole(memoryview(b""), lambda: None)
        else:
            if rest is not None and self._cutter is not None:
                self._send(*rest, self._cutter.part_bytes)
            etag = self._upload.finish()
        self._is_over = True
        self._forget_upload()
        if not self._new.confirms:
            return ObjectInfo(
                key=self._new.key, size_bytes=self._submitted_bytes, modified_s=time.time(), checksum=etag
            )
        # An acknowledged upload may still lack a part: the size that the service reports afterwards shows it.
        stored = self._requests.call(
            "HeadObject", self._new.uri, lambda client: client.head(self._new.remote_key)
        )
        self._verify(stored, etag)
        return ObjectInfo(
            key=self._new.key,
            size_bytes=stored.size_bytes,
            modified_s=stored.modified_s,
            checksum=stored.etag,
        )

    def _put_whole(self, content: memoryview, release: Release) -> str | None:
        try:
            etag = self._requests.call(
                "PutObject", self._new.uri, lambda client: client.put(self._new.remote_key, content)
            )
        finally:
            release()
        self._counters.add(written_bytes=len(content))
        if copy := self._requests.clients[0].write_copy:
            self._counters.add_copy(copy, len(content))
        return etag

    def _verify(self, stored: RemoteObject, etag: str | None) -> None:
        """Refuse an object that is not the one submitted; remove a damaged one, but not another writer's."""
        if etag and stored.etag and etag != stored.etag:
            raise StorageError(
                f"The object found (ETag {stored.etag}) is not the one just uploaded (ETag {etag})",
                uri=self._new.uri,
                fix="Another writer replaced it: find out which other program writes this key.",
            )
        if stored.size_bytes == self._submitted_bytes:
            return
        removed = "removed"
        try:
            self._requests.call(
                "DeleteObject", self._new.uri, lambda client: client.delete(self._new.remote_key)
            )
        except StorageError as error:
            removed = f"NOT removed ({error.what})"
        raise ShortTransfer(
            f"The service stored {stored.size_bytes} of {self._submitted_bytes} bytes and reported success; "
            f"the damaged object was {removed}",
            uri=self._new.uri,
            expected_bytes=self._submitted_bytes,
            actual_bytes=stored.size_bytes,
            fix="The service lost data: do not rely on it until its operator has found the cause.",
        )

    def abort(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._upload is not None:
            self._upload.abort()
        self._forget_upload()
        self._cutter = None
        for owner in list(self._owners):
            owner.force()

    def _forget_upload(self) -> None:
        if self._orphan is not None:
            self._orphan.detach()
        self._upload = None

    def _check_open(self) -> None:
        if self._is_over:
            raise StorageError(
                "The object is already finished or aborted", uri=self._new.uri, fix="Create it again."
            )

    def _check_declared(self, *, is_final: bool = False) -> None:
        declared, submitted = self._new.declared_bytes, self._submitted_bytes
        if declared is None or submitted == declared or (submitted < declared and not is_final):
            return
        raise ShortTransfer(
            f"{submitted} bytes were submitted for an object declared to have {declared}",
            uri=self._new.uri,
            expected_bytes=declared,
            actual_bytes=submitted,
            fix="Pass create() the true size, or none.",
        )
