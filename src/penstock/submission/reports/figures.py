"""A result's figures run by run, recomputed from what epochs and ranks report, each with its spread.

Place in the flow: results -> figures -> files, table, page. Invariant: a figure that cannot be recomputed is
named with the reason; stated means are never taken in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown
from penstock.submission.metrics import (
    durations_of,
    mean,
    mib_per_second,
    samples_per_second,
    utilization_percent,
)
from penstock.submission.names import Benchmark
from penstock.submission.reports.spread import Spread, spread

if TYPE_CHECKING:
    from penstock.submission.reading import Job, Result, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: its value in each run, or of each checkpoint, by name."""

    name: str
    unit: str
    values: dict[str, float]
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All figures of a result, and a sentence for each that cannot be recomputed."""

    found: tuple[Figure, ...]
    missing: tuple[str, ...]

    def mean(self, name: str) -> float | None:
        """The mean of the figure called `name`; None where there is none."""
        return next((figure.spread.mean for figure in self.found if figure.name == name), None)


_Values = Callable[["Result"], dict[str, float]]


def figures_of(result: Result) -> Figures:
    """The figures that a result of this benchmark has."""
    found: list[Figure] = []
    missing: list[str] = []
    kinds = {Benchmark.TRAINING: _TRAINING, Benchmark.CHECKPOINTING: _CHECKPOINTING}
    for name, unit, of_result in kinds.get(result.place.benchmark, ()):
        try:
            values = of_result(result)
        except (Unknown, ArithmeticError) as reason:
            missing.append(f"{name}: {reason}")
            continue
        if values:
            found.append(Figure(name=name, unit=unit, values=values, spread=spread(values)))
    return Figures(found=tuple(found), missing=tuple(missing))


def _by_run(of_run: Callable[[Run], float]) -> _Values:
    def values(result: Result) -> dict[str, float]:
        if not result.measured:
            raise Unknown("there are no runs", where=result.name)
        return {run.name: _finite(of_run(run), run.name) for run in result.measured}

    return values


def _summed(of_job: Callable[[Job], float]) -> Callable[[Run], float]:
    return lambda run: math.fsum(of_job(job) for job in run.jobs)


def _utilization(run: Run) -> float:
    return mean(tuple(map(utilization_percent, run.jobs)))


def _by_checkpoint(prefix: str, of_seconds: Callable[[Job, float], float]) -> _Values:
    def values(result: Result) -> dict[str, float]:
        jobs = [job for job in result.jobs() if job.stats]
        if not jobs:
            raise Unknown("there is no per_epoch_stats.json of a rank", where=result.name)
        taken = [(job, name, seconds) for job in jobs for name, seconds in _slowest(job, prefix)]
        short = len({name for _, name, _ in taken}) == len(taken)
        return {
            name if short else f"{job.name.rpartition('/')[2]} {name}": of_seconds(job, seconds)
            for job, name, seconds in taken
        }

    return values


def _slowest(job: Job, prefix: str) -> Iterator[tuple[str, float]]:
    """Each checkpoint's name and time on its slowest rank: nobody is done before."""
    ranks = [durations_of(stats, prefix) for stats in job.stats]
    for name in ranks[0]:
        seconds = max(rank.get(name, 0.0) for rank in ranks)
        if seconds <= 0:
            raise Unknown(f"{name} took no time", where=job.stats[0].file)
        yield name, seconds


def _rate(job: Job, seconds: float) -> float:
    return job.summary.number("metric", "checkpoint_size_GB") / seconds


def _duration(_: Job, seconds: float) -> float:
    return seconds


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise Unknown(f"it comes to {value}", where=where)
    return value


_Kind = tuple[str, str, _Values]
_TRAINING: Final[tuple[_Kind, ...]] = (
    ("throughput", "samples/s", _by_run(_summed(samples_per_second))),
    ("read bandwidth", "MiB/s", _by_run(_summed(mib_per_second))),
    ("utilization", "%", _by_run(_utilization)),
)
_CHECKPOINTING: Final[tuple[_Kind, ...]] = (
    ("write bandwidth", "GiB/s", _by_checkpoint("save", _rate)),
    ("write duration", "s", _by_checkpoint("save", _duration)),
    ("read bandwidth", "GiB/s", _by_checkpoint("load", _rate)),
    ("read duration", "s", _by_checkpoint("load", _duration)),
)
