"""Collect the facts of a cluster's hosts, or raise the error that names the missing hosts.

Each host's facts come from an agent (`penstock.cluster.facts.read_host`), a process that is started locally,
by ssh or by a launcher. Each host has its own process, and many run at once, so that a dead host costs only
its own facts. In a run, the lowest rank of each host reads the facts of its machine. Values of variables
never appear in command lines (see `launcher_command`).

Invariants: a response counts only if its process exited with 0 and its document is complete and of this
version; otherwise the host counts as absent, with the reason. When a query ends, every process that it
started has ended.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from penstock.cluster.comm import Comm, format_cause
from penstock.cluster.facts.host_facts import (
    AbsentHost,
    ClusterFacts,
    HostReport,
    PresentHost,
    Via,
    extract_document,
    parse_facts,
)
from penstock.cluster.facts.read_host import ROOT, read_report
from penstock.cluster.launcher_command import find_launcher, plan_launch
from penstock.environment import Environment
from penstock.errors import DataDamaged, HostsAbsent, PenstockError

AT_ONCE = 32
POLL_S = 0.02
GRACE_S = 1.0
"""The time within which a launcher must end its remote process after SIGTERM."""
NOT_STARTED = 127
"""The exit code of shells for a program that does not exist."""
LONGEST_ANSWER_BYTES = 16 << 20
LONGEST_STDERR = 4_000
LONGEST_LINE = 200
"""The limits, in characters, of standard error's excerpt in the file, and of a line in an error."""

CommandFor = Callable[[str], Sequence[str]]
"""Returns the command line that runs the agent on a host."""
_SSH_VARIABLES = frozenset(
    {"HOME", "KRB5CCNAME", "LANG", "LOGNAME", "PATH", "SHELL", "SSH_AUTH_SOCK", "TMPDIR", "USER"}
)
"""Variables that ssh itself needs. It gets no others, because a user's SendEnv may forward any, including
secrets.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutput:
    """The output of one host's agent. `exit_code` is None if the process was ended at its time limit."""

    host: str
    exit_code: int | None
    stdout: str
    stderr: str
    asked_unix_s: float
    answered_unix_s: float


def plan_agents(
    via: Via,
    environment: Environment,
    *,
    python: str,
    launcher: str = "auto",
    arguments: Sequence[str] = (),
    timeout_s: float,
) -> tuple[CommandFor, Environment]:
    """Return the command line of each host's agent, and the variables that it receives.

    `python` is the interpreter on the hosts. `arguments` are passed to the launcher, or to ssh, which never
    prompts.
    """
    # `-P` keeps files of the working folder from being imported as modules.
    agent = (python, "-P", "-m", "penstock.cluster.facts.read_host")
    if via == "local":
        return lambda _host: agent, environment
    if via == "ssh":
        limit = f"ConnectTimeout={math.ceil(timeout_s)}"
        fixed = ("ssh", "-T", "-o", "BatchMode=yes", *arguments, "-o", limit)
        variables = {name: environment[name] for name in environment if name in _SSH_VARIABLES}
        # The remote shell parses one line. After `--`, no host name is mistaken for an option.
        return lambda host: (*fixed, "--", host, f"exec {shlex.join(agent)}"), variables
    if via == "slurm":
        # Without --overlap, a step waits until the job's other steps release its processors.
        launcher, arguments = "srun", ("--overlap", *arguments)
    program = find_launcher(launcher, environment)

    def launch_on(host: str) -> Sequence[str]:
        # An IPv6 address must be in brackets if a count follows.
        slot = f"[{host}]:1" if ":" in host else f"{host}:1"
        return plan_launch(agent, environment, launcher=program, hosts=slot, launcher_args=arguments).argv

    return launch_on, environment


