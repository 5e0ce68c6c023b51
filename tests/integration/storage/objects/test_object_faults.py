"""Each client under faults of the service: an error or the right bytes, never wrong ones."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.support.s3.fake_server import FakeServer
from tests.support.s3.fault_plan import ALWAYS, Fault
from tests.support.s3.server import S3Server

from penstock.environment import Environment
from penstock.errors import AccessRefused, ObjectNotFound, ShortTransfer, StorageError, StorageTimeout
from penstock.storage import Storage
from penstock.storage.protocol import Sink, exists, read_object, write_object
from penstock.testing.storage_contract import ReleaseLedger, arbitrary_bytes, assert_same_bytes, submit_pieces

OpenCorner = Callable[..., Storage]
StartFaulty = Callable[..., FakeServer]

CLIENTS = ("obstore", "minio", "s3dlio", "s3torchconnector")
COUNTED = ("obstore", "minio")
"""Clients whose own retries are off, so that the server sees our attempts and no others."""
PART = 5 * 1024 * 1024
CONTENT = arbitrary_bytes(3 * PART + 4097)

every_client = pytest.mark.parametrize("client", CLIENTS)
counted_client = pytest.mark.parametrize("client", COUNTED)


def _eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Libraries drop an upload in their own time; this is how long a test waits for it."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@every_client
def test_a_lost_part_is_an_error_and_its_object_is_removed(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="lose", operation="UploadPart", part=2))
    storage = corner(server.as_server(), client)
    with pytest.raises(ShortTransfer, match="the damaged object was removed") as caught:
        write_object(storage, "damaged", [CONTENT])
    assert caught.value.expected_bytes == len(CONTENT)
    assert caught.value.actual_bytes < len(CONTENT)
    assert not exists(storage, "damaged")
    assert server.bucket.open_uploads == []


@pytest.mark.parametrize("client", ["obstore", "minio", "s3dlio"])
def test_a_lost_put_is_an_error(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="lose", operation="PutObject"))
    with pytest.raises(ObjectNotFound):
        write_object(corner(server.as_server(), client), "lost", [b"content"])


@every_client
def test_an_object_of_another_size_is_an_error(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="resize", operation="HeadObject"))
    with pytest.raises(ShortTransfer) as caught:
        write_object(corner(server.as_server(), client), "longer", [b"content"])
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (7, 8)


def test_a_damaged_object_that_cannot_be_removed_is_still_named(
    faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(
        Fault(action="resize", operation="HeadObject"),
        Fault(action="refuse", operation="DeleteObject", status=403, code="AccessDenied"),
    )
    with pytest.raises(ShortTransfer, match=r"NOT removed .*AccessDenied"):
        write_object(corner(server.as_server(), "obstore"), "stays", [b"content"])


def test_an_object_that_another_writer_replaced_is_left_to_him(
    faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="delay", operation="HeadObject", seconds=1.0))
    storage = corner(server.as_server(), "obstore")
    key = f"{storage.uri.removeprefix('s3://penstock-tests/')}/contested"

    def replace_object() -> None:
        assert _eventually(lambda: key in server.bucket.keys)
        server.bucket.put(key, b"another")

    rival = threading.Thread(target=replace_object)
    rival.start()
    with pytest.raises(StorageError, match="Another writer"):
        write_object(storage, "contested", [b"content"])
    rival.join(10)
    assert read_object(storage, "contested") == b"another"


@every_client
def test_an_overload_that_passes_costs_retries_and_no_bytes(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(
        Fault(action="refuse", operation="PutObject"),
        Fault(action="refuse", operation="UploadPart", part=2),
        Fault(action="refuse", operation="HeadObject"),
        Fault(action="refuse", operation="GetObject"),
    )
    storage = corner(server.as_server(), client, attempts="4")
    write_object(storage, "small", [b"content"])
    write_object(storage, "large", [CONTENT])
    assert read_object(storage, "small") == b"content"
    assert_same_bytes(read_object(storage, "large"), CONTENT)
    assert server.plan.fired["refuse"] >= 3
    counters = storage.counters
    if client in COUNTED:
        unseen = 1 if client == "obstore" else 0  # a part of obstore's stream is its own to retry
        assert counters.retries == counters.errors == server.plan.fired["refuse"] - unseen


@every_client
def test_a_dropped_part_is_sent_again(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="drop", operation="UploadPart", part=1))
    storage = corner(server.as_server(), client, attempts="4")
    write_object(storage, "large", [CONTENT])
    assert server.plan.fired["drop"] == 1
    assert_same_bytes(read_object(storage, "large"), CONTENT)


@every_client
def test_a_lasting_overload_is_an_error_that_names_it(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="refuse", times=ALWAYS))
    storage = corner(server.as_server(), client, attempts="2")
    with pytest.raises(StorageError, match=r"SlowDown|throttled|503|timed out") as caught:
        write_object(storage, "never", [b"content"])
    assert "after 2 attempts" in str(caught.value)
    assert "/never" in str(caught.value)
    if client in COUNTED:
        assert server.requests["PutObject"] == 2


@every_client
def test_a_part_that_never_succeeds_fails_the_object_and_leaves_no_parts(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="refuse", operation="UploadPart", part=2, times=ALWAYS))
    storage = corner(server.as_server(), client, parts_in_flight="2")
    ledger = ReleaseLedger()
    sink = storage.create("never")
    with pytest.raises(StorageError):
        _submit_and_finish(sink, ledger)
    sink.abort()
    ledger.assert_each_released_once()
    assert not exists(storage, "never")
    assert _eventually(lambda: server.bucket.open_uploads == [])


def _submit_and_finish(sink: Sink, ledger: ReleaseLedger) -> None:
    submit_pieces(sink, CONTENT, ledger)
    sink.finish()


@every_client
def test_an_aborted_upload_leaves_no_parts(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="delay", operation="UploadPart", seconds=0.2, times=ALWAYS))
    storage = corner(server.as_server(), client)
    ledger = ReleaseLedger()
    sink = storage.create("given-up", len(CONTENT) + 1)
    submit_pieces(sink, CONTENT, ledger)
    sink.abort()
    ledger.assert_each_released_once()
    assert _eventually(lambda: server.bucket.open_uploads == [])
    assert server.bucket.keys == []


@pytest.mark.parametrize("client", ["obstore", "minio"])
def test_a_forgotten_sink_leaves_no_parts(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty()
    sink = corner(server.as_server(), client).create("forgotten")
    sink.submit(memoryview(CONTENT))
    assert _eventually(lambda: server.requests["UploadPart"] == 3)
    del sink
    assert _eventually(lambda: server.bucket.open_uploads == [])


@every_client
def test_a_body_cut_short_once_is_read_again(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="truncate", operation="GetObject"))
    storage = corner(server.as_server(), client)
    write_object(storage, "cut", [CONTENT[:100_000]])
    assert_same_bytes(read_object(storage, "cut"), CONTENT[:100_000])
    assert server.plan.fired["truncate"] == 1
    if client in COUNTED:
        assert storage.counters.retries == 1


@every_client
def test_a_body_always_cut_short_is_an_error(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="truncate", operation="GetObject", times=ALWAYS))
    storage = corner(server.as_server(), client)
    write_object(storage, "cut", [CONTENT[:100_000]])
    kind = ShortTransfer if client in COUNTED else StorageError
    with pytest.raises(kind, match="/cut"):
        read_object(storage, "cut")


@every_client
def test_a_server_that_stalls_is_a_timeout(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="stall", operation="HeadObject", seconds=20, times=ALWAYS))
    limits = {} if client == "s3dlio" else {"request_timeout_s": "500ms"}
    storage = corner(server.as_server(), client, attempts="1", **limits)
    begun_s = time.monotonic()
    with pytest.raises(StorageTimeout, match="did not respond in time"):
        storage.stat("anything")
    assert time.monotonic() - begun_s < 15


@pytest.mark.parametrize("client", ["obstore", "minio"])
def test_an_upload_that_stalls_is_a_timeout(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="stall", operation="UploadPart", seconds=5, times=ALWAYS))
    storage = corner(server.as_server(), client, attempts="1", request_timeout_s="500ms")
    with pytest.raises(StorageTimeout):
        write_object(storage, "stalled", [CONTENT])


def test_a_stalled_upload_is_given_up_where_the_client_has_no_timeout(
    faulty: StartFaulty, corner: OpenCorner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.objects.object_sink.STALL_GRACE_S", -19.0)
    monkeypatch.setattr("penstock.storage.objects.object_sink.RELEASE_LIMIT_S", 0.5)
    server = faulty(Fault(action="stall", operation="UploadPart", seconds=12, times=ALWAYS))
    storage = corner(server.as_server(), "s3torchconnector", attempts="1", request_timeout_s="500ms")
    ledger = ReleaseLedger()
    sink = storage.create("stalled")
    with pytest.raises(StorageTimeout, match="The upload made no progress"):
        _submit_and_finish(sink, ledger)
    sink.abort()
    ledger.assert_each_released_once()


@every_client
def test_a_refused_connection_names_the_endpoint(client: str, corner: OpenCorner) -> None:
    nobody = S3Server("nobody", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"Cannot connect to http://127\.0\.0\.1:9") as caught:
        corner(nobody, client, attempts="1").stat("anything")
    assert "service is running" in caught.value.fix


@counted_client
@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (403, "AccessDenied", AccessRefused, "access keys"),
        (403, "RequestTimeTooSkewed", AccessRefused, "clock"),
        (403, "SignatureDoesNotMatch", AccessRefused, "AWS_SECRET_ACCESS_KEY"),
        (404, "NoSuchBucket", ObjectNotFound, "Create the bucket"),
        (400, "AuthorizationHeaderMalformed", StorageError, "AWS_REGION"),
    ],
)
def test_a_refusal_is_final_and_has_a_fix(
    client: str,
    status: int,
    code: str,
    kind: type[StorageError],
    advice: str,
    *,
    faulty: StartFaulty,
    corner: OpenCorner,
) -> None:
    server = faulty(Fault(action="refuse", operation="PutObject", status=status, code=code, times=ALWAYS))
    with pytest.raises(kind, match=code) as caught:
        write_object(corner(server.as_server(), client), "refused", [b"content"])
    assert advice in caught.value.fix
    assert server.requests["PutObject"] == 1


@counted_client
def test_an_object_replaced_after_it_was_opened_is_not_read_in_halves(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    storage = corner(faulty().as_server(), client)
    write_object(storage, "replaced", [b"first content"])
    with closing(storage.open("replaced")) as source:
        write_object(storage, "replaced", [b"other content"])
        with pytest.raises(StorageError, match="changed since it was opened"):
            source.read_into(0, memoryview(bytearray(5)))


@pytest.mark.parametrize("client", ["obstore", "minio", "s3torchconnector"])
def test_bad_credentials_are_refused_by_a_server_that_checks(
    client: str, radosgw: S3Server, corner: OpenCorner
) -> None:
    class Impostor(S3Server):
        @property
        def environment(self) -> Environment:
            return {**super().environment, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}

    storage = corner(Impostor("radosgw", radosgw.endpoint), client)
    with pytest.raises(AccessRefused) as caught:
        write_object(storage, "refused", [b"content"])
    assert "wrong-secret" not in str(caught.value)
    corner(radosgw, client)  # the next test's credentials are the process's again


def test_an_answer_without_an_etag_is_an_error_of_s3torchconnector(
    radosgw: S3Server, corner: OpenCorner
) -> None:
    with pytest.raises(StorageError, match='Header "ETag" not found'):
        write_object(corner(radosgw, "s3torchconnector"), "unlucky", [b"content"])


def test_a_broken_listing_is_resumed(faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="drop", operation="ListObjectsV2", nth=2))
    for client in ("obstore", "minio", "s3torchconnector"):
        storage = corner(server.as_server(), client)
        prefix = storage.uri.removeprefix("s3://penstock-tests/")
        keys = [f"many/{number:05d}" for number in range(2500)]
        for key in keys:
            server.bucket.put(f"{prefix}/{key}", b"x")
        assert [info.key for info in storage.list()] == keys
    assert server.plan.fired["drop"] == 1


def test_a_listing_that_keeps_breaking_is_an_error(faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="drop", operation="ListObjectsV2", times=ALWAYS))
    with pytest.raises(StorageError, match="after 2 attempts"):
        list(corner(server.as_server(), "obstore").list())
    assert server.requests["ListObjectsV2"] == 2


@counted_client
def test_an_upload_that_cannot_begin_gives_its_buffer_back(
    client: str, faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(
        Fault(action="refuse", operation="CreateMultipartUpload", status=403, code="AccessDenied")
    )
    ledger = ReleaseLedger()
    sink = corner(server.as_server(), client).create("refused")
    with pytest.raises(AccessRefused):
        _submit_and_finish(sink, ledger)
    sink.abort()
    ledger.assert_each_released_once()


def test_parts_that_cannot_be_dropped_are_warned_of(
    faulty: StartFaulty, corner: OpenCorner, caplog: pytest.LogCaptureFixture
) -> None:
    server = faulty(Fault(action="refuse", operation="AbortMultipartUpload", status=403, code="AccessDenied"))
    sink = corner(server.as_server(), "minio").create("orphan")
    sink.submit(memoryview(CONTENT))
    sink.abort()
    assert "Parts of an unfinished upload may remain" in caplog.text
    assert "lifecycle rule" in caplog.text


def test_a_failed_part_is_known_at_the_next_one(faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(
        Fault(action="refuse", operation="UploadPart", status=403, code="AccessDenied", times=ALWAYS)
    )
    sink = corner(server.as_server(), "minio", parts_in_flight="1").create("refused")
    ledger, buffer = ReleaseLedger(), bytearray(2 * PART)
    with pytest.raises(AccessRefused):
        sink.submit(memoryview(buffer), ledger.issue(buffer))
    sink.abort()
    ledger.assert_each_released_once()


@counted_client
def test_an_upload_that_moves_slowly_is_not_given_up(
    client: str, faulty: StartFaulty, corner: OpenCorner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All parts together take longer than the limit of 2.7 s, each of them far less.
    monkeypatch.setattr("penstock.storage.objects.object_sink.STALL_GRACE_S", -37.3)
    server = faulty(
        Fault(action="delay", operation="UploadPart", seconds=0.8, times=ALWAYS),
        Fault(action="delay", operation="CompleteMultipartUpload", seconds=0.8),
    )
    storage = corner(server.as_server(), client, attempts="1", request_timeout_s="20s", parts_in_flight="1")
    write_object(storage, "slow", [CONTENT])
    assert_same_bytes(read_object(storage, "slow"), CONTENT)


def test_a_pool_whose_parts_never_end_is_a_timeout(
    faulty: StartFaulty, corner: OpenCorner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.objects.object_sink.STALL_GRACE_S", -39.9)
    server = faulty(Fault(action="delay", operation="UploadPart", seconds=1.0, times=ALWAYS))
    storage = corner(server.as_server(), "minio", attempts="1", request_timeout_s="20s", parts_in_flight="1")
    with pytest.raises(StorageTimeout, match="The upload made no progress"):
        write_object(storage, "slow", [CONTENT])
    assert server.bucket.open_uploads == []


def test_deleting_fails_for_a_missing_bucket_but_not_for_a_missing_object(
    faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(
        Fault(action="refuse", operation="DeleteObject", status=404, code="NoSuchKey"),
        Fault(action="refuse", operation="DeleteObject", status=404, code="NoSuchBucket", nth=2),
    )
    storage = corner(server.as_server(), "obstore")
    storage.delete("absent")
    with pytest.raises(ObjectNotFound, match="bucket 'penstock-tests' does not exist"):
        storage.delete("absent")
    assert storage.counters.errors == 0


@pytest.mark.parametrize("client", ["obstore", "minio", "s3dlio"])
def test_a_web_page_is_not_an_empty_listing(client: str, faulty: StartFaulty, corner: OpenCorner) -> None:
    server = faulty(Fault(action="page", times=ALWAYS))
    storage = corner(server.as_server(), client)
    with pytest.raises(StorageError, match="does not come from an object store") as caught:
        list(storage.list())
    assert "console uses a different port" in str(caught.value)


def test_an_empty_listing_is_doubted_once_and_a_full_one_never(
    faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty()
    empty, full = (corner(server.as_server(), "obstore") for _ in range(2))
    for _ in range(3):
        assert list(empty.list()) == []
    assert server.requests == {"ListObjectsV2": 3, "GetObject": 1}
    assert (empty.counters.requests, empty.counters.errors) == (4, 0)
    write_object(full, "key", [b"content"])
    assert len(list(full.list())) == 1
    assert list(full.list("nothing")) == []
    assert server.requests["GetObject"] == 1


def test_a_listing_is_tried_again_where_its_endpoint_cannot_be_asked(
    faulty: StartFaulty, corner: OpenCorner
) -> None:
    server = faulty(Fault(action="refuse", operation="GetObject"))
    assert list(corner(server.as_server(), "obstore").list()) == []
    assert server.requests == {"ListObjectsV2": 2, "GetObject": 2}


@every_client
def test_a_process_that_ends_with_an_unfinished_object_leaves_no_parts(
    client: str, faulty: StartFaulty
) -> None:
    server = faulty()
    program = "tests.integration.storage.objects.programs.leave_unfinished"
    done = subprocess.run(
        [sys.executable, "-m", program, server.endpoint, client],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "left\n"
    assert _eventually(lambda: server.bucket.open_uploads == [])
    assert server.bucket.keys == []
