"""A keyed bijection of [0, size): shuffles any number of items without ever holding them.

The order of an epoch is one of these. Pure; the same on any machine, and for any part of the positions.
Invariant: O(1) memory, and every item exactly once.

An item is a cell of a grid of a rows, an even number of at least sqrt(size), and b = ceil(size / a) columns:
row * b + column. Rounds alternate: row += f(column) mod a, column += f(row) mod b, where f(y) = high(y + the
round's key) * a (or b) >> 32, and high is the upper half of y after two xor-shifts and multiplications. A
round can be undone, so they are a bijection of the grid; what leaves [0, size) goes through it again until it
is back. The even number matters: if both were odd, only half of all permutations could ever come up.
"""

import math
from hashlib import shake_256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError

Positions = NDArray[np.int64]

MAX_SIZE: Final = 2**62

_FEW_ITEMS: Final = 1024
_ROUNDS: Final = 8
_ROUNDS_OF_FEW: Final = 32
"""A small grid mixes less in a round; with this many, all orders of few items are equally likely."""

_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB
_STEP_ITEMS: Final = 1 << 15
"""Positions evaluated at once: their temporaries stay in the cache of a core."""


class Permutation:
    """A bijection of [0, `size`), another one for each `identity`."""

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
        """The items at these positions, which may come in any order."""
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
    """One round, in place: `turned` moves on by f(`by`), modulo `size`."""
    number = by + np.uint64(key)
    number ^= number >> np.uint64(30)
    number *= np.uint64(_FIRST_FACTOR)
    number ^= number >> np.uint64(27)
    number *= np.uint64(_SECOND_FACTOR)
    number >>= np.uint64(32)
    number *= size
    number >>= np.uint64(32)
    turned += number
    # Below zero wraps to huge, so the smaller one is the remainder: no branch, no division.
    np.minimum(turned, turned - size, out=turned)