def query_hosts(
    hosts: Sequence[str],
    command_for: CommandFor,
    environment: Environment,
    *,
    timeout_s: float,
    at_once: int = AT_ONCE,
) -> Generator[AgentOutput, None, None]:
    """Yield the responses of all hosts as they arrive. A host's time limit begins when its process starts."""
    waiting = list(reversed(hosts))
    running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes], float, float]] = {}
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lambda: _end([process for process, *_ in running.values()]))
        while waiting or running:
            while waiting and len(running) < at_once:
                host = waiting.pop()
                asked_unix_s = time.time()
                # Output goes to files, because a grandchild may keep a pipe open.
                out: IO[bytes] = cleanup.enter_context(tempfile.TemporaryFile())
                err: IO[bytes] = cleanup.enter_context(tempfile.TemporaryFile())
                try:
                    process = subprocess.Popen(
                        list(command_for(host)),
                        env=dict(environment),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,  # in a new group, to end all that the launcher starts here
                    )
                except OSError as error:
                    yield AgentOutput(
                        host=host,
                        exit_code=NOT_STARTED,
                        stdout="",
                        stderr=f"{error.filename}: {error.strerror}",
                        asked_unix_s=asked_unix_s,
                        answered_unix_s=asked_unix_s,
                    )
                    continue
                running[host] = (process, out, err, asked_unix_s, time.monotonic() + timeout_s)
            now_s = time.monotonic()
            exit_codes = {
                host: process.returncode
                for host, (process, *_, deadline_s) in running.items()
                if process.poll() is not None or now_s > deadline_s
            }
            answered_unix_s = time.time()  # after `poll`, so that it is not before the process ended
            _end([running[host][0] for host in exit_codes])
            for host, exit_code in exit_codes.items():
                _, out, err, asked_unix_s, _ = running.pop(host)
                yield AgentOutput(
                    host=host,
                    exit_code=exit_code,
                    stdout=_content(out),
                    stderr=_content(err),
                    asked_unix_s=asked_unix_s,
                    answered_unix_s=answered_unix_s,
                )
            if not exit_codes:
                time.sleep(POLL_S)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes; launchers pass SIGTERM on to the other machines."""
    # Signal all processes first, so that the grace period passes only once.
    deadline_s = time.monotonic() + GRACE_S
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline_s - time.monotonic()))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _content(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read(LONGEST_ANSWER_BYTES).decode(errors="replace")


def collect_from_hosts(
    answers: Iterable[AgentOutput],
    hosts: Sequence[str],
    *,
    via: Via,
    timeout_s: float,
    collected_at: str,
    allow_partial: bool = False,
) -> ClusterFacts:
    """Combine the responses of all `hosts`, as `query_hosts` yields them, into the facts of the cluster.

    Raises `HostsAbsent` if some hosts did not report, unless `allow_partial` is set.
    """
    outcomes = {answer.host: parse_agent_output(answer, timeout_s=timeout_s) for answer in answers}
    facts = _combine(via, collected_at, [outcomes[host] for host in hosts])
    if facts.absent and not (allow_partial and facts.present):
        raise HostsAbsent(
            reported=tuple(host.host for host in facts.present),
            absent={host.host: _describe_absence(host) for host in facts.absent},
        )
    return facts


def _combine(via: Via, collected_at: str, outcomes: Sequence[PresentHost | AbsentHost]) -> ClusterFacts:
    absent = tuple(outcome for outcome in outcomes if isinstance(outcome, AbsentHost))
    return ClusterFacts(
        via=via,
        collected_at=collected_at,
        asked=tuple(outcome.host for outcome in outcomes),
        is_partial=bool(absent),
        present=tuple(outcome for outcome in outcomes if isinstance(outcome, PresentHost)),
        absent=absent,
    )


def parse_agent_output(answer: AgentOutput, *, timeout_s: float) -> PresentHost | AbsentHost:
    """Parse a host's report, or find the reason why there is none."""
    # Both the beginning and the end may contain the reason.
    stderr, half = answer.stderr.strip(), LONGEST_STDERR // 2
    if len(stderr) > LONGEST_STDERR:
        stderr = f"{stderr[:half]}\n...\n{stderr[-half:]}"

    def absent(reason: str) -> AbsentHost:
        return AbsentHost(host=answer.host, reason=reason, exit_code=answer.exit_code, stderr=stderr)

    if answer.exit_code is None:
        return absent(f"no response within {timeout_s:g} s")
    if answer.exit_code != 0:
        # The document does not count even if it is complete, because the launcher failed for a reason unknown
        # here.
        return absent(f"exit code {answer.exit_code}")
    document = extract_document(answer.stdout)
    if document is None:
        return absent(f"no facts in its output: {answer.stdout.strip()[:80]!r}")
    try:
        report = parse_facts(HostReport, document, where=answer.host)
    except DataDamaged as error:
        return absent(f"unreadable facts: {error.what}")
    return PresentHost(
        host=answer.host,
        asked_unix_s=answer.asked_unix_s,
        answered_unix_s=answer.answered_unix_s,
        report=report,
    )


def _describe_absence(absent: AbsentHost) -> str:
    lines = [line.strip()[:LONGEST_LINE] for line in absent.stderr.splitlines() if line.strip()]
    if not lines:
        return absent.reason
    # Launchers print the cause first and its consequences after it, whereas tracebacks end with the cause.
    excerpt = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{absent.reason}, with the output: {excerpt}"


def collect_from_ranks(
    comm: Comm, environment: Environment, *, now: Callable[[], datetime], root: Path = ROOT
) -> ClusterFacts:
    """Collect the facts of all hosts that have ranks.

    The result is the same on every rank. Collective. A host whose facts cannot be read raises no error.
    """
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    reads = hosts.index(comm.host) == comm.rank
    asked_unix_s = time.time()
    comm.barrier(awaiting="all ranks to start reading the facts of their hosts")
    report: HostReport | str | None = None
    if reads:
        try:
            report = read_report(comm.host, environment, root=root)
        except (OSError, ValueError, KeyError, PenstockError) as error:
            report = format_cause(error)
    reports = comm.gather(report, awaiting="facts of all hosts")
    answered_unix_s = time.time()
    outcomes = [
        PresentHost(host=host, asked_unix_s=asked_unix_s, answered_unix_s=answered_unix_s, report=report)
        if isinstance(report, HostReport)
        else AbsentHost(host=host, reason=report, exit_code=None, stderr="")
        for host, report in zip(hosts, reports, strict=True)
        if report is not None
    ]
    facts = _combine("ranks", now().isoformat(timespec="seconds"), outcomes)
    return comm.broadcast(facts, awaiting="rank 0 to combine the facts of all hosts")
