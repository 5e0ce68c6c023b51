"""Writing one object: buffers are cut into parts and sent, and the finished object is verified.

An object of one part is one PUT in `finish`; a larger one is an upload in parts from its first whole part on:
`PartUpload` sends each part itself, `StreamUpload` feeds a library's own stream. All parts of an upload have
the same size except the last, which every S3 service accepts. Invariants: an owner's `release` is called
exactly once, when the last piece of its buffer is no longer needed; `finish` returns only after the service
itself has reported the submitted size, unless the caller compares all sizes; a failed upload is aborted
at the service as well.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar, cast

import numpy as np

from penstock.errors import ShortTransfer, StorageError, StorageTimeout
from penstock.storage.aligned import copy_bytes, flat
from penstock.storage.objects.client import PartClient, RemoteObject, RequestFailed, StreamClient, attempt
from penstock.storage.objects.client_settings import MIN_PART_BYTES
from penstock.storage.objects.object_requests import MAX_BACKOFF_S, RetryingRequests
from penstock.storage.protocol import Counters, ObjectInfo, Release
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PART_BYTES: Final = 5 * 1024**3
MAX_PARTS: Final = 10_000


def choose_part_bytes(target_bytes: int, first_buffer_bytes: int, size_bytes: int | None) -> int:
    """Return the part size for an object whose first buffer has `first_buffer_bytes`; `size_bytes` if known.

    By default, this is the larger of `target_bytes` and the smallest size with which the object has at most
    10,000 parts. If the buffer has between half that size and twice that size (exclusive), parts are as large
    as the buffer, so that nothing is copied.
    """
    least_bytes = max(MIN_PART_BYTES, -(-(size_bytes or 0) // MAX_PARTS))
    target_bytes = min(max(target_bytes, least_bytes), MAX_PART_BYTES)
    lowest, highest = max(least_bytes, -(-target_bytes // 2)), min(2 * target_bytes, MAX_PART_BYTES)
    is_near = lowest <= first_buffer_bytes <= highest and first_buffer_bytes % target_bytes
    return first_buffer_bytes if is_near and first_buffer_bytes != size_bytes else target_bytes


GATHER_COPY = "objects-gather"
"""The reason under which copies of buffers that are not whole parts are counted."""


class SharedRelease:
    """Calls `release` once, when the last holder drops its hold; `force` does not wait for the holders."""

    def __init__(self, release: Release | None) -> None:
        self._release = release
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> Release:
        """Add a holder; return the function that it must call once to drop its hold."""
        with self._lock:
            self._holders += 1
        return self.drop

    def drop(self) -> None:
        """Drop one hold. The first hold belongs to the creator of this object."""
        with self._lock:
            self._holders -= 1
            is_last = self._holders <= 0
        if is_last:
            self.force()

    def force(self) -> None:
        """Release now, for an upload that will never be completed but may still hold a part."""
        with self._lock:
            due, self._release = self._release, None
        if due is not None:
            due()


Part = tuple[memoryview, Release]
"""A piece of the object for one request, and the function to call when its bytes are no longer needed."""


class PartCutter:
    """Cuts submitted buffers into parts of exactly `part_bytes`; smaller pieces are gathered into parts.

    Buffers of gathered parts are reused once released, so there are no more of them than parts in flight.
    """

    def __init__(self, part_bytes: int, counters: Counters) -> None:
        self.part_bytes = part_bytes
        self._counters = counters
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._filling: memoryview | None = None
        self._filled_bytes = 0

    def cut(self, view: memoryview, shared: SharedRelease, *, ends_object: bool) -> Iterator[Part]:
        """Yield the parts that `view` completes; `ends_object` promises that `view` is the last buffer."""
        while view:
            if self._filled_bytes == 0 and (len(view) >= self.part_bytes or ends_object):
                yield view[: self.part_bytes], shared.hold()
                view = view[self.part_bytes :]
                continue
            if self._filling is None:
                try:
                    # Prefer a buffer that was used before, because its pages are in memory.
                    self._filling = self._free.get_nowait()
                except queue.Empty:
                    self._filling = np.empty(self.part_bytes, np.uint8).data
            taken = min(len(view), self.part_bytes - self._filled_bytes)
            copy_bytes(self._filling[self._filled_bytes : self._filled_bytes + taken], view[:taken])
            self._filled_bytes += taken
            self._counters.add_copy(GATHER_COPY, taken)
            view = view[taken:]
            if self._filled_bytes == self.part_bytes:
                yield from self.rest()

    def rest(self) -> Iterator[Part]:
        """Yield the gathered bytes as the last part of the object; no part if there are none."""
        if self._filling is not None:
            part = self._filling[: self._filled_bytes], partial(self._free.put, self._filling)
            self._filling, self._filled_bytes = None, 0
            yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """The object that a sink writes; `declared_bytes` is the size given to `create`, if any."""

    key: str
    """Relative to the storage's root; `remote_key` is relative to the bucket."""
    remote_key: str
    uri: str
    declared_bytes: int | None
    confirms: bool = True
    """True if `finish` asks the service for the size of the stored object."""


