"""A small, strict S3 server of our own in this process, which misbehaves by plan.

It answers PUT, GET with ranges, HEAD, DELETE, LIST v2 and multipart uploads, and refuses what S3 refuses.
Invariant: without a plan it never lies; whatever it does on purpose is in `plan.fired`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import re
import socket
import ssl
import threading
import urllib.parse
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

from tests.support.s3.fake_bucket import FakeBucket, ListedKey, Refused, StoredObject, md5_hex
from tests.support.s3.fault_plan import Fault, FaultPlan
from tests.support.s3.server import ACCESS_KEY, BUCKET, S3Server

_OPERATIONS = {
    ("PUT", False): "PutObject",
    ("GET", False): "GetObject",
    ("HEAD", False): "HeadObject",
    ("DELETE", False): "DeleteObject",
    ("PUT", True): "UploadPart",
    ("POST", True): "CompleteMultipartUpload",
    ("DELETE", True): "AbortMultipartUpload",
}
_BUCKET_OPERATIONS = {("GET", "list-type"): "ListObjectsV2", ("POST", "delete"): "DeleteObjects"}
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CREDENTIAL = re.compile(r"AWS4-HMAC-SHA256 .*Credential=([^/,]+)/")


class FakeServer(ThreadingHTTPServer):
    """The server, and what a test may ask it: objects, requests, payload modes."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, plan: FaultPlan, bucket: FakeBucket) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.plan = plan
        self.bucket = bucket
        self.requests: Counter[str] = Counter()
        self.payload_modes: Counter[str] = Counter()
        self.scheme = "http"
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def as_server(self) -> S3Server:
        """How to reach it."""
        return S3Server("fake", self.endpoint)

    def count(self, operation: str, payload_mode: str) -> None:
        """Note one request."""
        with self._lock:
            self.requests[operation] += 1
            if operation in ("PutObject", "UploadPart"):
                self.payload_modes[payload_mode] += 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event here; tests look at what the client saw."""


@contextmanager
def running_fake(
    *faults: Fault, bucket: FakeBucket | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[FakeServer]:
    """A strict server on a free port for as long as the context lasts, with these faults.

    Servers that share a `bucket` are endpoints of one service.
    """
    server = FakeServer(FaultPlan(*faults), bucket or FakeBucket())
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="fake-s3", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Request:
    """One parsed request: operation, key, query, body."""

    def __init__(self, handler: _Handler) -> None:
        path, _, query = handler.path.partition("?")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        bucket, _, key = path.lstrip("/").partition("/")
        self.bucket = urllib.parse.unquote(bucket)
        self.key = urllib.parse.unquote(key)
        self.part = int(self.query["partNumber"]) if "partNumber" in self.query else None
        self.operation = self._operation(handler.command)

    def _operation(self, method: str) -> str:
        if not self.key:
            named = (
                name
                for (verb, mark), name in _BUCKET_OPERATIONS.items()
                if verb == method and mark in self.query
            )
            return next(named, "Bucket")
        if method == "POST" and "uploads" in self.query:
            return "CreateMultipartUpload"
        return _OPERATIONS.get((method, "uploadId" in self.query), "Unknown")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    timeout = 60
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Nothing: `FakeServer.requests` counts."""

    def _serve(self) -> None:
        request = _Request(self)
        self.server.count(request.operation, self.headers.get("x-amz-content-sha256", ""))
        body = b""
        try:
            body = self._read_body()
            fault = self.server.plan.next_for(request.operation, request.key, request.part)
            if fault is not None and not self._endure(fault):
                return
            self._check(request, body)
            action = fault.action if fault else ""
            if action == "silence":
                self.wfile = io.BytesIO()  # the answer is lost
                self.close_connection = True
            getattr(self, f"_{request.operation}")(request, body, action)
            if action == "silence":
                self.connection.shutdown(socket.SHUT_RDWR)
        except Refused as refusal:
            self._refuse(refusal)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - the base class looks them up

    def _read_body(self) -> bytes:
        length = self.headers.get("content-length")
        if length is None:
            if self.command == "PUT":
                self.close_connection = True
                raise Refused(411, "MissingContentLength")
            return b""
        raw = self.rfile.read(int(length))
        if len(raw) != int(length):
            self.close_connection = True
            raise Refused(400, "IncompleteBody")
        if "aws-chunked" in self.headers.get("content-encoding", ""):
            return self._unchunk(raw)
        return raw

    def _unchunk(self, raw: bytes) -> bytes:
        pieces, start = [], 0
        while True:
            end = raw.index(b"\r\n", start)
            size = int(raw[start:end].split(b";")[0], 16)
            if size == 0:
                break
            pieces.append(raw[end + 2 : end + 2 + size])
            start = end + 2 + size + 2
        body = b"".join(pieces)
        if len(body) != int(self.headers["x-amz-decoded-content-length"]):
            raise Refused(400, "IncompleteBody")
        return body

    def _endure(self, fault: Fault) -> bool:
        """Carry out what comes before an answer; whether there is to be one."""
        if fault.action in ("delay", "stall"):
            self.server.stopping.wait(fault.seconds)
        if fault.action in ("drop", "stall"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return False
        if fault.action == "page":
            self._answer(200, b"<html><body>Please log in</body></html>", Content_Type="text/html")
            return False
        if fault.action == "refuse":
            raise Refused(fault.status, fault.code)
        return True

    def _check(self, request: _Request, body: bytes) -> None:
        signer = _CREDENTIAL.match(self.headers.get("authorization", ""))
        if signer is None:
            raise Refused(403, "AccessDenied", "Requests are signed with AWS4-HMAC-SHA256")
        if signer[1] != ACCESS_KEY:
            raise Refused(403, "InvalidAccessKeyId")
        if request.bucket != BUCKET:
            raise Refused(404, "NoSuchBucket")
        claimed = self.headers.get("x-amz-content-sha256", "")
        if re.fullmatch("[0-9a-f]{64}", claimed) and hashlib.sha256(body).hexdigest() != claimed:
            raise Refused(400, "XAmzContentSHA256Mismatch")
        digest = self.headers.get("content-md5")
        if digest and base64.b64decode(digest).hex() != md5_hex(body):
            raise Refused(400, "BadDigest")

    def _refuse(self, refusal: Refused) -> None:
        body = (
            f"<?xml version='1.0'?><Error><Code>{refusal.code}</Code>"
            f"<Message>{escape(refusal.message)}</Message></Error>"
        )
        self._answer(refusal.status, body.encode())

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if body and "Content_Type" not in headers:
            self.send_header("Content-Type", "application/xml")
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _Unknown(self, request: _Request, body: bytes, action: str) -> None:  # noqa: N802
        raise Refused(501, "NotImplemented", f"{self.command} {self.path} {len(body)} {action} {request.key}")

    def _Bucket(self, request: _Request, body: bytes, action: str) -> None:  # noqa: N802
        if self.command == "HEAD":
            self._answer(200)
        elif "location" in request.query:
            self._answer(200, b"<LocationConstraint/>")
        else:
            self._Unknown(request, body, action)

    def _PutObject(self, request: _Request, body: bytes, action: str) -> None:  # noqa: N802
        if action == "lose":
            self._answer(200, ETag=f'"{md5_hex(body)}"')
            return
        stored = self.server.bucket.put(
            request.key,
            body,
            if_none=self.headers.get("if-none-match") == "*",
            if_match=self.headers.get("if-match", "").strip('"'),
        )
        self._answer(200, ETag=f'"{stored.etag}"')

    def _DeleteObject(self, request: _Request, _body: bytes, _action: str) -> None:  # noqa: N802
        self.server.bucket.delete(request.key)
        self._answer(204)

    def _DeleteObjects(self, _request: _Request, body: bytes, _action: str) -> None:  # noqa: N802
        root = ET.fromstring(body)
        keys = [_text(entry, "Key") for entry in root.findall("{*}Object")]
        for key in keys:
            self.server.bucket.delete(key)
        deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _HeadObject(self, request: _Request, _body: bytes, action: str) -> None:  # noqa: N802
        stored = self.server.bucket.get(request.key)
        size_bytes = len(stored.content) + (1 if action == "resize" else 0)
        self._answer(200, b"", Content_Length=str(size_bytes), **_facts(stored))

    def _GetObject(self, request: _Request, _body: bytes, action: str) -> None:  # noqa: N802
        stored = self.server.bucket.get(request.key)
        if self.headers.get("if-match", f'"{stored.etag}"') != f'"{stored.etag}"':
            raise Refused(412, "PreconditionFailed")
        first, last, status = 0, len(stored.content) - 1, 200
        headers = _facts(stored)
        wanted = _RANGE.fullmatch(self.headers.get("range", ""))
        if wanted is not None:
            first, status = int(wanted[1]), 206
            last = min(int(wanted[2] or last), last)
            if first >= len(stored.content) or first > last:
                raise Refused(416, "InvalidRange")
            headers["Content_Range"] = f"bytes {first}-{last}/{len(stored.content)}"
        body = memoryview(stored.content)[first : last + 1]
        if action == "truncate":
            self._answer(status, bytes(body[: len(body) // 2]), Content_Length=str(len(body)), **headers)
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._answer(status, bytes(body), **headers)

    def _CreateMultipartUpload(self, request: _Request, _body: bytes, _action: str) -> None:  # noqa: N802
        upload_id = self.server.bucket.begin_upload(request.key)
        answer = (
            f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )
        self._answer(200, answer.encode())

    def _UploadPart(self, request: _Request, body: bytes, action: str) -> None:  # noqa: N802
        keep = self.server.bucket.lose_part if action == "lose" else self.server.bucket.put_part
        etag = keep(request.query["uploadId"], request.key, request.part or 0, body)
        self._answer(200, ETag=f'"{etag}"')

    def _CompleteMultipartUpload(self, request: _Request, body: bytes, _action: str) -> None:  # noqa: N802
        root = ET.fromstring(body)
        listed = [
            (int(_text(part, "PartNumber")), _text(part, "ETag").strip('"'))
            for part in root.findall("{*}Part")
        ]
        upload_id, lost = request.query["uploadId"], self.server.plan.fired["lose"]
        etag = self.server.bucket.complete(upload_id, request.key, listed, lost=lost)
        answer = (
            f"<CompleteMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>&quot;{etag}&quot;</ETag></CompleteMultipartUploadResult>"
        )
        self._answer(200, answer.encode())

    def _AbortMultipartUpload(self, request: _Request, _body: bytes, _action: str) -> None:  # noqa: N802
        self.server.bucket.abort(request.query["uploadId"], request.key)
        self._answer(204)

    def _ListObjectsV2(self, request: _Request, _body: bytes, action: str) -> None:  # noqa: N802
        query = request.query
        limit = min(int(query.get("max-keys", "1000")), 1000)
        after = query.get("continuation-token", query.get("start-after", ""))
        found = list(self.server.bucket.list_after(query.get("prefix", ""), after, limit + 1))
        page, more = found[:limit], len(found) > limit
        is_quoted = query.get("encoding-type") == "url"
        quote = urllib.parse.quote if is_quoted else str
        encoding = "<EncodingType>url</EncodingType>" if is_quoted else ""
        token = f"<NextContinuationToken>{escape(page[-1].key)}</NextContinuationToken>" if more else ""
        shown = random.sample(page, len(page)) if action == "shuffle" else page
        lines = "".join(_list_line(line, escape(quote(line.key))) for line in shown)
        answer = (
            f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><Name>{BUCKET}</Name>"
            f"<Prefix>{escape(quote(query.get('prefix', '')))}</Prefix>{encoding}"
            f"<KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{lines}"
            f"</ListBucketResult>"
        )
        self._answer(200, answer.encode())


def _facts(stored: StoredObject) -> dict[str, str]:
    return {
        "ETag": f'"{stored.etag}"',
        "Last_Modified": formatdate(stored.modified_s, usegmt=True),
        "Accept_Ranges": "bytes",
        "Content_Type": "application/octet-stream",
    }


def _text(element: ET.Element, name: str) -> str:
    text = element.findtext("{*}" + name)
    if text is None:
        raise Refused(400, "MalformedXML", f"No {name}")
    return text


def _list_line(line: ListedKey, key: str) -> str:
    modified = datetime.fromtimestamp(line.modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return (
        f"<Contents><Key>{key}</Key><LastModified>{modified}</LastModified>"
        f"<ETag>&quot;{line.etag}&quot;</ETag>"
        f"<Size>{line.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )
