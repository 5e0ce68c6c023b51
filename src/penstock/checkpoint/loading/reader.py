"""Reads blocks from storage into memory: several threads read, checksum and pass on.

A block whose destination is contiguous and aligned is read directly into it, or copied to it from a mapping;
other blocks pass through a buffer. Invariant: the blocks cover every span once, each part is passed on once,
and the parts of an item are checksummed in order, whichever thread reads them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.checkpoint.formats.manifest import RunningChecksum, checksum_of, start_checksum
from penstock.errors import DataDamaged, PenstockError
from penstock.progress import Progress
from penstock.storage.aligned import PAGE_BYTES, round_up
from penstock.storage.capabilities import SupportsViews, no_thread, offers
from penstock.storage.protocol import Source
from penstock.transfer.buffers import WarmMemory

LEAST_BLOCKS = 3
"""For each stream, unless blocks would be smaller than `LEAST_BLOCK_BYTES`."""
LEAST_BLOCK_BYTES = 2 << 20

LAST_BLOCK_BYTES = 1 << 20
"""All streams get their last block at nearly the same time, and then the device has nothing more to do."""

MOST_COPYING_THREADS = 4
"""As many saturate memory; ranks of one host share it."""

CACHED_BLOCK_BYTES = 32 << 20
"""Nothing is waited for and no buffer is needed, so each block only costs the interpreter."""

AHEAD_BYTES = 16 << 20
"""Read before a load is planned, at most: a fast device gives about as many in those milliseconds."""

STEP_BYTES = 1 << 20
"""Bytes are checksummed and copied in steps that stay in the processor's cache."""

