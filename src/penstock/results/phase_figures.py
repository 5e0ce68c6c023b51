"""The figures of a phase, from step events and the workload alone: utilization, times, and the bottleneck.

Pure. `run_record`, `dlio_files`, `training_page` and the command line present the figures.

There are two utilizations, both in percent. `au_compat` is exactly DLIO's, quirks included, so that results
can be compared with published ones; `au_strict` depends only on storage and loader.

DLIO, for each rank and block, with W the steps from `exclude_start_steps` to `num_steps - 1 -
exclude_end_steps`: AU = 100 x compute(W) / T, where T is the block's whole time less the waits and
computations of the steps outside W; throughput = len(W) x batch / T. Blocks are weighted by their number of
steps; AU is the mean over ranks, throughput the sum. DLIO's quirks:

- T keeps the barriers of the steps outside W, and what the harness does between steps;
- positions restart in each block, so every block after a checkpoint drops its first steps, too;
- `num_steps` comes from the whole data set: if a rank or a block has fewer steps, `exclude_end_steps`
  excludes fewer or none;
- in evaluation, throughput counts all steps over the whole time, start-up included.

Strict, for each rank and epoch: compute / (compute + wait) over the epoch's steps without its first
`exclude_start_steps` and last `exclude_end_steps`, which are excluded once per epoch rather than once per
block. Neither term includes barriers or the harness. `au_strict` is the mean over ranks. Strict throughput
leaves nothing out: it is all samples divided by the slowest rank's time in blocks.

Times are the waits, reads, decoding, computation and barriers of the steps that `au_strict` counts, in
seconds. Reads and decoding are summed over a loader's threads, so they may exceed the elapsed time. The
accelerators are busy enough if `au_compat` reaches the threshold; otherwise the bottleneck is the largest
share of the time without computation. A rank whose samples come late holds up all others in the barrier: that
time is attributed to storage or the client CPU, not to the barrier.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, pstdev
from typing import Any, Final

import numpy as np

from penstock.results.counter_files import IoReconciliation, ReconciliationVerdict
from penstock.results.step_events import (
    Nanoseconds,
    RankEvents,
    Rows,
    StepBlock,
    StepPhase,
    barrier_ns,
    compute_ns,
    wait_ns,
)
from penstock.units import format_bytes, format_seconds
from penstock.workload.sizing import record_bytes
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationWindow:
    """The steps that count: DLIO's number of steps, those excluded at each end, and samples per step."""

    num_steps: int
    exclude_start_steps: int
    exclude_end_steps: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRate:
    """One epoch of a phase, over all ranks. `au_strict_percent` is None if every step is excluded.

    The record is stored in run.json: a new field needs a default and a new `FORMAT_VERSION`.
    """

    epoch: int
    au_compat_percent: float
    au_strict_percent: float | None
    samples_per_s_compat: float
    samples_per_s_strict: float
    samples: int
    read_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TimeStats:
    """One measure of many steps, in seconds."""

    num_steps: int
    total_s: float
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew:
    """The difference between ranks: the mean per step of the fastest, the median and the slowest rank."""

    fastest_rank: int
    fastest_s: float
    median_s: float
    slowest_rank: int
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """The parts of the time of all ranks; the shares sum to 1.

    `held_up` is the part of the barriers in which a rank waits because the step's last rank waited longer for
    its samples; `barrier` is the rest of the barriers. `harness` is the time within blocks but outside steps.
    """

    compute: float
    wait: float
    held_up: float
    barrier: float
    harness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Every measure of steps: over all ranks, for each rank, and compared between ranks."""

    shares: TimeShares
    over_ranks: Mapping[str, TimeStats]
    by_rank: Mapping[int, Mapping[str, TimeStats]]
    skew: Mapping[str, RankSkew]


class Bottleneck(StrEnum):
    """The part of the system to improve first."""

    STORAGE = "storage"
    CLIENT_CPU = "client CPU"
    BARRIER = "barrier"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckVerdict:
    """The bottleneck, and the sentences that explain it."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The mean and population standard deviation over epochs, as in DLIO."""

    mean: float
    stdev: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """The figures of training or evaluation.

    `io_compat` is DLIO's: samples at their nominal size, in MiB/s. `notes` explain figures that may surprise
    a reader.
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
    ceiling: Mapping[str, Any] | None = None,
) -> PhaseFigures | None:
    """Compute the figures of a phase; return None if no epoch has a block that all ranks completed.

    `ceiling` has the figures of the same run on zero-cost storage, if they were measured.
    """
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
    without = ", ".join(str(rate.epoch) for rate in epochs if rate.au_strict_percent is None)
    note = (
        f"Epoch {without} has no utilization: metric.exclude_start_steps and exclude_end_steps leave out the "
        f"first {window.exclude_start_steps} and the last {window.exclude_end_steps} steps of an epoch, and "
        "there are no more. DLIO's formula calls that 0 %. Use more files, fewer ranks or smaller batches."
    )
    threshold = workload.metric.au
    meets_threshold = compat.mean >= threshold * 100
    limit = counted_ceiling(ceiling, compat.mean)
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
        meets_threshold=meets_threshold,
        times=times,
        verdict=find_bottleneck(
            times,
            threshold=threshold,
            passed=meets_threshold,
            ceiling=limit["au_compat"] / 100 if limit else None,
        )
        if times
        else None,
        notes=(note,) if without else (),
    )


def counted_ceiling(ceiling: Mapping[str, Any] | None, au_percent: float) -> Mapping[str, Any] | None:
    """Return the figures of a run on zero-cost storage; None if they do not count.

    A run whose AU, `au_percent`, is higher disproves them: the client was busy when they were measured.
    """
    return None if ceiling and ceiling["au_compat"] < au_percent else ceiling


def mean_and_stdev(values: Sequence[float]) -> Mean:
    """Return the mean and population standard deviation of at least one value."""
    return Mean(mean=fmean(values), stdev=pstdev(values))


def _rate(amount: float, elapsed_s: float) -> float:
    return amount / elapsed_s if elapsed_s > 0 else 0.0


# Utilization


def choose_window(
    workload: Workload, *, num_ranks: int, phase: StepPhase = StepPhase.TRAIN
) -> UtilizationWindow:
    """Choose the window of a phase. As in DLIO, the number of steps is rounded down once, over all ranks."""
    dataset, reader = workload.dataset, workload.reader
    is_training = phase is StepPhase.TRAIN
    num_files = dataset.num_files_train if is_training else dataset.num_files_eval
    batch_size = reader.batch_size if is_training else reader.batch_size_eval
    whole = dataset.num_samples_per_file * num_files // (batch_size * num_ranks)
    requested = workload.train.total_training_steps if is_training else None
    return UtilizationWindow(
        num_steps=requested or whole,
        exclude_start_steps=workload.metric.exclude_start_steps,
        exclude_end_steps=workload.metric.exclude_end_steps,
        batch_size=batch_size,
    )


def epoch_rates(ranks: Sequence[RankEvents], window: UtilizationWindow, phase: StepPhase) -> list[EpochRate]:
    """Return the rates of each epoch in which all ranks completed a block."""
    epochs = set.intersection(*(set(rank.epochs(phase)) for rank in ranks)) if ranks else set()
    rates = []
    for epoch in sorted(epochs):
        by_rank = [rank.blocks(phase, epoch) for rank in ranks]
        compat = [compat_rate(blocks, window, phase) for blocks in by_rank]
        joined = [np.concatenate([block.steps for block in blocks]) for blocks in by_rank]
        strict = [share for steps in joined if (share := strict_au_percent(steps, window)) is not None]
        elapsed_s = max(sum(block.elapsed_ns for block in blocks) for blocks in by_rank) / 1e9
        samples = sum(int(steps["samples"].sum()) for steps in joined)
        rates.append(
            EpochRate(
                epoch=epoch,
                au_compat_percent=sum(au for au, _ in compat) / len(compat),
                au_strict_percent=sum(strict) / len(strict) if strict else None,
                samples_per_s_compat=sum(rate for _, rate in compat),
                samples_per_s_strict=_rate(samples, elapsed_s),
                samples=samples,
                read_bytes=sum(int(steps["read_bytes"].sum()) for steps in joined),
                elapsed_s=elapsed_s,
            )
        )
    return rates


def compat_rate(
    blocks: Sequence[StepBlock], window: UtilizationWindow, phase: StepPhase
) -> tuple[float, float]:
    """Compute DLIO's AU and samples per second of a rank's epoch: means over blocks, weighted by steps."""
    num_steps = sum(len(block.steps) for block in blocks)
    rates = [(len(block.steps), *compat_block_rate(block, window, phase)) for block in blocks]
    au_percent = sum(weight * au for weight, au, _ in rates) / (num_steps or 1)
    return au_percent, sum(weight * rate for weight, _, rate in rates) / (num_steps or 1)


def compat_block_rate(block: StepBlock, window: UtilizationWindow, phase: StepPhase) -> tuple[float, float]:
    """Compute DLIO's AU in percent and samples per second of one block of one rank."""
    # Python slices, as in DLIO: a negative end counts from the back.
    first, end = window.exclude_start_steps, window.num_steps - window.exclude_end_steps
    computed = compute_ns(block.steps)
    processed = computed + wait_ns(block.steps)
    counted = computed[first:end]
    left_ns = block.elapsed_ns - int(processed[:first].sum()) - int(processed[end:].sum())
    is_counted = len(counted) > 0 and left_ns > 0
    num_counted, counted_ns = len(counted), left_ns
    if phase is StepPhase.EVAL:
        num_counted, counted_ns = len(computed), block.elapsed_ns
    au_percent = 100 * int(counted.sum()) / left_ns if is_counted else 0.0
    return au_percent, _rate(num_counted * window.batch_size, counted_ns / 1e9)


