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
from penstock.submission.tree_layout import Phase

if TYPE_CHECKING:
    from penstock.submission.authoring.series_state import Leaf, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The result that is to be made, and how its runs must follow one another."""

    accelerator: str
    num_processes: int
    place: str
    num_files: int
    num_runs: int
    max_pause_runs: float


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
    kept, surplus = keep_runs(standing.runs, wanted, now=now)
    phases += [Phase.RUN] * (wanted.num_runs - len(kept))
    return Cadence(phases=tuple(phases), kept=kept, surplus=surplus)


def keep_runs(
    runs: Sequence[Leaf], wanted: Wanted, *, now: datetime
) -> tuple[tuple[Leaf, ...], tuple[Surplus, ...]]:
    """The runs that count, and those that no longer do.

    A whole sequence counts whenever it was made; an unfinished one only while the next run can still follow.
    """
    chains = _chains(runs, wanted)
    whole = next((chain for chain in chains if len(chain) >= wanted.num_runs), None)
    if whole is not None:
        return _kept(runs, whole[: wanted.num_runs], "the result is whole without it")
    last = chains[-1] if chains else []
    if last and not may_follow(last, now, wanted):
        return _kept(runs, [], f"no run followed by {now:%H:%M:%S}, within the time that one run takes")
    return _kept(runs, last, "the next run did not follow within the time that one run takes, or it failed")


def may_follow(chain: Sequence[Leaf], began: datetime, wanted: Wanted) -> bool:
    """Whether a run that begins at this time follows these: rule 2.1.18 as it is judged.

    The pause before it is no longer than `max_pause_runs` times the shortest run.
    """
    shortest = min(leaf.duration for leaf in chain)
    pauses = [after.began - before.ended for before, after in pairwise(chain)]
    pauses.append(began - chain[-1].ended)
    return all(timedelta(0) <= pause < wanted.max_pause_runs * shortest for pause in pauses)


def _chains(runs: Sequence[Leaf], wanted: Wanted) -> list[list[Leaf]]:
    """The runs as sequences without a failure, a break or an overlap; the last may be empty."""
    chains: list[list[Leaf]] = [[]]
    for leaf in sorted(runs, key=lambda each: each.began):
        if not leaf.is_success:
            chains.append([])
        elif not chains[-1] or _is_sequence([*chains[-1], leaf], wanted):
            chains[-1].append(leaf)
        else:
            chains.append([leaf])
    return chains


def _is_sequence(leaves: Sequence[Leaf], wanted: Wanted) -> bool:
    *before, last = leaves
    return may_follow(before, last.began, wanted) and may_follow(leaves, last.ended, wanted)


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
