"""What the processes that watch over ranks say to each other: one JSON line a message, on a socket.

Apart from the communicators on purpose: this must work when ranks are stuck, dead or not yet joined.
Invariant: nothing is believed before the other side has proved that it knows the job's token.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum

from penstock.errors import PenstockError, RankError, RankFailed, Unavailable, UsageError

LONGEST_LINE_BYTES = 256 * 1024
READ_BYTES = 64 * 1024
SEND_LIMIT_S = 10.0


class Ending(StrEnum):
    """How a rank can go wrong, as far as the job's exit code and its last words are concerned."""

    FAILED = "failed"
    TIMED_OUT = "timed out"
    USAGE = "usage"
    UNAVAILABLE = "unavailable"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """Server to anyone who connects: prove yourself with this."""

    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A guard's first word, with the proof."""

    rank: int
    host: str
    pid: int
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Rank to its guard, in a job that someone else launched: where the server of this job listens."""

    address: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank has waited long in its `call`-th collective call."""

    rank: int
    call: int
    awaiting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why the job ends. `detail` is for --debug: a traceback, or what was said on standard error."""

    rank: int
    host: str
    cause: str
    ending: Ending = Ending.FAILED
    call: int = 0
    detail: str = ""

    def error(self) -> PenstockError:
        """The error that the launching process raises for it."""
        error: PenstockError
        if self.ending is Ending.USAGE:
            error = UsageError(self.cause)
        elif self.ending is Ending.UNAVAILABLE:
            error = Unavailable(self.cause)
        else:
            error = RankFailed(self.rank, self.host, self.cause)
        if self.detail:
            error.add_note(self.detail)
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The rank ended in good order. `exit_code` is its own business: a verdict, not a failure."""

    rank: int
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Server to all guards: end your rank, and all that it started."""

    failure: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A guard's answer to `Stop`: nothing of its rank is left."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Server to all guards: every rank has finished or is gone, so go yourselves."""


Message = Challenge | Hello | Meet | Late | Failed | Finished | Stop | Gone | Leave
_KINDS = {kind.__name__: kind for kind in (Challenge, Hello, Meet, Late, Failed, Finished, Stop, Gone, Leave)}


class ChannelBroken(RankError, ConnectionError):
    """The other side is gone, or speaks another language."""


def encode(message: Message) -> bytes:
    """One line, its end included."""
    return json.dumps({type(message).__name__: asdict(message)}, ensure_ascii=False).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`; `ChannelBroken` for anything that `encode` would not have written."""
    try:
        ((name, fields),) = json.loads(line).items()
        if name == "Stop":
            return Stop(failure=_failure(fields["failure"]))
        return _failure(fields) if name == "Failed" else _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ChannelBroken(f"Not a message between guards: {line[:80]!r}") from error


def _failure(fields: dict[str, str]) -> Failed:
    return Failed(**{**fields, "ending": Ending(fields["ending"])})  # type: ignore[arg-type] # checked by decode's caller


class MessageChannel:
    """One end of a connection. One thread sends and receives; `fileno` is there for selectors."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_LIMIT_S)
        self._connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Blocks for `SEND_LIMIT_S` at most; `ChannelBroken` when the other side no longer listens."""
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise ChannelBroken(f"The line broke while sending: {error}") from error

    def receive(self) -> list[Message]:
        """The messages of one read; blocks without one. `ChannelBroken` at the end of the line."""
        try:
            received = self._connection.recv(READ_BYTES)
        except OSError as error:
            raise ChannelBroken(f"The line broke while receiving: {error}") from error
        if not received:
            raise ChannelBroken("The other side hung up")
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > LONGEST_LINE_BYTES:
            raise ChannelBroken("The other side does not end its lines")
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Hang up. Safe twice."""
        self._connection.close()


def compute_proof(token: str, nonce: str, rank: int) -> str:
    """What only a holder of `token` can answer to a challenge. The token itself never travels."""
    return hmac.new(token.encode(), f"{nonce}/{rank}".encode(), hashlib.sha256).hexdigest()


def connect_to_server(
    address: str, token: str, *, rank: int, host: str, pid: int, timeout_s: float = 10.0
) -> MessageChannel:
    """Reach the server at `address` (`name[,name...]:port`, tried in turn) and say hello."""
    names, _, port = address.rpartition(":")
    refusals = []
    for name in names.split(","):
        try:
            connection = socket.create_connection((name, int(port)), timeout=timeout_s)
        except OSError as error:
            refusals.append(f"{name}: {error}")
            continue
        _notice_dead_peers(connection)
        return _introduce(MessageChannel(connection), token, rank=rank, host=host, pid=pid)
    raise RankError(
        f"Rank {rank} cannot reach the process that launched it ({'; '.join(refusals)})",
        where=host,
        fix=f"Let this machine connect to TCP port {port} there, or start the ranks on one network.",
    )


def _introduce(wire: MessageChannel, token: str, *, rank: int, host: str, pid: int) -> MessageChannel:
    match wire.receive():
        case [Challenge(nonce=nonce)]:
            wire.send(Hello(rank=rank, host=host, pid=pid, proof=compute_proof(token, nonce, rank)))
            return wire
        case unexpected:
            raise ChannelBroken(f"Expected a challenge, got {unexpected!r}")


def _notice_dead_peers(connection: socket.socket) -> None:
    """A machine that lost power sends no farewell; without probes its connection stays open for hours."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def accept_channel(connection: socket.socket) -> MessageChannel:
    """The server's end of a new connection, before any word was said."""
    _notice_dead_peers(connection)
    return MessageChannel(connection)
