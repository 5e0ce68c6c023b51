"""What a rule is: a name, its source, its formula, and a judgement of one result by an edition's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Unknown
from penstock.submission.tree_layout import Benchmark
from penstock.workload.division_rules import SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result

ALL: Final = ("v1.0", "v2.0", "v3.0")
LATER: Final = ("v2.0", "v3.0")
NEWEST: Final = ("v3.0",)
BOTH: Final = (Benchmark.TRAINING, Benchmark.CHECKPOINTING)
CHECKPOINTING: Final = (Benchmark.CHECKPOINTING,)


class Rule(ABC):
    """One rule. `passes` and `fails` are examples in words; the generated trees of both are in the tests."""

    id: ClassVar[str]
    title: ClassVar[str]
    editions: ClassVar[tuple[str, ...]] = ("v1.0",)
    benchmarks: ClassVar[tuple[Benchmark, ...]] = (Benchmark.TRAINING,)
    source: ClassVar[str]
    formula: ClassVar[str]
    passes: ClassVar[str]
    fails: ClassVar[str]

    @abstractmethod
    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """The findings, or `Unknown` where a fact is missing."""


class JobRule(Rule):
    """A rule that each job of each run must keep: a fact missing in one hides nothing about the others."""

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """The findings of all jobs."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.name)
        for job in result.jobs():
            try:
                yield from self.judge_job(job, result, edition)
            except Unknown as reason:
                yield not_checked(reason)

    @abstractmethod
    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """The findings of one job."""


def not_checked(reason: Unknown) -> Finding:
    """What is said where a fact is missing: the field and the file."""
    return Finding(
        verdict=Verdict.NOT_CHECKED,
        proof=reason.what,
        evidence=reason.where,
        fix=reason.fix or "Restore the file as the benchmark wrote it.",
    )


def forgiving(finding: Finding, job: Job, result: Result) -> Finding:
    """A warm-up counts in no mean: what fails in it is a warning."""
    is_warm_up = any(run.is_warm_up and job in run.jobs for run in result.runs)
    if is_warm_up and finding.verdict is Verdict.FAIL:
        return replace(finding, verdict=Verdict.WARNING, proof=f"{finding.proof} (in the warm-up)")
    return finding


def judged(
    kept: bool,  # noqa: FBT001 - the one thing it is about
    *,
    evidence: str,
    proof: str,
    value: object = "",
    limit: object = "",
    fix: str = "",
    otherwise: Verdict = Verdict.FAIL,
) -> Finding:
    """A finding of a rule that is kept, or not: only then it needs a `fix`."""
    return Finding(
        verdict=Verdict.PASS if kept else otherwise,
        evidence=evidence,
        value=str(value),
        limit=str(limit),
        proof=proof,
        fix="" if kept else fix,
    )


def not_applicable(evidence: str, why: str) -> Finding:
    """What is said where a rule is about something else."""
    return Finding(verdict=Verdict.NOT_APPLICABLE, evidence=evidence, proof=why)


def parameters_of(job: Job, edition: Edition) -> str:
    """By which name a leaf's metadata have the whole configuration."""
    known = edition.of_time().metadata_parameters
    found = next((name for name in known if job.metadata.has(name)), None)
    if found is None:
        job.metadata.value()
        raise Unknown(f"there is no field {' or '.join(known)}", where=job.metadata.file)
    return found


def require_all_hosts(job: Job) -> None:
    """Raise `Unknown` where the facts of some hosts are missing: what is said of all would be a guess."""
    path = ("cluster_information", "is_partial")
    if job.metadata.has(*path) and job.metadata.flag(*path):
        raise Unknown(
            "the facts of some hosts are missing (cluster_information.is_partial)",
            where=job.metadata.file,
            fix="Repeat the run with facts of all hosts.",
        )


def is_closed(result: Result) -> bool:
    """Whether the result is in CLOSED; `Unknown` where the path does not say."""
    return division_of(result) is SubmissionDivision.CLOSED


def division_of(result: Result) -> SubmissionDivision:
    """The result's division."""
    division = result.place.submitter.division
    if division is None:
        raise Unknown(
            "the path does not say which division this is",
            where=result.name,
            fix="Keep the submitter's folder below closed/ or open/.",
        )
    return division


def verdict_of(is_kept: bool) -> Verdict:  # noqa: FBT001 - the one thing it is about
    """Pass or fail."""
    return Verdict.PASS if is_kept else Verdict.FAIL
