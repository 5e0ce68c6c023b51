"""Where a run's time went, and what held it back: storage, the client's CPU, the barrier, or nothing.

Pure: step events in, breakdown and verdict out. The breakdown has waits, reads, decoding, computation and
barriers as percentiles, shares and skew. It covers the steps that `au_strict` counts; all times are seconds.
Reads and decoding sum over a loader's threads, so they may exceed the elapsed time.

The accelerators are busy enough (`none`) if the threshold's share of all time was computation; otherwise the
largest other share is the bottleneck. A rank whose samples come late holds up all others in the barrier: that
time counts as storage's or the client CPU's, not as the barrier's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

from penstock.results import step_events, utilization
from penstock.units import format_seconds

MEASURES: Final[Mapping[str, Callable[[step_events.Rows], step_events.Nanoseconds]]] = MappingProxyType(
    {
        "wait": step_events.wait_ns,
        "read": lambda steps: steps["read_ns"],
        "decode": lambda steps: steps["decode_ns"],
        "compute": step_events.compute_ns,
        "barrier": step_events.barrier_ns,
    }
)
"""What is measured of each step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeStats:
    """One measure over many steps, in seconds."""

    num_steps: int
    total_s: float
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew:
    """How ranks differ in one measure: mean per step of the fastest, the median and the slowest rank."""

    fastest_rank: int
    fastest_s: float
    median_s: float
    slowest_rank: int
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """How the time of all ranks divides; the shares sum to 1.

    `held_up` is the part of barriers spent because the step's last rank waited longer for its samples than
    this one; `barrier` is the rest of them. `harness` is the time in blocks outside of steps.
    """

    compute: float
    wait: float
    held_up: float
    barrier: float
    harness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """All measures: over all ranks, for each rank, and compared between ranks."""

    shares: TimeShares
    over_ranks: Mapping[str, TimeStats]
    by_rank: Mapping[int, Mapping[str, TimeStats]]
    skew: Mapping[str, RankSkew]


def break_down_times(
    ranks: Sequence[step_events.RankEvents],
    window: utilization.UtilizationWindow,
    phase: step_events.StepPhase,
) -> TimeBreakdown | None:
    """The times of a phase over all its epochs; None where no step counts."""
    counted = {rank.clock.rank: _counted(rank, window, phase) for rank in ranks}
    pooled = np.concatenate(list(counted.values())) if counted else None
    if pooled is None or len(pooled) == 0:
        return None
    by_rank = {rank: _measure_steps(steps) for rank, steps in counted.items() if len(steps)}
    over_ranks = _measure_steps(pooled)
    harness_s = sum(_harness_ns(rank, phase) for rank in ranks) / 1e9
    return TimeBreakdown(
        shares=_compute_shares(
            over_ranks, held_up_s=float(held_up_ns(pooled).sum()) / 1e9, harness_s=harness_s
        ),
        over_ranks=over_ranks,
        by_rank=by_rank,
        skew={measure: _compare_ranks(measure, by_rank) for measure in MEASURES},
    )


def held_up_ns(steps: step_events.Rows) -> step_events.Nanoseconds:
    """For each step of all ranks: how much of its barrier is due to the last rank's wait for samples.

    The last rank at a barrier is the one whose wait and computation in this step took longest.
    """
    waited = step_events.wait_ns(steps)
    _, group = np.unique((steps["epoch"] << 32) | steps["step"], return_inverse=True)
    by_arrival = np.lexsort((waited + step_events.compute_ns(steps), group))
    last_of_group = by_arrival[
        np.searchsorted(group[by_arrival], np.arange(group.max() + 1), side="right") - 1
    ]
    held_up: step_events.Nanoseconds = np.clip(
        waited[last_of_group][group] - waited, 0, step_events.barrier_ns(steps)
    )
    return held_up


def _counted(
    rank: step_events.RankEvents, window: utilization.UtilizationWindow, phase: step_events.StepPhase
) -> step_events.Rows:
    epochs = [utilization.concatenate_steps(rank.blocks(phase, epoch)) for epoch in rank.epochs(phase)]
    return np.concatenate([rank.steps[:0], *(utilization.counted_steps(steps, window) for steps in epochs)])


def _harness_ns(rank: step_events.RankEvents, phase: step_events.StepPhase) -> int:
    """The time of a rank's blocks outside of their steps."""
    blocks = [block for epoch in rank.epochs(phase) for block in rank.blocks(phase, epoch)]
    in_steps = (int((block.steps["barrier_ns"] - block.steps["start_ns"]).sum()) for block in blocks)
    return sum(block.elapsed_ns for block in blocks) - sum(in_steps)


def _measure_steps(steps: step_events.Rows) -> dict[str, TimeStats]:
    return {measure: _compute_stats(measured(steps) / 1e9) for measure, measured in MEASURES.items()}


