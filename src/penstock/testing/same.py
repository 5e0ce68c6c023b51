"""Comparing bytes in tests. Where a plain `==` fails pytest draws the difference, for hours if it is large.

On continuous integration pytest draws it whole, whatever its length.
"""

from __future__ import annotations

import numpy as np

_SHOWN_BYTES = 16

Buffer = bytes | bytearray | memoryview


def assert_same_bytes(seen: Buffer, expected: Buffer) -> None:
    """Fail unless both are equal; the message says where they part and what is there."""
    one, other = (np.frombuffer(buffer, dtype=np.uint8) for buffer in (seen, expected))
    shorter = min(one.size, other.size)
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    if not differing.size and one.size == other.size:
        return
    at = int(differing[0]) if differing.size else shorter
    raise AssertionError(
        f"{one.size} bytes instead of {other.size}; from byte {at} on "
        f"{one[at : at + _SHOWN_BYTES].tobytes()!r} instead of {other[at : at + _SHOWN_BYTES].tobytes()!r}"
    )
