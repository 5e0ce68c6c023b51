"""Requests with retries, and the errors that their failures become.

Every request of a `Storage` goes through `RetryingRequests.call`, which picks an endpoint, sends, counts,
backs off, and maps the last failure to a `StorageError`. Endpoints are used round-robin, and each rank starts
with a different one; a retry uses the next. Invariants: a request is sent at most `attempts` times, and every
attempt is counted; of the service's response, only the code and a short message are passed on, never headers
or signatures.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    OutOfSpace,
    ShortTransfer,
    StorageError,
    StorageTimeout,
)
from penstock.storage.objects.client import ObjectClient, PerProcess, RequestFailed, attempt
from penstock.storage.objects.client_settings import ObjectOptions
from penstock.storage.protocol import Counters

_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})
_WRONG_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"})
_REFUSALS = {
    "RequestTimeTooSkewed": "This machine's clock differs from the service's: set it (chrony, ntpd).",
    "InvalidAccessKeyId": "The service does not know AWS_ACCESS_KEY_ID: check it and the endpoint.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY, and that no proxy rewrites requests.",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired: get new credentials.",
}
_CONNECT_FIX = "Check the endpoint's host, port and scheme, and that the service is running."
_TRUST_FIX = (
    "Set AWS_CA_BUNDLE to the PEM file of the service's authority (or tls_verify=false, for tests only)."
)


def _explain_connection(failure: RequestFailed, endpoint: str) -> tuple[type[StorageError], str, str]:
    """Return the class of the error, what happened, and the fix."""
    logs = "Look at the logs of the service and the proxies for"
    match failure.kind:
        case "timeout":
            what, kind = f"{endpoint} did not respond in time", StorageTimeout
            fix = "Check whether the service is overloaded or the network stalls; raise request_timeout_s."
            return kind, what, fix
        case "connect":
            fix = _TRUST_FIX if "certificate" in failure.message.lower() else _CONNECT_FIX
            return StorageError, f"Cannot connect to {endpoint}", fix
        case "truncated":
            return ShortTransfer, "The body ended too early", f"{logs} cut connections."
        case _:
            return StorageError, "The connection broke", f"{logs} closed connections."


def _explain_answer(failure: RequestFailed, uri: str, bucket: str) -> tuple[type[StorageError], str, str]:
    status, code = failure.status, failure.code
    no_access = _REFUSALS.get(code, "Check the access keys and their permissions for this bucket.")
    # The first that applies counts: a missing bucket, for instance, also has the status of a missing object.
    answers: tuple[tuple[bool, type[StorageError], str, str], ...] = (
        (code == "NoSuchBucket", ObjectNotFound, f"The bucket {bucket!r} does not exist",
         "Create the bucket, or check its name and the endpoint."),
        (failure.is_missing, ObjectNotFound, f"No object at {uri}",
         "Check the key, and that the bucket exists at this endpoint."),
        (status in (301, 307) or code in _WRONG_REGION_CODES, StorageError, "The bucket is in another region",
         "Set AWS_REGION (or the option region) to the bucket's region."),
        (status in (401, 403) or code in _REFUSALS, AccessRefused, "The service denied access", no_access),
        (status == 507 or code in _FULL_CODES, OutOfSpace, "The service has no room left",
         "Free some space there."),
        (failure.kind == "foreign", StorageError, "The response does not come from an object store",
         "Check the endpoint: a service's console uses a different port, and a proxy may want a login."),
        (status == 412, StorageError, "The object changed since it was opened",
         "Open it again; find out which other program writes this key."),
        (status == 416, ShortTransfer, "The object ends before the requested range",
         "Open it again: it was replaced by a shorter one."),
        (True, StorageError, "The service failed", ""),
    )  # fmt: skip
    return next((kind, what, fix) for applies, kind, what, fix in answers if applies)


T = TypeVar("T")

MAX_BACKOFF_S = 20.0

logger = logging.getLogger(__name__)


class RetryingRequests:
    """Sends all requests of one `Storage`, several at a time. May be shared by threads."""

    def __init__(
        self,
        clients: Sequence[ObjectClient],
        *,
        bucket: str,
        counters: Counters,
        options: ObjectOptions,
        rank: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clients = tuple(clients)
        self.counters = counters
        self.options = options
        # The threads of these pools start when they are first needed.
        self.parts = PerProcess(lambda: ThreadPoolExecutor(options.parts_in_flight, "penstock-parts"))
        self.ranges = PerProcess(lambda: ThreadPoolExecutor(options.ranges_in_flight, "penstock-ranges"))
        self._bucket = bucket
        self._turns = itertools.count(rank)  # next() on it is atomic, so no lock is needed
        self._sleep = sleep
        self._jitter = random.Random()  # noqa: S311 - spreads retries, guards nothing

    def next_client(self) -> ObjectClient:
        """Return the client of the endpoint whose turn it is."""
        return self.clients[next(self._turns) % len(self.clients)]

    def call(self, verb: str, uri: str, action: Callable[[ObjectClient], T], *, wanted_bytes: int = 0) -> T:
        """Return the result of `action`, attempted until it succeeds or its failure is final."""
        for number in itertools.count(1):
            client = self.next_client()
            self.counters.add(requests=1, endpoint=client.url)
            try:
                with attempt(client):
                    return action(client)
            except RequestFailed as failure:
                self.wait_for_retry(failure, verb, uri, client.url, number, wanted_bytes=wanted_bytes)
        raise AssertionError

    def wait_for_retry(
        self,
        failure: RequestFailed,
        verb: str,
        uri: str,
        endpoint: str,
        attempts: int,
        *,
        wanted_bytes: int = 0,
    ) -> None:
        """Count a failed attempt and wait for the next one; raise if it was the last."""
        self.counters.add(errors=0 if failure.is_missing else 1, retries=failure.hidden_retries)
        if attempts >= self.options.attempts or not failure.is_transient:
            raise self.make_error(
                failure, verb, uri, endpoint, attempts, wanted_bytes=wanted_bytes
            ) from failure
        logger.info("%s %s: attempt %d failed: %s", verb, uri, attempts, failure)
        self.counters.add(retries=1)
        # Doubles, with random jitter down to half of it.
        longest_s = min(self.options.backoff_s * 2.0 ** (attempts - 1), MAX_BACKOFF_S)
        self._sleep(longest_s * self._jitter.uniform(0.5, 1.0))

    def make_error(
        self,
        failure: RequestFailed,
        verb: str,
        uri: str,
        endpoint: str,
        attempts: int = 1,
        *,
        wanted_bytes: int = 0,
    ) -> StorageError:
        """Return the error for a failure that is final."""
        if failure.kind in ("answer", "foreign"):
            kind, what, fix = _explain_answer(failure, uri, self._bucket)
        else:
            kind, what, fix = _explain_connection(failure, endpoint)
        if failure.code == "NoSuchBucket" or not failure.is_missing:
            what += f" after {attempts} attempts: {failure}" if attempts > 1 else f": {failure}"
        where = f"{verb} {uri} at {endpoint}"
        if kind is ShortTransfer:
            return ShortTransfer(
                what,
                uri=uri,
                where=where,
                fix=fix,
                expected_bytes=wanted_bytes,
                actual_bytes=failure.received_bytes,
            )
        return kind(what, uri=uri, where=where, fix=fix)
