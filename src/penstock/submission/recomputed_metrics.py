"""Rates, means, durations and times of a result, recomputed from what each epoch and rank reports.

Rules compare them with what the files state; reports print them. Invariants: a stated mean or rate is never
used; a figure that cannot be recomputed is absent, and the rule that needs it gets the reason.
"""

import math
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import Final

from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_files import RankResult, ResultDir, ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark
from penstock.workload.quantities import element_bytes

MIB: Final = 1 << 20
SUMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "aggregated_read_bandwidth_gbps": ("cache_stats", "tier_storage_read_bandwidth_gbps"),
        "aggregated_write_bandwidth_gbps": ("cache_stats", "tier_storage_write_bandwidth_gbps"),
        "aggregated_avg_throughput_tokens_per_sec": ("avg_throughput_tokens_per_sec",),
        "aggregated_storage_throughput_tokens_per_sec": ("storage_throughput_tokens_per_sec",),
    }
)
"""Figures of a key-value cache's option that are summed over ranks and averaged over trials, each with its
place in a rank's report.
"""
LATENCY: Final = "aggregated_p95_latency_ms"

Interval = tuple[datetime, datetime]
"""The beginning and the end of an invocation."""


def mean(values: Collection[float]) -> float:
    """Return the arithmetic mean, summed exactly."""
    return math.fsum(values) / len(values)


def deviation(values: Collection[float]) -> float:
    """Return the standard deviation of the population."""
    middle = mean(values)
    return math.sqrt(mean([(value - middle) ** 2 for value in values]))


def samples_per_second(run_dir: ResultDir) -> float:
    """Return the mean rate over the epochs of one result directory."""
    return mean(run_dir.summary.numbers("metric", "train_throughput_samples_per_second"))


def mib_per_second(run_dir: ResultDir) -> float:
    """Return the mean rate in MiB/s over the epochs of one result directory, from the record length."""
    return samples_per_second(run_dir) * float(record_bytes(run_dir)) / MIB


def utilization_percent(run_dir: ResultDir) -> float:
    """Return the mean utilization over the epochs of one result directory."""
    return mean(run_dir.summary.numbers("metric", "train_au_percentage"))


