"""One agent process for each host, many at once, each with its own time limit.

The agent (`python -m penstock.cluster.facts`) is started here, by ssh, or by a launcher: one for each host,
so that a dead host costs only its own answer, and each has its own exit code and output. Values of variables
never appear in command lines (see `launcher_command`). Invariant: when the query returns or raises, every
process that it started has ended.
"""

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
"""How long a launcher may take to end its remote process after SIGTERM."""
NOT_STARTED = 127
"""The exit code of shells for a missing program."""
LONGEST_ANSWER_BYTES = 16 << 20

CommandFor = Callable[[str], Sequence[str]]
"""The command line that runs the agent on a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutput:
    """The output of one host's agent. `exit_code` is None where the process was ended at its limit."""

    host: str
    exit_code: int | None
    stdout: str
    stderr: str
    asked_unix_s: float
    answered_unix_s: float


class QueryHosts(Protocol):
    """Queries hosts: one answer each, in any order."""

    def __call__(self, hosts: Sequence[str], *, timeout_s: float) -> Iterator[AgentOutput]:
        """Query all of `hosts`, each for at most `timeout_s`."""
        ...


class AgentProcesses:
    """Queries hosts by the command lines of `command_for`: a launcher's, or the agent's own."""

    def __init__(self, command_for: CommandFor, environment: Environment, *, at_once: int = AT_ONCE) -> None:
        self._command_for = command_for
        self._environment = environment
        self._at_once = at_once

    def __call__(self, hosts: Sequence[str], *, timeout_s: float) -> Generator[AgentOutput, None, None]:
        """Yield answers as they arrive; the limit of a host begins when its process starts."""
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
                ended = [process for process in running if process.is_over(timeout_s)]
                _stop(ended)
                for process in ended:
                    answer = process.answer()
                    running.remove(process)
                    yield answer
                if not ended:
                    time.sleep(POLL_S)


class _Running:
    """One host's process. Its output goes to files, because a grandchild may keep a pipe open."""

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
                start_new_session=True,  # its own group, to end all that the launcher starts here
            )
            self._files = undo.pop_all()

    def is_over(self, timeout_s: float) -> bool:
        """Whether the process has ended, or exceeds its limit."""
        has_ended = self._process.poll() is not None
        self._over_unix_s = time.time()  # after `poll`: it must not be before the end
        if has_ended:
            return True
        self._is_late = time.monotonic() - self._began_s > timeout_s
        return self._is_late

    def ask_to_stop(self) -> None:
        """Ask the process to end; launchers pass that on to the other machine."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)

    def end(self, deadline_s: float) -> None:
        """Wait until `deadline_s`, then kill the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def answer(self) -> AgentOutput:
        """The output; call it once the process has ended."""
        output = [_content(file) for file in (self._out, self._err)]
        self.close()
        return AgentOutput(
            host=self._host,
            exit_code=None if self._is_late else self._process.returncode,
            stdout=output[0],
            stderr=output[1],
            asked_unix_s=self._asked_unix_s,
            answered_unix_s=self._over_unix_s,
        )

    def close(self) -> None:
        """Delete the output."""
        self._files.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _stop(running: Sequence[_Running]) -> None:
    """End all of them, within one common grace period."""
    # All at once first, so that the grace period is waited for once.
    for process in running:
        process.ask_to_stop()
    deadline_s = time.monotonic() + GRACE_S
    for process in running:
        process.end(deadline_s)


def _close(running: Sequence[_Running]) -> None:
    _stop(running)
    for process in running:
        process.close()


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
"""Variables that ssh itself needs. It gets no others: a user's SendEnv may forward any, secrets, too."""


def agent_command(python: str) -> tuple[str, ...]:
    """The agent's own command line, under the interpreter `python` of the host that runs it.

    `-P` keeps files of the working folder from being imported as modules.
    """
    return (python, "-P", "-m", "penstock.cluster.facts")


def local_command(python: str) -> CommandFor:
    """The agent on this machine, whatever the host is called."""

    def command_for(_host: str) -> Sequence[str]:
        return agent_command(python)

    return command_for


def ssh_command(python: str, arguments: Sequence[str], *, timeout_s: float) -> CommandFor:
    """The agent by ssh, which never prompts. `python` may be a name on the PATH of the host."""
    fixed = ("ssh", "-T", "-o", "BatchMode=yes", *arguments, "-o", f"ConnectTimeout={math.ceil(timeout_s)}")

    def command_for(host: str) -> Sequence[str]:
        # The remote shell parses one line; after `--` no host name is taken for an option.
        return (*fixed, "--", host, f"exec {shlex.join(agent_command(python))}")

    return command_for


def ssh_environment(environment: Environment) -> Environment:
    """The variables for ssh."""
    return {name: environment[name] for name in environment if name in _SSH_VARIABLES}


def launcher_agent_command(request: LaunchRequest, environment: Environment, python: str) -> CommandFor:
    """The agent as a job of one rank on the host, by the launcher of `request`."""
    launcher = find_launcher(request.launcher, environment)

    def command_for(host: str) -> Sequence[str]:
        # An IPv6 address must be in brackets where a count follows.
        slot = f"[{host}]:1" if ":" in host else f"{host}:1"
        one = replace(request, hosts=slot, hostfile=None, ranks=1)
        return build_launch_plan(one, agent_command(python), environment, launcher=launcher).argv

    return command_for
