"""Connections between the ranks of one host, which end with their process, and memory without a name.

A window is a memfd, so no size limit of /dev/shm applies to it, and it vanishes with the last process that
uses it, however that ends. Invariant: either all ranks of a host are connected to each other, or none is and
they exchange messages as ranks of different hosts do.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from penstock.cluster.comm import Comm
from penstock.errors import Unavailable
from penstock.storage.aligned import PAGE_BYTES, address_of, round_up
from penstock.storage.files.system_calls import raise_on_failure
from penstock.transfer.buffers import HUGE_PAGE_BYTES
from penstock.transfer.reader import ReadSettings

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

SHARED_BYTES = 128 << 20
"""Of the windows of all ranks of a host together."""
MOST_BLOCK_BYTES = 4 << 20
"""Of a window in huge pages: larger blocks save messages, smaller ones stay in the processor's cache."""
MOST_COPIED_BLOCK_BYTES = 2 << 20
"""Of a window in small pages: new ones cost as much as a copy of as many bytes."""
LEAST_STREAMS = 2

COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1: huge pages, also where the system gives shared memory none by itself."""
_MAP_FIXED = 0x10
_SIZE = struct.Struct("<q")
CONNECT_S: Final = 10.0
_RANK: Final = struct.Struct("<i")
_PEER_CREDENTIALS: Final = struct.Struct("<iII")


@dataclass(frozen=True, slots=True)
class Greeting:
    """A connection to another rank, and what it said first: some bytes, and perhaps a descriptor."""

    connection: socket.socket
    text: bytes
    descriptors: Sequence[int]


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a rank listens. The address is in the abstract namespace, and leaves no file behind."""

    address: str
    listening: socket.socket

    @classmethod
    def open(cls, num_ranks: int, kind: socket.SocketKind) -> Listener:
        """Listen for so many others; `kind` is of the connections."""
        address = f"penstock-{secrets.token_hex(16)}"
        with ExitStack() as undo:
            listening = socket.socket(socket.AF_UNIX, kind)
            undo.callback(listening.close)
            listening.settimeout(CONNECT_S)
            listening.bind(f"\0{address}")
            listening.listen(num_ranks)
            undo.pop_all()
        return cls(address, listening)

    def connect(
        self, rank: int, addresses: Mapping[int, str], text: bytes = b"", descriptors: Sequence[int] = ()
    ) -> dict[int, Greeting]:
        """Connect to the ranks below this one, and wait for those above; the greeting of each.

        All say texts of one length. `Unavailable` or `OSError` if that fails.
        """
        found: dict[int, Greeting] = {}
        hello = _RANK.pack(rank) + text
        with ExitStack() as undo:
            connections = []
            for other in addresses:
                if other == rank:
                    continue
                if other < rank:
                    connection = socket.socket(socket.AF_UNIX, self.listening.type)
                    undo.callback(connection.close)
                    connection.settimeout(CONNECT_S)
                    connection.connect(f"\0{addresses[other]}")
                else:
                    connection, _ = self.listening.accept()
                    undo.callback(connection.close)
                    connection.settimeout(CONNECT_S)
                    _require_same_user(connection)
                socket.send_fds(connection, [hello], descriptors)
                connections.append(connection)
            for connection in connections:
                heard, handed, _, _ = socket.recv_fds(connection, len(hello), len(descriptors))
                undo.callback(_close_all, handed)
                if len(heard) != len(hello) or len(handed) != len(descriptors):
                    raise Unavailable("A rank of this host ended while the others connected to it")
                (other,) = _RANK.unpack_from(heard)
                found[other] = Greeting(connection, heard[_RANK.size :], handed)
                connection.settimeout(None)
            if found.keys() != addresses.keys() - {rank}:
                raise Unavailable("Other processes than the ranks of this host have connected")
            undo.pop_all()
        return found


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _require_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    user = _PEER_CREDENTIALS.unpack(credentials)[1]
    if user != os.geteuid():
        raise Unavailable(f"A process of user {user} has connected in a rank's place")


