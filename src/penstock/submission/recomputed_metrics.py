"""Rates, means, durations and times of a result, recomputed from what each epoch and rank reports.

Rules compare these with what the files state; reports print them. Invariant: a stated mean is never used; a
figure that cannot be recomputed is absent, and the rule that needs it gets the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.submission.parsed_file import Document, Unknown
from penstock.submission.tree_layout import Benchmark
from penstock.workload.values import element_bytes

if TYPE_CHECKING:
    from penstock.submission.result_files import Job, Result, Run


MIB: Final = 1 << 20


def mean(values: tuple[float, ...]) -> float:
    """The plain mean, summed exactly."""
    return math.fsum(values) / len(values)


def deviation(values: tuple[float, ...]) -> float:
    """The population's standard deviation."""
    middle = mean(values)
    return math.sqrt(mean(tuple((value - middle) ** 2 for value in values)))


def samples_per_second(job: Job) -> float:
    """A job's mean over its epochs."""
    return mean(job.summary.numbers("metric", "train_throughput_samples_per_second"))


def mib_per_second(job: Job) -> float:
    """The same in MiB/s, by the length of a record."""
    return samples_per_second(job) * float(record_bytes(job)) / MIB


def record_bytes(job: Job) -> Fraction:
    """A sample's bytes as the configuration has them: its length, by either name, else its columns'."""
    for name in ("record_length_bytes", "record_length"):
        if job.config.has("workload", "dataset", name):
            length = Fraction(str(job.config.number("workload", "dataset", name)))
            if length > 0:
                return length
            raise Unknown(f"workload.dataset.{name} is not positive", where=job.config.file)
    return _columns_bytes(job)


