"""Which runs a person means by age, outcome, workload and number: for lists and for removals.

Pure: runs and criteria in, runs out. Invariant: a removal never takes a run that goes on, and says of each
run that it spares why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.units import parse_seconds

if TYPE_CHECKING:
    from penstock.results.history.run_catalog import CatalogedRun

INCOMPLETE: Final = "incomplete"
OUTCOMES: Final = ("finished", "failed", "interrupted", "running", "unreadable", "unknown")
_INCOMPLETE: Final = frozenset({"interrupted", "running", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCriteria:
    """What runs must be like; what is None or empty asks nothing."""

    outcomes: frozenset[str] = frozenset()
    workload: str = ""
    begun_before: datetime | None = None

    @property
    def ask_something(self) -> bool:
        """Whether any run could fall through."""
        return bool(self.outcomes or self.workload or self.begun_before)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """What a removal takes, and each run that fits but stays, with the reason."""

    taken: tuple[CatalogedRun, ...]
    spared: tuple[tuple[CatalogedRun, str], ...]


def parse_criteria(*, status: str, workload: str, older_than: str, now: datetime) -> RunCriteria:
    """Criteria from a person's words."""
    return RunCriteria(
        outcomes=parse_outcomes(status) if status else frozenset(),
        workload=workload.lower(),
        begun_before=parse_age(older_than, now) if older_than else None,
    )


def parse_outcomes(text: str) -> frozenset[str]:
    """Outcomes separated by commas; `incomplete` is every run whose end nobody saw."""
    found: set[str] = set()
    for word in text.split(","):
        if word == INCOMPLETE:
            found |= _INCOMPLETE
        elif word in OUTCOMES:
            found.add(word)
        else:
            raise UsageError(
                f"{word!r} is no outcome of a run",
                where="--status",
                fix=f"Choose of: {', '.join(OUTCOMES)}, {INCOMPLETE}.",
            )
    return frozenset(found)


def parse_age(text: str, now: datetime) -> datetime:
    """The moment that lies `2w`, `7d` or `12h` before `now`, or a date's beginning in UTC."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - timedelta(seconds=parse_seconds(_with_unit(text)))
        except (UsageError, OverflowError) as error:
            raise UsageError(
                f"{text!r} is no age and no date",
                where="--older-than",
                fix="Write 2w, 7d, 12h or 2026-01-31.",
            ) from error
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _with_unit(text: str) -> str:
    """A bare number would be seconds, which nobody means of a run's age."""
    if not text[-1:].isalpha():
        raise UsageError(f"{text!r} has no unit")
    return text


def fits(run: CatalogedRun, wanted: RunCriteria) -> bool:
    """Whether a run is meant. One that does not say when it began is never old."""
    if wanted.outcomes and run.outcome not in wanted.outcomes:
        return False
    if wanted.workload and wanted.workload not in run.workload.lower():
        return False
    return wanted.begun_before is None or (run.started is not None and run.started < wanted.begun_before)


def plan_removal(runs: Sequence[CatalogedRun], wanted: RunCriteria, *, keep_last: int = 0) -> RemovalPlan:
    """Of `runs`, newest first, those that fit, but not the newest `keep_last` of them nor what goes on."""
    fitting = [run for run in runs if fits(run, wanted)]
    spared = [(run, f"one of the last {keep_last}") for run in fitting[:keep_last]]
    taken: list[CatalogedRun] = []
    for run in fitting[keep_last:]:
        if run.outcome == "running":
            spared.append((run, "goes on"))
        else:
            taken.append(run)
    return RemovalPlan(taken=tuple(taken), spared=tuple(spared))