def count_streams(settings: ReadSettings, num_ranks: int) -> int:
    """Of each of a host's ranks, which read for each other: together twice as many as one alone."""
    return max(LEAST_STREAMS, min(settings.streams, 2 * settings.streams // num_ranks))


@dataclass(frozen=True, slots=True)
class Window:
    """Memory that one rank of a host writes and the others read."""

    descriptor: int
    view: memoryview
    is_huge: bool = False
    """Whether it is in huge pages, so that devices read into it as fast as into any memory."""

    @classmethod
    def make_huge(cls, size_bytes: int) -> Window:
        """New memory in huge pages; `OSError` where there is not as much."""
        with ExitStack() as undo:
            descriptor = os.memfd_create("penstock-window", os.MFD_CLOEXEC)
            undo.callback(os.close, descriptor)
            huge_bytes = round_up(size_bytes, HUGE_PAGE_BYTES)
            os.ftruncate(descriptor, huge_bytes)
            for begin in range(0, huge_bytes, HUGE_PAGE_BYTES):
                # Where there is nothing yet, nothing is collapsed.
                os.pwrite(descriptor, b"\0", begin)
            view = _map_shared(descriptor, huge_bytes)
            _advise(view, COLLAPSE)
            undo.pop_all()
        return cls(descriptor, view[:size_bytes], is_huge=True)

    @classmethod
    def make(cls, size_bytes: int) -> Window:
        """New memory in small pages; `OSError` where there is not as much."""
        with ExitStack() as undo:
            descriptor = os.memfd_create("penstock-window", os.MFD_CLOEXEC)
            undo.callback(os.close, descriptor)
            # Provides the pages, so that no touch of them can end the process. They are cleared when they are
            # first written, which is while the device reads.
            os.posix_fallocate(descriptor, 0, size_bytes)
            view = _map_shared(descriptor, size_bytes)
            undo.pop_all()
        return cls(descriptor, view)

    @classmethod
    def open(cls, descriptor: int, size_bytes: int) -> Window:
        """The memory of another rank."""
        return cls(descriptor, _map_shared(descriptor, size_bytes))

    def close(self) -> None:
        """Close the file; the memory is freed with the last view of it in any process."""
        os.close(self.descriptor)


def _map_shared(descriptor: int, size_bytes: int) -> memoryview:
    """A file's memory, beginning at a huge page: with small pages, mapping it costs as much as copying it."""
    whole = memoryview(mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE))
    lead = -address_of(whole) % HUGE_PAGE_BYTES
    view = whole[lead : lead + size_bytes]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    mapped = libc.mmap(
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


def _advise(view: memoryview, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size_bytes = ctypes.c_void_p(address_of(view)), ctypes.c_size_t(len(view))
    raise_on_failure(libc.madvise(address, size_bytes, advice))


@dataclass(frozen=True, slots=True)
class HostLink:
    """A rank's connection to another one of its host, and that one's window."""

    connection: socket.socket
    window: Window

    def close(self) -> None:
        """End the connection. What is left to receive is read, or else what was sent would be lost."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
            while self.connection.recv(64):
                continue
        self.connection.close()
        self.window.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """One rank's window, which has room for `num_blocks`, and its links by rank."""

    window: Window
    block_bytes: int
    num_blocks: int
    links: Mapping[int, HostLink]

    def places(self) -> list[memoryview]:
        """The window's parts for one block each."""
        starts = range(0, self.num_blocks * self.block_bytes, self.block_bytes)
        return [self.window.view[start : start + self.block_bytes] for start in starts]

    def close(self) -> None:
        """Leave; the others may use what they have got."""
        for link in self.links.values():
            link.close()
        self.window.close()


@dataclass(frozen=True, slots=True)
class _Seat:
    """Where a rank listens, or why it does not."""

    address: str = ""
    refusal: str = ""


def connect_host(
    comm: Comm, ranks: Sequence[int], *, settings: ReadSettings, read_bytes: int, is_needed: bool
) -> HostLinks | None:
    """Connect this rank with all others of its host, `ranks`. Collective over all ranks of `comm`.

    `read_bytes` is what this rank reads itself. None if no rank of the job needs it, or where it is not
    possible, which the log explains.
    """
    if not any(comm.gather(is_needed, awaiting="which ranks share bytes")):
        return None
    with ExitStack() as undo:
        links, refusal, own = None, "", None
        try:
            if len(ranks) > 1:
                own = _Seating.open(len(ranks), settings, read_bytes)
                undo.callback(own.listener.listening.close)
        except (OSError, Unavailable) as error:
            refusal = str(error)
        seat = _Seat(own.listener.address if own else "", refusal)
        seats = _tell_host(comm, ranks, seat, "the addresses of ranks of one host")
        refusal = next((seats[rank].refusal for rank in ranks if seats[rank].refusal), "")
        if own is not None and not refusal:
            try:
                links = own.connect(comm.rank, {rank: seats[rank].address for rank in ranks})
            except (OSError, Unavailable) as error:
                refusal = str(error)
        refusals = _tell_host(comm, ranks, refusal, "ranks of one host to connect")
    refusal = next((refusals[rank] for rank in ranks if refusals[rank]), "")
    if not refusal:
        return links
    if links is not None:
        links.close()
    elif own is not None:
        own.links.close()
    if comm.rank == ranks[0]:
        logger.warning(
            "The %d ranks of this host cannot share memory, so they send each other what several want: %s",
            len(ranks),
            refusal,
        )
    return None


def _tell_host(comm: Comm, ranks: Sequence[int], own: Told, awaiting: str) -> dict[int, Told]:
    """What each rank of this host says."""
    told = comm.gather(own, awaiting=awaiting)
    return {rank: told[rank] for rank in ranks}


def _make_window(num_ranks: int, settings: ReadSettings, read_bytes: int) -> tuple[Window, int]:
    """Room for two blocks of each stream if it reads into the window, for one if it copies; their size."""
    room, streams = SHARED_BYTES // num_ranks, count_streams(settings, num_ranks)

    def divide(most_bytes: int, num_blocks: int) -> tuple[int, int]:
        """Into how many blocks of which size."""
        size = min(settings.fit(read_bytes).block_bytes, most_bytes, room // num_blocks)
        size -= size % PAGE_BYTES
        return max(1, min(num_blocks, -(-read_bytes // size))), size

    if room >= HUGE_PAGE_BYTES:
        num_blocks, block_bytes = divide(MOST_BLOCK_BYTES, 2 * streams)
        try:
            return Window.make_huge(num_blocks * block_bytes), block_bytes
        except OSError as error:
            logger.info("The ranks of this host share small pages, which takes one more copy: %s", error)
    num_blocks, block_bytes = divide(MOST_COPIED_BLOCK_BYTES, streams)
    return Window.make(num_blocks * block_bytes), block_bytes


@dataclass(frozen=True, slots=True)
class _Seating:
    """Where a rank listens, and its window, which has no links yet."""

    listener: Listener
    links: HostLinks

    @classmethod
    def open(cls, num_ranks: int, settings: ReadSettings, read_bytes: int) -> _Seating:
        with ExitStack() as undo:
            listener = Listener.open(num_ranks, socket.SOCK_SEQPACKET)
            undo.callback(listener.listening.close)
            window, block_bytes = _make_window(num_ranks, settings, read_bytes)
            undo.pop_all()
        num_blocks = len(window.view) // block_bytes
        return cls(
            listener, HostLinks(window=window, block_bytes=block_bytes, num_blocks=num_blocks, links={})
        )

    def connect(self, rank: int, addresses: Mapping[int, str]) -> HostLinks:
        """Connect to the other ranks, and get their windows for this one's."""
        window = self.links.window
        greetings = self.listener.connect(rank, addresses, _SIZE.pack(len(window.view)), [window.descriptor])
        return replace(
            self.links,
            links={
                other: HostLink(said.connection, Window.open(said.descriptors[0], *_SIZE.unpack(said.text)))
                for other, said in greetings.items()
            },
        )
