"""The figures of a phase: epochs, means, times and bottleneck, computed from events and the workload alone.

Pure, and the last step of the computation: `run_record`, `dlio` and the command line present the figures.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.results.bottleneck import BottleneckVerdict, TimeBreakdown, break_down_times, find_bottleneck
from penstock.results.step_events import RankEvents, StepPhase
from penstock.results.utilization import EpochRate, UtilizationWindow, choose_window, epoch_rates
from penstock.workload.dataset_size import record_bytes
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over epochs and its population standard deviation, as DLIO has them."""

    mean: float
    stdev: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """Training or evaluation. `io_compat` is DLIO's: samples at their nominal size, in MiB/s.

    `notes` explain figures that may surprise a reader.
    """

    epochs: tuple[EpochRate, ...]
    au_compat_percent: Mean
    au_strict_percent: Mean | None
    samples_per_s_compat: Mean
    samples_per_s_strict: float
    io_compat_mib_per_s: Mean
    read_bytes: int
    read_bytes_per_s: float
    meets_threshold: bool
    times: TimeBreakdown | None
    verdict: BottleneckVerdict | None
    notes: tuple[str, ...] = ()


def compute_phase_figures(
    ranks: Sequence[RankEvents],
    workload: Workload,
    *,
    phase: StepPhase = StepPhase.TRAIN,
    ceiling: float | None = None,
) -> PhaseFigures | None:
    """The figures of a phase; None if no epoch has a block that all ranks completed."""
    if not ranks:
        return None
    window = choose_window(workload, num_ranks=len(ranks), phase=phase)
    epochs = epoch_rates(ranks, window, phase)
    if not epochs:
        return None
    compat = mean_and_stdev([rate.au_compat_percent for rate in epochs])
    strict = [rate.au_strict_percent for rate in epochs if rate.au_strict_percent is not None]
    throughput = mean_and_stdev([rate.samples_per_s_compat for rate in epochs])
    elapsed_s = sum(rate.elapsed_s for rate in epochs)
    read_bytes = sum(rate.read_bytes for rate in epochs)
    mib_per_sample = float(record_bytes(workload.dataset)) / 2**20
    times = break_down_times(ranks, window, phase)
    return PhaseFigures(
        epochs=tuple(epochs),
        au_compat_percent=compat,
        au_strict_percent=mean_and_stdev(strict) if strict else None,
        samples_per_s_compat=throughput,
        samples_per_s_strict=_rate(sum(rate.samples for rate in epochs), elapsed_s),
        io_compat_mib_per_s=Mean(
            mean=throughput.mean * mib_per_sample, stdev=throughput.stdev * mib_per_sample
        ),
        read_bytes=read_bytes,
        read_bytes_per_s=_rate(read_bytes, elapsed_s),
        meets_threshold=compat.mean >= workload.metric.au * 100,
        times=times,
        verdict=find_bottleneck(times, threshold=workload.metric.au, ceiling=ceiling) if times else None,
        notes=tuple(_notes(epochs, window)),
    )


def _notes(epochs: Sequence[EpochRate], window: UtilizationWindow) -> Iterator[str]:
    """Explain epochs without a utilization."""
    without_utilization = [rate.epoch for rate in epochs if rate.au_strict_percent is None]
    if without_utilization:
        numbers = ", ".join(map(str, without_utilization))
        left_out = f"the first {window.exclude_start_steps} and the last {window.exclude_end_steps}"
        yield (
            f"Epoch {numbers} has no utilization: metric.exclude_start_steps and exclude_end_steps "
            f"leave out {left_out} steps of an epoch, and there are no more. DLIO's formula calls that 0 %. "
            "Use more files, fewer ranks or smaller batches."
        )


def mean_and_stdev(values: Sequence[float]) -> Mean:
    """Mean and population standard deviation of at least one value."""
    mean = math.fsum(values) / len(values)
    return Mean(mean=mean, stdev=math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)))


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0
