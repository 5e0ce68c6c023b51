"""Reading one object: large reads become ranges, several under way at once, into the caller's buffer.

Invariant: `read_into` returns or raises only when no request still writes into the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from typing import TYPE_CHECKING

from penstock.errors import ShortTransfer
from penstock.storage.objects.buffers import flat_bytes
from penstock.storage.objects.parts import split_range

if TYPE_CHECKING:
    from penstock.storage.counters import Counters
    from penstock.storage.objects.client import RemoteObject
    from penstock.storage.objects.requests import Requests


class ObjectSource:
    """A `Source` on objects: the object as it was when opened, where the client can insist on that."""

    def __init__(
        self,
        found: RemoteObject,
        uri: str,
        requests: Requests,
        counters: Counters,
        *,
        range_bytes: int,
        pool: Callable[[], Executor],
    ) -> None:
        self._found = found
        self._uri = uri
        self._requests = requests
        self._counters = counters
        self._range_bytes = range_bytes
        self._pool = pool

    @property
    def size_bytes(self) -> int:
        """The object's size when it was opened."""
        return self._found.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `offset`."""
        view = flat_bytes(buffer)
        there = max(0, min(len(view), self.size_bytes - offset))
        if there < len(view):
            raise ShortTransfer(
                f"{len(view)} bytes at {offset} reach past the end of an object of {self.size_bytes}",
                uri=self._uri,
                expected_bytes=len(view),
                actual_bytes=there,
                fix="Ask for less; stat() tells the size.",
            )
        if view:
            self._read_ranges(offset, view)

    def _read_ranges(self, offset: int, view: memoryview) -> None:
        first, *others = split_range(offset, len(view), self._range_bytes)
        started = [
            self._pool().submit(self._read_one, start, view[start - offset : start - offset + length])
            for start, length in others
        ]
        try:
            self._read_one(first[0], view[: first[1]])
        finally:
            wait(started)
        for read in started:
            read.result()

    def _read_one(self, start: int, view: memoryview) -> None:
        self._requests.call(
            "GetObject",
            self._uri,
            lambda client: client.read_into(self._found.key, start, view, self._found.etag),
            wanted_bytes=len(view),
        )
        self._counters.add(read_bytes=len(view))
        copy = self._requests.any_client.read_copy
        if copy:
            self._counters.add_copy(copy, len(view))

    def close(self) -> None:
        """Nothing is held open between requests."""
