"""Requests with retries, and the errors that their failures become.

Every request of a storage goes through `RetryingRequests.call`, which picks an endpoint, sends, counts, backs
off, and maps the last failure to one of our errors. Endpoints take turns, each rank beginning with another
one; a retry uses the next. Invariants: a request is sent at most `attempts` times, and every attempt is
counted; of the service's answer only its code and short message are passed on, never headers or signatures.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    OutOfSpace,
    ShortTransfer,
    StorageError,
    StorageTimeout,
)
from penstock.storage.objects.client import ObjectClient, RequestFailed, attempt
from penstock.storage.protocol import Counters

_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})
_WRONG_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"})
_REFUSALS = {
    "RequestTimeTooSkewed": "This machine's clock differs from the service's: set it (chrony, ntpd).",
    "InvalidAccessKeyId": "The service does not know AWS_ACCESS_KEY_ID: check it and the endpoint.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY, and that no proxy rewrites requests.",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired: get new credentials.",
}
_CONNECT_FIX = "Check the endpoint's host, port and scheme, and that the service runs."
_TRUST_FIX = (
    "Set AWS_CA_BUNDLE to the PEM file of the service's authority (or tls_verify=false, for tests only)."
)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request, as error messages describe it."""

    verb: str
    uri: str
    bucket: str
    endpoint: str
    wanted_bytes: int = 0
    attempts: int = 1


def map_request_error(failure: RequestFailed, request: RequestContext) -> StorageError:
    """The error for a failure that is final."""
    explain = _explain_answer if failure.kind == "answer" else _explain_connection
    kind, what, fix = explain(failure, request)
    where = f"{request.verb} {request.uri} at {request.endpoint}"
    if kind is ShortTransfer:
        return ShortTransfer(
            what,
            uri=request.uri,
            where=where,
            fix=fix,
            expected_bytes=request.wanted_bytes,
            actual_bytes=failure.received_bytes,
        )
    return kind(what, uri=request.uri, where=where, fix=fix)


def _explain_connection(
    failure: RequestFailed, request: RequestContext
) -> tuple[type[StorageError], str, str]:
    """The type of the error, what happened, and the fix."""
    logs = "Look at the logs of the service and the proxies for"
    match failure.kind:
        case "timeout":
            what = f"{request.endpoint} did not answer in time"
            kind: type[StorageError] = StorageTimeout
            fix = "Check whether the service is overloaded or the network stalls; raise request_timeout_s."
        case "connect":
            what, kind = f"Cannot connect to {request.endpoint}", StorageError
            fix = _TRUST_FIX if "certificate" in failure.message.lower() else _CONNECT_FIX
        case "truncated":
            what, kind, fix = "The body ended too early", ShortTransfer, f"{logs} cut connections."
        case _:
            what, kind, fix = "The connection broke", StorageError, f"{logs} closed connections."
    tries = f" after {request.attempts} attempts" if request.attempts > 1 else ""
    return kind, f"{what}{tries}: {failure.message}", fix


def _explain_answer(failure: RequestFailed, request: RequestContext) -> tuple[type[StorageError], str, str]:
    status, code = failure.status, failure.code
    no_access = _REFUSALS.get(code, "Check the access keys and their permissions for this bucket.")
    # The first that applies: a missing bucket, for instance, also has the status of a missing object.
    answers: tuple[tuple[bool, type[StorageError], str, str], ...] = (
        (code == "NoSuchBucket", ObjectNotFound, f"The bucket {request.bucket!r} does not exist ({failure})",
         "Create the bucket, or check its name and the endpoint."),
        (failure.is_missing, ObjectNotFound, f"No object at {request.uri}",
         "Check the key, and that the bucket exists at this endpoint."),
        (status in (301, 307) or code in _WRONG_REGION_CODES, StorageError,
         f"The bucket is in another region ({failure})",
         "Set AWS_REGION (or the option region) to the bucket's region."),
        (status in (401, 403) or code in _REFUSALS, AccessRefused,
         f"The service denied access ({failure})", no_access),
        (status == 507 or code in _FULL_CODES, OutOfSpace, f"The service has no room left ({failure})",
         "Free some space there."),
        (failure.is_foreign, StorageError, f"The answer is not that of an object service ({failure})",
         "Check the endpoint: a service's console has another port, and a proxy may want a login."),
        (status == 412, StorageError, f"The object changed since it was opened ({failure})",
         "Open it again; find out which other program writes this key."),
        (status == 416, ShortTransfer, f"The object ends before the requested range ({failure})",
         "Open it again: it was replaced by a shorter one."),
    )  # fmt: skip
    for applies, kind, what, fix in answers:
        if applies:
            return kind, what, fix
    tries = f" after {request.attempts} attempts" if request.attempts > 1 else ""
    return StorageError, f"The service failed{tries}: {failure}", ""


T = TypeVar("T")

MAX_BACKOFF_S = 20.0

logger = logging.getLogger(__name__)


class RetryingRequests:
    """All requests of one storage. Threads share it."""

    def __init__(
        self,
        clients: Sequence[ObjectClient],
        *,
        bucket: str,
        counters: Counters,
        attempts: int,
        backoff_s: float,
        rank: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clients = tuple(clients)
        self.bucket = bucket
        self._counters = counters
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._turns = itertools.count(rank)  # next() on it is atomic: no lock
        self._sleep = sleep
        self._jitter = random.Random()  # noqa: S311 - spreads retries, guards nothing

    def next_client(self) -> ObjectClient:
        """The client of the endpoint whose turn it is."""
        return self.clients[next(self._turns) % len(self.clients)]

    def call(self, verb: str, uri: str, action: Callable[[ObjectClient], T], *, wanted_bytes: int = 0) -> T:
        """The result of `action`, attempted until it succeeds or its failure is final."""
        for number in itertools.count(1):
            client = self.next_client()
            self._counters.add(requests=1, endpoint=client.url)
            try:
                with attempt(client):
                    return action(client)
            except RequestFailed as failure:
                request = RequestContext(verb, uri, self.bucket, client.url, wanted_bytes, number)
                self.wait_for_retry(failure, request)
        raise AssertionError

    def wait_for_retry(self, failure: RequestFailed, request: RequestContext) -> None:
        """Count a failed attempt and wait for the next one; raise if it was the last."""
        self._counters.add(errors=0 if failure.is_missing else 1, retries=failure.hidden_retries)
        if request.attempts >= self._attempts or not failure.is_transient:
            raise map_request_error(failure, request) from failure
        logger.info("%s %s: attempt %d failed: %s", request.verb, request.uri, request.attempts, failure)
        self._counters.add(retries=1)
        # Doubling, with random jitter down to half of it.
        longest_s = min(self._backoff_s * 2.0 ** (request.attempts - 1), MAX_BACKOFF_S)
        self._sleep(longest_s * self._jitter.uniform(0.5, 1.0))
