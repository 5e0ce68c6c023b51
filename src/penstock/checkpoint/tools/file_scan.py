"""Reads files front to back in several threads, and passes each byte to the check that it belongs to.

A stretch is a run of segments of one file that one thread checks. Invariant: memory is `streams` blocks,
however large the files are; bytes that cannot be read are reported as damage, and do not end the scan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np
from isal import isal_zlib

from penstock.checkpoint.formats.manifest import start_checksum
from penstock.errors import StorageError
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.protocol import Source
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from penstock.progress import Progress


Check = Callable[[Iterator[memoryview]], str | None]
"""Takes all bytes of a segment in order; returns what is wrong with them, or None if they are right."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Damage:
    """Bytes `begin` to `end` of `file` are wrong. `item` is empty if they belong to none."""

    file: str
    begin: int
    end: int
    item: str
    what: str

    def __str__(self) -> str:
        item = f", {self.item}" if self.item else ""
        return f"{self.file}{item}, bytes {self.begin} to {self.end}: {self.what}"


logger = logging.getLogger(__name__)

STREAMS: Final = 4
BLOCK_BYTES: Final = 8 << 20
STRETCH_BYTES: Final = 64 << 20
_STEP_BYTES: Final = 1 << 20
"""Bytes are checked in steps that stay in the processor's cache."""


def check_sum(expected: bytes, content: Iterator[memoryview]) -> str | None:
    """Check bytes whose XXH3-128 is known."""
    total = start_checksum()
    for part in content:
        total.update(part)
    return None if total.digest() == expected else "its checksum differs"


def check_crc(expected: int, content: Iterator[memoryview]) -> str | None:
    """Check bytes whose CRC-32 is known. Archives of torch have it, and torch never checks it."""
    total = 0
    for part in content:
        total = isal_zlib.crc32(part, total)
    return None if total == expected else "its CRC-32 differs"


def check_zeros(content: Iterator[memoryview]) -> str | None:
    """Check bytes between items, which are zeros."""
    is_clean = True
    for part in content:
        is_clean &= not np.frombuffer(part, dtype=np.uint8).any()
    return None if is_clean else "something was written between items"


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `begin` to `end` of a file and the check for them. `item` is empty for a gap."""

    begin: int
    end: int
    item: str
    check: Check


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive segments of one file. `segments` finds them in the thread that reads the file."""

    file: str
    begin: int
    size_bytes: int
    segments: Callable[[Source], Sequence[Segment]]


def cut_into_stretches(file: str, segments: Iterable[Segment]) -> Iterator[Stretch]:
    """Cut segments into runs of about `STRETCH_BYTES`, for several threads."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if not runs or segment.begin - runs[-1][0].begin >= STRETCH_BYTES:
            runs.append([])
        runs[-1].append(segment)
    for run in runs:
        yield Stretch(file, run[0].begin, run[-1].end - run[0].begin, partial(_same, run))


def _same(run: Sequence[Segment], _: Source) -> Sequence[Segment]:
    return run


def scan(
    storage: Storage,
    key_of: Callable[[str], str],
    work: Sequence[Stretch],
    progress: Progress,
    *,
    streams: int = STREAMS,
) -> list[Damage]:
    """Check all of `work`; returns the damage, in order of files and ranges."""
    if not work:
        return []
    streams = min(streams, len(work))
    largest = max(stretch.size_bytes for stretch in work)
    block_bytes = min(BLOCK_BYTES, round_up(largest, PAGE_BYTES) + PAGE_BYTES)
    memory = WarmMemory(streams * block_bytes)
    free: SimpleQueue[memoryview] = SimpleQueue()
    for start in range(0, streams * block_bytes, block_bytes):
        free.put(memory.view[start : start + block_bytes])

    def check(stretch: Stretch) -> list[Damage]:
        buffer = free.get()
        try:
            with closing(storage.open(key_of(stretch.file))) as source:
                return list(_check_segments(source, stretch, buffer, progress))
        except StorageError as error:
            logger.info("%s: %s", key_of(stretch.file), error)
            end, what = stretch.begin + stretch.size_bytes, f"cannot be read: {error}"
            return [Damage(file=stretch.file, begin=stretch.begin, end=end, item="", what=what)]
        finally:
            free.put(buffer)

    with ThreadPoolExecutor(streams, thread_name_prefix="penstock-scan") as threads:
        return sorted(damage for damages in threads.map(check, work) for damage in damages)


def _check_segments(
    source: Source, stretch: Stretch, buffer: memoryview, progress: Progress
) -> Iterator[Damage]:
    begin = end = 0

    def content(segment: Segment) -> Iterator[memoryview]:
        """The bytes of a segment. One aligned block stays in memory, so that each byte is read once."""
        nonlocal begin, end
        at = segment.begin
        while at < segment.end:
            if not begin <= at < end:
                begin = at - at % PAGE_BYTES
                end = min(begin + len(buffer), source.size_bytes)
                source.read_into(begin, buffer[: end - begin])
            stop = min(at + _STEP_BYTES, segment.end, end)
            yield buffer[at - begin : stop - begin]
            at = stop

    for segment in stretch.segments(source):
        try:
            is_inside = segment.end <= source.size_bytes
            what = segment.check(content(segment)) if is_inside else "the file ends before it"
        except StorageError as error:
            begin = end = 0
            what = f"cannot be read: {error}"
        if what is not None:
            yield Damage(
                file=stretch.file, begin=segment.begin, end=segment.end, item=segment.item, what=what
            )
        progress.advance(segment.end - segment.begin)
