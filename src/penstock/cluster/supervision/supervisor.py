"""One supervisor beside each rank: the process that outlives the rank and ends everything it started.

`fork_supervisor` makes three processes of one. The original, which the launcher knows and may kill, becomes
the relay; its child is the supervisor; the program goes on as the rank, the supervisor's child. A supervisor
needs nothing from its rank, neither its GIL nor its life, so a stuck, stopped or killed rank still ends in
time. Invariant: whichever of the three is killed, what the rank started ends too, even if it detached itself.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import psutil

from penstock.cluster.supervision.control_protocol import (
    ChannelBroken,
    Ending,
    Failed,
    Finished,
    Gone,
    Late,
    Leave,
    Meet,
    Message,
    MessageChannel,
    Stop,
    connect_to_server,
)
from penstock.cluster.supervision.control_server import GRACE_S, KILL_S, ControlServer
from penstock.errors import RankError, Unavailable

PR_SET_CHILD_SUBREAPER = 36
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AnnounceFailure = Callable[[Failed], None]
"""Tells the user why the job stopped: called at most once, in the guard of the lowest rank still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """Where a guard stands: whose it is, and whom it reports to.

    `server` is rank 0's own, in a job that someone else launched; `control` is the launching process's.
    """

    rank: int
    host: str
    announce: AnnounceFailure
    control: tuple[str, str] | None = None
    server: ControlServer | None = None


class SupervisorChannel:
    """The rank's side of the split: what it tells its guard. Any thread may call."""

    def __init__(self, wire: MessageChannel, rank: int) -> None:
        self._wire = wire
        self._rank = rank
        self._lock = threading.Lock()
        self._last_call = 0

    def late(self, call: int, awaiting: str) -> None:
        """Say that the rank has waited long; see `BaseComm.on_late`."""
        self._last_call = call
        self._tell(Late(rank=self._rank, call=call, awaiting=awaiting))

    def meet(self, address: str, token: str) -> None:
        """Tell the guard where the job's server listens."""
        self._tell(Meet(address=address, token=token))

    def failed(self, failure: Failed) -> None:
        """Nothing can go on: the whole job stops. This rank is expected to end by itself."""
        # Only timeouts are about a call, and a rank that timed out was late in that call.
        self._tell(replace(failure, call=self._last_call))

    def finished(self) -> None:
        """The work is done; whatever this process's exit code will be, it is a verdict and no failure."""
        self._tell(Finished(rank=self._rank))

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._wire.send(message)


def fork_supervisor(post: SupervisorConfig) -> SupervisorChannel:
    """Split this process; returns in the rank only. Call it before any thread is started.

    Output that was buffered before the split is written once, by the original process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    elders = {os.getpid(): "its first process", os.getppid(): "its launcher on this host"}
    guard = os.fork()
    if guard:
        _go_on_as(lambda: _stand_in_front(post, guard))
    # Launchers clean up by process group: the guard must still be there afterwards.
    os.setpgid(0, 0)
    ours, theirs = socket.socketpair()
    rank = os.fork()
    if rank:
        theirs.close()
        _go_on_as(lambda: Supervisor(post, MessageChannel(ours), rank=rank, elders=elders).run())
    ours.close()
    if post.server is not None:
        post.server.forget()
    _become_rank(post.rank)
    return SupervisorChannel(MessageChannel(theirs), post.rank)


def _become_rank(rank: int) -> None:
    # A group of its own: signals of the terminal and the launcher reach the rank through its guard, once.
    os.setpgid(0, 0)
    # A program that a shell started in the background ignores SIGINT; ours must hear its guard.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank != 0:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _go_on_as(role: Callable[[], int]) -> NoReturn:
    """Be `role` until it ends, and exit with its code: nothing of the program's own may run here any more."""
    exit_code = 1
    try:
        _adopt_orphans()
        # MPICH's hydra tells the survivors of a dead rank by SIGUSR1; the control line does that better.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        exit_code = role()
    finally:
        error = sys.exception()
        # First of all: whatever is wrong with this process, and with whoever listens to it.
        end_processes(psutil.Process().children(recursive=True))
        with suppress(OSError):  # a launcher that is gone has left a broken pipe
            if error is not None:
                traceback.print_exception(error)
            sys.stderr.flush()
        os._exit(exit_code)


