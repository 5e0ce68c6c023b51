"""What a rank will read first, computed without touching storage: to look at an order or to check it.

The same plan that the loop follows; shuffle windows mix samples further once they are in memory. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from penstock.bench.training.sample_sharding import RankEpoch, require_steps, shard_training
from penstock.dataset.file_naming import training_files
from penstock.dataset.formats import open_format
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample, by its number over all training files, and the key of its file."""

    index: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPreview:
    """The first samples of a rank in an epoch, of `num_samples` dealt to it; the last may fill no batch."""

    samples: tuple[PlannedSample, ...]
    num_samples: int


def preview_order(
    workload: Workload, *, num_ranks: int, rank: int, epoch: int, head: int, division: Remainder, seed: int
) -> OrderPreview:
    """The first `head` samples of `rank` in `epoch`, which counts from 1."""
    if not 0 <= rank < num_ranks or epoch < 1 or head < 0:
        raise UsageError(
            f"There is no rank {rank} of {num_ranks} in epoch {epoch}",
            fix="Ranks count from 0 to one less than there are, epochs from 1.",
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
    return OrderPreview(
        samples=tuple(
            PlannedSample(index, names.name(index // sharding.samples_per_file))
            for index in islice(_samples(order), head)
        ),
        num_samples=order.count_samples(),
    )


def _samples(order: RankEpoch) -> Iterator[int]:
    for number, samples in order.samples():
        first = number * order.sharding.samples_per_file
        yield from range(first + samples.start, first + samples.stop)
