"""What ranks told becomes what is found: one function a gate.

Pure. Invariant: the gravest thing seen on any rank is the verdict, and whoever shows it is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.cluster.facts.homogeneity import LARGEST_SKEW_S, check_homogeneity
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.facts.read_host import BYTES_OF_A_FILE, OPEN_FILES, PROCESSES
from penstock.cluster.gates.gate_model import (
    ClockOffset,
    Gate,
    GateFinding,
    GateVerdict,
    LoginSettings,
    RankReport,
    StorageProbe,
    Volume,
)
from penstock.units import format_bytes, format_seconds

Value = TypeVar("Value", bound=Hashable)

RESULTS_BYTES: Final = 256 << 20
"""Step events and counters of a long run on many ranks."""
RESERVE: Final = 20
"""One part in so many of what is written stays free on top."""
SHARED_MEMORY_NEEDED: Final = 32 << 20
SHARED_MEMORY_WANTED: Final = 1 << 30
"""Containers give 64 MiB unless told otherwise; DataLoader workers die of a full one by SIGBUS."""


SEGMENTS_WANTED: Final[Mapping[str, int]] = {"shmmax": 1 << 30, "shmmni": 128}
"""System V's limits, which some MPI libraries still live by; kernels of today come with far more."""


@dataclass(frozen=True, slots=True)
class LimitRequirement:
    """A limit of processes: below `needed` it fails, below `wanted` it warns."""

    limit: str
    needed: int
    wanted: int
    fix: str


NEEDS: Final = (
    LimitRequirement(OPEN_FILES, 1024, 4096, "ulimit -n 65536"),
    LimitRequirement(PROCESSES, 256, 1024, "ulimit -u 4096"),
    LimitRequirement(BYTES_OF_A_FILE, 1 << 30, 1 << 40, "ulimit -f unlimited"),
)
_ORDER: Final = (GateVerdict.FAIL, GateVerdict.NOT_CHECKED, GateVerdict.WARNING, GateVerdict.PASS)


def check_cluster(cluster: ClusterFacts) -> GateFinding:
    """Facts of all hosts, and hosts that are alike."""
    if cluster.absent:
        told = "; ".join(f"{each.host}: {each.reason}" for each in cluster.absent)
        return _finding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            f"{len(cluster.absent)} of {len(cluster.asked)} hosts did not tell what they are: {told}",
            "Mend those hosts, or name others.",
        )
    if cluster.memory_bytes is None:
        return _finding(
            Gate.CLUSTER,
            GateVerdict.NOT_CHECKED,
            "some host could not tell how much memory it has",
            "See why with: penstock cluster collect",
        )
    unlike = [each for each in check_homogeneity(cluster) if each.verdict == "fail"]
    if unlike:
        told = "; ".join(f"{each.subject}: {each.found}" for each in unlike)
        return _finding(Gate.CLUSTER, GateVerdict.WARNING, told, unlike[0].fix)
    found = f"{_counted(len(cluster.asked), 'host')} with {format_bytes(cluster.memory_bytes)} together"
    return _finding(Gate.CLUSTER, GateVerdict.PASS, found)


def check_versions(facts: Sequence[RankReport]) -> GateFinding:
    """One version of everything on all ranks."""
    names = sorted({name for each in facts for name in each.versions}, key=str.lower)
    unlike = []
    for name in names:
        ranks: dict[str, list[int]] = defaultdict(list)
        for each in facts:
            ranks[each.versions.get(name, "none")].append(each.rank)
        if len(ranks) > 1:
            told = ", ".join(f"{version} on {format_ranks(where)}" for version, where in ranks.items())
            unlike.append(f"{name}: {told}")
    if unlike:
        fix = "Start all ranks with the same Python and MPI: one environment on shared storage, or one image."
        return _finding(Gate.VERSIONS, GateVerdict.FAIL, "; ".join(unlike), fix)
    found = f"{len(names)} versions the same on {_counted(len(facts), 'rank')}"
    return _finding(Gate.VERSIONS, GateVerdict.PASS, found)