def _compute_stats(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> TimeStats:
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return TimeStats(
        num_steps=len(seconds),
        total_s=float(seconds.sum()),
        mean_s=float(seconds.mean()),
        p50_s=float(p50),
        p90_s=float(p90),
        p99_s=float(p99),
        max_s=float(seconds.max()),
    )


def _compare_ranks(measure: str, by_rank: Mapping[int, Mapping[str, TimeStats]]) -> RankSkew:
    means = {rank: stats[measure].mean_s for rank, stats in by_rank.items()}
    fastest, slowest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return RankSkew(
        fastest_rank=fastest,
        fastest_s=means[fastest],
        median_s=float(np.median(list(means.values()))),
        slowest_rank=slowest,
        slowest_s=means[slowest],
    )


def _compute_shares(stats: Mapping[str, TimeStats], *, held_up_s: float, harness_s: float) -> TimeShares:
    compute_s, wait_s, barrier_s = (stats[part].total_s for part in ("compute", "wait", "barrier"))
    whole_s = compute_s + wait_s + barrier_s + harness_s
    scale = 1 / whole_s if whole_s > 0 else 0.0
    return TimeShares(
        compute=compute_s * scale,
        wait=wait_s * scale,
        held_up=held_up_s * scale,
        barrier=max(barrier_s - held_up_s, 0.0) * scale,
        harness=harness_s * scale,
    )


STRAGGLER: Final = 1.5
"""A rank that waits this many times as long as the median rank is named."""


class Bottleneck(StrEnum):
    """What to improve first."""

    STORAGE = "storage"
    CLIENT_CPU = "client CPU"
    BARRIER = "barrier"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckVerdict:
    """The bottleneck, and the sentences it was concluded from."""

    bottleneck: Bottleneck
    evidence: tuple[str, ...]


def find_bottleneck(
    times: TimeBreakdown, *, threshold: float, ceiling: float | None = None
) -> BottleneckVerdict:
    """The verdict on a run that should compute for the share `threshold` of its time.

    `ceiling` is the share that the same run reached on storage without cost, if that was measured.
    """
    shares = times.shares
    evidence = [_describe_shares(shares, threshold)]
    if ceiling is not None:
        evidence.append(f"On storage that costs nothing the same run computed {ceiling:.1%} of its time.")
    if shares.compute >= threshold:
        return BottleneckVerdict(bottleneck=Bottleneck.NONE, evidence=tuple(evidence))
    if ceiling is not None and ceiling < threshold:
        evidence.append("So this client cannot reach it with any storage.")
        return BottleneckVerdict(bottleneck=Bottleneck.CLIENT_CPU, evidence=tuple(evidence))
    bottleneck, reason = _find_largest_share(times)
    return BottleneckVerdict(bottleneck=bottleneck, evidence=(*evidence, reason))


def _describe_shares(shares: TimeShares, threshold: float) -> str:
    return (
        f"Of the accelerators' time {shares.compute:.1%} was computation ({threshold:.0%} is required), "
        f"{shares.wait:.1%} waiting for samples, {shares.held_up:.1%} waiting for ranks whose samples came "
        f"later, {shares.barrier:.1%} other barriers, {shares.harness:.1%} between steps."
    )


def _find_largest_share(times: TimeBreakdown) -> tuple[Bottleneck, str]:
    shares = times.shares
    samples = shares.wait + shares.held_up
    if samples >= max(shares.barrier, shares.harness):
        bottleneck, split = _explain_waits(times)
        return bottleneck, f"{split} {_name_straggler(times.skew['wait'])}".rstrip()
    if shares.barrier >= shares.harness:
        return (Bottleneck.BARRIER, "Check for cores that ranks share, the network, and uneven computation.")
    return (
        Bottleneck.CLIENT_CPU,
        "Most of the remaining time passed between steps, where only the client works.",
    )


def _explain_waits(times: TimeBreakdown) -> tuple[Bottleneck, str]:
    read_s, decode_s = times.over_ranks["read"].total_s, times.over_ranks["decode"].total_s
    if read_s + decode_s == 0:
        return Bottleneck.STORAGE, "The loader did not separate reading from decoding; reading is assumed."
    split = f"Loaders spent {format_seconds(read_s)} reading and {format_seconds(decode_s)} decoding."
    return (Bottleneck.STORAGE if read_s >= decode_s else Bottleneck.CLIENT_CPU), split


def _name_straggler(waits: RankSkew) -> str:
    """Name the rank that waits much longer than the median, if there is one."""
    if waits.slowest_s <= STRAGGLER * waits.median_s:
        return ""
    return (
        f"Rank {waits.slowest_rank} waits {format_seconds(waits.slowest_s)} a step, the median rank "
        f"{format_seconds(waits.median_s)}: check its path to storage."
    )


def time_rows(times: TimeBreakdown) -> list[dict[str, str]]:
    """One row for each measure of a step, over all ranks, and its fastest and slowest rank."""
    rows = []
    for measure, stats in times.over_ranks.items():
        skew = times.skew[measure]
        rows.append(
            {
                "a step": measure,
                "p50": format_seconds(stats.p50_s),
                "p90": format_seconds(stats.p90_s),
                "p99": format_seconds(stats.p99_s),
                "max": format_seconds(stats.max_s),
                "fastest rank": f"{format_seconds(skew.fastest_s)} ({skew.fastest_rank})",
                "slowest rank": f"{format_seconds(skew.slowest_s)} ({skew.slowest_rank})",
            }
        )
    return rows
