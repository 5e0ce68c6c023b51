from collections.abc import Callable, Iterator

import pytest

from penstock.environment import process_environment
from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    OutOfSpace,
    ShortTransfer,
    StorageError,
    StorageTimeout,
    Unavailable,
)
from penstock.storage.objects.client import (
    CLIENTS,
    FailureKind,
    ObjectClient,
    RemoteObject,
    RequestFailed,
    connect,
)
from penstock.storage.objects.client_minio import MinioClient
from penstock.storage.objects.client_obstore import ObstoreClient
from penstock.storage.objects.client_s3dlio import S3dlioClient
from penstock.storage.objects.client_s3torchconnector import S3TorchClient
from penstock.storage.objects.client_settings import ObjectOptions, export_credentials, resolve_settings
from penstock.storage.objects.object_requests import MAX_BACKOFF_S, RetryingRequests
from penstock.storage.protocol import Counters
from penstock.storage.uri import parse_uri


def _error(failure: RequestFailed, *, attempts: int) -> StorageError:
    requests = RetryingRequests([], bucket="bucket", counters=Counters(), options=ObjectOptions())
    return requests.make_error(
        failure, "GetObject", "s3://bucket/key", "http://host:1", attempts, wanted_bytes=10
    )


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (RequestFailed("answer", "m", 404, "NoSuchBucket"), ObjectNotFound, "bucket 'bucket' does not exist"),
        (RequestFailed("answer", "m", 404), ObjectNotFound, "No object at s3://bucket/key"),
        (RequestFailed("answer", "m", 403, "ExpiredToken"), AccessRefused, "AWS_SESSION_TOKEN"),
        (RequestFailed("answer", "m", 401), AccessRefused, "access keys"),
        (RequestFailed("answer", "m", 301, "PermanentRedirect"), StorageError, "AWS_REGION"),
        (RequestFailed("answer", "m", 507), OutOfSpace, "no room"),
        (RequestFailed("answer", "m", 403, "QuotaExceeded"), AccessRefused, "QuotaExceeded"),
        (RequestFailed("answer", "m", 409, "QuotaExceeded"), OutOfSpace, "no room"),
        (RequestFailed("answer", "m", 412), StorageError, "changed since it was opened"),
        (RequestFailed("answer", "m", 416), ShortTransfer, "ends before the requested range"),
        (RequestFailed("answer", "m", 503, "SlowDown"), StorageError, "after 3 attempts: 503 SlowDown: m"),
        (RequestFailed("timeout", "slow"), StorageTimeout, "did not respond in time after 3 attempts"),
        (RequestFailed("connect", "refused"), StorageError, "Cannot connect to http://host:1"),
        (RequestFailed("reset", "gone"), StorageError, "connection broke"),
        (RequestFailed("truncated", "short", received_bytes=4), ShortTransfer, "ended too early"),
    ],
)
def test_each_failure_has_its_error_and_its_advice(
    failure: RequestFailed, kind: type[StorageError], words: str
) -> None:
    error = _error(failure, attempts=3)
    assert type(error) is kind
    assert words in str(error)
    assert error.uri == "s3://bucket/key"
    assert "http://host:1" in str(error)
    if isinstance(error, ShortTransfer):
        assert (error.expected_bytes, error.actual_bytes) == (10, failure.received_bytes)


def test_a_single_attempt_is_not_counted_aloud() -> None:
    assert "attempts" not in str(_error(RequestFailed("reset", "gone"), attempts=1))


@pytest.mark.parametrize(
    ("failure", "is_transient"),
    [
        (RequestFailed("timeout", ""), True),
        (RequestFailed("reset", ""), True),
        (RequestFailed("connect", ""), True),
        (RequestFailed("truncated", ""), True),
        (RequestFailed("answer", "", 503), True),
        (RequestFailed("answer", "", 400, "RequestTimeout"), True),
        (RequestFailed("answer", "", 403, "AccessDenied"), False),
        (RequestFailed("answer", "", 404), False),
        (RequestFailed("answer", "", 412), False),
        (RequestFailed("answer", "", 501), False),
    ],
)
def test_only_what_may_pass_is_tried_again(failure: RequestFailed, *, is_transient: bool) -> None:
    assert failure.is_transient is is_transient


