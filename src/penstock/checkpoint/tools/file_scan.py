"""Files read front to back by several threads, each byte passed to the check that it belongs to.

A stretch is a run of segments of one file that one thread checks. Invariant: memory is `streams` blocks,
however large the files are, and unreadable bytes are damage, not the end of the scan.
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
from penstock.checkpoint.saving.buffers import WarmMemory
from penstock.errors import StorageError
from penstock.storage import Storage
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.protocol import Source

if TYPE_CHECKING:
    from penstock.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Damage:
    """Bytes `begin` to `end` of `file` are wrong. `item` is "" where they belong to none."""

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
        """After all bytes: what is wrong with them, or None."""


class SumCheck:
    """Bytes of a known XXH3-128."""

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
    """Bytes of a known CRC-32, as archives of torch have it and torch never checks it."""

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
    """Bytes between items."""

    def __init__(self) -> None:
        self._is_clean = True

    def update(self, content: memoryview) -> None:
        """Look for anything."""
        if np.frombuffer(content, dtype=np.uint8).any():
            self._is_clean = False

    def complaint(self) -> str | None:
        """Tell what was found."""
        return None if self._is_clean else "something was written between items"


class Refuted:
    """Bytes that are known to be wrong before they are read."""

    def __init__(self, what: str) -> None:
        self._what = what

    def update(self, _: memoryview) -> None:
        """Whatever they are."""

    def complaint(self) -> str:
        """Say it again."""
        return self._what


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `begin` to `end` of a file and what they must satisfy. `item` is "" for a gap."""

    begin: int
    end: int
    item: str
    make_check: Callable[[], Check]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive segments of one file, or how to find them out in the thread that reads the file."""

    file: str
    begin: int
    size_bytes: int
    segments: Callable[[Source], Sequence[Segment]]


def stretches(file: str, segments: Iterable[Segment]) -> Iterator[Stretch]:
    """Segments in runs of about `STRETCH_BYTES`, so that threads have something to share."""
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
    """Check all of `work`; the damage found, in order of files and ranges."""
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
        found = [damage for some in threads.map(check, work) for damage in some]
    return sorted(found)


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
    found: list[Damage] = []
    block = _Block(source, buffer)
    for segment in segments:
        what = "the file ends before it" if segment.end > source.size_bytes else _run(segment, block)
        if what is not None:
            found.append(
                Damage(file=file, begin=segment.begin, end=segment.end, item=segment.item, what=what)
            )
        progress.advance(segment.end - segment.begin)
    return found


def _run(segment: Segment, block: _Block) -> str | None:
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


class _Block:
    """The part of a file that is in memory: it moves on in aligned blocks, so each byte is read once."""

    def __init__(self, source: Source, buffer: memoryview) -> None:
        self._source = source
        self._buffer = buffer
        self._begin = self._end = 0

    def at(self, offset: int, most_bytes: int) -> memoryview:
        """Some bytes from `offset` on, at least one."""
        if not self._begin <= offset < self._end:
            self._begin = offset - offset % PAGE_BYTES
            self._end = min(self._begin + len(self._buffer), self._source.size_bytes)
            self._source.read_into(self._begin, self._buffer[: self._end - self._begin])
        start = offset - self._begin
        return self._buffer[start : min(start + most_bytes, self._end - self._begin)]
