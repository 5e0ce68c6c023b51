"""From the reports of all ranks to findings: one function for each gate.

Pure. Invariant: the worst result of any rank is the verdict, and its rank or host is named.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from penstock.cluster.facts.homogeneity import LARGEST_SKEW_S, check_homogeneity
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.facts.read_host import BYTES_OF_A_FILE, OPEN_FILES, PROCESSES
from penstock.cluster.gates.gate_model import (
    Gate,
    GateFinding,
    GateVerdict,
    RankReport,
    Volume,
)
from penstock.units import format_bytes, format_seconds

Value = TypeVar("Value", bound=Hashable)

RESULTS_BYTES: Final = 256 << 20
"""Step events and counters of a long run on many ranks."""
RESERVE: Final = 20
"""A twentieth of the written size stays free in addition."""
SHARED_MEMORY_NEEDED: Final = 32 << 20
SHARED_MEMORY_WANTED: Final = 1 << 30
"""Containers have 64 MiB by default; a full /dev/shm kills DataLoader workers by SIGBUS."""


SEGMENTS_WANTED: Final[Mapping[str, int]] = {"shmmax": 1 << 30, "shmmni": 128}
"""System V limits, which some MPI libraries still need; current kernels have far more by default."""


NEEDS: Final = (
    (OPEN_FILES, 1024, 4096, "ulimit -n 65536"),
    (PROCESSES, 256, 1024, "ulimit -u 4096"),
    (BYTES_OF_A_FILE, 1 << 30, 1 << 40, "ulimit -f unlimited"),
)
"""Limits of processes: the gate fails below the first number and warns below the second. Last, the fix."""
_ORDER: Final = (GateVerdict.FAIL, GateVerdict.NOT_CHECKED, GateVerdict.WARNING, GateVerdict.PASS)


def check_cluster(cluster: ClusterFacts) -> GateFinding:
    """Facts of all hosts, and hosts that are alike."""
    if cluster.absent:
        details = "; ".join(f"{host.host}: {host.reason}" for host in cluster.absent)
        return _finding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            f"{len(cluster.absent)} of {len(cluster.asked)} hosts did not report: {details}",
            "Repair these hosts, or use others.",
        )
    if cluster.memory_bytes is None:
        return _finding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            "the memory of some host is unknown",
            "Look for the reason with: penstock cluster collect",
        )
    unlike = [host for host in check_homogeneity(cluster) if host.verdict == "fail"]
    if unlike:
        details = "; ".join(f"{host.subject}: {host.found}" for host in unlike)
        return _finding(Gate.CLUSTER, GateVerdict.WARNING, details, unlike[0].fix)
    found = f"{_counted(len(cluster.asked), 'host')} with {format_bytes(cluster.memory_bytes)} together"
    return _finding(Gate.CLUSTER, GateVerdict.PASS, found)


def check_versions(reports: Sequence[RankReport]) -> GateFinding:
    """One version of everything on all ranks."""
    names = sorted({name for report in reports for name in report.versions}, key=str.lower)
    differences = []
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for report in reports:
            ranks[report.versions.get(name, "none")].append(report.rank)
        if len(ranks) > 1:
            details = ", ".join(
                f"{version} on {format_ranks(ranks_with)}" for version, ranks_with in ranks.items()
            )
            differences.append(f"{name}: {details}")
    if differences:
        fix = "Start all ranks with the same Python and MPI, from one shared environment or one image."
        return _finding(Gate.VERSIONS, GateVerdict.FAIL, "; ".join(differences), fix)
    found = f"{len(names)} versions the same on {_counted(len(reports), 'rank')}"
    return _finding(Gate.VERSIONS, GateVerdict.PASS, found)


def check_clock(hosts: Sequence[str], bounds: Sequence[tuple[float, float]]) -> GateFinding:
    """No clock is further off rank 0's than logs and gaps between runs tolerate.

    `bounds` are those of `bound_offsets`, by rank; `hosts` are the hosts of ranks.
    """
    if len(set(hosts)) == 1:
        return _finding(Gate.CLOCK, GateVerdict.PASS, "all ranks are on one host")
    stepped = [host for host, (low_s, high_s) in zip(hosts, bounds, strict=True) if low_s > high_s]
    if stepped:
        found = f"a clock was set during the measurement: on {', '.join(dict.fromkeys(stepped))}"
        return _finding(Gate.CLOCK, GateVerdict.NOT_CHECKED, found, "Repeat when the clocks are stable.")
    proven: dict[str, float] = defaultdict(float)
    for host, (low_s, high_s) in zip(hosts, bounds, strict=True):
        proven[host] = max(proven[host], low_s, -high_s)
    wrong = {host: skew_s for host, skew_s in proven.items() if skew_s > LARGEST_SKEW_S}
    if wrong:
        found = ", ".join(
            f"{host} is off from {hosts[0]} by at least {skew_s:.1f} s" for host, skew_s in wrong.items()
        )
        return _finding(Gate.CLOCK, GateVerdict.FAIL, found, "Synchronise the clocks with chrony.")
    widest_s = max(max(-low_s, high_s) for low_s, high_s in bounds)
    if widest_s > LARGEST_SKEW_S:
        found = f"ranks answered so late that an offset of {widest_s:.1f} s cannot be excluded"
        return _finding(
            Gate.CLOCK, GateVerdict.NOT_CHECKED, found, "Repeat when hosts and network are less busy."
        )
    return _finding(Gate.CLOCK, GateVerdict.PASS, f"no clock is off by more than {format_seconds(widest_s)}")


def check_limits(reports: Sequence[RankReport]) -> GateFinding:
    """Limits of processes: too low ones would stop a run."""
    verdicts, problems, fixes = [GateVerdict.PASS], [], []
    for name, needed, wanted, how in NEEDS:
        for limit, hosts in _by_value(reports, partial(_limit, name)).items():
            if limit is None or limit >= wanted:
                continue
            verdicts.append(GateVerdict.FAIL if limit < needed else GateVerdict.WARNING)
            least = needed if limit < needed else wanted
            problems.append(f"{name}: {limit:,} on {', '.join(hosts)}, required: {least:,}")
            fixes.append(how)
    found = "; ".join(problems) or "enough on all hosts"
    fix = f"In the shell that starts jobs: {'; '.join(dict.fromkeys(fixes))}" if fixes else ""
    return _finding(Gate.LIMITS, _worst(verdicts), found, fix)


def check_ipc(reports: Sequence[RankReport]) -> GateFinding:
    """Shared memory is there, and logind does not delete it when somebody logs out."""
    verdicts, problems, fixes = [GateVerdict.PASS], [], []
    for volume, hosts in _by_value(reports, _shared_size).items():
        verdict, found = _shared_memory(volume)
        if verdict is not GateVerdict.PASS:
            verdicts.append(verdict)
            problems.append(f"{found} on {', '.join(hosts)}")
            fixes.append("Give /dev/shm 1 GiB or more (in a container: --shm-size).")
    for small, hosts in _by_value(reports, _small_segments).items():
        if small:
            verdicts.append(GateVerdict.WARNING)
            problems.append(f"{small} on {', '.join(hosts)}")
            fixes.append("Raise kernel.shmmax and kernel.shmmni by sysctl, for MPI's messages within a host.")
    losing = [report.host for report in reports if report.loses_shared_memory]
    if losing:
        verdicts.append(GateVerdict.WARNING)
        problems.append(
            "RemoveIPC: semaphores of this user vanish with the last login on "
            + ", ".join(dict.fromkeys(losing))
        )
        fixes.append("Set RemoveIPC=no in /etc/systemd/logind.conf, or: loginctl enable-linger")
    return _finding(
        Gate.IPC,
        _worst(verdicts),
        "; ".join(problems) or "shared memory on all hosts, and nothing deletes it",
        " ".join(dict.fromkeys(fixes)),
    )


def check_apart(reports: Sequence[RankReport]) -> GateFinding:
    """Writing results must not disturb the storage under test, nor be counted as its traffic."""
    volumes = [(report, report.target, report.results) for report in reports]
    shared = [
        (report, target)
        for report, target, results in volumes
        if target and results and target.device == results.device
    ]
    if shared:
        volume = shared[0][1]
        hosts = ", ".join(dict.fromkeys(report.host for report, _ in shared))
        return _finding(
            Gate.APART,
            GateVerdict.FAIL,
            f"results are on the measured file system, that of {volume.folder}, on {hosts}",
            f"Put {shared[0][0].results_option} on another file system.",
        )
    return _finding(Gate.APART, GateVerdict.PASS, "data and results are on different file systems")


def check_space(reports: Sequence[RankReport]) -> GateFinding:
    """Free space for all that the ranks of all hosts will write to each file system."""
    needs: dict[str, int] = defaultdict(int)
    volumes: dict[str, Volume] = {}
    for report in reports:
        if report.target is not None:
            volumes[report.target.identity] = report.target
            needs[report.target.identity] += report.written_bytes + report.written_bytes // RESERVE
    for volume in {report.results.identity: report.results for report in reports if report.results}.values():
        volumes.setdefault(volume.identity, volume)
        needs[volume.identity] += RESULTS_BYTES
    short = [volumes[name] for name, needed in needs.items() if volumes[name].free_bytes < needed]
    if short:
        found = "; ".join(
            f"{format_bytes(volume.free_bytes)} free at {volume.folder}, "
            f"{format_bytes(needs[volume.identity])} needed"
            for volume in short
        )
        return _finding(Gate.SPACE, GateVerdict.FAIL, found, "Make room, or write less.")
    free = [f"{format_bytes(volume.free_bytes)} free at {volume.folder}" for volume in volumes.values()]
    found = ", ".join(dict.fromkeys(free))
    return _finding(Gate.SPACE, GateVerdict.PASS, found or "no file system is written to")


def check_storage(
    where: str, digest: str, views: Sequence[tuple[str, str, str]], *, is_fresh: bool
) -> GateFinding:
    """Every rank read rank 0's bytes.

    `views` has each rank's host, the digest of what it read, and why it read nothing. Bytes that were there
    before (not `is_fresh`) could be a copy of rank 0's.
    """
    blind = [(rank, host, why) for rank, (host, found, why) in enumerate(views) if not found]
    differing = [(rank, host) for rank, (host, found, _) in enumerate(views) if found not in ("", digest)]
    if blind or differing:
        details = [f"{format_ranks([rank])} on {host}: {why}" for rank, host, why in blind[:3]]
        details += [f"{format_ranks([rank])} on {host} reads other bytes" for rank, host in differing[:3]]
        num_wrong = len(blind) + len(differing)
        counts = f"{num_wrong} of {len(views)} ranks do not see rank 0's bytes at {where}"
        found = f"{counts}: {'; '.join(details)}"
        return _finding(
            Gate.STORAGE, GateVerdict.FAIL, found, "Mount the same storage on all hosts, or name its URI."
        )
    if not is_fresh and len(views) > 1:
        return _finding(
            Gate.STORAGE,
            GateVerdict.WARNING,
            f"all ranks read the same bytes at {where}, which is read-only: "
            "separate copies on each host would look the same",
            "Permit writing a probe of 4 KiB there, or check its mount to see that the storage is shared.",
        )
    found = f"{_counted(len(views), 'rank')} read the same bytes at {where}"
    return _finding(Gate.STORAGE, GateVerdict.PASS, found)


def format_ranks(ranks: Iterable[int]) -> str:
    """`ranks 0-3, 7`, for people."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if is_one else 's'} {', '.join(parts)}"