STALL_GRACE_S = 5.0
RELEASE_LIMIT_S = 10.0
"""The time after which an abandoned client library's buffers are released, even if it still holds them."""


class _Upload(ABC):
    """An upload of one object in parts, as many at a time as the options allow."""

    def __init__(self, new: NewObject, requests: RetryingRequests) -> None:
        self._new = new
        self._requests = requests
        options = requests.options
        self._stall_s = options.attempts * (options.request_timeout_s + MAX_BACKOFF_S) + STALL_GRACE_S
        """The time for which an upload may make no progress; longer than its client's own limits."""
        self._slots = threading.BoundedSemaphore(options.parts_in_flight)
        self._num_released = 0
        self._failure: StorageError | None = None

    def send(self, part: memoryview, release: Release) -> None:
        """Pass on the next part. Blocks while too many are in flight; raises the error of an earlier part."""
        self._wait_for(lambda limit_s: self._slots.acquire(timeout=limit_s))
        if self._failure is not None:
            self._slots.release()
            release()
            raise self._failure
        self._send(part, release)

    def _wait_for(self, ready: Callable[[float], bool]) -> None:
        """Wait until `ready`; raise `StorageTimeout` if no part is released within the limit."""
        before = self._num_released
        while not ready(self._stall_s):
            if self._num_released == before:
                raise self._stalled()
            before = self._num_released

    def _stalled(self) -> StorageTimeout:
        return StorageTimeout(
            f"The upload made no progress for {self._stall_s:.0f} s",
            uri=self._new.uri,
            fix="Check whether the service is overloaded or the network stalls; raise request_timeout_s.",
        )

    def _warn_of_orphan(self, error: StorageError) -> None:
        logger.warning(
            "Parts of an unfinished upload may remain at %s, invisible but billed (%s). "
            "A lifecycle rule that aborts incomplete uploads removes them.",
            self._new.uri,
            error,
        )

    @abstractmethod
    def _send(self, part: memoryview, release: Release) -> None:
        """Take a part, for which a slot is free; release both once the part's bytes are no longer needed."""

    @abstractmethod
    def finish(self) -> str | None:
        """Wait for all parts, and complete the object; return its ETag."""

    @abstractmethod
    def abort(self) -> None:
        """Abort the upload at the service, and release all parts. May be called after any failure."""


