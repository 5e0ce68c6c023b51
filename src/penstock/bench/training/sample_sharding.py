"""Which samples each rank reads in each epoch, in which order: a pure function of the workload and a seed.

Samples are handed to ranks in items: single samples, blocks that a format reads together, or whole files.
Where an item is a sample, a whole batch goes to a rank at a time, so that `rotate` is exact to the sample.
Of larger items each rank leaves out the end of its order that fills no batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.bench.epoch_order import EpochOrder, EvenDivision, Remainder
from penstock.errors import UsageError
from penstock.results.step_events import StepPhase
from penstock.workload.enums import FileSharing, Shuffle
from penstock.workload.spec import Workload

Items = NDArray[np.int64]

_STEP_ITEMS: Final = 1 << 14
"""Items processed at once, so that memory stays small whatever their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How the samples of one phase are divided among ranks. `group` items go to a rank at a time."""

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
    """The stream of samples is shuffled in pieces of this many; 0 takes them in turn."""
    new_order_each_epoch: bool = True
    run_items: int = 1
    """This many neighbouring items are shuffled as a whole, and stay in turn."""

    @property
    def items_per_file(self) -> int:
        """Items of one file; the last one may be shorter."""
        return -(-self.samples_per_file // self.item_samples)

    @property
    def num_items(self) -> int:
        """Items of all files."""
        return self.num_files * self.items_per_file

    @property
    def num_samples(self) -> int:
        """Samples of all files."""
        return self.num_files * self.samples_per_file

    def divide(self) -> EvenDivision:
        """The division of items among places: `group` places a rank."""
        return EvenDivision(self.num_items, self.num_ranks * self.group, self.division)

    def sizes(self, items: Items) -> Items:
        """How many samples each of these items has."""
        per_file = self.items_per_file
        last = self.samples_per_file - (per_file - 1) * self.item_samples
        return np.where(items % per_file == per_file - 1, last, self.item_samples)


def shard_training(
    workload: Workload, *, block_samples: int, num_ranks: int, division: Remainder, seed: int
) -> Sharding:
    """The sharding of the training files. `seed` counts, whatever the workload says."""
    reader, dataset = workload.reader, workload.dataset
    shuffles = Shuffle.SEED if _is_on(reader.file_shuffle) or _is_on(reader.sample_shuffle) else Shuffle.OFF
    return _shard_phase(
        workload,
        phase=StepPhase.TRAIN,
        num_files=dataset.num_files_train,
        block_samples=block_samples,
        num_ranks=num_ranks,
        division=division,
        seed=seed,
        shuffle=shuffles,
    )


def shard_evaluation(workload: Workload, *, block_samples: int, num_ranks: int, seed: int) -> Sharding:
    """The sharding of the evaluation files: in turn; the end that fills no batch is left out."""
    return _shard_phase(
        workload,
        phase=StepPhase.EVAL,
        num_files=workload.dataset.num_files_eval,
        block_samples=block_samples,
        num_ranks=num_ranks,
        division=Remainder.DROP,
        seed=seed,
        shuffle=Shuffle.OFF,
    )


def _shard_phase(
    workload: Workload,
    *,
    phase: StepPhase,
    num_files: int,
    block_samples: int,
    num_ranks: int,
    division: Remainder,
    seed: int,
    shuffle: Shuffle,
) -> Sharding:
    reader, samples_per_file = workload.reader, workload.dataset.num_samples_per_file
    is_training = phase is StepPhase.TRAIN
    mixes_samples = is_training and _is_on(reader.sample_shuffle)
    # Samples that stay in turn are read file by file, unless ranks share files or there are too few.
    is_shared = reader.file_access is not FileSharing.MULTI
    is_split = mixes_samples or is_shared or num_files < num_ranks
    item_samples = block_samples if is_split else samples_per_file
    batch_size = reader.batch_size if is_training else reader.batch_size_eval
    return Sharding(
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
        """The items at this rank's positions from `start` up to `stop`."""
        turns, slots = np.divmod(np.arange(start, stop, dtype=np.int64), self.sharding.group)
        return self._order.items(turns * self._num_places + self._rank * self.sharding.group + slots)

    def pieces(self) -> Iterator[Items]:
        """All items, in arrays of bounded length."""
        for start in range(0, self.num_items, _STEP_ITEMS):
            yield self.items(start, min(start + _STEP_ITEMS, self.num_items))

    def samples(self) -> Iterator[tuple[int, range]]:
        """For each item the number of its file, and its samples in that file."""
        sharding = self.sharding
        for items in self.pieces():
            for item in items.tolist():
                number, place = divmod(item, sharding.items_per_file)
                begin = place * sharding.item_samples
                yield number, range(begin, min(begin + sharding.item_samples, sharding.samples_per_file))

    def pieces_around(self, head_samples: int, tail_samples: int) -> Iterator[tuple[int, Items]]:
        """Items with a sample before `head_samples` or after `tail_samples`, in arrays of bounded length.

        Each comes with the number of this rank's samples before it. Where items are equal, those between are
        skipped: a run of 50 steps of 50 million files plans in no time.
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
        """The files of the first `num_samples` of this rank, each once, in arrays of bounded length."""
        sharding, left = self.sharding, num_samples
        seen = np.zeros(sharding.num_files if sharding.items_per_file > 1 else 0, dtype=bool)
        for items in self.pieces():
            if left <= 0:
                return
            reach = np.cumsum(sharding.sizes(items))
            numbers = items[: int(np.searchsorted(reach, left)) + 1] // sharding.items_per_file
            left -= int(reach[-1])
            if seen.size:
                numbers = np.unique(numbers)
                numbers = numbers[~seen[numbers]]
                seen[numbers] = True
            yield numbers

    def count_samples(self) -> int:
        """How many samples this rank's items hold."""
        if self.sharding.samples_per_file % self.sharding.item_samples == 0:
            return self.num_items * self.sharding.item_samples
        return sum(int(self.sharding.sizes(items).sum()) for items in self.pieces())


def require_steps(sharding: Sharding, *, what: str) -> None:
    """Refuse a sharding that leaves a rank without a batch, or a remainder that is to be an error."""
    together = sharding.num_ranks * sharding.group
    if sharding.num_items < (1 if sharding.division is Remainder.PAD else together):
        raise UsageError(
            f"{sharding.num_samples:,} samples are too few for {sharding.num_ranks} ranks with batches of "
            f"{sharding.batch_size}: {what} would have no step",
            fix="Use more files, fewer ranks or smaller batches.",
        )
    if sharding.division is Remainder.ERROR and sharding.num_items % together:
        raise UsageError(
            f"{sharding.num_items:,} items do not divide evenly: {together} go to {sharding.num_ranks} ranks "
            f"at a time, {sharding.num_items % together} are left over",
            fix="Change either number, or choose to rotate, drop or pad the remainder.",
        )
