"""Reads requests, one after the other: what a thread or a worker process of a loader does all day.

Invariant: memory is one buffer, whatever the size of the range; what was read is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import ShortTransfer
from penstock.storage.aligned import aligned_buffer

if TYPE_CHECKING:
    from penstock.bench.loader.base import ReadRequest
    from penstock.storage import Source, Storage

DEFAULT_BUFFER_BYTES: Final = 8 << 20


class RangeReader:
    """One buffer, and the object that was read last, still open: ranges of one file come in runs."""

    def __init__(self, storage: Storage, buffer_bytes: int) -> None:
        self._storage = storage
        self._buffer = aligned_buffer(buffer_bytes)
        self._key: str | None = None
        self._source: Source | None = None

    def read(self, request: ReadRequest) -> int:
        """Read one range, piece by piece; its length."""
        source = self._open(request.key)
        size_bytes = source.size_bytes - request.offset if request.size_bytes is None else request.size_bytes
        if request.expected_bytes is not None and source.size_bytes != request.expected_bytes:
            raise ShortTransfer(
                f"This file has {source.size_bytes} bytes instead of {request.expected_bytes}",
                uri=f"{self._storage.uri}/{request.key}",
                expected_bytes=request.expected_bytes,
                actual_bytes=source.size_bytes,
                fix="Generate or copy it again; `penstock training verify` finds all such files.",
            )
        done = 0
        while done < size_bytes:
            piece = self._buffer[: min(len(self._buffer), size_bytes - done)]
            source.read_into(request.offset + done, piece)
            done += len(piece)
        if request.size_bytes is None:
            self.close()  # read whole: it is not asked for again in this epoch
        return done

    def _open(self, key: str) -> Source:
        if self._source is None or key != self._key:
            self.close()
            self._source = self._storage.open(key)
            self._key = key
        return self._source

    def close(self) -> None:
        """Let go of the open object."""
        if self._source is not None:
            self._source.close()
            self._source = self._key = None
