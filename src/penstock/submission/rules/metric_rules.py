"""Rules on accelerator utilization: the workload's own minimum, and what the run says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Document, Unknown
from penstock.submission.recomputed_metrics import (
    CHECKPOINT_METRICS,
    TRAINING_METRICS,
    checkpoint_means,
    mib_per_second,
    samples_per_second,
    utilization_percent,
)
from penstock.submission.rules.rule import (
    ALL,
    BOTH,
    CHECKPOINTING,
    LATER,
    JobRule,
    Rule,
    forgiving,
    judged,
    not_applicable,
    not_checked,
    verdict_of,
)
from penstock.submission.tree_layout import Benchmark

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result


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


JOB_MEANS: Final[tuple[tuple[str, Callable[[Job], float]], ...]] = (
    ("train_au_mean_percentage", utilization_percent),
    ("train_throughput_mean_samples_per_second", samples_per_second),
    ("train_io_mean_MB_per_second", mib_per_second),
)


def compare(document: Document, path: tuple[str, ...], recomputed: float, edition: Edition) -> Finding:
    """A stated figure against the recomputed one."""
    stated = document.number(*path)
    tolerance = edition.means.relative_tolerance
    kept = math.isclose(stated, recomputed, rel_tol=tolerance, abs_tol=tolerance)
    return Finding(
        verdict=verdict_of(kept),
        evidence=document.file,
        value=repr(stated),
        limit=repr(recomputed),
        proof=f"{'.'.join(path)}: stated {stated!r} {'==' if kept else '!='} recomputed {recomputed!r}",
        fix="" if kept else "State the recomputed figure, or restore the files that it was made from.",
    )


class RunMeans(JobRule):
    """Means of one run."""

    editions = ALL
    id = "means.run"
    title = "The means that a run states are those of its epochs"
    source = "ours: a stated mean is never trusted"
    formula = (
        "stated == mean over epochs, within the edition's relative tolerance; MB/s by the record's length"
    )
    passes = "train_au_percentage [90, 92], train_au_mean_percentage 91"
    fails = "train_au_percentage [90, 92], train_au_mean_percentage 95"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for each mean."""
        for name, metric in JOB_MEANS:
            try:
                yield compare(job.summary, ("metric", name), metric(job), edition)
            except Unknown as reason:
                yield not_checked(reason)


class EpochsTold(JobRule):
    """Epochs of one run."""

    editions = LATER
    id = "means.epochs"
    title = "Each run that counts tells of every epoch"
    source = "3.3.8"
    formula = (
        "entries of train_au_percentage == epochs of the configuration: none fails, another number warns"
    )
    passes = "5 epochs, 5 entries"
    fails = "5 epochs, no entry"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        told = job.summary.value("metric", "train_au_percentage")
        count = len(told) if isinstance(told, list) else 0
        asked = job.config.whole("workload", "train", "epochs")
        finding = judged(
            count == asked,
            evidence=job.summary.file,
            value=f"{count} entries",
            limit=f"{asked} epochs",
            proof=f"train_au_percentage has {count} entries for {asked} epochs",
            fix="Repeat the run, to its end.",
            otherwise=Verdict.WARNING if count else Verdict.FAIL,
        )
        yield forgiving(finding, job, result)


class CheckpointMeans(JobRule):
    """Means of checkpoints."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "means.checkpoint"
    title = "The means that a checkpointing states are those of its checkpoints"
    source = "4.3.6: the mean of size / duration over the checkpoints, not all bytes over all time"
    formula = (
        "stated == mean over checkpoints, within the edition's tolerance, by rank 0 or by the slowest "
        "rank of each"
    )
    passes = "10 checkpoints of 104.7 GiB in 4 ... 6.25 s, save_checkpoint_io_mean_GB_per_second 21.1"
    fails = "the same, stated 26.2"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for each mean of what was written or read."""
        for prefix in ("save", "load"):
            for name, ways in checkpoint_means(job, prefix).items():
                stated = job.summary.number("metric", name)
                near = min(ways, key=lambda way: abs(way - stated))
                yield compare(job.summary, ("metric", name), near, edition)


class ResultsMeans(Rule):
    """Means of results.json."""

    editions = LATER
    benchmarks = BOTH
    id = "means.results"
    title = "The figures of results.json are those of its runs"
    source = "3.3.8, 4.3.6"
    formula = (
        "every figure that is known by its name, at the top or in metrics or overall, == the recomputed one, "
        "within the edition's tolerance; warm-ups do not count"
    )
    passes = "five runs of 20.1 ... 20.5 samples/s, train_throughput_mean_samples_per_second 20.3"
    fails = "the same, stated 20.25, which is the mean with the warm-up"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each figure that is stated."""
        found = False
        is_training = result.place.benchmark is Benchmark.TRAINING
        for name, metric in (TRAINING_METRICS if is_training else CHECKPOINT_METRICS).items():
            for path in ((name,), ("metrics", name), ("overall", name)):
                if not result.report.has(*path):
                    continue
                found = True
                try:
                    yield compare(result.report, path, metric(result), edition)
                except Unknown as reason:
                    yield not_checked(reason)
        if not found:
            result.report.value()
            yield not_applicable(result.report.file, "it states no figure that is known")


class ReportedMeans(Rule):
    """Means of the report."""

    id = "means.report"
    title = "The figures of the report are those of its runs"
    source = "v1.0 rules, a result is the mean of five runs"
    formula = "overall.* == mean and population deviation over the runs, within the edition's tolerance"
    passes = "runs of 10, 10, 10, 11 and 9 samples/s, reported 10"
    fails = "the same, reported 11"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for each figure of the report."""
        result.report.value("overall")
        for name, metric in TRAINING_METRICS.items():
            if name.startswith("train_throughput"):
                try:
                    yield compare(result.report, ("overall", name), metric(result), edition)
                except Unknown as reason:
                    yield not_checked(reason)
