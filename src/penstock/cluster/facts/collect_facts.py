"""From the answers of all hosts to the facts of the cluster, or the error that names the missing hosts.

Answers come from agents, or from the ranks of a run: the lowest rank of each host reads its own machine.
Invariant: an answer counts only if its process ended with 0 and its document is complete and of this
version; otherwise its host is absent, with the reason.
"""

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from penstock.cluster.comm import Comm
from penstock.cluster.facts.agent_processes import AgentOutput, QueryHosts
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
from penstock.environment import Environment
from penstock.errors import DataDamaged, HostsAbsent, PenstockError, UsageError

LONGEST_STDERR = 4_000
LONGEST_LINE = 200
"""In characters: limits of the file's excerpt, and of a line in an error."""


def collect_from_hosts(
    ask: QueryHosts,
    hosts: Sequence[str],
    *,
    via: Via,
    timeout_s: float,
    collected_at: str,
    allow_partial: bool = False,
) -> ClusterFacts:
    """The facts of all `hosts`. Raises `HostsAbsent` where some did not report, unless `allow_partial`."""
    duplicate = next((host for host in hosts if list(hosts).count(host) > 1), None)
    if duplicate is not None or not hosts:
        raise UsageError(
            f"Host {duplicate!r} is named twice" if duplicate else "No host is given",
            fix="Name each host once: --hosts node1,node2.",
        )
    answers = {answer.host: answer for answer in ask(hosts, timeout_s=timeout_s)}
    outcomes = [parse_agent_output(answers.get(host), host=host, timeout_s=timeout_s) for host in hosts]
    present = tuple(outcome for outcome in outcomes if isinstance(outcome, PresentHost))
    absent = tuple(outcome for outcome in outcomes if isinstance(outcome, AbsentHost))
    if absent and not (allow_partial and present):
        raise _incomplete(present, absent)
    return ClusterFacts(
        via=via,
        collected_at=collected_at,
        asked=tuple(hosts),
        is_partial=bool(absent),
        present=present,
        absent=absent,
    )


def parse_agent_output(
    answer: AgentOutput | None, *, host: str, timeout_s: float
) -> PresentHost | AbsentHost:
    """A host's report, or why there is none."""
    if answer is None:
        return AbsentHost(host=host, reason="was not queried", exit_code=None, stderr="")

    def absent(reason: str) -> AbsentHost:
        return AbsentHost(
            host=host,
            reason=reason,
            exit_code=answer.exit_code,
            stderr=_shortened(answer.stderr.strip()),
        )

    if answer.exit_code is None:
        return absent(f"no answer within {timeout_s:g} s")
    if answer.exit_code != 0:
        # Even with a complete document: the launcher failed at something that is not visible here.
        return absent(f"exit code {answer.exit_code}")
    document = extract_document(answer.stdout)
    if document is None:
        return absent(f"no facts in its output: {answer.stdout.strip()[:80]!r}")
    try:
        report = parse_facts(HostReport, document, where=host)
    except DataDamaged as error:
        return absent(f"unreadable facts: {error.what}")
    return PresentHost(
        host=host,
        asked_unix_s=answer.asked_unix_s,
        answered_unix_s=answer.answered_unix_s,
        report=report,
    )


def _shortened(text: str) -> str:
    """The beginning and the end: either may contain the reason."""
    half = LONGEST_STDERR // 2
    return text if len(text) <= LONGEST_STDERR else f"{text[:half]}\n...\n{text[-half:]}"


def _incomplete(present: Sequence[PresentHost], absent: Sequence[AbsentHost]) -> HostsAbsent:
    return HostsAbsent(
        reported=tuple(host.host for host in present),
        absent={host.host: _describe_absence(host) for host in absent},
    )


def _describe_absence(absent: AbsentHost) -> str:
    lines = [line.strip()[:LONGEST_LINE] for line in absent.stderr.splitlines() if line.strip()]
    if not lines:
        return absent.reason
    # Launchers print the cause first and its consequences after it; tracebacks end with the cause.
    excerpt = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{absent.reason}, with the output: {excerpt}"


def collect_from_ranks(
    comm: Comm, environment: Environment, *, now: Callable[[], datetime], root: Path = ROOT
) -> ClusterFacts:
    """The facts of all hosts that have ranks, the same on every rank. Collective; never raises for a host."""
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    reads = hosts.index(comm.host) == comm.rank
    asked_unix_s = time.time()
    comm.barrier(awaiting="all ranks to start reading the facts of their hosts")
    reports = comm.gather(
        _read(comm.host, environment, root) if reads else None, awaiting="facts of all hosts"
    )
    answered_unix_s = time.time()
    outcomes = [
        PresentHost(host=host, asked_unix_s=asked_unix_s, answered_unix_s=answered_unix_s, report=report)
        if isinstance(report, HostReport)
        else AbsentHost(host=host, reason=report, exit_code=None, stderr="")
        for host, report in zip(hosts, reports, strict=True)
        if report is not None
    ]
    facts = ClusterFacts(
        via="ranks",
        collected_at=now().isoformat(timespec="seconds"),
        asked=tuple(outcome.host for outcome in outcomes),
        is_partial=any(isinstance(outcome, AbsentHost) for outcome in outcomes),
        present=tuple(outcome for outcome in outcomes if isinstance(outcome, PresentHost)),
        absent=tuple(outcome for outcome in outcomes if isinstance(outcome, AbsentHost)),
    )
    return comm.broadcast(facts, awaiting="rank 0 to combine the facts of all hosts")


def _read(host: str, environment: Environment, root: Path) -> HostReport | str:
    try:
        return read_report(host, environment, root=root)
    except (OSError, ValueError, KeyError, PenstockError) as error:
        return f"{type(error).__name__}: {error}"
