"""The options that run a command on several ranks, and the communicator that the command gets.

`@ranked` adds `--ranks` and related options to a command. Outside a launcher, they start the same command
line on every rank and supervise it. Under a launcher (mpirun, srun, torchrun), the command joins the job to
which its process belongs.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from _thread import start_new_thread  # takes none of threading's locks, which may be held at a signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from shutil import get_terminal_size
from time import monotonic, sleep
from types import FrameType
from typing import Any, Concatenate, Final

from penstock import environment as env
from penstock.cli.option_groups import FollowOptions
from penstock.cli.options import (
    JSON_OPTION,
    Verb,
    command_line,
    fill,
    group,
    option,
    options_of,
    refuse_ignored,
    repeated,
)
from penstock.cli.parsers import FOLDER_URI, LAUNCHER, NAME, TEXT, TIME, whole
from penstock.cli.terminal import Terminal
from penstock.cluster import launcher_command, launcher_env
from penstock.cluster.comm import Comm

_LONGEST_IMPORT_S: Final = 10.0
"""The longest time that a signal waits for the end of an import, which may run a user's program."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The number of ranks that run a command, their hosts, and their launcher."""

    ranks: int | None = option(
        "--ranks", whole(), "Run on N ranks (default: 1, or under a launcher, all of its ranks)."
    )
    hosts: str | None = option(
        "--hosts", TEXT, "Run on these hosts, each written as HOST:RANKS.", metavar="A:4,B:4"
    )
    hostfile: str | None = option("--hostfile", TEXT, "Read hosts from a file, one per line.", metavar="FILE")
    launcher: str = option("--launcher", LAUNCHER, "Start remote ranks with this launcher.", default="auto")
    launcher_args: tuple[str, ...] = repeated("--launcher-arg", TEXT, "Pass an argument to the launcher.")
    env_names: tuple[str, ...] = repeated(
        "--env",
        NAME,
        "Pass an environment variable to remote ranks (AWS_* and PENSTOCK_* are always passed).",
    )
    timeout_s: float = option("--timeout", TIME, "Wait at most this long for other ranks.", default="5min")
    trace: str | None = option("--trace", FOLDER_URI, "Write an I/O trace of every storage access into DIR.")


_RANKS: dict[str, Any] = {"ranks": group(RankOptions, panel="Ranks")}
_FOLLOWING: dict[str, Any] = {"following": group(FollowOptions, panel="Monitoring")}


def ranked(
    function: Callable[Concatenate[Comm, Terminal, ...], int | None],
    *,
    default_ranks: Callable[[Mapping[str, Any]], int | None] | None = None,
    is_followed: bool = False,
) -> Verb:
    """Make a command that runs on several ranks, from a function of a communicator, a terminal and options.

    The function returns the exit code, which must be the same on all ranks. `default_ranks` derives the
    default of --ranks from the command's values. For a long-running command, use `followed`, which adds
    --watch.
    """
    own = options_of(function)

    def call(values: Mapping[str, Any]) -> int | None:
        from penstock.cluster.supervision import join_job

        environment = env.process_environment()
        ranks: RankOptions = fill(_RANKS, values)["ranks"]
        is_launched = launcher_env.detect_rank(environment) is not None
        if not is_launched:
            has_hosts = bool(ranks.hosts or ranks.hostfile)
            if default_ranks is not None and ranks.ranks is None and not has_hosts:
                ranks = replace(ranks, ranks=default_ranks(values))
            if has_hosts or ranks.ranks not in (None, 1):
                return _launch(ranks, environment)
            if ranks.ranks is None:
                refuse_ignored(
                    ("--launcher", "--launcher-arg", "--env"),
                    "nothing is launched",
                    fix="Leave it out, or add --ranks or --hosts.",
                )
        # Join as the rank of this process: rank 0 of 1 unless a launcher started it. The supervisor of a
        # launched rank has its own way to end it.
        job = join_job(environment, ranks=ranks.ranks, timeout_s=ranks.timeout_s)
        with (
            nullcontext() if is_launched else _terminated_as_interrupted(),
            job as comm,
            _woken_by_signals(),
            _traced(ranks.trace or environment.get(env.TRACE), comm),
        ):
            terminal = Terminal(
                as_json=values["as_json"],
                speaks=comm.rank == 0,
                ranks=comm.size,
                find_wait=comm.present_wait,
                open_followers=fill(_FOLLOWING, values)["following"].followers if is_followed else None,
            )
            return function(comm, terminal, **fill(own, values))

    following = _FOLLOWING if is_followed else {}
    return Verb(function.__doc__ or "", own | JSON_OPTION | following | _RANKS, call)


