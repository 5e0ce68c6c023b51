"""Retries: `RetryingRequests.call` picks an endpoint, sends, counts, backs off, and maps the last error.

Every request of a storage goes through it. Endpoints take turns, each rank beginning with another one; a
retry moves on to the next. Invariant: a request is sent at most `attempts` times, and every attempt is in the
counters.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.storage.objects.client import ObjectClient
from penstock.storage.objects.errors_map import RequestContext, RequestFailed, map_request_error
from penstock.storage.protocol import Counters

T = TypeVar("T")

MAX_BACKOFF_S = 20.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One door of the service and the client that goes through it."""

    url: str
    client: ObjectClient


class RetryingRequests:
    """All requests of one storage. Threads share it."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        bucket: str,
        counters: Counters,
        attempts: int,
        backoff_s: float,
        rank: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._endpoints = tuple(endpoints)
        self._bucket = bucket
        self._counters = counters
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._turns = itertools.count(rank)  # next() on it is atomic: no lock
        self._sleep = sleep
        self._jitter = random.Random()  # noqa: S311 - spreads retries, guards nothing

    @property
    def any_client(self) -> ObjectClient:
        """A client to ask for what it can do."""
        return self._endpoints[0].client

    @property
    def endpoint_urls(self) -> tuple[str, ...]:
        """Where requests go."""
        return tuple(endpoint.url for endpoint in self._endpoints)

    def next_endpoint(self) -> Endpoint:
        """The endpoint whose turn it is."""
        return self._endpoints[next(self._turns) % len(self._endpoints)]

    def call(self, verb: str, uri: str, action: Callable[[ObjectClient], T], *, wanted_bytes: int = 0) -> T:
        """What `action` returns, attempted until it works or its failure is final."""
        for attempt in itertools.count(1):
            endpoint = self.next_endpoint()
            self._counters.add(requests=1, endpoint=endpoint.url)
            try:
                return action(endpoint.client)
            except RequestFailed as failure:
                asked = RequestContext(verb, uri, self._bucket, endpoint.url, wanted_bytes, attempt)
                self.wait_for_retry(failure, asked)
        raise AssertionError

    def wait_for_retry(self, failure: RequestFailed, asked: RequestContext) -> None:
        """Count a failed attempt and wait for the next; raise its explanation if there is to be none."""
        self._counters.add(errors=0 if failure.is_missing else 1, retries=failure.hidden_retries)
        if asked.attempts >= self._attempts or not failure.is_transient:
            raise map_request_error(failure, asked) from failure
        logger.info("%s %s: attempt %d failed: %s", asked.verb, asked.uri, asked.attempts, failure)
        self._counters.add(retries=1)
        self._sleep(self.backoff_before(asked.attempts + 1))

    def backoff_before(self, attempt: int) -> float:
        """Seconds to wait before the second, third, ... attempt: doubling, with a jitter down to a half."""
        longest_s = min(self._backoff_s * 2.0 ** (attempt - 2), MAX_BACKOFF_S)
        return longest_s * self._jitter.uniform(0.5, 1.0)
