"""A storage with a limited bandwidth: a slow level of checkpoints, simulated on a fast disk.

For plans and studies on one machine. Invariant: bytes wait before they are submitted or read, so the storage
inside receives requests at the limited rate.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from penstock.errors import UsageError
from penstock.storage import protocol
from penstock.storage.capabilities import Deferred, defer_sync, prefer_direct_access

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class TokenBucket:
    """A rate shared by threads. It starts with, and keeps at most, `burst_s` seconds of unused rate."""

    def __init__(
        self, rate_bytes_per_s: float, *, clock: Clock = time.monotonic, burst_s: float = 0.01
    ) -> None:
        if not rate_bytes_per_s > 0:
            raise UsageError(
                f"A rate limit of {rate_bytes_per_s:g} bytes per second is not above 0",
                fix="Give a rate such as 1GiB/s.",
            )
        self._rate_bytes_per_s = rate_bytes_per_s
        self._burst_s = burst_s
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until_s = clock() - burst_s

    def take(self, size_bytes: int) -> float:
        """Reserve `size_bytes`; the seconds to wait before they may move."""
        with self._lock:
            now_s = self._clock()
            begin_s = max(self._paid_until_s, now_s - self._burst_s)
            self._paid_until_s = begin_s + size_bytes / self._rate_bytes_per_s
            return self._paid_until_s - now_s


class RateLimitedStorage(protocol.WrappedStorage):
    """All threads together read and write at most `rate_bytes_per_s`, also past the page cache.

    The limit is per process: give each of several processes its share. Infinity is no limit.
    """

    def __init__(
        self,
        inside: protocol.Storage,
        rate_bytes_per_s: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        super().__init__(inside, limited_rate_bytes_per_s=rate_bytes_per_s)
        self._bucket = TokenBucket(rate_bytes_per_s, clock=clock)
        self._rate_bytes_per_s = rate_bytes_per_s
        self._sleep = sleep

    def create(self, key: str, size_bytes: int | None = None) -> protocol.Sink:
        """Begin an object whose bytes wait."""
        return _LimitedSink(self.inside.create(key, size_bytes), self._wait)

    def open(self, key: str) -> protocol.Source:
        """Open an object whose bytes wait."""
        return _LimitedSource(self.inside.open(key), self._wait)

    def past_cache(self, reads: str | None = None) -> protocol.Storage:
        """The same tree past the page cache, within the same limit."""
        return self._around(prefer_direct_access(self.inside, reads=reads))

    def deferring(self, what: Deferred) -> protocol.Storage:
        """The same tree, synced by the caller, within the same limit."""
        return self._around(defer_sync(self.inside, what))

    def _around(self, inside: protocol.Storage) -> protocol.Storage:
        other = RateLimitedStorage(inside, self._rate_bytes_per_s, sleep=self._sleep)
        other._bucket = self._bucket
        return other

    def _wait(self, size_bytes: int) -> None:
        wait_s = self._bucket.take(size_bytes)
        if wait_s > 0:
            self._sleep(wait_s)


class _LimitedSink(protocol.WrappedSink):
    def __init__(self, inside: protocol.Sink, wait: Callable[[int], None]) -> None:
        super().__init__(inside)
        self._wait = wait

    def submit(self, buffer: memoryview, release: protocol.Release | None = None) -> None:
        with ExitStack() as undo:
            if release is not None:
                undo.callback(release)
            self._wait(buffer.nbytes)
            undo.pop_all()
        super().submit(buffer, release)


class _LimitedSource(protocol.WrappedSource):
    def __init__(self, inside: protocol.Source, wait: Callable[[int], None]) -> None:
        super().__init__(inside)
        self._wait = wait

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._wait(buffer.nbytes)
        super().read_into(offset, buffer)
