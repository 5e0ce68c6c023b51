"""The order of the items of an epoch, their division among ranks, and the times of its steps. Pure.

An item is the unit that is handed to ranks: a sample, a file or a row group. Any process can compute any
position, in O(1) memory. In an epoch, each item is given out at most once over all ranks (except those that
`pad` repeats and counts), and all ranks get the same number of items.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from hashlib import shake_256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.results.step_events import StepPhase
from penstock.workload.enums import Shuffle
from penstock.workload.quantities import Distribution, Duration

Positions = NDArray[np.int64]


class Remainder(StrEnum):
    """The treatment of items that are left over if they do not divide evenly among ranks."""

    ROTATE = "rotate"
    """Each epoch leaves out different items; none is left out of two epochs in a row."""
    DROP = "drop"
    """The last items are never read, as in DLIO."""
    PAD = "pad"
    """The first items of the order are repeated at its end."""
    ERROR = "error"
    """The request is refused with an error."""


class EpochOrder:
    """One epoch's `num_items` items by position: in their own order, or permuted by (seed, epoch).

    The items `left_out` are skipped, and positions beyond the last item start over at the first. Runs of
    `run_items` consecutive items are permuted as a whole, so the items of a run keep their order; a shorter
    last run stays last. `Shuffle.SEED` and `RANDOM` are treated alike here: the caller draws a random seed
    and records it.
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
        """Return the items at these positions."""
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
    """`num_items` divided evenly among `num_places`, each of which takes every `num_places`-th item.

    At each step, all places together take consecutive positions of the order, as in DLIO.
    """

    num_items: int
    num_places: int
    remainder: Remainder = Remainder.ROTATE

    @property
    def num_per_place(self) -> int:
        """The number of positions of each place in each epoch."""
        return (self.num_items + self.num_repeated) // self.num_places

    @property
    def num_left_out(self) -> int:
        """The number of items that each epoch leaves out."""
        is_left_out = self.remainder in (Remainder.ROTATE, Remainder.DROP)
        return self.num_items % self.num_places if is_left_out else 0

    @property
    def num_repeated(self) -> int:
        """The number of positions in each epoch, over all places, that repeat an item."""
        return -self.num_items % self.num_places if self.remainder is Remainder.PAD else 0

    def left_out(self, epoch: int) -> tuple[range, ...]:
        """Return the items that no place takes in this epoch, as at most two ranges, ascending.

        With `rotate`, the items left out are the next `num_left_out` ones each epoch. They are less than half
        of all items, so the next epoch includes what this one leaves out; after about num_items /
        num_left_out epochs, each item has been left out once.
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


MAX_SIZE: Final = 2**62

_FEW_ITEMS: Final = 1024
_ROUNDS: Final = 8
_ROUNDS_OF_FEW: Final = 32
"""A small grid mixes less per round; with this many rounds, all orders of a few items are equally likely."""

_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB
_STEP_ITEMS: Final = 1 << 15
"""Positions evaluated at once, so that intermediate arrays stay in a core's cache."""


class Permutation:
    """A bijection of [0, `size`), different for each `identity`. It stores none of the shuffled items.

    Item row * b + column is a cell of a grid with a rows and b columns, where a is an even number of at least
    sqrt(size), and b = ceil(size / a). Rounds alternate: row += f(column) mod a, column += f(row) mod b,
    where f(y) = high(y + the round's key) * a (or b) >> 32, and high is the upper half of y after two
    xor-shifts and multiplications. Every round can be undone, so the rounds are a bijection of the grid; a
    result outside [0, size) goes through them again until it is inside. One side must be even: if both were
    odd, only half of all permutations could ever come up.
    """

    __slots__ = ("_columns", "_keys", "_rows", "size")

    def __init__(self, size: int, identity: bytes) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise UsageError(f"{size} items cannot be ordered", fix="Give a number from 0 to 2**62.")
        self.size = size
        rows = math.isqrt(max(size - 1, 0)) + 1
        self._rows = rows + rows % 2
        self._columns = max(-(-size // self._rows), 1)
        num_rounds = _ROUNDS_OF_FEW if size < _FEW_ITEMS else _ROUNDS
        digest = shake_256(b"penstock permutation 1" + identity).digest(8 * num_rounds)
        keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def items(self, positions: Positions) -> Positions:
        """Return the items at these positions, which may be in any order."""
        if positions.size and not 0 <= positions.min() <= positions.max() < self.size:
            raise IndexError(f"positions {positions.min()} to {positions.max()} of {self.size}")
        items = np.empty(positions.size, dtype=np.uint64)
        for start in range(0, positions.size, _STEP_ITEMS):
            part = positions[start : start + _STEP_ITEMS].astype(np.uint64)
            items[start : start + part.size] = self._walk(part)
        return items.view(np.int64)

    def _walk(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        items = self._cells(positions)
        outside = np.flatnonzero(items >= self.size)
        while outside.size:
            items[outside] = self._cells(items[outside])
            outside = outside[items[outside] >= self.size]
        return items

    def _cells(self, items: NDArray[np.uint64]) -> NDArray[np.uint64]:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row = items // columns
        column = items - row * columns
        for row_key, column_key in self._keys:
            _turn(row, column, row_key, rows)
            _turn(column, row, column_key, columns)
        row *= columns
        row += column
        return row


def _turn(turned: NDArray[np.uint64], by: NDArray[np.uint64], key: int, size: np.uint64) -> None:
    """Do one round in place: add f(`by`) to `turned`, modulo `size`."""
    number = by + np.uint64(key)
    number ^= number >> np.uint64(30)
    number *= np.uint64(_FIRST_FACTOR)
    number ^= number >> np.uint64(27)
    number *= np.uint64(_SECOND_FACTOR)
    number >>= np.uint64(32)
    number *= size
    number >>= np.uint64(32)
    turned += number
    # A difference below zero wraps around to a huge number, so the minimum is the remainder: no branch, no
    # division.
    np.minimum(turned, turned - size, out=turned)


_PREPROCESSING: Final = 1  # separates its draws from those of computation


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTimes:
    """The emulated times of one rank in one phase, drawn for each step by a counter-based generator.

    The same (seed, phase, rank, epoch, step) has the same time in every run, whichever hosts the ranks run on
    and wherever a run resumes.
    """

    duration: Duration
    seed: int
    phase: StepPhase
    rank: int

    def of_epoch(self, epoch: int, num_steps: int) -> list[int]:
        """Return the nanoseconds of steps 1 to `num_steps`, drawn in advance so that no step waits."""
        if self.duration.law is Distribution.FIXED:
            return [round(self.duration.mean_s * 1e9)] * num_steps
        key = self._make_key()
        return [self._draw_ns(key, epoch, step, 1)[0] for step in range(1, num_steps + 1)]

    def of_batch(self, epoch: int, step: int, num_samples: int) -> tuple[int, ...]:
        """Return the nanoseconds to preprocess each sample of a step's batch; empty without preprocessing."""
        if self.duration.is_zero:
            return ()
        return tuple(self._draw_ns(self._make_key(_PREPROCESSING), epoch, step, num_samples))

    def _make_key(self, *purpose: int) -> NDArray[np.uint64]:
        sequence = np.random.SeedSequence((self.seed, int(self.phase), self.rank, *purpose))
        return sequence.generate_state(4).view(np.uint64)

    def _draw_ns(self, key: NDArray[np.uint64], epoch: int, step: int, num_draws: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, step, epoch]))
        return [round(self.duration.draw(generator) * 1e9) for _ in range(num_draws)]
