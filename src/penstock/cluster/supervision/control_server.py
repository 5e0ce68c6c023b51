"""The server that the supervisors of all ranks report to: the first failure stops the whole job.

The server runs in one thread of the launching process or, in a job that another launcher started, of rank 0's
supervisor. Invariant: from the first failure onward, every supervisor has to stop, and none is dismissed
before all ranks have ended or have had `GRACE_S` + `KILL_S` to end.
"""

import hmac
import logging
import math
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

import psutil

from penstock.cluster.supervision import control_protocol as protocol
from penstock.errors import name_some

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""The time that an interrupted rank has for cleaning up before it is killed."""
KILL_S = 3.0
"""The time that killed processes have to end, because the kernel finishes a write that is under way."""
MISSING_RANKS_S = 1.0
"""The time that the server waits, after a timeout, for other ranks to report timeouts, so that it can name
those that do not.
"""
POLL_S = 0.05
"""The time after which the server's thread notices that it has to stop the job, or to end."""
NAMED_RANKS = 8
UNPROVED_S = 10.0
"""The time that a connection has to prove that it belongs to the job."""
MORE_UNPROVED = 128
"""The most connections without proof, in addition to one for each rank that has not arrived."""
EVERYWHERE = ""
"""The value of `bind` for ranks on other machines: all interfaces. The token keeps other users out."""


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
    """Listens from construction onward; `with` runs it. Any thread may use the public members."""

    def __init__(self, *, ranks: int, bind: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(16)
        self.ranks = ranks
        self.arrived: set[int] = set()
        """The ranks whose supervisors have connected."""
        self.exit_codes: dict[int, int] = {}
        """The exit codes of the ranks that finished."""
        self.failure: protocol.Failed | None = None
        """The reason why the job stops; None while it runs."""
        self.is_over = False
        """True once all ranks have finished or ended, and their supervisors have been dismissed."""
        _allow_open_files(ranks + 256)
        backlog = min(ranks + 8, 4096)
        if bind == EVERYWHERE and socket.has_dualstack_ipv6():
            self._listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        else:
            self._listener = socket.create_server((bind, 0), backlog=backlog)
        self.port: int = self._listener.getsockname()[1]
        self._news = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._has_late_news = False
        self._pending: tuple[float, protocol.Failed] | None = None
        self._stopped_s = math.inf
        self._requested: list[protocol.Failed] = []
        self._closing = False
        self._unproved: dict[protocol.MessageChannel, tuple[str, float]] = {}
        """The nonce sent to each connection, and when, in the order of the connections' arrival."""
        self._refusals_level = logging.WARNING
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="penstock-control", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._thread.join(timeout=KILL_S)

    def close_copy(self) -> None:
        """Close this copy, in a process forked before `with`.

        Otherwise the port would stay open after its server has closed it.
        """
        self._selector.close()
        self._listener.close()

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when something has changed, or after `timeout_s`."""
        with self._news:
            self._news.wait(timeout_s)

    def stop(self, failure: protocol.Failed) -> None:
        """Stop the job for an external reason.

        If the job has failed already, the earlier failure stays the reason.
        """
        # Only the server's thread changes its state; appending to a list is atomic.
        self._requested.append(failure)

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._closing:
                for key, _ in self._selector.select(timeout=POLL_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type] # only channels are left
                self._drop_unproved()
                while self._requested:
                    self._fail(self._requested.pop(0))
                self._report_absent()
                self._fail_pending()
                self._dismiss_when_settled()
                with self._news:
                    self._news.notify_all()
        finally:
            for channel in [*self._unproved, *(member.channel for member in self._members.values())]:
                channel.close()
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
            channel = protocol.open_channel(connection)
        except OSError as error:  # the other side has hung up already
            logger.debug("A connection to the control port broke at once: %s", error)
            return
        channel.longest_line_bytes = protocol.LONGEST_HELLO_BYTES
        nonce = secrets.token_hex(16)
        self._unproved[channel] = nonce, time.monotonic()
        self._selector.register(channel, selectors.EVENT_READ)
        try:
            channel.send("challenge", nonce=nonce)
        except protocol.ChannelBroken as error:
            self._drop(channel, error)

    def _read(self, channel: protocol.MessageChannel) -> None:
        try:
            for message in channel.receive():
                if channel in self._unproved:
                    self._authenticate(channel, message)
                else:
                    self._on_message(message)
        except protocol.ChannelBroken as error:
            self._drop(channel, error)

    def _authenticate(self, channel: protocol.MessageChannel, message: protocol.Message) -> None:
        match message:
            case {
                "kind": "hello",
                "rank": int(rank),
                "host": str(host),
                "pid": int(pid),
                "nonce": str(nonce),
                "proof": str(proof),
            }:
                expected = protocol.compute_proof(self.token, self._unproved[channel][0], rank)
                is_proved = hmac.compare_digest(expected.encode(), proof.encode(errors="replace"))
            case _:
                is_proved = False
        # A second connection for a rank is refused, because it would replace the rank's first supervisor.
        if not is_proved or rank in self._members:
            raise protocol.ChannelBroken("It did not prove that it belongs to this job")
        channel.send("welcome", proof=protocol.compute_proof(self.token, nonce, protocol.SERVER))
        del self._unproved[channel]
        channel.longest_line_bytes = protocol.LONGEST_LINE_BYTES
        member = self._members[rank] = _Member(channel, rank, host, pid)
        self.arrived.add(rank)
        if self.failure is not None:
            self._send([member], "stop", **asdict(self.failure))

    def _drop_unproved(self) -> None:
        """Drop connections not authenticated in time, and the oldest if there are too many."""
        for channel, (_, since_s) in list(self._unproved.items()):
            is_late = time.monotonic() > since_s + UNPROVED_S
            if is_late or len(self._unproved) > self.ranks - len(self._members) + MORE_UNPROVED:
                self._drop(channel, protocol.ChannelBroken("It did not prove that it belongs to this job"))

    def _drop(self, channel: protocol.MessageChannel, reason: protocol.ChannelBroken) -> None:
        self._selector.unregister(channel)
        channel.close()
        if self._unproved.pop(channel, None) is not None:
            # The first refusal is news; further ones would fill the log.
            logger.log(self._refusals_level, "Refused a connection to the control port: %s", reason)
            self._refusals_level = logging.DEBUG
            return
        member = next(member for member in self._members.values() if member.channel is channel)
        member.gone = member.disconnected = True
        if not member.finished:
            cause = f"its processes ended unexpectedly (killed?); its supervisor was process {member.pid}"
            self._fail(protocol.Failed(rank=member.rank, host=member.host, cause=cause))

    def _on_message(self, message: protocol.Message) -> None:
        match message:
            case {"kind": "late", "rank": rank, "call": call}:
                self._members[rank].last_late_call = call
                self._has_late_news = True
            case {"kind": "failed"}:
                failure = protocol.read_failure(message)
                if failure.ending is not protocol.Ending.TIMED_OUT:
                    self._fail(failure)
                    return
                if failure.rank in self._members:
                    self._members[failure.rank].last_late_call = failure.call
                # The first rank to time out is not to blame. The others that wait in the same call report
                # within a second, and those that do not report are the missing ones.
                if self._pending is None:
                    self._pending = (time.monotonic() + MISSING_RANKS_S, failure)
            case {"kind": "finished", "rank": rank, "exit_code": exit_code}:
                self._members[rank].finished = True
                self.exit_codes[rank] = exit_code
            case {"kind": "gone", "rank": rank}:
                self._members[rank].gone = True

    def _missing(self, call: int) -> list[int]:
        """Return the ranks that have not reported a long wait in this call."""
        late = {member.rank for member in self._members.values() if member.last_late_call == call}
        return [rank for rank in range(self.ranks) if rank not in late]

    def _report_absent(self) -> None:
        """Send rank 0 the list of ranks that it waits for, which it shows to people who follow the run."""
        first = self._members.get(0)
        is_ending = self.failure is not None or self._pending is not None
        if first is None or is_ending or not first.last_late_call or not self._has_late_news:
            return
        self._has_late_news = False
        call = first.last_late_call
        self._send([first], "absent", call=call, ranks=self._missing(call)[:NAMED_RANKS])

    def _fail_pending(self) -> None:
        """Fail with the first timeout, once the ranks that have not reported one are known to be missing."""
        if self._pending is None or self.failure is not None:
            return
        due_s, failure = self._pending
        if time.monotonic() < due_s and not all(member.gone for member in self._members.values()):
            return
        if missing := self._missing(failure.call):
            first, *others = missing
            named = (
                f", nor did {name_some([f'rank {rank}' for rank in others], NAMED_RANKS)}" if others else ""
            )
            cause = f"it did not arrive{named}. Rank {failure.rank} on {failure.host}: {failure.cause}"
            host = self._members[first].host if first in self._members else "an unknown host"
            failure = replace(failure, rank=first, host=host, cause=cause)
        self._fail(failure)

    def _dismiss_when_settled(self) -> None:
        if self.is_over or (self.failure is None and self._pending is not None):
            return
        outstanding = self.ranks if self.failure is None else len(self._members)
        settled = sum(member.gone or member.finished for member in self._members.values()) == outstanding
        if settled or time.monotonic() > self._stopped_s + GRACE_S + KILL_S:
            self._send(self._members.values(), "dismiss")
            self.is_over = True

    def _fail(self, failure: protocol.Failed) -> None:
        if self.failure is None:
            self._stopped_s = time.monotonic()
            self.failure = failure
            self._send(self._members.values(), "stop", **asdict(failure))

    def _send(self, members: Iterable[_Member], kind: str, **values: Any) -> None:
        for member in members:
            if not member.disconnected:
                try:
                    member.channel.send(kind, **values)
                except protocol.ChannelBroken as error:
                    logger.debug(
                        "Could not send %s to the supervisor of rank %d: %s", kind, member.rank, error
                    )


def _allow_open_files(count: int) -> None:
    # Each rank needs a descriptor. Shells allow 1024 by default, which is often far below the hard limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def advertise_address(port: int) -> str:
    """Return a server's address for ranks on any machine, in the form that `connect_to_server` takes.

    Loopback comes last, because on another machine it would reach a different server.
    """
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return f"{','.join([*addresses, socket.gethostname(), '127.0.0.1'])}:{port}"
