"""The adapter for obstore (Rust, object_store): the default, and the only one for `gs://` and `az://`.

Buffers go down uncopied; reads come back in obstore's own memory and are copied once. Retries are ours,
except for the parts of a stream: obstore retries those itself, unseen until it fails, because only it still
has their bytes. A console's folder marker (`a/`) is listed as an empty object (`a`).
Its threads do not survive a fork, and not even a new store starts others: requests are refused there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from penstock.errors import Unavailable
from penstock.storage.objects.client import RemoteObject, StreamClient, bare_etag
from penstock.storage.objects.client_settings import ClientSettings
from penstock.storage.objects.object_requests import FailureKind, RequestFailed
from penstock.storage.objects.own_process import LibraryThreads

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig


_STATUS = re.compile(r"status: (\d{3})|status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_RETRIES = re.compile(r"retries: (\d+)")
_FOREIGN = re.compile(
    r"Unable to extract metadata from headers|Got invalid list response(?!.*UnexpectedEof)", re.DOTALL
)
_LIST_CHUNK = 1000
_THREADS = LibraryThreads("obstore")
_MAX_RETRY_S = 280.0
"""object_store signs once and not again for a retry: beyond five minutes the signature is stale."""


def connect(settings: ClientSettings) -> ObstoreClient:
    """A client for one endpoint; nothing is sent yet. `Unavailable` where a credential is no such thing."""
    try:
        return ObstoreClient(settings)
    except BaseError as error:
        raise Unavailable(
            f"The credentials for {settings.scheme}://{settings.bucket} cannot be used: "
            f"{str(error).partition(chr(10))[0]}",
            fix="Correct the key, the token or the file that the environment names.",
        ) from error


class ObstoreClient(StreamClient):
    """One endpoint through two stores: one that never retries, and one for streams that does."""

    read_copy = "obstore-read"
    gets_whole = True

    def __init__(self, settings: ClientSettings) -> None:
        self._options = settings.options
        self._is_azure = settings.scheme == "az"
        # Google replaces by generation, which no listing of ours tells.
        self.has_conditions = settings.scheme != "gs"
        self._store = _make_store(settings, max_retries=0)
        self._stream_store = _make_store(settings, max_retries=settings.options.attempts - 1)

    def head(self, key: str) -> RemoteObject:
        with _translated():
            return _remote(obstore.head(self._store, key))

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fetch the range into obstore's memory, and copy it."""
        wanted: Any = {"range": (offset, offset + len(buffer))}
        if etag:
            wanted["if_match"] = f'"{etag}"'
        with _translated():
            content = obstore.get(self._store, key, options=wanted).bytes()
        if len(content) != len(buffer):
            raise RequestFailed.truncated(len(content), len(buffer))
        np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(memoryview(content), np.uint8))

    def get_whole(self, key: str, limit_bytes: int) -> tuple[RemoteObject, bytes | None]:
        """Ask for all of it; the answer tells its size before its bytes."""
        with _translated():
            answer = obstore.get(self._store, key)
            found = _remote(answer.meta)
            if found.size_bytes > limit_bytes:
                return found, None
            content = bytes(answer.bytes())
        if len(content) != found.size_bytes:
            raise RequestFailed.truncated(len(content), found.size_bytes)
        return found, content

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Objects under `prefix`; obstore asks for the next page when this one is used up."""
        with _translated():
            pages = obstore.list(self._store, prefix or None, offset=after or None, chunk_size=_LIST_CHUNK)
            for page in pages:
                yield from map(_remote, page)

    def delete(self, key: str) -> None:
        with _translated():
            obstore.delete(self._store, key)

    def put(self, key: str, content: memoryview) -> str | None:
        with _translated():
            return bare_etag(obstore.put(self._store, key, content, use_multipart=False)["e_tag"])

    def put_if(self, key: str, content: memoryview, *, replaces: str | None) -> str | None:
        """Store an object in one request with `If-None-Match: *`, or `If-Match` the ETag that it replaces.

        S3 takes an ETag with and without quotes here, Ceph (16.2) none with quotes, Azure none without.
        """
        tag = f'"{replaces}"' if self._is_azure else replaces
        mode: Any = "create" if replaces is None else {"e_tag": tag}
        try:
            with _translated():
                return bare_etag(
                    obstore.put(self._store, key, content, use_multipart=False, mode=mode)["e_tag"]
                )
        except (AlreadyExistsError, PreconditionError) as error:
            raise RequestFailed("answer", "the condition does not hold", status=412) from error

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts` as they come. obstore aborts its upload when they raise."""
        with _translated():
            done = obstore.put(
                self._stream_store,
                key,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=self._options.parts_in_flight,
            )
            return bare_etag(done["e_tag"])