def strict_au_percent(steps: Rows, window: UtilizationWindow) -> float | None:
    """Return compute / (compute + wait) in one rank's epoch, in percent, or None if no step counts."""
    counted = _counted_steps(steps, window)
    computed, waited = int(compute_ns(counted).sum()), int(wait_ns(counted).sum())
    return 100 * computed / (computed + waited) if computed + waited > 0 else None


def _counted_steps(steps: Rows, window: UtilizationWindow) -> Rows:
    """Return an epoch's steps without those excluded at both ends: the basis of strict figures and times."""
    return steps[window.exclude_start_steps : max(0, len(steps) - window.exclude_end_steps)]


def epoch_rows(epochs: Sequence[EpochRate]) -> list[dict[str, str]]:
    """Return one row for each epoch. Samples per second are over all of the epoch's time."""
    return [
        {
            "epoch": str(rate.epoch),
            "AU %": f"{rate.au_compat_percent:.2f}",
            "strict %": "-" if rate.au_strict_percent is None else f"{rate.au_strict_percent:.2f}",
            "samples/s": f"{rate.samples_per_s_strict:,.1f}",
            "samples": f"{rate.samples:,}",
            "read": format_bytes(rate.read_bytes),
            "took": format_seconds(rate.elapsed_s),
        }
        for rate in epochs
    ]