def _columns_bytes(job: Job) -> Fraction:
    """Parquet has no length of a record: its columns say how large a sample is."""
    if not job.config.has("workload", "dataset", "parquet", "columns"):
        raise Unknown("there is no field workload.dataset.record_length", where=job.config.file)
    columns = job.config.value("workload", "dataset", "parquet", "columns")
    total = 0
    for number, column in enumerate(columns if isinstance(columns, list) else ()):
        try:
            total += int(column.get("size", 1)) * element_bytes(column["dtype"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Unknown(
                f"workload.dataset.parquet.columns.{number} is {column!r:.60}, no column",
                where=job.config.file,
            ) from error
    if total < 1:
        raise Unknown("workload.dataset.parquet.columns has no column", where=job.config.file)
    return Fraction(total)


def utilization_percent(job: Job) -> float:
    """A job's mean utilization over its epochs."""
    return mean(job.summary.numbers("metric", "train_au_percentage"))


def num_accelerators(run: Run) -> int:
    """A run's accelerators: its jobs add up."""
    return sum(job.summary.whole("num_accelerators") for job in run.jobs)


def over_runs(result: Result, of_job: Callable[[Job], float]) -> tuple[float, ...]:
    """A figure of each run; jobs add up."""
    if not result.measured:
        raise Unknown("there are no runs", where=result.name)
    return tuple(math.fsum(of_job(job) for job in run.jobs) for run in result.measured)


def _utilization(result: Result) -> float:
    jobs = tuple(job for run in result.measured for job in run.jobs)
    if not jobs:
        raise Unknown("there are no runs", where=result.name)
    return mean(tuple(map(utilization_percent, jobs)))


def durations_of(stats: Document, prefix: str) -> dict[str, float]:
    """How long each checkpoint took by one rank's statistics, by epoch and name; `prefix` is save or load."""
    epochs = stats.value()
    return {
        f"{epoch}.{name}": Document(file=stats.file, tree=entry).number("duration")
        for epoch, entries in (epochs.items() if isinstance(epochs, dict) else ())
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if name.startswith(f"{prefix}_ckpt")
    }


def checkpoint_means(job: Job, prefix: str) -> dict[str, tuple[float, ...]]:
    """The means of what was written (`save`) or read (`load`), recomputed; empty where nothing was.

    Each has two ways: DLIO takes the first rank's time, Penstock the slowest rank's.
    """
    if not job.stats:
        raise Unknown("there is no per_epoch_stats.json of a rank", where=job.name)
    ranks = [durations_of(stats, prefix) for stats in job.stats]
    first = tuple(ranks[0].values())
    if not first:
        return {}
    slowest = tuple(max(rank.get(name, 0.0) for rank in ranks) for name in ranks[0])
    size_gib = job.summary.number("metric", "checkpoint_size_GB")
    if min(first) <= 0:
        raise Unknown("a checkpoint took no time", where=job.stats[0].file)
    ways = (first, slowest)
    return {
        f"{prefix}_checkpoint_io_mean_GB_per_second": tuple(
            mean(tuple(size_gib / each for each in way)) for way in ways
        ),
        f"{prefix}_checkpoint_duration_mean_seconds": tuple(mean(way) for way in ways),
    }


def _of_checkpoints(prefix: str, name: str) -> Callable[[Result], float]:
    """The mean over the invocations that wrote or read, each by its slowest ranks."""

    def metric(result: Result) -> float:
        found = [checkpoint_means(job, prefix) for job in result.jobs()]
        values = tuple(means[name][-1] for means in found if means)
        if not values:
            raise Unknown(f"no {prefix}_ckpt is in the statistics", where=result.name)
        return mean(values)

    return metric


TRAINING_METRICS: Final[Mapping[str, Callable[[Result], float]]] = MappingProxyType(
    {
        "train_throughput_mean_samples_per_second": lambda r: mean(over_runs(r, samples_per_second)),
        "train_throughput_stdev_samples_per_second": lambda r: deviation(over_runs(r, samples_per_second)),
        "train_throughput_mean_MB_per_second": lambda r: mean(over_runs(r, mib_per_second)),
        "train_throughput_stdev_MB_per_second": lambda r: deviation(over_runs(r, mib_per_second)),
        "train_au_mean_percentage": _utilization,
    }
)
"""By the names that reports use; MB are MiB there."""

CHECKPOINT_METRICS: Final[Mapping[str, Callable[[Result], float]]] = MappingProxyType(
    {
        name: _of_checkpoints(prefix, name)
        for prefix in ("save", "load")
        for name in (
            f"{prefix}_checkpoint_io_mean_GB_per_second",
            f"{prefix}_checkpoint_duration_mean_seconds",
        )
    }
)
"""By the names that summaries use; GB are GiB there."""


def recompute(result: Result) -> dict[str, float]:
    """All figures that can be recomputed."""
    found = {}
    is_training = result.place.benchmark is Benchmark.TRAINING
    for name, metric in (TRAINING_METRICS if is_training else CHECKPOINT_METRICS).items():
        try:
            value = metric(result)
        except (Unknown, ArithmeticError):  # the rule on means names what is missing or absurd
            continue
        if math.isfinite(value):
            found[name] = value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From the first to the last moment of an invocation."""

    begin: datetime
    end: datetime

    @property
    def duration_s(self) -> float:
        """Its length."""
        return (self.end - self.begin).total_seconds()


def interval_of(job: Job) -> Interval:
    """By the tool's own marks around the invocation; where it made none, by the benchmark's summary."""
    marks = ("invocation_start_time", "invocation_end_time")
    if all(job.metadata.has(mark) for mark in marks):
        document, keys = job.metadata, marks
    else:
        document, keys = job.summary, ("start", "end")
    found = Interval(begin=_moment(document, keys[0]), end=_moment(document, keys[1]))
    if found.duration_s < 0:
        raise Unknown(f"{keys[1]} is before {keys[0]}", where=document.file)
    return found


def _moment(document: Document, key: str) -> datetime:
    text = document.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise Unknown(f"{key} is {text!r:.60}, not a date", where=document.file) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
