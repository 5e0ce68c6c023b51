"""Cluster facts by the ranks of a run: the lowest rank of each host reads its own machine.

Place in the flow: before a run, where ranks are already everywhere and need no launcher. Invariant: as with
launchers, a host that could not tell is absent, with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cluster.facts.model import Absent, ClusterFacts, HostReport, Present
from penstock.cluster.facts.reading import ROOT, read_report
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from penstock.cluster.comm import Comm
    from penstock.environment import Environment


def facts_of_ranks(
    comm: Comm, environment: Environment, *, now: Callable[[], datetime], root: Path = ROOT
) -> ClusterFacts:
    """The facts of all hosts that have ranks, the same on every rank. Collective; never raises for a host."""
    hosts = comm.gather(comm.host, awaiting="the hosts of all ranks")
    reads = hosts.index(comm.host) == comm.rank
    asked_unix_s = time.time()
    comm.barrier(awaiting="all ranks to be asked what their hosts are")
    told = comm.gather(_read(comm.host, environment, root) if reads else None, awaiting="facts of all hosts")
    answered_unix_s = time.time()
    outcomes = [
        Present(host=host, asked_unix_s=asked_unix_s, answered_unix_s=answered_unix_s, report=report)
        if isinstance(report, HostReport)
        else Absent(host=host, reason=report, exit_code=None, stderr="")
        for host, report in zip(hosts, told, strict=True)
        if report is not None
    ]
    facts = ClusterFacts(
        via="ranks",
        collected_at=now().isoformat(timespec="seconds"),
        asked=tuple(each.host for each in outcomes),
        is_partial=any(isinstance(each, Absent) for each in outcomes),
        present=tuple(each for each in outcomes if isinstance(each, Present)),
        absent=tuple(each for each in outcomes if isinstance(each, Absent)),
    )
    return comm.broadcast(facts, awaiting="rank 0 to put the facts of all hosts together")


def _read(host: str, environment: Environment, root: Path) -> HostReport | str:
    try:
        return read_report(host, environment, root=root)
    except (OSError, ValueError, KeyError, PenstockError) as error:
        return f"{type(error).__name__}: {error}"
