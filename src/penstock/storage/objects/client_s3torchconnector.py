"""The adapter for s3torchconnector's client (C, the AWS common runtime), which copies everything, both ways.

The client takes and returns only `bytes`, sends every object as an upload in parts, never signs payloads, has
no timeout (calls run under Penstock's) and always retries by itself: once, the least that it accepts. It
reads credentials from the process's environment, so they are put there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from s3torchconnectorclient._mountpoint_s3_client import HeadObjectResult, MountpointS3Client, S3Exception

from penstock.errors import UsageError
from penstock.storage.aligned import copy_bytes
from penstock.storage.objects.client import (
    FailureKind,
    PerProcess,
    RemoteObject,
    RequestFailed,
    StreamClient,
    bare_etag,
    require_length,
)
from penstock.storage.objects.client_settings import ClientSettings, export_credentials

T = TypeVar("T")

_LEAST_ATTEMPTS = 2
"""The fewest attempts that can be set: 1 would mean the runtime's own default, which is 4."""
_STATUS = re.compile(r"response_status: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|Forbidden: (\w+)")
_PHRASES = (
    ("bucket does not exist", 404, "NoSuchBucket"),
    ("key does not exist", 404, "NoSuchKey"),
    ("object was not found", 404, ""),
    ("Request throttled", 503, "SlowDown"),
    ("Forbidden", 403, ""),
    ("No signing credentials", 403, ""),
    ("incorrect region", 301, ""),
)


def connect(settings: ClientSettings) -> S3TorchClient:
    """Create a client for one endpoint; refuse options that the library does not support."""
    options = settings.options
    if options.payload == "signed" or not options.tls_verify:
        raise UsageError(
            "s3torchconnector can neither sign payloads nor switch off tls_verify", fix="Use client=obstore."
        )
    # Over plain http nothing is verified, so a bundle that is set for other endpoints does no harm.
    if settings.ca_bundle and settings.uses_tls:
        raise UsageError(
            "s3torchconnector cannot use the CA bundle that AWS_CA_BUNDLE names",
            where=settings.endpoint,
            fix="Unset AWS_CA_BUNDLE and add its authorities to the system's trust store, or use "
            "client=obstore.",
        )
    return S3TorchClient(settings)


class S3TorchClient(StreamClient):
    """One endpoint. Each call runs in a separate thread, which is abandoned if the call stalls."""

    read_copy = "s3torchconnector-read"
    write_copy = "s3torchconnector-write"
    errors = (S3Exception,)

    def __init__(self, settings: ClientSettings) -> None:
        export_credentials(settings)
        options = settings.options
        self._bucket = settings.bucket
        self._timeout_s = options.request_timeout_s
        self._own = PerProcess(
            lambda: MountpointS3Client(
                region=options.region,
                endpoint=settings.endpoint,
                part_size=options.part_bytes,
                force_path_style=options.path_style,
                max_attempts=_LEAST_ATTEMPTS,
                user_agent_prefix="penstock",
            )
        )

    @staticmethod
    def explain(error: Exception) -> RequestFailed:
        """Extract what happened from the runtime's message, which alone shows the service's response."""
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        word = (code[1] or code[2]) if code else ""
        if status is not None:
            return RequestFailed("answer", text.partition("{")[0].strip(), status=int(status[1]), code=word)
        for phrase, meaning, name in _PHRASES:
            if phrase in text:
                return RequestFailed("answer", text, status=meaning, code=word or name)
        kind: FailureKind = "timeout" if "TIMEOUT" in text else "reset"
        if any(word in text for word in ("CONNECTION_REFUSED", "DNS", "CONNECT_TIMEOUT")):
            kind = "connect"
        return RequestFailed(kind, text)

    def head(self, key: str) -> RemoteObject:
        found: HeadObjectResult = self._timed(lambda: self._own.get().head_object(self._bucket, key))
        return RemoteObject(key, found.size, float(found.last_modified), bare_etag(found.etag))

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Collect the range, and copy it. Cannot require `etag`."""
        del etag
        end = offset + len(buffer)
        chunks = self._timed(lambda: list(self._own.get().get_object(self._bucket, key, offset, end)))
        require_length(sum(map(len, chunks)), len(buffer))
        for chunk in chunks:
            copy_bytes(buffer[: len(chunk)], memoryview(chunk))
            buffer = buffer[len(chunk) :]

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Yield objects under `prefix`, page by page.

        The library cannot start a listing in the middle, so earlier pages are skipped.
        """
        pages = self._own.get().list_objects(self._bucket, prefix)
        while (page := self._timed(lambda: next(pages, None))) is not None:
            for found in page.object_info:
                if found.key > after:
                    yield RemoteObject(
                        found.key, found.size, float(found.last_modified), bare_etag(found.etag)
                    )

    def delete(self, key: str) -> None:
        self._timed(lambda: self._own.get().delete_object(self._bucket, key))

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object. The library sends even this as an upload in parts."""
        copy = bytes(content)
        self._timed(lambda: self._put(key, iter((copy,))))
        return None  # the library does not return the ETag

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`. The library divides them again, by the option `part_bytes`."""
        del part_bytes
        self._put(key, map(bytes, parts))
        return None

    def _put(self, key: str, contents: Iterator[bytes]) -> None:
        stream = self._own.get().put_object(self._bucket, key)
        try:
            for content in contents:
                stream.write(content)
            stream.close()
        finally:
            del stream  # a stream that is dropped without closing aborts its upload

    def _timed(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, or time out; the thread of a stalled call is abandoned."""
        outcome: list[T | S3Exception] = []
        ended = threading.Event()

        def run() -> None:
            try:
                outcome.append(call())
            except S3Exception as error:
                outcome.append(error)
            finally:
                ended.set()

        threading.Thread(target=run, name="s3torchconnector", daemon=True).start()
        if not ended.wait(self._timeout_s):
            raise RequestFailed("timeout", f"no response within {self._timeout_s:g} s")
        if not outcome:
            raise RequestFailed("reset", "the library broke off")
        if isinstance(outcome[0], S3Exception):
            raise outcome[0]
        return outcome[0]