SMALL_PART_BYTES = 64 << 10
"""Up to this size a part takes the interpreter longer than memory, and one thread at a time can have that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How a rank reads: `streams` threads, each of which checksums and copies what it has read.

    There are more of them than a device needs, so that it works while some of them do not read. Buffers take
    twice as many blocks.
    """

    streams: int = 6
    block_bytes: int = 8 << 20
    """At most. Small loads have smaller blocks: what the last ones take after the device is done is short."""

    def fit(self, num_bytes: int) -> ReadSettings:
        """For a load of so many bytes: fewer streams and smaller blocks if they are few."""
        streams = min(self.streams, max(num_bytes // (2 * LEAST_BLOCK_BYTES), 1))
        fitting = round_up(max(num_bytes // (LEAST_BLOCKS * streams), LEAST_BLOCK_BYTES), PAGE_BYTES)
        return replace(self, streams=streams, block_bytes=min(self.block_bytes, fitting))


def settings_for_cached(settings: ReadSettings, num_ranks: int) -> ReadSettings:
    """For copies out of the page cache by so many ranks of a host: they cost processors, and no waiting.

    No thread more than there are processors, which the ranks share unless each was given some of them.
    """
    most = MOST_COPYING_THREADS if num_ranks == 1 else MOST_COPYING_THREADS // 2
    processors = len(os.sched_getaffinity(0))
    if processors == os.cpu_count():
        processors = max(processors // num_ranks, 1)
    block_bytes = max(settings.block_bytes, CACHED_BLOCK_BYTES)
    return replace(settings, streams=min(settings.streams, most, processors), block_bytes=block_bytes)


@dataclass(slots=True)
class ChecksummedItem:
    """An item that is read whole, and the checksum it must have."""

    name: str
    file: str
    begin: int
    end: int
    expected: bytes


class SpanSink(Protocol):
    """Where the bytes of spans go; called from the reading threads."""

    def place(self, span: int, begin: int, end: int) -> memoryview | None:
        """Memory that bytes `begin` to `end` of the file can be read into; None if `take` must copy them."""

    def take(self, span: int, begin: int, content: memoryview) -> None:
        """Copy a part's bytes, which begin at `begin` in the file."""

    def arrived(self, part: Part) -> None:
        """All bytes of a part are in place, by `place` or by `take`."""


class BlockViewers(Protocol):
    """Other ranks of the host, to which blocks are shown."""

    def expect_blocks(
        self, blocks: Sequence[Block], reuse: Callable[[int], None]
    ) -> Sequence[memoryview] | None:
        """Called first, with all blocks: buffers that the viewers see, if blocks are to be read into these.

        `reuse` is called with the number of each buffer that is free again.
        """

    def show(self, number: int, block: Block, buffer: int, content: memoryview) -> None:
        """A block has been read with this buffer, though its content may be elsewhere."""

    def release(self, buffer: int) -> None:
        """The reader has passed on what was in a buffer."""


class OpenFiles:
    """Keeps files open while blocks of them are left to read, so that few are open at a time."""

    def __init__(self, blocks: Sequence[Block], open_file: Callable[[int], Source]) -> None:
        self._num_left = Counter(block.file for block in blocks)
        self._open_file = open_file
        self._opened: dict[int, Future[Source]] = {}
        self._lock = threading.Lock()

    def open(self, file: int) -> Source:
        """The file; the first call opens it, which others wait for only if they want the same one."""
        with self._lock:
            is_first = file not in self._opened
            opened = self._opened.setdefault(file, Future())
        if is_first:
            with ExitStack() as undo:
                # Whatever happens, nobody waits for ever.
                undo.callback(opened.cancel)
                try:
                    opened.set_result(self._open_file(file))
                except PenstockError as error:
                    opened.set_exception(error)
        return opened.result()

    def done(self, file: int) -> None:
        """Note that a block of the file has been read; the last one closes it."""
        with self._lock:
            self._num_left[file] -= 1
            is_last = not self._num_left[file]
        if is_last:
            self._opened.pop(file).result().close()

    def close(self) -> None:
        """Close what a failure left open, after all threads have ended."""
        for opened in self._opened.values():
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()
        self._opened.clear()


class ReadBuffers:
    """Warm memory for blocks, which is kept from load to load."""

    def __init__(self, settings: ReadSettings) -> None:
        self.settings = settings
        self._memory: WarmMemory | None = None
        self._ahead: WarmMemory | None = None
        self._lock = threading.Lock()

    def ahead(self) -> memoryview:
        """Memory for what is read while a load is planned."""
        with self._lock:
            self._ahead = self._ahead or WarmMemory(AHEAD_BYTES)
            return self._ahead.view

    def blocks(
        self, num_blocks: int, prepare: Callable[[WarmMemory], object] | None = None
    ) -> list[memoryview]:
        """Buffers for a load of `num_blocks`; `prepare` is called with their memory."""
        size = self.settings.block_bytes
        num_buffers = min(2 * self.settings.streams, num_blocks)
        with self._lock:
            if self._memory is None or self._memory.size_bytes < num_buffers * size:
                self._memory = WarmMemory(num_buffers * size)
            if prepare is not None:
                for memory in filter(None, (self._memory, self._ahead)):
                    prepare(memory)
            view = self._memory.view
        return [view[start : start + size] for start in range(0, num_buffers * size, size)]


@dataclass(slots=True)
class _Item:
    """An item whose checksum is being computed."""

    expected: ChecksummedItem
    sum: RunningChecksum = field(default_factory=start_checksum)
    done_bytes: int = 0


class BlockReader:
    """Reads some blocks once, in several threads."""

    def __init__(
        self,
        blocks: Sequence[Block],
        spans: Sequence[Span],
        *,
        files: OpenFiles,
        sink: SpanSink,
        items: Mapping[int, ChecksummedItem],
        progress: Progress,
        wait_for_room: Callable[[], None],
        viewers: BlockViewers | None = None,
    ) -> None:
        self._blocks = blocks
        self._viewers = viewers
        self._spans = spans
        self._files = files
        self._sink = sink
        self._expected = items
        self._items: dict[int, _Item] = {}
        self._progress = progress
        self._wait_for_room = wait_for_room
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
        """Begin to read in `streams` of `threads`, or in as many as the buffers are for.

        When one fails, its future has the error and the others stop. `prepare` is called with the memory of
        the buffers first.
        """
        if not self._blocks:
            return []
        shown = None if self._viewers is None else self._viewers.expect_blocks(self._blocks, self._reuse)
        self._buffers = shown or buffers.blocks(len(self._blocks), prepare)
        self._free = list(range(len(self._buffers)))
        num_threads = min(streams or buffers.settings.streams, len(self._blocks))
        started: list[Future[None]] = []
        for _ in range(num_threads):
            try:
                started.append(threads.submit(self._work))
            except RuntimeError as error:
                # With fewer threads, it only takes longer.
                if not started:
                    raise no_thread(error) from error
        return started

    def stop(self) -> None:
        """Read no further blocks."""
        with self._lock:
            self._is_stopped = True
            self._lock.notify_all()

    def _work(self) -> None:
        with ExitStack() as undo:
            undo.callback(self.stop)
            while (taken := self._take()) is not None:
                self._read(*taken)
                self._wait_for_room()
            undo.pop_all()

    def _take(self) -> tuple[int, int] | None:
        """The next block and a free buffer, by number, taken together: the earliest block always has one."""
        with self._lock:
            while not self._free and not self._is_stopped and self._next < len(self._blocks):
                self._lock.wait()
            if self._is_stopped or self._next >= len(self._blocks):
                return None
            number, self._next = self._next, self._next + 1
            return number, self._free.pop()

    def _give_back(self, buffer: int) -> None:
        if self._viewers is None:
            self._reuse(buffer)
        else:
            self._viewers.release(buffer)

    def _reuse(self, buffer: int) -> None:
        with self._lock:
            self._free.append(buffer)
            self._lock.notify_all()

    def _read(self, number: int, buffer: int) -> None:
        block = self._blocks[number]
        content, is_in_place = self._get(block, self._buffers[buffer])
        self._files.done(block.file)
        if self._viewers is not None:
            self._viewers.show(number, block, buffer, content)
        if self._try_claim_turn(number, buffer, content, is_in_place=is_in_place):
            self._pass_on(number, content, is_in_place=is_in_place)
            self._give_back(buffer)
            self._pass_on_parked(number)

    def _get(self, block: Block, buffer: memoryview) -> tuple[memoryview, bool]:
        """A block's content, and whether that is where it belongs."""
        source, size = self._files.open(block.file), block.end - block.begin
        if offers(source, SupportsViews) and (shown := source.view(block.begin, size)) is not None:
            return shown, False
        if (in_place := self._find_destination(block)) is not None:
            source.read_into(block.begin, in_place)
            return in_place, True
        # Read to the end of the last page, so that direct I/O needs no second request for the tail.
        whole = min(round_up(size, PAGE_BYTES), source.size_bytes - block.begin)
        source.read_into(block.begin, buffer[: max(whole, size)])
        return buffer[:size], False

    def _find_destination(self, block: Block) -> memoryview | None:
        if len(block.parts) != 1:
            return None
        (part,) = block.parts
        if (part.begin, part.end) != (block.begin, block.end):
            return None
        return self._sink.place(part.span, part.begin, part.end)

    def _try_claim_turn(self, number: int, buffer: int, content: memoryview, *, is_in_place: bool) -> bool:
        """Whether it is this block's turn; if not, park it for the thread that finishes the one before."""
        with self._lock:
            if not self._blocks[number].continues or self._is_predecessor_summed(number):
                return True
            self._parked[number] = (buffer, content, is_in_place)
            return False

    def _is_predecessor_summed(self, number: int) -> bool:
        item = self._spans[self._blocks[number].parts[0].span].item
        assert item is not None, "a block that continues an item begins with it"
        progress, expected = self._items.get(item), self._expected[item]
        done = 0 if progress is None else progress.done_bytes
        return expected.begin + done == self._blocks[number].parts[0].begin

    def _pass_on_parked(self, number: int) -> None:
        """Pass on the following blocks that were parked until this one was done."""
        while True:
            number += 1
            with self._lock:
                if number not in self._parked:
                    return
                buffer, content, is_in_place = self._parked.pop(number)
            self._pass_on(number, content, is_in_place=is_in_place)
            self._give_back(buffer)

    def _pass_on(self, number: int, content: memoryview, *, is_in_place: bool) -> None:
        block = self._blocks[number]
        # Threads that take the interpreter from each other at each of many small parts need thrice the CPU.
        is_of_small_parts = len(content) <= SMALL_PART_BYTES * len(block.parts)
        with self._interpreter if is_of_small_parts else nullcontext():
            self._pass_on_parts(block, content, is_in_place=is_in_place)
        self._progress.advance(block.end - block.begin)

    def _pass_on_parts(self, block: Block, content: memoryview, *, is_in_place: bool) -> None:
        for part in block.parts:
            inside = content[part.begin - block.begin : part.end - block.begin]
            item = self._running_item(part, inside)
            # What is only copied needs no second look while it is in the cache.
            step_bytes = len(inside) if item is None else STEP_BYTES
            for start in range(0, len(inside), step_bytes):
                step = inside[start : start + step_bytes]
                if item is not None:
                    item.sum.update(step)
                if not is_in_place:
                    self._sink.take(part.span, part.begin + start, step)
            if item is not None:
                self._count(item, len(inside))
            self._sink.arrived(part)

    def _running_item(self, part: Part, content: memoryview) -> _Item | None:
        """The item that the part belongs to, if it has a checksum to be continued."""
        number = self._spans[part.span].item
        if number is None:
            return None
        item, expected = self._items.get(number), self._expected[number]
        if item is None:
            if len(content) == expected.end - expected.begin <= STEP_BYTES:
                # There may be a hundred thousand items that come at once: they need no state.
                if checksum_of(content) != expected.expected:
                    raise damaged(expected)
                return None
            # The parts of an item come one after another, so no other thread is here for the same one.
            item = self._items[number] = _Item(expected)
        return item

    def _count(self, item: _Item, num_bytes: int) -> None:
        with self._lock:
            item.done_bytes += num_bytes
        expected = item.expected
        is_complete = expected.begin + item.done_bytes == expected.end
        if is_complete and item.sum.digest() != expected.expected:
            raise damaged(expected)


def damaged(item: ChecksummedItem) -> DataDamaged:
    """The error for an item with a wrong checksum."""
    return DataDamaged(
        f"{item.name} is not as it was written: its checksum differs",
        where=f"{item.file}, bytes {item.begin} to {item.end}",
        fix="Load an older step, or run `penstock checkpoint verify` to see all damage.",
    )


GAP_BYTES = 64 * 1024
"""Gaps between spans up to this size are read as well, because another request would cost more."""


@dataclass(frozen=True, slots=True)
class Span:
    """Wanted bytes of one file. Spans with the same `item` share its checksum, in order."""

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
    """Whether the first part's item began in the block before, which must be checksummed first."""


def plan_blocks(
    spans: Sequence[Span], *, block_bytes: int, alignment_bytes: int, tapered_for: int = 0
) -> list[Block]:
    """Blocks for `spans`, which are in runs that are sorted by file and beginning.

    Blocks begin at multiples of `alignment_bytes`, as `block_bytes` is one; they end where the spans do, and
    a reader may round the end up within its file. `tapered_for` so many streams, the last blocks are smaller.
    """
    blocks: list[Block] = []
    extents = list(_extents(spans))
    left_bytes = sum(end - begin for _, _, begin, end in extents)
    for first, last, begin, end in extents:
        file = spans[first].file
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
            parts = tuple(_parts(spans, range(pending, last), block_begin, block_end))
            if parts:
                blocks.append(
                    Block(file, block_begin, block_end, parts, _continues(spans, parts[0], block_begin))
                )
    return blocks


def _extents(spans: Sequence[Span]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of spans with small gaps: first and last (exclusive) span, first byte and end."""
    first, end = 0, spans[0].end if spans else 0
    for number, span in enumerate(spans):
        is_back = span.begin < spans[max(number - 1, first)].begin
        if span.file != spans[first].file or is_back or span.begin > end + GAP_BYTES:
            yield first, number, spans[first].begin, end
            first, end = number, span.end
        end = max(end, span.end)
    if spans:
        yield first, len(spans), spans[first].begin, end


def _parts(spans: Sequence[Span], numbers: range, begin: int, end: int) -> Iterator[Part]:
    for number in numbers:
        span = spans[number]
        if span.begin >= end:
            return
        if max(span.begin, begin) < min(span.end, end):
            yield Part(number, max(span.begin, begin), min(span.end, end))


def _continues(spans: Sequence[Span], part: Part, block_begin: int) -> bool:
    item = spans[part.span].item
    if item is None:
        return False
    if spans[part.span].begin < block_begin:
        return True
    return part.span > 0 and spans[part.span - 1].item == item
