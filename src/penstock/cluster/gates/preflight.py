"""Check all gates on every rank, before a run or separately. All ranks measure, and get the same findings.

Collective. A gate for which some rank has no report is not checked and never passes.
"""

import hashlib
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from penstock import __version__
from penstock.cluster.comm import Comm, format_cause
from penstock.cluster.facts.collect_facts import collect_from_ranks
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.facts.read_host import soft_limits
from penstock.cluster.gates import gate_checks
from penstock.cluster.gates.gate_model import (
    ClusterState,
    Gate,
    GateFinding,
    GateVerdict,
    Preflight,
    PreflightRequest,
    RankReport,
    Volume,
)
from penstock.errors import ObjectNotFound, PenstockError, StorageError
from penstock.results.provenance import package_versions
from penstock.storage import Storage
from penstock.storage.capabilities import find_local_root
from penstock.storage.files.file_storage import open_local
from penstock.storage.protocol import write_object
from penstock.storage.uri import find_local_paths_at
from penstock.storage.volumes import nearest_folder, read_volume_id

_REPORT_CHECKS: Final[dict[Gate, Callable[[Sequence[RankReport]], GateFinding]]] = {
    Gate.VERSIONS: gate_checks.check_versions,
    Gate.LIMITS: gate_checks.check_limits,
    Gate.IPC: gate_checks.check_ipc,
    Gate.APART: gate_checks.check_apart,
    Gate.SPACE: gate_checks.check_space,
}
"""Gates that depend only on the reports of all ranks."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """The findings for the run's record, and the facts of its hosts if the gate for them was checked."""

    preflight: Preflight
    cluster: ClusterFacts | None


def run_preflight(
    request: PreflightRequest,
    comm: Comm,
    *,
    gates: Collection[Gate] = tuple(Gate),
    skips: Collection[Gate] = (),
    is_strict: bool = False,
    is_private: bool = False,
) -> PreflightResult:
    """Check `gates` except `skips`. Returns the same result on every rank. Collective.

    `is_private` is for a run that nobody will submit: its results may be on the same file system as its data.
    """
    selected = [gate for gate in Gate if gate in gates and gate not in skips]
    cluster = (
        collect_from_ranks(comm, request.environment, now=lambda: datetime.now(UTC), root=request.root)
        if Gate.CLUSTER in selected
        else None
    )
    reports: Sequence[RankReport | str] = ()
    if set(selected) & _REPORT_CHECKS.keys():
        report: RankReport | str
        try:
            report = read_rank_report(request, comm)
        except (OSError, ValueError, KeyError, PenstockError) as error:
            report = f"rank {comm.rank} on {comm.host}: {format_cause(error)}"
        reports = comm.gather(report, awaiting="the reports of all ranks")
    skipped = (gate for gate in skips if gate in gates)
    findings = {gate: GateFinding(gate, GateVerdict.SKIPPED, "skipped on request") for gate in skipped}
    for gate in selected:
        if lack := _lack(gate, request, is_private=is_private):
            findings[gate] = GateFinding(gate, GateVerdict.NOT_APPLICABLE, lack)
        elif gate is Gate.CLUSTER:
            assert cluster is not None
            findings[gate] = gate_checks.check_cluster(cluster)
        elif gate is Gate.CLOCK:
            bounds = measure_clock_offsets(comm)
            hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
            findings[gate] = gate_checks.check_clock(hosts, bounds)
        elif gate is Gate.STORAGE:
            assert request.uri is not None
            assert request.reopen is not None
            findings[gate] = check_shared_storage(comm, request.uri, request.reopen)
        elif missing := [report for report in reports if isinstance(report, str)]:
            found = f"{len(missing)} of {len(reports)} ranks did not report: {'; '.join(missing[:3])}"
            findings[gate] = GateFinding(
                gate, GateVerdict.NOT_CHECKED, found, "Fix the errors of these ranks."
            )
        else:
            whole = [report for report in reports if isinstance(report, RankReport)]
            findings[gate] = _REPORT_CHECKS[gate](whole)
    state: ClusterState = "unknown"
    if cluster is not None and cluster.present:
        state = "partial" if cluster.is_partial else "whole"
    ordered = tuple(findings[gate] for gate in Gate if gate in findings)
    return PreflightResult(Preflight(is_strict=is_strict, cluster=state, findings=ordered), cluster)


def _lack(gate: Gate, doing: PreflightRequest, *, is_private: bool) -> str:
    """Return the reason why a gate does not apply; "" if it does."""
    if gate is Gate.STORAGE and (doing.uri is None or doing.reopen is None):
        return "no storage is used"
    if gate is Gate.SPACE and doing.uri is None and doing.results is None:
        return "nothing is written"
    if gate is Gate.APART and (doing.uri is None or doing.results is None):
        return "data or results are not used"
    if gate is Gate.APART and is_private:
        return "only results for a submission need a separate file system"
    return ""


def read_rank_report(request: PreflightRequest, comm: Comm) -> RankReport:
    """Read the report of this rank. Raises `OSError` if a fact cannot be read."""
    shared_memory = request.root / "dev/shm"
    versions = {"penstock": __version__, "Python": platform.python_version(), **package_versions()}
    paths = None if request.uri is None else find_local_paths_at(request.uri, request.environment)
    return RankReport(
        rank=comm.rank,
        host=comm.host,
        versions={**versions, "messages": comm.carrier} if comm.carrier else versions,
        limits=soft_limits(),
        shared_memory=read_volume(shared_memory, comm.host) if shared_memory.is_dir() else None,
        target=None if paths is None else read_volume(Path(paths.local_root), comm.host),
        results=None if request.results is None else read_volume(request.results, comm.host),
        results_option=request.results_option,
        written_bytes=request.written_bytes,
    )


