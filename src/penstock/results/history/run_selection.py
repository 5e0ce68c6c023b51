"""Select runs by age, outcome, workload and number, for lists and for removals.

Pure: runs and criteria in, runs out. Invariant: a removal never includes an active run, and names the reason
for each run that it spares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.errors import UsageError
from penstock.results.history.run_catalog import CatalogedRun
from penstock.units import parse_seconds

INCOMPLETE: Final = "incomplete"
OUTCOMES: Final = ("finished", "failed", "interrupted", "running", "unreadable", "unknown")
_INCOMPLETE: Final = frozenset({"interrupted", "running", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCriteria:
    """What selected runs have in common; None and empty match every run."""

    outcomes: frozenset[str] = frozenset()
    workload: str = ""
    begun_before: datetime | None = None

    @property
    def is_selective(self) -> bool:
        """Whether any criterion is given."""
        return bool(self.outcomes or self.workload or self.begun_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """The runs to remove, and each matching run that stays, with the reason."""

    removed: tuple[CatalogedRun, ...]
    spared: tuple[tuple[CatalogedRun, str], ...]


def parse_criteria(*, status: str, workload: str, older_than: str, now: datetime) -> RunCriteria:
    """Parse the criteria of a command line."""
    return RunCriteria(
        outcomes=parse_outcomes(status) if status else frozenset(),
        workload=workload.lower(),
        begun_before=parse_age(older_than, now) if older_than else None,
    )


def parse_outcomes(text: str) -> frozenset[str]:
    """Parse outcomes separated by commas; `incomplete` stands for those without a recorded end."""
    outcomes: set[str] = set()
    for word in text.split(","):
        if word == INCOMPLETE:
            outcomes |= _INCOMPLETE
        elif word in OUTCOMES:
            outcomes.add(word)
        else:
            raise UsageError(
                f"{word!r} is not an outcome of a run",
                where="--status",
                fix=f"Choose from: {', '.join(OUTCOMES)}, {INCOMPLETE}.",
            )
    return frozenset(outcomes)


def parse_age(text: str, now: datetime) -> datetime:
    """Parse an age (`2w`, `7d`, `12h`) as a moment before `now`, or a date as its beginning in UTC."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - timedelta(seconds=parse_seconds(_require_unit(text)))
        except (UsageError, OverflowError) as error:
            raise UsageError(
                f"{text!r} is neither an age nor a date",
                where="--older-than",
                fix="Write 2w, 7d, 12h or 2026-01-31.",
            ) from error
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _require_unit(text: str) -> str:
    """Refuse a bare number, which would mean seconds: surely not what was meant by a run's age."""
    if not text[-1:].isalpha():
        raise UsageError(f"{text!r} has no unit")
    return text


def fits(run: CatalogedRun, wanted: RunCriteria) -> bool:
    """Whether a run matches. One without a start time is never old."""
    if wanted.outcomes and run.outcome not in wanted.outcomes:
        return False
    if wanted.workload and wanted.workload not in run.workload.lower():
        return False
    return wanted.begun_before is None or (run.started is not None and run.started < wanted.begun_before)


def plan_removal(runs: Sequence[CatalogedRun], wanted: RunCriteria, *, keep_last: int = 0) -> RemovalPlan:
    """Remove the matching of `runs` (newest first), except the newest `keep_last` and active ones."""
    fitting = [run for run in runs if fits(run, wanted)]
    spared = [(run, f"one of the last {keep_last}") for run in fitting[:keep_last]]
    removed: list[CatalogedRun] = []
    for run in fitting[keep_last:]:
        if run.outcome == "running":
            spared.append((run, "still running"))
        else:
            removed.append(run)
    return RemovalPlan(removed=tuple(removed), spared=tuple(spared))