# Times


MEASURES: Final[Mapping[str, Callable[[Rows], Nanoseconds]]] = {
    "wait": wait_ns,
    "read": lambda steps: steps["read_ns"],
    "decode": lambda steps: steps["decode_ns"],
    "compute": compute_ns,
    "barrier": barrier_ns,
}
"""The measures of each step, by name."""


def break_down_times(
    ranks: Sequence[RankEvents], window: UtilizationWindow, phase: StepPhase
) -> TimeBreakdown | None:
    """Break down the times of a phase over all its epochs; return None if no step counts."""
    counted: dict[int, Rows] = {}
    harness_ns = 0
    for rank in ranks:
        epochs = [rank.blocks(phase, epoch) for epoch in rank.epochs(phase)]
        joined = [np.concatenate([block.steps for block in blocks]) for blocks in epochs]
        parts = [_counted_steps(steps, window) for steps in joined]
        counted[rank.clock.rank] = np.concatenate([rank.steps[:0], *parts])
        for block in (block for blocks in epochs for block in blocks):
            in_steps_ns = int((block.steps["barrier_ns"] - block.steps["start_ns"]).sum())
            harness_ns += block.elapsed_ns - in_steps_ns
    if not any(map(len, counted.values())):
        return None
    pooled = np.concatenate(list(counted.values()))
    over_ranks = _measure(pooled)
    by_rank = {rank: _measure(steps) for rank, steps in counted.items() if len(steps)}
    compute_s, wait_s, barrier_s = (over_ranks[part].total_s for part in ("compute", "wait", "barrier"))
    held_up_s = float(held_up_ns(pooled).sum()) / 1e9
    whole_s = compute_s + wait_s + barrier_s + harness_ns / 1e9
    scale = 1 / whole_s if whole_s > 0 else 0.0
    shares = TimeShares(
        compute=compute_s * scale,
        wait=wait_s * scale,
        held_up=held_up_s * scale,
        barrier=max(barrier_s - held_up_s, 0.0) * scale,
        harness=harness_ns / 1e9 * scale,
    )
    skew = {}
    for measure in MEASURES:
        means = {rank: stats[measure].mean_s for rank, stats in by_rank.items()}
        fastest, slowest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        skew[measure] = RankSkew(
            fastest_rank=fastest,
            fastest_s=means[fastest],
            median_s=float(np.median(list(means.values()))),
            slowest_rank=slowest,
            slowest_s=means[slowest],
        )
    return TimeBreakdown(shares=shares, over_ranks=over_ranks, by_rank=by_rank, skew=skew)


