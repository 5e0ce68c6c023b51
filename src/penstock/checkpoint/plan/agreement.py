"""How ranks come to one save plan: they tell each other what they hold, or only that it is as before.

The one module of planning that speaks to other ranks. Invariant: a plan is used again only for the very same
names, dtypes, shapes, boxes and options on all ranks, and only if every rank still has it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from penstock.checkpoint.plan.objects import place_objects
from penstock.checkpoint.plan.saving import rank_plans, share_saving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.pieces import Boxes, TensorFacts
    from penstock.checkpoint.plan.records import (
        Held,
        HeldObject,
        PlacedObject,
        SaveOptions,
        SavePlan,
        SharedSavePlan,
    )
    from penstock.cluster.comm import Comm

NUM_KEPT_PLANS = 4
"""A trainer saves its model alone and with the optimizer; more kinds of state than this are planned anew."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgreedSave:
    """What all ranks will write, as every rank knows it."""

    shared: SharedSavePlan
    objects: tuple[tuple[PlacedObject, ...], ...]
    """By rank."""
    options: SaveOptions

    def plan_of(self, rank: int) -> SavePlan:
        """What one rank writes."""
        return rank_plans(self.shared, self.objects, self.options, only=rank)[0]

    def plans(self) -> list[SavePlan]:
        """What each rank writes, in rank order: for rank 0, which describes the whole checkpoint."""
        return rank_plans(self.shared, self.objects, self.options)


@dataclass(frozen=True, slots=True)
class _Outline:
    """What each rank always sends: digests, and its objects, which change from step to step."""

    tensors: bytes
    held: bytes
    objects: tuple[HeldObject, ...]
    known: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """What each rank sends where a plan is to be made. Of equal lists of tensors only the first travels."""

    tensors: tuple[TensorFacts, ...] | None
    boxes: Boxes


class Planner:
    """Plans saves of one communicator's ranks, and remembers the last few plans."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._plans: OrderedDict[bytes, SharedSavePlan] = OrderedDict()
        self.num_planned = 0
        """How often a plan had to be made; for figures and tests."""

    def agree(self, held: Held, options: SaveOptions) -> AgreedSave:
        """Collective: the plan for what all ranks hold. Raises the same on all ranks."""
        table = _digest_tensors(held.tensors)
        mine = _Outline(table, _digest_boxes(table, held.boxes, options), held.objects, tuple(self._plans))
        outlines = self._comm.gather(mine, awaiting="all ranks to say what they hold")
        objects = tuple(tuple(each) for each in place_objects([each.objects for each in outlines]))
        key = xxhash.xxh3_128_digest(b"".join(each.held for each in outlines))
        if all(key in each.known for each in outlines):
            self._plans.move_to_end(key)
            return AgreedSave(shared=self._plans[key], objects=objects, options=options)
        shared = share_saving(self._exchange(held, outlines), options)
        self.num_planned += 1
        self._plans[key] = shared
        while len(self._plans) > NUM_KEPT_PLANS:
            self._plans.popitem(last=False)
        return AgreedSave(shared=shared, objects=objects, options=options)

    def _exchange(self, held: Held, outlines: Sequence[_Outline]) -> list[Held]:
        first = {each.tensors: rank for rank, each in reversed(list(enumerate(outlines)))}
        speaks = first[outlines[self._comm.rank].tensors] == self._comm.rank
        whole = _Whole(held.tensors if speaks else None, held.boxes)
        wholes = self._comm.gather(whole, awaiting="all ranks to say what they hold, piece by piece")
        found = []
        for outline, each in zip(outlines, wholes, strict=True):
            tensors = wholes[first[outline.tensors]].tensors
            assert tensors is not None, "the first rank with a list of tensors sends it"
            found.append(replace(held, tensors=tensors, boxes=each.boxes, objects=()))
        return found


def _digest_tensors(tensors: Sequence[TensorFacts]) -> bytes:
    lines = (f"{each.name}\0{each.dtype}\0{each.shape}\0{each.item_bytes}\0" for each in tensors)
    return xxhash.xxh3_128_digest("".join(lines).encode())


def _digest_boxes(table: bytes, boxes: Boxes, options: SaveOptions) -> bytes:
    digest = xxhash.xxh3_128(table)
    digest.update(repr(options).encode())
    for column in (boxes.tensor, boxes.offsets, boxes.sizes):
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()
