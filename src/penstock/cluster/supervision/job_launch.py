"""Run a launch plan to its end: start the launcher, watch all ranks, and leave no process behind.

This is the launching process's part of supervision; the supervisors, one next to each rank, do theirs.
Invariant: when `launch_job` returns or raises, the launcher and every rank that this process can reach have
ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BufferedReader
from types import FrameType
from typing import IO

from penstock.cluster.launcher_command import LaunchPlan
from penstock.cluster.supervision.control_protocol import Ending, Failed
from penstock.cluster.supervision.control_server import (
    EVERYWHERE,
    GRACE_S,
    KILL_S,
    ControlServer,
    advertise_address,
)
from penstock.environment import CONTROL_ADDRESS, CONTROL_TOKEN
from penstock.errors import RankError, Unavailable, WaitTimeout, name_some

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
POLL_S = 0.1
HELD_BACK_LINES = 40
AFTER_LAUNCHER_S = 2.0
"""The time by which supervisors may outlive their launcher, because some launchers end before the last
messages are sent.
"""
LAUNCHER_EXIT_S = 5.0
LAUNCHER_EXIT_AFTER_FAILURE_S = 1.0
"""The time that a launcher has to notice that all its ranks have ended."""


def launch_job(plan: LaunchPlan, *, start_timeout_s: float = START_TIMEOUT_S) -> int:
    """Run all ranks to their end. Returns rank 0's exit code.

    Rank 0's standard output becomes this process's, and all other output goes to standard error. Raises the
    error of the first rank that failed (`RankFailed`, or its `UsageError` or `Unavailable`), and
    KeyboardInterrupt for SIGINT and SIGTERM, each after all ranks have ended. Call it in the main thread.
    """
    bind = "127.0.0.1" if plan.is_local else EVERYWHERE
    # After a failure, the output of ranks is only kept: the error that is raised then names the cause once,
    # whereas every stopping rank would add its own messages.
    held_back: deque[str] = deque(maxlen=HELD_BACK_LINES)
    with ControlServer(ranks=plan.ranks, bind=bind) as server, _interrupts_stop(server) as is_launched:
        launcher = _start(plan, server)
        relays = [
            threading.Thread(
                target=_relay, args=(*ends, server, held_back), name="penstock-output", daemon=True
            )
            for ends in ((launcher.stdout, sys.stdout.buffer), (launcher.stderr, sys.stderr.buffer))
        ]
        for relay in relays:
            relay.start()
        try:
            is_launched.set()
            _watch(plan, launcher, server, start_timeout_s)
        except KeyboardInterrupt:
            _wait_until_over(server, launcher)
            raise
        finally:
            # SIGTERM comes first, because launchers pass it on to other hosts, which SIGKILL never reaches.
            for number, limit_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
                if launcher.poll() is None:
                    os.killpg(launcher.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        launcher.wait(timeout=limit_s)
            for relay in relays:
                relay.join(timeout=LAUNCHER_EXIT_S)
    failure = server.failure
    if failure is None:
        return server.exit_codes[0]
    if failure.ending is Ending.INTERRUPTED:
        raise KeyboardInterrupt
    if held_back:
        lines = "\n".join(held_back)
        failure = replace(failure, detail=f"{failure.detail}\nOutput after the failure:\n{lines}".strip())
    raise failure.error()


def _start(plan: LaunchPlan, server: ControlServer) -> subprocess.Popen[bytes]:
    address = f"127.0.0.1:{server.port}" if plan.is_local else advertise_address(server.port)
    environment = {**plan.environment, CONTROL_ADDRESS: address, CONTROL_TOKEN: server.token}
    logger.debug("Launching %s", plan.argv)
    try:
        return subprocess.Popen(
            plan.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must reach ranks only through their supervisors: the launcher would kill the ranks at
            # once.
            start_new_session=True,
        )
    except OSError as error:
        raise Unavailable(
            f"The launcher cannot be started: {error}",
            where=plan.argv[0],
            fix="Choose another --launcher.",
        ) from error


def _watch(
    plan: LaunchPlan, launcher: subprocess.Popen[bytes], server: ControlServer, start_timeout_s: float
) -> None:
    """Wait until all ranks have finished, or until all have stopped after a failure known to the server."""
    start_by_s = time.monotonic() + start_timeout_s
    while not server.is_over:
        server.wait_for_news(POLL_S)
        if launcher.poll() is not None:
            _after_launcher(plan, launcher, server)
            return
        if len(server.arrived) < plan.ranks and server.failure is None and time.monotonic() > start_by_s:
            missing = sorted(set(range(plan.ranks)) - server.arrived)
            awaited = f"{len(missing)} of {plan.ranks} ranks to start ({name_some(missing, 8)})"
            cause = str(WaitTimeout(awaited, start_timeout_s))
            server.stop(Failed(rank=missing[0], host="its host", cause=cause))
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(LAUNCHER_EXIT_S if server.failure is None else LAUNCHER_EXIT_AFTER_FAILURE_S)


def _after_launcher(plan: LaunchPlan, launcher: subprocess.Popen[bytes], server: ControlServer) -> None:
    """Once the launcher has ended, wait for its ranks, and raise an error if some never finished."""
    if not server.arrived and server.failure is None:
        raise RankError(
            f"{plan.launcher} ended with exit code {launcher.returncode} before any rank had started",
            where=plan.argv[0],
            fix="Its messages above say why; the ranks' program must start on every host.",
        )
    _wait_until_over(server, launcher, AFTER_LAUNCHER_S)
    if server.arrived and not server.is_over:
        first = min(server.arrived - server.exit_codes.keys(), default=0)
        cause = f"its launcher ended with exit code {launcher.returncode}"
        server.stop(Failed(rank=first, host="its host", cause=cause))
        _wait_until_over(server, launcher)


def _wait_until_over(
    server: ControlServer, launcher: subprocess.Popen[bytes], limit_s: float = GRACE_S + KILL_S + 1.0
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not server.is_over and time.monotonic() < deadline_s:
        server.wait_for_news(POLL_S)
        if launcher.poll() is not None and not server.arrived:
            return


@contextmanager
def _interrupts_stop(server: ControlServer) -> Iterator[threading.Event]:
    """Stop the job on SIGINT, and on SIGTERM, which batch systems send."""
    # Tell the server first, because an exception raised in a finalizer is lost, but the end of the job must
    # not be. While the launcher is being started, nothing is raised, because no handler would end the
    # launcher yet.
    is_launched = threading.Event()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        server.stop(Failed(rank=0, host="", cause="interrupted", ending=Ending.INTERRUPTED))
        if is_launched.is_set():
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_launched
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _relay(stream: BufferedReader, to: IO[bytes], server: ControlServer, held_back: deque[str]) -> None:
    """Copy `stream` to this process's own output. After a failure, only keep its last lines."""
    with stream:
        # Copy chunks as they arrive rather than lines, because a progress bar is one line that never ends.
        while chunk := stream.read1():
            if server.failure is not None:
                held_back.extend(chunk.decode(errors="replace").splitlines())
                continue
            try:
                to.write(chunk)
                to.flush()
            except (OSError, ValueError) as error:
                cause = f"its output cannot be written: {error}"
                server.stop(Failed(rank=0, host="this machine", cause=cause))
                return
