"""A failed request, and what it means: worth another attempt or not, and which of our errors with which fix.

Adapters translate their library's exceptions into `RequestFailed`; `requests` asks `is_transient` and, after
the last attempt, calls `map_request_error`. Invariant: only the service's code and short message are passed
on, never headers or signatures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import (
    AccessRefused,
    ObjectNotFound,
    OutOfSpace,
    ShortTransfer,
    StorageError,
    StorageTimeout,
)

FailureKind = Literal["answer", "connect", "reset", "timeout", "truncated"]

_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        "IncompleteBody",
        "InternalError",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    }
)
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"})
_WRONG_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"})
_REFUSALS = {
    "RequestTimeTooSkewed": "This machine's clock differs from the service's: set it (chrony, ntpd).",
    "InvalidAccessKeyId": "The service does not know AWS_ACCESS_KEY_ID: check it and the endpoint.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY, and that no proxy rewrites requests.",
    "ExpiredToken": "AWS_SESSION_TOKEN has expired: get new credentials.",
}
_REACH_FIX = "Check the endpoint's host, port and scheme, and that the service runs."
_TRUST_FIX = (
    "Set AWS_CA_BUNDLE to the PEM file of the service's authority (or tls_verify=false, on a test bench)."
)


@dataclass(slots=True)
class RequestFailed(Exception):
    """One attempt failed. `status` and `code` are the service's answer, where there was one."""

    kind: FailureKind
    message: str
    status: int | None = None
    code: str = ""
    received_bytes: int = 0
    """How much of the wanted bytes came, where a body was cut short."""
    hidden_retries: int = 0
    """Attempts that the library made on its own before."""

    def __str__(self) -> str:
        answer = " ".join(str(word) for word in (self.status, self.code) if word)
        return f"{answer}: {self.message}" if answer else self.message

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return self.kind != "answer" or self.status in _TRANSIENT_STATUS or self.code in _TRANSIENT_CODES

    @property
    def is_missing(self) -> bool:
        """Whether the answer is that there is no such object."""
        return self.status == 404 or self.code in ("NoSuchKey", "NoSuchBucket", "NoSuchUpload")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What was asked of the service: for messages."""

    verb: str
    uri: str
    bucket: str
    endpoint: str
    wanted_bytes: int = 0
    attempts: int = 1

    @property
    def tries(self) -> str:
        """` after 5 attempts`, or nothing for one."""
        return f" after {self.attempts} attempts" if self.attempts > 1 else ""


def map_request_error(failure: RequestFailed, asked: RequestContext) -> StorageError:
    """The error to raise for a failure that is final."""
    if failure.kind == "answer":
        return _explain_answer(failure, asked)
    where = f"{asked.verb} {asked.uri} at {asked.endpoint}"
    if failure.kind == "timeout":
        return StorageTimeout(
            f"{asked.endpoint} did not answer in time{asked.tries}: {failure.message}",
            uri=asked.uri,
            where=where,
            fix="Look whether the service is overloaded or the network stalls; raise request_timeout_s.",
        )
    if failure.kind == "connect":
        return StorageError(
            f"Cannot connect to {asked.endpoint}{asked.tries}: {failure.message}",
            uri=asked.uri,
            where=where,
            fix=_TRUST_FIX if "certificate" in failure.message.lower() else _REACH_FIX,
        )
    if failure.kind == "truncated":
        return ShortTransfer(
            f"The body ended too early{asked.tries}: {failure.message}",
            uri=asked.uri,
            expected_bytes=asked.wanted_bytes,
            actual_bytes=failure.received_bytes,
            where=where,
            fix="Look at the service's and the proxies' logs for cut connections.",
        )
    return StorageError(
        f"The connection broke{asked.tries}: {failure.message}",
        uri=asked.uri,
        where=where,
        fix="Look at the service's and the proxies' logs for closed connections.",
    )


def _explain_answer(failure: RequestFailed, asked: RequestContext) -> StorageError:
    where = f"{asked.verb} {asked.uri} at {asked.endpoint}"
    if failure.code == "NoSuchBucket":
        return ObjectNotFound(
            f"The bucket {asked.bucket!r} does not exist ({failure})",
            uri=asked.uri,
            where=where,
            fix="Create the bucket, or check its name and the endpoint.",
        )
    if failure.is_missing:
        return ObjectNotFound(
            f"No object at {asked.uri}",
            uri=asked.uri,
            where=where,
            fix="Check the key, and that the bucket exists at this endpoint.",
        )
    if failure.status in (301, 307) or failure.code in _WRONG_REGION_CODES:
        return StorageError(
            f"The bucket is in another region ({failure})",
            uri=asked.uri,
            where=where,
            fix="Set AWS_REGION (or the option region) to the bucket's region.",
        )
    if failure.status in (401, 403) or failure.code in _REFUSALS:
        fix = _REFUSALS.get(failure.code, "Check the access keys, and what they may do with this bucket.")
        return AccessRefused(f"The service refused ({failure})", uri=asked.uri, where=where, fix=fix)
    return _explain_state(failure, asked, where)


def _explain_state(failure: RequestFailed, asked: RequestContext, where: str) -> StorageError:
    """Answers about the state of the service or the object, rather than about who asks for what."""
    if failure.status == 507 or failure.code in _FULL_CODES:
        return OutOfSpace(
            f"The service has no room left ({failure})", uri=asked.uri, where=where, fix="Free some."
        )
    if failure.status == 412:
        return StorageError(
            f"The object changed since it was opened ({failure})",
            uri=asked.uri,
            where=where,
            fix="Open it again; find out who writes this key.",
        )
    if failure.status == 416:
        return ShortTransfer(
            f"The object ends before the range that was asked for ({failure})",
            uri=asked.uri,
            expected_bytes=asked.wanted_bytes,
            actual_bytes=0,
            where=where,
            fix="The object was replaced by a shorter one since it was opened.",
        )
    return StorageError(f"The service failed{asked.tries}: {failure}", uri=asked.uri, where=where)
