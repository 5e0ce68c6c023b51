"""Storages of known slowness: so many operations a second, or silent for a while again and again."""

import threading
import time

from penstock.storage import Storage
from penstock.testing.faults import Gated, Verb


class Throttled(Gated):
    """Begins at most `rate_per_s` reads and writes a second, in turn; each takes `latency_s` more."""

    def __init__(self, inside: Storage, rate_per_s: float, latency_s: float) -> None:
        super().__init__(inside, self._wait)
        self._rate_per_s = rate_per_s
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._busy_until_s = 0.0

    def _wait(self, verb: Verb, _size_bytes: int) -> None:
        if verb not in ("read_into", "finish"):
            return
        with self._lock:
            now_s = time.monotonic()
            self._busy_until_s = max(self._busy_until_s, now_s) + 1 / self._rate_per_s
            wait_s = self._busy_until_s - now_s
        time.sleep(wait_s + self._latency_s)


class Stalling(Gated):
    """Reads take `latency_s`; for `stall_s` of every `every_s` seconds none ends."""

    def __init__(self, inside: Storage, *, latency_s: float, stall_s: float, every_s: float) -> None:
        super().__init__(inside, self._wait)
        self._latency_s = latency_s
        self._stall_s = stall_s
        self._every_s = every_s

    def _wait(self, verb: Verb, _size_bytes: int) -> None:
        if verb == "read_into":
            phase_s = time.monotonic() % self._every_s
            time.sleep(max(0.0, self._stall_s - phase_s) + self._latency_s)
