"""A file's bytes on their way to the durable level, held against the manifest that will speak for them.

Invariant: what does not match its sum in the cache is never committed elsewhere as if it did.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from penstock.checkpoint.sums import running_sum
from penstock.errors import DataDamaged
from penstock.storage.aligned import aligned_buffer

if TYPE_CHECKING:
    from penstock.checkpoint.manifest import ManifestFile
    from penstock.storage import Storage

BLOCK_BYTES = 8 << 20


class PassingSums:
    """The sum of a whole file, and those of its items, from bytes that pass in order."""

    def __init__(self, file: ManifestFile) -> None:
        self._file = file
        self._whole = running_sum()
        self._item = running_sum()
        self._row = 0
        self._at = 0
        self._wrong: list[int] = []

    def see(self, block: memoryview) -> None:
        """Take the next bytes."""
        self._whole.update(block)
        end = self._at + block.nbytes
        while self._row < len(self._file):
            begins = int(self._file.item_offset[self._row])
            ends = begins + int(self._file.item_bytes[self._row])
            if begins >= end and ends > end:
                break
            self._item.update(block[max(begins - self._at, 0) : max(min(ends, end) - self._at, 0)])
            if ends > end:
                break
            self._end_item()
        self._at = end

    def sum(self) -> str:
        """Of the whole file, in hexadecimal."""
        return self._whole.digest().hex()

    def require_right(self, where: str) -> None:
        """Raise `DataDamaged` where an item differs from its sum."""
        if self._wrong:
            raise DataDamaged(
                f"{self._file.name} is damaged in the cache: {len(self._wrong)} of {len(self._file)} items "
                f"differ from their sums, the first at byte {int(self._file.item_offset[self._wrong[0]])}",
                where=where,
                fix="Restoring the step rebuilds it where its redundancy can; then it is flushed.",
            )

    def _end_item(self) -> None:
        if self._item.digest() != self._file.sum_at(self._row):
            self._wrong.append(self._row)
        self._item = running_sum()
        self._row += 1


def sum_of_file(storage: Storage, key: str) -> tuple[int, str]:
    """A stored file's size, and the sum of its bytes in hexadecimal."""
    total = running_sum()
    with closing(storage.open(key)) as source:
        buffer = aligned_buffer(min(BLOCK_BYTES, max(source.size_bytes, 1)))
        for start in range(0, source.size_bytes, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, source.size_bytes - start)]
            source.read_into(start, block)
            total.update(block)
        return source.size_bytes, total.digest().hex()
