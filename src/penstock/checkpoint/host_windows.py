"""Shared memory within a host: a rank shows the blocks it reads to the others, which copy from its window.

A window is a memfd, so no size limit of /dev/shm applies, and it vanishes with the last process that uses it,
however that process ends. If the window is in huge pages, its rank reads directly into it; otherwise the rank
copies each block that other ranks want into it. The rank announces the block's place in the window; the
others copy what they want and return the place, which is reused once all have returned it. Invariants: the
content of a place does not change until all ranks have returned it and the reader has finished with it;
copying out of a window never waits for another rank, so ranks cannot deadlock; a rank that fails announces
it, so a connection that ends without an announcement means that the rank died.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.plan.load_plan import LoadPlan
from penstock.cluster.comm import Comm
from penstock.errors import RankError, Unavailable, WaitTimeout
from penstock.storage.aligned import PAGE_BYTES, address_of, copy_bytes, round_up
from penstock.storage.capabilities import no_thread
from penstock.storage.files.system_calls import call_uninterrupted, libc, raise_on_failure
from penstock.transfer.buffers import HUGE_PAGE_BYTES
from penstock.transfer.reader import Block, BlockViewers, Part, ReadSettings, Span, SpanSink

logger = logging.getLogger(__name__)
SHARED_BYTES = 128 << 20
"""The size of the windows of all ranks of a host together."""
MOST_BLOCK_BYTES = 4 << 20
"""The largest block in huge pages: larger blocks save messages, smaller ones stay in processor caches."""
MOST_COPIED_BLOCK_BYTES = 2 << 20
"""The largest block in small pages: a new page costs as much as copying its bytes."""
LEAST_STREAMS = 2
COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1. It provides huge pages even if the system's settings give none to shared
memory.
"""
_MAP_FIXED = 0x10
_HELLO = struct.Struct("<iq")
"""The first message on a connection: the sender's rank, and the size of its window."""
CONNECT_S: Final = 10.0
_PEER_CREDENTIALS: Final = struct.Struct("<iII")


