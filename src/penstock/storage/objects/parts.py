"""How an object is cut into parts. Pure: sizes in, sizes out; `sink` acts on it.

Every part of an upload has the same size but the last, which every S3 service accepts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

MIN_PART_BYTES: Final = 5 * 1024 * 1024
MAX_PART_BYTES: Final = 5 * 1024**3
MAX_PARTS: Final = 10_000


def choose_part_bytes(target_bytes: int, first_buffer_bytes: int, size_bytes: int | None) -> int:
    """The part size for an object whose first buffer has `first_buffer_bytes`; `size_bytes` if known.

    It is the smallest that fits 10,000 parts or `target_bytes`, whichever is more; but where buffers of the
    first one's size divide into equal parts of between half and twice that, such a part: nothing is copied
    then.
    """
    least_bytes = max(MIN_PART_BYTES, -(-(size_bytes or 0) // MAX_PARTS))
    target_bytes = min(max(target_bytes, least_bytes), MAX_PART_BYTES)
    if first_buffer_bytes == size_bytes:
        return target_bytes
    nearest = max(1, round(first_buffer_bytes / target_bytes))
    for step in range(nearest + 1):
        for pieces in (nearest + step, nearest - step):
            if pieces < 1 or first_buffer_bytes % pieces:
                continue
            part_bytes = first_buffer_bytes // pieces
            fits = (
                max(least_bytes, -(-target_bytes // 2)) <= part_bytes <= min(2 * target_bytes, MAX_PART_BYTES)
            )
            if fits:
                return part_bytes
    return target_bytes


def split_range(offset: int, length: int, range_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the requests that together read `length` bytes from `offset`."""
    for start in itertools.takewhile(lambda start: start < length, itertools.count(0, range_bytes)):
        yield offset + start, min(range_bytes, length - start)
