"""Writing one object: buffers are cut into parts, and the finished object is verified.

An object of one part is one PUT at `finish`; a larger one is an upload in parts from its first whole part on.
All parts of an upload have the same size except the last, which every S3 service accepts. Invariants: an
owner's `release` is called exactly once, when the last piece of its buffer is no longer needed; `finish`
returns only after the service itself has reported the submitted size, unless the caller asks for all sizes.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.objects.client import RemoteObject
from penstock.storage.objects.client_settings import MIN_PART_BYTES
from penstock.storage.objects.multipart_upload import Upload
from penstock.storage.objects.object_requests import RetryingRequests
from penstock.storage.protocol import Counters, ObjectInfo, Release
from penstock.units import format_bytes

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

    def hold(self) -> Callable[[], None]:
        """Add a holder; the function that it calls once to drop its hold."""
        with self._lock:
            self._holders += 1
        return self.drop

    def drop(self) -> None:
        """Drop one hold. The first one belongs to the creator of this object."""
        with self._lock:
            self._holders -= 1
            due = self._release if self._holders <= 0 else None
            if due is not None:
                self._release = None
        if due is not None:
            due()

    def force(self) -> None:
        """Release now: an upload that still holds a part will never be completed."""
        with self._lock:
            due, self._release = self._release, None
        if due is not None:
            due()


class GatherBuffers:
    """Part-sized buffers for pieces that are too small to be parts; reused, so at most those in flight."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def take(self) -> memoryview:
        """A free buffer; one that was used before if possible, because its pages are in memory."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return np.empty(self.size_bytes, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Make `buffer` available again."""
        self._free.put(buffer)


def flat_bytes(buffer: memoryview) -> memoryview:
    """`buffer` as one row of bytes, as a view of its own."""
    return buffer[:] if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


@dataclass(slots=True)
class UploadPart:
    """A piece of the object for one request; `release` is called when its bytes are no longer needed."""

    content: memoryview
    release: Callable[[], None]


class PartCutter:
    """Cuts submitted buffers into parts of exactly `part_bytes`; smaller pieces are gathered into parts.

    An object that `is_single` is never sent in parts: all of it is the `rest`, uncopied if it came in one
    buffer.
    """

    def __init__(self, part_bytes: int, counters: Counters, *, is_single: bool) -> None:
        self.part_bytes = part_bytes
        self._is_single = is_single
        self._counters = counters
        self._buffers = GatherBuffers(part_bytes)
        self._filling: memoryview | None = None
        self._filled_bytes = 0
        self._rest: UploadPart | None = None

    def cut(self, view: memoryview, shared: SharedRelease, *, ends_object: bool) -> Iterator[UploadPart]:
        """The parts that `view` completes; `ends_object` promises that it is the last buffer."""
        while view:
            if self._filled_bytes == 0 and ends_object and self._is_single:
                self._rest = UploadPart(view, shared.hold())
                return
            is_part = len(view) >= self.part_bytes or ends_object
            if self._filled_bytes == 0 and is_part and not self._is_single:
                yield UploadPart(view[: self.part_bytes], shared.hold())
                view = view[self.part_bytes :]
            else:
                view = view[self._gather(view) :]
                if self._filled_bytes == self.part_bytes and not self._is_single:
                    yield self._take_gathered()

    def _gather(self, view: memoryview) -> int:
        if self._filling is None:
            self._filling = self._buffers.take()
        taken = min(len(view), self.part_bytes - self._filled_bytes)
        room = self._filling[self._filled_bytes : self._filled_bytes + taken]
        np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(view[:taken], np.uint8))
        self._filled_bytes += taken
        self._counters.add_copy(GATHER_COPY, taken)
        return taken

    def _take_gathered(self) -> UploadPart:
        buffer, self._filling = self._filling, None
        size_bytes, self._filled_bytes = self._filled_bytes, 0
        assert buffer is not None
        return UploadPart(buffer[:size_bytes], lambda: self._buffers.give_back(buffer))

    def rest(self) -> UploadPart | None:
        """What is left at the end of the object: the last part, or all of a single one; None for nothing."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        return self._take_gathered() if self._filled_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """The object that a sink writes; `declared_bytes` is the size given to `create`, if any."""

    key: str
    """Relative to the storage's root; `remote_key` is relative to the bucket."""
    remote_key: str
    uri: str
    declared_bytes: int | None
    target_part_bytes: int
    confirms: bool = True
    """Whether `finish` asks the service for the size of what it stored."""


