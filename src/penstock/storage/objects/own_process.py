"""What of a client library belongs to one process: connections and threads, which a fork only seems to have.

A forked child has its parent's sockets, which both would read from, and none of its threads, for which a
request would wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from penstock.errors import UsageError

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Something that each process makes for itself: the first now, a forked child when it first asks."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made = {os.getpid(): make()}
        """By process. The parent's stay: destructors may wait for threads that are not here."""

    def get(self) -> T:
        """The one of the calling process."""
        pid = os.getpid()
        if pid not in self._made:
            self._made[pid] = self._make()
        return self._made[pid]


class LibraryThreads:
    """The threads that a library starts at its first request and cannot start again in a fork."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._pid: int | None = None

    def require(self) -> None:
        """Called before each request: `UsageError` if the threads are those of the process before a fork."""
        pid = os.getpid()
        if self._pid is None:
            self._pid = pid
        if self._pid != pid:
            raise UsageError(
                f"The client {self._library} cannot work in a forked process: process {self._pid}, "
                "which it was forked from, has used it before",
                where=f"process {pid}",
                fix=_FIX,
            )


_FIX: Final = (
    "Start the process with 'spawn' or 'forkserver' (multiprocessing_context of a DataLoader), or fork "
    "before the first request; for s3://, ?client=minio can read in a fork."
)