class _ListedClient(ObjectClient):
    """A client whose every head is the next of a list of outcomes."""

    def __init__(self, *outcomes: RemoteObject | RequestFailed) -> None:
        self._outcomes = iter(outcomes)

    @staticmethod
    def explain(error: Exception) -> RequestFailed:
        raise NotImplementedError

    def head(self, key: str) -> RemoteObject:
        outcome = next(self._outcomes)
        if isinstance(outcome, RequestFailed):
            raise outcome
        return outcome

    def read_into(self, key: str, offset: int, buffer: memoryview, etag: str | None) -> None:
        raise NotImplementedError

    def list(self, prefix: str, after: str) -> Iterator[RemoteObject]:
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError

    def put(self, key: str, content: memoryview) -> str | None:
        raise NotImplementedError


FOUND = RemoteObject("k", 1, 0.0, None)


def _requests(*clients: _ListedClient, rank: int = 0) -> tuple[RetryingRequests, Counters, list[float]]:
    counters, slept = Counters(), list[float]()
    for number, client in enumerate(clients):
        client.url = f"e{number}"
    requests = RetryingRequests(
        clients,
        bucket="b",
        counters=counters,
        options=ObjectOptions(attempts=4, backoff_s=1.0),
        rank=rank,
        sleep=slept.append,
    )
    return requests, counters, slept


def test_retries_are_counted_and_wait_ever_longer() -> None:
    slow = RequestFailed("answer", "", 503, "SlowDown")
    requests, counters, slept = _requests(_ListedClient(slow, slow, slow, FOUND))
    assert requests.call("HeadObject", "s3://b/k", lambda client: client.head("k")) == FOUND
    assert (counters.requests, counters.retries, counters.errors) == (4, 3, 3)
    assert [0.5 <= seconds / 2**turn <= 1.0 for turn, seconds in enumerate(slept)] == [True] * 3


def test_attempts_are_bounded() -> None:
    slow = RequestFailed("answer", "", 503, "SlowDown")
    requests, counters, slept = _requests(_ListedClient(*[slow] * 9))
    with pytest.raises(StorageError, match="after 4 attempts"):
        requests.call("HeadObject", "s3://b/k", lambda client: client.head("k"))
    assert (counters.requests, counters.retries, counters.errors, len(slept)) == (4, 3, 4, 3)


def test_a_refusal_is_not_retried_and_a_missing_object_is_not_counted_as_error() -> None:
    requests, counters, _ = _requests(_ListedClient(RequestFailed("answer", "", 404)))
    with pytest.raises(ObjectNotFound):
        requests.call("HeadObject", "s3://b/k", lambda client: client.head("k"))
    assert (counters.requests, counters.errors) == (1, 0)


def test_retries_by_the_library_are_counted_where_it_reports_them() -> None:
    requests, counters, _ = _requests(_ListedClient(RequestFailed("answer", "", 403, hidden_retries=7)))
    with pytest.raises(AccessRefused):
        requests.call("HeadObject", "s3://b/k", lambda client: client.head("k"))
    assert counters.retries == 7


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_requests_take_turns_from_a_ranks_own_first_endpoint(rank: int) -> None:
    requests, counters, _ = _requests(*(_ListedClient(*[FOUND] * 9) for _ in range(3)), rank=rank)
    assert requests.next_client().url == f"e{rank % 3}"
    for _ in range(9):
        requests.call("HeadObject", "s3://b/k", lambda client: client.head("k"))
    assert set(counters.requests_by_endpoint.values()) == {3}


def test_the_backoff_has_a_ceiling() -> None:
    slept: list[float] = []
    options = ObjectOptions(attempts=60, backoff_s=1.0)
    requests = RetryingRequests([], bucket="b", counters=Counters(), options=options, sleep=slept.append)
    for attempts in range(1, 60):
        failure = RequestFailed("reset", "gone")
        requests.wait_for_retry(failure, "GetObject", "u", "e0", attempts)
    assert MAX_BACKOFF_S / 2 <= max(slept) <= MAX_BACKOFF_S


Reader = Callable[[Exception], RequestFailed]

OBSTORE_ANSWER = """Generic S3 error: Error performing PUT http://h/b/k - Server returned non-2xx status
code: 503 Service Unavailable: <Error><Code>SlowDown</Code><Message>Later</Message></Error>
Debug source: RetryErrorImpl { retries: 3, max_retries: 3, inner: Status { status: 503, body: None } }"""


def test_an_answer_is_read_out_of_obstores_text() -> None:
    failure = ObstoreClient.explain(Exception(OBSTORE_ANSWER))
    assert (failure.kind, failure.status, failure.code, failure.message) == (
        "answer",
        503,
        "SlowDown",
        "Later",
    )
    assert failure.hidden_retries == 3


