"""The adapter for minio-py (pure Python over urllib3), which sends single parts and copies no bytes.

It sends parts one by one through minio's own request methods, because the public `put_object` reads from a
file object. minio's retries are switched off, so Penstock's are the only ones; the option `payload` alone
decides what is hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit
from xml.etree.ElementTree import ParseError

import urllib3
from minio import Minio
from minio.datatypes import Part
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from urllib3 import exceptions

from penstock.storage.objects.client import (
    FailureKind,
    PartClient,
    PerProcess,
    RemoteObject,
    RequestFailed,
    bare_etag,
    require_length,
)
from penstock.storage.objects.client_settings import ClientSettings

if TYPE_CHECKING:
    import http.client

    from minio.credentials.credentials import Credentials
    from minio.datatypes import Object


UNSIGNED = "UNSIGNED-PAYLOAD"
_LARGEST_ANSWER: Final = 64 << 20
"""The largest response to anything but a read; a page of a listing has at most a few megabytes."""


class _Minio(Minio):
    """Minio that signs payloads as configured, rather than always on http and never on https."""

    signs_payload = False

    def _build_headers(
        self,
        host: str,
        headers: dict[str, Any] | None = None,
        body: bytes | None = None,
        creds: Credentials | None = None,
    ) -> tuple[dict[str, Any], datetime]:
        built, date = super()._build_headers(host, headers, None, creds)
        if body:
            built["Content-Length"] = str(len(body))
        digest = hashlib.sha256(body or b"").hexdigest() if self.signs_payload or not body else UNSIGNED
        built["x-amz-content-sha256"] = digest
        return built, date


class _Pool(urllib3.PoolManager):
    """Connections that read responses only up to a limit: all but objects' contents are small."""

    def urlopen(  # type: ignore[override] # as that of PoolManager
        self,
        method: str,
        url: str,
        redirect: bool = True,  # noqa: FBT001, FBT002 - as in the base class
        *,
        preload_content: bool = True,
        **kw: Any,
    ) -> urllib3.BaseHTTPResponse:
        answer = super().urlopen(method, url, redirect, preload_content=False, **kw)
        if not preload_content and answer.status in (200, 206):
            return answer
        with closing(answer):
            content = answer.read(_LARGEST_ANSWER + 1)
        if len(content) > _LARGEST_ANSWER:
            raise RequestFailed("foreign", f"it is larger than {_LARGEST_ANSWER:,} bytes")
        return urllib3.HTTPResponse(content, answer.headers, answer.status, request_method=method)