def read_volume(path: Path, host: str) -> Volume:
    """Return the file system of `path`, which need not exist yet, on `host`."""
    folder = nearest_folder(path.absolute())
    usage = shutil.disk_usage(folder)
    device = folder.stat().st_dev
    # XFS derives its identity from the device number, which may be equal on several hosts. Only file systems
    # without a block device are shared between hosts.
    identity = read_volume_id(folder)
    return Volume(
        identity=f"{host} {identity}" if os.major(device) else identity,
        device=device,
        folder=str(folder),
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


NUM_ROUNDS: Final = 5
"""The fastest of several rounds gives the tightest bounds, and each round is only a handful of messages."""

ReadClock = Callable[[], float]


def measure_clock_offsets(comm: Comm, *, wall_s: ReadClock = time.time) -> list[tuple[float, float]]:
    """Return bounds on how far each rank's clock is ahead of rank 0's.

    The result is the same on all ranks. Collective.
    """
    rounds = []
    for _ in range(NUM_ROUNDS):
        before_s = wall_s()
        comm.broadcast(None, awaiting="rank 0 to query the clocks")
        readings_s = comm.gather(wall_s(), awaiting="the time on all ranks")
        rounds.append((before_s, readings_s, wall_s()))
    return comm.broadcast(bound_offsets(rounds), awaiting="rank 0 to compare the clocks")


def bound_offsets(rounds: Sequence[tuple[float, Sequence[float], float]]) -> list[tuple[float, float]]:
    """Return, for each rank, the lower and upper bound of how far its clock is ahead of rank 0's. Pure.

    A round consists of rank 0's clock before it sent, every rank's reading, and rank 0's clock after it
    received. Every rank read its clock between those two moments, so the bounds hold however slow the network
    is.
    """
    bounds = [
        (
            max(readings_s[rank] - after_s for _, readings_s, after_s in rounds),
            min(readings_s[rank] - before_s for before_s, readings_s, _ in rounds),
        )
        for rank in range(len(rounds[0][1]))
    ]
    return [(0.0, 0.0), *bounds[1:]]


PREFIX: Final = "penstock-gate-"
PATIENCE_S: Final = 10.0
"""The time for which other ranks look for the probe: network clients may cache a folder for seconds."""
_POLL_S: Final = 0.1
_PROBE_BYTES: Final = 4096
_LONGEST_READ: Final = 1 << 20
"""The number of bytes of an existing object that are compared."""


def check_shared_storage(
    comm: Comm, uri: str, reopen: Callable[[], Storage], *, patience_s: float = PATIENCE_S
) -> GateFinding:
    """Let rank 0 write random bytes and every rank read them. Collective.

    The finding is the same on all ranks. Contents are compared, because device numbers may differ between
    hosts that share a file system, and agree between hosts that do not. The probe is removed, and missing
    folders are not created: local files are probed in the innermost folder that exists.
    """

    def open_place(folder: Path | None) -> Storage:
        return reopen() if folder is None else open_local(folder)

    def place_probe() -> tuple[Path | None, str, str, bool] | str:
        """Return the folder, key and digest, and whether the bytes are new; or why there are none."""
        key, content = PREFIX + secrets.token_hex(8), secrets.token_bytes(_PROBE_BYTES)
        try:
            root = find_local_root(reopen())
            folder = None if root is None else nearest_folder(root)
            storage = open_place(folder)
            try:
                write_object(storage, key, [content])
            except StorageError as refusal:
                other = next((info.key for info in storage.list() if not info.key.startswith(PREFIX)), None)
                if other is None:
                    return f"it is empty and cannot be written to: {refusal}"
                return folder, other, _digest(storage, other), False
        except PenstockError as error:
            return str(error)
        return folder, key, hashlib.sha256(content).hexdigest(), True

    def look(folder: Path | None, key: str) -> tuple[str, str, str]:
        """Return the host, the digest of what this rank reads, and the reason if it reads nothing."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return comm.host, _digest(open_place(folder), key), ""
            except ObjectNotFound:
                if time.monotonic() >= deadline_s:
                    return comm.host, "", f"it does not appear within {patience_s:g} s"
                time.sleep(_POLL_S)
            except PenstockError as error:
                return comm.host, "", str(error)

    placed = place_probe() if comm.rank == 0 else None
    probe = cast(
        "tuple[Path | None, str, str, bool] | str",
        comm.broadcast(placed, awaiting="rank 0 to write a probe to the storage"),
    )
    if isinstance(probe, str):
        fix = "Give rank 0 permission to write there, or at least to read an object."
        return GateFinding(Gate.STORAGE, GateVerdict.NOT_CHECKED, probe, fix)
    folder, key, digest, is_fresh = probe
    views = comm.gather(look(folder, key), awaiting="all ranks to read the probe")
    if comm.rank == 0 and is_fresh:
        with suppress(ObjectNotFound):
            open_place(folder).delete(key)
    return gate_checks.check_storage(uri if folder is None else str(folder), digest, views, is_fresh=is_fresh)


def _digest(storage: Storage, key: str) -> str:
    with closing(storage.open(key)) as source:
        content = bytearray(min(source.size_bytes, _LONGEST_READ))
        source.read_into(0, memoryview(content))
    return hashlib.sha256(content).hexdigest()
