"""All ranks' plan of a run: the steps of each epoch, and which samples each rank gets or leaves out.

Collective where every rank counts its own share. All ranks take the same number of steps, every batch is
full, and what an epoch leaves out is counted and hashed, so that a record shows what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.bench.training.sample_sharding import (
    RankEpoch,
    Sharding,
    require_steps,
    shard_evaluation,
    shard_training,
)
from penstock.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.bench.epoch_order import Remainder
    from penstock.bench.training.sample_sharding import Items
    from penstock.cluster.comm import Comm
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """A set of samples, by number and `digest`: two lots are the same, in any order, if both are equal.

    The digest is the sum, modulo 2**64, of mix(mix(item) + samples taken of it), where mix is the finisher of
    splitmix64. Digests of disjoint lots add up.
    """

    samples: int = 0
    digest: int = 0

    def __add__(self, other: SampleSet) -> SampleSet:
        """Both together."""
        return SampleSet(samples=self.samples + other.samples, digest=(self.digest + other.digest) % 2**64)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"samples": self.samples, "digest": f"{self.digest:016x}"}


def summarize_samples(items: Items, taken: Items) -> SampleSet:
    """`taken` samples of each item; items of which none is taken do not count."""
    counts = taken > 0
    mixed = _mix(_mix(items[counts].astype(np.uint64)) + taken[counts].astype(np.uint64))
    return SampleSet(samples=int(taken.sum()), digest=int(mixed.sum(dtype=np.uint64)))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank gets of one epoch, and what of its own items it leaves out."""

    taken: SampleSet
    left_out: SampleSet


def count_rank_share(order: RankEpoch, *, num_steps: int, full_steps: int) -> RankShare:
    """A rank's share of `num_steps` steps, of an epoch that would have `full_steps`."""
    sharding = order.sharding
    taken = left_out = SampleSet()
    before = 0
    for items in order.pieces():
        sizes = sharding.sizes(items)
        begins = before + np.cumsum(sizes) - sizes
        taken += summarize_samples(items, np.clip(num_steps * sharding.batch_size - begins, 0, sizes))
        left_out += summarize_samples(
            items, np.clip(begins + sizes - full_steps * sharding.batch_size, 0, sizes)
        )
        before += int(sizes.sum())
    return RankShare(taken=taken, left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch: its steps, what each rank gets, and what is left out by division and batches."""

    epoch: int
    num_steps: int
    full_steps: int
    shares: tuple[SampleSet, ...]
    left_out: SampleSet

    def document(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return {
            "epoch": self.epoch,
            "steps": self.num_steps,
            "steps_without_limit": self.full_steps,
            "left_out": self.left_out.document(),
            "ranks": [share.document() for share in self.shares],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """All epochs, and the evaluation that follows some of them."""

    sharding: Sharding
    epochs: tuple[EpochPlan, ...]
    evaluation: Sharding | None
    eval_steps: int
    eval_epochs: frozenset[int]

    def document(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return {
            "item_samples": self.sharding.item_samples,
            "block_samples": self.sharding.block_samples,
            "window_samples": self.sharding.window_samples,
            "division": self.sharding.division.value,
            "shuffle": self.sharding.shuffle.value,
            "epochs": [epoch.document() for epoch in self.epochs],
            "eval_steps": self.eval_steps,
            "eval_epochs": sorted(self.eval_epochs),
        }


def step_counts(full_steps: Sequence[int], total_steps: int | None) -> list[int]:
    """The steps of each epoch, if all of them stop after `total_steps`; epochs without a step fall away."""
    left = sum(full_steps) if total_steps is None else total_steps
    counts = []
    for steps in full_steps:
        if left <= 0:
            break
        counts.append(min(steps, left))
        left -= counts[-1]
    return counts


def eval_epochs(workload: Workload, num_epochs: int) -> frozenset[int]:
    """After which epochs an evaluation comes."""
    asked = workload.evaluation
    if not workload.workflow.evaluation or not workload.dataset.num_files_eval:
        return frozenset()
    return frozenset(range(asked.eval_after_epoch, num_epochs + 1, asked.epochs_between_evals))


def left_out_by_division(sharding: Sharding, epoch: int) -> SampleSet:
    """What no rank gets at all."""
    lot = SampleSet()
    for run in sharding.shard().left_out(epoch):
        items = np.arange(run.start, run.stop, dtype=np.int64)
        lot += summarize_samples(items, sharding.sizes(items))
    return lot


def plan_training(
    workload: Workload, *, block_samples: int, seed: int, division: Remainder, comm: Comm
) -> TrainingPlan:
    """The plan of all ranks; each counts and digests its own share."""
    sharding = shard_training(
        workload, block_samples=block_samples, num_ranks=comm.size, division=division, seed=seed
    )
    require_steps(sharding, what="training")
    orders = [RankEpoch(sharding, rank=comm.rank, epoch=epoch + 1) for epoch in range(workload.train.epochs)]
    full_steps = [_count_common_steps(order, comm, what="training") for order in orders]
    counts = step_counts(full_steps, workload.train.total_training_steps)
    epochs = tuple(
        _plan_epoch(order, comm, epoch=epoch, num_steps=num_steps, full_steps=full)
        for epoch, (order, full, num_steps) in enumerate(
            zip(orders[: len(counts)], full_steps, counts, strict=False), start=1
        )
    )
    after = eval_epochs(workload, len(epochs))
    evaluation = _shard_evaluation_files(workload, block_samples, seed, comm) if after else None
    return TrainingPlan(
        sharding=sharding,
        epochs=epochs,
        evaluation=evaluation,
        eval_steps=_eval_steps(evaluation, comm),
        eval_epochs=after,
    )


def _plan_epoch(order: RankEpoch, comm: Comm, *, epoch: int, num_steps: int, full_steps: int) -> EpochPlan:
    mine = count_rank_share(order, num_steps=num_steps, full_steps=full_steps)
    shares = comm.gather(mine, awaiting="all ranks to plan an epoch")
    left_out = left_out_by_division(order.sharding, epoch)
    for share in shares:
        left_out += share.left_out
    return EpochPlan(
        epoch=epoch,
        num_steps=num_steps,
        full_steps=full_steps,
        shares=tuple(share.taken for share in shares),
        left_out=left_out,
    )


def _shard_evaluation_files(workload: Workload, block_samples: int, seed: int, comm: Comm) -> Sharding:
    sharding = shard_evaluation(workload, block_samples=block_samples, num_ranks=comm.size, seed=seed)
    require_steps(sharding, what="evaluation")
    return sharding


def _eval_steps(sharding: Sharding | None, comm: Comm) -> int:
    return (
        _count_common_steps(RankEpoch(sharding, rank=comm.rank, epoch=1), comm, what="evaluation")
        if sharding
        else 0
    )


def _count_common_steps(order: RankEpoch, comm: Comm, *, what: str) -> int:
    """The steps that every rank can take with full batches."""
    own = order.count_samples() // order.sharding.batch_size
    steps = comm.reduce(own, "min", awaiting=f"all ranks to count their {what} samples")
    if steps < 1:
        raise UsageError(
            f"Some rank has fewer samples than a batch of {order.sharding.batch_size}: "
            f"{what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    return steps
