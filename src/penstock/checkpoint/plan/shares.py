"""One line of shared bytes, cut into shares: how replicas divide what all of them hold, or all of them want.

Saving and loading plan with it alike. Boxes that the same ranks share lie end to end on that set's line; each
member takes a stretch. Invariant: the shares of a line cover it without gap or overlap, in whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.pieces import Boxes
from penstock.checkpoint.plan.columns import ranges

if TYPE_CHECKING:
    from penstock.checkpoint.pieces import Ints
    from penstock.checkpoint.plan.columns import RankSets


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """How boxes can be cut and stay contiguous in memory: along the first dimension that is longer than 1."""

    dim: Ints
    count: Ints
    num_bytes: Ints
    """Of one row."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Parts of boxes with the rank that has each to its share, in the order of the boxes."""

    source: Ints
    """The box that a part was cut from."""
    boxes: Boxes
    rank: Ints


def rows_of(boxes: Boxes, item_bytes: Ints) -> Rows:
    """What rows each box has; 0-d and one-element boxes are one row."""
    if boxes.num_dims == 0:
        ones = np.ones(len(boxes), dtype=np.int64)
        return Rows(ones * 0, ones, item_bytes[boxes.tensor])
    dim = np.argmax(boxes.sizes != 1, axis=1).astype(np.int64)
    count = np.take_along_axis(boxes.sizes, dim[:, None], axis=1)[:, 0]
    num_bytes = boxes.num_bytes(item_bytes) // np.maximum(count, 1)
    return Rows(dim, count, num_bytes)


def share_out(
    boxes: Boxes, item_bytes: Ints, sets: RankSets, num_ranks: int, *, min_cut_bytes: int
) -> Shares:
    """Divide each box among the ranks of its set, so that all ranks end with as equal loads as can be.

    `sets.of_group` is row by row beside `boxes`. A box below twice `min_cut_bytes` stays whole.
    """
    order = np.argsort(sets.of_group, kind="stable")
    boxes = boxes.take(order)
    set_of_box = sets.of_group[order]
    rows = rows_of(boxes, item_bytes)
    num_bytes = rows.count * rows.num_bytes
    ends = np.cumsum(num_bytes)
    line = _Line(set_of_box, ends - num_bytes, ends, rows, min_cut_bytes)
    cut_set, position = _fair_cuts(set_of_box, num_bytes, sets, num_ranks)
    source, begin, end, owner = _cut(line, cut_set, position, sets)
    shares = Shares(order[source], part_of_rows(boxes.take(source), rows.dim[source], begin, end), owner)
    back = np.argsort(shares.source, kind="stable")
    return Shares(shares.source[back], shares.boxes.take(back), shares.rank[back])


def part_of_rows(boxes: Boxes, dim: Ints, begin: Ints, end: Ints) -> Boxes:
    """Rows `begin` to `end` of each box, counted along its dimension `dim` from the box's own corner."""
    if boxes.num_dims == 0:
        return boxes
    offsets, sizes = boxes.offsets.copy(), boxes.sizes.copy()
    at = np.arange(len(boxes))
    offsets[at, dim] += begin
    sizes[at, dim] = end - begin
    return Boxes(boxes.tensor, offsets, sizes)


def split_large(boxes: Boxes, item_bytes: Ints, limit_bytes: int) -> tuple[Ints, Boxes]:
    """Cut boxes into contiguous parts of at most `limit_bytes`, and say which box each part is of.

    Parts are in the order of the boxes, and of memory in each.
    """
    source = np.arange(len(boxes))
    for _ in range(boxes.num_dims):
        rows = rows_of(boxes, item_bytes)
        step = np.maximum(limit_bytes // np.maximum(rows.num_bytes, 1), 1)
        count = -(-rows.count // step)
        if (count <= 1).all():
            break
        owner, number = ranges(np.zeros(len(count), dtype=np.int64), np.maximum(count, 1))
        begin = number * step[owner]
        end = np.minimum(begin + step[owner], rows.count[owner])
        source, boxes = source[owner], part_of_rows(boxes.take(owner), rows.dim[owner], begin, end)
    return source, boxes


@dataclass(frozen=True, slots=True, eq=False)
class _Line:
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
        share = level(load[ranks], int(total[number]))
        load[ranks] += share
        cuts[int(number)] = set_start[number] + np.cumsum(share)[:-1]
    if not cuts:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    cut_set = np.repeat(shared, sets.size[shared] - 1)
    return cut_set, np.concatenate([cuts[int(number)] for number in shared])


def level(load: Ints, amount: int) -> Ints:
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


def _cut(line: _Line, cut_set: Ints, position: Ints, sets: RankSets) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut at the row nearest to each position: box, first and end row, and owner of each part."""
    rows = line.rows
    box, row = _nearest_rows(line, position)
    position = line.start[box] + row * rows.num_bytes[box] if len(box) else position
    inside = (row > 0) & (row < rows.count[box])
    unique = np.unique(np.stack([box[inside], row[inside]], axis=1), axis=0)
    num_parts = 1 + np.bincount(unique[:, 0], minlength=len(line.start))
    source, part = ranges(np.zeros(len(num_parts), dtype=np.int64), num_parts)
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


def _nearest_rows(line: _Line, position: Ints) -> tuple[Ints, Ints]:
    box = np.searchsorted(line.end, position, side="right")
    box = np.minimum(box, len(line.end) - 1)
    size, row_bytes = line.end[box] - line.start[box], np.maximum(line.rows.num_bytes[box], 1)
    within = position - line.start[box]
    row = (within + row_bytes // 2) // row_bytes
    # A part that would be too small to be worth an item of its own stays with its neighbour.
    small = np.minimum(row * row_bytes, size - row * row_bytes) < line.min_cut_bytes
    row[small] = np.where(within * 2 < size, 0, line.rows.count[box])[small]
    return box, row