@pytest.mark.parametrize(
    ("read", "text", "kind", "status"),
    [
        (ObstoreClient.explain, "retries: 0, inner: BareRedirect", "answer", 301),
        (ObstoreClient.explain, 'kind: Connect, "tcp connect error"', "connect", None),
        (ObstoreClient.explain, "source: TimedOut", "timeout", None),
        (ObstoreClient.explain, "UnexpectedEof, error: IncompleteBody", "truncated", None),
        (ObstoreClient.explain, "hyper::Error(IncompleteMessage)", "reset", None),
        (ObstoreClient.explain, "status: 404, body: None", "answer", 404),
        (S3dlioClient.explain, "failed: service error: SlowDown (SlowDown)", "answer", 503),
        (
            S3dlioClient.explain,
            "service error: unknown (no message) — HTTP 403 Forbidden",
            "answer",
            403,
        ),
        (S3dlioClient.explain, "service error: NotFound (no message)", "answer", 404),
        (S3dlioClient.explain, "service error: unhandled error (Odd): Error {}", "answer", None),
        (S3dlioClient.explain, "request timed out after 2s", "timeout", None),
        (S3dlioClient.explain, "client error (Connect): tcp connect error", "connect", None),
        (S3dlioClient.explain, "end of file before message length reached", "truncated", None),
        (S3dlioClient.explain, "client error (SendRequest)", "reset", None),
        (S3TorchClient.explain, "Service error: The key does not exist", "answer", 404),
        (S3TorchClient.explain, "Service error: The bucket does not exist", "answer", 404),
        (S3TorchClient.explain, "Client error: Request throttled", "answer", 503),
        (S3TorchClient.explain, "Client error: Forbidden: AccessDenied", "answer", 403),
        (
            S3TorchClient.explain,
            "X { response_status: 416, <Code>InvalidRange</Code>",
            "answer",
            416,
        ),
        (S3TorchClient.explain, "AWS_IO_SOCKET_CONNECTION_REFUSED", "connect", None),
        (S3TorchClient.explain, "AWS_IO_SOCKET_TIMEOUT", "timeout", None),
        (S3TorchClient.explain, "AWS_IO_SOCKET_CLOSED", "reset", None),
    ],
)
def test_what_happened_is_read_out_of_a_librarys_text(
    read: Reader, text: str, kind: FailureKind, status: int | None
) -> None:
    failure = read(Exception(text))
    assert (failure.kind, failure.status) == (kind, status)


def test_code_words_are_found_where_libraries_put_them() -> None:
    assert S3TorchClient.explain(Exception("Forbidden: AccessDenied")).code == "AccessDenied"
    assert S3dlioClient.explain(Exception("service error: unhandled error (Odd): Error")).code == "Odd"
    assert S3dlioClient.explain(Exception("service error: NotFound (x)")).code == ""


def test_a_client_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.storage.objects.client.CLIENTS", {**CLIENTS, "minio": "penstock.no_such_module"}
    )
    environment = {"AWS_ENDPOINT_URL": "http://h", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    (settings,) = resolve_settings(parse_uri("s3://bucket?client=minio"), environment)
    with pytest.raises(Unavailable, match="minio is not installed") as caught:
        connect(settings)
    assert "pip install 'penstock-io[minio]'" in caught.value.fix


@pytest.mark.parametrize(("token", "exported"), [("t0k3n", "t0k3n"), ("", None)])
def test_credentials_are_exported_and_instance_metadata_is_switched_off(
    token: str, exported: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    environment = {"AWS_ENDPOINT_URL": "http://h", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    (settings,) = resolve_settings(
        parse_uri("s3://bucket?region=r"), {**environment, "AWS_SESSION_TOKEN": token}
    )
    export_credentials(settings)
    now = process_environment()
    assert now.get("AWS_SESSION_TOKEN") == exported
    assert (now["AWS_ACCESS_KEY_ID"], now["AWS_SECRET_ACCESS_KEY"], now["AWS_REGION"]) == ("k", "s", "r")
    assert now["AWS_EC2_METADATA_DISABLED"] == "true"


@pytest.mark.parametrize(
    "sign", ["X-Amz-Security-Token: ", "Signature=", '"Authorization" : ', "Credential="]
)
def test_credentials_that_a_service_answers_with_are_not_passed_on(sign: str) -> None:
    failure = RequestFailed("answer", f"you sent {sign}canary, and more", status=403)
    assert str(failure) == f"403: you sent {sign}***, and more"
    assert len(str(RequestFailed("reset", "x" * 100_000))) == 2000


def test_an_answer_that_needs_more_memory_than_there_is_is_a_foreign_one() -> None:
    failure = MinioClient.explain(MemoryError())
    assert (failure.kind, failure.is_transient) == ("foreign", False)
