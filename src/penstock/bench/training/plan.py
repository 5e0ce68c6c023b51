"""What each rank reads in each epoch, and what nobody does: a pure function of the request.

Place in the flow: between a workload and its batches. Samples are dealt out in items: single samples, blocks
that a format reads together, or whole files. Invariant: all ranks take equally many steps, all batches are
full, and what an epoch leaves out is counted and hashed.

Where an item is a sample, a whole batch is dealt to a rank at a time, so that `rotate` holds to the sample.
Of larger items each rank leaves out the end of its order that fills no batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.order import DealtItems, Division, EpochOrder, Shard
from penstock.errors import UsageError
from penstock.results.events import Phase
from penstock.workload.choices import FileAccess, Shuffle

if TYPE_CHECKING:
    from penstock.workload.spec import Workload

Items = NDArray[np.int64]

_STEP_ITEMS: Final = 1 << 14
"""Items looked at together, so that memory stays small whatever their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """How the samples of one phase are dealt out. `group` items go to a rank at a time."""

    num_files: int
    samples_per_file: int
    block_samples: int
    item_samples: int
    group: int
    batch_size: int
    num_ranks: int
    division: Division
    seed: int
    shuffle: Shuffle
    window_samples: int
    """The stream of samples is shuffled in pieces of this many; 0 takes them in turn."""
    new_order_each_epoch: bool = True
    run_items: int = 1
    """So many items in a row are shuffled as a whole, and stay in turn."""

    @property
    def items_per_file(self) -> int:
        """The last one of a file may be shorter."""
        return -(-self.samples_per_file // self.item_samples)

    @property
    def num_items(self) -> int:
        """Over all files."""
        return self.num_files * self.items_per_file

    @property
    def num_samples(self) -> int:
        """Over all files."""
        return self.num_files * self.samples_per_file

    def shard(self) -> Shard:
        """The division of items among places: `group` places a rank."""
        return Shard(self.num_items, self.num_ranks * self.group, 0, self.division)

    def sizes(self, items: Items) -> Items:
        """How many samples each of these items has."""
        per_file = self.items_per_file
        last = self.samples_per_file - (per_file - 1) * self.item_samples
        return np.where(items % per_file == per_file - 1, last, self.item_samples)


def training_deal(
    workload: Workload, *, block_samples: int, num_ranks: int, division: Division, seed: int
) -> Deal:
    """The deal of the training files. `seed` counts, whatever the workload says."""
    reader, dataset = workload.reader, workload.dataset
    shuffles = Shuffle.SEED if _is_on(reader.file_shuffle) or _is_on(reader.sample_shuffle) else Shuffle.OFF
    return _deal(
        workload,
        phase=Phase.TRAIN,
        num_files=dataset.num_files_train,
        block_samples=block_samples,
        num_ranks=num_ranks,
        division=division,
        seed=seed,
        shuffle=shuffles,
    )


def evaluation_deal(workload: Workload, *, block_samples: int, num_ranks: int, seed: int) -> Deal:
    """The deal of the evaluation files: in turn; the end that fills no batch is left out."""
    return _deal(
        workload,
        phase=Phase.EVAL,
        num_files=workload.dataset.num_files_eval,
        block_samples=block_samples,
        num_ranks=num_ranks,
        division=Division.DROP,
        seed=seed,
        shuffle=Shuffle.OFF,
    )


def _deal(
    workload: Workload,
    *,
    phase: Phase,
    num_files: int,
    block_samples: int,
    num_ranks: int,
    division: Division,
    seed: int,
    shuffle: Shuffle,
) -> Deal:
    reader, samples_per_file = workload.reader, workload.dataset.num_samples_per_file
    is_training = phase is Phase.TRAIN
    mixes_samples = is_training and _is_on(reader.sample_shuffle)
    # Samples that stay in turn are read file by file, unless ranks shall share files or there are too few.
    is_shared = reader.file_access is not FileAccess.MULTI
    is_split = mixes_samples or is_shared or num_files < num_ranks
    item_samples = block_samples if is_split else samples_per_file
    batch_size = reader.batch_size if is_training else reader.batch_size_eval
    return Deal(
        num_files=num_files,
        samples_per_file=samples_per_file,
        block_samples=block_samples,
        item_samples=item_samples,
        group=batch_size if item_samples == 1 else 1,
        batch_size=batch_size,
        num_ranks=num_ranks,
        division=division,
        seed=seed,
        shuffle=shuffle,
        window_samples=reader.shuffle_size if mixes_samples and block_samples > 1 else 0,
        new_order_each_epoch=workload.train.seed_change_epoch,
        run_items=-(-samples_per_file // item_samples) if is_shared and not mixes_samples else 1,
    )


def _is_on(shuffle: Shuffle) -> bool:
    return shuffle is not Shuffle.OFF


class RankEpoch:
    """The items of one rank in one epoch, in their order; O(1) memory."""

    def __init__(self, deal: Deal, *, rank: int, epoch: int) -> None:
        shard = deal.shard()
        self.deal = deal
        self.epoch = epoch
        self._rank = rank
        self._num_places = shard.num_ranks
        order = EpochOrder(
            deal.num_items - shard.num_left_out,
            deal.seed,
            epoch if deal.new_order_each_epoch else 1,
            deal.shuffle,
            run_items=deal.run_items,
        )
        self._dealt = DealtItems(order, shard.left_out(epoch))
        self.num_items = shard.num_per_rank * deal.group

    def items(self, start: int, stop: int) -> Items:
        """The items at this rank's positions from `start` up to `stop`."""
        turns, slots = np.divmod(np.arange(start, stop, dtype=np.int64), self.deal.group)
        return self._dealt.items(turns * self._num_places + self._rank * self.deal.group + slots)

    def pieces(self) -> Iterator[Items]:
        """All items, in arrays of bounded length."""
        for start in range(0, self.num_items, _STEP_ITEMS):
            yield self.items(start, min(start + _STEP_ITEMS, self.num_items))

    def samples(self) -> Iterator[tuple[int, range]]:
        """For each item its file, and its samples therein."""
        deal = self.deal
        for items in self.pieces():
            for item in items.tolist():
                number, place = divmod(item, deal.items_per_file)
                begin = place * deal.item_samples
                yield number, range(begin, min(begin + deal.item_samples, deal.samples_per_file))

    def count_samples(self) -> int:
        """How many samples they hold."""
        if self.deal.samples_per_file % self.deal.item_samples == 0:
            return self.num_items * self.deal.item_samples
        return sum(int(self.deal.sizes(items).sum()) for items in self.pieces())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """A set of samples, by number and `digest`: two lots are the same, in any order, if both are equal.

    The digest is the sum, modulo 2**64, of mix(mix(item) + samples taken of it), where mix is the finisher of
    splitmix64. Digests of disjoint lots add up.
    """

    samples: int = 0
    digest: int = 0

    def __add__(self, other: Lot) -> Lot:
        """Both together."""
        return Lot(samples=self.samples + other.samples, digest=(self.digest + other.digest) % 2**64)

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {"samples": self.samples, "digest": f"{self.digest:016x}"}


def lot_of(items: Items, taken: Items) -> Lot:
    """`taken` samples of each item; items of which none is taken do not count."""
    counts = taken > 0
    mixed = _mix(_mix(items[counts].astype(np.uint64)) + taken[counts].astype(np.uint64))
    return Lot(samples=int(taken.sum()), digest=int(mixed.sum(dtype=np.uint64)))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank gets of one epoch, and what of its own items it leaves out."""

    taken: Lot
    left_out: Lot


def share_of(order: RankEpoch, *, num_steps: int, full_steps: int) -> Share:
    """A rank's share of `num_steps` steps, of an epoch that would have `full_steps`."""
    deal = order.deal
    taken = left_out = Lot()
    before = 0
    for items in order.pieces():
        sizes = deal.sizes(items)
        begins = before + np.cumsum(sizes) - sizes
        taken += lot_of(items, np.clip(num_steps * deal.batch_size - begins, 0, sizes))
        left_out += lot_of(items, np.clip(begins + sizes - full_steps * deal.batch_size, 0, sizes))
        before += int(sizes.sum())
    return Share(taken=taken, left_out=left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch: its steps, what each rank gets, and what is left out by division and batches."""

    epoch: int
    num_steps: int
    full_steps: int
    shares: tuple[Lot, ...]
    left_out: Lot

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

    deal: Deal
    epochs: tuple[EpochPlan, ...]
    evaluation: Deal | None
    eval_steps: int
    eval_epochs: frozenset[int]

    def document(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return {
            "item_samples": self.deal.item_samples,
            "block_samples": self.deal.block_samples,
            "window_samples": self.deal.window_samples,
            "division": self.deal.division.value,
            "shuffle": self.deal.shuffle.value,
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


def left_out_by_division(deal: Deal, epoch: int) -> Lot:
    """What no rank gets at all."""
    lot = Lot()
    for run in deal.shard().left_out(epoch):
        items = np.arange(run.start, run.stop, dtype=np.int64)
        lot += lot_of(items, deal.sizes(items))
    return lot


def require_steps(deal: Deal, *, what: str) -> None:
    """Refuse what cannot be dealt out: no batch for some rank, or a remainder that shall be an error."""
    together = deal.num_ranks * deal.group
    if deal.num_items < together and deal.division is not Division.PAD:
        raise UsageError(
            f"{deal.num_samples:,} samples are too few for {deal.num_ranks} ranks with batches of "
            f"{deal.batch_size}: {what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    if deal.division is Division.ERROR and deal.num_items % together:
        raise UsageError(
            f"{deal.num_items:,} items do not divide evenly: {together} go to {deal.num_ranks} ranks at a "
            f"time, {deal.num_items % together} are left over",
            fix="Change either number, or choose to rotate, drop or pad the remainder.",
        )
