"""Rules on what is there: folders, files, the number of runs, and that all runs are of one thing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown
from penstock.submission.finding import Finding, Verdict
from penstock.submission.metrics import num_accelerators
from penstock.submission.names import Benchmark
from penstock.submission.rules.base import ALL, BOTH, JobRule, Rule, verdict_of
from penstock.submission.tree import folders_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Job, Result, Run


class Folders(Rule):
    """A submitter's folders."""

    editions = ALL
    benchmarks = BOTH
    id = "structure.folders"
    title = "A submitter's folder holds the folders of the edition"
    source = "v1.0 rules, structure of a submission; 2.1.5 of later editions"
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

    editions = ALL
    benchmarks = BOTH
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
            evidence=result.name,
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

    editions = ALL
    id = "runs.number"
    title = "A result has exactly as many runs as the edition asks"
    source = "v1.0 rules, a result is the mean of five runs; 2.1.17: one warm-up and five"
    formula = "number of runs == num_runs; in v2.0 five runs without the warm-up are a warning"
    passes = "run1 ... run5"
    fails = "run1 ... run4"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        num_runs = len(result.runs)
        if not num_runs:
            raise Unknown("no folder is named as a run (run1, run2, ... or a time)", where=result.name)
        kept = num_runs == edition.num_runs
        yield Finding(
            verdict=Verdict.WARNING if edition.is_without_warm_ups(num_runs) else verdict_of(kept),
            evidence=result.name,
            value=str(num_runs),
            limit=str(edition.num_runs),
            proof=f"{num_runs} runs {'==' if kept else '!='} {edition.num_runs}",
            fix="" if kept else f"Hand in {edition.num_runs} consecutive runs, all of them.",
        )


class RunFiles(JobRule):
    """The files of a run."""

    editions = ALL
    benchmarks = BOTH
    id = "runs.files"
    title = "Each run has its files"
    source = "v1.0 rules, structure of a submission; 2.1.19 and 2.1.25 of later editions"
    formula = "every pattern of the edition's list matches a file in the run's folder"
    passes = "run1/ with summary.json, per_epoch_stats.json and configs/"
    fails = "run3/ without summary.json"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a job."""
        is_checkpoint = job.benchmark is Benchmark.CHECKPOINTING
        asked = edition.of_checkpoints().files if is_checkpoint else edition.run_files
        yield files_finding(job, asked)


def files_finding(job: Job, asked: tuple[str, ...]) -> Finding:
    """Whether each pattern of `asked` matches a file of a leaf."""
    missing = [pattern for pattern in asked if not fnmatch.filter(job.files, pattern)]
    return Finding(
        verdict=verdict_of(not missing),
        evidence=job.name,
        value=f"{len(asked) - len(missing)} files",
        limit=f"{len(asked)} files",
        proof=f"there is no {', no '.join(missing)}" if missing else "all files are there",
        fix="Copy the run's whole output folder." if missing else "",
    )


class KnownWorkload(JobRule):
    """Workload and accelerator."""

    editions = ALL
    benchmarks = BOTH
    id = "runs.workload"
    title = "Workload and accelerator are of the edition"
    source = "v1.0 rules, workloads; 2.1.11, 2.1.21 and 4.3.3 of later editions"
    formula = (
        "workload= in overrides.yaml (of checkpoints, the metadata) names a workload and an accelerator of "
        "the edition, and the folder is called like the workload; case does not matter"
    )
    passes = "workload=unet3d_h100"
    fails = "workload=bert_v100"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a job."""
        family, accelerator = job.workload()
        if job.benchmark is Benchmark.CHECKPOINTING:
            checkpoints = edition.of_checkpoints()
            families, accelerators = tuple(checkpoints.models), tuple(checkpoints.accelerator_memory_gb)
            kept = family in families  # the rule on accelerators' memory knows these
        else:
            families, accelerators = tuple(edition.min_utilization_percent), edition.accelerators
            kept = family in families and accelerator in accelerators
        folder = result.place.model.lower()
        misnamed = kept and bool(folder) and folder != family
        yield Finding(
            verdict=verdict_of(kept and not misnamed),
            evidence=job.metadata.file if job.benchmark is Benchmark.CHECKPOINTING else job.overrides.file,
            value=f"{family} on {accelerator}",
            limit=f"{', '.join(families)} on {', '.join(accelerators)}",
            proof=(
                f"{family} lies in a folder called {folder}"
                if misnamed
                else f"{family} on {accelerator} is {'' if kept else 'not '}of {edition.edition}"
            ),
            fix=""
            if kept and not misnamed
            else "Hand in only results of this edition's workloads, each in its folder.",
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

    editions = ALL
    benchmarks = BOTH
    id = "runs.same"
    title = "Workload, accelerators, files and samples a file are the same in all runs"
    source = "v1.0 rules, a result is the mean of runs of one configuration; 1.3 of later editions"
    formula = "one value of each over all runs"
    passes = "five runs with 8 accelerators"
    fails = "four runs with 8 accelerators, one with 7"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each thing that must be the same."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.name)
        asked = SAME if result.place.benchmark is Benchmark.TRAINING else SAME[:2]
        for what, of_run in asked:
            values = {run.name: of_run(run) for run in result.runs}
            kept = len(set(values.values())) == 1
            said = ", ".join(f"{name}: {value}" for name, value in values.items())
            yield Finding(
                verdict=verdict_of(kept),
                evidence=result.name,
                value=", ".join(sorted(set(values.values()))),
                limit="one value",
                proof=f"{what}: {next(iter(values.values()))} in all runs" if kept else f"{what}: {said}",
                fix="" if kept else "Repeat the runs that differ.",
            )
