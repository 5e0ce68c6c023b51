"""Messages between supervisors, their ranks and the control server: one JSON line each, on a socket.

A message has a kind and some values:

| kind | values | from, to, and meaning |
|---|---|---|
| challenge | nonce | server to every new connection, which has to prove that it knows the token |
| hello | rank, host, pid, nonce, proof | a supervisor's first message |
| welcome | proof | server's response, which proves that it knows the token, too |
| server | address, token | rank to its supervisor, if no process launched the job: where rank 0's server is |
| late | rank, call, awaiting | the rank has waited long in its `call`-th collective call |
| absent | call, ranks | server to rank 0: the ranks that have not arrived in the call in which it waits |
| failed | those of `Failed` | why the job ends |
| stop | those of `Failed` | server to all supervisors: end the rank and all that it started |
| gone | rank | a supervisor's response to `stop`: its rank and all that it started have ended |
| finished | rank, exit_code | the rank finished its work; the code is a verdict, not a failure |
| dismiss | | server to all supervisors: every rank has finished or ended, so exit |

The protocol is deliberately independent of the communicators, because it must work while ranks are stuck,
dead or not yet connected. Invariant: a server accepts no message before the other side has proved that it
knows the job's token, and until then reads only a little data, for a short time.
"""

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.errors import PenstockError, RankError, RankFailed, Unavailable, UsageError

LONGEST_LINE_BYTES = 256 * 1024
LONGEST_HELLO_BYTES = 4096
READ_BYTES = 64 * 1024
SEND_LIMIT_S = 10.0

Message = Mapping[str, Any]
"""The kind of a message (`kind`), and its values."""


class Ending(StrEnum):
    """A way to fail, as far as it matters for the job's exit code and message."""

    FAILED = "failed"
    NOT_FOUND = "not found"
    TIMED_OUT = "timed out"
    USAGE = "usage"
    UNAVAILABLE = "unavailable"
    INTERRUPTED = "interrupted"


class ChannelBroken(RankError, ConnectionError):
    """The other side has closed the connection, or does not follow the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The reason why the job ends.

    `detail` is for --debug: a traceback, or the last lines of standard error.
    """

    rank: int
    host: str
    cause: str
    ending: Ending = Ending.FAILED
    call: int = 0
    detail: str = ""

    def error(self) -> PenstockError:
        """Return the error that the launching process raises for this failure."""
        kind = {Ending.USAGE: UsageError, Ending.UNAVAILABLE: Unavailable}.get(self.ending)
        code = 2 if self.ending is Ending.NOT_FOUND else 1
        error = kind(self.cause) if kind else RankFailed(self.rank, self.host, self.cause, exit_code=code)
        if self.detail:
            error.add_note(self.detail)
        return error


def read_failure(message: Message) -> Failed:
    """Read the failure from a message of the kind `failed` or `stop`."""
    fields = {name: value for name, value in message.items() if name != "kind"}
    try:
        return Failed(**{**fields, "ending": Ending(fields["ending"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ChannelBroken(f"Not a failure of a rank: {message!r}") from error


class MessageChannel:
    """One end of a connection. Only one thread sends and receives. `fileno` is for selectors."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_LIMIT_S)
        self._connection = connection
        self._unread = b""
        self.early: list[Message] = []
        self.longest_line_bytes = LONGEST_LINE_BYTES
        self.fileno = connection.fileno
        self.close = connection.close

    def send(self, kind: str, **values: Any) -> None:
        """Send a message.

        Blocks for at most `SEND_LIMIT_S`; `ChannelBroken` if the other side no longer reads.
        """
        line = json.dumps({"kind": kind, **values}, ensure_ascii=False).encode() + b"\n"
        try:
            self._connection.sendall(line)
        except OSError as error:
            raise ChannelBroken(f"The connection broke while sending: {error}") from error

    def receive(self) -> list[Message]:
        """Return the messages of one blocking read. Raises `ChannelBroken` at the end of the stream."""
        try:
            received = self._connection.recv(min(READ_BYTES, self.longest_line_bytes))
        except OSError as error:
            raise ChannelBroken(f"The connection broke while receiving: {error}") from error
        if not received:
            raise ChannelBroken("The other side closed the connection")
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > self.longest_line_bytes:
            raise ChannelBroken(f"The other side sent a line of more than {self.longest_line_bytes} bytes")
        messages: list[Message] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict) or "kind" not in message:
                raise ChannelBroken(f"Not a message between supervisors: {line[:80]!r}")
            messages.append(message)
        return messages


SERVER = -1
"""The server's number in proofs. No rank has it, so a rank's own proof cannot be sent back to the rank."""


def compute_proof(token: str, nonce: str, rank: int) -> str:
    """Compute the response to a challenge, which requires the token. The token itself is never sent."""
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
        channel = open_channel(connection)
        match channel.receive():
            case [{"kind": "challenge", "nonce": str(nonce)}]:
                proof, own = compute_proof(token, nonce, rank), secrets.token_hex(16)
                channel.send("hello", rank=rank, host=host, pid=pid, nonce=own, proof=proof)
                while not (answers := channel.receive()):  # only a part of the line has arrived
                    pass
                welcome, *channel.early = answers
                if welcome != {"kind": "welcome", "proof": compute_proof(token, own, SERVER)}:
                    raise RankError("The server did not prove that it belongs to this job")
                return channel
            case unexpected:
                raise RankError(f"Expected a challenge, got {unexpected!r}")
    raise RankError(
        f"Rank {rank} cannot reach the process that launched it ({'; '.join(refusals)})",
        where=host,
        fix=f"Let this machine connect to TCP port {port} there, or start the ranks on one network.",
    )


def open_channel(connection: socket.socket) -> MessageChannel:
    """Open a channel over TCP that notices a dead peer within seconds."""
    # A machine that loses power closes no connection; without probes, it would stay open for hours.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return MessageChannel(connection)
