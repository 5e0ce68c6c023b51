"""Are the hosts of a cluster alike? Facts in, one check a subject out.

Pure. A fact that some host could not tell makes its check "not checked" and names the host: hosts are never
taken for alike because nobody looked. Where enough is known to see a difference, that is said first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.cluster.facts.host_facts import ClusterFacts, HostReport, Mount, PresentHost

Verdict = Literal["pass", "warning", "fail", "not checked"]

MEMORY_SLACK = 0.01
"""Equal machines differ by what firmware and a crash kernel keep; a memory module less is far more."""
LARGEST_SKEW_S = 1.0
"""Logs of hosts are compared by the second."""

_SHARED_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "wekafs", "pvfs2")
_OWN_OPTIONS = ("clientaddr=", "addr=", "mountaddr=", "name=")
"""Options that must differ from host to host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HomogeneityCheck:
    """One subject over all hosts: the verdict, what was found, and what to do about it."""

    subject: str
    verdict: Verdict
    found: str
    fix: str = ""


def check_homogeneity(cluster: ClusterFacts) -> tuple[HomogeneityCheck, ...]:
    """All checks, in the order in which they are worth reading."""
    hosts = cluster.present
    return (
        _everyone(cluster),
        _identity(hosts),
        _memory(hosts),
        _same(hosts, "cores", _cores, "Bring the hosts to one kind, or name only equal ones."),
        _same(hosts, "processor", _processor, "Bring the hosts to one kind, or name only equal ones."),
        _same(hosts, "kernel", lambda report: report.kernel, "Boot one kernel on all hosts."),
        _same(hosts, "system", lambda report: report.system, "Install one release on all hosts."),
        *_each_version(hosts),
        _mounts(hosts),
        _sysctl(hosts),
        _limits(hosts),
        _skew(hosts),
        _synchronised(hosts),
    )


def overall_verdict(checks: Sequence[HomogeneityCheck]) -> Verdict:
    """The gravest verdict; what was not checked is graver than a warning."""
    order: tuple[Verdict, ...] = ("fail", "not checked", "warning")
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in order if verdict in verdicts), "pass")


def _everyone(cluster: ClusterFacts) -> HomogeneityCheck:
    if cluster.absent:
        absent = "; ".join(f"{each.host}: {each.reason}" for each in cluster.absent)
        return HomogeneityCheck(
            subject="hosts",
            verdict="not checked",
            found=f"{len(cluster.absent)} of {len(cluster.asked)} did not report: {absent}",
            fix="Collect the facts of all hosts before comparing them.",
        )
    return HomogeneityCheck(subject="hosts", verdict="pass", found=f"all {len(cluster.asked)} reported")