class MinioClient(PartClient):
    """One endpoint; parts are sent one by one, each directly from its buffer."""

    errors = (MinioException, exceptions.HTTPError, OSError, MemoryError)

    def __init__(self, settings: ClientSettings) -> None:
        self._bucket = settings.bucket
        self._own = PerProcess(lambda: _make_minio(settings))

    def head(self, key: str) -> RemoteObject:
        return _remote(key, self._own.get().stat_object(bucket_name=self._bucket, object_name=key))

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Receive the range from the socket into `buffer`."""
        headers: Any = {"If-Match": f'"{etag}"'} if etag else {}
        response = self._own.get().get_object(
            bucket_name=self._bucket,
            object_name=key,
            offset=offset,
            length=len(buffer),
            request_headers=headers,
        )
        with closing(response):
            # urllib3's own readinto reads into its own memory and copies; the response below it does not.
            raw = cast("http.client.HTTPResponse", response._fp)  # type: ignore[attr-defined] # noqa: SLF001
            received = 0
            while received < len(buffer) and (count := raw.readinto(buffer[received:])):
                received += count
            require_length(received, len(buffer))
            response.release_conn()  # only a connection whose body was read to the end can be reused

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        try:
            for entry in self._own.get().list_objects(
                bucket_name=self._bucket, prefix=prefix, recursive=True, start_after=after or None
            ):
                yield _remote(cast("str", entry.object_name), entry)
        except (ValueError, ParseError) as error:
            raise RequestFailed("foreign", f"an invalid listing: {error}") from error

    def delete(self, key: str) -> None:
        self._own.get().remove_object(bucket_name=self._bucket, object_name=key)

    # minio declares bytes here, but passes anything that has a buffer on to the socket.

    def put(self, key: str, content: memoryview) -> str | None:
        body = cast("bytes", content)
        return self._own.get()._put_object(self._bucket, key, body, {}).etag or None  # noqa: SLF001 - see the module

    def begin_upload(self, key: str) -> str:
        return self._own.get()._create_multipart_upload(self._bucket, key, {})  # noqa: SLF001 - see the module

    def put_part(self, key: str, upload: str, number: int, content: memoryview) -> str:
        body, minio = cast("bytes", content), self._own.get()
        return minio._upload_part(self._bucket, key, body, {}, upload, number)  # noqa: SLF001 - see the module

    def complete_upload(self, key: str, upload: str, etags: Sequence[str]) -> str | None:
        parts, minio = [Part(number, etag) for number, etag in enumerate(etags, 1)], self._own.get()
        done = minio._complete_multipart_upload(self._bucket, key, upload, parts)  # noqa: SLF001 - see the module
        return bare_etag(done.etag)

    def abort_upload(self, key: str, upload: str) -> None:
        self._own.get()._abort_multipart_upload(self._bucket, key, upload)  # noqa: SLF001 - see the module

    @staticmethod
    def explain(error: Exception) -> RequestFailed:
        """Extract the service's response from minio's exception types."""
        if isinstance(error, S3Error):
            message, code = error.message or "no explanation", error.code or ""
            return RequestFailed("answer", message, status=error.response.status, code=code)
        if isinstance(error, ServerError):
            return RequestFailed("answer", "no explanation", status=error.status_code)
        if isinstance(error, InvalidResponseError):
            status: int = error._code  # noqa: SLF001 - only this attribute has it
            return RequestFailed("answer", "a response that is not XML", status=status)
        if isinstance(error, MemoryError):
            return RequestFailed("foreign", "it is larger than this machine's memory")
        kind: FailureKind = "connect" if isinstance(error, _UNREACHED) else "reset"
        if isinstance(error, exceptions.ReadTimeoutError | TimeoutError):
            kind = "timeout"
        return RequestFailed(kind, f"{type(error).__name__}: {error}")


_UNREACHED = (
    exceptions.NewConnectionError,
    exceptions.NameResolutionError,
    exceptions.ConnectTimeoutError,
    exceptions.SSLError,
    ConnectionRefusedError,
)


def _make_minio(settings: ClientSettings) -> _Minio:
    options = settings.options
    tls: dict[str, Any] = {"cert_reqs": "CERT_REQUIRED" if options.tls_verify else "CERT_NONE"}
    if settings.ca_bundle:
        tls["ca_certs"] = settings.ca_bundle
    pool = _Pool(
        timeout=urllib3.Timeout(connect=min(options.request_timeout_s, 10.0), read=options.request_timeout_s),
        maxsize=options.parts_in_flight + options.ranges_in_flight,
        retries=False,
        **tls,
    )
    made = _Minio(
        endpoint=urlsplit(settings.endpoint).netloc,
        access_key=settings.access_key,
        secret_key=settings.secret_key,
        session_token=settings.session_token or None,
        secure=settings.uses_tls,
        region=options.region,
        http_client=pool,
    )
    made.signs_payload = options.payload == "signed"
    if options.path_style:
        made.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call] # minio's omission
    else:
        made.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call] # likewise
    return made


def _remote(key: str, found: Object) -> RemoteObject:
    return RemoteObject(
        key=key,
        size_bytes=found.size or 0,
        modified_s=found.last_modified.timestamp() if found.last_modified else 0.0,
        etag=bare_etag(found.etag),
    )


connect = MinioClient