def check_clock(offsets: Sequence[ClockOffset]) -> GateFinding:
    """No clock further off than rank 0's than logs and gaps between runs bear."""
    if len({each.host for each in offsets}) == 1:
        return _finding(Gate.CLOCK, GateVerdict.PASS, "all ranks have one host's clock")
    stepped = [each for each in offsets if each.low_s > each.high_s]
    if stepped:
        told = f"a clock was set while it was looked at: on {_hosts(stepped)}"
        return _finding(Gate.CLOCK, GateVerdict.NOT_CHECKED, told, "Look again when the clocks are steady.")
    proven: dict[str, float] = defaultdict(float)
    for each in offsets:
        proven[each.host] = max(proven[each.host], each.low_s, -each.high_s)
    wrong = {host: skew_s for host, skew_s in proven.items() if skew_s > LARGEST_SKEW_S}
    if wrong:
        told = ", ".join(
            f"{host} is off from {offsets[0].host} by at least {skew_s:.1f} s"
            for host, skew_s in wrong.items()
        )
        return _finding(Gate.CLOCK, GateVerdict.FAIL, told, "Synchronise the clocks with chrony.")
    widest_s = max(max(-each.low_s, each.high_s) for each in offsets)
    if widest_s > LARGEST_SKEW_S:
        told = f"ranks answered so late that up to {widest_s:.1f} s cannot be ruled out"
        return _finding(
            Gate.CLOCK, GateVerdict.NOT_CHECKED, told, "Look again when hosts and network are quieter."
        )
    return _finding(Gate.CLOCK, GateVerdict.PASS, f"no clock is off by more than {format_seconds(widest_s)}")


def check_limits(facts: Sequence[RankReport]) -> GateFinding:
    """What processes may take: too little stops them under way."""
    verdicts, told, fixes = [GateVerdict.PASS], [], []
    for need in NEEDS:
        for limit, hosts in _by_value(facts, lambda each, name=need.limit: each.limits[name]).items():  # type: ignore[misc]
            if limit is None or limit >= need.wanted:
                continue
            verdicts.append(GateVerdict.FAIL if limit < need.needed else GateVerdict.WARNING)
            least = need.needed if limit < need.needed else need.wanted
            told.append(f"{need.limit}: {limit:,} on {', '.join(hosts)}, wanted are {least:,}")
            fixes.append(need.fix)
    found = "; ".join(told) or "enough on all hosts"
    fix = f"In the shell that starts jobs: {'; '.join(dict.fromkeys(fixes))}" if fixes else ""
    return _finding(Gate.LIMITS, _gravest(verdicts), found, fix)


def check_ipc(facts: Sequence[RankReport]) -> GateFinding:
    """Shared memory is there, and logind does not delete it when somebody logs out."""
    verdicts, told, fixes = [GateVerdict.PASS], [], []
    for volume, hosts in _by_value(facts, _shared_size).items():
        verdict, found = _shared_memory(volume)
        if verdict is not GateVerdict.PASS:
            verdicts.append(verdict)
            told.append(f"{found} on {', '.join(hosts)}")
            fixes.append("Give /dev/shm 1 GiB or more (in a container: --shm-size).")
    for small, hosts in _by_value(facts, _small_segments).items():
        if small:
            verdicts.append(GateVerdict.WARNING)
            told.append(f"{small} on {', '.join(hosts)}")
            fixes.append(
                "Raise kernel.shmmax and kernel.shmmni by sysctl: MPI on one host passes messages so."
            )
    losing = [each.host for each in facts if _loses_memory(each.login)]
    if losing:
        verdicts.append(GateVerdict.WARNING)
        told.append(
            "RemoveIPC: semaphores of this user vanish with the last login on "
            + ", ".join(dict.fromkeys(losing))
        )
        fixes.append("Set RemoveIPC=no in /etc/systemd/logind.conf, or: loginctl enable-linger")
    return _finding(
        Gate.IPC,
        _gravest(verdicts),
        "; ".join(told) or "shared memory on all hosts, and nothing deletes it",
        " ".join(dict.fromkeys(fixes)),
    )


def check_apart(facts: Sequence[RankReport]) -> GateFinding:
    """Writing results must not disturb the storage under test, nor be counted as its traffic."""
    both = [(each, each.target, each.results) for each in facts]
    together = [
        (each, target)
        for each, target, results in both
        if target and results and target.device == results.device
    ]
    if together:
        volume = together[0][1]
        hosts = ", ".join(dict.fromkeys(each.host for each, _ in together))
        return _finding(
            Gate.APART,
            GateVerdict.FAIL,
            f"results lie on the file system of {volume.folder} with what is measured, on {hosts}",
            "Put --results on another file system.",
        )
    return _finding(Gate.APART, GateVerdict.PASS, "data and results lie on different file systems")