def _make_store(settings: ClientSettings, *, max_retries: int) -> S3Store | GCSStore | AzureStore:
    options, credentials = settings.options, settings.credentials
    client: ClientConfig = {
        "allow_http": not settings.uses_tls,
        "allow_invalid_certificates": not options.tls_verify,
        "timeout": timedelta(seconds=options.request_timeout_s),
        "connect_timeout": timedelta(seconds=min(options.request_timeout_s, 10.0)),
    }
    if settings.ca_bundle:
        client["root_certificate"] = Path(settings.ca_bundle).read_bytes()
    retry: RetryConfig = {
        "max_retries": max_retries,
        "retry_timeout": timedelta(
            seconds=min(_MAX_RETRY_S, options.attempts * (options.request_timeout_s + 20.0))
        ),
        "backoff": {"init_backoff": timedelta(seconds=options.backoff_s), "base": 2},
    }
    if settings.scheme == "gs":
        return GCSStore(
            settings.bucket,
            service_account_path=credentials.access_key,
            client_options=client,
            retry_config=retry,
        )
    if settings.scheme == "az":
        azure: Any = {"endpoint": settings.endpoint} if settings.endpoint else {}
        secret: Any = (
            {"account_key": credentials.secret_key}
            if credentials.secret_key
            else {"sas_key": credentials.session_token}
        )
        return AzureStore(
            settings.bucket,
            account_name=credentials.access_key,
            client_options=client,
            retry_config=retry,
            **azure,
            **secret,
        )
    token: Any = {"session_token": credentials.session_token} if credentials.session_token else {}
    return S3Store(
        settings.bucket,
        endpoint=_s3_endpoint(settings),
        region=options.region,
        access_key_id=credentials.access_key,
        secret_access_key=credentials.secret_key,
        virtual_hosted_style_request=not options.path_style,
        unsigned_payload=options.payload == "unsigned",
        disable_bulk_delete=True,
        client_options=client,
        retry_config=retry,
        **token,
    )


def _s3_endpoint(settings: ClientSettings) -> str:
    """With buckets in host names obstore wants the whole host name."""
    if settings.options.path_style:
        return settings.endpoint
    parts = urlsplit(settings.endpoint)
    return f"{parts.scheme}://{settings.bucket}.{parts.netloc}"


def _remote(meta: ObjectMeta) -> RemoteObject:
    return RemoteObject(
        key=meta["path"],
        size_bytes=meta["size"],
        modified_s=meta["last_modified"].timestamp(),
        etag=bare_etag(meta["e_tag"]),
    )


@contextmanager
def _translated() -> Iterator[None]:
    _THREADS.require()
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        raise read_failure(str(error)) from error


def read_failure(text: str) -> RequestFailed:
    """What obstore's message says happened: it shows the service's answer in its text alone."""
    retries = _RETRIES.search(text)
    hidden = int(retries[1]) if retries else 0
    status = _STATUS.search(text)
    if status is None and _FOREIGN.search(text):
        return RequestFailed.foreign(text.partition("\n")[0])
    if status is None and "BareRedirect" in text:
        return RequestFailed("answer", "a redirect to nowhere", status=301, hidden_retries=hidden)
    if status is None:
        return RequestFailed(_kind(text), _innermost(text), hidden_retries=hidden)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    return RequestFailed(
        "answer",
        message[1] if message else "no explanation",
        status=int(cast("str", status[1] or status[2])),
        code=code[1] if code else "",
        hidden_retries=hidden,
    )


def _kind(text: str) -> FailureKind:
    if "TimedOut" in text or "kind: Timeout" in text:
        return "timeout"
    if "kind: Connect" in text or "dns error" in text:
        return "connect"
    if "IncompleteBody" in text or "UnexpectedEof" in text:
        return "truncated"
    return "reset"


def _innermost(text: str) -> str:
    """The last quoted phrase of the error's debug form, which names the cause; else its first line."""
    certificate = re.search(r"InvalidCertificate\(\s*(\w+)", text)
    if certificate:
        return f"its TLS certificate is not trusted ({certificate[1]})"
    phrases = re.findall(r'(?:message|error): "([^"]+)"', text)
    return str(phrases[-1]) if phrases else text.partition("\n")[0]