def held_up_ns(steps: Rows) -> Nanoseconds:
    """Return, for each step of all ranks, the part of its barrier caused by the last rank's wait for samples.

    The last rank at a barrier is the one whose wait and computation in this step took longest.
    """
    waited = wait_ns(steps)
    _, group = np.unique((steps["epoch"] << 32) | steps["step"], return_inverse=True)
    by_arrival = np.lexsort((waited + compute_ns(steps), group))
    last_of_group = by_arrival[
        np.searchsorted(group[by_arrival], np.arange(group.max() + 1), side="right") - 1
    ]
    held_up: Nanoseconds = np.clip(waited[last_of_group][group] - waited, 0, barrier_ns(steps))
    return held_up


def _measure(steps: Rows) -> dict[str, TimeStats]:
    stats = {}
    for measure, measured in MEASURES.items():
        seconds = measured(steps) / 1e9
        total_s, mean_s, max_s = seconds.sum(), seconds.mean(), seconds.max()
        figures = map(float, (total_s, mean_s, *np.percentile(seconds, (50, 90, 99)), max_s))
        stats[measure] = TimeStats(len(seconds), *figures)
    return stats


def time_rows(times: TimeBreakdown) -> list[dict[str, str]]:
    """Return one row for each measure of a step, over all ranks, with its fastest and slowest rank."""
    return [
        {
            "a step": measure,
            "p50": format_seconds(stats.p50_s),
            "p90": format_seconds(stats.p90_s),
            "p99": format_seconds(stats.p99_s),
            "max": format_seconds(stats.max_s),
            "fastest rank": f"{format_seconds(skew.fastest_s)} ({skew.fastest_rank})",
            "slowest rank": f"{format_seconds(skew.slowest_s)} ({skew.slowest_rank})",
        }
        for (measure, stats), skew in zip(times.over_ranks.items(), times.skew.values(), strict=True)
    ]


