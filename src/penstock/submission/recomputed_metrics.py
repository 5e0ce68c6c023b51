"""Rates, means, durations and times of a result, recomputed from what each epoch and rank reports.

Rules compare them with what the files state; reports print them. Invariant: a stated mean is never used; a
figure that cannot be recomputed is absent, and the rule that needs it gets the reason.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.result_files import ResultDir, ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark
from penstock.workload.quantities import element_bytes

MIB: Final = 1 << 20


def mean(values: tuple[float, ...]) -> float:
    """The plain mean, summed exactly."""
    return math.fsum(values) / len(values)


def deviation(values: tuple[float, ...]) -> float:
    """The population's standard deviation."""
    middle = mean(values)
    return math.sqrt(mean(tuple((value - middle) ** 2 for value in values)))


def samples_per_second(run_dir: ResultDir) -> float:
    """The mean over the epochs of one result directory."""
    return mean(run_dir.summary.numbers("metric", "train_throughput_samples_per_second"))


def mib_per_second(run_dir: ResultDir) -> float:
    """The same in MiB/s, by the length of a record."""
    return samples_per_second(run_dir) * float(record_bytes(run_dir)) / MIB


def record_bytes(run_dir: ResultDir) -> Fraction:
    """The bytes of a sample in the configuration: its length, else the sum of its columns."""
    for name in ("record_length_bytes", "record_length"):
        if run_dir.config.has("workload", "dataset", name):
            stated = run_dir.config.number("workload", "dataset", name)
            length = Fraction(int(stated)) if stated.is_integer() else Fraction(str(stated))
            if length > 0:
                return length
            raise MissingFact(f"workload.dataset.{name} is not positive", where=run_dir.config.file)
    return _columns_bytes(run_dir)


