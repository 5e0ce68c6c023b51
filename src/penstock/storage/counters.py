"""What a storage counts while it works: requests, retries, errors, bytes, and every copy by its reason.

Kept by each storage, read by whoever records a run. Invariant: nothing is ever taken off a count.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True)
class Counters:
    """What a storage really did, for the record of a run. `add` is the only way to change it; threads may.

    `copied_bytes` is keyed by the reason of the copy, `requests_by_endpoint` by the endpoint's URL.
    """

    requests: int = 0
    retries: int = 0
    errors: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    copied_bytes: Counter[str] = field(default_factory=Counter)
    requests_by_endpoint: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self,
        *,
        requests: int = 0,
        retries: int = 0,
        errors: int = 0,
        written_bytes: int = 0,
        read_bytes: int = 0,
        endpoint: str = "",
    ) -> None:
        """Count one event."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.errors += errors
            self.written_bytes += written_bytes
            self.read_bytes += read_bytes
            if endpoint:
                self.requests_by_endpoint[endpoint] += requests

    def add_copy(self, reason: str, size_bytes: int) -> None:
        """Account `size_bytes` that had to be copied, and why."""
        with self._lock:
            self.copied_bytes[reason] += size_bytes

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        """Travels from rank to rank as its counts; the lock stays at home."""
        now = self.snapshot()
        counts = (now.requests, now.retries, now.errors, now.written_bytes, now.read_bytes)
        return type(self), (*counts, now.copied_bytes, now.requests_by_endpoint)

    def __add__(self, other: Self) -> Self:
        """Both together: of several ranks, or of several storages."""
        return type(self)(
            requests=self.requests + other.requests,
            retries=self.retries + other.retries,
            errors=self.errors + other.errors,
            written_bytes=self.written_bytes + other.written_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            copied_bytes=self.copied_bytes + other.copied_bytes,
            requests_by_endpoint=self.requests_by_endpoint + other.requests_by_endpoint,
        )

    def record(self) -> dict[str, int | dict[str, int]]:
        """All counts as plain data, for the record of a run."""
        return {
            "requests": self.requests,
            "retries": self.retries,
            "errors": self.errors,
            "written_bytes": self.written_bytes,
            "read_bytes": self.read_bytes,
            "copied_bytes": dict(self.copied_bytes),
            "requests_by_endpoint": dict(self.requests_by_endpoint),
        }

    def snapshot(self) -> Self:
        """A copy at this moment, to subtract from or to record."""
        with self._lock:
            return type(self)(
                requests=self.requests,
                retries=self.retries,
                errors=self.errors,
                written_bytes=self.written_bytes,
                read_bytes=self.read_bytes,
                copied_bytes=Counter(self.copied_bytes),
                requests_by_endpoint=Counter(self.requests_by_endpoint),
            )
