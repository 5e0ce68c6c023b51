"""Reads blocks from storage into memory: several threads read blocks, checksum them and pass them on.

A block whose destination is contiguous and aligned is read directly into it, or copied to it from a mapping;
other blocks pass through a buffer. Invariant: the blocks cover every span once, each part is passed on once,
and the parts of an item are checksummed in order, whichever thread reads them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import xxhash

from penstock.errors import DataDamaged, PenstockError
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import no_thread
from penstock.storage.protocol import Source
from penstock.storage.residency import MappedSource
from penstock.transfer.buffers import WarmMemory

LEAST_BLOCKS = 3
"""The minimum number of blocks per stream, unless they would then be smaller than `LEAST_BLOCK_BYTES`."""
LEAST_BLOCK_BYTES = 2 << 20

LAST_BLOCK_BYTES = 1 << 20
"""The smallest of the last blocks, which shrink so that all streams finish at nearly the same time."""

MOST_COPYING_THREADS = 4
"""This many threads saturate the memory bandwidth, which the ranks of a host share."""

CACHED_BLOCK_BYTES = 32 << 20
"""The size of blocks from the page cache: copies need no buffer, and smaller blocks cost interpreter time."""

STEP_BYTES = 1 << 20
"""Bytes are checksummed and copied in steps that stay in the processor's cache."""

SMALL_PART_BYTES = 64 << 10
"""For parts up to this size, the interpreter, which runs one thread at a time, takes longer than the copy."""

GAP_BYTES = 64 * 1024
"""Gaps of up to this size between spans are read as well, because another request would cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """Settings for one rank's reads: `streams` threads, each of which also checksums and copies what it read.

    Fewer streams would be enough to keep a device busy, so it stays busy while some of them do not read.
    There are two buffers for each stream.
    """

    streams: int = 6
    block_bytes: int = 8 << 20
    """The largest block. Small loads have smaller ones, so that little is left to do after the last read."""

    def fit(self, num_bytes: int) -> ReadSettings:
        """Return settings for a load of `num_bytes`: few streams and small blocks if the load is small."""
        streams = min(self.streams, max(num_bytes // (2 * LEAST_BLOCK_BYTES), 1))
        fitting = round_up(max(num_bytes // (LEAST_BLOCKS * streams), LEAST_BLOCK_BYTES), PAGE_BYTES)
        return replace(self, streams=streams, block_bytes=min(self.block_bytes, fitting))

    def for_cached(self, num_ranks: int) -> ReadSettings:
        """Return settings for copies out of the page cache by `num_ranks` ranks of a host.

        Such copies take CPU time, so there is at most one thread for each CPU. Ranks share the CPUs unless
        each has its own.
        """
        most = MOST_COPYING_THREADS if num_ranks == 1 else MOST_COPYING_THREADS // 2
        processors = len(os.sched_getaffinity(0))
        if processors == os.cpu_count():
            processors = max(processors // num_ranks, 1)
        block_bytes = max(self.block_bytes, CACHED_BLOCK_BYTES)
        return replace(self, streams=min(self.streams, most, processors), block_bytes=block_bytes)


@dataclass(slots=True)
class ChecksummedItem:
    """An item that is read as a whole, and the checksum that it must have."""

    name: str
    file: str
    begin: int
    end: int
    expected: bytes
    sum: xxhash.xxh3_128 | None = None
    num_summed: int = 0

    def require(self, checksum: bytes) -> None:
        """Raise `DataDamaged` unless the item's checksum is the expected one."""
        if checksum != self.expected:
            raise DataDamaged(
                f"{self.name} is not as it was written: its checksum differs",
                where=f"{self.file}, bytes {self.begin} to {self.end}",
                fix="Load an older step, or run `penstock checkpoint verify` to see all damage.",
            )


@dataclass(frozen=True, slots=True)
class Span:
    """Wanted bytes of one file. Spans with the same `item` are checksummed together, in order."""

    file: int
    begin: int
    end: int
    item: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a span in a block: bytes `begin` to `end` of the file."""

    span: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """One request: bytes `begin` to `end` of a file."""

    file: int
    begin: int
    end: int
    parts: tuple[Part, ...]
    continues: bool
    """True if the first part's item began in the previous block, which must be checksummed first."""


