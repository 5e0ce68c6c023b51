"""All gates in their order, on every rank: what each rank tells goes to all, and all find the same.

Place in the flow: before a run, or alone. Invariant: collective, and the same findings on every rank; a gate
about which some rank could tell nothing is not checked, never passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.cluster.facts.collect_facts import collect_from_ranks
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.cluster.gates.gate_checks import (
    check_apart,
    check_clock,
    check_cluster,
    check_ipc,
    check_limits,
    check_space,
    check_storage,
    check_versions,
)
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
from penstock.cluster.gates.storage_probe import probe_storage
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm

T = TypeVar("T")

_JUDGES: Final[dict[Gate, Callable[[Sequence[RankReport]], GateFinding]]] = {
    Gate.VERSIONS: check_versions,
    Gate.LIMITS: check_limits,
    Gate.IPC: check_ipc,
    Gate.APART: check_apart,
    Gate.SPACE: check_space,
}
"""Gates that what each rank tells of itself decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """What goes into a run's record, and the facts of its hosts, if they were asked for."""

    preflight: Preflight
    cluster: ClusterFacts | None


def run_preflight(
    undertaking: PreflightRequest,
    comm: Comm,
    *,
    gates: Collection[Gate] = tuple(Gate),
    skips: Collection[Gate] = (),
    is_strict: bool = False,
) -> PreflightResult:
    """Look at `gates`, but for `skips`; the same result on every rank. Collective."""
    wanted = [gate for gate in Gate if gate in gates and gate not in skips]
    cluster = (
        collect_from_ranks(comm, undertaking.environment, now=_now, root=undertaking.root)
        if Gate.CLUSTER in wanted
        else None
    )
    told: Sequence[RankReport | MissingReport] = ()
    if set(wanted) & _JUDGES.keys():
        told = comm.gather(
            _attempt(comm, lambda: read_rank_report(undertaking, comm)), awaiting="what all ranks tell"
        )
    inspector = _Inspector(undertaking, comm, cluster, told)
    found = {gate: inspector.find(gate) for gate in wanted}
    for gate in skips:
        if gate in gates:
            found[gate] = GateFinding(
                gate=gate, verdict=GateVerdict.SKIPPED, found="left out, as was asked for"
            )
    preflight = Preflight(
        is_strict=is_strict,
        cluster=_state(cluster),
        findings=tuple(found[gate] for gate in Gate if gate in found),
    )
    return PreflightResult(preflight=preflight, cluster=cluster)


@dataclass(frozen=True, slots=True)
class _Inspector:
    undertaking: PreflightRequest
    comm: Comm
    cluster: ClusterFacts | None
    told: Sequence[RankReport | MissingReport]

    def find(self, gate: Gate) -> GateFinding:
        """The finding of one gate, from what was told or from one look more."""
        lack = self._lack(gate)
        if lack:
            return GateFinding(gate=gate, verdict=GateVerdict.NOT_APPLICABLE, found=lack)
        if gate is Gate.CLUSTER:
            assert self.cluster is not None
            return check_cluster(self.cluster)
        if gate is Gate.CLOCK:
            return check_clock(measure_clock_offsets(self.comm))
        if gate is Gate.STORAGE:
            return self._storage()
        untold = [each for each in self.told if isinstance(each, MissingReport)]
        if untold:
            reasons = "; ".join(f"rank {each.rank} on {each.host}: {each.reason}" for each in untold[:3])
            return GateFinding(
                gate=gate,
                verdict=GateVerdict.NOT_CHECKED,
                found=f"{len(untold)} of {len(self.told)} ranks could not tell: {reasons}",
                fix="Mend what these ranks lack.",
            )
        return _JUDGES[gate]([each for each in self.told if isinstance(each, RankReport)])

    def _lack(self, gate: Gate) -> str:
        """Why a gate has nothing to look at; "" where it has."""
        doing = self.undertaking
        if gate is Gate.STORAGE and (doing.uri is None or doing.reopen is None):
            return "no storage is used"
        if gate is Gate.SPACE and doing.uri is None and doing.results is None:
            return "nothing is written"
        if gate is Gate.APART and (doing.uri is None or doing.results is None):
            return "data or results are not used"
        return ""

    def _storage(self) -> GateFinding:
        assert self.undertaking.uri is not None
        assert self.undertaking.reopen is not None
        probe = probe_storage(self.comm, self.undertaking.uri, self.undertaking.reopen)
        if isinstance(probe, str):
            return GateFinding(
                gate=Gate.STORAGE,
                verdict=GateVerdict.NOT_CHECKED,
                found=probe,
                fix="See that rank 0 may write there, or read something.",
            )
        return check_storage(probe)


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