def _columns_bytes(run_dir: ResultDir) -> Fraction:
    """The bytes of a Parquet sample, whose configuration has columns in place of a length."""
    if not run_dir.config.has("workload", "dataset", "parquet", "columns"):
        raise MissingFact("there is no field workload.dataset.record_length", where=run_dir.config.file)
    columns = run_dir.config.value("workload", "dataset", "parquet", "columns")
    total = 0
    for number, column in enumerate(columns if isinstance(columns, list) else ()):
        try:
            total += int(column.get("size", 1)) * element_bytes(column["dtype"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise MissingFact(
                f"workload.dataset.parquet.columns.{number} is {column!r:.60}, not a column",
                where=run_dir.config.file,
            ) from error
    if total < 1:
        raise MissingFact("workload.dataset.parquet.columns has no column", where=run_dir.config.file)
    return Fraction(total)


def utilization_percent(run_dir: ResultDir) -> float:
    """The mean utilization over the epochs of one result directory."""
    return mean(run_dir.summary.numbers("metric", "train_au_percentage"))


def num_accelerators(run: ResultRun) -> int:
    """The accelerators of a run, summed over its directories."""
    return sum(run_dir.summary.integer("num_accelerators") for run_dir in run.dirs)


def per_run(result: SubmittedResult, read: Callable[[ResultDir], float]) -> tuple[float, ...]:
    """A figure of each counted run, summed over its directories."""
    if not result.counted_runs:
        raise MissingFact("there are no runs", where=result.name)
    return tuple(math.fsum(read(run_dir) for run_dir in run.dirs) for run in result.counted_runs)


def _utilization(result: SubmittedResult) -> float:
    run_dirs = tuple(run_dir for run in result.counted_runs for run_dir in run.dirs)
    if not run_dirs:
        raise MissingFact("there are no runs", where=result.name)
    return mean(tuple(map(utilization_percent, run_dirs)))


def read_durations(stats: ParsedFile, prefix: str) -> dict[str, float]:
    """The seconds of each checkpoint in one rank's statistics; `prefix` is save or load."""
    epochs = stats.value()
    return {
        f"{epoch}.{name}": ParsedFile(file=stats.file, content=entry).number("duration")
        for epoch, entries in (epochs.items() if isinstance(epochs, dict) else ())
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if name.startswith(f"{prefix}_ckpt")
    }


def checkpoint_means(run_dir: ResultDir, prefix: str) -> dict[str, tuple[float, float]]:
    """The recomputed means of writes (`save`) or reads (`load`); empty if there were none.

    Each is by the first rank's times, as DLIO states and the rounds publish it, and by the slowest rank's,
    for which all others wait.
    """
    if not run_dir.stats:
        raise MissingFact("there is no per_epoch_stats.json of a rank", where=run_dir.name)
    ranks = [read_durations(stats, prefix) for stats in run_dir.stats]
    first = tuple(ranks[0].values())
    if not first:
        return {}
    slowest = tuple(max(rank.get(name, 0.0) for rank in ranks) for name in ranks[0])
    size_gib = run_dir.summary.number("metric", "checkpoint_size_GB")
    if min(first) <= 0:
        raise MissingFact("a checkpoint took no time", where=run_dir.stats[0].file)
    return {
        f"{prefix}_checkpoint_io_mean_GB_per_second": (
            _mean_rate(size_gib, first),
            _mean_rate(size_gib, slowest),
        ),
        f"{prefix}_checkpoint_duration_mean_seconds": (mean(first), mean(slowest)),
    }


def _mean_rate(size_gib: float, durations: tuple[float, ...]) -> float:
    return mean(tuple(size_gib / seconds for seconds in durations))


def result_checkpoint_means(result: SubmittedResult, name: str) -> tuple[float, float]:
    """The mean over the invocations that wrote or read: by their first ranks, and by their slowest."""
    prefix = name.partition("_")[0]
    means = [checkpoint_means(run_dir, prefix) for run_dir in result.run_dirs()]
    values = [by_name[name] for by_name in means if by_name]
    if not values:
        raise MissingFact(f"no {prefix}_ckpt is in the statistics", where=result.name)
    first, slowest = zip(*values, strict=True)
    return mean(first), mean(slowest)


def _checkpoint_metric(name: str) -> Callable[[SubmittedResult], float]:
    """By the first ranks, as results are published."""
    return lambda result: result_checkpoint_means(result, name)[0]


TRAINING_METRICS: Final[Mapping[str, Callable[[SubmittedResult], float]]] = MappingProxyType(
    {
        "train_throughput_mean_samples_per_second": lambda r: mean(per_run(r, samples_per_second)),
        "train_throughput_stdev_samples_per_second": lambda r: deviation(per_run(r, samples_per_second)),
        "train_throughput_mean_MB_per_second": lambda r: mean(per_run(r, mib_per_second)),
        "train_throughput_stdev_MB_per_second": lambda r: deviation(per_run(r, mib_per_second)),
        "train_au_mean_percentage": _utilization,
    }
)
"""By the names that reports use; MB are MiB there."""

CHECKPOINT_METRICS: Final[Mapping[str, Callable[[SubmittedResult], float]]] = MappingProxyType(
    {
        name: _checkpoint_metric(name)
        for prefix in ("save", "load")
        for name in (
            f"{prefix}_checkpoint_io_mean_GB_per_second",
            f"{prefix}_checkpoint_duration_mean_seconds",
        )
    }
)
"""By the names that summaries use; GB are GiB there."""


def recompute(result: SubmittedResult) -> dict[str, float]:
    """All figures of a result that can be recomputed."""
    metrics = {}
    by_benchmark = {Benchmark.TRAINING: TRAINING_METRICS, Benchmark.CHECKPOINTING: CHECKPOINT_METRICS}
    for name, metric in by_benchmark.get(result.location.benchmark, {}).items():
        try:
            value = metric(result)
        except (MissingFact, ArithmeticError):  # the rule on means names what is missing or absurd
            continue
        if math.isfinite(value):
            metrics[name] = value
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The time of an invocation."""

    begin: datetime
    end: datetime

    @property
    def duration_s(self) -> float:
        """Its length."""
        return (self.end - self.begin).total_seconds()


def read_interval(run_dir: ResultDir) -> Interval:
    """The interval by the tool's own marks, else by the benchmark's summary."""
    marks = ("invocation_start_time", "invocation_end_time")
    if all(run_dir.metadata.has(mark) for mark in marks):
        file, (begin, end) = run_dir.metadata, marks
    else:
        file, (begin, end) = run_dir.summary, ("start", "end")
    interval = Interval(begin=read_time(file, begin), end=read_time(file, end))
    if interval.duration_s < 0:
        raise MissingFact(f"{end} is before {begin}", where=file.file)
    return interval


def read_time(file: ParsedFile, key: str) -> datetime:
    """The time of a field; without a zone it is UTC."""
    text = file.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise MissingFact(f"{key} is {text!r:.60}, not a date", where=file.file) from error
    # Tools write local times without a zone; only differences are used, so any zone will do.
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
