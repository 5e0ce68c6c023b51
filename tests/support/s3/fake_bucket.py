"""What the fake S3 server knows: buckets, objects, multipart uploads, and the rules it is strict about.

No HTTP here: `fake_server` translates. Invariant: an object appears only by a whole PUT or a valid
completion.
"""

import bisect
import hashlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

MIN_PART_BYTES = 5 * 1024 * 1024
MAX_PARTS = 10_000


class Refused(Exception):
    """The answer is an S3 error: an HTTP `status` and a `code` word."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"{status} {code} {message}")
        self.status = status
        self.code = code
        self.message = message or code


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object's content and what HEAD tells of it."""

    content: bytes
    etag: str
    modified_s: float


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One line of a listing."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


@dataclass(slots=True)
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


def md5_hex(content: bytes) -> str:
    """The ETag that S3 gives an object of one part."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class FakeBucket:
    """One bucket in memory. `virtual_keys` adds that many one-byte objects which exist only in listings."""

    def __init__(self, *, virtual_keys: int = 0) -> None:
        self._objects: dict[str, StoredObject] = {}
        self._uploads: dict[str, Upload] = {}
        self._numbers = itertools.count(1)
        self._virtual_keys = virtual_keys
        self._lock = threading.RLock()

    @property
    def keys(self) -> list[str]:
        """Keys of all real objects, sorted."""
        with self._lock:
            return sorted(self._objects)

    @property
    def open_uploads(self) -> list[str]:
        """Keys of uploads that nobody completed or aborted: orphans, once a client is done."""
        with self._lock:
            return [upload.key for upload in self._uploads.values()]

    def put(self, key: str, content: bytes, *, if_none: bool = False, if_match: str = "") -> StoredObject:
        """Store an object whole, if the conditions that a request may set hold."""
        stored = StoredObject(content, md5_hex(content), time.time())
        with self._lock:
            older = self._objects.get(key)
            if if_match and older is None:
                raise Refused(404, "NoSuchKey")
            if (if_none and older is not None) or (if_match and older is not None and older.etag != if_match):
                raise Refused(412, "PreconditionFailed")
            self._objects[key] = stored
        return stored

    def get(self, key: str) -> StoredObject:
        """The object of this key."""
        with self._lock:
            if key not in self._objects:
                raise Refused(404, "NoSuchKey")
            return self._objects[key]

    def delete(self, key: str) -> None:
        """Forget a key; silent if there is none, as S3 is."""
        with self._lock:
            self._objects.pop(key, None)

    def begin_upload(self, key: str) -> str:
        """Open a multipart upload."""
        with self._lock:
            upload_id = f"upload-{next(self._numbers)}"
            self._uploads[upload_id] = Upload(key)
            return upload_id

    def _upload(self, upload_id: str, key: str) -> Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise Refused(404, "NoSuchUpload")
        return upload

    def put_part(self, upload_id: str, key: str, number: int, content: bytes) -> str:
        """Keep one part and say its ETag."""
        if not 1 <= number <= MAX_PARTS:
            raise Refused(400, "InvalidArgument", "Part number must be between 1 and 10000")
        etag = md5_hex(content)
        with self._lock:
            self._upload(upload_id, key).parts[number] = (etag, content)
        return etag

    def lose_part(self, upload_id: str, key: str, number: int, content: bytes) -> str:
        """Acknowledge a part and keep nothing of its bytes."""
        etag = md5_hex(content)
        with self._lock:
            self._upload(upload_id, key).parts[number] = (etag, b"")
        return etag

    def complete(self, upload_id: str, key: str, listed: list[tuple[int, str]], *, lost: int) -> str:
        """Assemble the object of the `listed` parts; `lost` says how many were lost, and may be small."""
        with self._lock:
            upload = self._upload(upload_id, key)
            numbers = [number for number, _ in listed]
            if not numbers or numbers != sorted(set(numbers)):
                raise Refused(400, "InvalidPartOrder")
            for number, etag in listed:
                if number not in upload.parts or upload.parts[number][0] != etag:
                    raise Refused(400, "InvalidPart", f"Part {number}")
            contents = [upload.parts[number][1] for number in numbers]
            if sum(len(content) < MIN_PART_BYTES for content in contents[:-1]) > lost:
                raise Refused(400, "EntityTooSmall")
            digest = hashlib.md5(b"".join(bytes.fromhex(etag) for _, etag in listed), usedforsecurity=False)
            etag = f"{digest.hexdigest()}-{len(listed)}"
            self._objects[key] = StoredObject(b"".join(contents), etag, time.time())
            del self._uploads[upload_id]
            return etag

    def abort(self, upload_id: str, key: str) -> None:
        """Drop an upload and its parts."""
        with self._lock:
            self._upload(upload_id, key)
            del self._uploads[upload_id]

    def list_after(self, prefix: str, after: str, limit: int) -> Iterator[ListedKey]:
        """Up to `limit` keys that begin with `prefix` and follow `after`, sorted."""
        if self._virtual_keys:
            return self._list_virtual(prefix, after, limit)
        with self._lock:
            keys = [key for key in sorted(self._objects) if key.startswith(prefix)]
            found = keys[bisect.bisect_right(keys, after) :][:limit]
            lines = [
                ListedKey(key, len(stored.content), stored.etag, stored.modified_s)
                for key, stored in ((key, self._objects[key]) for key in found)
            ]
        return iter(lines)

    def _list_virtual(self, prefix: str, after: str, limit: int) -> Iterator[ListedKey]:
        first = int(after.rpartition("-")[2]) + 1 if after else 0
        etag, now = md5_hex(b"x"), time.time()
        for number in range(first, min(first + limit, self._virtual_keys)):
            yield ListedKey(f"{prefix}virtual-{number:09d}", 1, etag, now)
