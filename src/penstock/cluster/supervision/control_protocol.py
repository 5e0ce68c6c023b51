"""Messages between supervisors, their ranks and the control server: one JSON line each, on a socket.

Independent of the communicators on purpose: this must work while ranks are stuck, dead or not yet connected.
Invariant: a server accepts no message before the other side has proved that it knows the job's token.
"""

import hashlib
import hmac
import json
import socket
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, get_args

from penstock.errors import PenstockError, RankError, RankFailed, Unavailable, UsageError

LONGEST_LINE_BYTES = 256 * 1024
READ_BYTES = 64 * 1024
SEND_LIMIT_S = 10.0


class Ending(StrEnum):
    """How a rank failed, as far as the job's exit code and its message depend on it."""

    FAILED = "failed"
    NOT_FOUND = "not found"
    TIMED_OUT = "timed out"
    USAGE = "usage"
    UNAVAILABLE = "unavailable"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """Server to every new connection: the nonce for its proof."""

    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A supervisor's first message, with the proof."""

    rank: int
    host: str
    pid: int
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAt:
    """Rank to its supervisor, in a job that another launcher started: where the control server listens."""

    address: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LongWait:
    """A rank has waited long in its `call`-th collective call."""

    rank: int
    call: int
    awaiting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Server to rank 0, which waits in its `call`-th collective call: the ranks that do not."""

    call: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Why the job ends. `detail` is for --debug: a traceback, or standard error's last lines."""

    rank: int
    host: str
    cause: str
    ending: Ending = Ending.FAILED
    call: int = 0
    detail: str = ""

    def error(self) -> PenstockError:
        """The error that the launching process raises for it."""
        kind = {Ending.USAGE: UsageError, Ending.UNAVAILABLE: Unavailable}.get(self.ending)
        code = 2 if self.ending is Ending.NOT_FOUND else 1
        error = kind(self.cause) if kind else RankFailed(self.rank, self.host, self.cause, exit_code=code)
        if self.detail:
            error.add_note(self.detail)
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The rank finished its work. `exit_code` is a verdict, not a failure."""

    rank: int
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Server to all supervisors: end the rank and all that it started."""

    failure: Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """A supervisor's answer to `Stop`: its rank and all that it started have ended."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """Server to all supervisors: every rank has finished or ended, so exit."""


Message = Challenge | Hello | ServerAt | LongWait | Absent | Failed | Finished | Stop | RankGone | Dismiss
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


class ChannelBroken(RankError, ConnectionError):
    """The other side has closed the connection, or does not follow the protocol."""


def encode(message: Message) -> bytes:
    """The line of a message, its end included."""
    return json.dumps({type(message).__name__: asdict(message)}, ensure_ascii=False).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`; `ChannelBroken` for anything that `encode` would not have written."""
    try:
        ((name, fields),) = json.loads(line).items()
        if name == "Stop":
            return Stop(failure=_decode_failure(fields["failure"]))
        message: Message = _decode_failure(fields) if name == "Failed" else _KINDS[name](**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ChannelBroken(f"Not a message between supervisors: {line[:80]!r}") from error
    return message


def _decode_failure(fields: dict[str, Any]) -> Failed:
    return Failed(**{**fields, "ending": Ending(fields["ending"])})


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
        """Block for at most `SEND_LIMIT_S`; `ChannelBroken` if the other side no longer reads."""
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise ChannelBroken(f"The connection broke while sending: {error}") from error

    def receive(self) -> list[Message]:
        """The messages of one read, which blocks; `ChannelBroken` at the end of the stream."""
        try:
            received = self._connection.recv(READ_BYTES)
        except OSError as error:
            raise ChannelBroken(f"The connection broke while receiving: {error}") from error
        if not received:
            raise ChannelBroken("The other side closed the connection")
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > LONGEST_LINE_BYTES:
            raise ChannelBroken(f"The other side sent a line of more than {LONGEST_LINE_BYTES} bytes")
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Close the connection. Safe twice."""
        self._connection.close()


def compute_proof(token: str, nonce: str, rank: int) -> str:
    """The answer to a challenge, which only a holder of `token` can compute. The token is never sent."""
    return hmac.new(token.encode(), f"{nonce}/{rank}".encode(), hashlib.sha256).hexdigest()


def connect_to_server(
    address: str, token: str, *, rank: int, host: str, pid: int, timeout_s: float = 10.0
) -> MessageChannel:
    """Connect to the server at `address` (`name[,name...]:port`, tried in turn) and authenticate."""
    names, _, port = address.rpartition(":")
    refusals = []
    for name in names.split(","):
        try:
            connection = socket.create_connection((name, int(port)), timeout=timeout_s)
        except OSError as error:
            refusals.append(f"{name}: {error}")
            continue
        return _introduce(open_channel(connection), token, rank=rank, host=host, pid=pid)
    raise RankError(
        f"Rank {rank} cannot reach the process that launched it ({'; '.join(refusals)})",
        where=host,
        fix=f"Let this machine connect to TCP port {port} there, or start the ranks on one network.",
    )


def _introduce(channel: MessageChannel, token: str, *, rank: int, host: str, pid: int) -> MessageChannel:
    match channel.receive():
        case [Challenge(nonce=nonce)]:
            channel.send(Hello(rank=rank, host=host, pid=pid, proof=compute_proof(token, nonce, rank)))
            return channel
        case unexpected:
            raise ChannelBroken(f"Expected a challenge, got {unexpected!r}")


def open_channel(connection: socket.socket) -> MessageChannel:
    """A channel over TCP that notices a dead peer within seconds."""
    # A machine that loses power closes nothing; without probes its connection would stay open for hours.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return MessageChannel(connection)
