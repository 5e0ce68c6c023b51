"""The plan of a run for all ranks: the steps of each epoch, and each rank's samples in their order.

Samples are given to ranks in items: single samples, blocks that a format reads together, or whole files. If
an item is a sample, a rank gets a whole batch at a time, so that `rotate` is exact to the sample. With larger
items, each rank leaves out the end of its order that does not fill a batch.

Functions in which every rank counts its own share are collective. All ranks take the same number of steps,
every batch is full, and what an epoch leaves out is counted and hashed, so that a record shows what was read.
`preview_order` follows the same plan without touching storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.epoch_order import EpochOrder, EvenDivision, Remainder
from penstock.cluster.comm import Comm
from penstock.dataset.data_files import training_files
from penstock.dataset.formats import open_format
from penstock.errors import UsageError
from penstock.results.step_events import StepPhase, digest_samples
from penstock.units import format_count
from penstock.workload.enums import FileSharing, Shuffle
from penstock.workload.spec import Workload

Items = NDArray[np.int64]

_STEP_ITEMS: Final = 1 << 14
"""Items processed at once, so that memory stays small however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The division of one phase's samples among ranks. Each rank gets `group` items at a time."""

    num_files: int
    samples_per_file: int
    block_samples: int
    item_samples: int
    group: int
    batch_size: int
    num_ranks: int
    division: Remainder
    seed: int
    shuffle: Shuffle
    window_samples: int
    """Samples are shuffled within windows of this many; 0 keeps their order."""
    new_order_each_epoch: bool = True
    run_items: int = 1
    """Runs of this many consecutive items are shuffled as a whole, so the items of a run keep their order."""

    @property
    def items_per_file(self) -> int:
        """The number of items of one file. The last item may be shorter."""
        return -(-self.samples_per_file // self.item_samples)

    @property
    def num_items(self) -> int:
        """The number of items in all files."""
        return self.num_files * self.items_per_file

    @property
    def num_samples(self) -> int:
        """The number of samples in all files."""
        return self.num_files * self.samples_per_file

    def divide(self) -> EvenDivision:
        """Divide the items evenly among places, of which each rank has `group`."""
        return EvenDivision(self.num_items, self.num_ranks * self.group, self.division)

    def sizes(self, items: Items) -> Items:
        """Return the number of samples of each of these items."""
        per_file = self.items_per_file
        last = self.samples_per_file - (per_file - 1) * self.item_samples
        return np.where(items % per_file == per_file - 1, last, self.item_samples)


def shard_training(
    workload: Workload, *, block_samples: int, num_ranks: int, division: Remainder, seed: int
) -> Sharding:
    """Return the sharding of the training files. `seed` is used, whatever the workload says."""
    reader, dataset = workload.reader, workload.dataset
    mixes_samples = reader.sample_shuffle is not Shuffle.OFF
    is_shuffled = mixes_samples or reader.file_shuffle is not Shuffle.OFF
    # Samples that keep their order are read file by file, unless ranks share files or there are too few
    # files.
    is_shared = reader.file_access is not FileSharing.MULTI
    is_split = mixes_samples or is_shared or dataset.num_files_train < num_ranks
    item_samples = block_samples if is_split else dataset.num_samples_per_file
    return Sharding(
        num_files=dataset.num_files_train,
        samples_per_file=dataset.num_samples_per_file,
        block_samples=block_samples,
        item_samples=item_samples,
        group=reader.batch_size if item_samples == 1 else 1,
        batch_size=reader.batch_size,
        num_ranks=num_ranks,
        division=division,
        seed=seed,
        shuffle=Shuffle.SEED if is_shuffled else Shuffle.OFF,
        window_samples=reader.shuffle_size if mixes_samples and block_samples > 1 else 0,
        new_order_each_epoch=workload.train.seed_change_epoch,
        run_items=-(-dataset.num_samples_per_file // item_samples) if is_shared and not mixes_samples else 1,
    )


def shard_evaluation(workload: Workload, *, block_samples: int, num_ranks: int, seed: int) -> Sharding:
    """Return the sharding of the evaluation files: in order, without the end that does not fill a batch."""
    in_turn = replace(workload.reader, file_shuffle=Shuffle.OFF, sample_shuffle=Shuffle.OFF)
    num_files, batch_size = workload.dataset.num_files_eval, workload.reader.batch_size_eval
    evaluated = replace(
        workload,
        dataset=replace(workload.dataset, num_files_train=num_files),
        reader=replace(in_turn, batch_size=batch_size),
    )
    return shard_training(
        evaluated, block_samples=block_samples, num_ranks=num_ranks, division=Remainder.DROP, seed=seed
    )


class RankEpoch:
    """The items of one rank in one epoch, in their order. Takes O(1) memory."""

    def __init__(self, sharding: Sharding, *, rank: int, epoch: int) -> None:
        division = sharding.divide()
        self.sharding = sharding
        self.epoch = epoch
        self._rank = rank
        self._num_places = division.num_places
        self._order = EpochOrder(
            sharding.num_items,
            sharding.seed,
            epoch if sharding.new_order_each_epoch else 1,
            sharding.shuffle,
            run_items=sharding.run_items,
            left_out=division.left_out(epoch),
        )
        self.num_items = division.num_per_place * sharding.group

    def items(self, start: int, stop: int) -> Items:
        """Return the items at this rank's positions from `start` up to, but not including, `stop`."""
        turns, slots = np.divmod(np.arange(start, stop, dtype=np.int64), self.sharding.group)
        return self._order.items(turns * self._num_places + self._rank * self.sharding.group + slots)

    def pieces(self) -> Iterator[Items]:
        """Yield all items, in arrays of bounded length."""
        for start in range(0, self.num_items, _STEP_ITEMS):
            yield self.items(start, min(start + _STEP_ITEMS, self.num_items))

    def samples(self) -> Iterator[tuple[int, range]]:
        """Yield, for each item, the number of its file and the range of its samples in that file."""
        sharding = self.sharding
        for items in self.pieces():
            for item in items.tolist():
                number, place = divmod(item, sharding.items_per_file)
                begin = place * sharding.item_samples
                yield number, range(begin, min(begin + sharding.item_samples, sharding.samples_per_file))

    def pieces_around(self, head_samples: int, tail_samples: int) -> Iterator[tuple[int, Items]]:
        """Yield items with a sample before `head_samples` or after `tail_samples`, in bounded arrays.

        Each array comes with the number of this rank's samples before it. If all items have the same size,
        those in between are skipped, so a run of 50 steps over 50 million files is planned in no time.
        """
        size = self.sharding.item_samples
        is_even = self.sharding.samples_per_file % size == 0
        head = -(-head_samples // size) if is_even else self.num_items
        tail = max(head, tail_samples // size)
        before = 0
        for first, end in ((0, min(head, self.num_items)), (tail, self.num_items)):
            before = first * size if first else before
            for start in range(first, end, _STEP_ITEMS):
                items = self.items(start, min(start + _STEP_ITEMS, end))
                yield before, items
                before += int(self.sharding.sizes(items).sum())

    def file_numbers(self, num_samples: int) -> Iterator[Items]:
        """Yield the files of this rank's first `num_samples` samples, each once, in bounded arrays."""
        sharding, left = self.sharding, num_samples
        is_listed = np.zeros(sharding.num_files if sharding.items_per_file > 1 else 0, dtype=bool)
        for items in self.pieces():
            if left <= 0:
                return
            reach = np.cumsum(sharding.sizes(items))
            numbers = items[: int(np.searchsorted(reach, left)) + 1] // sharding.items_per_file
            left -= int(reach[-1])
            if is_listed.size:
                numbers = np.unique(numbers)
                numbers = numbers[~is_listed[numbers]]
                is_listed[numbers] = True
            yield numbers

    def count_samples(self) -> int:
        """Return the number of samples in this rank's items."""
        if self.sharding.samples_per_file % self.sharding.item_samples == 0:
            return self.num_items * self.sharding.item_samples
        return sum(int(self.sharding.sizes(items).sum()) for items in self.pieces())


def require_steps(sharding: Sharding, *, what: str) -> None:
    """Refuse a sharding that leaves a rank without a batch, or a remainder that counts as an error."""
    together = sharding.num_ranks * sharding.group
    if sharding.num_items < (1 if sharding.division is Remainder.PAD else together):
        raise UsageError(
            f"{sharding.num_samples:,} samples are too few for {format_count(sharding.num_ranks, 'rank')} "
            f"with batches of {sharding.batch_size}: {what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    if sharding.division is Remainder.ERROR and sharding.num_items % together:
        raise UsageError(
            f"{sharding.num_items:,} items do not divide evenly: {together} go to {sharding.num_ranks} ranks "
            f"at a time, {sharding.num_items % together} are left over",
            fix="Change either number, or choose to rotate, drop or pad the remainder.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """A set of samples. Two sets are equal if their sizes and digests are."""

    samples: int = 0
    digest: int = 0

    def __add__(self, other: SampleSet) -> SampleSet:
        """Return the union of two disjoint sets."""
        return SampleSet(samples=self.samples + other.samples, digest=(self.digest + other.digest) % 2**64)

    def document(self) -> dict[str, Any]:
        """Return the size and digest as plain data."""
        return {"samples": self.samples, "digest": f"{self.digest:016x}"}


def summarize_samples(items: Items, taken: Items) -> SampleSet:
    """Return the set of `taken` samples of each item. Items of which none is taken do not count."""
    counts = taken > 0
    digest = digest_samples(items[counts].astype(np.uint64), taken[counts].astype(np.uint64))
    return SampleSet(samples=int(taken.sum()), digest=digest)


def count_rank_share(order: RankEpoch, *, num_steps: int, full_steps: int) -> tuple[SampleSet, SampleSet]:
    """Return the samples that a rank takes in `num_steps` steps, and those left out of its `full_steps`."""
    sharding = order.sharding
    taken_samples, full_samples = num_steps * sharding.batch_size, full_steps * sharding.batch_size
    taken = left_out = SampleSet()
    for start, items in order.pieces_around(taken_samples, full_samples):
        sizes = sharding.sizes(items)
        begins = start + np.cumsum(sizes) - sizes
        taken += summarize_samples(items, np.clip(taken_samples - begins, 0, sizes))
        left_out += summarize_samples(items, np.clip(begins + sizes - full_samples, 0, sizes))
    return taken, left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch: its steps, the samples that each rank gets, and those left out by division and batches."""

    epoch: int
    num_steps: int
    full_steps: int
    shares: tuple[SampleSet, ...]
    left_out: SampleSet

    def document(self) -> dict[str, Any]:
        """Return the epoch as plain data, for the record of a run."""
        return {
            "epoch": self.epoch,
            "steps": self.num_steps,
            "steps_without_limit": self.full_steps,
            "left_out": self.left_out.document(),
            "ranks": [share.document() for share in self.shares],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """All epochs, and the evaluations after some of them."""

    sharding: Sharding
    epochs: tuple[EpochPlan, ...]
    evaluation: Sharding | None
    eval_steps: int
    eval_epochs: frozenset[int]

    def files_read(self, epoch: EpochPlan, *, rank: int) -> Iterator[tuple[StepPhase, Items]]:
        """Yield the numbers of the files that a rank reads in an epoch and in the evaluation after it."""
        for phase, sharding, num_steps in self._phases(epoch):
            order = RankEpoch(sharding, rank=rank, epoch=epoch.epoch)
            for numbers in order.file_numbers(num_steps * sharding.batch_size):
                yield phase, numbers

    def estimate_files_read(self, epoch: EpochPlan) -> int:
        """Return about how many files a rank reads in an epoch and in the evaluation after it."""
        return sum(
            min(sharding.num_files, ceil(num_steps * sharding.batch_size / sharding.item_samples))
            for _, sharding, num_steps in self._phases(epoch)
        )

    def _phases(self, epoch: EpochPlan) -> Iterator[tuple[StepPhase, Sharding, int]]:
        yield StepPhase.TRAIN, self.sharding, epoch.num_steps
        if self.evaluation is not None and epoch.epoch in self.eval_epochs:
            yield StepPhase.EVAL, self.evaluation, self.eval_steps

    def document(self) -> dict[str, Any]:
        """Return the plan as plain data, for the record of a run."""
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
    """Return each epoch's steps if the run stops after `total_steps`. Epochs without a step are dropped."""
    left = sum(full_steps) if total_steps is None else total_steps
    counts = []
    for steps in full_steps:
        if left <= 0:
            break
        counts.append(min(steps, left))
        left -= counts[-1]
    return counts


def eval_epochs(workload: Workload, num_epochs: int) -> frozenset[int]:
    """Return the epochs that are followed by an evaluation."""
    section = workload.evaluation
    if not workload.workflow.evaluation or not workload.dataset.num_files_eval:
        return frozenset()
    return frozenset(range(section.eval_after_epoch, num_epochs + 1, section.epochs_between_evals))


def left_out_by_division(sharding: Sharding, epoch: int) -> SampleSet:
    """Return the samples that no rank gets because items do not divide evenly."""
    left_out = SampleSet()
    for hole in sharding.divide().left_out(epoch):
        items = np.arange(hole.start, hole.stop, dtype=np.int64)
        left_out += summarize_samples(items, sharding.sizes(items))
    return left_out


def plan_training(
    workload: Workload, *, block_samples: int, seed: int, division: Remainder, comm: Comm
) -> TrainingPlan:
    """Plan the run for all ranks. Each rank counts its own share and computes its digest. Collective."""
    sharding = shard_training(
        workload, block_samples=block_samples, num_ranks=comm.size, division=division, seed=seed
    )
    require_steps(sharding, what="training")
    orders = [RankEpoch(sharding, rank=comm.rank, epoch=epoch + 1) for epoch in range(workload.train.epochs)]
    full_steps = [_count_common_steps(order, comm, what="training") for order in orders]
    counts = step_counts(full_steps, workload.train.total_training_steps)
    epochs = []
    for order, full, num_steps in zip(orders[: len(counts)], full_steps, counts, strict=False):
        mine = count_rank_share(order, num_steps=num_steps, full_steps=full)
        shares = comm.gather(mine, awaiting="all ranks to plan an epoch")
        epochs.append(
            EpochPlan(
                epoch=order.epoch,
                num_steps=num_steps,
                full_steps=full,
                shares=tuple(taken for taken, _ in shares),
                left_out=sum((left for _, left in shares), left_out_by_division(sharding, order.epoch)),
            )
        )
    evaluated = eval_epochs(workload, len(epochs))
    evaluation, eval_steps = None, 0
    if evaluated:
        evaluation = shard_evaluation(workload, block_samples=block_samples, num_ranks=comm.size, seed=seed)
        require_steps(evaluation, what="evaluation")
        eval_steps = _count_common_steps(
            RankEpoch(evaluation, rank=comm.rank, epoch=1), comm, what="evaluation"
        )
    return TrainingPlan(
        sharding=sharding,
        epochs=tuple(epochs),
        evaluation=evaluation,
        eval_steps=eval_steps,
        eval_epochs=evaluated,
    )


def require_counted_step(workload: Workload, plan: TrainingPlan) -> None:
    """Refuse a run in which no step counts: its utilization would be 0 % on any storage."""
    metric, sharding = workload.metric, plan.sharding
    excluded = metric.exclude_start_steps + metric.exclude_end_steps
    longest = max(epoch.num_steps for epoch in plan.epochs)
    if longest > excluded:
        return
    needed = (excluded + 1) * sharding.batch_size
    limit = workload.train.total_training_steps
    if limit is not None and limit <= excluded:
        fix = f"Set train.total_training_steps to {excluded + 1} or more."
    else:
        files = -(-needed * sharding.num_ranks // sharding.samples_per_file)
        ways = [f"use {files:,} files or more (dataset.num_files_train)"]
        if ranks := sharding.num_samples // needed:
            ways.append(f"at most {format_count(ranks, 'rank')}")
        if batch := sharding.num_samples // (sharding.num_ranks * (excluded + 1)):
            ways.append(f"batches of {batch:,} or less (reader.batch_size)")
        fix = f"{', or '.join(ways)}.".capitalize()
    raise UsageError(
        f"No step would count: an epoch has {longest} for each of {sharding.num_ranks} ranks, and "
        f"utilization excludes the first {metric.exclude_start_steps} and the last "
        f"{metric.exclude_end_steps} of an epoch (metric.exclude_start_steps, exclude_end_steps)",
        fix=fix,
    )


def _count_common_steps(order: RankEpoch, comm: Comm, *, what: str) -> int:
    """Return the number of steps for which every rank has full batches."""
    num_steps = order.count_samples() // order.sharding.batch_size
    # A rank with one more step would wait in its barrier for the others forever.
    steps = comm.reduce(num_steps, "min", awaiting=f"all ranks to count their {what} samples")
    if steps < 1:
        raise UsageError(
            f"A rank has fewer samples than a batch of {order.sharding.batch_size}: "
            f"{what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    return steps


def preview_order(
    workload: Workload, *, num_ranks: int, rank: int, epoch: int, head: int, division: Remainder, seed: int
) -> tuple[list[tuple[int, str]], int]:
    """Return the first `head` samples of `rank` in `epoch`, and how many it has; its last batch may be short.

    A sample is identified by its number over all training files and the key of its file. Epochs count from 1.
    """
    if not 0 <= rank < num_ranks or epoch < 1 or head < 0:
        raise UsageError(
            f"There is no rank {rank} of {num_ranks} in epoch {epoch}",
            fix="Ranks are numbered from 0, epochs from 1.",
        )
    names = training_files(workload.dataset)
    if not len(names):
        raise UsageError("The workload has no training files", fix="Set dataset.num_files_train.")
    block_samples = open_format(workload.dataset, seed).plan(0, names.name(0)).block_samples
    sharding = shard_training(
        workload, block_samples=block_samples, num_ranks=num_ranks, division=division, seed=seed
    )
    require_steps(sharding, what="training")
    order = RankEpoch(sharding, rank=rank, epoch=epoch)
    # Shuffle windows mix the samples further once they are in memory.
    indices = (
        number * sharding.samples_per_file + sample
        for number, samples in order.samples()
        for sample in samples
    )
    first = [(index, names.name(index // sharding.samples_per_file)) for index in islice(indices, head)]
    return first, order.count_samples()
