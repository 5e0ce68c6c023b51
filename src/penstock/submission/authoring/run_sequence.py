"""Plan the runs that a result still needs, and which finished ones no longer count.

Pure: the state of a series and the time in, a plan out. Invariant: the runs that are kept follow one another
as the rules require; each other run is named with the reason, so that it can be set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.submission.tree_layout import SubmissionPhase

if TYPE_CHECKING:
    from penstock.submission.authoring.series_state import PublishedDir, SeriesState


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedResult:
    """The requested result, and how its runs must follow one another."""

    accelerator: str
    num_processes: int
    place: str
    num_files: int
    num_runs: int
    max_pause_runs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedRun:
    """A run that cannot be part of the result, and why."""

    leaf: PublishedDir
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSequence:
    """What to do: run `phases` in this order, after `surplus` was set aside; `kept` runs count."""

    phases: tuple[SubmissionPhase, ...]
    kept: tuple[PublishedDir, ...]
    surplus: tuple[ExcludedRun, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no phase is left to run."""
        return not self.phases


def plan_run_sequence(standing: SeriesState, wanted: RequestedResult, *, now: datetime) -> RunSequence:
    """What is left to do at this time; `UsageError` where the series is of another result."""
    for leaf in (*standing.datasizes, *standing.datagens, *standing.runs):
        _require_same(leaf, wanted)
    phases = []
    if not standing.datasizes:
        phases.append(SubmissionPhase.DATASIZE)
    if not standing.datagens:
        phases.append(SubmissionPhase.DATAGEN)
    kept, surplus = select_runs(standing.runs, wanted, now=now)
    phases += [SubmissionPhase.RUN] * (wanted.num_runs - len(kept))
    return RunSequence(phases=tuple(phases), kept=kept, surplus=surplus)


def select_runs(
    runs: Sequence[PublishedDir], wanted: RequestedResult, *, now: datetime
) -> tuple[tuple[PublishedDir, ...], tuple[ExcludedRun, ...]]:
    """The runs that count, and those that no longer do.

    A complete sequence counts whenever it was made; an unfinished one only while the next run may follow.
    """
    chains = _chains(runs, wanted)
    whole = next((chain for chain in chains if len(chain) >= wanted.num_runs), None)
    if whole is not None:
        return _kept(runs, whole[: wanted.num_runs], "the result is complete without it")
    last = chains[-1] if chains else []
    if last and not may_follow(last, now, wanted):
        return _kept(runs, [], f"no run followed by {now:%H:%M:%S}, within the time that one run takes")
    return _kept(runs, last, "the next run did not follow within the time that one run takes, or it failed")


def may_follow(chain: Sequence[PublishedDir], began: datetime, wanted: RequestedResult) -> bool:
    """Whether a run that begins at this time follows these, as rule 2.1.18 is judged.

    Each pause must be shorter than `max_pause_runs` times the shortest run.
    """
    shortest = min(leaf.duration for leaf in chain)
    pauses = [after.began - before.ended for before, after in pairwise(chain)]
    pauses.append(began - chain[-1].ended)
    return all(timedelta(0) <= pause < wanted.max_pause_runs * shortest for pause in pauses)


def _chains(runs: Sequence[PublishedDir], wanted: RequestedResult) -> list[list[PublishedDir]]:
    """The runs as sequences without a failure, a long pause or an overlap; the last may be empty."""
    chains: list[list[PublishedDir]] = [[]]
    for leaf in sorted(runs, key=lambda each: each.began):
        if not leaf.is_success:
            chains.append([])
        elif not chains[-1] or _is_sequence([*chains[-1], leaf], wanted):
            chains[-1].append(leaf)
        else:
            chains.append([leaf])
    return chains


def _is_sequence(leaves: Sequence[PublishedDir], wanted: RequestedResult) -> bool:
    *before, last = leaves
    return may_follow(before, last.began, wanted) and may_follow(leaves, last.ended, wanted)


def _kept(
    runs: Sequence[PublishedDir], kept: Sequence[PublishedDir], why: str
) -> tuple[tuple[PublishedDir, ...], tuple[ExcludedRun, ...]]:
    return tuple(kept), tuple(ExcludedRun(leaf=leaf, why=why) for leaf in runs if leaf not in kept)


def _require_same(leaf: PublishedDir, wanted: RequestedResult) -> None:
    """A series holds one result: another accelerator, number or data set needs another series."""
    if leaf.folder.parent.name == SubmissionPhase.DATAGEN:
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
                f"Another result is under way here: its {what}: {there}, requested: {asked}",
                where=str(leaf.folder),
                fix="Request the same, name another --system, or move that result's folder away.",
            )
