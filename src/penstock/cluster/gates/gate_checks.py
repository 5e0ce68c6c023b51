"""Turn the reports of all ranks into findings, with one function for each gate.

Pure. Invariant: the verdict is the worst result of any rank, and this rank or its host is named.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, TypeVar

from penstock.cluster.facts.homogeneity import LARGEST_SKEW_S, check_homogeneity, find_differences
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.facts.read_host import BYTES_OF_A_FILE, OPEN_FILES, PROCESSES
from penstock.cluster.gates.gate_model import (
    Gate,
    GateFinding,
    GateVerdict,
    RankReport,
    Volume,
)
from penstock.units import format_bytes, format_count, format_ranges, format_seconds

Value = TypeVar("Value", bound=Hashable)

RESULTS_BYTES: Final = 256 << 20
"""The space for step events and counters of a long run on many ranks."""
RESERVE: Final = 20
"""The divisor of the reserve: a 20th of the bytes to be written must be free in addition."""
SHARED_MEMORY_NEEDED: Final = 32 << 20
SHARED_MEMORY_WANTED: Final = 1 << 30
"""Containers have 64 MiB by default, and a full /dev/shm kills DataLoader workers by SIGBUS."""


NEEDS: Final = (
    (OPEN_FILES, 1024, 4096, "ulimit -n 65536"),
    (PROCESSES, 256, 1024, "ulimit -u 4096"),
    (BYTES_OF_A_FILE, 1 << 30, 1 << 40, "ulimit -f unlimited"),
)
"""Limits of processes. The gate fails below the first number and warns below the second; the last entry is
the fix.
"""


def check_cluster(cluster: ClusterFacts) -> GateFinding:
    """Check that the facts of all hosts are known, and that the hosts are alike."""
    if cluster.absent:
        details = "; ".join(f"{host.host}: {host.reason}" for host in cluster.absent)
        return GateFinding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            f"{len(cluster.absent)} of {len(cluster.asked)} hosts did not report: {details}",
            "Repair these hosts, or use others.",
        )
    if cluster.memory_bytes is None:
        return GateFinding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            "the memory of some host is unknown",
            "Look for the reason with: penstock cluster collect",
        )
    unlike = [host for host in check_homogeneity(cluster) if host.verdict == "fail"]
    if unlike:
        details = "; ".join(f"{host.subject}: {host.found}" for host in unlike)
        return GateFinding(Gate.CLUSTER, GateVerdict.WARNING, details, unlike[0].fix)
    found = f"{format_count(len(cluster.asked), 'host')} with {format_bytes(cluster.memory_bytes)} together"
    return GateFinding(Gate.CLUSTER, GateVerdict.PASS, found)


def check_versions(reports: Sequence[RankReport]) -> GateFinding:
    """Check that all ranks have the same versions of all software."""
    num_versions, differences = find_differences(
        [(report.rank, report.versions) for report in reports], absent="none", name=format_ranks
    )
    if differences:
        fix = "Start all ranks with the same Python and MPI, from one shared environment or one image."
        return GateFinding(Gate.VERSIONS, GateVerdict.FAIL, "; ".join(differences), fix)
    found = f"{num_versions} versions the same on {format_count(len(reports), 'rank')}"
    return GateFinding(Gate.VERSIONS, GateVerdict.PASS, found)


def check_clock(hosts: Sequence[str], bounds: Sequence[tuple[float, float]]) -> GateFinding:
    """Check that no clock differs from rank 0's by more than logs and gaps between runs tolerate.

    `bounds` are those of `bound_offsets`, by rank; `hosts` are the hosts of the ranks.
    """
    if len(set(hosts)) == 1:
        return GateFinding(Gate.CLOCK, GateVerdict.PASS, "all ranks are on one host")
    stepped = [host for host, (low_s, high_s) in zip(hosts, bounds, strict=True) if low_s > high_s]
    if stepped:
        found = f"a clock was set during the measurement: on {', '.join(dict.fromkeys(stepped))}"
        return GateFinding(Gate.CLOCK, GateVerdict.NOT_CHECKED, found, "Repeat when the clocks are stable.")
    proven: dict[str, float] = defaultdict(float)
    for host, (low_s, high_s) in zip(hosts, bounds, strict=True):
        proven[host] = max(proven[host], low_s, -high_s)
    wrong = {host: skew_s for host, skew_s in proven.items() if skew_s > LARGEST_SKEW_S}
    if wrong:
        found = ", ".join(
            f"{host} is off from {hosts[0]} by at least {skew_s:.1f} s" for host, skew_s in wrong.items()
        )
        return GateFinding(Gate.CLOCK, GateVerdict.FAIL, found, "Synchronize the clocks with chrony.")
    widest_s = max(max(-low_s, high_s) for low_s, high_s in bounds)
    if widest_s > LARGEST_SKEW_S:
        found = f"ranks answered so late that an offset of {widest_s:.1f} s cannot be excluded"
        return GateFinding(
            Gate.CLOCK, GateVerdict.NOT_CHECKED, found, "Repeat when hosts and network are less busy."
        )
    return GateFinding(
        Gate.CLOCK, GateVerdict.PASS, f"no clock is off by more than {format_seconds(widest_s)}"
    )


def check_limits(reports: Sequence[RankReport]) -> GateFinding:
    """Check that no limit of a process is low enough to stop a run."""
    problems = []
    for name, needed, wanted, fix in NEEDS:
        for limit, hosts in _by_value((report.host, report.limits[name]) for report in reports).items():
            if limit is not None and limit < wanted:
                verdict, least = (
                    (GateVerdict.FAIL, needed) if limit < needed else (GateVerdict.WARNING, wanted)
                )
                found = f"{name}: {limit:,} on {', '.join(hosts)}, required: {least:,}"
                problems.append((verdict, found, fix))
    fixes = "; ".join(dict.fromkeys(fix for *_, fix in problems))
    fix = f"In the shell that starts jobs: {fixes}" if fixes else ""
    return _judge(Gate.LIMITS, problems, "enough on all hosts", fix)


def check_ipc(reports: Sequence[RankReport]) -> GateFinding:
    """Check that there is shared memory, and that it is large enough."""
    problems = []
    for volume, hosts in _by_value((report.host, report.shared_memory) for report in reports).items():
        if volume is None:
            verdict, found = GateVerdict.FAIL, "no /dev/shm"
        elif volume.free_bytes < SHARED_MEMORY_NEEDED:
            verdict, found = GateVerdict.FAIL, f"{format_bytes(volume.free_bytes)} free in /dev/shm"
        elif volume.total_bytes < SHARED_MEMORY_WANTED:
            verdict, found = (
                GateVerdict.WARNING,
                f"only {format_bytes(volume.total_bytes)} in all of /dev/shm",
            )
        else:
            continue
        problems.append((verdict, f"{found} on {', '.join(hosts)}", ""))
    fix = "Give /dev/shm 1 GiB or more (in a container: --shm-size)." if problems else ""
    return _judge(Gate.IPC, problems, "enough shared memory on all hosts", fix)


def _by_value(values: Iterable[tuple[str, Value]]) -> dict[Value, list[str]]:
    """Return the hosts whose ranks have each value, each host once."""
    groups: dict[Value, list[str]] = defaultdict(list)
    for host, value in values:
        if host not in groups[value]:
            groups[value].append(host)
    return groups


def _judge(gate: Gate, problems: Sequence[tuple[GateVerdict, str, str]], found: str, fix: str) -> GateFinding:
    verdicts = {verdict for verdict, *_ in problems}
    worst = next(
        (verdict for verdict in (GateVerdict.FAIL, GateVerdict.WARNING) if verdict in verdicts),
        GateVerdict.PASS,
    )
    return GateFinding(gate, worst, "; ".join(problem for _, problem, _ in problems) or found, fix)


def check_apart(reports: Sequence[RankReport]) -> GateFinding:
    """Check that writing results neither disturbs the storage under test nor counts as its traffic."""
    shared = [
        (report, report.target)
        for report in reports
        if report.target and report.results and report.target.device == report.results.device
    ]
    if shared:
        volume = shared[0][1]
        hosts = ", ".join(dict.fromkeys(report.host for report, _ in shared))
        return GateFinding(
            Gate.APART,
            GateVerdict.FAIL,
            f"results are on the measured file system, that of {volume.folder}, on {hosts}",
            f"Put {shared[0][0].results_option} on another file system.",
        )
    return GateFinding(Gate.APART, GateVerdict.PASS, "data and results are on different file systems")


def check_space(reports: Sequence[RankReport]) -> GateFinding:
    """Check that each file system has space for everything that all ranks will write to it."""
    needs: dict[str, int] = defaultdict(int)
    volumes: dict[str, Volume] = {}
    results = {report.results.identity: report.results for report in reports if report.results}
    for report in reports:
        if report.target is not None:
            volumes[report.target.identity] = report.target
            needs[report.target.identity] += report.written_bytes + report.written_bytes // RESERVE
    for name, volume in results.items():
        volumes.setdefault(name, volume)
        needs[name] += RESULTS_BYTES
    short = [volumes[name] for name, needed in needs.items() if volumes[name].free_bytes < needed]
    if short:
        found = "; ".join(
            f"{format_bytes(volume.free_bytes)} free at {volume.folder}, "
            f"{format_bytes(needs[volume.identity], at_least=True)} needed"
            for volume in short
        )
        return GateFinding(Gate.SPACE, GateVerdict.FAIL, found, "Make room, or write less.")
    free = [f"{format_bytes(volume.free_bytes)} free at {volume.folder}" for volume in volumes.values()]
    found = ", ".join(dict.fromkeys(free))
    return GateFinding(Gate.SPACE, GateVerdict.PASS, found or "no file system is written to")


def check_storage(
    where: str, digest: str, views: Sequence[tuple[str, str, str]], *, is_fresh: bool
) -> GateFinding:
    """Check that every rank read rank 0's bytes.

    `views` has each rank's host, the digest of what it read, and the reason if it read nothing. Bytes that
    existed before (`is_fresh` is false) could be a copy of rank 0's.
    """
    blind = [(rank, host, why) for rank, (host, found, why) in enumerate(views) if not found]
    differing = [(rank, host) for rank, (host, found, _) in enumerate(views) if found not in ("", digest)]
    if blind or differing:
        details = [f"{format_ranks([rank])} on {host}: {why}" for rank, host, why in blind[:3]]
        details += [f"{format_ranks([rank])} on {host} reads other bytes" for rank, host in differing[:3]]
        num_wrong = len(blind) + len(differing)
        counts = f"{num_wrong} of {len(views)} ranks do not see rank 0's bytes at {where}"
        found = f"{counts}: {'; '.join(details)}"
        return GateFinding(
            Gate.STORAGE, GateVerdict.FAIL, found, "Mount the same storage on all hosts, or name its URI."
        )
    if not is_fresh and len(views) > 1:
        return GateFinding(
            Gate.STORAGE,
            GateVerdict.WARNING,
            f"all ranks read the same bytes at {where}, which is read-only: "
            "separate copies on each host would look the same",
            "Permit writing a probe of 4 KiB there, or check its mount to see that the storage is shared.",
        )
    found = f"{format_count(len(views), 'rank')} read the same bytes at {where}"
    return GateFinding(Gate.STORAGE, GateVerdict.PASS, found)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks for people: `ranks 0-3, 7`."""
    text = format_ranges(ranks)
    # Only a single rank has neither a comma nor a dash.
    return f"rank{'' if text.isdecimal() else 's'} {text}"
