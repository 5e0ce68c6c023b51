"""The adapter for s3dlio (Rust, AWS SDK), which uploads from the caller's memory and copies ranges once.

There is one client per process: settings that differ from the first storage's are refused, and uploads in
parts go to the first endpoint. s3dlio sends a request up to 3 times by itself (a read 9 times), which cannot
be switched off; Penstock's attempts come on top. Listings go through obstore, because s3dlio lists names
without sizes. Its `get_into_async` takes only whole objects and sends HEAD first, so ranges are copied. Its
threads do not survive a fork.
"""

import math
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import s3dlio  # type: ignore[import-untyped] # it ships neither stubs nor annotations

from penstock.environment import export_variables
from penstock.errors import UsageError
from penstock.storage.aligned import copy_bytes
from penstock.storage.objects.client import (
    FailureKind,
    RemoteObject,
    RequestFailed,
    StreamClient,
    attempt,
    bare_etag,
    require_length,
)
from penstock.storage.objects.client_obstore import ObstoreClient
from penstock.storage.objects.client_settings import ClientSettings, export_credentials

_exported: dict[str, str] = {}
"""The environment as the library read it, once, at its first request in this process."""
_lock = threading.Lock()
_SECRETS = frozenset({"AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"})
_STATUS = re.compile(r"(?:HTTP|status) (\d{3})\b")
_CODE = re.compile(r"service error: (?:unhandled error )?\(?(\w+)")
_STATUS_OF_CODE = {
    "NotFound": 404,
    "NoSuchKey": 404,
    "NoSuchBucket": 404,
    "AccessDenied": 403,
    "InvalidAccessKeyId": 403,
    "SignatureDoesNotMatch": 403,
    "RequestTimeTooSkewed": 403,
    "InvalidRange": 416,
    "SlowDown": 503,
}


def connect(settings: ClientSettings) -> "S3dlioClient":
    """Create a client for one endpoint; refuse if this process uses s3dlio with different settings."""
    options = settings.options
    if not options.tls_verify or not options.path_style:
        raise UsageError(
            "s3dlio cannot switch off path_style or tls_verify",
            fix="Use client=obstore, or give AWS_CA_BUNDLE.",
        )
    with _lock:
        wanted = {
            **export_credentials(settings),
            "S3DLIO_OPERATION_TIMEOUT_SECS": str(math.ceil(options.request_timeout_s)),
            "S3DLIO_UNSIGNED_PAYLOAD": "1" if options.payload == "unsigned" else "0",
            "AWS_ENDPOINT_URL": _exported.get("AWS_ENDPOINT_URL") or settings.endpoint,
        }
        if settings.ca_bundle:
            wanted["AWS_CA_BUNDLE"] = settings.ca_bundle
        # The library would silently ignore different settings.
        if differing := [name for name, value in _exported.items() if wanted.get(name, "") != value]:
            shown = [name for name in differing if name not in _SECRETS] or differing
            raise UsageError(
                f"s3dlio has one configuration per process, and {', '.join(shown)} was different when it was "
                "first used",
                fix="Use one process for each configuration, or another client.",
            )
        _exported.update(wanted)
        export_variables(wanted)
    return S3dlioClient(settings, is_primary=settings.endpoint == wanted["AWS_ENDPOINT_URL"])


class S3dlioClient(StreamClient):
    """One endpoint: the first of this process is reached by plain URIs, others by URIs that name the host."""

    read_copy = "s3dlio-read"
    threads_of = "s3dlio"
    errors = (RuntimeError,)

    def __init__(self, settings: ClientSettings, *, is_primary: bool) -> None:
        if not is_primary and settings.uses_tls:
            raise UsageError(
                f"s3dlio cannot use a second https endpoint in one process: {settings.endpoint}",
                fix="Use one endpoint, http, or client=obstore.",
            )
        host = "" if is_primary else f"{urlsplit(settings.endpoint).netloc}/"
        self._root = f"s3://{host}{settings.bucket}"
        self._is_primary = is_primary
        self._bucket = settings.bucket
        self._in_flight = settings.options.parts_in_flight
        self._lister = ObstoreClient(settings)

    @staticmethod
    def explain(error: Exception) -> RequestFailed:
        """Extract what happened from s3dlio's message, which alone shows the service's response."""
        text = str(error)
        code_match, status_match = _CODE.search(text), _STATUS.search(text)
        code = code_match[1] if code_match and code_match[1] != "unknown" else ""
        status = int(status_match[1]) if status_match else _STATUS_OF_CODE.get(code)
        if status is not None or code:
            return RequestFailed("answer", text, status=status, code="" if code == "NotFound" else code)
        kind: FailureKind = "reset"
        if "Connect)" in text or "dns error" in text:
            kind = "connect"
        elif "timed out" in text or "timeout" in text:
            kind = "timeout"
        elif "end of file before message length" in text:
            kind = "truncated"
        return RequestFailed(kind, text)

    def head(self, key: str) -> RemoteObject:
        found: dict[str, Any] = s3dlio.stat(f"{self._root}/{key}")
        if found["last_modified"] is None:
            raise RequestFailed("foreign", "an object without a date")
        return RemoteObject(
            key=key,
            size_bytes=int(found["size"]),
            modified_s=datetime.fromisoformat(found["last_modified"]).timestamp(),
            etag=bare_etag(found["etag"]),
        )

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fetch the range into s3dlio's memory, and copy it. Cannot require `etag`."""
        del etag
        content = s3dlio.get_range(f"{self._root}/{key}", offset, len(buffer)).memoryview()
        require_length(len(content), len(buffer))
        copy_bytes(buffer, content)

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Yield objects under `prefix`, through obstore."""
        with attempt(self._lister):
            yield from self._lister.list(prefix, after)

    def delete(self, key: str) -> None:
        s3dlio.delete(f"{self._root}/{key}")

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object in one request, directly from `content`; s3dlio does not return the ETag."""
        s3dlio.put_bytes(f"{self._root}/{key}", content)
        return None

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        if not self._is_primary:
            raise RequestFailed(
                "answer",
                "s3dlio uploads in parts only to the first endpoint that this process used: "
                f"{_exported['AWS_ENDPOINT_URL']}",
            )
        writer = s3dlio.MultipartUploadWriter(
            self._bucket, key, part_size=part_bytes, max_in_flight=self._in_flight, abort_on_drop=True
        )
        with ExitStack() as undo:
            undo.callback(writer.abort)
            for part in parts:
                writer.write(part)
                del part  # noqa: PLW0642, RUF100 - the next one may take long, and this one's owner waits
            undo.pop_all()
        return bare_etag(writer.close()["etag"])
