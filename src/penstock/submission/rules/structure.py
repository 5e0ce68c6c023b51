"""Rules on what is there: folders, files, the number of runs, and that all runs are of one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown
from penstock.submission.finding import Finding, Verdict
from penstock.submission.metrics import num_accelerators
from penstock.submission.rules.base import JobRule, Rule, verdict_of
from penstock.submission.tree import folders_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Job, Result, Run


class Folders(Rule):
    """A submitter's folders."""

    id = "structure.folders"
    title = "A submitter's folder holds the folders of the edition"
    source = "v1.0 rules, structure of a submission"
    formula = "required folders are there (else fail), expected ones too (else warning)"
    passes = "closed/acme/ with code/, results/ and systems/"
    fails = "closed/acme/ without systems/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for all folders, or one for each that is missing."""
        submitter = result.place.submitter
        there = folders_of(submitter)
        missing = [
            (verdict, name)
            for verdict, names in (
                (Verdict.FAIL, edition.folders.required),
                (Verdict.WARNING, edition.folders.expected),
            )
            for name in names
            if name not in there
        ]
        for verdict, name in missing:
            yield Finding(
                verdict=verdict,
                evidence=submitter.organisation,
                value="missing",
                limit=f"{name}/",
                proof=f"{submitter.organisation}/ has no {name}/",
                fix=f"Add {name}/ beside results/.",
            )
        if not missing:
            yield Finding(
                verdict=Verdict.PASS,
                evidence=submitter.organisation,
                proof=f"there are {', '.join(edition.folders.required + edition.folders.expected)}",
            )


class StrayFiles(Rule):
    """Noise."""

    id = "structure.stray"
    title = "Nothing but runs and their report lies in a result's folder"
    source = "ours: real trees hold such things, and no edition decides them"
    formula = "every entry is a run, runs/ or the report; others are named, and never fatal"
    passes = "run1 ... run5 and mlperf_storage_report.json"
    fails = "output.txt beside run1 (a warning)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """A warning that names what is not known."""
        stray = result.place.stray
        yield Finding(
            verdict=Verdict.WARNING if stray else Verdict.PASS,
            evidence=result.place.name,
            value=str(len(stray)),
            limit="0",
            proof=f"not known here: {', '.join(stray)}" if stray else "nothing else is here",
            fix="Take these out of the submission, unless a reviewer needs them." if stray else "",
        )


class Description(Rule):
    """The system's description."""

    id = "structure.system"
    title = "A system's description is there and can be read"
    source = "v1.0 rules, system description (which has no fixed schema in this edition)"
    formula = "systems/<system>.json is JSON; another name, or a flaw that hides nothing, is a warning"
    passes = "results/fast/unet3d_h100/ and systems/fast.json"
    fails = "results/fast/unet3d_h100/, and systems/ holds no .json"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each description."""
        place = result.place
        if not result.systems:
            yield Finding(
                verdict=Verdict.FAIL,
                evidence=place.submitter.organisation,
                value="no description",
                limit="one",
                proof="systems/ holds no .json",
                fix=f"Describe the system in systems/{place.system or 'NAME'}.json.",
            )
        for system in result.systems:
            system.value()
            named = not place.system or system.file.endswith(f"/{place.system}.json")
            remark = system.remark or ("" if named else f"the results call the system {place.system}")
            yield Finding(
                verdict=Verdict.WARNING if remark else Verdict.PASS,
                evidence=system.file,
                proof=remark or "it can be read",
                fix="Mend the file or its name." if remark else "",
            )


class NumRuns(Rule):
    """The number of runs."""

    id = "runs.number"
    title = "A result has exactly as many runs as the edition asks"
    source = "v1.0 rules, a result is the mean of five runs"
    formula = "number of run folders == num_runs"
    passes = "run1 ... run5"
    fails = "run1 ... run4"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        num_runs = len(result.runs)
        if not num_runs:
            raise Unknown("no folder is named as a run (run1, run2, ...)", where=result.place.name)
        kept = num_runs == edition.num_runs
        yield Finding(
            verdict=verdict_of(kept),
            evidence=result.place.name,
            value=str(num_runs),
            limit=str(edition.num_runs),
            proof=f"{num_runs} runs {'==' if kept else '!='} {edition.num_runs}",
            fix="" if kept else f"Hand in {edition.num_runs} consecutive runs, all of them.",
        )


class RunFiles(JobRule):
    """The files of a run."""

    id = "runs.files"
    title = "Each run has its files"
    source = "v1.0 rules, structure of a submission"
    formula = "every file of the edition's list is in the run's folder"
    passes = "run1/ with summary.json, per_epoch_stats.json and configs/"
    fails = "run3/ without summary.json"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a job."""
        missing = [name for name in edition.run_files if name not in job.files]
        yield Finding(
            verdict=verdict_of(not missing),
            evidence=job.name,
            value=f"{len(edition.run_files) - len(missing)} files",
            limit=f"{len(edition.run_files)} files",
            proof=f"there is no {', no '.join(missing)}" if missing else "all files are there",
            fix="Copy the run's whole output folder." if missing else "",
        )


class KnownWorkload(JobRule):
    """Workload and accelerator."""

    id = "runs.workload"
    title = "Workload and accelerator are of the edition"
    source = "v1.0 rules, workloads"
    formula = "workload= in overrides.yaml names a workload and an accelerator of the edition"
    passes = "workload=unet3d_h100"
    fails = "workload=bert_v100"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a job."""
        family, accelerator = job.workload()
        kept = family in edition.min_utilization_percent and accelerator in edition.accelerators
        yield Finding(
            verdict=verdict_of(kept),
            evidence=job.overrides.file,
            value=f"{family} on {accelerator}",
            limit=f"{', '.join(edition.min_utilization_percent)} on {', '.join(edition.accelerators)}",
            proof=f"{family} on {accelerator} is {'' if kept else 'not '}of {edition.edition}",
            fix="" if kept else "Hand in only results of this edition's workloads.",
        )


def _of_jobs(of_job: Callable[[Job], str]) -> Callable[[Run], str]:
    return lambda run: ", ".join(sorted({of_job(job) for job in run.jobs}))


SAME: Final[tuple[tuple[str, Callable[[Run], str]], ...]] = (
    ("workload", _of_jobs(lambda job: "_".join(job.workload()))),
    ("accelerators", lambda run: str(num_accelerators(run))),
    ("files", _of_jobs(lambda job: str(job.summary.whole("num_files_train")))),
    ("samples a file", _of_jobs(lambda job: str(job.summary.whole("num_samples_per_file")))),
)


class SameInAllRuns(Rule):
    """Runs of one thing."""

    id = "runs.same"
    title = "Workload, accelerators, files and samples a file are the same in all runs"
    source = "v1.0 rules, a result is the mean of runs of one configuration"
    formula = "one value of each over all runs"
    passes = "five runs with 8 accelerators"
    fails = "four runs with 8 accelerators, one with 7"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each of the four."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.place.name)
        for what, of_run in SAME:
            values = {run.name: of_run(run) for run in result.runs}
            kept = len(set(values.values())) == 1
            said = ", ".join(f"{name}: {value}" for name, value in values.items())
            yield Finding(
                verdict=verdict_of(kept),
                evidence=result.place.name,
                value=", ".join(sorted(set(values.values()))),
                limit="one value",
                proof=f"{what}: {next(iter(values.values()))} in all runs" if kept else f"{what}: {said}",
                fix="" if kept else "Repeat the runs that differ.",
            )
