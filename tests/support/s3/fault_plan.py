"""Faults as data: which request of a fake server suffers what. Used by `fake_server`, written by tests.

Invariant: a fault fires on exactly the requests that its fields describe, counted in the order they arrive.
"""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Action = Literal[
    "delay", "drop", "refuse", "truncate", "lose", "page", "resize", "stall", "silence", "shuffle"
]

ALWAYS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One misbehaviour. It fires on the `nth` matching request (from 1) and the `times - 1` after it.

    `delay`: answer `seconds` late. `drop`: close the connection without an answer. `refuse`: answer
    `status` and `code`. `truncate`: announce the whole body, send half of it, close. `lose`: say 200 to an
    upload and keep nothing of it. `page`: say 200 and give a web page, as a console does. `resize`: report
    the object one byte longer. `stall`: no answer within `seconds`. `silence`: carry the request out, and
    close the connection without an answer. `shuffle`: list the keys of a page in any order.
    """

    action: Action
    operation: str = ""
    """S3's name of the request (`UploadPart`, `GetObject`, ...); empty: any."""
    key: str = ""
    """Fires only where the object's key contains this."""
    part: int | None = None
    nth: int = 1
    times: int = 1
    seconds: float = 0.0
    status: int = 503
    code: str = "SlowDown"

    def matches(self, operation: str, key: str, part: int | None) -> bool:
        """Whether a request of this kind is one of those to count."""
        return (
            self.operation in ("", operation) and self.key in key and (self.part is None or self.part == part)
        )


class FaultPlan:
    """The faults of one server, with the count of requests that each has seen. Threads may share it."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._seen: Counter[int] = Counter()
        self._lock = threading.Lock()
        self.fired: Counter[str] = Counter()
        """How often each action was taken."""

    def next_for(self, operation: str, key: str, part: int | None) -> Fault | None:
        """Count this request against every fault; the first one whose turn it is."""
        due: Fault | None = None
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not fault.matches(operation, key, part):
                    continue
                self._seen[index] += 1
                if due is None and fault.nth <= self._seen[index] < fault.nth + fault.times:
                    due = fault
            if due is not None:
                self.fired[due.action] += 1
        return due
