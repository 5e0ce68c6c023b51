"""Writes a format's bytes through warm buffers, or compares them with a stored file.

A format emits a file once, front to back, to a `FormatSink`: a `DataFileWriter` or a `DataFileChecker`.
Neither holds more of a file than a few buffers of `BUFFER_BYTES`, whatever its size.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import google_crc32c
import numpy as np
from isal import isal_zlib

from penstock.dataset.formats.format_protocol import Checksum, ContentSource, FilePlan
from penstock.errors import ShortTransfer
from penstock.storage import Source, aligned
from penstock.storage.protocol import Release

BUFFER_BYTES: Final = 4 << 20
_SHORT_BYTES: Final = 4096
"""Up to here a slice is copied faster than arrays are set up for it: records begin with a few bytes."""
_STEP_BYTES: Final = 128 << 10
"""Content is made and summed in steps that stay in a core's own cache between the two."""
_COPIED_BYTES: Final = 64 << 10


class _Sum:
    """A running checksum, or none."""

    def __init__(self) -> None:
        self.kind: Checksum | None = None
        self._value = 0

    def start(self, kind: Checksum) -> None:
        self.kind, self._value = kind, 0

    def add(self, buffer: memoryview) -> None:
        if self.kind is Checksum.CRC32:
            self._value = isal_zlib.crc32(buffer, self._value)
        elif self.kind is Checksum.CRC32C:
            # The library takes nothing but `bytes`; in steps that fit the cache the copy costs little.
            for start in range(0, buffer.nbytes, _COPIED_BYTES):
                self._value = google_crc32c.extend(self._value, bytes(buffer[start : start + _COPIED_BYTES]))

    def end(self) -> int:
        self.kind = None
        return self._value


class DataFileWriter:
    """Fills buffers of `pool` and submits them, as to a `Sink`, as they get full; the last one at `flush`."""

    def __init__(
        self,
        content: ContentSource,
        submit: Callable[[memoryview, Release], None],
        pool: aligned.BufferPool,
    ) -> None:
        self.content = content
        self.offset = 0
        self._submit_buffer = submit
        self._pool = pool
        self._buffer = pool.take()
        self._used = 0
        self._sum = _Sum()

    def raw(self, text: bytes | memoryview) -> None:
        """Copy `text` into the buffers."""
        end = self._used + len(text)
        if len(text) <= _SHORT_BYTES and end <= self._buffer.nbytes:
            self._buffer[self._used : end] = text
            self._took(self._buffer[self._used : end])
            return
        view = memoryview(text).cast("B")
        while view.nbytes:
            room = self._room(view.nbytes)
            if room.nbytes <= _SHORT_BYTES:
                room[:] = view[: room.nbytes]
            else:
                aligned.copy_bytes(room, view[: room.nbytes])
            self._took(room)
            view = view[room.nbytes :]

    def fill(self, size_bytes: int) -> None:
        """Let content be made in the buffers."""
        end = self.offset + size_bytes
        while self.offset < end:
            room = self._room(min(end - self.offset, _STEP_BYTES))
            self.content.fill(room, self.offset)
            self._took(room)

    def start_sum(self, kind: Checksum) -> None:
        """Sum up what comes from here on."""
        self._sum.start(kind)

    def end_sum(self) -> int:
        """The sum since `start_sum`."""
        return self._sum.end()

    def flush(self) -> None:
        """Submit what is left; the writer is not used again."""
        self._submit()

    def _room(self, wanted: int) -> memoryview:
        """Free space in a buffer: at least a byte, at most `wanted`."""
        if self._used == self._buffer.nbytes:
            self._submit()
            self._buffer, self._used = self._pool.take(), 0
        return self._buffer[self._used : self._used + wanted]

    def _took(self, room: memoryview) -> None:
        if self._sum.kind is not None:
            self._sum.add(room)
        self._used += room.nbytes
        self.offset += room.nbytes

    def _submit(self) -> None:
        self._submit_buffer(self._buffer[: self._used], partial(self._pool.give_back, self._buffer))


class FirstDifference(Exception):
    """Not an error: stops a format that emits a file at the first `offset` where the stored part differs."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class DataFileChecker:
    """Compares the stored part with what the format emits; `FirstDifference` at the first wrong byte."""

    def __init__(
        self, content: ContentSource, source: Source, on_short: Callable[[int], ShortTransfer]
    ) -> None:
        self.content = content
        self.offset = 0
        self._source = source
        self._on_short = on_short
        self._buffer = aligned.aligned_buffer(min(BUFFER_BYTES, max(source.size_bytes, 1)))
        self._window = self._buffer[:0]
        self._sum = _Sum()

    def raw(self, text: bytes | memoryview) -> None:
        """Compare `text` with what is stored."""
        view = memoryview(text)
        while view.nbytes:
            stored = self._stored(view.nbytes)
            wrong = first_difference(stored, view[: stored.nbytes])
            self._took(stored, wrong)
            view = view[stored.nbytes :]

    def fill(self, size_bytes: int) -> None:
        """Let content verify what is stored."""
        end = self.offset + size_bytes
        while self.offset < end:
            stored = self._stored(min(end - self.offset, _STEP_BYTES))
            self._took(stored, self.content.verify(stored, self.offset))

    def start_sum(self, kind: Checksum) -> None:
        """Sum up what comes from here on; it equals what was written."""
        self._sum.start(kind)

    def end_sum(self) -> int:
        """The sum since `start_sum`."""
        return self._sum.end()

    def finish(self) -> None:
        """Nothing may follow what was emitted."""
        if self.offset < self._source.size_bytes:
            raise FirstDifference(self.offset)

    def _stored(self, wanted: int) -> memoryview:
        """The next stored bytes: at least one, at most `wanted`."""
        if not self._window.nbytes:
            left = self._source.size_bytes - self.offset
            if left <= 0:
                raise self._on_short(self.offset + wanted)
            self._window = self._buffer[: min(left, self._buffer.nbytes)]
            self._source.read_into(self.offset, self._window)
        return self._window[:wanted]

    def _took(self, stored: memoryview, wrong: int | None) -> None:
        if wrong is not None:
            raise FirstDifference(self.offset + wrong)
        self._sum.add(stored)
        self._window = self._window[stored.nbytes :]
        self.offset += stored.nbytes


def first_difference(one: memoryview, other: memoryview) -> int | None:
    """Where two buffers of the same length differ first; None if they are equal."""
    unequal = np.frombuffer(one, dtype=np.uint8) != np.frombuffer(other, dtype=np.uint8)
    first = int(unequal.argmax()) if unequal.size else 0
    return first if unequal.size and unequal[first] else None


def make_short_error(plan: FilePlan, part: int, actual_bytes: int) -> Callable[[int], ShortTransfer]:
    """Makes the error of a stored part that ends before the bytes which it must have."""
    name = plan.parts[part].key(plan.name)

    def error(needed_bytes: int) -> ShortTransfer:
        return ShortTransfer(
            f"{name} is truncated: it has {actual_bytes} bytes of at least {needed_bytes}",
            uri=name,
            expected_bytes=needed_bytes,
            actual_bytes=actual_bytes,
            fix="Generate the data set again: files that are whole are kept.",
        )

    return error
