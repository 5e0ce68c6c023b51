"""The server that the supervisors of all ranks report to: the first failure stops the whole job.

Runs as one thread of the launching process, or of rank 0's supervisor in a job that another launcher started.
Invariant: from the first failure on, every supervisor is told to stop, and none is dismissed before all
ranks have ended or had `GRACE_S` + `KILL_S` to end.
"""

import hmac
import logging
import resource
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import psutil

from penstock.cluster.supervision import control_protocol as protocol
from penstock.errors import name_some

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long an interrupted rank may clean up before it is killed."""
KILL_S = 3.0
"""How long killed processes may take to end: the kernel finishes a write that is under way."""
MISSING_RANKS_S = 1.0
"""How long the server waits, after a timeout, for other ranks that timed out, to name those that did not."""
NAMED_RANKS = 8
EVERYWHERE = ""
"""`bind` for ranks on other machines: all interfaces. The token keeps other users out."""


@dataclass(slots=True)
class _Member:
    channel: protocol.MessageChannel
    rank: int
    host: str
    pid: int
    last_late_call: int = 0
    finished: bool = False
    gone: bool = False
    disconnected: bool = False


class ControlServer:
    """Listens from construction on; `with` runs it. All public members may be used from any thread."""

    def __init__(self, *, ranks: int, bind: str = "127.0.0.1", token: str | None = None) -> None:
        self.token = token or secrets.token_hex(16)
        self.ranks = ranks
        _allow_open_files(ranks + 256)
        self._listener = _listen(bind, backlog=min(ranks + 8, 4096))
        self.port: int = self._listener.getsockname()[1]
        self._news = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._exit_codes: dict[int, int] = {}
        self._failure: protocol.Failed | None = None
        self._has_late_news = False
        self._pending: tuple[float, protocol.Failed] | None = None
        self._stopped_s: float | None = None
        self._is_over = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._requested: list[protocol.Failed] = []
        self._closing = False
        self._unproved: dict[protocol.MessageChannel, str] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="penstock-control", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake()
        self._thread.join(timeout=KILL_S)
        self._wake_in.close()

    def close_copy(self) -> None:
        """Close this copy in a process forked before `with`, so that the port closes with its server."""
        self._selector.close()
        for end in (self._listener, self._wake_in, self._wake_out):
            end.close()

    @property
    def failure(self) -> protocol.Failed | None:
        """Why the job stops; None while it runs."""
        return self._failure

    @property
    def arrived(self) -> set[int]:
        """The ranks whose supervisors have connected."""
        with self._news:
            return set(self._members)

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the ranks that finished."""
        with self._news:
            return dict(self._exit_codes)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have finished or ended, and their supervisors have been dismissed."""
        return self._is_over

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when something changed, or after `timeout_s`."""
        with self._news:
            self._news.wait(timeout_s)

    def stop(self, failure: protocol.Failed) -> None:
        """Stop the job for a reason from outside. An earlier failure stays the reason."""
        # Only the server's thread changes its state; appending to a list is atomic.
        self._requested.append(failure)
        self._wake()

    def _wake(self) -> None:
        with suppress(BrokenPipeError):  # the thread has ended meanwhile
            self._wake_in.send(b"!")

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        try:
            while not self._closing:
                self._serve_once()
        finally:
            for channel in [*self._unproved, *(member.channel for member in self._members.values())]:
                channel.close()
            self._selector.close()
            self._listener.close()
            self._wake_out.close()

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(timeout=0.2):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(64)
            else:
                self._read(key.fileobj)  # type: ignore[arg-type] # only channels are left
        while self._requested:
            self._fail(self._requested.pop(0))
        self._tell_absent()
        self._dismiss_when_settled()
        with self._news:
            self._news.notify_all()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel = protocol.open_channel(connection)
        nonce = secrets.token_hex(16)
        self._unproved[channel] = nonce
        self._selector.register(channel, selectors.EVENT_READ)
        try:
            channel.send(protocol.Challenge(nonce=nonce))
        except protocol.ChannelBroken as error:
            self._drop(channel, error)

    def _read(self, channel: protocol.MessageChannel) -> None:
        try:
            messages = channel.receive()
        except protocol.ChannelBroken as error:
            self._drop(channel, error)
            return
        for message in messages:
            if channel not in self._unproved:
                self._on_message(message)
            elif not (isinstance(message, protocol.Hello) and self._authenticate(channel, message)):
                self._drop(channel, protocol.ChannelBroken("It did not prove that it belongs to this job"))
                return

    def _authenticate(self, channel: protocol.MessageChannel, hello: protocol.Hello) -> bool:
        expected = protocol.compute_proof(self.token, self._unproved[channel], hello.rank)
        # A second connection of a rank is refused, because it would replace the first one's supervisor.
        if not hmac.compare_digest(expected, hello.proof) or hello.rank in self._members:
            return False
        del self._unproved[channel]
        with self._news:
            self._members[hello.rank] = _Member(channel, hello.rank, hello.host, hello.pid)
        if self._failure is not None:
            self._send(self._members[hello.rank], protocol.Stop(failure=self._failure))
        return True

    def _drop(self, channel: protocol.MessageChannel, reason: protocol.ChannelBroken) -> None:
        self._selector.unregister(channel)
        channel.close()
        if self._unproved.pop(channel, None) is not None:
            logger.warning("Refused a connection to the control port: %s", reason)
            return
        member = next(member for member in self._members.values() if member.channel is channel)
        member.gone = member.disconnected = True
        if not member.finished:
            cause = f"its processes ended unexpectedly (killed?); its supervisor was process {member.pid}"
            self._fail(protocol.Failed(rank=member.rank, host=member.host, cause=cause))

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.LongWait(rank=rank, call=call):
                self._members[rank].last_late_call = call
                self._has_late_news = True
            case protocol.Failed():
                self._on_failure(message)
            case protocol.Finished(rank=rank, exit_code=exit_code):
                with self._news:
                    self._members[rank].finished = True
                    self._exit_codes[rank] = exit_code
            case protocol.RankGone(rank=rank):
                self._members[rank].gone = True
            case unexpected:
                logger.warning("Ignored a message that only servers send: %r", unexpected)

    def _on_failure(self, failure: protocol.Failed) -> None:
        if failure.ending is not protocol.Ending.TIMED_OUT:
            self._fail(failure)
            return
        member = self._members.get(failure.rank)
        if member is not None:
            member.last_late_call = failure.call
        # The first rank to time out is not to blame: the others that wait in the same call report within a
        # second, and those that do not are the missing ones.
        if self._pending is None:
            self._pending = (time.monotonic() + MISSING_RANKS_S, failure)

    def _dismiss_when_settled(self) -> None:
        self._fail_pending()
        if self._is_over or (self._failure is None and self._pending is not None):
            return
        outstanding = self.ranks if self._failure is None else len(self._members)
        settled = sum(member.gone or member.finished for member in self._members.values()) == outstanding
        patience_ran_out = (
            self._stopped_s is not None and time.monotonic() > self._stopped_s + GRACE_S + KILL_S
        )
        if settled or patience_ran_out:
            for member in self._members.values():
                self._send(member, protocol.Dismiss())
            self._is_over = True

    def _tell_absent(self) -> None:
        """Tell rank 0 whom it waits for: it can say so to those who follow the run."""
        first = self._members.get(0)
        is_ending = self._failure is not None or self._pending is not None
        if first is None or is_ending or not first.last_late_call or not self._has_late_news:
            return
        self._has_late_news = False
        missing = [rank for rank in range(self.ranks) if not self._is_late(rank, first.last_late_call)]
        absent = protocol.Absent(call=first.last_late_call, ranks=tuple(missing[:NAMED_RANKS]))
        self._send(first, absent)

    def _is_late(self, rank: int, call: int) -> bool:
        member = self._members.get(rank)
        return member is not None and member.last_late_call == call

    def _fail_pending(self) -> None:
        if self._pending is None or self._failure is not None:
            return
        due_s, failure = self._pending
        if time.monotonic() >= due_s or all(member.gone for member in self._members.values()):
            self._fail(self._name_missing_ranks(failure))

    def _name_missing_ranks(self, failure: protocol.Failed) -> protocol.Failed:
        missing = [rank for rank in range(self.ranks) if not self._is_late(rank, failure.call)]
        if not missing:
            return failure
        hosts = {rank: member.host for rank, member in self._members.items()}
        first, *others = missing
        named = f", nor did {name_some([f'rank {rank}' for rank in others], NAMED_RANKS)}" if others else ""
        waited = f"Rank {failure.rank} on {failure.host}: {failure.cause}"
        return replace(
            failure,
            rank=first,
            host=hosts.get(first, "an unknown host"),
            cause=f"it did not arrive{named}. {waited}",
        )

    def _fail(self, failure: protocol.Failed) -> None:
        if self._failure is not None:
            return
        self._stopped_s = time.monotonic()
        with self._news:
            self._failure = failure
        for member in self._members.values():
            self._send(member, protocol.Stop(failure=failure))

    def _send(self, member: _Member, message: protocol.Message) -> None:
        if member.disconnected:
            return
        try:
            member.channel.send(message)
        except protocol.ChannelBroken as error:
            logger.debug("Could not send %r to the supervisor of rank %d: %s", message, member.rank, error)


def _listen(bind: str, backlog: int) -> socket.socket:
    if bind == EVERYWHERE and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server((bind, 0), backlog=backlog)


def _allow_open_files(count: int) -> None:
    # Each rank takes a descriptor, and shells allow 1024 by default, often far below the hard limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def advertise_address(port: int) -> str:
    """Where ranks on any machine reach a server on all interfaces, as `connect_to_server` takes it.

    Loopback comes last: on another machine it would reach a different server.
    """
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return f"{','.join([*addresses, socket.gethostname(), '127.0.0.1'])}:{port}"
