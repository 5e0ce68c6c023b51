"""The order of the items of an epoch, and their division among ranks: pure functions, in O(1) memory.

An item is whatever is handed to ranks: a sample, a file, a row group. Any process can compute any position.
In an epoch no item comes twice over all ranks (except what `pad` repeats and counts), and all ranks get the
same number.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.bench.permutation import Permutation, Positions
from penstock.workload.enums import Shuffle


class Remainder(StrEnum):
    """What happens to the remainder where items do not divide evenly among ranks."""

    ROTATE = "rotate"
    """Other items are left out of each epoch, never the same ones of two epochs in a row."""
    DROP = "drop"
    """The last items are never read, as with DLIO."""
    PAD = "pad"
    """The first items of the order come once more at its end."""
    ERROR = "error"
    """The request is refused."""


class EpochOrder:
    """The items of one epoch by position: `num_items` in turn, or permuted by (seed, epoch).

    The items `left_out` are skipped, and positions beyond the last item begin anew. Runs of `run_items`
    neighbours are permuted as a whole, their items stay in turn; a shorter last run stays last.
    `Shuffle.SEED` and `RANDOM` are the same here: the caller draws a random seed, and records it.
    """

    __slots__ = ("_left_out", "_num_items", "_num_runs", "_permutation", "_run_items")

    def __init__(
        self,
        num_items: int,
        seed: int,
        epoch: int,
        shuffle: Shuffle,
        *,
        run_items: int = 1,
        left_out: tuple[range, ...] = (),
    ) -> None:
        self._num_items = num_items - sum(map(len, left_out))
        self._left_out = left_out
        self._run_items = run_items
        self._num_runs = self._num_items // run_items
        self._permutation = None
        if shuffle is not Shuffle.OFF:
            self._permutation = Permutation(self._num_runs, f"epoch {seed} {epoch}".encode())

    def items(self, positions: Positions) -> Positions:
        """The items at these positions."""
        items = positions % self._num_items
        if self._permutation is not None:
            runs, places = np.divmod(items, self._run_items)
            is_whole = runs < self._num_runs
            items[is_whole] = self._permutation.items(runs[is_whole]) * self._run_items + places[is_whole]
        for hole in self._left_out:  # ascending, so an item moved behind one hole is compared with the next
            items[items >= hole.start] += len(hole)
        return items


@dataclass(frozen=True, slots=True)
class EvenDivision:
    """`num_items` divided evenly among `num_places`: each takes every `num_places`-th item of the order.

    At any step all places together are at neighbouring positions of the order, as with DLIO.
    """

    num_items: int
    num_places: int
    remainder: Remainder = Remainder.ROTATE

    @property
    def num_per_place(self) -> int:
        """How many positions each place has in each epoch."""
        return (self.num_items + self.num_repeated) // self.num_places

    @property
    def num_left_out(self) -> int:
        """How many items each epoch leaves out."""
        is_left_out = self.remainder in (Remainder.ROTATE, Remainder.DROP)
        return self.num_items % self.num_places if is_left_out else 0

    @property
    def num_repeated(self) -> int:
        """How many positions of each epoch, over all places, repeat an item."""
        return -self.num_items % self.num_places if self.remainder is Remainder.PAD else 0

    def left_out(self, epoch: int) -> tuple[range, ...]:
        """The items that no place takes in this epoch, ascending: at most two runs.

        With `rotate` they move on by their number each epoch. They are less than half of all items, so what
        one epoch leaves out is in the next; after about num_items / num_left_out epochs each was out once.
        """
        if not self.num_left_out:
            return ()
        if self.remainder is Remainder.DROP:
            return (range(self.num_items - self.num_left_out, self.num_items),)
        start = epoch * self.num_left_out % self.num_items
        stop = start + self.num_left_out
        if stop <= self.num_items:
            return (range(start, stop),)
        return range(stop - self.num_items), range(start, self.num_items)