def check_space(facts: Sequence[RankReport]) -> GateFinding:
    """Room for all that ranks will write, on each file system together."""
    needs: dict[str, int] = defaultdict(int)
    volumes: dict[str, Volume] = {}
    for each in facts:
        if each.target is not None:
            volumes[each.target.identity] = each.target
            needs[each.target.identity] += each.written_bytes + each.written_bytes // RESERVE
    for volume in {each.results.identity: each.results for each in facts if each.results}.values():
        volumes.setdefault(volume.identity, volume)
        needs[volume.identity] += RESULTS_BYTES
    short = [volumes[name] for name, needed in needs.items() if volumes[name].free_bytes < needed]
    if short:
        told = "; ".join(
            f"{format_bytes(volume.free_bytes)} free at {volume.folder}, "
            f"{format_bytes(needs[volume.identity])} needed"
            for volume in short
        )
        return _finding(Gate.SPACE, GateVerdict.FAIL, told, "Make room, or write less.")
    free = [f"{format_bytes(volume.free_bytes)} free at {volume.folder}" for volume in volumes.values()]
    told = ", ".join(dict.fromkeys(free))
    return _finding(Gate.SPACE, GateVerdict.PASS, told or "no file system is written to")


def check_storage(probe: StorageProbe) -> GateFinding:
    """Every rank read rank 0's bytes."""
    blind = [each for each in probe.sights if each.digest is None]
    other = [each for each in probe.sights if each.digest not in (None, probe.digest)]
    if blind or other:
        told = [f"{format_ranks([each.rank])} on {each.host}: {each.reason}" for each in blind[:3]]
        told += [f"{format_ranks([each.rank])} on {each.host} reads other bytes" for each in other[:3]]
        num = len(blind) + len(other)
        whole = f"{num} of {len(probe.sights)} ranks do not see rank 0's bytes at {probe.where}"
        found = f"{whole}: {'; '.join(told)}"
        return _finding(
            Gate.STORAGE, GateVerdict.FAIL, found, "Mount the same storage on all hosts, or name its URI."
        )
    if not probe.is_fresh and len(probe.sights) > 1:
        return _finding(
            Gate.STORAGE,
            GateVerdict.WARNING,
            f"all ranks read the same bytes at {probe.where}, where nothing can be written: "
            "copies on each host would look the same",
            "Let a probe of 4 KiB be written there, or see by its mount that the storage is shared.",
        )
    found = f"{_counted(len(probe.sights), 'rank')} read the same bytes at {probe.where}"
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


def _shared_size(facts: RankReport) -> tuple[int, int] | None:
    volume = facts.shared_memory
    return None if volume is None else (volume.total_bytes, volume.free_bytes)


def _small_segments(facts: RankReport) -> str:
    small = [
        f"kernel.{name} = {facts.shared_segments[name]:,}"
        for name, wanted in SEGMENTS_WANTED.items()
        if facts.shared_segments.get(name, wanted) < wanted
    ]
    return ", ".join(small)


def _loses_memory(login: LoginSettings) -> bool:
    """Users of the system, below 1000, are spared. A setting that is nowhere said is systemd's own: yes."""
    return login.has_logind and login.user_id >= 1000 and login.removes_ipc is not False and not login.lingers


def _by_value(facts: Sequence[RankReport], value: Callable[[RankReport], Value]) -> dict[Value, list[str]]:
    """Hosts, once each, by what their ranks tell."""
    groups: dict[Value, dict[str, None]] = defaultdict(dict)
    for each in facts:
        groups[value(each)][each.host] = None
    return {told: list(hosts) for told, hosts in groups.items()}


def _hosts(offsets: Sequence[ClockOffset]) -> str:
    return ", ".join(dict.fromkeys(each.host for each in offsets))


def _gravest(verdicts: Sequence[GateVerdict]) -> GateVerdict:
    return min(verdicts, key=_ORDER.index)


def _counted(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"


def _finding(gate: Gate, verdict: GateVerdict, found: str, fix: str = "") -> GateFinding:
    return GateFinding(gate=gate, verdict=verdict, found=found, fix=fix)
