"""Rules on accelerator utilization: the workload's own minimum, and what the run says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.facts import Unknown
from penstock.submission.finding import Finding
from penstock.submission.metrics import utilization_percent
from penstock.submission.rules.base import ALL, JobRule, forgiving, verdict_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Job, Result


class Utilization(JobRule):
    """The minimum."""

    editions = ALL
    id = "utilization.minimum"
    title = "Accelerators are kept as busy as the workload asks"
    source = "v1.0 rules, workloads; 3.3.2 of later editions"
    formula = "mean of train_au_percentage over the epochs >= the workload's minimum"
    passes = "cosmoflow at 70.1 %"
    fails = "unet3d at 89.9 %"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a job."""
        family, _ = job.workload()
        if family not in edition.min_utilization_percent:
            raise Unknown(f"{family} is no workload of {edition.edition}", where=job.overrides.file)
        limit = edition.min_utilization_percent[family]
        value = utilization_percent(job)
        kept = value >= limit
        finding = Finding(
            verdict=verdict_of(kept),
            evidence=job.summary.file,
            value=f"{value:.6g} %",
            limit=f"{limit:g} %",
            proof=f"mean over epochs {value!r} % {'>=' if kept else '<'} {limit:g} % of {family}",
            fix="" if kept else "Hand in a result with fewer accelerators, which this storage can feed.",
        )
        yield forgiving(finding, job, result)


class StatedSuccess(JobRule):
    """What the run says."""

    editions = ALL
    id = "utilization.stated"
    title = "Each run says of itself that it met its utilization"
    source = "v1.0 rules, success of a run; 3.3.2 of later editions"
    formula = 'metric.train_au_meet_expectation == "success"'
    passes = '"success"'
    fails = '"fail"'

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a job."""
        said = job.summary.text("metric", "train_au_meet_expectation")
        kept = said == "success"
        finding = Finding(
            verdict=verdict_of(kept),
            evidence=job.summary.file,
            value=said,
            limit="success",
            proof=f"train_au_meet_expectation is {said!r}",
            fix="" if kept else "Repeat the run with fewer accelerators, which this storage can feed.",
        )
        yield forgiving(finding, job, result)
