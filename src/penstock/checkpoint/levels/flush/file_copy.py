"""Copying files from a cache to the durable level: in large blocks, at a limited rate, verified on the way.

Used by both flushers and by recovery. Invariant: bytes pass no faster than the rate limit allows, whichever
thread moves them; a file that differs from its checksums in the cache is never committed elsewhere.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Final

from penstock.checkpoint.formats.manifest import ManifestFile, start_checksum
from penstock.errors import DataDamaged
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, aligned_buffer
from penstock.storage.capabilities import prefer_direct_access

BLOCK_BYTES: Final = 16 << 20
SMALLEST_BLOCK_BYTES: Final = 256 << 10
BURST_S: Final = 0.5
"""How much unused time a flush may catch up on: waiting for disks, or between two steps."""


WaitForTurn = Callable[[int], None]
"""Called with a number of bytes before they are written; returns when they may be."""

OnBlock = Callable[[memoryview], None]
"""Called with the blocks of a file, in order."""


@dataclass(slots=True)
class RateLimiter:
    """Limits the rate of bytes over all threads; each waits for the time that those before it have taken.

    Unused time is kept for `burst_s`, so that waiting for the disk does not lower the rate.
    """

    bytes_per_s: float | None
    burst_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: Lock = field(default_factory=Lock)
    _free_at_s: float | None = None

    def take(self, num_bytes: int) -> None:
        """Return when `num_bytes` more may pass."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now_s = self.clock()
            free_at_s = now_s if self._free_at_s is None else self._free_at_s
            begins_s = max(free_at_s, now_s - self.burst_s)
            self._free_at_s = begins_s + num_bytes / self.bytes_per_s
        if begins_s > now_s:
            self.sleep(begins_s - now_s)


def block_bytes_for(bytes_per_s: float | None) -> int:
    """The block size: as large as storage likes it, but at most a tenth of a second of the rate limit."""
    if bytes_per_s is None:
        return BLOCK_BYTES
    return max(min(int(bytes_per_s / 10) // PAGE_BYTES * PAGE_BYTES, BLOCK_BYTES), SMALLEST_BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCopy:
    """One file to copy, by its keys."""

    from_key: str
    to_key: str


def copy_files(
    copies: Sequence[FileCopy], source: Storage, target: Storage, *, threads: int, pace: RateLimiter
) -> None:
    """Copy files, several at a time; all are durable on return. Writes nothing to the source."""
    if copies:
        source = prefer_direct_access(source, reads=copies[0].from_key)
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-flush") as pool:
        for copied in [pool.submit(copy_file, copy, source, target, pace.take) for copy in copies]:
            copied.result()


def copy_file(
    copy: FileCopy,
    source: Storage,
    target: Storage,
    take: WaitForTurn,
    *,
    see: OnBlock | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Copy one file with two buffers: one is read into while the other is written."""
    with closing(source.open(copy.from_key)) as file, ExitStack() as undo:
        size_bytes = file.size_bytes
        sink = target.create(copy.to_key, size_bytes)
        undo.callback(sink.abort)
        buffers = [(aligned_buffer(min(block_bytes, max(size_bytes, 1))), Event()) for _ in range(2)]
        for _, free in buffers:
            free.set()
        for number, start in enumerate(range(0, size_bytes, block_bytes)):
            buffer, free = buffers[number % 2]
            free.wait()
            free.clear()
            block = buffer[: min(block_bytes, size_bytes - start)]
            file.read_into(start, block)
            if see is not None:
                see(block)
            take(block.nbytes)
            sink.submit(block, free.set)
        sink.finish()
        undo.pop_all()


class StreamChecksums:
    """Computes the checksum of a file and verifies those of its items, from blocks in order."""

    def __init__(self, file: ManifestFile) -> None:
        self._file = file
        self._whole = start_checksum()
        self._item = start_checksum()
        self._row = 0
        self._at = 0
        self._wrong: list[int] = []

    def see(self, block: memoryview) -> None:
        """Add the next block."""
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
        """The checksum of the whole file, in hexadecimal."""
        return self._whole.digest().hex()

    def require_right(self, where: str) -> None:
        """Raise `DataDamaged` if an item differs from its checksum."""
        if self._wrong:
            raise DataDamaged(
                f"{self._file.name} is damaged in the cache: {len(self._wrong)} of {len(self._file)} items "
                "differ from their checksums, the first at byte "
                f"{int(self._file.item_offset[self._wrong[0]])}",
                where=where,
                fix="Restore the step: if its redundancy allows, it is rebuilt and then flushed.",
            )

    def _end_item(self) -> None:
        if self._item.digest() != self._file.sum_at(self._row):
            self._wrong.append(self._row)
        self._item = start_checksum()
        self._row += 1
