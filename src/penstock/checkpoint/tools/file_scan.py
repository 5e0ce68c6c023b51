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
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from isal import isal_zlib

from penstock.checkpoint.formats.manifest import RunningChecksum, start_checksum
from penstock.errors import StorageError
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.protocol import Source
from penstock.transfer.buffers import WarmMemory

if TYPE_CHECKING:
    from penstock.progress import Progress


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


class Check(Protocol):
    """What the bytes of one segment must satisfy; fed in order by one thread."""

    def update(self, content: memoryview) -> None:
        """Take the next bytes."""

    def complaint(self) -> str | None:
        """What is wrong with the bytes, once all were passed; None if they are right."""


class SumCheck:
    """Bytes whose XXH3-128 is known."""

    def __init__(self, expected: bytes) -> None:
        self._expected = expected
        self._sum: RunningChecksum = start_checksum()

    def update(self, content: memoryview) -> None:
        """Add to the sum."""
        self._sum.update(content)

    def complaint(self) -> str | None:
        """Compare."""
        return None if self._sum.digest() == self._expected else "its checksum differs"


class CrcCheck:
    """Bytes whose CRC-32 is known. Archives of torch have it, and torch never checks it."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._sum = 0

    def update(self, content: memoryview) -> None:
        """Add to the sum."""
        self._sum = isal_zlib.crc32(content, self._sum)

    def complaint(self) -> str | None:
        """Compare."""
        return None if self._sum == self._expected else "its CRC-32 differs"


class ZeroCheck:
    """Bytes between items, which are zeros."""

    def __init__(self) -> None:
        self._is_clean = True

    def update(self, content: memoryview) -> None:
        """Look for other bytes than zeros."""
        self._is_clean &= not np.frombuffer(content, dtype=np.uint8).any()

    def complaint(self) -> str | None:
        """Whether there were any."""
        return None if self._is_clean else "something was written between items"


class KnownDamage:
    """Bytes that are known to be wrong before they are read."""

    def __init__(self, what: str) -> None:
        self._what = what

    def update(self, _: memoryview) -> None:
        """Ignore them."""

    def complaint(self) -> str:
        """What was wrong before."""
        return self._what


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `begin` to `end` of a file and the check for them. `item` is empty for a gap."""

    begin: int
    end: int
    item: str
    make_check: Callable[[], Check]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive segments of one file. `segments` finds them in the thread that reads the file."""

    file: str
    begin: int
    size_bytes: int
    segments: Callable[[Source], Sequence[Segment]]


def cut_into_stretches(file: str, segments: Iterable[Segment]) -> Iterator[Stretch]:
    """Cut segments into runs of about `STRETCH_BYTES`, for several threads."""
    run: list[Segment] = []
    for segment in segments:
        run.append(segment)
        if segment.end - run[0].begin >= STRETCH_BYTES:
            yield _stretch(file, run)
            run = []
    if run:
        yield _stretch(file, run)


def _stretch(file: str, run: list[Segment]) -> Stretch:
    return Stretch(file, run[0].begin, run[-1].end - run[0].begin, lambda _: run)


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
            return _check_stretch(storage, key_of(stretch.file), stretch, buffer, progress)
        finally:
            free.put(buffer)

    with ThreadPoolExecutor(streams, thread_name_prefix="penstock-scan") as threads:
        return sorted(damage for damages in threads.map(check, work) for damage in damages)


def _check_stretch(
    storage: Storage, key: str, stretch: Stretch, buffer: memoryview, progress: Progress
) -> list[Damage]:
    try:
        with closing(storage.open(key)) as source:
            segments = stretch.segments(source)
            return _check_segments(source, stretch.file, segments, buffer, progress)
    except StorageError as error:
        logger.info("%s: %s", key, error)
        end = stretch.begin + stretch.size_bytes
        return [Damage(file=stretch.file, begin=stretch.begin, end=end, item="", what=_unreadable(error))]


def _check_segments(
    source: Source, file: str, segments: Sequence[Segment], buffer: memoryview, progress: Progress
) -> list[Damage]:
    damage: list[Damage] = []
    block = _BlockReader(source, buffer)
    for segment in segments:
        what = "the file ends before it" if segment.end > source.size_bytes else _run(segment, block)
        if what is not None:
            damage.append(
                Damage(file=file, begin=segment.begin, end=segment.end, item=segment.item, what=what)
            )
        progress.advance(segment.end - segment.begin)
    return damage


def _run(segment: Segment, block: _BlockReader) -> str | None:
    check, at = segment.make_check(), segment.begin
    try:
        while at < segment.end:
            content = block.at(at, min(segment.end - at, _STEP_BYTES))
            check.update(content)
            at += len(content)
    except StorageError as error:
        return _unreadable(error)
    return check.complaint()


def _unreadable(error: StorageError) -> str:
    return f"cannot be read: {error}"


class _BlockReader:
    """Keeps one aligned block of a file in memory, so that each byte is read once."""

    def __init__(self, source: Source, buffer: memoryview) -> None:
        self._source = source
        self._buffer = buffer
        self._begin = self._end = 0

    def at(self, offset: int, most_bytes: int) -> memoryview:
        """At least one and at most `most_bytes` bytes from `offset` on."""
        if not self._begin <= offset < self._end:
            self._begin = offset - offset % PAGE_BYTES
            self._end = min(self._begin + len(self._buffer), self._source.size_bytes)
            self._source.read_into(self._begin, self._buffer[: self._end - self._begin])
        start = offset - self._begin
        return self._buffer[start : min(start + most_bytes, self._end - self._begin)]
