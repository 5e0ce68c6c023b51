"""Arithmetic on columns that planners share: equal rows, ranges laid end to end, sets of ranks.

Invariant: results depend on the rows alone, never on hashing order, so all ranks come to the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.checkpoint.pieces import Boxes, Ints

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows sorted into groups of equal ones, numbered in the order of their first rows."""

    first: Ints
    """A row of each group: the earliest."""
    number: Ints
    """The group of each row."""

    def __len__(self) -> int:
        return len(self.first)


def box_table(boxes: Boxes) -> Ints:
    """Boxes as the rows of one table."""
    return np.concatenate([boxes.tensor[:, None], boxes.offsets, boxes.sizes], axis=1)


def equal_rows(table: Ints) -> Groups:
    """Find the rows of `table` that equal each other.

    Sorts one column of hashes in place of all columns; should two different rows ever share a hash, the
    slow way over all columns takes over. Where all hashes differ, so do all rows.
    """
    keys = _mixed(table)
    in_order = np.sort(keys)
    if (in_order[1:] != in_order[:-1]).all():
        rows = np.arange(len(table))
        return Groups(rows, rows)
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    if (table[first][number] != table).any():
        _, first, number = np.unique(table, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    renumbered = np.empty(len(first), dtype=np.int64)
    renumbered[order] = np.arange(len(first))
    return Groups(first[order], renumbered[number.reshape(-1)])


def _mixed(table: Ints) -> NDArray[np.uint64]:
    keys = np.zeros(len(table), dtype=np.uint64)
    for column in table.T:
        keys = scrambled(keys + column.astype(np.uint64))
    return keys


def scrambled(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number turned into one that looks random, one to one (the finaliser of splitmix64)."""
    keys = keys + _ODD
    for shift, factor in _MIXERS:
        keys = (keys ^ (keys >> shift)) * factor
    return keys ^ (keys >> np.uint64(31))


def ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """The whole numbers of ranges, end to end: which range each belongs to, and the number itself."""
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    return owner, starts[owner] + within


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """Which ranks belong to each of some groups: `of_group` numbers sets, whose members are listed once."""

    of_group: Ints
    start: Ints
    size: Ints
    members: Ints

    def __len__(self) -> int:
        return len(self.size)

    def ranks(self, number: int) -> Ints:
        """The members of one set, ascending."""
        begin = self.start[number]
        return self.members[begin : begin + self.size[number]]


def rank_sets(group: Ints, rank: Ints, num_groups: int) -> RankSets:
    """The set of ranks of each group, from (group, rank) pairs in any order, repeats allowed.

    Every group has a pair. Sets are told apart by a 128-bit sum over their members: two different ones of a
    million sets would share it with a probability of 10^-27.
    """
    span = int(rank.max()) + 1 if len(rank) else 1
    pairs = np.sort(group * span + rank)
    pairs = pairs[np.append(pairs[1:] != pairs[:-1], True)[: len(pairs)]]
    group, rank = pairs // span, pairs % span
    size = np.bincount(group, minlength=num_groups)
    sums = np.empty((num_groups, 3), dtype=np.int64)
    starts = np.cumsum(size) - size
    once = scrambled(rank.astype(np.uint64))
    for column, values in enumerate((once, scrambled(once))):
        totals = np.add.reduceat(values, starts) if num_groups else values
        sums[:, column] = totals.view(np.int64)
    sums[:, 2] = size
    sets = equal_rows(sums)
    set_size = size[sets.first]
    _, rows = ranges(starts[sets.first], set_size)
    return RankSets(sets.number, np.cumsum(set_size) - set_size, set_size, rank[rows])
