"""Messages between the ranks of one host, through sockets: no collective library, no thread, no polling.

On two cores, a gather of four ranks through gloo takes 3.6 ms and one through these sockets 0.3 ms
(docs/decisions/032-messages-within-a-host.md). Invariant: either all ranks of a job are connected to each
other, or none is and the library that carries their messages goes on to do so. No message is taken for one of
another call: a rank may leave a call by an error of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import secrets
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

from penstock.cluster import rounds
from penstock.cluster.comm import BaseComm, PointToPoint, PollingWait, open_point_to_point
from penstock.cluster.rounds import Carrying, Round, name_call
from penstock.errors import RankError, Unavailable
from penstock.storage.process_id import name_host

Result = TypeVar("Result")

MOST_RANKS: Final = 16
"""Each has a socket for each other one; hosts with more ranks are rare."""
CONNECT_S: Final = 10.0
_RANK: Final = struct.Struct("<i")
_HEAD: Final = struct.Struct("<qI")
"""The size of a message, and of which call it is."""
_RECEIVED_BYTES: Final = 1 << 16
_PEER_CREDENTIALS: Final = struct.Struct("<iII")
_AWAITED: Final = "ranks of one host to connect"

logger = logging.getLogger(__name__)


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


@dataclass(slots=True)
class _Peer:
    """The socket to another rank, what is left to be sent, and what has come."""

    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    come: bytearray = field(default_factory=bytearray)

    def has_sent(self) -> bool:
        """Whether nothing is left, after sending what the other has room for."""
        while self.unsent:
            try:
                sent = self.connection.send(self.unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            del self.unsent[:sent]
        return True

    def has_message(self) -> bool:
        """Whether the next message is whole, after receiving what has come."""
        while len(self.come) < self._message_end():
            try:
                received = self.connection.recv(_RECEIVED_BYTES)
            except BlockingIOError:
                return False
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "it has ended or given up")
            self.come += received
        return True

    def take(self) -> tuple[int, bytes]:
        """Of which call the next message is, and the message, which is whole."""
        end = self._message_end()
        call: int = _HEAD.unpack_from(self.come)[1]
        message = bytes(self.come[_HEAD.size : end])
        del self.come[:end]
        return call, message

    def _message_end(self) -> int:
        if len(self.come) < _HEAD.size:
            return _HEAD.size
        size: int = _HEAD.unpack_from(self.come)[0]
        return _HEAD.size + size


class HostComm(BaseComm):
    """The ranks of `carried`, all on one host, whose collective calls go through sockets between them."""

    def __init__(self, carried: BaseComm, connections: Mapping[int, socket.socket]) -> None:
        super().__init__(carried.rank, carried.size, carried.host)
        self.carrier = carried.carrier
        self.timeout_s = carried.timeout_s
        self._carried = carried
        self._peers = {rank: _Peer(connection) for rank, connection in connections.items()}
        for connection in connections.values():
            connection.settimeout(0)
        _CONNECTED.add(self)

    def close(self) -> None:
        """End the connections, then what is below."""
        self.disconnect()
        self._carried.close()

    def disconnect(self) -> None:
        """Close this process's ends of the connections."""
        for peer in self._peers.values():
            peer.connection.close()

    def transfer(self) -> PointToPoint:
        """Transfers by the library below."""
        return open_point_to_point(self._carried)

    def _mover(self, wait: PollingWait) -> Callable[[Round], list[bytes]]:
        return partial(self._move, wait)

    def _carry_from(self, carrying: Carrying[Any], wait: PollingWait) -> None:
        carrying.run(partial(self._move, wait))

    def _move(self, wait: PollingWait, round_: Round) -> list[bytes]:
        call = name_call(self._call, wait.awaiting)
        for to, content in round_.sends:
            self._peers[to].unsent += _HEAD.pack(len(content), call) + content
        sending, awaited = {to for to, _ in round_.sends}, set(round_.sources)
        while True:
            sending = {rank for rank in sending if not self._ask(rank, _Peer.has_sent, wait)}
            awaited = {rank for rank in awaited if not self._ask(rank, _Peer.has_message, wait)}
            if not sending and not awaited:
                return [self._take(source, call, wait) for source in round_.sources]
            poll = select.poll()
            for rank in sending | awaited:
                events = select.POLLIN * (rank in awaited) | select.POLLOUT * (rank in sending)
                poll.register(self._peers[rank].connection, events)
            poll.poll(1e3 * wait.next_check_s())

    def _take(self, rank: int, call: int, wait: PollingWait) -> bytes:
        of_call, message = self._peers[rank].take()
        if of_call != call:
            raise RankError(
                f"Rank {rank} has left a call in which this rank waits for {wait.awaiting}",
                where=f"rank {self.rank} on {self.host}",
                fix="Look for what that rank raised before, and stop this job: its ranks are out of step.",
            )
        return message

    def _leave(self) -> None:
        self.disconnect()

    def _ask(self, rank: int, question: Callable[[_Peer], bool], wait: PollingWait) -> bool:
        try:
            return question(self._peers[rank])
        except OSError as error:
            raise RankError(
                f"The connection between ranks broke while waiting for {wait.awaiting}: "
                f"rank {rank}: {error.strerror}",
                where=f"rank {self.rank} on {self.host}",
                fix="Look at the log of that rank, and for the kernel's OOM killer (dmesg).",
            ) from error

    def _move_nothing(self, wait: PollingWait) -> None:
        self._run(rounds.any_of_all(self.rank, self.size, own=False), wait)

    def _broadcast_bytes(self, payload: bytes | None, wait: PollingWait) -> bytes:
        return self._run(rounds.tell_all(self.rank, self.size, payload or b""), wait)

    def _gather_bytes(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        told = self._run(rounds.tell_rank0(self.rank, self.size, payload), wait)
        packed = self._run(rounds.tell_all(self.rank, self.size, pickle.dumps(told)), wait)
        gathered: list[bytes] = pickle.loads(packed)  # noqa: S301 - ranks of one job trust each other
        return gathered

    def _gather_bytes_on_rank0(self, payload: bytes, wait: PollingWait) -> list[bytes]:
        return self._run(rounds.tell_rank0(self.rank, self.size, payload), wait)

    def _run(self, operation: rounds.Rounds[Result], wait: PollingWait) -> Result:
        carrying = Carrying(operation)
        carrying.advance(None)
        self._carry_from(carrying, wait)
        return carrying.result()


_CONNECTED: Final[WeakSet[HostComm]] = WeakSet()


def _disconnect_fork() -> None:
    for comm in list(_CONNECTED):
        comm.disconnect()


# A rank's end is the end of its sockets only if none of its forks, like workers of a DataLoader, has them.
os.register_at_fork(after_in_child=_disconnect_fork)


_REFUSED: Final[list[str]] = []
"""Why ranks of this process could not connect: they do not try again, which takes `CONNECT_S` each time."""


def connect_within_host(comm: BaseComm) -> BaseComm:
    """The same ranks, connected by sockets if all of them are on one host and can be. Collective."""
    if not 1 < comm.size <= MOST_RANKS:
        return comm
    found: dict[int, Greeting] = {}
    with ExitStack() as undo:
        own, refusal = None, "".join(_REFUSED[:1])
        try:
            if not refusal:
                own = Listener.open(comm.size, socket.SOCK_STREAM)
                undo.callback(own.listening.close)
        except OSError as error:
            refusal = str(error)
        seats = comm.gather((name_host(), own.address if own else ""), awaiting=_AWAITED)
        if len({host for host, _ in seats}) > 1 or not all(host and address for host, address in seats):
            return comm
        try:
            if own is not None:
                found = own.connect(comm.rank, {rank: address for rank, (_, address) in enumerate(seats)})
        except (OSError, Unavailable) as error:
            refusal = str(error)
        refusals = comm.gather(refusal, awaiting=_AWAITED)
    connections = {rank: greeting.connection for rank, greeting in found.items()}
    if not any(refusals):
        return HostComm(comm, connections)
    for connection in connections.values():
        connection.close()
    reason = next(filter(None, refusals))
    logger.info("The ranks of this host have no sockets between them: %s", reason)
    _REFUSED.append(reason)
    return comm