def _identity(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    """Two names of one machine would count its memory and cores twice."""
    by_boot = _grouped(hosts, lambda report: report.boot_id)
    twice = [names for boot_id, names in by_boot.items() if boot_id is not None and len(names) > 1]
    if twice:
        return HomogeneityCheck(
            subject="identity",
            verdict="fail",
            found="; ".join(f"{', '.join(names)} are one machine" for names in twice),
            fix="Name each machine once: sums over hosts would count it several times.",
        )
    return _not_told("identity", by_boot) or HomogeneityCheck(
        subject="identity", verdict="pass", found="every name is a machine of its own"
    )


def _memory(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    known = {each.host: each.report.memory_bytes for each in hosts if each.report.memory_bytes is not None}
    least, most = (chosen(known, key=known.__getitem__, default="") for chosen in (min, max))
    if known and known[most] - known[least] > MEMORY_SLACK * known[most]:
        found = f"{least} has {format_bytes(known[least])}, {most} has {format_bytes(known[most])}"
        fix = "Bring the hosts to equal memory, or name only equal ones."
        return HomogeneityCheck(subject="memory", verdict="fail", found=found, fix=fix)
    unknown = _not_told("memory", _grouped(hosts, lambda report: report.memory_bytes))
    return unknown or HomogeneityCheck(
        subject="memory", verdict="pass", found=f"{format_bytes(sum(known.values()))} on all hosts together"
    )


def _cores(report: HostReport) -> str | None:
    if report.cpu is None:
        return None
    physical = "unknown" if report.cpu.num_physical is None else report.cpu.num_physical
    return f"{report.cpu.num_logical} logical, {physical} physical"


def _processor(report: HostReport) -> str | None:
    return None if report.cpu is None else f"{report.cpu.model} ({report.cpu.machine})"


def _each_version(hosts: Sequence[PresentHost]) -> Iterator[HomogeneityCheck]:
    for name in sorted({name for each in hosts for name in each.report.versions}):
        fix = f"Install one version of {name} on all hosts."
        yield _same(hosts, name, lambda report, name=name: report.versions.get(name), fix)  # type: ignore[misc]


def _mounts(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    """Folders and kinds must agree; where the storage is shared, its source and options as well."""

    def facts(report: HostReport) -> Mapping[str, str] | None:
        if report.mounts is None:
            return None
        return {mount.folder: _mounted(mount) for mount in report.mounts}

    fix = "Mount the same storage, in the same way, on all hosts."
    return _same_entries(hosts, "mounts", facts, differing="fail", fix=fix)


def _mounted(mount: Mount) -> str:
    if not mount.kind.startswith(("fuse", *_SHARED_KINDS)):
        return mount.kind
    options = ",".join(option for option in mount.options if not option.startswith(_OWN_OPTIONS))
    return f"{mount.kind} from {mount.device} with {options}"


def _sysctl(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    # Settings that grow with a host's memory differ a little on equal hosts, so this is for people to judge.
    fix = "Set them alike in /etc/sysctl.d, if they matter to your storage."
    return _same_entries(hosts, "sysctl", lambda report: report.sysctl, differing="warning", fix=fix)


def _limits(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    fix = "Raise them alike, in /etc/security/limits.d or the batch system's own configuration."
    return _same_entries(hosts, "limits", lambda report: report.limits, differing="warning", fix=fix)


def _skew(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    """A host read its clock while it was asked: a time outside of that proves how far it is off, at least."""
    off_s = {
        each.host: max(
            each.asked_unix_s - each.report.clock.read_unix_s,
            each.report.clock.read_unix_s - each.answered_unix_s,
            0.0,
        )
        for each in hosts
        if each.report.clock is not None
    }
    wrong = {host: skew_s for host, skew_s in off_s.items() if skew_s > LARGEST_SKEW_S}
    if wrong:
        found = ", ".join(f"{host} is off by at least {skew_s:.1f} s" for host, skew_s in wrong.items())
        fix = "Synchronise all clocks with chrony, this machine's included."
        return HomogeneityCheck(subject="clocks", verdict="fail", found=found, fix=fix)
    longest_s = max((each.answered_unix_s - each.asked_unix_s for each in hosts), default=0.0)
    found = f"no difference beyond {LARGEST_SKEW_S:g} s seen; asking took up to {longest_s:.1f} s"
    by_clock = _grouped(hosts, lambda report: report.clock and report.clock.read_unix_s)
    return _not_told("clocks", by_clock) or HomogeneityCheck(subject="clocks", verdict="pass", found=found)


def _synchronised(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    by_state = _grouped(hosts, lambda report: report.clock and report.clock.is_synchronised)
    if by_state.get(False):
        return HomogeneityCheck(
            subject="clock service",
            verdict="warning",
            found=f"the kernel takes its clock for unsynchronised on {', '.join(by_state[False])}",
            fix="Start chrony there, to compare times between hosts.",
        )
    return _not_told("clock service", by_state) or HomogeneityCheck(
        subject="clock service", verdict="pass", found="all kernels take their clock for synchronised"
    )


def _same(
    hosts: Sequence[PresentHost], subject: str, fact: Callable[[HostReport], str | None], fix: str
) -> HomogeneityCheck:
    """Whether one fact is the same on all hosts."""
    groups = _grouped(hosts, fact)
    told = {value: names for value, names in groups.items() if value is not None}
    if len(told) > 1:
        found = "; ".join(f"{value} on {', '.join(names)}" for value, names in told.items())
        return HomogeneityCheck(subject=subject, verdict="fail", found=found, fix=fix)
    return _not_told(subject, groups) or HomogeneityCheck(
        subject=subject, verdict="pass", found=str(next(iter(told), "no host"))
    )


def _same_entries(
    hosts: Sequence[PresentHost],
    subject: str,
    facts: Callable[[HostReport], Mapping[str, str] | None],
    *,
    differing: Verdict,
    fix: str,
) -> HomogeneityCheck:
    """Whether named facts are the same on all hosts; each that is not is listed."""
    known = {each.host: entries for each in hosts if (entries := facts(each.report)) is not None}
    names = sorted({name for entries in known.values() for name in entries})
    differences = []
    for name in names:
        values: dict[str, list[str]] = defaultdict(list)
        for host, entries in known.items():
            values[entries.get(name, "absent")].append(host)
        if len(values) > 1:
            told = ", ".join(f"{value} on {', '.join(where)}" for value, where in values.items())
            differences.append(f"{name}: {told}")
    if differences:
        return HomogeneityCheck(subject=subject, verdict=differing, found="; ".join(differences), fix=fix)
    unknown = _not_told(subject, _grouped(hosts, lambda report: None if facts(report) is None else True))
    return unknown or HomogeneityCheck(
        subject=subject, verdict="pass", found=f"{len(names)} the same on all hosts"
    )


def _grouped(
    hosts: Sequence[PresentHost], fact: Callable[[HostReport], Hashable]
) -> dict[Hashable, list[str]]:
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for each in hosts:
        groups[fact(each.report)].append(each.host)
    return dict(groups)


def _not_told(subject: str, groups: Mapping[Hashable, list[str]]) -> HomogeneityCheck | None:
    if None not in groups:
        return None
    return HomogeneityCheck(
        subject=subject,
        verdict="not checked",
        found=f"not known of {', '.join(groups[None])}",
        fix="See why under `unread` of those hosts, and collect again.",
    )
