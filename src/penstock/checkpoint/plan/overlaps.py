"""Which boxes of one list meet which of another, for millions of boxes at once.

Loading asks it what to read, saving whether every byte is written exactly once. Invariant: what comes out is
every non-empty intersection, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.pieces import Boxes
from penstock.checkpoint.plan.columns import ranges

if TYPE_CHECKING:
    from penstock.checkpoint.pieces import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """`boxes` is what row `left` of the one list and row `right` of the other have in common."""

    left: Ints
    right: Ints
    boxes: Boxes


def lie_apart(boxes: Boxes) -> bool:
    """Whether no two boxes meet, told at a glance; False: `overlaps` has to look closer."""
    boxes = boxes.take(np.flatnonzero((boxes.sizes > 0).all(axis=1)))
    if not len(boxes):
        return True
    begin, end, _, _ = _along_best_dimension(boxes, boxes)
    axis = _dense_tensors(boxes)[boxes.tensor] * (int(end.max()) + 1)
    order = np.argsort(axis + begin, kind="stable")
    begins, ends = (axis + begin)[order], (axis + end)[order]
    # Neighbours that do not meet have ends in order, so nobody behind them is met either.
    return bool((ends[:-1] <= begins[1:]).all())


def overlaps(left: Boxes, right: Boxes) -> Overlaps:
    """All intersections, ordered by `left`, then `right`; both count in the same tensors.

    Looks along one dimension of each tensor, the one with most different beginnings in `right`: there a
    binary search leaves few candidates. A plane of boxes of width one sees each other, no more.
    """
    width = max(left.num_dims, right.num_dims)
    left, right = left.widened(width), right.widened(width)
    full = [np.flatnonzero((boxes.sizes > 0).all(axis=1)) for boxes in (left, right)]
    wanted, there = left.take(full[0]), right.take(full[1])
    if not len(wanted) or not len(there):
        none = np.zeros(0, dtype=np.int64)
        return Overlaps(none, none, left.take(none))
    first, last, order = _candidates(wanted, there)
    rows_left, rows_there = ranges(first, np.maximum(last - first, 0))
    rows_right = order[rows_there]
    begin = np.maximum(wanted.offsets[rows_left], there.offsets[rows_right])
    end = np.minimum(
        wanted.offsets[rows_left] + wanted.sizes[rows_left],
        there.offsets[rows_right] + there.sizes[rows_right],
    )
    real = (end > begin).all(axis=1)
    rows_left, rows_right = rows_left[real], rows_right[real]
    common = Boxes(wanted.tensor[rows_left], begin[real], (end - begin)[real])
    in_order = np.lexsort((rows_right, rows_left))
    return Overlaps(full[0][rows_left][in_order], full[1][rows_right][in_order], common.take(in_order))


def _candidates(wanted: Boxes, there: Boxes) -> tuple[Ints, Ints, Ints]:
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


def _dense_tensors(*parts: Boxes) -> Ints:
    """A small number for each tensor that occurs, so that axis positions stay within 64 bits."""
    num_tensors = 1 + max(int(part.tensor.max()) for part in parts)
    occurs = sum(np.bincount(part.tensor, minlength=num_tensors) for part in parts) > 0
    return np.cumsum(occurs) - 1


def _along_best_dimension(wanted: Boxes, there: Boxes) -> tuple[Ints, Ints, Ints, Ints]:
    if there.num_dims == 0:
        zeros, ones = np.zeros(len(there), dtype=np.int64), np.ones(len(there), dtype=np.int64)
        zeros_wanted = np.zeros(len(wanted), dtype=np.int64)
        return zeros, ones, zeros_wanted, zeros_wanted + 1
    num_tensors = int(max(wanted.tensor.max(), there.tensor.max())) + 1
    best = np.argmax(
        [_num_beginnings(there.tensor, column, num_tensors) for column in there.offsets.T], axis=0
    )
    found = []
    for boxes in (there, wanted):
        dim = best[boxes.tensor][:, None]
        begin = np.take_along_axis(boxes.offsets, dim, axis=1)[:, 0]
        found += [begin, begin + np.take_along_axis(boxes.sizes, dim, axis=1)[:, 0]]
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
