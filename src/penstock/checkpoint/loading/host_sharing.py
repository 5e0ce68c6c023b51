"""One copy a host: a rank shows the blocks it reads to the ranks of its host, which copy from its window.

For each block that others want, its reader tells them where the block lies in its window; they copy what they
want and return it, and the reader uses the place again when all have. Invariants: a block's place does not
change before all have returned it; copying never waits for another rank, so ranks cannot deadlock; a rank
that fails tells the others, and a connection that ends without that is a rank that died.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.checkpoint.loading.host_links import HostLinks, count_streams
from penstock.checkpoint.loading.reader import STEP_BYTES, Block, Part, ReadSettings, Span, SpanSink
from penstock.checkpoint.plan.load_plan import LoadPlan
from penstock.checkpoint.state.regions import Ints
from penstock.errors import RankError, WaitTimeout

_MESSAGE = struct.Struct("<iiqqq")
_SHOWN, _RETURNED, _GAVE_UP = range(3)


class SharedBlocks:
    """Memory for blocks in a window that other ranks map, in place of `ReadBuffers`."""

    def __init__(self, links: HostLinks, settings: ReadSettings) -> None:
        streams = count_streams(settings, len(links.links) + 1)
        self.settings = ReadSettings(streams=streams, block_bytes=links.block_bytes)
        self._links = links

    def blocks(self, num_blocks: int, prepare: object = None) -> list[memoryview]:  # noqa: ARG002 - see ReadBuffers
        """As many places for blocks as there are, or are needed."""
        size, view = self._links.block_bytes, self._links.window.view
        return [
            view[number * size : (number + 1) * size]
            for number in range(min(num_blocks, self._links.num_blocks))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _SeenSpans:
    """The spans of one file that one other rank reads and this rank wants, in order."""

    number: Ints
    begin: Ints
    end: Ints

    def parts(self, begin: int, end: int) -> Iterator[Part]:
        """Their parts in a block."""
        first, last = np.searchsorted(self.end, begin, side="right"), np.searchsorted(self.begin, end)
        rows = slice(int(first), int(last))
        for span, low, high in zip(
            self.number[rows].tolist(), self.begin[rows].tolist(), self.end[rows].tolist(), strict=True
        ):
            yield Part(span, max(low, begin), min(high, end))


class HostSharing:
    """What this rank shows to others of its host and sees of theirs, during one load."""

    def __init__(
        self, links: HostLinks, plan: LoadPlan, spans: Sequence[Span], sink: SpanSink, *, timeout_s: float
    ) -> None:
        self._links = links
        self._spans = spans
        self._sink = sink
        self._timeout_s = timeout_s
        self._seen = _seen_spans(plan, spans)
        self._missing = Counter[int]()
        for (rank, _), seen in self._seen.items():
            self._missing[rank] += int((seen.end - seen.begin).sum())
        self._viewers_of_read: dict[int, set[int]] = defaultdict(set)
        for read, rank in zip(plan.shown_read.tolist(), plan.shown_to.tolist(), strict=True):
            self._viewers_of_read[read].add(rank)
        self._viewers: Mapping[int, tuple[int, ...]] = {}
        self._blocks: Sequence[Block] = ()
        self._unreturned = Counter[int]()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._dead: set[int] = set()
        self._gave_up: set[int] = set()
        self._give_back: Callable[[int], None] = lambda _: None

    def expect_blocks(self, blocks: Sequence[Block], give_back: Callable[[int], None]) -> None:
        """Before the first block is read: which blocks this rank reads, and what frees a place again."""
        self._give_back = give_back
        self._blocks = blocks
        self._viewers = {
            number: tuple(sorted(ranks))
            for number, block in enumerate(blocks)
            if (ranks := set().union(*(self._viewers_of_read.get(part.span, ()) for part in block.parts)))
        }
        for viewers in self._viewers.values():
            self._unreturned.update(viewers)

    def viewers(self, number: int) -> int:
        """How many other ranks want this rank's block."""
        return len(self._viewers.get(number, ()))

    def show(self, number: int, place: int) -> None:
        """Tell them that the block lies at a place of the window; each returns it once."""
        block = self._blocks[number]
        for rank in self._viewers.get(number, ()):
            self._tell(rank, _SHOWN, place, block)

    def start(self, threads: Executor) -> list[Future[None]]:
        """Begin to copy what others show, in a thread for each of them."""
        return [threads.submit(self._serve, rank) for rank in self._links.links]

    def stop(self) -> None:
        """Tell the others that this rank gives up, unless it is done, and end all threads."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._dead = {rank for rank in self._links.links if self._is_gone(rank)}
            self._stopped.set()
        for rank, link in self._links.links.items():
            self._tell(rank, _GAVE_UP)
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)

    @property
    def seen_bytes(self) -> int:
        """What other ranks have read for this one."""
        return sum(int((seen.end - seen.begin).sum()) for seen in self._seen.values())

    def _serve(self, rank: int) -> None:
        while not self._is_done(rank):
            message = self._receive(rank)
            if self._stopped.is_set() and rank not in self._dead:
                return
            if not message:
                raise RankError(
                    f"Rank {rank} ended while it and this rank, on the same host, were loading",
                    fix="Look at the log of that rank, and for the kernel's OOM killer (dmesg).",
                )
            kind, place, file, begin, end = _MESSAGE.unpack(message)
            if kind == _SHOWN:
                self._copy(rank, place, file, begin, end)
                self._tell(rank, _RETURNED, place)
                continue
            if kind == _RETURNED:
                self._give_back(place)
                self._unreturned[rank] -= 1
                continue
            # Its failure is known to all with the next heartbeat, which stops this rank as well.
            if not self._stopped.wait(self._timeout_s):
                raise WaitTimeout(f"the failure of rank {rank} to be told", self._timeout_s)

    def _receive(self, rank: int) -> bytes:
        """The next message; nothing if there is none to come."""
        connection = self._links.links[rank].connection
        with suppress(ConnectionError):
            # Waits without the lock, in which a message is taken: `stop` sees it before or after that.
            connection.recv(1, socket.MSG_PEEK)
            with self._lock:
                message = connection.recv(_MESSAGE.size)
                if message and _MESSAGE.unpack(message)[0] == _GAVE_UP:
                    self._gave_up.add(rank)
                return message
        return b""

    def _copy(self, rank: int, place: int, file: int, begin: int, end: int) -> None:
        start = place * self._links.block_bytes
        content = self._links.links[rank].window.view[start : start + end - begin]
        for part in self._seen[rank, file].parts(begin, end):
            for at in range(part.begin, part.end, STEP_BYTES):
                stop = min(at + STEP_BYTES, part.end)
                self._sink.take(part.span, at, content[at - begin : stop - begin])
            self._sink.arrived(part)
            self._missing[rank] -= part.end - part.begin

    def _is_done(self, rank: int) -> bool:
        return not self._missing[rank] and not self._unreturned[rank]

    def _is_gone(self, rank: int) -> bool:
        if self._is_done(rank) or rank in self._gave_up:
            return False
        try:
            return not self._links.links[rank].connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _tell(self, rank: int, kind: int, place: int = 0, block: Block | None = None) -> None:
        span = (0, 0, 0) if block is None else (block.file, block.begin, block.end)
        # Whoever is gone is noticed by the thread that serves it.
        with suppress(ConnectionError):
            self._links.links[rank].connection.send(_MESSAGE.pack(kind, place, *span))


def _seen_spans(plan: LoadPlan, spans: Sequence[Span]) -> dict[tuple[int, int], _SeenSpans]:
    """By reader and file."""
    rows: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for number in range(plan.num_own, len(spans)):
        span = spans[number]
        rows[int(plan.reader[number]), span.file].append((number, span.begin, span.end))
    return {key: _SeenSpans(*np.array(own, dtype=np.int64).T) for key, own in rows.items()}
