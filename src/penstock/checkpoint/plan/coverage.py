"""Whether boxes make up their tensors: every element once, none outside.

Asked of what ranks are about to save, and of what a checkpoint says it holds. Invariant: boxes that pass are
a partition of every tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.plan.overlaps import lie_apart, overlaps
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.pieces import Boxes, Ints, TensorFacts


class NotCovered(PenstockError):
    """Boxes do not make up their tensor; `tensor` is its name."""

    tensor: str


def check_coverage(tensors: Sequence[TensorFacts], boxes: Boxes, *, where: str) -> None:
    """Raise `NotCovered` for the first tensor with a box out of bounds, two that overlap, or a gap.

    `where` says what the boxes are of: "the checkpoint at ...", "what the ranks hold".
    """
    _check_bounds(tensors, boxes, where)
    shapes = [np.prod(facts.shape, dtype=np.int64) for facts in tensors]
    expected = np.array(shapes, dtype=np.int64)
    covered = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(covered, boxes.tensor, boxes.num_elements)
    _check_apart(tensors, boxes, where)
    short = np.flatnonzero(covered != expected)
    if len(short):
        name = tensors[short[0]].name
        missing = int(expected[short[0]] - covered[short[0]])
        raise NotCovered(
            f"{missing} elements of {name!r} {list(tensors[short[0]].shape)} belong to no piece",
            where=where,
            fix="Let every rank that holds a part of it take part, with the same mesh and placements.",
            tensor=name,
        )


def _check_bounds(tensors: Sequence[TensorFacts], boxes: Boxes, where: str) -> None:
    width = max((len(facts.shape) for facts in tensors), default=0)
    boxes = boxes.widened(max(width, boxes.num_dims))
    limits = _padded_shapes(tensors, boxes.num_dims)
    outside = (boxes.offsets < 0) | (boxes.sizes < 0) | (boxes.offsets + boxes.sizes > limits[boxes.tensor])
    rows = np.flatnonzero(outside.any(axis=1))
    if len(rows):
        facts = tensors[boxes.tensor[rows[0]]]
        offsets, sizes = boxes.box(int(rows[0]), len(facts.shape))
        raise NotCovered(
            f"A piece of {facts.name!r} at {list(offsets)} of {list(sizes)} leaves its shape"
            f" {list(facts.shape)}",
            where=where,
            fix="Give the tensor its true global shape on all ranks.",
            tensor=facts.name,
        )


def _padded_shapes(tensors: Sequence[TensorFacts], num_dims: int) -> Ints:
    limits = np.ones((len(tensors), num_dims), dtype=np.int64)
    for row, facts in enumerate(tensors):
        limits[row, : len(facts.shape)] = facts.shape
    return limits


def _check_apart(tensors: Sequence[TensorFacts], boxes: Boxes, where: str) -> None:
    if lie_apart(boxes):
        return
    met = overlaps(boxes, boxes)
    twice = np.flatnonzero(met.left != met.right)
    if len(twice):
        row, other = int(met.left[twice[0]]), int(met.right[twice[0]])
        facts = tensors[boxes.tensor[row]]
        pieces = " and ".join(
            f"{list(offsets)} of {list(sizes)}"
            for offsets, sizes in (boxes.box(each, len(facts.shape)) for each in (row, other))
        )
        raise NotCovered(
            f"Pieces of {facts.name!r} overlap: {pieces}",
            where=where,
            fix="Give each rank's piece its own place; replicas must hold equal boxes.",
            tensor=facts.name,
        )
