"""Accelerator utilization, twice: by DLIO's formula, and strictly, without the harness.

Pure: step events in, figures out. `au_compat` is DLIO's to the letter, quirks included, so that results can
be compared with published ones; `au_strict` depends on storage and loader alone. Both are percentages.

DLIO, for each rank and block, with W the steps from `exclude_start_steps` to `num_steps - 1 -
exclude_end_steps`: AU = 100 x compute(W) / T, where T is the block's whole time less waits and computations
of the steps outside W; throughput = len(W) x batch / T. A block weighs as many steps as it has; AU is the
mean over ranks, throughput their sum. Its quirks:

- T keeps the barriers of the steps outside W, and what the harness does between steps;
- positions are counted in each block anew, so every block after a checkpoint drops its first steps, too;
- `num_steps` comes from the whole data set: where a rank has fewer steps, `exclude_end_steps` excludes fewer
  or none, and where a block has fewer, too;
- in evaluation throughput counts all steps over the whole time, start-up included.

Strict, for each rank and epoch: compute / (compute + wait) over the epoch's steps without its first
`exclude_start_steps` and last `exclude_end_steps`, once an epoch; barriers and harness are in neither. Mean
over ranks. Strict throughput leaves nothing out: all samples over the longest rank's time in blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.results.step_events import RankEvents, Rows, StepBlock, StepPhase, compute_ns, wait_ns
from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationWindow:
    """Which steps count: DLIO's number of steps, the steps excluded at both ends, and samples a step."""

    num_steps: int
    exclude_start_steps: int
    exclude_end_steps: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRate:
    """DLIO's two figures of one block of one rank, and the block's weight."""

    au_percent: float
    samples_per_s: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRate:
    """One epoch of a phase, over all ranks. `au_strict_percent` is None where every step is left out."""

    epoch: int
    au_compat_percent: float
    au_strict_percent: float | None
    samples_per_s_compat: float
    samples_per_s_strict: float
    samples: int
    read_bytes: int
    elapsed_s: float

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes really read, over all of the epoch's time."""
        return self.read_bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0


def choose_window(
    workload: Workload, *, num_ranks: int, phase: StepPhase = StepPhase.TRAIN
) -> UtilizationWindow:
    """The window of a phase. DLIO's number of steps is rounded down once, over all ranks."""
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
    """Every epoch that all ranks have completed a block of."""
    epochs = set.intersection(*(set(rank.epochs(phase)) for rank in ranks)) if ranks else set()
    return [
        epoch_rate([rank.blocks(phase, epoch) for rank in ranks], window, phase, epoch)
        for epoch in sorted(epochs)
    ]


def epoch_rate(
    ranks: Sequence[Sequence[StepBlock]], window: UtilizationWindow, phase: StepPhase, epoch: int
) -> EpochRate:
    """One epoch from its blocks, rank by rank."""
    compat = [compat_rate(blocks, window, phase) for blocks in ranks]
    strict = [
        share
        for blocks in ranks
        if (share := strict_au_percent(concatenate_steps(blocks), window)) is not None
    ]
    elapsed_s = max(sum(block.elapsed_ns for block in blocks) for blocks in ranks) / 1e9
    samples = sum(int(block.steps["samples"].sum()) for blocks in ranks for block in blocks)
    return EpochRate(
        epoch=epoch,
        au_compat_percent=sum(rate.au_percent for rate in compat) / len(compat),
        au_strict_percent=sum(strict) / len(strict) if strict else None,
        samples_per_s_compat=sum(rate.samples_per_s for rate in compat),
        samples_per_s_strict=samples / elapsed_s if elapsed_s > 0 else 0.0,
        samples=samples,
        read_bytes=sum(int(block.steps["read_bytes"].sum()) for blocks in ranks for block in blocks),
        elapsed_s=elapsed_s,
    )


def compat_rate(blocks: Sequence[StepBlock], window: UtilizationWindow, phase: StepPhase) -> BlockRate:
    """DLIO's figures of one rank's epoch: its blocks, weighted by their steps."""
    rates = [compat_block_rate(block, window, phase) for block in blocks]
    num_steps = sum(rate.num_steps for rate in rates)
    if num_steps == 0:
        return BlockRate(au_percent=0.0, samples_per_s=0.0, num_steps=0)
    return BlockRate(
        au_percent=sum(rate.au_percent * rate.num_steps for rate in rates) / num_steps,
        samples_per_s=sum(rate.samples_per_s * rate.num_steps for rate in rates) / num_steps,
        num_steps=num_steps,
    )


def compat_block_rate(block: StepBlock, window: UtilizationWindow, phase: StepPhase) -> BlockRate:
    """DLIO's figures of one block of one rank."""
    # Python's own slices, as DLIO has them: an end below zero counts from the back.
    first, end = window.exclude_start_steps, window.num_steps - window.exclude_end_steps
    computed = compute_ns(block.steps)
    processed = computed + wait_ns(block.steps)
    counted = computed[first:end]
    left_ns = block.elapsed_ns - int(processed[:first].sum()) - int(processed[end:].sum())
    is_counted = len(counted) > 0 and left_ns > 0
    num_counted, counted_ns = len(counted), left_ns
    if phase is StepPhase.EVAL:
        num_counted, counted_ns = len(computed), block.elapsed_ns
    rate = num_counted * window.batch_size / (counted_ns / 1e9) if counted_ns > 0 else 0.0
    return BlockRate(
        au_percent=100 * int(counted.sum()) / left_ns if is_counted else 0.0,
        samples_per_s=rate,
        num_steps=len(computed),
    )


def strict_au_percent(steps: Rows, window: UtilizationWindow) -> float | None:
    """Compute / (compute + wait) of one rank's epoch, in percent; None where no step counts."""
    counted = counted_steps(steps, window)
    computed, waited = int(compute_ns(counted).sum()), int(wait_ns(counted).sum())
    return 100 * computed / (computed + waited) if computed + waited > 0 else None


def counted_steps(steps: Rows, window: UtilizationWindow) -> Rows:
    """An epoch's steps without those at both ends: what strict figures and times are made of."""
    return steps[window.exclude_start_steps : max(0, len(steps) - window.exclude_end_steps)]


def concatenate_steps(blocks: Sequence[StepBlock]) -> Rows:
    """The steps of one rank's blocks, in order."""
    return np.concatenate([block.steps for block in blocks])
