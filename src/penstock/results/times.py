"""Where a run's time went: waits, reads, decoding, computation and barriers, as percentiles, shares and skew.

Pure: step events in, figures out. Counted are the steps that `au_strict` counts; all times are seconds. Reads
and decoding sum over a loader's threads, so they may exceed the time that passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.results.events import barrier_ns, compute_ns, wait_ns
from penstock.results.utilization import counted_steps, steps_of

if TYPE_CHECKING:
    from penstock.results.events import Nanoseconds, Phase, RankEvents, Rows
    from penstock.results.utilization import Rule

MEASURES: Final[Mapping[str, Callable[[Rows], Nanoseconds]]] = MappingProxyType(
    {
        "wait": wait_ns,
        "read": lambda steps: steps["read_ns"],
        "decode": lambda steps: steps["decode_ns"],
        "compute": compute_ns,
        "barrier": barrier_ns,
    }
)
"""What is measured of each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One measure over many steps, in seconds."""

    num_steps: int
    total_s: float
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How unlike the ranks are in one measure: means a step of the fastest, the middle and the slowest."""

    fastest_rank: int
    fastest_s: float
    median_s: float
    slowest_rank: int
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the time of all ranks, the parts of 1.

    `held_up` is the part of barriers that went by because the step's last rank waited longer for its samples
    than this one; `barrier` is the rest of them. `harness` is what passed in blocks outside of steps.
    """

    compute: float
    wait: float
    held_up: float
    barrier: float
    harness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """All measures over all ranks, rank by rank, and from rank to rank."""

    shares: Shares
    over_ranks: Mapping[str, Spread]
    by_rank: Mapping[int, Mapping[str, Spread]]
    skew: Mapping[str, Skew]


def measure_times(ranks: Sequence[RankEvents], rule: Rule, phase: Phase) -> Times | None:
    """The times of a phase over all its epochs; None where no step counts."""
    counted = {rank.clock.rank: _counted(rank, rule, phase) for rank in ranks}
    pooled = np.concatenate(list(counted.values())) if counted else None
    if pooled is None or len(pooled) == 0:
        return None
    by_rank = {rank: _spreads(steps) for rank, steps in counted.items() if len(steps)}
    over_ranks = _spreads(pooled)
    harness_s = sum(_harness_ns(rank, phase) for rank in ranks) / 1e9
    return Times(
        shares=_shares(over_ranks, held_up_s=float(held_up_ns(pooled).sum()) / 1e9, harness_s=harness_s),
        over_ranks=over_ranks,
        by_rank=by_rank,
        skew={measure: _skew(measure, by_rank) for measure in MEASURES},
    )


def held_up_ns(steps: Rows) -> Nanoseconds:
    """For each step of all ranks: how much of its barrier is due to waits for samples on the last rank there.

    Steps of one number belong together; the last rank is the one that waited and computed longest.
    """
    waited = wait_ns(steps)
    _, group = np.unique((steps["epoch"] << 32) | steps["step"], return_inverse=True)
    by_arrival = np.lexsort((waited + compute_ns(steps), group))
    last_of_group = by_arrival[
        np.searchsorted(group[by_arrival], np.arange(group.max() + 1), side="right") - 1
    ]
    held_up: Nanoseconds = np.clip(waited[last_of_group][group] - waited, 0, barrier_ns(steps))
    return held_up


def _counted(rank: RankEvents, rule: Rule, phase: Phase) -> Rows:
    epochs = [steps_of(rank.blocks(phase, epoch)) for epoch in rank.epochs(phase)]
    return np.concatenate([rank.steps[:0], *(counted_steps(steps, rule) for steps in epochs)])


def _harness_ns(rank: RankEvents, phase: Phase) -> int:
    """What a rank's blocks took beyond their steps."""
    blocks = [block for epoch in rank.epochs(phase) for block in rank.blocks(phase, epoch)]
    in_steps = (int((block.steps["barrier_ns"] - block.steps["start_ns"]).sum()) for block in blocks)
    return sum(block.elapsed_ns for block in blocks) - sum(in_steps)


def _spreads(steps: Rows) -> dict[str, Spread]:
    return {measure: _spread(measured(steps) / 1e9) for measure, measured in MEASURES.items()}


def _spread(seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread:
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99))
    return Spread(
        num_steps=len(seconds),
        total_s=float(seconds.sum()),
        mean_s=float(seconds.mean()),
        p50_s=float(p50),
        p90_s=float(p90),
        p99_s=float(p99),
        max_s=float(seconds.max()),
    )


def _skew(measure: str, by_rank: Mapping[int, Mapping[str, Spread]]) -> Skew:
    means = {rank: spreads[measure].mean_s for rank, spreads in by_rank.items()}
    fastest, slowest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return Skew(
        fastest_rank=fastest,
        fastest_s=means[fastest],
        median_s=float(np.median(list(means.values()))),
        slowest_rank=slowest,
        slowest_s=means[slowest],
    )


def _shares(spreads: Mapping[str, Spread], *, held_up_s: float, harness_s: float) -> Shares:
    compute_s, wait_s, barrier_s = (spreads[part].total_s for part in ("compute", "wait", "barrier"))
    whole_s = compute_s + wait_s + barrier_s + harness_s
    scale = 1 / whole_s if whole_s > 0 else 0.0
    return Shares(
        compute=compute_s * scale,
        wait=wait_s * scale,
        held_up=held_up_s * scale,
        barrier=(barrier_s - held_up_s) * scale,
        harness=harness_s * scale,
    )
