"""The rule on what a division lets a run change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.facts import Unknown
from penstock.submission.finding import Finding
from penstock.submission.rules.base import JobRule, verdict_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Job, Result


class AllowedParameters(JobRule):
    """The division's keys."""

    id = "parameters.allowed"
    title = "A run sets only what its division leaves free"
    source = "v1.0 rules, CLOSED and OPEN; 3.6.2 and 3.6.3 of later editions"
    formula = (
        "keys in overrides.yaml are a part of the division's list and of what the benchmark's script sets"
    )
    passes = "closed, ++workload.reader.read_threads=16"
    fails = "closed, ++workload.reader.batch_size=1"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a job."""
        division = result.place.submitter.division
        if division is None:
            raise Unknown(
                "the path does not say which division this is",
                where=result.place.name,
                fix="Keep the submitter's folder below closed/ or open/.",
            )
        changed = job.settings().keys() - {"workload"}
        forbidden = sorted(changed - edition.parameters.allowed(division))
        yield Finding(
            verdict=verdict_of(not forbidden),
            evidence=job.overrides.file,
            value=", ".join(forbidden),
            limit=f"the free keys of {division.value}",
            proof=(
                f"{', '.join(forbidden)}: not free in {division.value}"
                if forbidden
                else f"all {len(changed)} keys are free in {division.value}"
            ),
            fix="Repeat the runs without these." if forbidden else "",
        )