def record_bytes(run_dir: ResultDir) -> Fraction:
    """Return a sample's bytes by the configuration: the record length, or for Parquet, the sum of columns."""
    config, dataset = run_dir.config, ("workload", "dataset")
    for name in ("record_length_bytes", "record_length"):
        if config.has(*dataset, name):
            stated = config.number(*dataset, name)
            length = Fraction(int(stated)) if stated.is_integer() else Fraction(str(stated))
            if length > 0:
                return length
            raise MissingFact(f"workload.dataset.{name} is not positive", where=config.file)
    if not config.has(*dataset, "parquet", "columns"):
        raise MissingFact("there is no field workload.dataset.record_length", where=config.file)
    columns, total = config.value(*dataset, "parquet", "columns"), 0
    for number, column in enumerate(columns if isinstance(columns, list) else ()):
        try:
            total += int(column.get("size", 1)) * element_bytes(column["dtype"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            place = f"workload.dataset.parquet.columns.{number}"
            raise MissingFact(f"{place} is {column!r:.60}, not a column", where=config.file) from error
    if total < 1:
        raise MissingFact("workload.dataset.parquet.columns has no column", where=config.file)
    return Fraction(total)


def num_accelerators(run: ResultRun) -> int:
    """Return the accelerators of a run, summed over its directories."""
    return sum(run_dir.summary.integer("num_accelerators") for run_dir in run.dirs)


OF_TRAINING: Final[Mapping[str, Callable[[ResultRun], float]]] = {
    "throughput": lambda run: math.fsum(map(samples_per_second, run.dirs)),
    "read bandwidth": lambda run: math.fsum(map(mib_per_second, run.dirs)),
    "utilization": lambda run: mean([utilization_percent(run_dir) for run_dir in run.dirs]),
}
"""The figures of a training run over all of its directories."""


def per_run(result: SubmittedResult, compute: Callable[[ResultRun], float]) -> dict[str, float]:
    """Compute a figure of each run that is not a warm-up; return it by the run's name."""
    if not result.runs:
        raise MissingFact("there are no runs", where=result.name)
    return {run.name: compute(run) for run in result.runs if not run.is_warm_up}


def _over_runs(spread: Callable[[Collection[float]], float], name: str, result: SubmittedResult) -> float:
    return spread(per_run(result, OF_TRAINING[name]).values())


def read_durations(stats: ParsedFile, prefix: str) -> dict[str, float]:
    """Return the seconds of each checkpoint in one rank's statistics; `prefix` is save or load."""
    return {
        f"{epoch}.{name}": entry.number("duration")
        for epoch, entries in stats.parts().items()
        for name, entry in entries.parts().items()
        if name.startswith(f"{prefix}_ckpt")
    }


def checkpoint_seconds(run_dir: ResultDir, prefix: str) -> dict[str, tuple[float, float]]:
    """Return the seconds of each write (`save`) or read (`load`), by the first and by the slowest rank.

    DLIO states, and the rounds publish, the first rank's time; but all ranks wait for the slowest one.
    """
    if not run_dir.stats:
        raise MissingFact("there is no per_epoch_stats.json of a rank", where=run_dir.name)
    ranks = [read_durations(stats, prefix) for stats in run_dir.stats]
    for name, first_s in ranks[0].items():
        if first_s <= 0:
            raise MissingFact(f"{name} took no time", where=run_dir.stats[0].file)
    return {name: (first_s, max(rank.get(name, 0.0) for rank in ranks)) for name, first_s in ranks[0].items()}


def checkpoint_means(run_dir: ResultDir, prefix: str) -> dict[str, tuple[float, float]]:
    """Recompute the means of writes or reads, if any, by the first rank and by the slowest."""
    seconds = checkpoint_seconds(run_dir, prefix)
    if not seconds:
        return {}
    first, slowest = zip(*seconds.values(), strict=True)
    size_gib = run_dir.summary.number("metric", "checkpoint_size_GB")
    by_first, by_slowest = (mean([size_gib / s for s in each]) for each in (first, slowest))
    return {
        f"{prefix}_checkpoint_io_mean_GB_per_second": (by_first, by_slowest),
        f"{prefix}_checkpoint_duration_mean_seconds": (mean(first), mean(slowest)),
    }


def _result_checkpoint_means(name: str, result: SubmittedResult) -> tuple[float, float]:
    """Return the mean over all invocations that wrote or read: by their first and by their slowest ranks."""
    prefix = name.partition("_")[0]
    means = [checkpoint_means(run_dir, prefix) for run_dir in result.run_dirs()]
    values = [by_name[name] for by_name in means if by_name]
    if not values:
        raise MissingFact(f"no {prefix}_ckpt is in the statistics", where=result.name)
    first, slowest = zip(*values, strict=True)
    return mean(first), mean(slowest)


METRICS: Final[Mapping[Benchmark, Mapping[str, Callable[[SubmittedResult], float | tuple[float, ...]]]]] = {
    Benchmark.TRAINING: {
        "train_throughput_mean_samples_per_second": partial(_over_runs, mean, "throughput"),
        "train_throughput_stdev_samples_per_second": partial(_over_runs, deviation, "throughput"),
        "train_throughput_mean_MB_per_second": partial(_over_runs, mean, "read bandwidth"),
        "train_throughput_stdev_MB_per_second": partial(_over_runs, deviation, "read bandwidth"),
        "train_au_mean_percentage": partial(_over_runs, mean, "utilization"),
    },
    Benchmark.CHECKPOINTING: {
        name: partial(_result_checkpoint_means, name)
        for prefix in ("save", "load")
        for name in (
            f"{prefix}_checkpoint_io_mean_GB_per_second",
            f"{prefix}_checkpoint_duration_mean_seconds",
        )
    },
}
"""The figures by the names that reports and summaries use, in which MB means MiB, and GB means GiB.

For checkpoints, each figure is computed by the first ranks, as results are published, and by the slowest.
"""


def recompute(result: SubmittedResult) -> dict[str, float]:
    """Return all figures of a result that can be recomputed."""
    metrics = {}
    for name, metric in METRICS.get(result.location.benchmark, {}).items():
        try:
            found = metric(result)
        except (MissingFact, ArithmeticError):  # the rule on means names what is missing or absurd
            continue
        value = found[0] if isinstance(found, tuple) else found
        if math.isfinite(value):
            metrics[name] = value
    return metrics


def recompute_option(ranks: tuple[RankResult, ...], option: int) -> dict[str, float]:
    """Recompute an option's figures: sums over ranks averaged over trials, and the largest latency."""
    of_option = [(trial, summary) for number, trial, _, summary in ranks if number == option]
    if not of_option:
        raise MissingFact(f"there is no file of a rank of option {option}", where="option_*/trial_*/rank_*")
    trials = sorted({trial for trial, _ in of_option})
    figures = {
        name: sum(
            sum(summary.number(*path) for number, summary in of_option if number == trial) for trial in trials
        )
        / len(trials)
        for name, path in SUMS.items()
    }
    return figures | {LATENCY: max(each.number("storage_io_latency_ms", "p95") for _, each in of_option)}


def recompute_run(aggregate: ParsedFile) -> dict[str, float]:
    """Return queries, seconds and queries per second over all ranks, or, without ranks, the run's totals.

    The time is from the first rank's start to the last rank's end.
    """
    if not aggregate.has("rank_summaries"):
        queries, seconds = aggregate.number("total_queries"), aggregate.number("total_time_seconds")
        problem = f"total_time_seconds is {seconds:g}"
    else:
        ranks, problem = aggregate.parts("rank_summaries").values(), "its ranks took no time"
        if not ranks:
            raise MissingFact("rank_summaries has no rank", where=aggregate.file)
        queries = sum(rank.number("total_queries") for rank in ranks)
        begin = min(rank.number("start_time") for rank in ranks)
        seconds = max(rank.number("end_time") for rank in ranks) - begin
    if seconds <= 0:
        raise MissingFact(problem, where=aggregate.file)
    return {"query_count": queries, "total_time_seconds": seconds, "throughput_qps": queries / seconds}


def options_of(summary: ParsedFile) -> dict[int, ParsedFile]:
    """Return each option's part of the summary of a key-value cache run, in the order of option numbers."""
    if not isinstance(summary.value("options"), dict):
        raise MissingFact("options is no mapping", where=summary.file)
    options = {int(name): option for name, option in summary.parts("options").items() if name.isdigit()}
    return dict(sorted(options.items()))


def read_interval(run_dir: ResultDir) -> Interval:
    """Return an invocation's interval by the tool's own marks, or else by the benchmark's summary."""
    file, begin, end = run_dir.metadata, "invocation_start_time", "invocation_end_time"
    if not (file.has(begin) and file.has(end)):
        file, begin, end = run_dir.summary, "start", "end"
    interval = read_time(file, begin), read_time(file, end)
    if interval[1] < interval[0]:
        raise MissingFact(f"{end} is before {begin}", where=file.file)
    return interval


def read_time(file: ParsedFile, key: str) -> datetime:
    """Parse the time in a field; a time without a time zone counts as UTC."""
    text = file.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise MissingFact(f"{key} is {text!r:.60}, not a date", where=file.file) from error
    # Tools write local times without a zone. Only differences are used, so any zone will do.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