def _shared_memory(size: tuple[int, int] | None) -> tuple[GateVerdict, str]:
    if size is None:
        return GateVerdict.FAIL, "no /dev/shm"
    total_bytes, free_bytes = size
    if free_bytes < SHARED_MEMORY_NEEDED:
        return GateVerdict.FAIL, f"{format_bytes(free_bytes)} free in /dev/shm"
    if total_bytes < SHARED_MEMORY_WANTED:
        return GateVerdict.WARNING, f"only {format_bytes(total_bytes)} in all of /dev/shm"
    return GateVerdict.PASS, ""


def _limit(name: str, report: RankReport) -> int | None:
    return report.limits[name]


def _shared_size(report: RankReport) -> tuple[int, int] | None:
    volume = report.shared_memory
    return None if volume is None else (volume.total_bytes, volume.free_bytes)


def _small_segments(report: RankReport) -> str:
    small = [
        f"kernel.{name} = {report.shared_segments[name]:,}"
        for name, wanted in SEGMENTS_WANTED.items()
        if report.shared_segments.get(name, wanted) < wanted
    ]
    return ", ".join(small)


def _by_value(reports: Sequence[RankReport], value: Callable[[RankReport], Value]) -> dict[Value, list[str]]:
    """The hosts, once each, by the value of their ranks."""
    groups: dict[Value, dict[str, None]] = defaultdict(dict)
    for report in reports:
        groups[value(report)][report.host] = None
    return {key: list(hosts) for key, hosts in groups.items()}


def _worst(verdicts: Sequence[GateVerdict]) -> GateVerdict:
    return min(verdicts, key=_ORDER.index)


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"


def _finding(gate: Gate, verdict: GateVerdict, found: str, fix: str = "") -> GateFinding:
    return GateFinding(gate=gate, verdict=verdict, found=found, fix=fix)