# The verdict and the bottleneck


FROM_MEMORY: Final = 0.02
"""If a larger share of a data set stayed in the page cache, it was not read from storage alone."""
HOLDING: Final = ("passed", "doubtful")
"""The verdicts of runs that reached their utilization, even if not by storage alone. With any other verdict,
the command fails.
"""


def judge(
    figures: PhaseFigures | None,
    deliveries: Sequence[IoReconciliation],
    epochs: Sequence[Mapping[str, Any]],
) -> str:
    """Return the verdict of a training run: passed, doubtful, failed or no figure.

    `epochs` are those in the run's `stages.json`. A run whose reads partly came from memory is doubtful,
    or failed if it was too slow.
    """
    if figures is None or figures.au_strict_percent is None:
        return "no figure"
    if not figures.meets_threshold:
        return "failed"
    missed = any(one.direction == "read" and one.verdict is ReconciliationVerdict.FAIL for one in deliveries)
    return "doubtful" if missed or resident_share(epochs) > FROM_MEMORY else "passed"


def resident_share(epochs: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest share of the data set that stayed in the page cache before an epoch."""
    caches = (stage.get("cache") or {} for stage in epochs)
    return float(max((cache.get("resident_share", 0.0) for cache in caches), default=0.0))


STRAGGLER: Final = 1.5
"""A rank is reported as a straggler if it waits this many times as long as the median rank."""


def find_bottleneck(
    times: TimeBreakdown, *, threshold: float, passed: bool, ceiling: float | None = None
) -> BottleneckVerdict:
    """Find the bottleneck of a run that should compute for the share `threshold` of its time.

    `passed` is true if its AU sufficed. `ceiling` is the AU that the same run reached on zero-cost storage,
    as a share, if that was measured.
    """
    shares = times.shares
    divided = (
        f"Of the accelerators' time {shares.compute:.1%} was computation ({threshold:.0%} is required), "
        f"{shares.wait:.1%} waiting for samples, {shares.held_up:.1%} waiting for ranks whose samples came "
        f"later, {shares.barrier:.1%} other barriers, {shares.harness:.1%} between steps."
    )
    evidence = [divided]
    if ceiling is not None:
        evidence.append(f"On storage that costs nothing the same run reached AU {ceiling:.1%}.")
    if passed:
        found, reason = Bottleneck.NONE, ""
    elif ceiling is not None and ceiling < threshold:
        found, reason = Bottleneck.CLIENT_CPU, "So this client cannot reach it with any storage."
    elif shares.wait + shares.held_up >= max(shares.barrier, shares.harness):
        # Name readers or decoders as the cause, and any rank that waited much longer than the median.
        read_s, decode_s = times.over_ranks["read"].total_s, times.over_ranks["decode"].total_s
        found, waits = Bottleneck.STORAGE, times.skew["wait"]
        reason = "The loader did not separate reading from decoding; reading is assumed."
        if read_s + decode_s > 0:
            reason = (
                f"Loaders spent {format_seconds(read_s)} reading and {format_seconds(decode_s)} decoding."
            )
            found = Bottleneck.STORAGE if read_s >= decode_s else Bottleneck.CLIENT_CPU
        if waits.slowest_s > STRAGGLER * waits.median_s:
            reason += (
                f" Rank {waits.slowest_rank} waits {format_seconds(waits.slowest_s)} a step, the median rank "
                f"{format_seconds(waits.median_s)}: check its path to storage."
            )
    elif shares.barrier >= shares.harness:
        found = Bottleneck.BARRIER
        reason = "Check for cores that ranks share, the network, and uneven computation."
    else:
        found = Bottleneck.CLIENT_CPU
        reason = "Most of the remaining time passed between steps, where only the client works."
    return BottleneckVerdict(bottleneck=found, evidence=(*evidence, *filter(None, [reason])))
