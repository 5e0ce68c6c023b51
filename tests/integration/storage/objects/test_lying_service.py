"""Services that answer with too much, send elsewhere, or never come to an end."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from tests.support.s3.server import BUCKET

from penstock.errors import StorageError
from penstock.storage import Storage, open_storage
from penstock.storage.protocol import read_object

Send = Callable[[bytes], None]
MIB = 1 << 20
PAGE = b"""<?xml version="1.0"?><ListBucketResult><Name>b</Name><IsTruncated>true</IsTruncated>
<NextContinuationToken>same</NextContinuationToken>%s</ListBucketResult>""" % b"".join(
    b"<Contents><Key>k%d</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
    b"<Size>1</Size></Contents>" % number
    for number in range(3)
)


FACTS = b"""HTTP/1.1 200 OK\r\nContent-Length: 50\r\nETag: "x"\r
Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"""


def answer(send: Send, status: bytes, body: bytes, *headers: bytes) -> None:
    send(b"\r\n".join((b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body), b"", body)))


def endless(send: Send, head: bytes, piece: bytes) -> None:
    """Sends until the client hangs up, at most 4 GiB."""
    send(head)
    for _ in range(4096):
        send(piece)


@contextmanager
def serving(lie: Callable[[Send], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Answer each request but HEAD with `lie`; yields the endpoint, and the requests so far."""
    requests: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while head := connection.recv(65536):
                requests.append(head)
                if head.startswith(b"HEAD"):
                    connection.sendall(FACTS)
                else:
                    lie(connection.sendall)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)


def opened(endpoint: str, client: str) -> Storage:
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_SESSION_TOKEN": "token",
        "AWS_REGION": "us-east-1",
    }
    options = {"client": client, "attempts": "1", "request_timeout_s": "10s"}
    return open_storage(f"s3://{BUCKET}", environment, options=options)


@pytest.mark.parametrize("client", ["obstore", "minio", "s3torchconnector"])
def test_a_listing_that_begins_anew_is_refused(client: str) -> None:
    with (
        serving(lambda send: answer(send, b"200 OK", PAGE, b"Content-Type: application/xml")) as (at, _),
        pytest.raises(StorageError, match="a listing goes back from k2 to k0"),
    ):
        list(opened(at, client).list("p"))


HUGE = b"Content-Type: application/xml\r\nContent-Length: 99999999999\r\n\r\n<Error><Code>"
CHUNKED = b"Content-Type: application/xml\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"100000\r\n" + bytes(MIB) + b"\r\n"


@pytest.mark.parametrize("status", [b"200 OK", b"403 Forbidden"])
@pytest.mark.parametrize(
    ("headers", "piece"), [(HUGE, bytes(MIB)), (CHUNKED, CHUNK)], ids=["announced", "chunked"]
)
def test_minio_reads_no_more_of_an_answer_than_one_can_have(
    status: bytes, headers: bytes, piece: bytes
) -> None:
    with serving(lambda send: endless(send, b"HTTP/1.1 " + status + b"\r\n" + headers, piece)) as (at, _):
        storage = opened(at, "minio")
        with pytest.raises(StorageError, match="larger than 67,108,864 bytes"):
            list(storage.list("p"))
        if status != b"200 OK":
            with pytest.raises(StorageError, match="larger than 67,108,864 bytes"):
                read_object(storage, "x")


@pytest.mark.parametrize("client", ["minio", "s3torchconnector"])
def test_clients_that_follow_no_redirects_send_no_token_elsewhere(client: str) -> None:
    with serving(lambda send: answer(send, b"404 Not Found", b"")) as (elsewhere, stolen):
        location = b"Location: " + elsewhere.encode() + b"/x"
        with serving(lambda send: answer(send, b"307 Temporary Redirect", b"", location)) as (at, asked):
            with pytest.raises(StorageError, match="another region"):
                list(opened(at, client).list("p"))
            assert asked
        assert not stolen
