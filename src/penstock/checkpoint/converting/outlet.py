"""One file being written from warm buffers that are filled while earlier ones are on their way.

Invariant: memory is the buffers', however large the file becomes, and a failure of the storage is raised by
the next call that waits.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.pipe.memory import WarmMemory

if TYPE_CHECKING:
    from penstock.storage.protocol import Sink

BUFFER_BYTES: Final = 8 << 20
NUM_BUFFERS: Final = 6
_POLL_S: Final = 1.0


class Buffers:
    """Warm buffers, used again by file after file."""

    def __init__(self, size_bytes: int = BUFFER_BYTES, num_buffers: int = NUM_BUFFERS) -> None:
        self.size_bytes = size_bytes
        memory = WarmMemory(size_bytes * num_buffers)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for start in range(0, size_bytes * num_buffers, size_bytes):
            self._free.put(memory.view[start : start + size_bytes])

    def take(self, sink: Sink) -> memoryview:
        """A free buffer; raises what `sink` failed with, if that is why none becomes free."""
        while True:
            try:
                return self._free.get(timeout=_POLL_S)
            except Empty:
                sink.submit(memoryview(b""))

    def give_back(self, buffer: memoryview) -> None:
        """Offer a whole buffer to the next user."""
        self._free.put(buffer)


class Outlet:
    """Appends to one sink. `position` is where the next byte goes."""

    def __init__(self, sink: Sink, buffers: Buffers) -> None:
        self._sink = sink
        self._buffers = buffers
        self.position = 0

    @property
    def room_bytes(self) -> int:
        """The most that one `buffer` holds."""
        return self._buffers.size_bytes

    def buffer(self) -> memoryview:
        """A buffer to fill and hand to `append`."""
        return self._buffers.take(self._sink)

    def append(self, buffer: memoryview, num_bytes: int) -> None:
        """Write the first bytes of a buffer that came from `buffer`, which is not touched afterwards."""
        self._sink.submit(buffer[:num_bytes], lambda: self._buffers.give_back(buffer))
        self.position += num_bytes

    def write(self, content: bytes) -> None:
        """Write bytes that stay as they are."""
        if content:
            self._sink.submit(memoryview(content))
            self.position += len(content)