class PartUpload(_Upload):
    """Sends parts by a pool of threads; each part has its own retries and goes to the next endpoint."""

    def __init__(self, new: NewObject, requests: RetryingRequests) -> None:
        super().__init__(new, requests)
        self._parts: list[Future[str]] = []
        self._upload = self._call("CreateMultipartUpload", lambda client: client.begin_upload(new.remote_key))

    def _call(self, verb: str, action: Callable[[PartClient], T]) -> T:
        return self._requests.call(verb, self._new.uri, lambda client: action(cast("PartClient", client)))

    def _send(self, part: memoryview, release: Release) -> None:
        number = len(self._parts) + 1
        self._parts.append(self._requests.parts.get().submit(self._send_one, number, part, release))

    def _send_one(self, number: int, part: memoryview, release: Release) -> str:
        key, upload = self._new.remote_key, self._upload
        try:
            if self._failure is not None:
                raise self._failure
            etag = self._call("UploadPart", lambda client: client.put_part(key, upload, number, part))
            self._requests.counters.add(written_bytes=len(part))
        except StorageError as error:
            self._failure = self._failure or error
            raise
        else:
            return etag
        finally:
            release()
            self._num_released += 1
            self._slots.release()

    def finish(self) -> str | None:
        # The waits are bounded by the number of attempts for each part.
        key, etags = self._new.remote_key, [part.result() for part in self._parts]
        return self._call(
            "CompleteMultipartUpload", lambda client: client.complete_upload(key, self._upload, etags)
        )

    def abort(self) -> None:
        self._failure = self._failure or StorageError("The upload was aborted", uri=self._new.uri)
        # A part that arrived after the abort would remain stored, and billed.
        wait(self._parts)
        key, upload = self._new.remote_key, self._upload
        try:
            self._call("AbortMultipartUpload", lambda client: client.abort_upload(key, upload))
        except StorageError as error:
            self._warn_of_orphan(error)


class _Abandoned(Exception):
    """Raised inside the library's stream to make the library abort the upload."""


class StreamUpload(_Upload):
    """A library's own upload, run in a thread and fed part by part; the library iterates over this object.

    Libraries do not report which part is acknowledged, but they drop their reference to its memory when they
    are done with it, and a finalizer observes that. A stream far larger than memory thus passes through a few
    buffers without being copied.
    """

    def __init__(self, new: NewObject, requests: RetryingRequests, part_bytes: int) -> None:
        super().__init__(new, requests)
        self._client = cast("StreamClient", requests.next_client())
        self._part_bytes = part_bytes
        self._waiting: queue.SimpleQueue[memoryview | type[_Abandoned] | None] = queue.SimpleQueue()
        self._sent_bytes = 0
        self._etag: str | None = None
        self._ended = threading.Event()
        requests.counters.add(requests=2, endpoint=self._client.url)  # begin and complete
        threading.Thread(target=self._run, name=f"upload {new.remote_key}", daemon=True).start()

    def _run(self) -> None:
        uri = self._new.uri
        failure: StorageError | None = StorageError("The client library ended without a result", uri=uri)
        try:
            with attempt(self._client):
                self._etag = self._client.put_stream(self._new.remote_key, self, self._part_bytes)
            failure = None
        except _Abandoned:
            failure = StorageError("The upload was aborted", uri=uri)
        except RequestFailed as refused:
            self._requests.counters.add(errors=1, retries=refused.hidden_retries)
            failure = self._requests.make_error(refused, "UploadPart", uri, self._client.url)
        finally:
            self._failure = failure
            # In this order: a part that is queued after the drain finds the event set, and `send` drains it.
            self._ended.set()
            self._drain()

    def __iter__(self) -> StreamUpload:
        return self

    def __next__(self) -> memoryview:
        # No reference to the part may remain here.
        part = self._waiting.get()
        if part is None:
            raise StopIteration
        if isinstance(part, memoryview):
            return part
        raise _Abandoned

    def _drain(self) -> None:
        """Drop the parts that the library has not read."""
        while not self._waiting.empty():
            self._waiting.get()

    def _send(self, part: memoryview, release: Release) -> None:
        def done() -> None:
            release()
            self._num_released += 1
            self._slots.release()

        self._sent_bytes += len(part)
        self._requests.counters.add(requests=1, endpoint=self._client.url)
        view = part[:]  # a new view: when it is collected, the library is done
        # Not at exit: the library may still be reading then, and the owner would refill the buffer.
        weakref.finalize(view, done).atexit = False
        self._waiting.put(view)
        del view
        if self._ended.is_set():  # the upload has failed and will not read this part
            self._drain()

    def _wait_until_released(self) -> bool:
        """Take back all slots, for good; return False if the library does not release their parts."""
        slots = range(self._requests.options.parts_in_flight)
        return all(self._slots.acquire(timeout=RELEASE_LIMIT_S) for _ in slots)

    def finish(self) -> str | None:
        self._waiting.put(None)
        self._wait_for(self._ended.wait)
        if self._failure is not None:
            raise self._failure
        self._requests.counters.add(written_bytes=self._sent_bytes)
        if self._client.write_copy:
            self._requests.counters.add_copy(self._client.write_copy, self._sent_bytes)
        if not self._wait_until_released():
            raise self._stalled()
        return self._etag

    def abort(self) -> None:
        """Make the library abort the upload, and wait for a limited time until it has released its parts."""
        self._drain()
        self._waiting.put(_Abandoned)
        if not self._ended.wait(RELEASE_LIMIT_S):
            self._warn_of_orphan(self._stalled())
        self._wait_until_released()


