"""Which rank reads which item, when: a pure function of (seed, epoch, rank, position), in O(1) memory.

An item is whatever is handed to ranks: a sample, a file, a row group. Any process can compute any position.
In an epoch no item comes twice over all ranks (except what `pad` repeats and counts), and all ranks get the
same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from penstock.bench.permutation import InTurn, Permutation, Positions
from penstock.errors import UsageError
from penstock.workload.choices import Shuffle

_STEP_ITEMS: Final = 1 << 12
"""Positions that an iteration evaluates at once."""


class Remainder(StrEnum):
    """What happens to the remainder where items do not divide evenly among ranks."""

    ROTATE = "rotate"
    """Another few items are left out of each epoch, and none of two epochs in a row."""
    DROP = "drop"
    """The last items are never read, as DLIO does it."""
    PAD = "pad"
    """The first items of the order come once more at its end."""
    ERROR = "error"
    """The request is refused."""


class EpochOrder:
    """The order of all items of one epoch: `num_items` in turn, or a permutation of them by (seed, epoch).

    Runs of `run_items` neighbours are permuted as a whole, their items stay in turn; a last run that is
    shorter stays last. `Shuffle.SEED` and `RANDOM` are the same here: the caller draws a random seed, and
    records it.
    """

    __slots__ = ("_num_runs", "_order", "_run_items", "num_items")

    def __init__(
        self, num_items: int, seed: int, epoch: int, shuffle: Shuffle, *, run_items: int = 1
    ) -> None:
        self.num_items = num_items
        self._run_items = run_items
        self._num_runs = num_items // run_items
        self._order = (
            InTurn(self._num_runs)
            if shuffle is Shuffle.OFF or not self._num_runs
            else Permutation(self._num_runs, f"epoch {seed} {epoch}".encode())
        )

    def item(self, position: int) -> int:
        """The item at one position, in microseconds."""
        run, place = divmod(position, self._run_items)
        return self._order.item(run) * self._run_items + place if run < self._num_runs else position

    def items(self, positions: Positions) -> Positions:
        """The items at many positions."""
        if self._run_items == 1:
            return self._order.items(positions)
        runs, places = np.divmod(positions, self._run_items)
        is_whole = runs < self._num_runs
        items = positions.copy()
        items[is_whole] = self._order.items(runs[is_whole]) * self._run_items + places[is_whole]
        return items


class AssignedItems:
    """What one epoch deals out to all ranks together, by place: an order of items, `left_out` ones skipped.

    Places beyond the order begin it anew.
    """

    __slots__ = ("_left_out", "_order")

    def __init__(self, order: EpochOrder, left_out: tuple[range, ...]) -> None:
        self._order = order
        self._left_out = left_out

    def item(self, place: int) -> int:
        """The item at one place, in microseconds."""
        item = self._order.item(place % self._order.num_items)
        for hole in self._left_out:
            if item >= hole.start:
                item += len(hole)
        return item

    def items(self, places: Positions) -> Positions:
        """The items at many places."""
        items = self._order.items(places % self._order.num_items)
        for hole in self._left_out:
            items[items >= hole.start] += len(hole)
        return items


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of `num_items`: every `num_ranks`-th of the order, from the `rank`-th on.

    At any step all ranks together are at neighbouring positions of the order, as with DLIO.
    """

    num_items: int
    num_ranks: int
    rank: int
    division: Remainder = Remainder.ROTATE

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise UsageError(
                f"There is no rank {self.rank} of {self.num_ranks}", fix="Ranks count from 0 to one less."
            )
        if self.num_items < 1:
            raise UsageError(
                "There is nothing to read", fix="Give at least one item, or leave this part out."
            )
        division = f"{self.num_items} / {self.num_ranks} ranks = {self.num_items // self.num_ranks} each"
        if self.division is Remainder.ERROR and self._remainder:
            raise UsageError(
                f"Items do not divide evenly: {division}, {self._remainder} left over",
                fix="Change either number, or choose to rotate, drop or pad the remainder.",
            )
        if self.num_items < self.num_ranks and self.division is not Remainder.PAD:
            raise UsageError(
                f"Too few items for every rank to have one: {division}",
                fix="Use fewer ranks, more items, or let items come more than once (pad).",
            )

    @property
    def num_per_rank(self) -> int:
        """How many positions each rank has in each epoch."""
        return (self.num_items + self.num_repeated) // self.num_ranks

    @property
    def num_left_out(self) -> int:
        """How many items each epoch leaves out."""
        return self._remainder if self.division in (Remainder.ROTATE, Remainder.DROP) else 0

    @property
    def num_repeated(self) -> int:
        """How many positions of each epoch, over all ranks, repeat an item."""
        return -self.num_items % self.num_ranks if self.division is Remainder.PAD else 0

    def left_out(self, epoch: int) -> tuple[range, ...]:
        """The items that no rank reads in this epoch, ascending: at most two runs.

        With `rotate` they move on by their number each epoch. There are less than half of all, so what one
        epoch leaves out is in the next; and after about num_items / num_left_out epochs each was out once.
        """
        if not self.num_left_out:
            return ()
        if self.division is Remainder.DROP:
            return (range(self.num_items - self.num_left_out, self.num_items),)
        start = epoch * self.num_left_out % self.num_items
        stop = start + self.num_left_out
        if stop <= self.num_items:
            return (range(start, stop),)
        return range(stop - self.num_items), range(start, self.num_items)

    @property
    def _remainder(self) -> int:
        return self.num_items % self.num_ranks


class RankOrder:
    """What one rank reads in one epoch: `item(position)` for positions in [0, `len`)."""

    __slots__ = ("_dealt", "shard")

    def __init__(self, shard: Shard, *, seed: int, epoch: int, shuffle: Shuffle) -> None:
        self.shard = shard
        order = EpochOrder(shard.num_items - shard.num_left_out, seed, epoch, shuffle)
        self._dealt = AssignedItems(order, shard.left_out(epoch))

    def __len__(self) -> int:
        return self.shard.num_per_rank

    def item(self, position: int) -> int:
        """The item at one of this rank's positions, in microseconds."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of {len(self)}")
        return self._dealt.item(position * self.shard.num_ranks + self.shard.rank)

    def items(self, start: int, stop: int) -> Positions:
        """The items at this rank's positions from `start` up to `stop`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"positions {start} to {stop} of {len(self)}")
        return self._dealt.items(
            np.arange(start, stop, dtype=np.int64) * self.shard.num_ranks + self.shard.rank
        )

    def iterate(self, start: int = 0) -> Iterator[int]:
        """The items from position `start` on, in bounded memory."""
        for first in range(start, len(self), _STEP_ITEMS):
            yield from self.items(first, min(first + _STEP_ITEMS, len(self))).tolist()
