"""Writes a format's bytes through reusable buffers, or compares them with a stored file.

A format emits a file once, front to back, to a `FormatSink`: a `DataFileWriter` or a `DataFileChecker`.
Neither holds more of a file than a few buffers of `BUFFER_BYTES`, whatever its size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Final

import google_crc32c
import numpy as np
from isal import isal_zlib

from penstock.dataset.content import Content
from penstock.errors import ShortTransfer
from penstock.storage import Source, aligned
from penstock.storage.protocol import Release

BUFFER_BYTES: Final = 4 << 20
_STEP_BYTES: Final = 128 << 10
"""Content is generated and summed in steps that stay in a core's own cache in between."""
_COPIED_BYTES: Final = 64 << 10


class Checksum(Enum):
    """The checksums that formats keep of their bytes."""

    CRC32 = "crc32"
    CRC32C = "crc32c"


class FormatSink(ABC):
    """Takes a file front to back, in windows of memory. One subclass writes it, the other compares it."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self.offset = 0
        """The number of bytes taken so far."""
        self._kind: Checksum | None = None
        self._sum = 0

    def raw(self, text: bytes | memoryview) -> None:
        """Take bytes of the format itself, or of an encoder; `text` may change after the call."""
        view = memoryview(text).cast("B")
        while view:
            window = self._window(view.nbytes)
            self._take_text(window, view[: window.nbytes])
            self._took(window)
            view = view[window.nbytes :]

    def fill(self, size_bytes: int) -> None:
        """Take `size_bytes` of content, from the current `offset` onward."""
        end = self.offset + size_bytes
        while self.offset < end:
            window = self._window(min(end - self.offset, _STEP_BYTES))
            self._take_content(window)
            self._took(window)

    def start_sum(self, kind: Checksum) -> None:
        """Begin a checksum of the bytes that follow."""
        self._kind, self._sum = kind, 0

    def end_sum(self) -> int:
        """Return the checksum of the bytes since `start_sum`."""
        self._kind = None
        return self._sum

    @abstractmethod
    def _window(self, wanted: int) -> memoryview:
        """Return the next window of memory: at least one byte, at most `wanted`."""

    @abstractmethod
    def _take_text(self, window: memoryview, text: memoryview) -> None:
        """Put `text` into the window, or compare the two."""

    @abstractmethod
    def _take_content(self, window: memoryview) -> None:
        """Put content into the window, or compare the two."""

    def _took(self, window: memoryview) -> None:
        if self._kind is Checksum.CRC32:
            self._sum = isal_zlib.crc32(window, self._sum)
        elif self._kind is Checksum.CRC32C:
            # The library accepts only `bytes`; in steps that fit into the cache, the copy costs little.
            for start in range(0, window.nbytes, _COPIED_BYTES):
                self._sum = google_crc32c.extend(self._sum, bytes(window[start : start + _COPIED_BYTES]))
        self.offset += window.nbytes


class DataFileWriter(FormatSink):
    """Fills buffers from `pool` and submits each one when it is full, and the last one at `flush`.

    `submit` is called like that of a `Sink`.
    """

    def __init__(
        self, content: Content, submit: Callable[[memoryview, Release], None], pool: aligned.BufferPool
    ) -> None:
        super().__init__(content)
        self._submit = submit
        self._pool = pool
        self._buffer = pool.take()
        self._used = 0

    def flush(self) -> None:
        """Submit the filled part of the buffer. Afterwards, the writer must not be used again."""
        self._submit(self._buffer[: self._used], partial(self._pool.give_back, self._buffer))

    def _window(self, wanted: int) -> memoryview:
        if self._used == self._buffer.nbytes:
            self.flush()
            self._buffer, self._used = self._pool.take(), 0
        window = self._buffer[self._used : self._used + wanted]
        self._used += window.nbytes
        return window

    def _take_text(self, window: memoryview, text: memoryview) -> None:
        aligned.copy_bytes(window, text)

    def _take_content(self, window: memoryview) -> None:
        self.content.fill(window, self.offset)


class FirstDifference(Exception):
    """Not an error: stops a format at the first `offset` where the stored part differs from what it emits."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class DataFileChecker(FormatSink):
    """Compares the stored part with what the format emits; raises `FirstDifference` at a wrong byte."""

    def __init__(self, content: Content, source: Source, on_short: Callable[[int], ShortTransfer]) -> None:
        super().__init__(content)
        self._source = source
        self._on_short = on_short
        self._buffer = aligned.aligned_buffer(min(BUFFER_BYTES, max(source.size_bytes, 1)))
        self._unread = self._buffer[:0]

    def finish(self) -> None:
        """Check that nothing follows the last byte."""
        if self.offset != self._source.size_bytes:
            raise FirstDifference(self.offset)

    def _window(self, wanted: int) -> memoryview:
        if not self._unread:
            left = self._source.size_bytes - self.offset
            if left <= 0:
                raise self._on_short(self.offset + wanted)
            self._unread = self._buffer[: min(left, self._buffer.nbytes)]
            self._source.read_into(self.offset, self._unread)
        window, self._unread = self._unread[:wanted], self._unread[wanted:]
        return window

    def _take_text(self, window: memoryview, text: memoryview) -> None:
        unequal = np.frombuffer(window, dtype=np.uint8) != np.frombuffer(text, dtype=np.uint8)
        if unequal.any():
            raise FirstDifference(self.offset + int(unequal.argmax()))

    def _take_content(self, window: memoryview) -> None:
        wrong = self.content.verify(window, self.offset)
        if wrong is not None:
            raise FirstDifference(self.offset + wrong)