def plan_blocks(
    spans: Sequence[Span], *, block_bytes: int, alignment_bytes: int, tapered_for: int = 0
) -> list[Block]:
    """Plan blocks for `spans`, which come in runs, each sorted by file and beginning.

    Blocks begin at multiples of `alignment_bytes`, of which `block_bytes` must be a multiple. They end where
    the spans do; a reader may round the end up within its file. If `tapered_for` is a number of streams, the
    last blocks are smaller.
    """
    blocks: list[Block] = []
    extents = list(_extents(spans))
    left_bytes = sum(end - begin for _, _, begin, end in extents)
    for first, last, begin, end in extents:
        pending = first
        block_end = begin - begin % alignment_bytes
        while block_end < end:
            block_begin = block_end
            tapered = left_bytes // (2 * tapered_for) if tapered_for else block_bytes
            size = min(block_bytes, max(tapered - tapered % alignment_bytes, LAST_BLOCK_BYTES))
            block_end = min(block_begin + size, end)
            left_bytes -= block_end - max(block_begin, begin)
            while pending < last and spans[pending].end <= block_begin:
                pending += 1
            parts = []
            for number in range(pending, last):
                span = spans[number]
                if span.begin >= block_end:
                    break
                if max(span.begin, block_begin) < min(span.end, block_end):
                    parts.append(Part(number, max(span.begin, block_begin), min(span.end, block_end)))
            if parts:
                span = spans[parts[0].span]
                before = spans[parts[0].span - 1] if parts[0].span else None
                continues = span.item is not None and (
                    span.begin < block_begin or (before is not None and before.item == span.item)
                )
                blocks.append(Block(span.file, block_begin, block_end, tuple(parts), continues))
    return blocks


