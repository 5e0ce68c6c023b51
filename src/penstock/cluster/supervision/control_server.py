"""The server that guards of all ranks report to: the first failure it hears of stops the whole job.

Runs as one thread of the launching process, or of rank 0's guard in a job that someone else launched.
Invariant: from the first failure on, every guard is told to stop and none is told to leave before all
ranks are gone or had `GRACE_S` + `KILL_S` to go.
"""

from __future__ import annotations

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

from penstock.cluster.supervision.control_protocol import (
    Challenge,
    ChannelBroken,
    Ending,
    Failed,
    Finished,
    Gone,
    Hello,
    Late,
    Leave,
    Message,
    MessageChannel,
    Stop,
    accept_channel,
    compute_proof,
)

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long an interrupted rank may clean up before it is killed."""
KILL_S = 3.0
"""How long the kernel gets to end killed processes: those in the middle of a write take time."""
ATTENDANCE_S = 1.0
"""After a timeout: how long the server listens for others that waited too, to name those that did not."""
NAMED_RANKS = 8
EVERYWHERE = ""
"""`bind` for ranks on other machines: all interfaces. The token keeps strangers out."""


@dataclass(slots=True)
class _Member:
    wire: MessageChannel
    rank: int
    host: str
    pid: int
    last_late_call: int = 0
    finished: bool = False
    gone: bool = False
    hung_up: bool = False


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
        self._failure: Failed | None = None
        self._pending: tuple[float, Failed] | None = None
        self._stopped_s: float | None = None
        self._has_left = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._requested: list[Failed] = []
        self._closing = False
        self._strangers: dict[MessageChannel, str] = {}
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

    def forget(self) -> None:
        """In a process forked off before `with`: close this copy, so that the port ends with its server."""
        self._selector.close()
        for end in (self._listener, self._wake_in, self._wake_out):
            end.close()

    @property
    def failure(self) -> Failed | None:
        """Why the job stops; None while all is well."""
        return self._failure

    @property
    def arrived(self) -> set[int]:
        """The ranks that have said hello."""
        with self._news:
            return set(self._members)

    @property
    def exit_codes(self) -> dict[int, int]:
        """Of the ranks that finished in good order."""
        with self._news:
            return dict(self._exit_codes)

    @property
    def is_over(self) -> bool:
        """All ranks have finished, or all are gone, and their guards were told so."""
        return self._has_left

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when something changed, or after `timeout_s`."""
        with self._news:
            self._news.wait(timeout_s)

    def stop(self, failure: Failed) -> None:
        """Stop the job for a reason from outside. A failure that came earlier stays the reason."""
        self._requested.append(failure)
        self._wake()

    def _wake(self) -> None:
        with suppress(BrokenPipeError):  # it was awake, and has ended already
            self._wake_in.send(b"!")

    def _serve(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        try:
            while not self._closing:
                self._serve_once()
        finally:
            for wire in [*self._strangers, *(member.wire for member in self._members.values())]:
                wire.close()
            self._selector.close()
            self._listener.close()
            self._wake_out.close()

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(timeout=0.2):
            if key.fileobj is self._listener:
                self._admit()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(64)
            else:
                self._listen_to(key.fileobj)  # type: ignore[arg-type] # only wires are left
        while self._requested:
            self._fail(self._requested.pop(0))
        self._act_on_time()
        with self._news:
            self._news.notify_all()

    def _admit(self) -> None:
        connection, _ = self._listener.accept()
        wire = accept_channel(connection)
        nonce = secrets.token_hex(16)
        self._strangers[wire] = nonce
        self._selector.register(wire, selectors.EVENT_READ)
        try:
            wire.send(Challenge(nonce=nonce))
        except ChannelBroken as error:
            self._lose(wire, error)

    def _listen_to(self, wire: MessageChannel) -> None:
        try:
            messages = wire.receive()
        except ChannelBroken as error:
            self._lose(wire, error)
            return
        for message in messages:
            if wire not in self._strangers:
                self._hear(message)
            elif not (isinstance(message, Hello) and self._welcome(wire, message)):
                self._lose(wire, ChannelBroken("It could not prove that it belongs to this job"))
                return

    def _welcome(self, wire: MessageChannel, hello: Hello) -> bool:
        expected = compute_proof(self.token, self._strangers[wire], hello.rank)
        if not hmac.compare_digest(expected, hello.proof) or hello.rank in self._members:
            return False
        del self._strangers[wire]
        with self._news:
            self._members[hello.rank] = _Member(wire, hello.rank, hello.host, hello.pid)
        if self._failure is not None:
            self._tell(self._members[hello.rank], Stop(failure=self._failure))
        return True

    def _lose(self, wire: MessageChannel, reason: ChannelBroken) -> None:
        self._selector.unregister(wire)
        wire.close()
        if self._strangers.pop(wire, None) is not None:
            log.warning("A stranger on the control port was turned away: %s", reason)
            return
        member = next(member for member in self._members.values() if member.wire is wire)
        member.gone = member.hung_up = True
        if not member.finished:
            cause = f"its processes ended without a word (killed?); its guard was process {member.pid}"
            self._fail(Failed(rank=member.rank, host=member.host, cause=cause))

    def _hear(self, message: Message) -> None:
        match message:
            case Late(rank=rank, call=call):
                self._members[rank].last_late_call = call
            case Failed():
                self._hear_failure(message)
            case Finished(rank=rank, exit_code=exit_code):
                with self._news:
                    self._members[rank].finished = True
                    self._exit_codes[rank] = exit_code
            case Gone(rank=rank):
                self._members[rank].gone = True
            case unexpected:
                log.warning("A guard said what only servers say: %r", unexpected)

    def _hear_failure(self, failure: Failed) -> None:
        if failure.ending is not Ending.TIMED_OUT:
            self._fail(failure)
            return
        member = self._members.get(failure.rank)
        if member is not None:
            member.last_late_call = failure.call
        if self._pending is None:
            self._pending = (time.monotonic() + ATTENDANCE_S, failure)

    def _act_on_time(self) -> None:
        self._conclude_attendance()
        if self._has_left or (self._failure is None and self._pending is not None):
            return
        outstanding = self.ranks if self._failure is None else len(self._members)
        settled = sum(member.gone or member.finished for member in self._members.values()) == outstanding
        patience_ran_out = (
            self._stopped_s is not None and time.monotonic() > self._stopped_s + GRACE_S + KILL_S
        )
        if settled or patience_ran_out:
            for member in self._members.values():
                self._tell(member, Leave())
            self._has_left = True

    def _conclude_attendance(self) -> None:
        if self._pending is None or self._failure is not None:
            return
        due_s, failure = self._pending
        if time.monotonic() >= due_s or all(member.gone for member in self._members.values()):
            self._fail(self._with_attendance(failure))

    def _with_attendance(self, failure: Failed) -> Failed:
        waiting = {m.rank for m in self._members.values() if m.last_late_call == failure.call}
        missing = [rank for rank in range(self.ranks) if rank not in waiting]
        if not missing:
            return failure
        hosts = {rank: member.host for rank, member in self._members.items()}
        first, *others = missing
        named = "".join(f", nor did rank {rank}" for rank in others[:NAMED_RANKS])
        more = f", nor did {len(others) - NAMED_RANKS} more" if len(others) > NAMED_RANKS else ""
        waited = f"Rank {failure.rank} on {failure.host}: {failure.cause}"
        return replace(
            failure,
            rank=first,
            host=hosts.get(first, "an unknown host"),
            cause=f"it did not arrive{named}{more}. {waited}",
        )

    def _fail(self, failure: Failed) -> None:
        if self._failure is not None:
            return
        self._stopped_s = time.monotonic()
        with self._news:
            self._failure = failure
        for member in self._members.values():
            self._tell(member, Stop(failure=failure))

    def _tell(self, member: _Member, message: Message) -> None:
        if member.hung_up:
            return
        try:
            member.wire.send(message)
        except ChannelBroken as error:
            log.debug("Rank %d's guard could not be told %r: %s", member.rank, message, error)


def _listen(bind: str, backlog: int) -> socket.socket:
    if bind == EVERYWHERE and socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server((bind, 0), backlog=backlog)


def _allow_open_files(count: int) -> None:
    """Each rank costs a descriptor, and shells allow 1024 by default, often far below the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def advertise_address(port: int) -> str:
    """Where ranks on any machine reach a server that listens everywhere, in the form `wire.connect` tries.

    Loopback comes last: on another machine it would be somebody else.
    """
    addresses = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return f"{','.join([*addresses, socket.gethostname(), '127.0.0.1'])}:{port}"
