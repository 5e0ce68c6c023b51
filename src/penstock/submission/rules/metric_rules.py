"""Rules about figures: utilization reaches its minimum, and every stated mean is the mean it claims to be."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from penstock.submission import recomputed_metrics
from penstock.submission.edition import Edition
from penstock.submission.finding import Finding, Verdict, not_applicable, not_checked, pass_if
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_files import ResultDir, SubmittedResult
from penstock.submission.rules import rule
from penstock.submission.tree_layout import Benchmark

RUN_MEANS: Final[tuple[tuple[str, Callable[[ResultDir], float]], ...]] = (
    ("train_au_mean_percentage", recomputed_metrics.utilization_percent),
    ("train_throughput_mean_samples_per_second", recomputed_metrics.samples_per_second),
    ("train_io_mean_MB_per_second", recomputed_metrics.mib_per_second),
)


def _min_utilization(case: rule.RunCase) -> float:
    family, _ = case.run.workload()
    limits = case.edition.min_utilization_percent
    if family not in limits:
        raise MissingFact(
            f"{family} is not a workload of {case.edition.edition}", where=case.run.overrides.file
        )
    return limits[family]


rule.limit_rule(
    rule.RunCase,
    id="utilization.minimum",
    title="Accelerators are kept as busy as the workload asks for",
    editions=rule.ALL,
    source="v1.0 rules, workloads; 3.3.2 of later editions",
    formula="mean of train_au_percentage over the epochs >= the workload's minimum",
    passes="cosmoflow at 70.1 %",
    fails="unet3d at 89.9 %",
    value=lambda case: recomputed_metrics.utilization_percent(case.run),
    compare=">=",
    limit=_min_utilization,
    evidence=lambda case: case.run.summary.file,
    show=("{:.6g} %", "{:g} %"),
    proof=lambda case, value, limit: (
        f"mean over epochs {value!r} % {'>=' if value >= limit else '<'} {limit:g} % "
        f"of {case.run.workload()[0]}"
    ),
    fix="Hand in a result with fewer accelerators, which this storage can feed.",
    lenient_in_warm_up=True,
)

rule.limit_rule(
    rule.RunCase,
    id="utilization.stated",
    title="Each run states that it reached its utilization",
    editions=rule.ALL,
    source="v1.0 rules, success of a run; 3.3.2 of later editions",
    formula='metric.train_au_meet_expectation == "success"',
    passes='"success"',
    fails='"fail"',
    value=lambda case: case.run.summary.text("metric", "train_au_meet_expectation"),
    compare="==",
    limit="success",
    evidence=lambda case: case.run.summary.file,
    proof="train_au_meet_expectation is {value!r}",
    fix="Repeat the run with fewer accelerators, which this storage can feed.",
    lenient_in_warm_up=True,
)


def _num_epoch_entries(case: rule.RunCase) -> int:
    entries = case.run.summary.value("metric", "train_au_percentage")
    return len(entries) if isinstance(entries, list) else 0


rule.limit_rule(
    rule.RunCase,
    id="means.epochs",
    title="Each run that counts reports every epoch",
    editions=rule.LATER,
    source="3.3.8",
    formula="entries of train_au_percentage == epochs of the configuration: none fails, another number warns",
    passes="5 epochs, 5 entries",
    fails="5 epochs, no entry",
    value=_num_epoch_entries,
    compare="==",
    limit=lambda case: case.run.config.integer("workload", "train", "epochs"),
    evidence=lambda case: case.run.summary.file,
    show=("{} entries", "{} epochs"),
    proof="train_au_percentage has {value} entries for {limit} epochs",
    fix="Repeat the run, to its end.",
    otherwise=lambda value, _: Verdict.WARNING if value else Verdict.FAIL,
    lenient_in_warm_up=True,
)


def _compare_stated(
    file: ParsedFile, path: tuple[str, ...], recompute: Callable[[], float], edition: Edition
) -> Finding:
    """A stated figure against the recomputed one; what cannot be recomputed hides no other figure."""
    try:
        recomputed = recompute()
        stated = file.number(*path)
    except MissingFact as reason:
        return not_checked(reason)
    tolerance = edition.means.relative_tolerance
    holds = math.isclose(stated, recomputed, rel_tol=tolerance, abs_tol=tolerance)
    return pass_if(
        holds,
        evidence=file.file,
        value=repr(stated),
        limit=repr(recomputed),
        proof=f"{'.'.join(path)}: stated {stated!r} {'==' if holds else '!='} recomputed {recomputed!r}",
        fix="State the recomputed figure, or restore the files that it was made from.",
    )


@rule.run_rule(
    id="means.run",
    title="The means that a run states are those of its epochs",
    editions=rule.ALL,
    source="ours: a stated mean is never trusted",
    formula="stated == mean over epochs, within the edition's tolerance; MB/s by the record's length",
    passes="train_au_percentage [90, 92], train_au_mean_percentage 91",
    fails="train_au_percentage [90, 92], train_au_mean_percentage 95",
)
def _check_run_means(case: rule.RunCase) -> Iterator[Finding]:
    for name, metric in RUN_MEANS:
        path = ("metric", name)
        yield _compare_stated(case.run.summary, path, partial(metric, case.run), case.edition)


@rule.run_rule(
    id="means.checkpoint",
    title="The means that a checkpointing run states are those of its checkpoints",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.3.6: the mean of size / duration over the checkpoints, not all bytes over all time",
    formula=(
        "stated == mean over checkpoints, within the edition's tolerance, by rank 0 or by each "
        "one's slowest rank"
    ),
    passes="10 checkpoints of 104.7 GiB in 4 ... 6.25 s, save_checkpoint_io_mean_GB_per_second 21.1",
    fails="the same, stated 26.2",
)
def _check_checkpoint_means(case: rule.RunCase) -> Iterator[Finding]:
    summary = case.run.summary
    for prefix in ("save", "load"):
        for name, candidates in recomputed_metrics.checkpoint_means(case.run, prefix).items():
            stated = summary.number("metric", name)
            nearest = min(candidates, key=lambda mean: abs(mean - stated))
            yield _compare_stated(summary, ("metric", name), partial(float, nearest), case.edition)


@rule.result_rule(
    id="means.results",
    title="The figures of results.json are those of its runs",
    editions=rule.LATER,
    benchmarks=rule.BOTH,
    source="3.3.8, 4.3.6",
    formula=(
        "every figure that is known by its name, at the top or in metrics or overall, == the recomputed one, "
        "within the edition's tolerance; warm-ups do not count; checkpoints by rank 0 or by the slowest rank"
    ),
    passes="five runs of 20.1 ... 20.5 samples/s, train_throughput_mean_samples_per_second 20.3",
    fails="the same, stated 20.25, which is the mean with the warm-up",
)
def _check_results_means(case: rule.ResultCase) -> Iterator[Finding]:
    report, is_training = case.result.report, case.result.location.benchmark is Benchmark.TRAINING
    metrics = recomputed_metrics.TRAINING_METRICS if is_training else recomputed_metrics.CHECKPOINT_METRICS
    stated = [path for name in metrics for path in _figure_paths(name) if report.has(*path)]
    for path in stated:
        yield _compare_result(case, path, metrics)
    if not stated:
        report.value()
        yield not_applicable(report.file, "it states no known figure")


def _figure_paths(name: str) -> tuple[tuple[str, ...], ...]:
    return (name,), ("metrics", name), ("overall", name)


def _compare_result(
    case: rule.ResultCase,
    path: tuple[str, ...],
    metrics: Mapping[str, Callable[[SubmittedResult], float]] = recomputed_metrics.TRAINING_METRICS,
) -> Finding:
    result, name = case.result, path[-1]
    if name not in recomputed_metrics.CHECKPOINT_METRICS:
        return _compare_stated(result.report, path, lambda: metrics[name](result), case.edition)
    try:
        candidates = recomputed_metrics.result_checkpoint_means(result, name)
        stated = result.report.number(*path)
    except MissingFact as reason:
        return not_checked(reason)
    nearest = min(candidates, key=lambda mean: abs(mean - stated))
    return _compare_stated(result.report, path, partial(float, nearest), case.edition)


@rule.result_rule(
    id="means.report",
    title="The figures of the report are those of its runs",
    editions=rule.FIRST,
    source="v1.0 rules, a result is the mean of five runs",
    formula="overall.* == mean and population deviation over the runs, within the edition's tolerance",
    passes="runs of 10, 10, 10, 11 and 9 samples/s, reported 10",
    fails="the same, reported 11",
)
def _check_report_means(case: rule.ResultCase) -> Iterator[Finding]:
    case.result.report.value("overall")
    for name in recomputed_metrics.TRAINING_METRICS:
        if name.startswith("train_throughput"):
            yield _compare_result(case, ("overall", name))