def _extents(spans: Sequence[Span]) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of spans with small gaps in between: first span, last (exclusive), first byte, end."""
    first, end = 0, spans[0].end if spans else 0
    for number, span in enumerate(spans):
        is_back = span.begin < spans[max(number - 1, first)].begin
        if span.file != spans[first].file or is_back or span.begin > end + GAP_BYTES:
            yield first, number, spans[first].begin, end
            first, end = number, span.end
        end = max(end, span.end)
    if spans:
        yield first, len(spans), spans[first].begin, end


class OpenFiles:
    """Keeps a file open as long as parts of it are left to read, so that few files are open at a time.

    `uses` has the number of each file once for each part that will be read.
    """

    def __init__(self, uses: Iterable[int]) -> None:
        self._num_left = Counter(uses)
        self._opened: dict[int, Future[Source]] = {}
        self._lock = threading.Lock()

    def open(self, file: int, open_file: Callable[[int], Source]) -> Source:
        """Return the file, which the first call opens. Only callers that need the same file wait for that."""
        with self._lock:
            is_first = file not in self._opened
            opened = self._opened.setdefault(file, Future())
        if is_first:
            with ExitStack() as undo:
                # Ensures that no one waits forever if opening fails.
                undo.callback(opened.cancel)
                try:
                    opened.set_result(open_file(file))
                except PenstockError as error:
                    opened.set_exception(error)
        return opened.result()

    def done(self, file: int) -> None:
        """Called when a part of the file has been read; close the file after its last part."""
        with self._lock:
            self._num_left[file] -= 1
            is_last = not self._num_left[file]
        if is_last:
            self._opened.pop(file).result().close()

    def close(self) -> None:
        """Close what was left open after a failure. Call it when all threads have ended."""
        for opened in self._opened.values():
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()
        self._opened.clear()


class ReadBuffers:
    """Memory for blocks, which is kept from load to load."""

    def __init__(self, settings: ReadSettings) -> None:
        self.settings = settings
        self._memory: WarmMemory | None = None
        self._lock = threading.Lock()

    def blocks(
        self, num_blocks: int, prepare: Callable[[WarmMemory], object] | None = None
    ) -> list[memoryview]:
        """Return buffers for a load of `num_blocks`; `prepare` is called with their memory."""
        size = self.settings.block_bytes
        num_buffers = min(2 * self.settings.streams, num_blocks)
        with self._lock:
            if self._memory is None or self._memory.size_bytes < num_buffers * size:
                self._memory = WarmMemory(num_buffers * size)
            if prepare is not None:
                prepare(self._memory)
            view = self._memory.view
        return [view[start : start + size] for start in range(0, num_buffers * size, size)]


class SpanSink(Protocol):
    """The destination of the bytes of spans; called from the reading threads."""

    def place(self, span: int, begin: int, end: int) -> memoryview | None:
        """Return memory for bytes `begin` to `end` of the file, or None if `take` must copy them."""

    def take(self, span: int, begin: int, content: memoryview) -> None:
        """Copy bytes of a span, which begin at `begin` in the file."""

    def arrived(self, part: Part) -> None:
        """Called once all bytes of a part have arrived, via `place` or `take`."""


class BlockViewers:
    """Shows the blocks that this rank reads to other ranks. This base class shows them to none."""

    def expect_blocks(
        self,
        blocks: Sequence[Block],  # noqa: ARG002 - nobody sees them here
        reuse: Callable[[int], None],
    ) -> Sequence[memoryview] | None:
        """Prepare for all blocks; return buffers that viewers see; None to use the reader's own buffers.

        `reuse` is called with the number of each buffer that is free again.
        """
        self._reuse = reuse
        return None

    def show(self, number: int, block: Block, buffer: int, content: memoryview) -> None:
        """Receive a block that was read; `content` may lie outside the `buffer` with this number."""

    def release(self, buffer: int) -> None:
        """Called when the reader has passed on the content of a buffer."""
        self._reuse(buffer)


class BlockReader:
    """Reads a list of blocks, each once, in several threads.

    Spans refer by number to `items`, which have the checksums.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        spans: Sequence[Span],
        *,
        open_file: Callable[[int], Source],
        sink: SpanSink,
        items: Mapping[int, ChecksummedItem],
        progress: Progress,
        wait_for_room: Callable[[], None],
        viewers: BlockViewers | None = None,
    ) -> None:
        self._blocks = blocks
        self._spans = spans
        self._open_file = open_file
        self._files = OpenFiles(block.file for block in blocks)
        self._sink = sink
        self._items = items
        self._progress = progress
        self._wait_for_room = wait_for_room
        self._viewers = viewers or BlockViewers()
        self._lock = threading.Condition()
        self._interpreter = threading.Lock()
        self._next = 0
        self._parked: dict[int, tuple[int, memoryview, bool]] = {}
        self._buffers: Sequence[memoryview] = ()
        self._free: list[int] = []
        self._is_stopped = False

    def start(
        self,
        buffers: ReadBuffers,
        threads: Executor,
        prepare: Callable[[WarmMemory], object] | None = None,
        *,
        streams: int | None = None,
    ) -> list[Future[None]]:
        """Begin to read with `streams` of `threads`, or with as many as there are buffers for.

        If a thread fails, its future has the error and the others stop. First, `prepare` is called with the
        memory of the buffers.
        """
        if not self._blocks:
            return []
        shown = self._viewers.expect_blocks(self._blocks, self._reuse)
        self._buffers = shown or buffers.blocks(len(self._blocks), prepare)
        self._free = list(range(len(self._buffers)))
        started: list[Future[None]] = []
        for _ in range(min(streams or buffers.settings.streams, len(self._blocks))):
            try:
                started.append(threads.submit(self._work))
            except RuntimeError as error:
                # With fewer threads, reading only takes longer.
                if not started:
                    raise no_thread(error) from error
        return started

    def stop(self) -> None:
        """Read no more blocks."""
        with self._lock:
            self._is_stopped = True
            self._lock.notify_all()

    def close(self) -> None:
        """Close the files. Call it when all threads have ended."""
        self._files.close()

    def _work(self) -> None:
        with ExitStack() as undo:
            undo.callback(self.stop)
            while (claimed := self._claim()) is not None:
                number, buffer = claimed
                block = self._blocks[number]
                content, is_in_place = self._get(block, self._buffers[buffer])
                self._files.done(block.file)
                self._viewers.show(number, block, buffer, content)
                self._pass_on_in_order(number, buffer, content, is_in_place=is_in_place)
                self._wait_for_room()
            undo.pop_all()

    def _claim(self) -> tuple[int, int] | None:
        """Claim the next block and a free buffer together, so that the earliest block always has a buffer."""
        with self._lock:
            while not self._free and not self._is_stopped and self._next < len(self._blocks):
                self._lock.wait()
            if self._is_stopped or self._next >= len(self._blocks):
                return None
            number, self._next = self._next, self._next + 1
            return number, self._free.pop()

    def _get(self, block: Block, buffer: memoryview) -> tuple[memoryview, bool]:
        """Read a block; return its content, and whether that is already at its destination."""
        source, size = self._files.open(block.file, self._open_file), block.end - block.begin
        if isinstance(source, MappedSource) and (shown := source.view(block.begin, size)) is not None:
            return shown, False
        part = block.parts[0]
        if len(block.parts) == 1 and (part.begin, part.end) == (block.begin, block.end):
            in_place = self._sink.place(part.span, part.begin, part.end)
            if in_place is not None:
                source.read_into(block.begin, in_place)
                return in_place, True
        # Read to the end of the last page, so that direct I/O needs no second request for the tail.
        whole = min(round_up(size, PAGE_BYTES), source.size_bytes - block.begin)
        source.read_into(block.begin, buffer[: max(whole, size)])
        return buffer[:size], False

    def _pass_on_in_order(self, number: int, buffer: int, content: memoryview, *, is_in_place: bool) -> None:
        """Pass a block on if it is its turn, and then the parked blocks that follow it; otherwise, park it.

        Only a block that continues an item must wait, until the previous block is checksummed.
        """
        part = self._blocks[number].parts[0]
        item = self._spans[part.span].item
        with self._lock:
            if (
                self._blocks[number].continues
                and item is not None
                and (self._items[item].begin + self._items[item].num_summed != part.begin)
            ):
                self._parked[number] = (buffer, content, is_in_place)
                return
        while True:
            self._pass_on(self._blocks[number], content, is_in_place=is_in_place)
            self._viewers.release(buffer)
            number += 1
            with self._lock:
                if number not in self._parked:
                    return
                buffer, content, is_in_place = self._parked.pop(number)

    def _reuse(self, buffer: int) -> None:
        with self._lock:
            self._free.append(buffer)
            self._lock.notify_all()

    def _pass_on(self, block: Block, content: memoryview, *, is_in_place: bool) -> None:
        # Threads that contend for the interpreter at each of many small parts need three times the CPU time.
        is_of_small_parts = len(content) <= SMALL_PART_BYTES * len(block.parts)
        with self._interpreter if is_of_small_parts else nullcontext():
            for part in block.parts:
                number = self._spans[part.span].item
                item = None if number is None else self._items[number]
                inside = content[part.begin - block.begin : part.end - block.begin]
                if item is not None and len(inside) == item.end - item.begin <= STEP_BYTES:
                    # There may be a hundred thousand such items, and they need no running checksum.
                    item.require(xxhash.xxh3_128_digest(inside))
                    item = None
                # Bytes that are only copied need no steps: they are not read a second time.
                step_bytes = len(inside) if item is None else STEP_BYTES
                for start in range(0, len(inside), step_bytes):
                    step = inside[start : start + step_bytes]
                    if item is not None:
                        item.sum = item.sum or xxhash.xxh3_128()
                        item.sum.update(step)
                    if not is_in_place:
                        self._sink.take(part.span, part.begin + start, step)
                if item is not None:
                    with self._lock:
                        item.num_summed += len(inside)
                    if item.sum is not None and item.begin + item.num_summed == item.end:
                        item.require(item.sum.digest())
                self._sink.arrived(part)
        self._progress.advance(block.end - block.begin)