def count_streams(settings: ReadSettings, num_ranks: int) -> int:
    """Return the number of streams of each rank.

    All ranks of a host together have twice as many as one rank alone would have, but each has at least
    `LEAST_STREAMS`.
    """
    return max(LEAST_STREAMS, min(settings.streams, 2 * settings.streams // num_ranks))


@dataclass(frozen=True, slots=True)
class Window:
    """Memory that one rank of a host writes and the others read."""

    descriptor: int
    view: memoryview
    is_huge: bool = False
    """True if the memory is in huge pages, so that devices read into it as fast as into any other memory."""

    @classmethod
    def make(cls, size_bytes: int, *, is_huge: bool) -> Window:
        """Allocate new memory, in huge pages if `is_huge`; raise `OSError` if there is not enough."""
        with ExitStack() as undo:
            descriptor = os.memfd_create("penstock-window", os.MFD_CLOEXEC)
            undo.callback(os.close, descriptor)
            if is_huge:
                mapped_bytes = round_up(size_bytes, HUGE_PAGE_BYTES)
                os.ftruncate(descriptor, mapped_bytes)
                for begin in range(0, mapped_bytes, HUGE_PAGE_BYTES):
                    # Pages that do not exist yet are not collapsed.
                    os.pwrite(descriptor, b"\0", begin)
                view = _map_shared(descriptor, mapped_bytes)
                address, size = ctypes.c_void_p(address_of(view)), ctypes.c_size_t(len(view))
                raise_on_failure(libc().madvise(address, size, COLLAPSE))
            else:
                # Allocates the pages, so that touching them can never end the process. They are cleared on
                # first write, while the device is reading.
                call_uninterrupted(os.posix_fallocate, descriptor, 0, size_bytes)
                view = _map_shared(descriptor, size_bytes)
            undo.pop_all()
        return cls(descriptor, view[:size_bytes], is_huge=is_huge)

    @classmethod
    def open(cls, descriptor: int, size_bytes: int) -> Window:
        """Map another rank's memory."""
        return cls(descriptor, _map_shared(descriptor, size_bytes))

    def close(self) -> None:
        """Close the file; the memory is freed with its last view in any process."""
        os.close(self.descriptor)


def _map_shared(descriptor: int, size_bytes: int) -> memoryview:
    """Map a file at a huge-page boundary. With small pages, mapping memory costs as much as copying it."""
    whole = memoryview(mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE))
    lead = -address_of(whole) % HUGE_PAGE_BYTES
    view = whole[lead : lead + size_bytes]
    map_memory = libc().mmap
    map_memory.restype = ctypes.c_void_p
    mapped = map_memory(
        ctypes.c_void_p(address_of(view)),
        ctypes.c_size_t(size_bytes),
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_SHARED | _MAP_FIXED,
        descriptor,
        ctypes.c_long(0),
    )
    if mapped != address_of(view):
        raise_on_failure(-1)
    return view


@dataclass(frozen=True, slots=True)
class HostLink:
    """A rank's connection to another rank of its host, and the other rank's window."""

    connection: socket.socket
    window: Window

    def close(self) -> None:
        """End the connection after reading what is left in it: otherwise, sent messages would be lost."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
            while self.connection.recv(64):
                continue
        self.connection.close()
        self.window.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """One rank's window, which is divided into blocks, and its links to other ranks by number."""

    window: Window
    block_bytes: int
    links: Mapping[int, HostLink]

    def places(self) -> list[memoryview]:
        """Return the parts of the window, one for each block."""
        starts = range(0, len(self.window.view), self.block_bytes)
        return [self.window.view[start : start + self.block_bytes] for start in starts]

    def close(self) -> None:
        """Close the links and the window. What other ranks have mapped remains valid for them."""
        for link in self.links.values():
            link.close()
        self.window.close()


def connect_host(
    comm: Comm, ranks: Sequence[int], *, settings: ReadSettings, read_bytes: int
) -> HostLinks | None:
    """Connect the `ranks` of this host with each other. Collective over all ranks of `comm`.

    `read_bytes` is the amount that this rank reads itself. Returns None if the rank is alone on its host, or
    if the host's ranks cannot be connected, in which case the log gives the reason. Either all ranks of a
    host are connected, or none is.
    """
    address, refusal, links = f"penstock-{secrets.token_hex(16)}", "", None
    with ExitStack() as closing, ExitStack() as undo:
        listening = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            if len(ranks) > 1:
                window, block_bytes = _make_window(len(ranks), settings, read_bytes)
                undo.callback(window.close)
                # An address in the abstract namespace leaves no file behind.
                listening.bind(f"\0{address}")
                listening.settimeout(CONNECT_S)
                listening.listen(len(ranks))
        except OSError as error:
            refusal = str(error)
        seats = comm.gather((address, refusal), awaiting="the addresses of ranks of one host")
        refusal = next((seats[rank][1] for rank in ranks if seats[rank][1]), "")
        if len(ranks) > 1 and not refusal:
            try:
                connected = _connect(listening, comm.rank, {rank: seats[rank][0] for rank in ranks}, window)
                for link in connected.values():
                    undo.callback(link.close)
                links = HostLinks(window=window, block_bytes=block_bytes, links=connected)
            except (OSError, Unavailable) as error:
                refusal = str(error)
        refusals = comm.gather(refusal, awaiting="ranks of one host to connect")
        refusal = next((refusals[rank] for rank in ranks if refusals[rank]), "")
        if not refusal:
            undo.pop_all()
            return links
    if comm.rank == ranks[0]:
        logger.warning(
            "The %d ranks of this host cannot share memory, so they send each other what several want: %s",
            len(ranks),
            refusal,
        )
    return None


def _connect(
    listening: socket.socket, rank: int, addresses: Mapping[int, str], window: Window
) -> dict[int, HostLink]:
    """Connect to the ranks with lower numbers, accept the others, and exchange windows with each.

    Raises `Unavailable` or `OSError` on failure.
    """
    found: dict[int, HostLink] = {}
    hello = _HELLO.pack(rank, len(window.view))
    with ExitStack() as undo:
        connections = []
        for other in sorted(addresses.keys() - {rank}):
            if other < rank:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(connection.close)
                connection.settimeout(CONNECT_S)
                connection.connect(f"\0{addresses[other]}")
            else:
                connection, _ = listening.accept()
                undo.callback(connection.close)
                connection.settimeout(CONNECT_S)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            if (user := _PEER_CREDENTIALS.unpack(credentials)[1]) != os.geteuid():
                raise Unavailable(f"A process of user {user} has connected in a rank's place")
            socket.send_fds(connection, [hello], [window.descriptor])
            connections.append(connection)
        for connection in connections:
            answer, descriptors, _, _ = socket.recv_fds(connection, len(hello), 1)
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            if len(answer) != len(hello) or len(descriptors) != 1:
                raise Unavailable("A rank of this host ended while the others connected to it")
            other, size_bytes = _HELLO.unpack(answer)
            found[other] = HostLink(connection, Window.open(descriptors[0], size_bytes))
            connection.settimeout(None)
        if found.keys() != addresses.keys() - {rank}:
            raise Unavailable("Processes other than the ranks of this host have connected")
        undo.pop_all()
    return found


def _make_window(num_ranks: int, settings: ReadSettings, read_bytes: int) -> tuple[Window, int]:
    """Make a window, and return it with the size of its blocks.

    Each stream has two blocks if blocks are read into the window, or one if they are copied into it.
    """
    room, streams = SHARED_BYTES // num_ranks, count_streams(settings, num_ranks)

    def divide(most_bytes: int, num_blocks: int) -> tuple[int, int]:
        """Return the number of blocks and their size."""
        size = min(settings.fit(read_bytes).block_bytes, most_bytes, room // num_blocks)
        size -= size % PAGE_BYTES
        return max(1, min(num_blocks, -(-read_bytes // size))), size

    if room >= HUGE_PAGE_BYTES:
        num_blocks, block_bytes = divide(MOST_BLOCK_BYTES, 2 * streams)
        try:
            return Window.make(num_blocks * block_bytes, is_huge=True), block_bytes
        except OSError as error:
            logger.info("The ranks of this host share small pages, which takes one more copy: %s", error)
    num_blocks, block_bytes = divide(MOST_COPIED_BLOCK_BYTES, streams)
    return Window.make(num_blocks * block_bytes, is_huge=False), block_bytes


_MESSAGE = struct.Struct("<iqqqq")


_SHOWN, _RETURNED, _GAVE_UP = range(3)


def settings_for_sharing(links: HostLinks, settings: ReadSettings) -> ReadSettings:
    """Return the settings for reading blocks that fit into the windows of this host's ranks."""
    streams = count_streams(settings, len(links.links) + 1)
    return ReadSettings(streams=streams, block_bytes=links.block_bytes)


class HostSharing(BlockViewers):
    """Shows this rank's blocks to the other ranks of its host and copies from theirs, during one load."""

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
        self._seen: dict[tuple[int, int], list[int]] = defaultdict(list)
        """For each rank and file, the spans, in order, that this rank needs from what that rank reads."""
        self._missing = Counter[int]()
        for number in range(plan.num_own, len(spans)):
            rank = int(plan.reader[number])
            self._seen[rank, spans[number].file].append(number)
            self._missing[rank] += spans[number].end - spans[number].begin
        self.seen_bytes = self._missing.total()
        """The number of bytes that other ranks read for this one."""
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
        """Prepare for the blocks that this rank will read.

        Return the window's places if blocks are read into it, and otherwise None.
        """
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
        """Copy a block into the window unless it is there, and announce it to the ranks that want it."""
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
            self._send(rank, _SHOWN, place * self._links.block_bytes, block)

    def release(self, buffer: int) -> None:
        """Take back a buffer from the reader; it may be a place in the window."""
        if self._reads_into_window:
            self._return_place(buffer)
        else:
            self._reuse(buffer)

    def _take_place(self, num_viewing: int) -> int | None:
        """Take a free place in the window, which `num_viewing` ranks will return; None after `stop`."""
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
        """Begin to copy what other ranks show, in one thread for each of them."""
        try:
            return [threads.submit(self._serve, rank) for rank in self._links.links]
        except RuntimeError as error:
            raise no_thread(error) from error

    def stop(self) -> None:
        """End all threads and, unless this rank is done, announce to the others that it gives up."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._dead = {rank for rank in self._links.links if self._is_gone(rank)}
            self._stopped.set()
        with self._room:
            self._room.notify_all()
        for rank, link in self._links.links.items():
            self._send(rank, _GAVE_UP)
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)

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
                self._send(rank, _RETURNED, position)
                continue
            if kind == _RETURNED:
                self._return_place(position // self._links.block_bytes)
                self._unreturned[rank] -= 1
                continue
            # All ranks learn of the failure with the next heartbeat, which stops this rank as well.
            if not self._stopped.wait(self._timeout_s):
                raise WaitTimeout(f"the failure of rank {rank} to be reported", self._timeout_s)

    def _receive(self, rank: int) -> bytes:
        """Receive the next message; b"" once there are no more."""
        connection = self._links.links[rank].connection
        with suppress(ConnectionError):
            # Waits without holding the lock. The message is taken under the lock, so `stop` runs entirely
            # before or after.
            connection.recv(1, socket.MSG_PEEK)
            with self._lock:
                message = connection.recv(_MESSAGE.size)
                if message and _MESSAGE.unpack(message)[0] == _GAVE_UP:
                    self._gave_up.add(rank)
                return message
        return b""

    def _copy(self, rank: int, position: int, file: int, begin: int, end: int) -> None:
        content = self._links.links[rank].window.view[position : position + end - begin]
        numbers = self._seen[rank, file]
        first = bisect_right(numbers, begin, key=lambda number: self._spans[number].end)
        for number in numbers[first:]:
            span = self._spans[number]
            if span.begin >= end:
                break
            part = Part(number, max(span.begin, begin), min(span.end, end))
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

    def _send(self, rank: int, kind: int, position: int = 0, block: Block | None = None) -> None:
        span = (0, 0, 0) if block is None else (block.file, block.begin, block.end)
        # If the other rank is gone, the thread that serves it will notice.
        with suppress(ConnectionError):
            self._links.links[rank].connection.send(_MESSAGE.pack(kind, position, *span))
