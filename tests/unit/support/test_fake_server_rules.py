"""The strict fake refuses what S3 refuses, and its plan fires when it says."""

import hashlib
import http.client
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.support.s3.fake_bucket import FakeBucket, Refused
from tests.support.s3.fake_server import FakeServer, running_fake
from tests.support.s3.fault_plan import ALWAYS, Fault, FaultPlan
from tests.support.s3.server import ACCESS_KEY, BUCKET

PART = 5 * 1024 * 1024
SIGNED = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_fake() as running:
        yield running


def _ask(
    server: FakeServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(
        http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=10)
    ) as connection:
        connection.request(method, path, body, {**SIGNED, **named})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


def test_an_object_comes_back_whole_and_in_ranges(server: FakeServer) -> None:
    assert _ask(server, "PUT", f"/{BUCKET}/key", b"0123456789")[0] == 200
    assert _ask(server, "GET", f"/{BUCKET}/key")[1] == b"0123456789"
    status, body, headers = _ask(server, "GET", f"/{BUCKET}/key", Range="bytes=2-4")
    assert (status, body, headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert _ask(server, "GET", f"/{BUCKET}/key", Range="bytes=8-")[1] == b"89"
    assert _ask(server, "HEAD", f"/{BUCKET}/key")[2]["Content-Length"] == "10"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", f"/{BUCKET}/absent", {}, 404, b"NoSuchKey"),
        ("GET", "/elsewhere/key", {}, 404, b"NoSuchBucket"),
        ("GET", f"/{BUCKET}/key", {"Range": "bytes=10-12"}, 416, b"InvalidRange"),
        ("GET", f"/{BUCKET}/key", {"If_Match": '"another"'}, 412, b"PreconditionFailed"),
        ("GET", f"/{BUCKET}/key", {"Authorization": ""}, 403, b"AccessDenied"),
        (
            "GET",
            f"/{BUCKET}/key",
            {"Authorization": "AWS4-HMAC-SHA256 Credential=stranger/x"},
            403,
            b"InvalidAccessKeyId",
        ),
        ("PUT", f"/{BUCKET}/key", {"Content_MD5": "AAAA"}, 400, b"BadDigest"),
        ("PUT", f"/{BUCKET}/key", {"x_amz_content_sha256": "0" * 64}, 400, b"XAmzContentSHA256Mismatch"),
        ("PUT", f"/{BUCKET}/key?partNumber=1&uploadId=none", {}, 404, b"NoSuchUpload"),
        ("DELETE", f"/{BUCKET}/key?uploadId=none", {}, 404, b"NoSuchUpload"),
        ("PATCH", f"/{BUCKET}/key", {}, 501, b""),
        ("POST", f"/{BUCKET}/key", {}, 501, b"NotImplemented"),
    ],
)
def test_what_s3_refuses_is_refused(
    server: FakeServer, method: str, path: str, headers: dict[str, str], *, status: int, code: bytes
) -> None:
    _ask(server, "PUT", f"/{BUCKET}/key", b"0123456789")
    body = b"x" if method in ("PUT", "POST") else None
    answered, content, _ = _ask(server, method, path, body, **headers)
    assert answered == status
    assert code in content


def test_a_put_without_a_length_is_refused(server: FakeServer) -> None:
    with closing(
        http.client.HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=10)
    ) as connection:
        connection.putrequest("PUT", f"/{BUCKET}/key")
        connection.putheader("Authorization", SIGNED["Authorization"])
        connection.endheaders()
        assert connection.getresponse().status == 411


def test_chunked_payloads_are_unwrapped_and_checked(server: FakeServer) -> None:
    framed = b"5;chunk-signature=x\r\nhello\r\n0;chunk-signature=y\r\n\r\n"
    headers = {"Content_Encoding": "aws-chunked", "x_amz_decoded_content_length": "5"}
    assert _ask(server, "PUT", f"/{BUCKET}/framed", framed, **headers)[0] == 200
    assert server.bucket.get("framed").content == b"hello"
    headers["x_amz_decoded_content_length"] = "6"
    assert b"IncompleteBody" in _ask(server, "PUT", f"/{BUCKET}/framed", framed, **headers)[1]


def test_a_listing_pages_through_keys(server: FakeServer) -> None:
    for number in range(5):
        server.bucket.put(f"p/{number} &", b"x")
    _, body, _ = _ask(server, "GET", f"/{BUCKET}?list-type=2&prefix=p/&max-keys=3")
    assert body.count(b"<Key>") == 3
    assert b"<IsTruncated>true" in body
    assert b"p/2 &amp;</NextContinuationToken>" in body
    _, body, _ = _ask(server, "GET", f"/{BUCKET}?list-type=2&prefix=p/&continuation-token=p/2%20%26")
    assert body.count(b"<Key>") == 2
    assert b"<IsTruncated>false" in body


