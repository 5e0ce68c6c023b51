"""The figures of a result, run by run, with mean, deviation, confidence interval and outliers.

Results -> figures -> files, table, page. Invariant: a figure that cannot be recomputed is named with the
reason, and no stated mean takes its place; one value has a mean and no interval.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

from penstock.submission import query_runs
from penstock.submission.parsed_file import MissingFact
from penstock.submission.recomputed_metrics import (
    deviation,
    mean,
    mib_per_second,
    read_durations,
    samples_per_second,
    utilization_percent,
)
from penstock.submission.result_files import ResultDir, ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark

CONFIDENCE: Final = 0.95
MAX_SCORE: Final = 3.5
"""A modified z-score beyond this makes an outlier (Iglewicz and Hoaglin, 1993)."""
MIN_DISTANCE: Final = 0.005
"""Of the median: among five runs that are nearly equal, the score calls noise an outlier."""
MEDIAN_DEVIATION_SCALE: Final = 1.4826
MEAN_DEVIATION_SCALE: Final = 1.2533
"""Factors that make a deviation from the median comparable with a standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A run whose value is an outlier; `rule` is the criterion."""

    run: str
    value: float
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSpread:
    """`deviation` is the population's, as reports state it; the interval is Student's t of the sample.

    The interval is None below two values.
    """

    num: int
    mean: float
    deviation: float
    interval: tuple[float, float] | None
    outliers: tuple[Outlier, ...]


def compute_spread(values: Mapping[str, float]) -> FigureSpread:
    """The spread of a figure over at least one run."""
    numbers = tuple(values.values())
    return FigureSpread(
        num=len(numbers),
        mean=mean(numbers),
        deviation=deviation(numbers),
        interval=_interval(numbers),
        outliers=tuple(_outliers(values)),
    )


def student_quantile(share: float, degrees: int) -> float:
    """The t with P(|T| <= t) = `share`, for a whole number of degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(200):  # bisects the angle until no double is left in between
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if _share_within(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return math.tan(high) * math.sqrt(degrees)


def _share_within(angle: float, degrees: int) -> float:
    """P(|T| <= t) as a finite sum, where the angle is arctan(t / sqrt(degrees))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for step in range(2 if not is_odd else 3, degrees - 1, 2):
        term *= cosine * cosine * (step - 1) / step
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _interval(numbers: tuple[float, ...]) -> tuple[float, float] | None:
    num = len(numbers)
    if num < 2:
        return None
    sample_deviation = deviation(numbers) * math.sqrt(num / (num - 1))
    half_width = student_quantile(CONFIDENCE, num - 1) * sample_deviation / math.sqrt(num)
    return mean(numbers) - half_width, mean(numbers) + half_width


def _outliers(values: Mapping[str, float]) -> list[Outlier]:
    middle = median(values.values())
    distances = {run: abs(value - middle) for run, value in values.items()}
    scale, name = MEDIAN_DEVIATION_SCALE * median(distances.values()), "median absolute deviation"
    if scale == 0:  # more than half of the runs are exactly equal
        scale, name = MEAN_DEVIATION_SCALE * mean(tuple(distances.values())), "mean absolute deviation"
    if scale == 0:
        return []
    return [
        Outlier(
            run=run,
            value=values[run],
            rule=f"{distance / scale:.1f} > {MAX_SCORE} deviations from the median {middle:,.6g} ({name})",
        )
        for run, distance in distances.items()
        if distance / scale > MAX_SCORE and distance >= MIN_DISTANCE * abs(middle)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFigure:
    """One figure: its value in each run, or of each checkpoint, by name."""

    name: str
    unit: str
    values: dict[str, float]
    spread: FigureSpread


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFigures:
    """All figures of a result, and a sentence for each that cannot be recomputed."""

    computed: tuple[ResultFigure, ...]
    missing: tuple[str, ...]

    def mean(self, name: str) -> float | None:
        """The mean of the figure called `name`; None where there is none."""
        return next((figure.spread.mean for figure in self.computed if figure.name == name), None)


_Values = Callable[["SubmittedResult"], dict[str, float]]


def compute_figures(result: SubmittedResult) -> ResultFigures:
    """The figures that a result of this benchmark has."""
    figures: list[ResultFigure] = []
    missing: list[str] = []
    kinds = {
        Benchmark.TRAINING: _TRAINING,
        Benchmark.CHECKPOINTING: _CHECKPOINTING,
        Benchmark.KV_CACHE: _KV_CACHE,
        Benchmark.VECTOR_SEARCH: _VECTOR_SEARCH,
    }
    for name, unit, compute in kinds.get(result.location.benchmark, ()):
        try:
            values = compute(result)
        except (MissingFact, ArithmeticError) as reason:
            missing.append(f"{name}: {reason}")
            continue
        if values:
            figures.append(ResultFigure(name=name, unit=unit, values=values, spread=compute_spread(values)))
    return ResultFigures(computed=tuple(figures), missing=tuple(missing))


def _per_run(compute: Callable[[ResultRun], float]) -> _Values:
    def values(result: SubmittedResult) -> dict[str, float]:
        if not result.counted_runs:
            raise MissingFact("there are no runs", where=result.name)
        return {run.name: _finite(compute(run), run.name) for run in result.counted_runs}

    return values


def _summed(read: Callable[[ResultDir], float]) -> Callable[[ResultRun], float]:
    return lambda run: math.fsum(read(run_dir) for run_dir in run.dirs)


def _utilization(run: ResultRun) -> float:
    return mean(tuple(map(utilization_percent, run.dirs)))


_Seconds = Callable[[list[dict[str, float]], str], float]


def _by_first_rank(ranks: list[dict[str, float]], name: str) -> float:
    """As rounds publish it."""
    return ranks[0][name]


def _by_slowest_rank(ranks: list[dict[str, float]], name: str) -> float:
    """The rank that all others wait for."""
    return max(rank.get(name, 0.0) for rank in ranks)


def _per_checkpoint(
    prefix: str, compute: Callable[[ResultDir, float], float], seconds_of: _Seconds
) -> _Values:
    def values(result: SubmittedResult) -> dict[str, float]:
        run_dirs = [run_dir for run_dir in result.run_dirs() if run_dir.stats]
        if not run_dirs:
            raise MissingFact("there is no per_epoch_stats.json of a rank", where=result.name)
        durations = [
            (run_dir, name, seconds)
            for run_dir in run_dirs
            for name, seconds in _checkpoints(run_dir, prefix, seconds_of)
        ]
        is_unique = len({name for _, name, _ in durations}) == len(durations)
        return {
            name if is_unique else f"{run_dir.name.rpartition('/')[2]} {name}": compute(run_dir, seconds)
            for run_dir, name, seconds in durations
        }

    return values


def _checkpoints(run_dir: ResultDir, prefix: str, seconds_of: _Seconds) -> Iterator[tuple[str, float]]:
    """Each checkpoint's name and seconds."""
    ranks = [read_durations(stats, prefix) for stats in run_dir.stats]
    for name in ranks[0]:
        seconds = seconds_of(ranks, name)
        if seconds <= 0:
            raise MissingFact(f"{name} took no time", where=run_dir.stats[0].file)
        yield name, seconds


def _if_different(slowest: _Values, first: _Values) -> _Values:
    """The slowest ranks' values, where they say something else than the first ranks'."""

    def values(result: SubmittedResult) -> dict[str, float]:
        found = slowest(result)
        return {} if found == first(result) else found

    return values


def _rate(run_dir: ResultDir, seconds: float) -> float:
    return run_dir.summary.number("metric", "checkpoint_size_GB") / seconds


def _duration(_: ResultDir, seconds: float) -> float:
    return seconds


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise MissingFact(f"it comes to {value}", where=where)
    return value


_Kind = tuple[str, str, _Values]
_TRAINING: Final[tuple[_Kind, ...]] = (
    ("throughput", "samples/s", _per_run(_summed(samples_per_second))),
    ("read bandwidth", "MiB/s", _per_run(_summed(mib_per_second))),
    ("utilization", "%", _per_run(_utilization)),
)


def _checkpoint_kinds() -> Iterator[_Kind]:
    for way, prefix in (("write", "save"), ("read", "load")):
        for figure, unit, compute in (("bandwidth", "GiB/s", _rate), ("duration", "s", _duration)):
            first = _per_checkpoint(prefix, compute, _by_first_rank)
            slowest = _per_checkpoint(prefix, compute, _by_slowest_rank)
            yield f"{way} {figure}", unit, first
            yield f"{way} {figure}, slowest rank", unit, _if_different(slowest, first)


_CHECKPOINTING: Final[tuple[_Kind, ...]] = tuple(_checkpoint_kinds())


def _of_option(number: int, name: str) -> _Values:
    """What the summary of a run states: files of ranks may be left out, and rules compare it with them."""

    def read(run: ResultRun) -> float:
        options = query_runs.options_of(run.dirs[0].summary)
        if number not in options:
            raise MissingFact(f"there is no option {number}", where=run.dirs[0].summary.file)
        return options[number].number(name)

    return _per_run(read)


_CACHE_FIGURES: Final = (
    ("read bandwidth", "GiB/s", "aggregated_read_bandwidth_gbps"),
    ("write bandwidth", "GiB/s", "aggregated_write_bandwidth_gbps"),
    ("throughput", "tokens/s", "aggregated_avg_throughput_tokens_per_sec"),
    ("storage throughput", "tokens/s", "aggregated_storage_throughput_tokens_per_sec"),
    ("largest p95 latency", "ms", query_runs.LATENCY),
)
_KV_CACHE: Final[tuple[_Kind, ...]] = tuple(
    (f"option {number}: {figure}", unit, _of_option(number, name))
    for number in (1, 2, 3)
    for figure, unit, name in _CACHE_FIGURES
)


def _stated(name: str) -> _Values:
    """By the summary; tables are made of the figures over all ranks where there is none."""

    def read(run: ResultRun) -> float:
        first = run.dirs[0]
        if not first.summary.is_missing:
            return first.summary.number(name)
        nested = ("recall", "mean_recall") if name == "recall" else (name,)
        return first.aggregate.number(*nested)

    return _per_run(read)


def _recomputed_rate(run: ResultRun) -> float:
    return query_runs.recompute_run(run.dirs[0].aggregate)["throughput_qps"]


_VECTOR_SEARCH: Final[tuple[_Kind, ...]] = (
    ("throughput", "queries/s", _per_run(_recomputed_rate)),
    ("mean latency", "ms", _stated("mean_latency_ms")),
    ("p95 latency", "ms", _stated("p95_latency_ms")),
    ("p99 latency", "ms", _stated("p99_latency_ms")),
    ("p99.9 latency", "ms", _stated("p999_latency_ms")),
    ("recall", "", _stated("recall")),
)
