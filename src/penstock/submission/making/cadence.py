"""What a result still lacks, and which runs no longer count: decided from what lies there, and the time.

Pure. Invariant: the runs that are kept follow one another as the rules ask; a run that does not is named with
the reason, so that it can be set aside where everybody finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.submission.names import Phase

if TYPE_CHECKING:
    from penstock.submission.making.standing import Leaf, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The result that is to be made; `num_files` None takes what the data set's size asks for."""

    accelerator: str
    num_processes: int
    place: str
    num_files: int
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """A run that cannot be part of the result, and why."""

    leaf: Leaf
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What to do: phases in their order, after `surplus` was set aside; `kept` runs are there."""

    phases: tuple[Phase, ...]
    kept: tuple[Leaf, ...]
    surplus: tuple[Surplus, ...]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self.phases


def plan_cadence(standing: Standing, wanted: Wanted, *, now: datetime) -> Cadence:
    """What is left to do at this time; `UsageError` where another result is under way in this place."""
    for leaf in (*standing.datasizes, *standing.datagens, *standing.runs):
        _require_same(leaf, wanted)
    phases = []
    if not standing.datasizes:
        phases.append(Phase.DATASIZE)
    if not standing.datagens:
        phases.append(Phase.DATAGEN)
    kept, surplus = keep_runs(standing.runs, num_runs=wanted.num_runs, now=now)
    phases += [Phase.RUN] * (wanted.num_runs - len(kept))
    return Cadence(phases=tuple(phases), kept=kept, surplus=surplus)


def keep_runs(
    runs: Sequence[Leaf], *, num_runs: int, now: datetime
) -> tuple[tuple[Leaf, ...], tuple[Surplus, ...]]:
    """The runs that count, and those that no longer do.

    A whole sequence counts whenever it was made; an unfinished one only while the next run can still follow.
    """
    chains = _chains(runs)
    whole = next((chain for chain in chains if len(chain) >= num_runs), None)
    if whole is not None:
        return _kept(runs, whole[:num_runs], "the result is whole without it")
    last = chains[-1] if chains else []
    if last and not may_follow(last, now):
        return _kept(runs, [], f"no run followed it by {now:%H:%M:%S}, within the time of one run")
    return _kept(runs, last, "the run after it did not follow within the time of one run, or failed")


def may_follow(chain: Sequence[Leaf], began: datetime) -> bool:
    """Whether a run that begins at this time follows the last of these (rule 2.1.18).

    Both readings of the rule: the pause is shorter than the run before, and from start to start it is shorter
    than twice the shortest run.
    """
    last = chain[-1]
    shortest = min(leaf.duration for leaf in chain)
    return began - last.ended < last.duration and began - last.began < 2 * max(shortest, timedelta(seconds=1))


def _chains(runs: Sequence[Leaf]) -> list[list[Leaf]]:
    """The runs as sequences without a failure, a break or an overlap."""
    chains: list[list[Leaf]] = []
    for before, leaf in pairwise([None, *sorted(runs, key=lambda each: each.began)]):
        assert leaf is not None
        follows = before is not None and chains and chains[-1] and may_follow(chains[-1], leaf.began)
        if not leaf.is_success:
            chains.append([])
        elif follows:
            chains[-1].append(leaf)
        else:
            chains.append([leaf])
    return chains


def _kept(
    runs: Sequence[Leaf], kept: Sequence[Leaf], why: str
) -> tuple[tuple[Leaf, ...], tuple[Surplus, ...]]:
    return tuple(kept), tuple(Surplus(leaf=leaf, why=why) for leaf in runs if leaf not in kept)


def _require_same(leaf: Leaf, wanted: Wanted) -> None:
    """One place holds one result: another accelerator, number or data set goes to another place."""
    if leaf.folder.parent.name == Phase.DATAGEN:
        pairs = [("files", leaf.num_files, wanted.num_files), ("data", leaf.place, wanted.place)]
    else:
        pairs = [
            ("accelerator", leaf.accelerator, wanted.accelerator),
            ("accelerators", leaf.num_processes, wanted.num_processes),
            ("files", leaf.num_files, wanted.num_files),
            ("data", leaf.place, wanted.place),
        ]
    for what, there, asked in pairs:
        if there != asked:
            raise UsageError(
                f"Another result is under way here: its {what}: {there}, asked for: {asked}",
                where=str(leaf.folder),
                fix="Ask for the same, name another --system, or move that result's folder away.",
            )
