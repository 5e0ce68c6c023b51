"""Check that the hosts of a cluster are alike, one subject at a time.

Pure. If a fact of some host is unknown, the subject is "not checked" and the host is named, because missing
facts never count as equal. Known differences take precedence.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from penstock.cluster.facts.host_facts import ClusterFacts, HostReport, PresentHost
from penstock.units import format_bytes

Holder = TypeVar("Holder")
Verdict = Literal["pass", "warning", "fail", "not checked"]

MEMORY_SLACK = 0.01
"""Equal machines differ slightly by the memory that firmware and a crash kernel reserve. A missing memory
module is a much larger difference.
"""
LARGEST_SKEW_S = 1.0
"""Logs of different hosts are compared to the second."""

_SHARED_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "wekafs", "pvfs2")
_OWN_OPTIONS = ("clientaddr=", "addr=", "mountaddr=", "name=")
"""Mount options that legitimately differ from host to host."""


@dataclass(frozen=True, slots=True)
class HomogeneityCheck:
    """One subject over all hosts: the verdict, the finding and its fix."""

    subject: str
    verdict: Verdict
    found: str
    fix: str = ""


def check_homogeneity(cluster: ClusterFacts) -> tuple[HomogeneityCheck, ...]:
    """Run all checks, the most important first."""
    hosts = cluster.present
    everyone = HomogeneityCheck("hosts", "pass", f"all {len(cluster.asked)} reported")
    if cluster.absent:
        absent = "; ".join(f"{host.host}: {host.reason}" for host in cluster.absent)
        found = f"{len(cluster.absent)} of {len(cluster.asked)} did not report: {absent}"
        fix = "Collect the facts of all hosts before comparing them."
        everyone = HomogeneityCheck("hosts", "not checked", found, fix)
    return (
        everyone,
        _identity(hosts),
        _memory(hosts),
        _same(
            hosts,
            "cores",
            lambda report: (
                None
                if report.cpu is None
                else f"{report.cpu.num_logical} logical, {report.cpu.num_physical or 'unknown'} physical"
            ),
            "Use hosts of one kind only.",
        ),
        _same(
            hosts,
            "processor",
            lambda report: None if report.cpu is None else f"{report.cpu.model} ({report.cpu.machine})",
            "Use hosts of one kind only.",
        ),
        _same(hosts, "kernel", lambda report: report.kernel, "Boot one kernel on all hosts."),
        _same(hosts, "system", lambda report: report.system, "Install one release on all hosts."),
        *_each_version(hosts),
        _same_entries(
            hosts,
            "mounts",
            _mounts_by_folder,
            differing="fail",
            fix="Mount the same storage, in the same way, on all hosts.",
        ),
        # Settings that scale with memory differ slightly on equal hosts, so a difference is only a warning.
        _same_entries(
            hosts,
            "sysctl",
            lambda report: report.sysctl,
            differing="warning",
            fix="Set them equally in /etc/sysctl.d, if they matter to your storage.",
        ),
        _same_entries(
            hosts,
            "limits",
            lambda report: report.limits,
            differing="warning",
            fix="Set them equally, in /etc/security/limits.d or in the batch system's configuration.",
        ),
        _skew(hosts),
        _synchronised(hosts),
    )


def overall_verdict(checks: Sequence[HomogeneityCheck]) -> Verdict:
    """Return the worst of all verdicts; "not checked" is worse than a warning."""
    order: tuple[Verdict, ...] = ("fail", "not checked", "warning")
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in order if verdict in verdicts), "pass")


def _identity(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    """Check that all hosts are different machines: a machine with two names would count twice."""
    by_boot = _grouped(hosts, lambda report: report.boot_id)
    duplicates = [names for boot_id, names in by_boot.items() if boot_id is not None and len(names) > 1]
    if duplicates:
        found = "; ".join(f"{', '.join(names)} are one machine" for names in duplicates)
        fix = "Name each machine once; otherwise, sums over hosts count it several times."
        return HomogeneityCheck("identity", "fail", found, fix)
    return _pass("identity", by_boot, "every name is a different machine")


def _memory(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    known = {host.host: host.report.memory_bytes for host in hosts if host.report.memory_bytes is not None}
    least, most = (chosen(known, key=known.__getitem__, default="") for chosen in (min, max))
    if known and known[most] - known[least] > MEMORY_SLACK * known[most]:
        found = f"{least} has {format_bytes(known[least])}, {most} has {format_bytes(known[most])}"
        fix = "Use hosts with equal memory only."
        return HomogeneityCheck("memory", "fail", found, fix)
    by_size = _grouped(hosts, lambda report: report.memory_bytes)
    return _pass("memory", by_size, f"{format_bytes(sum(known.values()))} on all hosts together")


def _each_version(hosts: Sequence[PresentHost]) -> Iterator[HomogeneityCheck]:
    for name in sorted({name for host in hosts for name in host.report.versions}):
        fix = f"Install one version of {name} on all hosts."
        yield _same(hosts, name, lambda report, name=name: report.versions.get(name), fix)  # type: ignore[misc]


def _mounts_by_folder(report: HostReport) -> dict[str, str] | None:
    """Return the kind of each mount and, for shared storage, its source and options."""
    if report.mounts is None:
        return None
    mounts = {mount.folder: mount.kind for mount in report.mounts}
    for mount in report.mounts:
        if mount.kind.startswith(("fuse", *_SHARED_KINDS)):
            options = ",".join(option for option in mount.options if not option.startswith(_OWN_OPTIONS))
            mounts[mount.folder] += f" from {mount.device} with {options}"
    return mounts


def _skew(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    """Find the minimum skew of the clocks.

    Each host reads its clock during the query, so a time outside the query proves a minimum skew.
    """
    off_s = {
        host.host: max(
            host.asked_unix_s - host.report.clock.read_unix_s,
            host.report.clock.read_unix_s - host.answered_unix_s,
            0.0,
        )
        for host in hosts
        if host.report.clock is not None
    }
    skewed = {host: skew_s for host, skew_s in off_s.items() if skew_s > LARGEST_SKEW_S}
    if skewed:
        found = ", ".join(f"{host} is off by at least {skew_s:.1f} s" for host, skew_s in skewed.items())
        fix = "Synchronize all clocks with chrony, including this machine's."
        return HomogeneityCheck("clocks", "fail", found, fix)
    longest_s = max((host.answered_unix_s - host.asked_unix_s for host in hosts), default=0.0)
    found = f"no difference above {LARGEST_SKEW_S:g} s; the queries took up to {longest_s:.1f} s"
    by_clock = _grouped(hosts, lambda report: report.clock and report.clock.read_unix_s)
    return _pass("clocks", by_clock, found)


def _synchronised(hosts: Sequence[PresentHost]) -> HomogeneityCheck:
    by_state = _grouped(hosts, lambda report: report.clock and report.clock.is_synchronised)
    if by_state.get(False):
        return HomogeneityCheck(
            "clock service",
            "warning",
            f"the kernel considers its clock unsynchronized on {', '.join(by_state[False])}",
            "Start chrony there, to compare times between hosts.",
        )
    return _pass("clock service", by_state, "all kernels consider their clock synchronized")


def _same(
    hosts: Sequence[PresentHost], subject: str, fact: Callable[[HostReport], str | None], fix: str
) -> HomogeneityCheck:
    """Check that one fact is the same on all hosts."""
    groups = _grouped(hosts, fact)
    known = {value: names for value, names in groups.items() if value is not None}
    if len(known) > 1:
        found = "; ".join(f"{value} on {', '.join(names)}" for value, names in known.items())
        return HomogeneityCheck(subject, "fail", found, fix)
    return _pass(subject, groups, str(next(iter(known), "no host")))


def _same_entries(
    hosts: Sequence[PresentHost],
    subject: str,
    facts: Callable[[HostReport], Mapping[str, str] | None],
    *,
    differing: Verdict,
    fix: str,
) -> HomogeneityCheck:
    """Check that named facts are the same on all hosts. Each fact that differs is listed."""
    known = [(host.host, entries) for host in hosts if (entries := facts(host.report)) is not None]
    num_names, differences = find_differences(known, absent="absent", name=", ".join)
    if differences:
        return HomogeneityCheck(subject, differing, "; ".join(differences), fix)
    groups = _grouped(hosts, lambda report: None if facts(report) is None else True)
    return _pass(subject, groups, f"{num_names} the same on all hosts")


def find_differences(
    entries: Sequence[tuple[Holder, Mapping[str, str]]], *, absent: str, name: Callable[[list[Holder]], str]
) -> tuple[int, list[str]]:
    """Return the number of keys compared, and a phrase for each whose value differs between holders."""
    keys = sorted({key for _, values in entries for key in values}, key=str.lower)
    differences = []
    for key in keys:
        holders: dict[str, list[Holder]] = defaultdict(list)
        for holder, values in entries:
            holders[values.get(key, absent)].append(holder)
        if len(holders) > 1:
            differences.append(
                f"{key}: {', '.join(f'{value} on {name(of)}' for value, of in holders.items())}"
            )
    return len(keys), differences


def _grouped(
    hosts: Sequence[PresentHost], fact: Callable[[HostReport], Hashable]
) -> dict[Hashable, list[str]]:
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for host in hosts:
        groups[fact(host.report)].append(host.host)
    return dict(groups)


def _pass(subject: str, groups: Mapping[Hashable, list[str]], found: str) -> HomogeneityCheck:
    """Return a passed check, or "not checked" if a fact of some host is unknown."""
    if None not in groups:
        return HomogeneityCheck(subject, "pass", found)
    unknown = f"unknown on {', '.join(groups[None])}"
    fix = "See why under `unread` of those hosts, and collect again."
    return HomogeneityCheck(subject, "not checked", unknown, fix)
