"""One agent process for each host, all at once, each with a time limit of its own.

The agent (`python -m penstock.cluster.facts`) is started here, by ssh, or by a launcher. A launcher for each
host, rather than one for all, so that a dead host takes no other's answer with it and each has its own exit
code and output. Values of variables never appear in command lines (see `launcher_command`). Invariant: when
the query returns or raises, every process it started has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Protocol

from penstock.cluster.launcher_command import LaunchRequest, build_launch_plan, find_launcher
from penstock.environment import Environment

AT_ONCE = 32
POLL_S = 0.02
GRACE_S = 1.0
"""How long a launcher may take to end its remote process, once told to stop."""
NOT_STARTED = 127
"""What shells, too, say of a program that is not there."""
LONGEST_ANSWER_BYTES = 16 << 20

CommandFor = Callable[[str], Sequence[str]]
"""The command line that makes the agent run on a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutput:
    """What came of asking one host. `exit_code` is None where the process was ended at its limit."""

    host: str
    exit_code: int | None
    stdout: str
    stderr: str
    asked_unix_s: float
    answered_unix_s: float


class QueryHosts(Protocol):
    """The way to hosts: one answer each, in any order."""

    def __call__(self, hosts: Sequence[str], *, timeout_s: float) -> Iterator[AgentOutput]:
        """Ask all of `hosts`, each for `timeout_s` at most."""
        ...


class AgentProcesses:
    """Asks by the command lines that `command_for` makes: a launcher's, or the agent's own."""

    def __init__(self, command_for: CommandFor, environment: Environment, *, at_once: int = AT_ONCE) -> None:
        self._command_for = command_for
        self._environment = environment
        self._at_once = at_once

    def __call__(self, hosts: Sequence[str], *, timeout_s: float) -> Generator[AgentOutput, None, None]:
        """Answers as they come; a host that waits for its turn is not yet timed."""
        waiting = list(reversed(hosts))
        running: list[_Running] = []
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(_close, running)
            while waiting or running:
                while waiting and len(running) < self._at_once:
                    host = waiting.pop()
                    try:
                        running.append(_Running(host, self._command_for(host), self._environment))
                    except OSError as error:
                        yield _not_started(host, error)
                over = [each for each in running if each.is_over(timeout_s)]
                _stop(over)
                for each in over:
                    answer = each.answer()
                    running.remove(each)
                    yield answer
                if not over:
                    time.sleep(POLL_S)


class _Running:
    """One host's process. Its words go to files: a grandchild that keeps a pipe open cannot hold us up."""

    def __init__(self, host: str, command: Sequence[str], environment: Environment) -> None:
        self._host = host
        self._is_late = False
        self._asked_unix_s = self._over_unix_s = time.time()
        self._began_s = time.monotonic()
        with contextlib.ExitStack() as undo:
            self._out: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            self._err: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                start_new_session=True,  # a group of its own, to end whatever the launcher starts here
            )
            self._files = undo.pop_all()

    def is_over(self, timeout_s: float) -> bool:
        """Whether the process has ended, or is too late."""
        has_ended = self._process.poll() is not None
        self._over_unix_s = time.time()  # after the look: it must not lie before the end
        if has_ended:
            return True
        self._is_late = time.monotonic() - self._began_s > timeout_s
        return self._is_late

    def ask_to_stop(self) -> None:
        """Launchers pass this on to the other machine."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)

    def end(self, deadline_s: float) -> None:
        """Kill who has not listened until then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def answer(self) -> AgentOutput:
        """What came of it; call it once the process has ended."""
        said = [_content(file) for file in (self._out, self._err)]
        self.close()
        return AgentOutput(
            host=self._host,
            exit_code=None if self._is_late else self._process.returncode,
            stdout=said[0],
            stderr=said[1],
            asked_unix_s=self._asked_unix_s,
            answered_unix_s=self._over_unix_s,
        )

    def close(self) -> None:
        """Forget what it said."""
        self._files.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _stop(running: Sequence[_Running]) -> None:
    """End all of them, within one time of grace together."""
    for each in running:
        each.ask_to_stop()
    deadline_s = time.monotonic() + GRACE_S
    for each in running:
        each.end(deadline_s)


def _close(running: Sequence[_Running]) -> None:
    _stop(running)
    for each in running:
        each.close()


def _not_started(host: str, error: OSError) -> AgentOutput:
    now = time.time()
    return AgentOutput(
        host=host,
        exit_code=NOT_STARTED,
        stdout="",
        stderr=f"{error.filename}: {error.strerror}",
        asked_unix_s=now,
        answered_unix_s=now,
    )


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(LONGEST_ANSWER_BYTES).decode(errors="replace")


_SSH_VARIABLES = frozenset(
    {"HOME", "KRB5CCNAME", "LANG", "LOGNAME", "PATH", "SHELL", "SSH_AUTH_SOCK", "TMPDIR", "USER"}
)
"""What ssh itself needs. A user's settings may tell it to send on whatever else it is given: secrets, too."""


def agent_command(python: str) -> tuple[str, ...]:
    """The agent's own command line, under the interpreter `python` of the host that runs it.

    `-P` keeps files of the working folder from standing in for modules.
    """
    return (python, "-P", "-m", "penstock.cluster.facts")


def local_command(python: str) -> CommandFor:
    """The agent on this machine, whatever the host is called."""

    def command_for(_host: str) -> Sequence[str]:
        return agent_command(python)

    return command_for


def ssh_command(python: str, arguments: Sequence[str], *, timeout_s: float) -> CommandFor:
    """The agent through ssh, which never asks anything. `python` may be a name that the host's PATH knows."""
    fixed = ("ssh", "-T", "-o", "BatchMode=yes", *arguments, "-o", f"ConnectTimeout={math.ceil(timeout_s)}")

    def command_for(host: str) -> Sequence[str]:
        # The far shell takes one line apart; behind `--` no host's name is taken for an option.
        return (*fixed, "--", host, f"exec {shlex.join(agent_command(python))}")

    return command_for


def ssh_environment(environment: Environment) -> Environment:
    """The variables that ssh runs with."""
    return {name: environment[name] for name in environment if name in _SSH_VARIABLES}


def launcher_agent_command(request: LaunchRequest, environment: Environment, python: str) -> CommandFor:
    """The agent as a job of one rank on the host, by the launcher that `request` asks for."""
    launcher = find_launcher(request.launcher, environment)

    def command_for(host: str) -> Sequence[str]:
        # An address of IPv6 stands in brackets where a count follows.
        slot = f"[{host}]:1" if ":" in host else f"{host}:1"
        one = replace(request, hosts=slot, hostfile=None, ranks=1)
        return build_launch_plan(one, agent_command(python), environment, launcher=launcher).argv

    return command_for