class ObjectSink:
    """A `Sink` that writes an object."""

    def __init__(self, new: NewObject, requests: RetryingRequests) -> None:
        self._new = new
        self._requests = requests
        self._submitted_bytes = 0
        self._num_parts = 0
        self._cutter: PartCutter | None = None
        self._whole: Part | None = None
        self._upload: _Upload | None = None
        self._orphan: weakref.finalize[[], ObjectSink] | None = None
        self._owners: weakref.WeakSet[SharedRelease] = weakref.WeakSet()
        self._is_over = False

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`: whole parts of it are sent without a copy, the rest is gathered."""
        view = flat(buffer)
        shared = SharedRelease(release)
        self._owners.add(shared)
        declared = self._new.declared_bytes
        try:
            self._check_open()
            self._submitted_bytes += len(view)
            # Check before anything is sent, so that nothing remains of an object that is too long.
            self._check_declared()
            if not view:
                return
            if self._cutter is None:
                part_bytes = choose_part_bytes(self._requests.options.part_bytes, len(view), declared)
                # If the object fits into one part, the whole object is that part.
                self._cutter = PartCutter(min(part_bytes, declared or part_bytes), self._requests.counters)
            ends_object = self._submitted_bytes == declared
            for part, done in self._cutter.cut(view, shared, ends_object=ends_object):
                if len(part) == declared:
                    self._whole = part, done
                else:
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
        if self._upload is None:
            try:
                if isinstance(self._requests.clients[0], StreamClient):
                    self._upload = StreamUpload(self._new, self._requests, part_bytes)
                else:
                    self._upload = PartUpload(self._new, self._requests)
            except StorageError:
                release()
                raise
            # Aborts the upload of a sink that is neither finished nor aborted.
            self._orphan = weakref.finalize(self, self._upload.abort)
        self._num_parts += 1
        self._upload.send(part, release)

    def finish(self) -> ObjectInfo:
        """Complete the object, and compare the stored size with the submitted one."""
        self._check_open()
        self._check_declared(is_final=True)
        rest = self._whole or (next(self._cutter.rest(), None) if self._cutter else None)
        if self._upload is None:
            etag = self._put_whole(*(rest or (memoryview(b""), lambda: None)))
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
        # An acknowledged upload may still lack a part; the size that the service reports afterwards shows it.
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
        self._requests.counters.add(written_bytes=len(content))
        if copy := self._requests.clients[0].write_copy:
            self._requests.counters.add_copy(copy, len(content))
        return etag

    def _verify(self, stored: RemoteObject, etag: str | None) -> None:
        """Raise if the object is not the one submitted.

        A damaged object is removed, unless another writer made it.
        """
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
        self._cutter = self._whole = None
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
