"""Rules about the runs of a result: how many, with which files, of one workload, one after the other."""

import fnmatch
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

from penstock.submission import recomputed_metrics, tree_layout
from penstock.submission.finding import Finding, Verdict, pass_if
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_files import ResultDir, ResultRun
from penstock.submission.rules import rule

rule.limit_rule(
    rule.ResultCase,
    id="datagen.number",
    title="The data set was generated once",
    editions=rule.LATER,
    source="2.1.13",
    formula="number of result directories in datagen/ == the edition's",
    passes="datagen/20260701_080000/",
    fails="two result directories in datagen/",
    value=lambda case: len(case.result.datagen),
    compare="==",
    limit=lambda case: case.timed.num_datagen,
    evidence=lambda case: case.name,
    proof="{value} result directories {sign} {limit}",
    fix="Hand in the result directory of the data set that the runs read.",
)


@rule.result_rule(
    id="datagen.files",
    title="The result directory of the data generation has its files",
    editions=rule.LATER,
    source="2.1.14; the JSON files that its text names too are never written by a generation",
    formula="every pattern of the edition's list matches a file of the directory",
    passes="training_datagen.stdout.log, training_datagen.stderr.log, dlio.log",
    fails="no dlio.log",
)
def _check_datagen_files(case: rule.ResultCase) -> Iterator[Finding]:
    for directory in case.result.datagen:
        yield _judge_files(directory, case.timed.datagen_files)


def _judge_files(directory: ResultDir, patterns: tuple[str, ...]) -> Finding:
    """Whether each pattern matches a file of the directory."""
    if directory.unlisted:
        raise MissingFact(directory.unlisted, where=directory.name)
    missing = [pattern for pattern in patterns if not fnmatch.filter(directory.files, pattern)]
    return pass_if(
        not missing,
        evidence=directory.name,
        value=f"{len(patterns) - len(missing)} files",
        limit=f"{len(patterns)} files",
        proof=f"there is no {', no '.join(missing)}" if missing else "all files are there",
        fix="Copy the run's whole output folder.",
    )


@rule.result_rule(
    id="runs.number",
    title="A result has exactly as many runs as the edition asks for",
    editions=rule.ALL,
    source="v1.0 rules, a result is the mean of five runs; 2.1.17: one warm-up and five",
    formula="number of runs == num_runs; in v2.0 five runs without the warm-up are a warning",
    passes="run1 ... run5",
    fails="run1 ... run4",
)
def _check_num_runs(case: rule.ResultCase) -> Iterator[Finding]:
    num_runs, expected = len(case.result.runs), case.edition.num_runs
    if not num_runs:
        raise MissingFact("there is no folder of a run", where=case.result.name)
    yield pass_if(
        num_runs == expected,
        evidence=case.result.name,
        value=num_runs,
        limit=expected,
        proof=f"{num_runs} runs {'==' if num_runs == expected else '!='} {expected}",
        fix=f"Hand in {expected} consecutive runs, all of them.",
        otherwise=Verdict.WARNING if case.edition.is_without_warm_ups(num_runs) else Verdict.FAIL,
    )


@rule.run_rule(
    id="runs.files",
    title="Each run has its files",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="v1.0 rules, structure of a submission; 2.1.19 and 2.1.25 of later editions",
    formula="every pattern of the edition's list matches a file in the run's folder",
    passes="run1/ with summary.json, per_epoch_stats.json and configs/",
    fails="run3/ without summary.json",
)
def _check_run_files(case: rule.RunCase) -> Iterator[Finding]:
    yield _judge_files(case.run, case.checkpoints.files if case.is_checkpointing else case.edition.run_files)


@rule.result_rule(
    id="runs.configuration",
    title="The configuration's folder has exactly its files",
    editions=rule.LATER,
    benchmarks=rule.BOTH,
    source="2.1.15, 2.1.20, 2.1.26",
    formula="the files in dlio_config/ are those of the edition's list",
    passes="dlio_config/ with config.yaml, hydra.yaml, overrides.yaml",
    fails="dlio_config/ with config.yaml alone",
)
def _check_config_files(case: rule.ResultCase) -> Iterator[Finding]:
    expected, prefix = set(case.timed.config_files), f"{tree_layout.CONFIG_FOLDER}/"
    for directory in (*case.result.datagen, *case.result.run_dirs()):
        present = {name.removeprefix(prefix) for name in directory.files if name.startswith(prefix)}
        problems = [f"there is no {name}" for name in sorted(expected - present)]
        problems += [f"{name} does not belong there" for name in sorted(present - expected)]
        yield pass_if(
            not problems,
            evidence=f"{directory.name}/{tree_layout.CONFIG_FOLDER}",
            value=f"{len(present)} files",
            limit=", ".join(sorted(expected)),
            proof="; ".join(problems) or "exactly its files are there",
            fix="Copy the run's whole output folder, and nothing into it.",
        )


@rule.result_rule(
    id="runs.results",
    title="The runs have their results.json",
    editions=rule.LATER,
    benchmarks=rule.BOTH,
    source="2.1.16, 2.1.22",
    formula="results.json is beside the runs, and can be read",
    passes="run/results.json",
    fails="no results.json",
)
def _check_results_file(case: rule.ResultCase) -> Iterator[Finding]:
    report = case.result.report
    if not report.is_missing:
        report.value()
    yield pass_if(
        not report.is_missing,
        evidence=report.file,
        proof=f"{tree_layout.RESULTS_FILE} {'is not' if report.is_missing else 'is'} there",
        fix="Write it with `penstock submission report --write`.",
    )


