"""The figures of a result, recomputed from what each epoch and rank reports, and their spread over the runs.

Rules compare figures with what the files state; reports show each with mean, deviation, confidence interval
and outliers. Invariants: a stated mean or rate is never used; a figure that cannot be recomputed comes with
the reason, which the rule that needs it reports; a single value has a mean but no interval.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from statistics import fmean, median, pstdev
from typing import Final

from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_files import RankResult, ResultDir, ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark
from penstock.workload.quantities import element_bytes

MIB: Final = 1 << 20
SUMS: Final[Mapping[str, tuple[str, ...]]] = {
    "aggregated_read_bandwidth_gbps": ("cache_stats", "tier_storage_read_bandwidth_gbps"),
    "aggregated_write_bandwidth_gbps": ("cache_stats", "tier_storage_write_bandwidth_gbps"),
    "aggregated_avg_throughput_tokens_per_sec": ("avg_throughput_tokens_per_sec",),
    "aggregated_storage_throughput_tokens_per_sec": ("storage_throughput_tokens_per_sec",),
}
"""Figures of a key-value cache's option that are summed over ranks and averaged over trials, each with its
place in a rank's report.
"""
LATENCY: Final = "aggregated_p95_latency_ms"

Interval = tuple[datetime, datetime]
"""The beginning and the end of an invocation."""


def samples_per_second(run_dir: ResultDir) -> float:
    """Return the mean rate over the epochs of one result directory."""
    return fmean(run_dir.summary.numbers("metric", "train_throughput_samples_per_second"))


def mib_per_second(run_dir: ResultDir) -> float:
    """Return the mean rate in MiB/s over the epochs of one result directory, from the record length."""
    return samples_per_second(run_dir) * float(record_bytes(run_dir)) / MIB


def utilization_percent(run_dir: ResultDir) -> float:
    """Return the mean utilization over the epochs of one result directory."""
    return fmean(run_dir.summary.numbers("metric", "train_au_percentage"))


def record_bytes(run_dir: ResultDir) -> Fraction:
    """Return a sample's bytes as configured: the record length or, for Parquet, the sum over its columns."""
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
    """Return the number of accelerators of a run, summed over its directories."""
    return sum(run_dir.summary.integer("num_accelerators") for run_dir in run.dirs)


