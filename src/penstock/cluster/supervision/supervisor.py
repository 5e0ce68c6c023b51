"""One supervisor for each rank: the process that outlives the rank and ends everything it started.

A supervisor does not depend on its rank, which may hold the GIL or be dead, so a stuck, stopped or killed
rank still ends in time. Invariant: whichever of relay, supervisor and rank is killed, the processes that the
rank started end too, even if they detached themselves.
"""

import ctypes
import math
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil

from penstock.cluster.supervision import control_protocol as protocol
from penstock.cluster.supervision.control_server import GRACE_S, KILL_S, ControlServer
from penstock.errors import RankError, Unavailable

PR_SET_CHILD_SUBREAPER = 36
_MPICH_MEMORY = "/dev/shm/mpich_shm_"  # noqa: S108 - where MPICH puts it
_SERVER_IS_GONE: Final = "the control server of the job is gone"
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

AnnounceFailure = Callable[[protocol.Failed], None]
"""Reports to the user why the job stopped. Called at most once, in the supervisor of the lowest remaining
rank.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorConfig:
    """The rank that a supervisor watches, and the server that it reports to.

    `control` is the address and token of the launching process's server; in a job that another launcher
    started, `server` is the server that rank 0's supervisor runs.
    """

    rank: int
    host: str
    announce: AnnounceFailure
    control: tuple[str, str] | None = None
    server: ControlServer | None = None


class SupervisorChannel:
    """The rank's channel to its supervisor. Any thread may call its methods."""

    def __init__(self, channel: protocol.MessageChannel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._lock = threading.Lock()
        self._last_call = 0
        self._absent: tuple[int, tuple[int, ...]] = (0, ())

    def send(self, kind: str, **values: Any) -> None:
        """Send a message of `control_protocol`."""
        with self._lock:
            self._channel.send(kind, **values)

    def report_long_wait(self, call: int, awaiting: str) -> None:
        """Report that the rank has been waiting for long; see `Comm.on_late`."""
        self._last_call = call
        self.send("late", rank=self._rank, call=call, awaiting=awaiting)

    def find_absent(self, call: int) -> tuple[int, ...]:
        """Return the ranks that have not arrived at this call, as far as the job's server knows.

        Only for one thread.
        """
        with suppress(protocol.ChannelBroken):  # the supervisor is gone, and this rank is about to end
            while select.select([self._channel], [], [], 0)[0]:
                for message in self._channel.receive():
                    if message["kind"] == "absent":
                        self._absent = (message["call"], tuple(message["ranks"]))
        return self._absent[1] if self._absent[0] == call else ()

    def report_failure(self, failure: protocol.Failed) -> None:
        """Stop the whole job. This rank is expected to end by itself."""
        # The call matters only for timeouts, and a rank that timed out has waited long in its last call.
        self.send("failed", **asdict(replace(failure, call=self._last_call)))


def fork_supervisor(config: SupervisorConfig) -> SupervisorChannel:
    """Fork the supervisor of this process. Returns only in the rank. Call this before starting any thread.

    Output that was buffered before the forks is written once, by the original process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Noted before the forks, so that a parent that ends before it is watched counts as missing.
    ancestors = {os.getpid(): "its first process", os.getppid(): "its launcher on this host"}
    supervisor = os.fork()
    if supervisor:
        _run_role(lambda: _relay_signals(config, supervisor))
    # Launchers clean up by process group. The supervisor must survive that, to end what the rank started.
    os.setpgid(0, 0)
    ours, theirs = socket.socketpair()
    rank = os.fork()
    if rank:
        theirs.close()
        _run_role(
            lambda: Supervisor(config, protocol.MessageChannel(ours), rank=rank, ancestors=ancestors).run()
        )
    ours.close()
    if config.server is not None:
        config.server.close_copy()
    # A separate group, so that signals of the terminal and the launcher reach the rank once, through its
    # supervisor.
    os.setpgid(0, 0)
    # A program that a shell started in the background ignores SIGINT, by which supervisors stop ranks.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.rank != 0:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return SupervisorChannel(protocol.MessageChannel(theirs), config.rank)


def _run_role(role: Callable[[], int]) -> NoReturn:
    """Run `role` until it ends, and exit with its code.

    No other code of the program may run in this process afterwards.
    """
    exit_code = 1
    try:
        _adopt_orphans()
        # MPICH's hydra announces a dead rank to the others by SIGUSR1; the control server does that better.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        exit_code = role()
    finally:
        error = sys.exception()
        # This comes first, even if this process or the reader of its output is in trouble.
        end_processes(psutil.Process().children(recursive=True))
        with suppress(OSError):  # a launcher that has ended has left a broken pipe
            if error is not None:
                traceback.print_exception(error)
            sys.stderr.flush()
        os._exit(exit_code)


def _relay_signals(config: SupervisorConfig, supervisor: int) -> int:
    """Relay signals to the supervisor and wait for it. If it was killed, end the processes that it leaves."""
    if config.server is not None:
        config.server.close_copy()
    for number in _STOPPING_SIGNALS:
        signal.signal(number, lambda received, _frame: os.kill(supervisor, received))
    _, status = os.waitpid(supervisor, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        # The server notices the broken connection. With exit code 0, the launcher does not report it as well.
        return 0 if config.control is not None else 1
    return code


class Supervisor:
    """A supervisor's event loop: messages from the rank and the control server, ended processes, signals."""

    def __init__(
        self,
        config: SupervisorConfig,
        channel: protocol.MessageChannel,
        *,
        rank: int,
        ancestors: Mapping[int, str],
    ) -> None:
        self._config = config
        self._rank_channel = channel
        self._rank_pid = rank
        self._ancestors = ancestors
        self._control: protocol.MessageChannel | None = None
        self._failure: protocol.Failed | None = None
        self._has_finished = False
        self._rank_ends_itself = False
        self._exit_code: int | None = None
        self._kill_at_s = math.inf
        self._shared_memory: tuple[Path, ...] = ()
        self._is_dismissed = False
        self._has_connected = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run until the rank and its descendants have ended, and report this.

        Returns the supervisor's exit code.
        """
        signals = _open_signal_socket()
        self._selector.register(signals, selectors.EVENT_READ, lambda: self._on_signal(signals))
        self._watch_process(self._rank_pid, self._on_rank_end)
        for pid, name in self._ancestors.items():
            # Without the launcher, the rank's output and exit code would be lost.
            cause = f"{name}, process {pid}, was killed"
            if pid > 0:  # a parent outside this container cannot be watched
                try:
                    self._watch_process(pid, partial(self._fail, cause))
                except ProcessLookupError:  # the job was stopped while it started
                    self._fail(cause)
        self._selector.register(self._rank_channel, selectors.EVENT_READ, self._on_rank_message)
        with self._config.server or nullcontext():
            if self._config.control is not None:
                self._connect(*self._config.control)
            while self._exit_code is None or not (self._is_dismissed or self._control is None):
                left_s = max(0.0, self._kill_at_s - time.monotonic())
                for key, _ in self._selector.select(timeout=None if left_s == math.inf else left_s):
                    key.data()
                if time.monotonic() >= self._kill_at_s:
                    os.kill(self._rank_pid, signal.SIGKILL)
                    self._kill_at_s += KILL_S
        if self._config.server is not None:
            # A launcher may have ended this rank because another failed, before the server's message was
            # read.
            self._failure = self._config.server.failure or self._failure
        if self._failure is not None and self._reports_for_job():
            self._config.announce(self._failure)
        # With any other exit code, the launcher would add its own report to that of the launching process.
        if self._config.control is not None and self._has_connected:
            return 0
        if self._failure is None:
            return self._exit_code
        return 130 if self._failure.ending is protocol.Ending.INTERRUPTED else self._failure.error().exit_code

    def _reports_for_job(self) -> bool:
        # A job has one report: from the launching process, or else from rank 0, or from rank 1 if rank 0 is
        # lost.
        if not self._has_connected:
            return True
        if self._config.control is not None:
            return False
        return self._config.rank == 0 or (self._control is None and self._config.rank == 1)

    def _watch_process(self, pid: int, on_end: Callable[[], None]) -> None:
        pidfd = os.pidfd_open(pid)

        def end() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            on_end()

        self._selector.register(pidfd, selectors.EVENT_READ, end)

    def _connect(self, address: str, token: str) -> None:
        try:
            self._control = protocol.connect_to_server(
                address, token, rank=self._config.rank, host=self._config.host, pid=os.getpid()
            )
        except protocol.ChannelBroken as error:
            self._stop(self._own_failure(f"{_SERVER_IS_GONE}: {error}"))
            return
        except RankError as error:
            self._stop(self._own_failure(str(error)))
            return
        self._has_connected = True
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control_message)
        self._obey(self._control.early)
        if self._failure is not None:
            self._report("failed", **asdict(self._failure))

    def _on_signal(self, signals: socket.socket) -> None:
        signals.recv(64)
        self._fail("interrupted by a signal", protocol.Ending.INTERRUPTED)

    def _on_rank_message(self) -> None:
        try:
            messages = self._rank_channel.receive()
        except protocol.ChannelBroken:
            self._selector.unregister(self._rank_channel)
            return
        for message in messages:
            match message:
                case {"kind": "server", "address": address, "token": token}:
                    self._connect(address, token)
                case {"kind": "finished"}:
                    self._has_finished = True
                case {"kind": "failed"}:
                    self._rank_ends_itself = True
                    failure = protocol.read_failure(message)
                    if self._failure is None:
                        self._report(**message)
                    self._stop(failure)
                case _:
                    self._report(**message)

    def _on_control_message(self) -> None:
        if self._control is None:  # lost while another event of the same round was handled
            return
        try:
            messages = self._control.receive()
        except protocol.ChannelBroken:
            self._on_control_lost()
            return
        self._obey(messages)

    def _obey(self, messages: Sequence[protocol.Message]) -> None:
        for message in messages:
            match message["kind"]:
                case "stop":
                    # The server knows more than this rank: the first cause, and which ranks were missing.
                    self._failure = protocol.read_failure(message)
                    self._stop(self._failure)
                case "absent":
                    with suppress(protocol.ChannelBroken):  # the rank has ended
                        self._rank_channel.send(**message)
                case "dismiss":
                    self._is_dismissed = True

    def _on_control_lost(self) -> None:
        assert self._control is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._control = None
        if not self._is_dismissed:
            # Without the server, no rank would learn of another rank's failure.
            self._stop(protocol.Failed(rank=0, host="its host", cause=_SERVER_IS_GONE))

    def _own_failure(self, cause: str, ending: protocol.Ending = protocol.Ending.FAILED) -> protocol.Failed:
        return protocol.Failed(rank=self._config.rank, host=self._config.host, cause=cause, ending=ending)

    def _fail(self, cause: str, ending: protocol.Ending = protocol.Ending.FAILED) -> None:
        failure = self._own_failure(cause, ending)
        if self._failure is None:
            self._report("failed", **asdict(failure))
        self._stop(failure)

    def _stop(self, failure: protocol.Failed) -> None:
        """End the rank: interrupt it once, so that it can clean up, and kill it after `GRACE_S`."""
        self._failure = self._failure or failure
        if self._exit_code is not None:
            self._report("gone", rank=self._config.rank)
        elif self._kill_at_s == math.inf:
            self._kill_at_s = time.monotonic() + GRACE_S
            self._shared_memory = find_mpi_memory(self._rank_pid)
            if not self._rank_ends_itself:
                os.kill(self._rank_pid, signal.SIGINT)

    def _on_rank_end(self) -> None:
        _, status = os.waitpid(self._rank_pid, 0)
        # Forked workers of the rank hold its channel open, so they must end before the last messages are
        # read.
        end_processes(psutil.Process().children(recursive=True))
        for path in self._shared_memory:
            path.unlink(missing_ok=True)
        if self._rank_channel in self._selector.get_map():
            self._on_rank_message()
        code = os.waitstatus_to_exitcode(status)
        self._exit_code = code if code >= 0 else 1
        self._kill_at_s = math.inf
        if self._failure is not None:
            self._report("gone", rank=self._config.rank)
        elif self._has_finished and code >= 0:
            self._report("finished", rank=self._config.rank, exit_code=code)
        else:
            self._fail(describe_exit(code))

    def _report(self, kind: str, **values: Any) -> None:
        if self._control is not None:
            try:
                self._control.send(kind, **values)
            except protocol.ChannelBroken:
                self._on_control_lost()


def describe_exit(code: int) -> str:
    """Describe the end of a process in a clause. A negative `code` is the signal that killed it."""
    if code >= 0:
        return f"its process ended early, with exit code {code}"
    killed = f"its process was killed by {signal.Signals(-code).name} (signal {-code})"
    if -code == signal.SIGBUS:
        killed += ", most often for want of space in /dev/shm (in a container: --shm-size)"
    return killed


def end_processes(processes: list[psutil.Process]) -> None:
    """Kill `processes` and everything they start meanwhile. Waits up to `KILL_S` until they have ended."""
    deadline_s = time.monotonic() + KILL_S
    while processes and time.monotonic() < deadline_s:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=0.2)
        # If this process adopts orphans, it is now the parent of their children, so none escapes by
        # detaching.
        processes = psutil.Process().children(recursive=True)


def _adopt_orphans() -> None:
    """Make this process, instead of init, the parent of all orphans among its descendants."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise Unavailable(
            f"This process cannot become the parent of orphaned processes: {os.strerror(code)}",
            fix="Run on Linux 3.4 or newer, and allow prctl in the container's seccomp profile.",
        )


def _open_signal_socket() -> socket.socket:
    """Open a socket that receives a byte for each stop signal; these signals no longer kill the process."""
    ours, handlers = socket.socketpair()
    handlers.setblocking(False)  # noqa: FBT003 - the socket module's interface
    signal.set_wakeup_fd(handlers.detach())
    for number in _STOPPING_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    return ours


def find_mpi_memory(pid: int) -> tuple[Path, ...]:
    """Return the shared-memory files that MPICH created for a process, and that only a normal exit removes.

    An interrupted job would leave a few megabytes per rank in /dev/shm until the next boot.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return ()
    _, *mapped = maps.split(_MPICH_MEMORY)
    return tuple(sorted({Path(_MPICH_MEMORY + line.splitlines()[0].split()[0]) for line in mapped}))
