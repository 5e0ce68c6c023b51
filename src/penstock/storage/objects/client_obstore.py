"""The adapter for obstore (Rust, object_store): the default, and the only one for `gs://` and `az://`.

Buffers are passed down without a copy; reads arrive in obstore's own memory and are copied once. Retries are
Penstock's, except for the parts of a stream: obstore retries those itself, invisibly until it fails, because
only it still has their bytes. A console's folder marker (`a/`) is listed as an empty object (`a`). obstore's
threads do not survive a fork, and even a new store does not start new ones, so requests in a forked process
are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from penstock.errors import Unavailable
from penstock.storage.aligned import copy_bytes
from penstock.storage.objects.client import (
    FailureKind,
    RemoteObject,
    RequestFailed,
    StreamClient,
    bare_etag,
    require_length,
)
from penstock.storage.objects.client_settings import ClientSettings

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
_MAX_RETRY_S = 280.0
"""The most time for object_store's retries: it signs a request once, and signatures expire in 5 minutes."""


def connect(settings: ClientSettings) -> ObstoreClient:
    """Create a client for one endpoint; nothing is sent yet.

    Raises `Unavailable` for a malformed credential.
    """
    try:
        return ObstoreClient(settings)
    except BaseError as error:
        raise Unavailable(
            f"The credentials for {settings.scheme}://{settings.bucket} cannot be used: "
            f"{str(error).partition(chr(10))[0]}",
            fix="Correct the key, the token or the file that the environment names.",
        ) from error


class ObstoreClient(StreamClient):
    """One endpoint through two stores: one that never retries, and one for streams, which does."""

    read_copy = "obstore-read"
    gets_whole = True
    threads_of = "obstore"
    errors = (BaseError, FileNotFoundError)

    def __init__(self, settings: ClientSettings) -> None:
        self._options = settings.options
        self._is_azure = settings.scheme == "az"
        # Google Cloud replaces by generation, which listings here do not show.
        self.has_conditions = settings.scheme != "gs"
        self._store = _make_store(settings, max_retries=0)
        self._stream_store = _make_store(settings, max_retries=settings.options.attempts - 1)

    @staticmethod
    def explain(error: Exception) -> RequestFailed:
        """Extract what happened from obstore's message, which alone shows the service's response."""
        text = str(error)
        retries, status = _RETRIES.search(text), _STATUS.search(text)
        hidden = int(retries[1]) if retries else 0
        if status is not None:
            code, message = _CODE.search(text), _MESSAGE.search(text)
            return RequestFailed(
                "answer",
                message[1] if message else "no explanation",
                status=int(cast("str", status[1] or status[2])),
                code=code[1] if code else "",
                hidden_retries=hidden,
            )
        if _FOREIGN.search(text):
            return RequestFailed("foreign", text.partition("\n")[0])
        if "BareRedirect" in text:
            return RequestFailed("answer", "a redirect without a location", status=301, hidden_retries=hidden)
        kind: FailureKind = "reset"
        if "TimedOut" in text or "kind: Timeout" in text:
            kind = "timeout"
        elif "kind: Connect" in text or "dns error" in text:
            kind = "connect"
        elif "IncompleteBody" in text or "UnexpectedEof" in text:
            kind = "truncated"
        # The last quoted phrase of the error's debug form names the cause.
        phrases = re.findall(r'(?:message|error): "([^"]+)"', text)
        cause = str(phrases[-1]) if phrases else text.partition("\n")[0]
        if certificate := re.search(r"InvalidCertificate\(\s*(\w+)", text):
            cause = f"its TLS certificate is not trusted ({certificate[1]})"
        return RequestFailed(kind, cause, hidden_retries=hidden)

    def head(self, key: str) -> RemoteObject:
        return _remote(obstore.head(self._store, key))

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        """Fetch the range into obstore's memory, and copy it."""
        wanted: Any = {"range": (offset, offset + len(buffer))}
        if etag:
            wanted["if_match"] = f'"{etag}"'
        content = memoryview(obstore.get(self._store, key, options=wanted).bytes())
        require_length(len(content), len(buffer))
        copy_bytes(buffer, content)

    def get_whole(self, key: str, limit_bytes: int) -> tuple[RemoteObject, bytes | None]:
        """Request the whole object; the response gives its size before its bytes."""
        answer = obstore.get(self._store, key)
        found = _remote(answer.meta)
        if found.size_bytes > limit_bytes:
            return found, None
        content = bytes(answer.bytes())
        require_length(len(content), found.size_bytes)
        return found, content

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        """Yield objects under `prefix`; obstore requests the next page when the current one is used up."""
        for page in obstore.list(self._store, prefix or None, offset=after or None, chunk_size=_LIST_CHUNK):
            yield from map(_remote, page)

    def delete(self, key: str) -> None:
        obstore.delete(self._store, key)

    def put(self, key: str, content: memoryview) -> str | None:
        return bare_etag(obstore.put(self._store, key, content, use_multipart=False)["e_tag"])

    def put_if(self, key: str, content: memoryview, *, replaces: str | None) -> str | None:
        """Store an object in one request with `If-None-Match: *`, or `If-Match` and the ETag to replace.

        Here, S3 accepts an ETag with and without quotes, Ceph (16.2) only without, Azure only with quotes.
        """
        tag = f'"{replaces}"' if self._is_azure else replaces
        mode: Any = "create" if replaces is None else {"e_tag": tag}
        return bare_etag(obstore.put(self._store, key, content, use_multipart=False, mode=mode)["e_tag"])

    def put_stream(self, key: str, parts: Iterator[memoryview], part_bytes: int) -> str | None:
        """Upload `parts` as they come. If they raise, obstore aborts its upload."""
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
    options = settings.options
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
            service_account_path=settings.access_key,
            client_options=client,
            retry_config=retry,
        )
    if settings.scheme == "az":
        azure: Any = {"endpoint": settings.endpoint} if settings.endpoint else {}
        secret: Any = (
            {"account_key": settings.secret_key}
            if settings.secret_key
            else {"sas_key": settings.session_token}
        )
        return AzureStore(
            settings.bucket,
            account_name=settings.access_key,
            client_options=client,
            retry_config=retry,
            **azure,
            **secret,
        )
    endpoint = settings.endpoint
    if not options.path_style:
        # If buckets are in host names, obstore expects the whole host name.
        endpoint = endpoint.replace("://", f"://{settings.bucket}.", 1)
    token: Any = {"session_token": settings.session_token} if settings.session_token else {}
    return S3Store(
        settings.bucket,
        endpoint=endpoint,
        region=options.region,
        access_key_id=settings.access_key,
        secret_access_key=settings.secret_key,
        virtual_hosted_style_request=not options.path_style,
        unsigned_payload=options.payload == "unsigned",
        disable_bulk_delete=True,
        client_options=client,
        retry_config=retry,
        **token,
    )


def _remote(meta: ObjectMeta) -> RemoteObject:
    return RemoteObject(
        key=meta["path"],
        size_bytes=meta["size"],
        modified_s=meta["last_modified"].timestamp(),
        etag=bare_etag(meta["e_tag"]),
    )
