"""Rules on what is there: folders, files, the number of runs, and that all runs are of one thing."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Unknown
from penstock.submission.recomputed_metrics import interval_of, num_accelerators
from penstock.submission.rules.rule import ALL, BOTH, LATER, JobRule, Rule, judged, verdict_of
from penstock.submission.tree_layout import CONFIG_FOLDER, RESULTS_FILE, Benchmark

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result, Run


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


class DatagenLeaf(Rule):
    """The data set was generated once."""

    editions = LATER
    id = "datagen.number"
    title = "The data set was generated once"
    source = "2.1.13"
    formula = "number of leaves in datagen/ == the edition's"
    passes = "datagen/20260701_080000/"
    fails = "two leaves in datagen/"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        found, asked = len(result.datagen), edition.of_time().num_datagen
        yield judged(
            found == asked,
            evidence=result.name,
            value=found,
            limit=asked,
            proof=f"{found} leaves {'==' if found == asked else '!='} {asked}",
            fix="Hand in the leaf of the data set that the runs read.",
        )


class DatagenFiles(Rule):
    """What a generation leaves."""

    editions = LATER
    id = "datagen.files"
    title = "The leaf of the generated data set has its files"
    source = "2.1.14; the JSON files that its text names too are never written by a generation"
    formula = "every pattern of the edition's list matches a file of the leaf"
    passes = "training_datagen.stdout.log, training_datagen.stderr.log, dlio.log"
    fails = "no dlio.log"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each leaf."""
        for leaf in result.datagen:
            yield files_finding(leaf, edition.of_time().datagen_files)


class ConfigFiles(Rule):
    """The configuration's folder."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.configuration"
    title = "The configuration's folder has exactly its files"
    source = "2.1.15, 2.1.20, 2.1.26"
    formula = "the files in dlio_config/ are those of the edition's list"
    passes = "dlio_config/ with config.yaml, hydra.yaml, overrides.yaml"
    fails = "dlio_config/ with config.yaml alone"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each leaf."""
        asked = set(edition.of_time().config_files)
        for leaf in (*result.datagen, *result.jobs()):
            prefix = f"{CONFIG_FOLDER}/"
            found = {name.removeprefix(prefix) for name in leaf.files if name.startswith(prefix)}
            missing, strange = sorted(asked - found), sorted(found - asked)
            told = [f"there is no {name}" for name in missing] + [f"{name} is too much" for name in strange]
            yield judged(
                not told,
                evidence=f"{leaf.name}/{CONFIG_FOLDER}",
                value=f"{len(found)} files",
                limit=", ".join(sorted(asked)),
                proof="; ".join(told) or "exactly its files are there",
                fix="Copy the run's whole output folder, and nothing into it.",
            )


class ResultsFile(Rule):
    """The results' file."""

    editions = LATER
    benchmarks = BOTH
    id = "runs.results"
    title = "The runs have their results.json"
    source = "2.1.16, 2.1.22"
    formula = "results.json is beside the runs, and can be read"
    passes = "run/results.json"
    fails = "no results.json"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding."""
        is_there = result.report.problem != "there is no such file"
        if is_there:
            result.report.value()
        yield judged(
            is_there,
            evidence=result.report.file,
            proof=f"{RESULTS_FILE} {'is' if is_there else 'is not'} there",
            fix="Let `penstock submission report --write` make it.",
        )


class Pauses(Rule):
    """Consecutive runs."""

    editions = LATER
    id = "runs.pauses"
    title = "Runs follow one another, with pauses shorter than a run"
    source = "2.1.18: the text measures from end to start, its tool from start to start; both agree here"
    formula = "0 <= begin of a run - end of the run before < max_pause_runs x duration of the shortest run"
    passes = "runs of 18 minutes with 2 minutes between them"
    fails = "runs of 18 minutes with 18 minutes between them"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each pause."""
        if len(result.runs) < 2:
            raise Unknown(f"there are {len(result.runs)} runs, and no pause", where=result.name)
        times = [interval_of(run.jobs[0]) for run in result.runs]
        shortest_s = min(each.duration_s for each in times)
        limit_s = edition.of_time().max_pause_runs * shortest_s
        for (before, after), run in zip(pairwise(times), result.runs[1:], strict=True):
            pause_s = (after.begin - before.end).total_seconds()
            kept = 0 <= pause_s < limit_s
            yield judged(
                kept,
                evidence=run.jobs[0].name,
                value=f"{pause_s:g} s",
                limit=f"{limit_s:g} s",
                proof=(
                    f"{pause_s:g} s after the run before, {'within' if kept else 'not within'} 0 and "
                    f"{limit_s:g} s (the shortest run takes {shortest_s:g} s)"
                ),
                fix="Repeat the runs one after the other.",
            )