@rule.run_rule(
    id="runs.workload",
    title="Workload and accelerator belong to the edition",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="v1.0 rules, workloads; 2.1.11, 2.1.21 and 4.3.3 of later editions",
    formula=(
        "workload= in overrides.yaml (of checkpoints, the metadata) names a workload and an accelerator of "
        "the edition, and the folder has the workload's name; case does not matter"
    ),
    passes="workload=unet3d_h100",
    fails="workload=bert_v100",
)
def _check_workload(case: rule.RunCase) -> Iterator[Finding]:
    run, edition = case.run, case.edition
    family, accelerator = run.workload()
    if case.is_checkpointing:
        families = tuple(case.checkpoints.models)
        accelerators = tuple(case.checkpoints.accelerator_memory_gb)
        is_known = family in families  # the rule on accelerators' memory judges the accelerator
    else:
        families, accelerators = tuple(edition.min_utilization_percent), edition.accelerators
        is_known = family in families and accelerator in accelerators
    folder = case.result.location.model.lower()
    is_misplaced = is_known and bool(folder) and folder != family
    yield pass_if(
        is_known and not is_misplaced,
        evidence=run.metadata.file if case.is_checkpointing else run.overrides.file,
        value=f"{family} on {accelerator}",
        limit=f"{', '.join(families)} on {', '.join(accelerators)}",
        proof=(
            f"{family} lies in a folder called {folder}"
            if is_misplaced
            else f"{family} on {accelerator} is {'' if is_known else 'not '}of {edition.edition}"
        ),
        fix="Hand in only results of this edition's workloads, each in its folder.",
    )


def _over_dirs(read: Callable[[ResultDir], str]) -> Callable[[ResultRun], str]:
    return lambda run: ", ".join(sorted({read(directory) for directory in run.dirs}))


SHARED_SETTINGS: Final[tuple[tuple[str, Callable[[ResultRun], str]], ...]] = (
    ("workload", _over_dirs(lambda run: "_".join(run.workload()))),
    ("accelerators", lambda run: str(recomputed_metrics.num_accelerators(run))),
    ("files", _over_dirs(lambda run: str(run.summary.integer("num_files_train")))),
    ("samples a file", _over_dirs(lambda run: str(run.summary.integer("num_samples_per_file")))),
)
"""What all runs of a result share; checkpoints have the first two."""


@rule.result_rule(
    id="runs.same",
    title="Workload, accelerators, files and samples a file are the same in all runs",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="v1.0 rules, a result is the mean of runs of one configuration; 1.3 of later editions",
    formula="one value of each over all runs",
    passes="five runs with 8 accelerators",
    fails="four runs with 8 accelerators, one with 7",
)
def _check_same_settings(case: rule.ResultCase) -> Iterator[Finding]:
    rule.require_runs(case.result)
    is_training = case.result.location.benchmark is tree_layout.Benchmark.TRAINING
    for name, read in SHARED_SETTINGS if is_training else SHARED_SETTINGS[:2]:
        values = {run.name: read(run) for run in case.result.runs}
        distinct = sorted(set(values.values()))
        listed = ", ".join(f"{run}: {value}" for run, value in values.items())
        yield pass_if(
            len(distinct) == 1,
            evidence=case.result.name,
            value=", ".join(distinct),
            limit="one value",
            proof=f"{name}: {distinct[0]} in all runs" if len(distinct) == 1 else f"{name}: {listed}",
            fix="Repeat the runs that differ.",
        )


@rule.result_rule(
    id="runs.pauses",
    title="Runs follow one another, with pauses shorter than a run",
    editions=rule.LATER,
    source="2.1.18: the text measures from end to start, its tool from start to start; both agree here",
    formula="0 <= begin of a run - end of the run before < max_pause_runs x duration of the shortest run",
    passes="runs of 18 minutes with 2 minutes between them",
    fails="runs of 18 minutes with 18 minutes between them",
)
def _check_pauses(case: rule.ResultCase) -> Iterator[Finding]:
    runs = case.result.runs
    if len(runs) < 2:
        found = "is one run" if runs else "are no runs"
        raise MissingFact(f"there {found}, and no pause", where=case.result.name)
    intervals = [recomputed_metrics.read_interval(run.dirs[0]) for run in runs]
    shortest_s = min(interval.duration_s for interval in intervals)
    limit_s = case.timed.max_pause_runs * shortest_s
    for (before, after), run in zip(pairwise(intervals), runs[1:], strict=True):
        pause_s = (after.begin - before.end).total_seconds()
        holds = 0 <= pause_s < limit_s
        yield pass_if(
            holds,
            evidence=run.dirs[0].name,
            value=f"{pause_s:g} s",
            limit=f"{limit_s:g} s",
            proof=(
                f"{pause_s:g} s after the run before, {'within' if holds else 'not within'} 0 and "
                f"{limit_s:g} s (the shortest run takes {shortest_s:g} s)"
            ),
            fix="Repeat the runs one after the other.",
        )
