"""The adapter for s3dlio (Rust, AWS SDK): uploads from the caller's memory, ranges back by one copy.

One client per process: settings other than the first storage's are refused, uploads in parts go to its
endpoint. It sends a request up to 3 times by itself (a read 9), which cannot be switched off; our attempts
come on top. Listings go through obstore, because s3dlio lists names without sizes. Its `get_into_async` takes
whole objects only and asks HEAD first, so ranges are copied. Its threads do not survive a fork.
"""

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import s3dlio  # type: ignore[import-untyped] # it ships neither stubs nor annotations

from penstock.errors import UsageError
from penstock.storage.objects.client import RemoteObject, StreamClient, bare_etag
from penstock.storage.objects.client_obstore import ObstoreClient
from penstock.storage.objects.client_settings import ClientSettings, ProcessWideSettings, export_credentials
from penstock.storage.objects.object_requests import FailureKind, RequestFailed
from penstock.storage.objects.own_process import LibraryThreads

_LIBRARY = ProcessWideSettings("s3dlio")  # the library's state is the process's, and so is what we know of it
_THREADS = LibraryThreads("s3dlio")
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
    """A client for one endpoint; refused if this process already uses s3dlio with other settings."""
    options = settings.options
    if not options.tls_verify or not options.path_style:
        raise UsageError(
            "s3dlio cannot switch off path_style or tls_verify",
            fix="Use client=obstore, or give AWS_CA_BUNDLE.",
        )
    exported = {
        **export_credentials(settings),
        "S3DLIO_OPERATION_TIMEOUT_SECS": str(math.ceil(options.request_timeout_s)),
        "S3DLIO_UNSIGNED_PAYLOAD": "1" if options.payload == "unsigned" else "0",
        "AWS_ENDPOINT_URL": _LIBRARY.exported("AWS_ENDPOINT_URL") or settings.endpoint,
    }
    if settings.ca_bundle:
        exported["AWS_CA_BUNDLE"] = settings.ca_bundle
    _LIBRARY.export(exported, secret=_SECRETS)
    return S3dlioClient(settings, is_primary=settings.endpoint == exported["AWS_ENDPOINT_URL"])


class S3dlioClient(StreamClient):
    """One endpoint: the process's own by plain URIs, another by URIs that name its host."""

    read_copy = "s3dlio-read"

    def __init__(self, settings: ClientSettings, *, is_primary: bool) -> None:
        if not is_primary and settings.uses_tls:
            raise UsageError(
                f"s3dlio reaches no second https endpoint in one process: {settings.endpoint}",
                fix="Use one endpoint, http, or client=obstore.",
            )
        host = "" if is_primary else f"{urlsplit(settings.endpoint).netloc}/"
        self._root = f"s3://{host}{settings.bucket}"
        self._is_primary = is_primary
        self._bucket = settings.bucket
        self._in_flight = settings.options.parts_in_flight
        self._lister = ObstoreClient(settings)

    def _uri(self, key: str) -> str:
        return f"{self._root}/{key}"

    def head(self, key: str) -> RemoteObject:
        with _translated():
            found: dict[str, Any] = s3dlio.stat(self._uri(key))
        if found["last_modified"] is None:
            raise RequestFailed.foreign("an object without a date")
        return RemoteObject(
            key=key,
            size_bytes=int(found["size"]),
            modified_s=datetime.fromisoformat(found["last_modified"]).timestamp(),
            etag=bare_etag(found["etag"]),
        )

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fetch the range into s3dlio's memory, and copy it. It cannot insist on `etag`."""
        del etag
        with _translated():
            content = s3dlio.get_range(self._uri(key), offset, len(buffer)).memoryview()
        if len(content) != len(buffer):
            raise RequestFailed.truncated(len(content), len(buffer))
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(content, np.uint8))

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects under `prefix`, through obstore."""
        return self._lister.list(prefix, after)

    def delete(self, key: str) -> None:
        with _translated():
            s3dlio.delete(self._uri(key))

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object in one request, straight from `content`; s3dlio does not tell the ETag."""
        with _translated():
            s3dlio.put_bytes(self._uri(key), content)
        return None

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        if not self._is_primary:
            raise RequestFailed(
                "answer",
                "s3dlio uploads in parts only to the first endpoint that this process used: "
                f"{_LIBRARY.exported('AWS_ENDPOINT_URL')}",
            )
        with _translated():
            writer = s3dlio.MultipartUploadWriter(
                self._bucket, key, part_size=part_bytes, max_in_flight=self._in_flight, abort_on_drop=True
            )
            with ExitStack() as undo:
                undo.callback(writer.abort)
                _write_all(writer, parts)
                undo.pop_all()
            return bare_etag(writer.close()["etag"])


def _write_all(writer: Any, parts: Iterator[memoryview]) -> None:
    for part in parts:
        writer.write(part)
        del part  # noqa: PLW0642, RUF100 - the next one may take long, and this one's owner waits


@contextmanager
def _translated() -> Iterator[None]:
    _THREADS.require()
    try:
        yield
    except RuntimeError as error:
        raise read_failure(str(error)) from error


def read_failure(text: str) -> RequestFailed:
    """What s3dlio's message says happened: it has no other sign of the service's answer."""
    code_match, status_match = _CODE.search(text), _STATUS.search(text)
    code = code_match[1] if code_match and code_match[1] != "unknown" else ""
    status = int(status_match[1]) if status_match else _STATUS_OF_CODE.get(code)
    if status is not None or code:
        return RequestFailed("answer", text, status=status, code="" if code == "NotFound" else code)
    return RequestFailed(_kind(text), text)


def _kind(text: str) -> FailureKind:
    if "Connect)" in text or "dns error" in text:
        return "connect"
    if "timed out" in text or "timeout" in text:
        return "timeout"
    if "end of file before message length" in text:
        return "truncated"
    return "reset"