followed = partial(ranked, is_followed=True)
"""Like `ranked`, with --watch and --metrics-dir for a command that takes long."""


def _launch(ranks: RankOptions, environment: env.Environment) -> int:
    """Start the same command line on all ranks; return rank 0's exit code."""
    from penstock.cluster.supervision.job_launch import launch_job

    variables = dict(environment)
    # Ranks have no terminal, so rank 0 draws its progress on the terminal of this process.
    if sys.stderr.isatty():
        variables[env.PROGRESS_COLUMNS] = str(get_terminal_size().columns)
    if ranks.trace is not None:
        variables[env.TRACE] = str(Path(ranks.trace).absolute())
    # Name this interpreter, because a search of another host's PATH may find another Penstock, or none.
    program = [sys.executable, "-P", "-m", "penstock", *command_line()[1:]]
    plan = launcher_command.plan_launch(
        program,
        variables,
        launcher=launcher_command.find_launcher(ranks.launcher, environment),
        ranks=ranks.ranks,
        hosts=ranks.hosts,
        hostfile=ranks.hostfile,
        launcher_args=ranks.launcher_args,
        env_names=ranks.env_names,
    )
    return launch_job(plan)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the body as Ctrl-C does, so that workers end and records give the reason.

    Neither signal gets lost. Native modules drop or replace an exception that is raised while they are
    imported, so the signal waits for the end of the import. Python only prints an exception raised in a
    finalizer or in a callback from C, so the signal is raised again.
    """
    main_thread, usual_hook = threading.main_thread().ident, sys.unraisablehook
    arrived, gives_up_at, is_over = signal.SIGINT, inf, False
    assert main_thread is not None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal arrived, gives_up_at
        arrived = signal.Signals(number)
        gives_up_at = min(gives_up_at, monotonic() + _LONGEST_IMPORT_S)
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            frame = frame.f_back
        if frame is None or monotonic() > gives_up_at:
            raise KeyboardInterrupt(f"Stopped by {arrived.name}.")
        start_new_thread(send_again, ())

    def send_again() -> None:
        sleep(0.02)
        if not is_over:
            signal.pthread_kill(main_thread, arrived)

    def catch_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            start_new_thread(send_again, ())
        else:
            usual_hook(unraisable)

    # Shells make background commands ignore SIGINT, and other handlers of a signal keep it.
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number, handler in usual.items() if is_main and signal.getsignal(number) == handler]
    for number in taken:
        signal.signal(number, interrupt)
    if taken:
        sys.unraisablehook = catch_unraisable
    try:
        yield
    finally:
        is_over = True
        for number in taken:
            signal.signal(number, usual[number])
        if taken:
            sys.unraisablehook = usual_hook


@contextmanager
def _woken_by_signals() -> Iterator[None]:
    """Let every signal interrupt the main thread, even while it waits for a lock.

    Python runs handlers between two steps of the main thread. A signal that arrives just before the thread
    waits for a lock does not interrupt the wait, but a second signal does, whatever its number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def wake_again(main_thread: int) -> None:
        with arrivals:
            while numbers := arrivals.recv(64):
                for delay_s in (0.05, 0.5, 2.0) if set(numbers) - {signal.SIGURG} else ():
                    sleep(delay_s)
                    signal.pthread_kill(main_thread, signal.SIGURG)

    arrivals, handlers = socket.socketpair()
    handlers.setblocking(False)
    usual = signal.signal(signal.SIGURG, lambda _number, _frame: None)
    before = signal.set_wakeup_fd(handlers.fileno(), warn_on_full_buffer=False)
    start_new_thread(wake_again, (threading.get_ident(),))
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGURG, usual)
        handlers.close()


@contextmanager
def _traced(folder: str | None, comm: Comm) -> Iterator[None]:
    """Trace storage accesses of this rank and its workers into `folder`, if it is given.

    The variables are exported because worker processes find the trace only through their environment.
    """
    if not folder:
        yield
        return
    from penstock.trace.capture.recorder import get_recorder

    path, rank = str(Path(folder).absolute()), f"{comm.rank}/{comm.size}"
    env.export_variables({env.TRACE: path, env.TRACE_RANK: rank})
    try:
        yield
    finally:
        get_recorder(path, rank).close()
        env.withdraw_variable(env.TRACE)
        env.withdraw_variable(env.TRACE_RANK)
