"""Writing one object: buffers become parts, and the finished object is verified.

An object of one part is one PUT at `finish`; a larger one is an upload in parts from its first whole part on.
Invariant: `finish` returns only after the service itself has reported the submitted size.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ShortTransfer, StorageError
from penstock.storage.objects.client import RemoteObject
from penstock.storage.objects.multipart_upload import Upload
from penstock.storage.objects.part_cutter import (
    MAX_PARTS,
    PartCutter,
    SharedRelease,
    UploadPart,
    choose_part_bytes,
    flat_bytes,
)
from penstock.storage.objects.requests import RetryingRequests
from penstock.storage.protocol import Counters, ObjectInfo, Release
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewObject:
    """What a sink is to write: `declared_bytes` is the size told beforehand, if any."""

    key: str
    """The key below the storage's root, as its user knows it."""
    remote_key: str
    uri: str
    declared_bytes: int | None
    target_part_bytes: int


class ObjectSink:
    """A `Sink` on objects. `begin_upload` opens an upload whose parts have so many bytes."""

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
            self._check_declared()
            self._cut(view, shared)
        finally:
            shared.let_go()

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
            part.let_go()
            raise StorageError(
                f"The object outgrew {MAX_PARTS:,} parts of {format_bytes(self._cutter.part_bytes)}",
                uri=self._new.uri,
                fix="Tell its size to create(), or raise part_bytes.",
            )
        if self._upload is None:
            self._upload = self._begin(self._cutter.part_bytes, part)
        self._num_parts += 1
        self._upload.send(part.content, part.let_go)

    def _begin(self, part_bytes: int, first: UploadPart) -> Upload:
        try:
            upload = self._begin_upload(self._new, part_bytes)
        except StorageError:
            first.let_go()
            raise
        self._orphan = weakref.finalize(self, upload.abort)  # a sink that nobody ends leaves nothing either
        return upload

    def finish(self) -> ObjectInfo:
        """Complete the object, and compare what the service then has with what was submitted."""
        self._check_open()
        self._check_declared(is_final=True)
        etag = self._complete()
        self._is_over = True
        self._forget_upload()
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
                rest.let_go()
        self._counters.add(written_bytes=len(content))
        if self._requests.any_client.write_copy:
            self._counters.add_copy(self._requests.any_client.write_copy, len(content))
        return etag

    def _verify(self, stored: RemoteObject, etag: str | None) -> None:
        """Refuse an object that is not the one submitted; a damaged one is removed, a stranger's is not."""
        if etag and stored.etag and etag != stored.etag:
            raise StorageError(
                f"The object found (ETag {stored.etag}) is not the one just uploaded (ETag {etag})",
                uri=self._new.uri,
                fix="Another writer replaced it: find out who else writes this key.",
            )
        if stored.size_bytes == self._submitted_bytes:
            return
        raise ShortTransfer(
            f"The service stored {stored.size_bytes} of {self._submitted_bytes} bytes and said success; "
            f"the damaged object was {self._remove_damaged()}",
            uri=self._new.uri,
            expected_bytes=self._submitted_bytes,
            actual_bytes=stored.size_bytes,
            fix="The service lost data: do not trust it before its operator has found out why.",
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
        """Drop the upload and release every buffer."""
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
                "This object was already finished or aborted", uri=self._new.uri, fix="Create it anew."
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
            fix="Tell create() the true size, or none.",
        )