def test_buckets_answer_what_clients_ask_of_them(server: FakeServer) -> None:
    assert _ask(server, "HEAD", f"/{BUCKET}")[0] == 200
    assert b"LocationConstraint" in _ask(server, "GET", f"/{BUCKET}?location")[1]
    assert _ask(server, "GET", f"/{BUCKET}?policy")[0] == 501
    server.bucket.put("a", b"x")
    deletion = b"<Delete><Object><Key>a</Key></Object></Delete>"
    assert b"<Key>a</Key>" in _ask(server, "POST", f"/{BUCKET}?delete", deletion)[1]
    assert server.bucket.keys == []


def test_malformed_completions_are_refused(server: FakeServer) -> None:
    upload = server.bucket.begin_upload("key")
    body = b"<CompleteMultipartUpload><Part><ETag>x</ETag></Part></CompleteMultipartUpload>"
    assert b"MalformedXML" in _ask(server, "POST", f"/{BUCKET}/key?uploadId={upload}", body)[1]


def test_a_completion_lists_known_parts_in_order_and_of_allowed_size() -> None:
    bucket = FakeBucket()
    upload = bucket.begin_upload("key")
    first = bucket.put_part(upload, "key", 1, bytes(PART))
    second = bucket.put_part(upload, "key", 2, b"tail")
    for listed, code in (
        ([], "InvalidPartOrder"),
        ([(2, second), (1, first)], "InvalidPartOrder"),
        ([(1, second)], "InvalidPart"),
        ([(3, first)], "InvalidPart"),
    ):
        with pytest.raises(Refused, match=code):
            bucket.complete(upload, "key", listed, lost=0)
    etag = bucket.complete(upload, "key", [(1, first), (2, second)], lost=0)
    digest = hashlib.md5(bytes.fromhex(first) + bytes.fromhex(second)).hexdigest()
    assert etag == f"{digest}-2"
    assert bucket.get("key").content == bytes(PART) + b"tail"
    assert bucket.open_uploads == []


def test_small_parts_in_the_middle_and_numbers_out_of_bounds_are_refused() -> None:
    bucket = FakeBucket()
    upload = bucket.begin_upload("key")
    etags = [bucket.put_part(upload, "key", number, b"small") for number in (1, 2)]
    with pytest.raises(Refused, match="EntityTooSmall"):
        bucket.complete(upload, "key", list(enumerate(etags, 1)), lost=0)
    for number in (0, 10_001):
        with pytest.raises(Refused, match="InvalidArgument"):
            bucket.put_part(upload, "key", number, b"x")
    bucket.abort(upload, "key")
    with pytest.raises(Refused, match="NoSuchUpload"):
        bucket.abort(upload, "key")


def test_virtual_keys_exist_in_listings_alone() -> None:
    bucket = FakeBucket(virtual_keys=5)
    first = [line.key for line in bucket.list_after("p/", "", 3)]
    rest = [line.key for line in bucket.list_after("p/", first[-1], 10)]
    assert [*first, *rest] == [f"p/virtual-{number:09d}" for number in range(5)]
    assert bucket.keys == []


def test_a_fault_fires_on_its_turns_and_is_counted() -> None:
    plan = FaultPlan(Fault(action="drop", operation="GetObject", key="a", nth=2, times=2))
    fired = [plan.next_for("GetObject", key, None) is not None for key in ("a", "b", "xay", "a", "a")]
    assert fired == [False, False, True, True, False]
    assert plan.next_for("PutObject", "a", None) is None
    assert plan.fired["drop"] == 2


def test_a_fault_of_a_part_spares_the_others_and_the_first_due_wins() -> None:
    plan = FaultPlan(Fault(action="lose", part=2), Fault(action="delay", times=ALWAYS))
    actions = [plan.next_for("UploadPart", "k", part) for part in (1, 2, 2)]
    assert [fault.action if fault else None for fault in actions] == ["delay", "lose", "delay"]


def test_dropped_and_stalled_requests_get_no_answer() -> None:
    faults = (
        Fault(action="drop", operation="GetObject"),
        Fault(action="stall", operation="HeadObject", seconds=0.05),
    )
    with running_fake(*faults) as server:
        for method in ("GET", "HEAD"):
            with pytest.raises(http.client.RemoteDisconnected):
                _ask(server, method, f"/{BUCKET}/key")
        assert dict(server.plan.fired) == {"drop": 1, "stall": 1}
