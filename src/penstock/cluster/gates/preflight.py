"""Check all gates on every rank, before a run or alone: reports are gathered, and all ranks find the same.

Invariant: collective, with the same findings on every rank; a gate for which some rank has no report is not
checked and never passes.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

from penstock.cluster.comm import Comm
from penstock.cluster.facts.collect_facts import collect_from_ranks
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.gates import gate_checks
from penstock.cluster.gates.gate_model import (
    ClusterState,
    Gate,
    GateFinding,
    GateVerdict,
    MissingReport,
    Preflight,
    PreflightRequest,
    RankReport,
)
from penstock.cluster.gates.rank_measurements import measure_clock_offsets, read_rank_report
from penstock.cluster.gates.shared_storage_check import probe_storage
from penstock.errors import PenstockError

T = TypeVar("T")

_REPORT_CHECKS: Final[dict[Gate, Callable[[Sequence[RankReport]], GateFinding]]] = {
    Gate.VERSIONS: gate_checks.check_versions,
    Gate.LIMITS: gate_checks.check_limits,
    Gate.IPC: gate_checks.check_ipc,
    Gate.APART: gate_checks.check_apart,
    Gate.SPACE: gate_checks.check_space,
}
"""Gates that depend only on the reports of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """The findings for the run's record, and the facts of its hosts, if that gate was checked."""

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
    """Check `gates` except `skips`; the same result on every rank. Collective.

    `is_private` is for a run that nobody will submit, whose results may lie beside its data.
    """
    selected = [gate for gate in Gate if gate in gates and gate not in skips]
    cluster = (
        collect_from_ranks(comm, request.environment, now=_now, root=request.root)
        if Gate.CLUSTER in selected
        else None
    )
    reports: Sequence[RankReport | MissingReport] = ()
    if set(selected) & _REPORT_CHECKS.keys():
        reports = comm.gather(
            _attempt(comm, lambda: read_rank_report(request, comm)), awaiting="the reports of all ranks"
        )
    inspector = _Inspector(request, comm, cluster, reports, is_private)
    findings = {gate: inspector.find(gate) for gate in selected}
    for gate in skips:
        if gate in gates:
            findings[gate] = GateFinding(gate=gate, verdict=GateVerdict.SKIPPED, found="skipped on request")
    preflight = Preflight(
        is_strict=is_strict,
        cluster=_state(cluster),
        findings=tuple(findings[gate] for gate in Gate if gate in findings),
    )
    return PreflightResult(preflight=preflight, cluster=cluster)


@dataclass(frozen=True, slots=True)
class _Inspector:
    request: PreflightRequest
    comm: Comm
    cluster: ClusterFacts | None
    reports: Sequence[RankReport | MissingReport]
    is_private: bool

    def find(self, gate: Gate) -> GateFinding:
        """The finding of one gate, from the reports or by a measurement."""
        lack = self._lack(gate)
        if lack:
            return GateFinding(gate=gate, verdict=GateVerdict.NOT_APPLICABLE, found=lack)
        if gate is Gate.CLUSTER:
            assert self.cluster is not None
            return gate_checks.check_cluster(self.cluster)
        if gate is Gate.CLOCK:
            return gate_checks.check_clock(measure_clock_offsets(self.comm))
        if gate is Gate.STORAGE:
            return self._storage()
        missing = [report for report in self.reports if isinstance(report, MissingReport)]
        if missing:
            reasons = "; ".join(
                f"rank {report.rank} on {report.host}: {report.reason}" for report in missing[:3]
            )
            return GateFinding(
                gate=gate,
                verdict=GateVerdict.NOT_CHECKED,
                found=f"{len(missing)} of {len(self.reports)} ranks did not report: {reasons}",
                fix="Fix the errors of these ranks.",
            )
        return _REPORT_CHECKS[gate]([report for report in self.reports if isinstance(report, RankReport)])

    def _lack(self, gate: Gate) -> str:
        """Why a gate does not apply; "" where it does."""
        doing = self.request
        if gate is Gate.STORAGE and (doing.uri is None or doing.reopen is None):
            return "no storage is used"
        if gate is Gate.SPACE and doing.uri is None and doing.results is None:
            return "nothing is written"
        if gate is Gate.APART and (doing.uri is None or doing.results is None):
            return "data or results are not used"
        if gate is Gate.APART and self.is_private:
            return "only results for a submission need a file system of their own"
        return ""

    def _storage(self) -> GateFinding:
        assert self.request.uri is not None
        assert self.request.reopen is not None
        probe = probe_storage(self.comm, self.request.uri, self.request.reopen)
        if isinstance(probe, str):
            return GateFinding(
                gate=Gate.STORAGE,
                verdict=GateVerdict.NOT_CHECKED,
                found=probe,
                fix="Give rank 0 permission to write there, or at least to read an object.",
            )
        return gate_checks.check_storage(probe)


def _attempt(comm: Comm, work: Callable[[], T]) -> T | MissingReport:
    try:
        return work()
    except (OSError, ValueError, KeyError, PenstockError) as error:
        return MissingReport(rank=comm.rank, host=comm.host, reason=f"{type(error).__name__}: {error}")


def _state(cluster: ClusterFacts | None) -> ClusterState:
    if cluster is None or not cluster.present:
        return "unknown"
    return "partial" if cluster.is_partial else "whole"


def _now() -> datetime:
    return datetime.now(UTC)
