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

    run_dir: PublishedDir
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


def plan_run_sequence(state: SeriesState, request: RequestedResult, *, now: datetime) -> RunSequence:
    """What is left to do at this time; `UsageError` where the series is of another result."""
    for run_dir in (*state.datasizes, *state.datagens, *state.runs):
        _require_same(run_dir, request)
    phases = []
    if not state.datasizes:
        phases.append(SubmissionPhase.DATASIZE)
    if not state.datagens:
        phases.append(SubmissionPhase.DATAGEN)
    kept, surplus = select_runs(state.runs, request, now=now)
    phases += [SubmissionPhase.RUN] * (request.num_runs - len(kept))
    return RunSequence(phases=tuple(phases), kept=kept, surplus=surplus)


def select_runs(
    runs: Sequence[PublishedDir], request: RequestedResult, *, now: datetime
) -> tuple[tuple[PublishedDir, ...], tuple[ExcludedRun, ...]]:
    """The runs that count, and those that no longer do.

    A complete sequence counts whenever it was made; an unfinished one only while the next run may follow.
    """
    chains = _chains(runs, request)
    whole = next((chain for chain in chains if len(chain) >= request.num_runs), None)
    if whole is not None:
        return _kept(runs, whole[: request.num_runs], "the result is complete without it")
    last = chains[-1] if chains else []
    if last and not may_follow(last, now, request):
        return _kept(runs, [], f"no run followed by {now:%H:%M:%S}, within the time that one run takes")
    return _kept(runs, last, "the next run did not follow within the time that one run takes, or it failed")


def may_follow(chain: Sequence[PublishedDir], began: datetime, request: RequestedResult) -> bool:
    """Whether a run that begins at this time follows these, as rule 2.1.18 is judged.

    Each pause must be shorter than `max_pause_runs` times the shortest run.
    """
    shortest = min(run_dir.duration for run_dir in chain)
    pauses = [after.began - before.ended for before, after in pairwise(chain)]
    pauses.append(began - chain[-1].ended)
    return all(timedelta(0) <= pause < request.max_pause_runs * shortest for pause in pauses)


def _chains(runs: Sequence[PublishedDir], request: RequestedResult) -> list[list[PublishedDir]]:
    """The runs as sequences without a failure, a long pause or an overlap; the last may be empty."""
    chains: list[list[PublishedDir]] = [[]]
    for run_dir in sorted(runs, key=lambda run_dir: run_dir.began):
        if not run_dir.is_success:
            chains.append([])
        elif not chains[-1] or _is_sequence([*chains[-1], run_dir], request):
            chains[-1].append(run_dir)
        else:
            chains.append([run_dir])
    return chains


def _is_sequence(run_dirs: Sequence[PublishedDir], request: RequestedResult) -> bool:
    *before, last = run_dirs
    return may_follow(before, last.began, request) and may_follow(run_dirs, last.ended, request)


def _kept(
    runs: Sequence[PublishedDir], kept: Sequence[PublishedDir], why: str
) -> tuple[tuple[PublishedDir, ...], tuple[ExcludedRun, ...]]:
    return tuple(kept), tuple(
        ExcludedRun(run_dir=run_dir, why=why) for run_dir in runs if run_dir not in kept
    )


def _require_same(run_dir: PublishedDir, request: RequestedResult) -> None:
    """A series holds one result: another accelerator, number or data set needs another series."""
    if run_dir.folder.parent.name == SubmissionPhase.DATAGEN:
        pairs = [("files", run_dir.num_files, request.num_files), ("data", run_dir.place, request.place)]
    else:
        pairs = [
            ("accelerator", run_dir.accelerator, request.accelerator),
            ("accelerators", run_dir.num_processes, request.num_processes),
            ("files", run_dir.num_files, request.num_files),
            ("data", run_dir.place, request.place),
        ]
    for what, present, requested in pairs:
        if present != requested:
            raise UsageError(
                f"Another result is under way here: its {what}: {present}, requested: {requested}",
                where=str(run_dir.folder),
                fix="Request the same, name another --system, or move that result's folder away.",
            )