OF_TRAINING: Final[Mapping[str, Callable[[ResultRun], float]]] = {
    "throughput": lambda run: math.fsum(map(samples_per_second, run.dirs)),
    "read bandwidth": lambda run: math.fsum(map(mib_per_second, run.dirs)),
    "utilization": lambda run: fmean([utilization_percent(run_dir) for run_dir in run.dirs]),
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
    by_first, by_slowest = (fmean([size_gib / s for s in each]) for each in (first, slowest))
    return {
        f"{prefix}_checkpoint_io_mean_GB_per_second": (by_first, by_slowest),
        f"{prefix}_checkpoint_duration_mean_seconds": (fmean(first), fmean(slowest)),
    }


def _result_checkpoint_means(name: str, result: SubmittedResult) -> tuple[float, float]:
    """Return the mean over all invocations that wrote or read: by their first and by their slowest ranks."""
    prefix = name.partition("_")[0]
    means = [checkpoint_means(run_dir, prefix) for run_dir in result.run_dirs()]
    values = [by_name[name] for by_name in means if by_name]
    if not values:
        raise MissingFact(f"no {prefix}_ckpt is in the statistics", where=result.name)
    first, slowest = zip(*values, strict=True)
    return fmean(first), fmean(slowest)


METRICS: Final[Mapping[Benchmark, Mapping[str, Callable[[SubmittedResult], float | tuple[float, ...]]]]] = {
    Benchmark.TRAINING: {
        "train_throughput_mean_samples_per_second": partial(_over_runs, fmean, "throughput"),
        "train_throughput_stdev_samples_per_second": partial(_over_runs, pstdev, "throughput"),
        "train_throughput_mean_MB_per_second": partial(_over_runs, fmean, "read bandwidth"),
        "train_throughput_stdev_MB_per_second": partial(_over_runs, pstdev, "read bandwidth"),
        "train_au_mean_percentage": partial(_over_runs, fmean, "utilization"),
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

For checkpoints, each figure is computed from the times of first ranks, as in published results, and from the
times of slowest ranks.
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
        raise MissingFact("options is not a mapping", where=summary.file)
    options = {int(name): option for name, option in summary.parts("options").items() if name.isdigit()}
    return dict(sorted(options.items()))


def read_interval(run_dir: ResultDir) -> Interval:
    """Return an invocation's interval: from the tool's own marks, or else from the benchmark's summary."""
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


# The spread of figures over the runs

CONFIDENCE: Final = 0.95
MAX_SCORE: Final = 3.5
"""A value with a modified z-score above this is an outlier (Iglewicz and Hoaglin, 1993)."""
MIN_DISTANCE: Final = 0.005
"""The least distance of an outlier from the median, as a share of the median: by the score alone, noise
among five nearly equal runs would count as an outlier.
"""
MEDIAN_DEVIATION_SCALE: Final = 1.4826
MEAN_DEVIATION_SCALE: Final = 1.2533
"""Factors that make a deviation from the median comparable with a standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFigure:
    """One figure: its value for each run or checkpoint, by name, and the spread of the values.

    `deviation` is the population's, as in reports. `interval` is Student's t interval of the sample, None for
    fewer than two values. `outliers` has the runs whose values are outliers, each with the criterion.
    """

    name: str
    unit: str
    values: dict[str, float]
    mean: float
    deviation: float
    interval: tuple[float, float] | None
    outliers: dict[str, str]


def measure_figure(name: str, unit: str, values: dict[str, float]) -> ResultFigure:
    """Measure the spread of a figure over at least one run."""
    numbers, interval = values.values(), None
    middle, spread, num = fmean(numbers), pstdev(numbers), len(numbers)
    if num > 1:
        sample_deviation = spread * math.sqrt(num / (num - 1))
        half_width = student_quantile(CONFIDENCE, num - 1) * sample_deviation / math.sqrt(num)
        interval = middle - half_width, middle + half_width
    return ResultFigure(
        name=name,
        unit=unit,
        values=values,
        mean=middle,
        deviation=spread,
        interval=interval,
        outliers=_find_outliers(values),
    )


def student_quantile(share: float, degrees: int) -> float:
    """Return the t with P(|T| <= t) = `share`, for a whole number of degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(100):  # bisect the angle, until long after there is no double between the bounds
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, degrees) < share else (low, middle)
    return math.tan(high) * math.sqrt(degrees)


def _share_within(angle: float, degrees: int) -> float:
    """Return P(|T| <= t), computed as a finite sum, for the angle arctan(t / sqrt(degrees))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 if not is_odd else 3, degrees - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _find_outliers(values: Mapping[str, float]) -> dict[str, str]:
    middle = median(values.values())
    distances = {run: abs(value - middle) for run, value in values.items()}
    scale, name = MEDIAN_DEVIATION_SCALE * median(distances.values()), "median absolute deviation"
    if scale == 0:  # more than half of the runs are exactly equal
        scale, name = MEAN_DEVIATION_SCALE * fmean(distances.values()), "mean absolute deviation"
    if scale == 0:
        return {}
    return {
        run: f"{distance / scale:.1f} > {MAX_SCORE} deviations from the median {middle:,.6g} ({name})"
        for run, distance in distances.items()
        if distance / scale > MAX_SCORE and distance >= MIN_DISTANCE * abs(middle)
    }


def compute_figures(result: SubmittedResult) -> tuple[tuple[ResultFigure, ...], tuple[str, ...]]:
    """Compute the figures of a result; return them, and a sentence for each that cannot be recomputed."""
    figures: list[ResultFigure] = []
    missing: list[str] = []
    for name, unit, compute in _FIGURES[result.location.benchmark]:
        try:
            values = compute(result)
        except (MissingFact, ArithmeticError) as reason:
            missing.append(f"{name}: {reason}")
            continue
        infinite = [run for run, value in values.items() if not math.isfinite(value)]
        if infinite:
            missing.append(f"{name}: it comes to {values[infinite[0]]} ({infinite[0]})")
        elif values:
            figures.append(measure_figure(name, unit, values))
    return tuple(figures), tuple(missing)


def _per_checkpoint(
    result: SubmittedResult, *, prefix: str, is_bandwidth: bool, is_slowest: bool
) -> dict[str, float]:
    """Return a figure of each checkpoint; with `is_slowest`, none if the first ranks are the slowest."""
    run_dirs = [run_dir for run_dir in result.run_dirs() if run_dir.stats]
    if not run_dirs:
        raise MissingFact("there is no per_epoch_stats.json of a rank", where=result.name)
    found = [
        (run_dir, name, seconds)
        for run_dir in run_dirs
        for name, seconds in checkpoint_seconds(run_dir, prefix).items()
    ]
    if is_slowest and all(first_s == slowest_s for _, _, (first_s, slowest_s) in found):
        return {}
    is_unique = len({name for _, name, _ in found}) == len(found)
    values = {}
    for run_dir, name, seconds in found:
        value = seconds[is_slowest]
        if is_bandwidth:
            value = run_dir.summary.number("metric", "checkpoint_size_GB") / value
        values[name if is_unique else f"{run_dir.name.rpartition('/')[2]} {name}"] = value
    return values


def _of_option(number: int, name: str, run: ResultRun) -> float:
    """Return a figure from a run's summary, because the ranks' files, which rules compare, may be missing."""
    options = options_of(run.dirs[0].summary)
    if number not in options:
        raise MissingFact(f"there is no option {number}", where=run.dirs[0].summary.file)
    return options[number].number(name)


def _of_search(name: str, run: ResultRun) -> float:
    """Return a figure from the summary or, if there is none, from the figures over all ranks."""
    first = run.dirs[0]
    if name == "throughput_qps":
        return recompute_run(first.aggregate)[name]
    if not first.summary.is_missing:
        return first.summary.number(name)
    return first.aggregate.number(*(("recall", "mean_recall") if name == "recall" else (name,)))


_FIGURES: Final[
    Mapping[Benchmark, tuple[tuple[str, str, Callable[[SubmittedResult], dict[str, float]]], ...]]
] = {
    Benchmark.TRAINING: tuple(
        (name, unit, partial(per_run, compute=OF_TRAINING[name]))
        for name, unit in (("throughput", "samples/s"), ("read bandwidth", "MiB/s"), ("utilization", "%"))
    ),
    # By the first rank, as the rounds publish it, and by the slowest rank, for which all others wait.
    Benchmark.CHECKPOINTING: tuple(
        (
            f"{way} {figure}{note}",
            unit,
            partial(
                _per_checkpoint, prefix=prefix, is_bandwidth=figure == "bandwidth", is_slowest=bool(note)
            ),
        )
        for way, prefix in (("write", "save"), ("read", "load"))
        for figure, unit in (("bandwidth", "GiB/s"), ("duration", "s"))
        for note in ("", ", slowest rank")
    ),
    Benchmark.KV_CACHE: tuple(
        (f"option {number}: {figure}", unit, partial(per_run, compute=partial(_of_option, number, name)))
        for number in (1, 2, 3)
        for figure, unit, name in (
            ("read bandwidth", "GiB/s", "aggregated_read_bandwidth_gbps"),
            ("write bandwidth", "GiB/s", "aggregated_write_bandwidth_gbps"),
            ("throughput", "tokens/s", "aggregated_avg_throughput_tokens_per_sec"),
            ("storage throughput", "tokens/s", "aggregated_storage_throughput_tokens_per_sec"),
            ("largest p95 latency", "ms", LATENCY),
        )
    ),
    Benchmark.VECTOR_SEARCH: tuple(
        (figure, unit, partial(per_run, compute=partial(_of_search, name)))
        for figure, unit, name in (
            ("throughput", "queries/s", "throughput_qps"),
            ("mean latency", "ms", "mean_latency_ms"),
            ("p95 latency", "ms", "p95_latency_ms"),
            ("p99 latency", "ms", "p99_latency_ms"),
            ("p99.9 latency", "ms", "p999_latency_ms"),
            ("recall", "", "recall"),
        )
    ),
}
"""The name and the unit of each figure, and the function that computes its values."""
