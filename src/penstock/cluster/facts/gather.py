"""From what each host answered to the facts of the cluster, or to the error that names who is missing.

Place in the flow: after `asking`, before the file. Judging an answer is pure. Invariant: an answer counts
only if its process ended with 0 and its document is whole and known; else its host is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cluster.facts.frame import unframed
from penstock.cluster.facts.model import Absent, ClusterFacts, HostReport, Present, parse
from penstock.errors import DataDamaged, HostsAbsent, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cluster.facts.asking import Answer, Ask
    from penstock.cluster.facts.model import Via

LONGEST_STDERR = 4_000
LONGEST_LINE = 200
"""In characters: of what the file keeps, and of a line in an error."""


def gather(
    ask: Ask,
    hosts: Sequence[str],
    *,
    via: Via,
    timeout_s: float,
    collected_at: str,
    allow_partial: bool = False,
) -> ClusterFacts:
    """The facts of all `hosts`. Raises `HostsAbsent` where some did not report, unless `allow_partial`."""
    twice = next((host for host in hosts if list(hosts).count(host) > 1), None)
    if twice is not None or not hosts:
        raise UsageError(
            f"Host {twice!r} is named twice" if twice else "No host is named",
            fix="Name each host once: --hosts node1,node2.",
        )
    answers = {answer.host: answer for answer in ask(hosts, timeout_s=timeout_s)}
    outcomes = [judged(answers.get(host), host=host, timeout_s=timeout_s) for host in hosts]
    present = tuple(each for each in outcomes if isinstance(each, Present))
    absent = tuple(each for each in outcomes if isinstance(each, Absent))
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


def judged(answer: Answer | None, *, host: str, timeout_s: float) -> Present | Absent:
    """A host's report, or why there is none."""
    if answer is None:
        return Absent(host=host, reason="was never asked", exit_code=None, stderr="")

    def absent(reason: str) -> Absent:
        return Absent(
            host=host,
            reason=reason,
            exit_code=answer.exit_code,
            stderr=_shortened(answer.stderr.strip()),
        )

    if answer.exit_code is None:
        return absent(f"no answer within {timeout_s:g} s")
    if answer.exit_code != 0:
        # Even with a whole document: a launcher that fails has failed at something we do not see.
        return absent(f"exit code {answer.exit_code}")
    document = unframed(answer.stdout)
    if document is None:
        return absent(f"no facts in its output: {answer.stdout.strip()[:80]!r}")
    try:
        report = parse(HostReport, document, where=host)
    except DataDamaged as error:
        return absent(f"unreadable facts: {error.what}")
    return Present(
        host=host,
        asked_unix_s=answer.asked_unix_s,
        answered_unix_s=answer.answered_unix_s,
        report=report,
    )


def _shortened(text: str) -> str:
    """Beginning and end: both may tell why."""
    half = LONGEST_STDERR // 2
    return text if len(text) <= LONGEST_STDERR else f"{text[:half]}\n...\n{text[-half:]}"


def _incomplete(present: Sequence[Present], absent: Sequence[Absent]) -> HostsAbsent:
    return HostsAbsent(
        reported=tuple(each.host for each in present),
        absent={each.host: _told(each) for each in absent},
    )


def _told(absent: Absent) -> str:
    lines = [line.strip()[:LONGEST_LINE] for line in absent.stderr.splitlines() if line.strip()]
    if not lines:
        return absent.reason
    # Launchers tell the cause first and then what they made of it; tracebacks tell it last.
    said = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"{absent.reason}, and said: {said}"
