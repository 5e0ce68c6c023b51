"""One copy a host: a rank shows the blocks it reads to the ranks of its host, which copy from its window.

A reader reads into its window if that is in huge pages, and else copies each block that others want into it.
It tells them where; they copy what they want and return it, and the reader uses the place again when all
have. Invariants: a block's place does not change before all have returned it, and the reader has passed it
on; copying out of a window never waits for another rank, so ranks cannot deadlock; a rank that fails tells
the others, and a connection that ends without that is a rank that died.
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
from penstock.checkpoint.plan.load_plan import LoadPlan
from penstock.checkpoint.state.regions import Ints
from penstock.errors import RankError, WaitTimeout
from penstock.storage.aligned import address_of, copy_bytes
from penstock.storage.capabilities import no_thread
from penstock.transfer.reader import Block, BlockViewers, Part, ReadSettings, Span, SpanSink

_MESSAGE = struct.Struct("<iqqqq")
_SHOWN, _RETURNED, _GAVE_UP = range(3)


def settings_for_sharing(links: HostLinks, settings: ReadSettings) -> ReadSettings:
    """For reads that are shown to the ranks of this host: blocks fit into windows."""
    streams = count_streams(settings, len(links.links) + 1)
    return ReadSettings(streams=streams, block_bytes=links.block_bytes)


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


class HostSharing(BlockViewers):
    """What this rank shows to others of its host and sees of theirs, during one load."""

    def __init__(
        self,
        links: HostLinks,
        plan: LoadPlan,
        spans: Sequence[Span],
        sink: SpanSink,
        *,
        timeout_s: float,
        reads_into_window: bool = True,
    ) -> None:
        self._links = links
        self._places = links.places()
        self._reads_into_window = reads_into_window and links.window.is_huge and len(plan.shown_read) > 0
        self._reuse: Callable[[int], None] = lambda _: None
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
        self._unreturned = Counter[int]()
        self._free_places = list(range(len(self._places)))
        self._num_using = Counter[int]()
        self._room = threading.Condition()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._dead: set[int] = set()
        self._gave_up: set[int] = set()

    def expect_blocks(
        self, blocks: Sequence[Block], reuse: Callable[[int], None]
    ) -> Sequence[memoryview] | None:
        """Before the first block is read: which blocks this rank reads. Returns the window, to read into."""
        self._reuse = reuse
        self._viewers = {
            number: tuple(sorted(ranks))
            for number, block in enumerate(blocks)
            if (ranks := set().union(*(self._viewers_of_read.get(part.span, ()) for part in block.parts)))
        }
        for viewers in self._viewers.values():
            self._unreturned.update(viewers)
        return self._places if self._reads_into_window else None

    def show(self, number: int, block: Block, buffer: int, content: memoryview) -> None:
        """Tell those who want a block where it is, once it is in the window and there was room for it."""
        viewers = self._viewers.get(number, ())
        if self._reads_into_window:
            place: int | None = buffer
            self._num_using[buffer] = len(viewers) + 1
        else:
            place = self._take_place(len(viewers)) if viewers else None
        if not viewers or place is None:
            return
        memory = self._places[place][: len(content)]
        if address_of(content) != address_of(memory):
            copy_bytes(memory, content)
        for rank in viewers:
            self._tell(rank, _SHOWN, place * self._links.block_bytes, block)

    def release(self, buffer: int) -> None:
        """The reader has done with a buffer, which may be a place of the window."""
        if self._reads_into_window:
            self._return_place(buffer)
        else:
            self._reuse(buffer)

    def _take_place(self, num_viewing: int) -> int | None:
        """A free place of the window, which so many ranks will return; None after `stop`."""
        with self._room:
            self._room.wait_for(lambda: self._free_places or self._stopped.is_set())
            if self._stopped.is_set():
                return None
            place = self._free_places.pop()
            self._num_using[place] = num_viewing
            return place

    def _return_place(self, place: int) -> None:
        with self._room:
            self._num_using[place] -= 1
            if self._num_using[place]:
                return
            if not self._reads_into_window:
                self._free_places.append(place)
                self._room.notify()
                return
        self._reuse(place)

    def start(self, threads: Executor) -> list[Future[None]]:
        """Begin to copy what others show, in a thread for each of them."""
        try:
            return [threads.submit(self._serve, rank) for rank in self._links.links]
        except RuntimeError as error:
            raise no_thread(error) from error

    def stop(self) -> None:
        """Tell the others that this rank gives up, unless it is done, and end all threads."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._dead = {rank for rank in self._links.links if self._is_gone(rank)}
            self._stopped.set()
        with self._room:
            self._room.notify_all()
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
            kind, position, file, begin, end = _MESSAGE.unpack(message)
            if kind == _SHOWN:
                self._copy(rank, position, file, begin, end)
                self._tell(rank, _RETURNED, position)
                continue
            if kind == _RETURNED:
                self._return_place(position // self._links.block_bytes)
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

    def _copy(self, rank: int, position: int, file: int, begin: int, end: int) -> None:
        content = self._links.links[rank].window.view[position : position + end - begin]
        for part in self._seen[rank, file].parts(begin, end):
            self._sink.take(part.span, part.begin, content[part.begin - begin : part.end - begin])
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

    def _tell(self, rank: int, kind: int, position: int = 0, block: Block | None = None) -> None:
        span = (0, 0, 0) if block is None else (block.file, block.begin, block.end)
        # Whoever is gone is noticed by the thread that serves it.
        with suppress(ConnectionError):
            self._links.links[rank].connection.send(_MESSAGE.pack(kind, position, *span))


def _seen_spans(plan: LoadPlan, spans: Sequence[Span]) -> dict[tuple[int, int], _SeenSpans]:
    """By reader and file."""
    rows: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for number in range(plan.num_own, len(spans)):
        span = spans[number]
        rows[int(plan.reader[number]), span.file].append((number, span.begin, span.end))
    return {key: _SeenSpans(*np.array(own, dtype=np.int64).T) for key, own in rows.items()}
