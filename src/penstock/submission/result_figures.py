"""The figures of a result, run by run, with mean, deviation, confidence interval and outliers.

From results to figures to files, table and page. Invariants: a figure that cannot be recomputed is named with
the reason, and no stated mean takes its place; a single value has a mean but no interval.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from penstock.submission.parsed_file import MissingFact
from penstock.submission.recomputed_metrics import (
    LATENCY,
    OF_TRAINING,
    checkpoint_seconds,
    deviation,
    mean,
    options_of,
    per_run,
    recompute_run,
)
from penstock.submission.result_files import ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark

CONFIDENCE: Final = 0.95
MAX_SCORE: Final = 3.5
"""A value with a modified z-score above this is an outlier (Iglewicz and Hoaglin, 1993)."""
MIN_DISTANCE: Final = 0.005
"""The least distance of an outlier from the median, as a share of it: by the score alone, noise among five
nearly equal runs would count as an outlier.
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
    middle, spread, num = mean(numbers), deviation(numbers), len(numbers)
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
    for _ in range(200):  # bisect the angle until there is no double between the bounds
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _share_within(middle, degrees) < share:
            low = middle
        else:
            high = middle
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
        scale, name = MEAN_DEVIATION_SCALE * mean(distances.values()), "mean absolute deviation"
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
    """Return a figure of each checkpoint; with `is_slowest`, nothing if the first ranks are the slowest."""
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