def _stand_in_front(post: SupervisorConfig, guard: int) -> int:
    """Pass signals on, and wait for the guard; should it be killed, end what it guarded."""
    if post.server is not None:
        post.server.forget()
    for number in _STOPPING_SIGNALS:
        signal.signal(number, lambda received, _frame: os.kill(guard, received))
    _, status = os.waitpid(guard, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # The server hears of it by itself; a launcher of ours need not add its own words.
        return 0 if post.control is not None else 1
    return code


class Supervisor:
    """The loop of a guard. Words come from the rank's line, the control line, the child's end and signals."""

    def __init__(
        self, post: SupervisorConfig, line: MessageChannel, *, rank: int, elders: Mapping[int, str]
    ) -> None:
        self._post = post
        self._line = line
        self._child = rank
        self._elders = elders
        self._control: MessageChannel | None = None
        self._failure: Failed | None = None
        self._says_finished = False
        self._rank_ends_itself = False
        self._exit_code: int | None = None
        self._kill_at_s: float | None = None
        self._may_leave = False
        self._has_met = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the guard's exit code when the rank and all its descendants have ended and all know it."""
        signals = _signals_as_bytes()
        pidfd = os.pidfd_open(self._child)
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._hear_signal(signals))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._bury(pidfd))
        self._watch_elders()
        self._selector.register(self._line, selectors.EVENT_READ, self._hear_rank)
        with self._post.server or nullcontext():
            if self._post.control is not None:
                self._meet(*self._post.control)
            while not self._is_done():
                for key, _ in self._selector.select(timeout=self._patience_s()):
                    key.data()
                self._lose_patience()
        if self._post.server is not None:
            # A launcher may have ended this rank for another's failure before that was heard of on the line.
            self._failure = self._post.server.failure or self._failure
        if self._failure is not None and self._speaks_for_the_job():
            self._post.announce(self._failure)
        return self._own_exit_code()

    def _is_done(self) -> bool:
        return self._exit_code is not None and (self._may_leave or self._control is None)

    def _speaks_for_the_job(self) -> bool:
        """One voice a job: the launching process, else rank 0, else whoever is left without a server."""
        if not self._has_met:
            return True
        if self._post.control is not None:
            return False
        return self._post.rank == 0 or (self._control is None and self._post.rank == 1)

    def _own_exit_code(self) -> int:
        """Under our own launcher 0: it would only add its own words to what the launching process says."""
        if self._post.control is not None and self._has_met:
            return 0
        if self._failure is not None:
            return 130 if self._failure.ending is Ending.INTERRUPTED else self._failure.error().exit_code
        return self._exit_code or 0

    def _meet(self, address: str, token: str) -> None:
        try:
            self._control = connect_to_server(
                address, token, rank=self._post.rank, host=self._post.host, pid=os.getpid()
            )
        except RankError as error:
            self._stop(self._own_failure(str(error), Ending.FAILED))
            return
        self._has_met = True
        self._selector.register(self._control, selectors.EVENT_READ, self._hear_control)
        if self._failure is not None:
            self._report(self._failure)

    def _hear_signal(self, signals: socket.socket) -> None:
        signals.recv(64)
        self._fail(self._own_failure("interrupted by a signal", Ending.INTERRUPTED))

    def _watch_elders(self) -> None:
        """What stands between this guard and the job: without its launcher a rank's output goes nowhere."""
        for pid, name in self._elders.items():
            if pid <= 0:  # a parent outside this container, whom nobody here can watch
                continue
            cause = f"{name}, process {pid}, was killed"
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:  # a job that is stopped while it starts
                self._fail(self._own_failure(cause, Ending.FAILED))
            else:
                self._selector.register(pidfd, selectors.EVENT_READ, partial(self._miss, pidfd, cause))

    def _miss(self, pidfd: int, cause: str) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._fail(self._own_failure(cause, Ending.FAILED))

    def _hear_rank(self) -> None:
        try:
            messages = self._line.receive()
        except ChannelBroken:
            self._selector.unregister(self._line)
            return
        for message in messages:
            match message:
                case Meet(address=address, token=token):
                    self._meet(address, token)
                case Finished():
                    self._says_finished = True
                case Failed():
                    self._rank_ends_itself = True
                    self._fail(message)
                case _:
                    self._report(message)

    def _hear_control(self) -> None:
        if self._control is None:  # lost while this news was under way
            return
        try:
            messages = self._control.receive()
        except ChannelBroken:
            self._lose_control()
            return
        for message in messages:
            if isinstance(message, Stop):
                # The server knows more than this rank said: the first cause, and who was missing.
                self._failure = message.failure
                self._stop(message.failure)
            elif isinstance(message, Leave):
                self._may_leave = True

    def _lose_control(self) -> None:
        """Whoever watched over the job is gone: nobody can say how it goes on, so it ends."""
        assert self._control is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._control = None
        if not self._may_leave:
            cause = "the process that watched over all ranks is gone"
            self._stop(Failed(rank=0, host="its host", cause=cause))

    def _own_failure(self, cause: str, ending: Ending) -> Failed:
        return Failed(rank=self._post.rank, host=self._post.host, cause=cause, ending=ending)

    def _fail(self, failure: Failed) -> None:
        if self._failure is None:
            self._report(failure)
        self._stop(failure)

    def _stop(self, failure: Failed) -> None:
        """End the rank: ask once, so that it can clean up, and kill it when its grace is over."""
        self._failure = self._failure or failure
        if self._exit_code is not None:
            self._report(Gone(rank=self._post.rank))
        elif self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + GRACE_S
            if not self._rank_ends_itself:
                os.kill(self._child, signal.SIGINT)

    def _patience_s(self) -> float | None:
        if self._kill_at_s is None or self._exit_code is not None:
            return None
        return max(0.0, self._kill_at_s - time.monotonic())

    def _lose_patience(self) -> None:
        if self._kill_at_s is not None and self._exit_code is None and time.monotonic() >= self._kill_at_s:
            os.kill(self._child, signal.SIGKILL)
            self._kill_at_s += KILL_S

    def _bury(self, pidfd: int) -> None:
        """The rank has ended: hear its last words, end what it left, and say how it went."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._child, 0)
        # Forked workers hold the line open: first they end, then its end is heard.
        end_processes(psutil.Process().children(recursive=True))
        if self._line in self._selector.get_map():
            self._hear_rank()
        code = os.waitstatus_to_exitcode(status)
        self._exit_code = code if code >= 0 else 1
        if self._failure is not None:
            self._report(Gone(rank=self._post.rank))
        elif self._says_finished and code >= 0:
            self._report(Finished(rank=self._post.rank, exit_code=code))
        else:
            self._fail(self._own_failure(describe_exit(code), Ending.FAILED))

    def _report(self, message: Message) -> None:
        if self._control is None:
            return
        try:
            self._control.send(message)
        except ChannelBroken:
            self._lose_control()


def describe_exit(code: int) -> str:
    """A process's end as a clause; a negative `code` is the signal that killed it."""
    if code >= 0:
        return f"its process ended early, with exit code {code}"
    return f"its process was killed by {signal.Signals(-code).name} (signal {-code})"


def end_processes(processes: list[psutil.Process]) -> None:
    """Kill `processes` and all that they start meanwhile, and wait for up to `KILL_S` until they are gone."""
    deadline_s = time.monotonic() + KILL_S
    while processes and time.monotonic() < deadline_s:
        for process in processes:
            _kill(process)
        psutil.wait_procs(processes, timeout=0.2)
        # Children of the killed are this process's now, if it adopts orphans: nothing escapes by detaching.
        processes = psutil.Process().children(recursive=True)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that none can slip away to init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise Unavailable(
            f"The kernel refuses to let a guard adopt orphans: {os.strerror(code)}",
            fix="Run on Linux 3.4 or newer, without a filter on prctl.",
        )


def _signals_as_bytes() -> socket.socket:
    """From here on, signals that mean "stop" arrive as bytes, and none ends this process by itself."""
    ours, handlers = socket.socketpair()
    handlers.setblocking(False)  # noqa: FBT003 - the socket module's interface
    signal.set_wakeup_fd(handlers.detach())
    for number in _STOPPING_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    return ours
