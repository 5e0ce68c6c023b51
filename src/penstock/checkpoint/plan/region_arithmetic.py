"""Arithmetic on columns of regions: equal rows, intersections, and fair division among ranks.

Works on millions of regions at once, without Python loops over rows. Invariant: results depend on the rows
alone, never on hashing order, so all ranks derive the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.state.regions import Ints, Regions

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


def region_table(regions: Regions) -> Ints:
    """Boxes as the rows of one table."""
    return np.concatenate([regions.tensor[:, None], regions.offsets, regions.sizes], axis=1)


def group_equal_rows(table: Ints) -> Groups:
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
        keys = scramble(keys + column.astype(np.uint64))
    return keys


def scramble(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number turned into one that looks random, one to one (the finaliser of splitmix64)."""
    keys = keys + _ODD
    for shift, factor in _MIXERS:
        keys = (keys ^ (keys >> shift)) * factor
    return keys ^ (keys >> np.uint64(31))


def expand_ranges(starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
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


def find_rank_sets(group: Ints, rank: Ints, num_groups: int) -> RankSets:
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
    once = scramble(rank.astype(np.uint64))
    for column, values in enumerate((once, scramble(once))):
        totals = np.add.reduceat(values, starts) if num_groups else values
        sums[:, column] = totals.view(np.int64)
    sums[:, 2] = size
    sets = group_equal_rows(sums)
    set_size = size[sets.first]
    _, rows = expand_ranges(starts[sets.first], set_size)
    return RankSets(sets.number, np.cumsum(set_size) - set_size, set_size, rank[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """`regions` is what row `left` of the one list and row `right` of the other have in common."""

    left: Ints
    right: Ints
    regions: Regions


def are_disjoint(regions: Regions) -> bool:
    """Whether no two boxes meet, told at a glance; False: `find_overlaps` has to look closer."""
    regions = regions.take(np.flatnonzero((regions.sizes > 0).all(axis=1)))
    if not len(regions):
        return True
    begin, end, _, _ = _along_best_dimension(regions, regions)
    axis = _dense_tensors(regions)[regions.tensor] * (int(end.max()) + 1)
    order = np.argsort(axis + begin, kind="stable")
    begins, ends = (axis + begin)[order], (axis + end)[order]
    # Neighbours that do not meet have ends in order, so nobody behind them is met either.
    return bool((ends[:-1] <= begins[1:]).all())


def find_overlaps(left: Regions, right: Regions) -> Overlaps:
    """All intersections, ordered by `left`, then `right`; both count in the same tensors.

    Looks along one dimension of each tensor, the one with most different beginnings in `right`: there a
    binary search leaves few candidates. A plane of boxes of width one sees each other, no more.
    """
    width = max(left.num_dims, right.num_dims)
    left, right = left.widened(width), right.widened(width)
    full = [np.flatnonzero((regions.sizes > 0).all(axis=1)) for regions in (left, right)]
    wanted, there = left.take(full[0]), right.take(full[1])
    if not len(wanted) or not len(there):
        none = np.zeros(0, dtype=np.int64)
        return Overlaps(none, none, left.take(none))
    first, last, order = _candidates(wanted, there)
    rows_left, rows_there = expand_ranges(first, np.maximum(last - first, 0))
    rows_right = order[rows_there]
    begin = np.maximum(wanted.offsets[rows_left], there.offsets[rows_right])
    end = np.minimum(
        wanted.offsets[rows_left] + wanted.sizes[rows_left],
        there.offsets[rows_right] + there.sizes[rows_right],
    )
    real = (end > begin).all(axis=1)
    rows_left, rows_right = rows_left[real], rows_right[real]
    common = Regions(wanted.tensor[rows_left], begin[real], (end - begin)[real])
    in_order = np.lexsort((rows_right, rows_left))
    return Overlaps(full[0][rows_left][in_order], full[1][rows_right][in_order], common.take(in_order))


def _candidates(wanted: Regions, there: Regions) -> tuple[Ints, Ints, Ints]:
    """For each wanted box the places in `order` (rows of `there`) from first to last that it may meet."""
    begin, end, begin_wanted, end_wanted = _along_best_dimension(wanted, there)
    # Tensors are laid end to end on one axis, so that one sorted column serves all of them.
    span = max(int(end.max(initial=0)), int(end_wanted.max(initial=0))) + 1
    number = _dense_tensors(wanted, there)
    base, base_wanted = number[there.tensor] * span, number[wanted.tensor] * span
    order = np.argsort(base + begin, kind="stable")
    starts = (base + begin)[order]
    # Boxes may be nested in this one dimension: the furthest end so far is sorted, ends need not be.
    reach = np.maximum.accumulate((base + end)[order])
    first = np.searchsorted(reach, base_wanted + begin_wanted, side="right")
    last = np.searchsorted(starts, base_wanted + end_wanted, side="left")
    return first, last, order


def _dense_tensors(*parts: Regions) -> Ints:
    """A small number for each tensor that occurs, so that axis positions stay within 64 bits."""
    num_tensors = 1 + max(int(part.tensor.max()) for part in parts)
    occurs = sum(np.bincount(part.tensor, minlength=num_tensors) for part in parts) > 0
    return np.cumsum(occurs) - 1


def _along_best_dimension(wanted: Regions, there: Regions) -> tuple[Ints, Ints, Ints, Ints]:
    if there.num_dims == 0:
        zeros, ones = np.zeros(len(there), dtype=np.int64), np.ones(len(there), dtype=np.int64)
        zeros_wanted = np.zeros(len(wanted), dtype=np.int64)
        return zeros, ones, zeros_wanted, zeros_wanted + 1
    num_tensors = int(max(wanted.tensor.max(), there.tensor.max())) + 1
    best = np.argmax(
        [_num_beginnings(there.tensor, column, num_tensors) for column in there.offsets.T], axis=0
    )
    found = []
    for regions in (there, wanted):
        dim = best[regions.tensor][:, None]
        begin = np.take_along_axis(regions.offsets, dim, axis=1)[:, 0]
        found += [begin, begin + np.take_along_axis(regions.sizes, dim, axis=1)[:, 0]]
    return found[0], found[1], found[2], found[3]


def _num_beginnings(tensor: Ints, offset: Ints, num_tensors: int) -> Ints:
    """How many different offsets each tensor has."""
    if not offset.any():
        return np.minimum(np.bincount(tensor, minlength=num_tensors), 1)
    order = np.lexsort((offset, tensor))
    tensor, offset = tensor[order], offset[order]
    is_new = np.ones(len(tensor), dtype=np.bool_)
    is_new[1:] = (tensor[1:] != tensor[:-1]) | (offset[1:] != offset[:-1])
    return np.bincount(tensor[is_new], minlength=num_tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """How boxes can be cut and stay contiguous in memory: along the first dimension that is longer than 1."""

    dim: Ints
    count: Ints
    num_bytes: Ints
    """Of one row."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionShares:
    """Parts of boxes with the rank that has each to its share, in the order of the boxes."""

    source: Ints
    """The box that a part was cut from."""
    regions: Regions
    rank: Ints


def find_rows(regions: Regions, item_bytes: Ints) -> Rows:
    """What rows each box has; 0-d and one-element boxes are one row."""
    if regions.num_dims == 0:
        ones = np.ones(len(regions), dtype=np.int64)
        return Rows(ones * 0, ones, item_bytes[regions.tensor])
    dim = np.argmax(regions.sizes != 1, axis=1).astype(np.int64)
    count = np.take_along_axis(regions.sizes, dim[:, None], axis=1)[:, 0]
    num_bytes = regions.num_bytes(item_bytes) // np.maximum(count, 1)
    return Rows(dim, count, num_bytes)


def divide_among_ranks(
    regions: Regions, item_bytes: Ints, sets: RankSets, num_ranks: int, *, min_cut_bytes: int
) -> RegionShares:
    """Divide each box among the ranks of its set, so that all ranks end with as equal loads as can be.

    `sets.of_group` is row by row beside `regions`. A box below twice `min_cut_bytes` stays whole.
    """
    order = np.argsort(sets.of_group, kind="stable")
    regions = regions.take(order)
    set_of_box = sets.of_group[order]
    rows = find_rows(regions, item_bytes)
    num_bytes = rows.count * rows.num_bytes
    ends = np.cumsum(num_bytes)
    line = _Axis(set_of_box, ends - num_bytes, ends, rows, min_cut_bytes)
    cut_set, position = _fair_cuts(set_of_box, num_bytes, sets, num_ranks)
    source, begin, end, owner = _cut(line, cut_set, position, sets)
    shares = RegionShares(
        order[source], slice_rows(regions.take(source), rows.dim[source], begin, end), owner
    )
    back = np.argsort(shares.source, kind="stable")
    return RegionShares(shares.source[back], shares.regions.take(back), shares.rank[back])


def slice_rows(regions: Regions, dim: Ints, begin: Ints, end: Ints) -> Regions:
    """Rows `begin` to `end` of each box, counted along its dimension `dim` from the box's own corner."""
    if regions.num_dims == 0:
        return regions
    offsets, sizes = regions.offsets.copy(), regions.sizes.copy()
    at = np.arange(len(regions))
    offsets[at, dim] += begin
    sizes[at, dim] = end - begin
    return Regions(regions.tensor, offsets, sizes)


def split_large(regions: Regions, item_bytes: Ints, limit_bytes: int) -> tuple[Ints, Regions]:
    """Cut boxes into contiguous parts of at most `limit_bytes`, and say which box each part is of.

    Parts are in the order of the boxes, and of memory in each.
    """
    source = np.arange(len(regions))
    for _ in range(regions.num_dims):
        rows = find_rows(regions, item_bytes)
        step = np.maximum(limit_bytes // np.maximum(rows.num_bytes, 1), 1)
        count = -(-rows.count // step)
        if (count <= 1).all():
            break
        owner, number = expand_ranges(np.zeros(len(count), dtype=np.int64), np.maximum(count, 1))
        begin = number * step[owner]
        end = np.minimum(begin + step[owner], rows.count[owner])
        source, regions = source[owner], slice_rows(regions.take(owner), rows.dim[owner], begin, end)
    return source, regions


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """Boxes end to end, those of one set side by side."""

    set_of_box: Ints
    start: Ints
    end: Ints
    rows: Rows
    min_cut_bytes: int


def _fair_cuts(set_of_box: Ints, num_bytes: Ints, sets: RankSets, num_ranks: int) -> tuple[Ints, Ints]:
    """Where to cut, in bytes on the whole line: for each set one position fewer than it has members.

    Small sets are dealt first: what only few ranks can take decides how much they take of the rest.
    """
    total = np.bincount(set_of_box, weights=num_bytes, minlength=len(sets)).astype(np.int64)
    set_start = np.cumsum(total) - total
    load = np.zeros(num_ranks, dtype=np.int64)
    alone = sets.size == 1
    np.add.at(load, sets.members[sets.start[alone]], total[alone])
    shared = np.flatnonzero(~alone)
    cuts: dict[int, Ints] = {}
    for number in shared[np.lexsort((shared, sets.size[shared]))]:
        ranks = sets.ranks(number)
        share = level_loads(load[ranks], int(total[number]))
        load[ranks] += share
        cuts[int(number)] = set_start[number] + np.cumsum(share)[:-1]
    if not cuts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    cut_set = np.repeat(shared, sets.size[shared] - 1)
    return cut_set, np.concatenate([cuts[int(number)] for number in shared])


def level_loads(load: Ints, amount: int) -> Ints:
    """How to pour `amount` onto `load` so that the highest ends as low as can be; the parts sum to it."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    count = np.arange(1, len(load) + 1)
    # Filling the k lowest up to the k-th costs this much; the last k that `amount` pays for are filled.
    cost = sorted_load * count - np.cumsum(sorted_load)
    k = int(np.searchsorted(cost, amount, side="right"))
    surface, rest = divmod(amount + int(sorted_load[:k].sum()), k)
    share = np.zeros(len(load), dtype=np.int64)
    share[order[:k]] = surface - sorted_load[:k]
    share[order[:rest]] += 1
    return share


def _cut(line: _Axis, cut_set: Ints, position: Ints, sets: RankSets) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut at the row nearest to each position: box, first and end row, and owner of each part."""
    rows = line.rows
    region, row = _nearest_rows(line, position)
    position = line.start[region] + row * rows.num_bytes[region] if len(region) else position
    inside = (row > 0) & (row < rows.count[region])
    unique = np.unique(np.stack([region[inside], row[inside]], axis=1), axis=0)
    num_parts = 1 + np.bincount(unique[:, 0], minlength=len(line.start))
    source, part = expand_ranges(np.zeros(len(num_parts), dtype=np.int64), num_parts)
    begin = np.zeros(len(source), dtype=np.int64)
    begin[part > 0] = unique[:, 1]
    end = rows.count[source]
    end[:-1][part[1:] > 0] = begin[1:][part[1:] > 0]

    # A part belongs to as many members further as there are cuts of its set at or before its beginning.
    cuts_before_set = np.searchsorted(cut_set, np.arange(len(sets)))
    set_of_part = line.set_of_box[source]
    share = np.searchsorted(position, line.start[source] + begin * rows.num_bytes[source], side="right")
    share = np.clip(share - cuts_before_set[set_of_part], 0, sets.size[set_of_part] - 1)
    return source, begin, end, sets.members[sets.start[set_of_part] + share]


def _nearest_rows(line: _Axis, position: Ints) -> tuple[Ints, Ints]:
    region = np.searchsorted(line.end, position, side="right")
    region = np.minimum(region, len(line.end) - 1)
    size, row_bytes = line.end[region] - line.start[region], np.maximum(line.rows.num_bytes[region], 1)
    within = position - line.start[region]
    row = (within + row_bytes // 2) // row_bytes
    # A part that would be too small to be worth an item of its own stays with its neighbour.
    small = np.minimum(row * row_bytes, size - row * row_bytes) < line.min_cut_bytes
    row[small] = np.where(within * 2 < size, 0, line.rows.count[region])[small]
    return region, row
