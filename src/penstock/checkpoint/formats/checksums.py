"""XXH3-128, the checksum of everything that the engine stores: as fast as memory, without the GIL.

It detects damage, not forgery. Invariant: a checksum is 16 bytes, in the order that `xxhsum -H2` prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

import xxhash

from penstock.storage.aligned import aligned_buffer

if TYPE_CHECKING:
    from penstock.storage import Storage

SUM_BYTES = 16
BLOCK_BYTES = 16 << 20

Bytes = bytes | bytearray | memoryview


class RunningSum(Protocol):
    """A sum that grows with the bytes it is given, in order."""

    def update(self, data: Bytes, /) -> None:
        """Add the next bytes."""

    def digest(self) -> bytes:
        """The sum of all bytes so far."""


def running_sum() -> RunningSum:
    """The sum of nothing yet."""
    return xxhash.xxh3_128()


def sum_of(*buffers: Bytes) -> bytes:
    """The sum of `buffers`, one after another."""
    total = running_sum()
    for buffer in buffers:
        total.update(buffer)
    return total.digest()


def sum_of_object(storage: Storage, key: str, seen: Callable[[int], None] | None = None) -> bytes:
    """The sum of one object, read block by block; `seen` is called with the bytes of each."""
    total = running_sum()
    with closing(storage.open(key)) as source:
        block = aligned_buffer(max(1, min(BLOCK_BYTES, source.size_bytes)))
        for start in range(0, source.size_bytes, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, source.size_bytes - start)]
            source.read_into(start, part)
            total.update(part)
            if seen is not None:
                seen(part.nbytes)
    return total.digest()
