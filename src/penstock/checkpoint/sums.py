"""The checksum of everything the engine stores: XXH3-128, at the speed of memory and without the GIL.

It tells damage, not forgery. Invariant: a sum is 16 bytes in the order that
`xxhsum -H2` prints them.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

SUM_BYTES = 16

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