class ObjectSink:
    """A `Sink` on objects. `begin_upload` opens an upload, given the size of its parts."""

    def __init__(
        self,
        new: NewObject,
        requests: RetryingRequests,
        counters: Counters,
        begin_upload: Callable[[NewObject, int], Upload],
    ) -> None:
        self._new = new
        self._requests = requests
        self._counters = counters
        self._begin_upload = begin_upload
        self._submitted_bytes = 0
        self._num_parts = 0
        self._cutter: PartCutter | None = None
        self._upload: Upload | None = None
        self._orphan: weakref.finalize[[], ObjectSink] | None = None
        self._owners: weakref.WeakSet[SharedRelease] = weakref.WeakSet()
        self._is_over = False

    def submit(self, buffer: memoryview, release: Release | None = None) -> None:
        """Append `buffer`: whole parts of it go down as they are, the rest is gathered."""
        view = flat_bytes(buffer)
        shared = SharedRelease(release)
        self._owners.add(shared)
        try:
            self._check_open()
            self._submitted_bytes += len(view)
            # Before anything is sent: of an object that is too long nothing should remain.
            self._check_declared()
            self._cut(view, shared)
        finally:
            shared.drop()

    def _cut(self, view: memoryview, shared: SharedRelease) -> None:
        if self._cutter is None:
            if not view:
                return
            self._cutter = self._make_cutter(len(view))
        ends_object = self._submitted_bytes == self._new.declared_bytes
        for part in self._cutter.cut(view, shared, ends_object=ends_object):
            self._send(part)

    def _make_cutter(self, first_bytes: int) -> PartCutter:
        declared = self._new.declared_bytes
        part_bytes = choose_part_bytes(self._new.target_part_bytes, first_bytes, declared)
        if declared is not None and declared <= part_bytes:
            return PartCutter(declared, self._counters, is_single=True)
        return PartCutter(part_bytes, self._counters, is_single=False)

    def _send(self, part: UploadPart) -> None:
        assert self._cutter is not None
        if self._num_parts == MAX_PARTS:
            part.release()
            raise StorageError(
                f"The object outgrew {MAX_PARTS:,} parts of {format_bytes(self._cutter.part_bytes)}",
                uri=self._new.uri,
                fix="Pass the size to create(), or raise part_bytes.",
            )
        if self._upload is None:
            self._upload = self._begin(self._cutter.part_bytes, part)
        self._num_parts += 1
        self._upload.send(part.content, part.release)

    def _begin(self, part_bytes: int, first: UploadPart) -> Upload:
        try:
            upload = self._begin_upload(self._new, part_bytes)
        except StorageError:
            first.release()
            raise
        self._orphan = weakref.finalize(self, upload.abort)  # for a sink that is neither finished nor aborted
        return upload

    def finish(self) -> ObjectInfo:
        """Complete the object, and compare the stored size with the submitted one."""
        self._check_open()
        self._check_declared(is_final=True)
        etag = self._complete()
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

    def _complete(self) -> str | None:
        rest = self._cutter.rest() if self._cutter else None
        if self._upload is None:
            return self._put_whole(rest)
        if rest is not None:
            self._send(rest)
        return self._upload.finish()

    def _put_whole(self, rest: UploadPart | None) -> str | None:
        content = rest.content if rest else memoryview(b"")
        try:
            etag = self._requests.call(
                "PutObject", self._new.uri, lambda client: client.put(self._new.remote_key, content)
            )
        finally:
            if rest is not None:
                rest.release()
        self._counters.add(written_bytes=len(content))
        if self._requests.any_client.write_copy:
            self._counters.add_copy(self._requests.any_client.write_copy, len(content))
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
        raise ShortTransfer(
            f"The service stored {stored.size_bytes} of {self._submitted_bytes} bytes and reported success; "
            f"the damaged object was {self._remove_damaged()}",
            uri=self._new.uri,
            expected_bytes=self._submitted_bytes,
            actual_bytes=stored.size_bytes,
            fix="The service lost data: do not rely on it until its operator has found the cause.",
        )

    def _remove_damaged(self) -> str:
        try:
            self._requests.call(
                "DeleteObject", self._new.uri, lambda client: client.delete(self._new.remote_key)
            )
        except StorageError as error:
            return f"NOT removed ({error.what})"
        return "removed"

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
