"""The figures of a result, recomputed from what each epoch reports; stated means are never trusted.

Place in the flow: rules compare these with what is stated, `report` prints them. Invariant: a figure that
cannot be recomputed is absent, and `Unknown` says why to the rule that asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown

if TYPE_CHECKING:
    from penstock.submission.reading import Job, Result, Run

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
    return samples_per_second(job) * job.config.number("workload", "dataset", "record_length") / MIB


def utilization_percent(job: Job) -> float:
    """A job's mean utilization over its epochs."""
    return mean(job.summary.numbers("metric", "train_au_percentage"))


def num_accelerators(run: Run) -> int:
    """A run's accelerators: its jobs add up."""
    return sum(job.summary.whole("num_accelerators") for job in run.jobs)


def over_runs(result: Result, of_job: Callable[[Job], float]) -> tuple[float, ...]:
    """A figure of each run; jobs add up."""
    if not result.runs:
        raise Unknown("there are no runs", where=result.place.name)
    return tuple(math.fsum(of_job(job) for job in run.jobs) for run in result.runs)


def _utilization(result: Result) -> float:
    jobs = result.jobs()
    if not jobs:
        raise Unknown("there are no runs", where=result.place.name)
    return mean(tuple(map(utilization_percent, jobs)))


METRICS: Final[Mapping[str, Callable[[Result], float]]] = MappingProxyType(
    {
        "train_throughput_mean_samples_per_second": lambda r: mean(over_runs(r, samples_per_second)),
        "train_throughput_stdev_samples_per_second": lambda r: deviation(over_runs(r, samples_per_second)),
        "train_throughput_mean_MB_per_second": lambda r: mean(over_runs(r, mib_per_second)),
        "train_throughput_stdev_MB_per_second": lambda r: deviation(over_runs(r, mib_per_second)),
        "train_au_mean_percentage": _utilization,
    }
)
"""By the names that reports use; MB are MiB there."""


def recompute(result: Result) -> dict[str, float]:
    """All figures that can be recomputed."""
    found = {}
    for name, metric in METRICS.items():
        try:
            value = metric(result)
        except (Unknown, ArithmeticError):  # the rule on means names what is missing or absurd
            continue
        if math.isfinite(value):
            found[name] = value
    return found
