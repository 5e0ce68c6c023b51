"""The adapter for s3torchconnector's client (C, the AWS common runtime): everything is copied, both ways.

It takes `bytes` alone and gives `bytes` alone, sends every object as an upload in parts, never signs
payloads, has no timeout (calls run under ours) and retries by itself whatever it is told: once, with the
least it accepts. Credentials are read from the process's environment, so they are put there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
from s3torchconnectorclient._mountpoint_s3_client import HeadObjectResult, MountpointS3Client, S3Exception

from penstock.errors import UsageError
from penstock.storage.objects.client import RemoteObject, StreamClient, bare_etag
from penstock.storage.objects.client_settings import ClientSettings, export_credentials
from penstock.storage.objects.object_requests import FailureKind, RequestFailed
from penstock.storage.objects.own_process import PerProcess

T = TypeVar("T")

_LEAST_ATTEMPTS = 2
"""1 means the runtime's own default, which is 4."""
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
    """A client for one endpoint; refused where it cannot do what the options say."""
    options = settings.options
    if options.payload == "signed" or not options.tls_verify:
        raise UsageError(
            "s3torchconnector can neither sign payloads nor switch off tls_verify", fix="Use client=obstore."
        )
    # Over plain http nothing is verified, so a bundle that is set for other endpoints does no harm.
    if settings.ca_bundle and settings.uses_tls:
        raise UsageError(
            "s3torchconnector cannot take the CA bundle that AWS_CA_BUNDLE names",
            where=settings.endpoint,
            fix="Unset AWS_CA_BUNDLE and add its authorities to the system's trust store, or use "
            "client=obstore.",
        )
    return S3TorchClient(settings)


class S3TorchClient(StreamClient):
    """One endpoint. Each call runs in a thread of its own, which a stall leaves behind."""

    read_copy = "s3torchconnector-read"
    write_copy = "s3torchconnector-write"

    def __init__(self, settings: ClientSettings) -> None:
        export_credentials(settings)
        options = settings.options
        self._bucket = settings.bucket
        self._timeout_s = options.request_timeout_s
        self._own_native = PerProcess(
            lambda: MountpointS3Client(
                region=options.region,
                endpoint=settings.endpoint,
                part_size=options.part_bytes,
                force_path_style=options.path_style,
                max_attempts=_LEAST_ATTEMPTS,
                user_agent_prefix="penstock",
            )
        )

    @property
    def _native(self) -> MountpointS3Client:
        return self._own_native.get()

    def head(self, key: str) -> RemoteObject:
        found: HeadObjectResult = self._timed(lambda: self._native.head_object(self._bucket, key))
        return RemoteObject(key, found.size, float(found.last_modified), bare_etag(found.etag))

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Collect the range, and copy it. It cannot insist on `etag`."""
        del etag
        end = offset + len(buffer)
        chunks = self._timed(lambda: list(self._native.get_object(self._bucket, key, offset, end)))
        received = sum(map(len, chunks))
        if received != len(buffer):
            raise RequestFailed.truncated(received, len(buffer))
        target, filled = np.frombuffer(buffer, np.uint8), 0
        for chunk in chunks:
            np.copyto(target[filled : filled + len(chunk)], np.frombuffer(chunk, np.uint8))
            filled += len(chunk)

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects under `prefix`, page by page; it cannot begin in the middle, so earlier pages pass by."""
        pages = self._native.list_objects(self._bucket, prefix)
        while (page := self._timed(lambda: next(pages, None))) is not None:
            for found in page.object_info:
                if found.key > after:
                    yield RemoteObject(
                        found.key, found.size, float(found.last_modified), bare_etag(found.etag)
                    )

    def delete(self, key: str) -> None:
        self._timed(lambda: self._native.delete_object(self._bucket, key))

    def put(self, key: str, content: memoryview) -> str | None:
        """Store an object; it goes up as an upload in parts all the same."""
        copy = bytes(content)
        self._timed(lambda: self._put(key, iter((copy,))))
        return None  # it does not tell the ETag

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts`, cut anew by the library after the option `part_bytes`."""
        del part_bytes
        with _translated():
            self._put(key, map(bytes, parts))
        return None

    def _put(self, key: str, contents: Iterator[bytes]) -> None:
        stream = self._native.put_object(self._bucket, key)
        try:
            for content in contents:
                stream.write(content)
            stream.close()
        finally:
            del stream  # dropped unclosed, it aborts its upload

    def _timed(self, call: Callable[[], T]) -> T:
        """What `call` returns, or a timeout; the thread of a stalled call is left to itself."""
        watched = _Watched(call)
        threading.Thread(target=watched.run, name="s3torchconnector", daemon=True).start()
        if not watched.ended.wait(self._timeout_s):
            raise RequestFailed("timeout", f"no answer within {self._timeout_s:g} s")
        with _translated():
            return watched.result()


class _Watched(Generic[T]):
    """One call and its outcome."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._returned: list[T] = []
        self._raised: S3Exception | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._returned.append(self._call())
        except S3Exception as error:
            self._raised = error
        finally:
            self.ended.set()

    def result(self) -> T:
        if self._raised is not None:
            raise self._raised
        if not self._returned:
            raise RequestFailed("reset", "the library broke off")
        return self._returned[0]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except S3Exception as error:
        raise read_failure(str(error)) from error


def read_failure(text: str) -> RequestFailed:
    """What the runtime's message says happened: it has no other sign of the service's answer."""
    status, code = _STATUS.search(text), _CODE.search(text)
    word = (code[1] or code[2]) if code else ""
    if status is not None:
        return RequestFailed("answer", text.partition("{")[0].strip(), status=int(status[1]), code=word)
    for phrase, meaning, name in _PHRASES:
        if phrase in text:
            return RequestFailed("answer", text, status=meaning, code=word or name)
    return RequestFailed(_kind(text), text)


def _kind(text: str) -> FailureKind:
    if "CONNECTION_REFUSED" in text or "DNS" in text or "CONNECT_TIMEOUT" in text:
        return "connect"
    return "timeout" if "TIMEOUT" in text else "reset"
