"""From what all ranks hold to what each writes: replicas divide their common bytes, all bytes once.

Pure; every rank calls `share_saving` with the same argument and takes its own plan out of the result.
Invariant: what the ranks write makes up every tensor, or `NotCovered` says which it does not.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.checkpoint.pieces import Boxes, TensorFacts, item_bytes_of
from penstock.checkpoint.plan.columns import box_table, equal_rows, rank_sets
from penstock.checkpoint.plan.coverage import check_coverage
from penstock.checkpoint.plan.records import Bucket, PlacedObject, SavePlan, SharedSavePlan
from penstock.checkpoint.plan.shares import share_out
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.checkpoint.pieces import Ints
    from penstock.checkpoint.plan.records import Held, SaveOptions


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """Boxes of all ranks in common tensor numbers, with the rank that holds each."""

    tensors: tuple[TensorFacts, ...]
    boxes: Boxes
    rank: Ints


def merge_held(held: Sequence[Held]) -> Merged:
    """Number the tensors of all ranks together, in the order of their first appearance.

    Raises `UsageError` where two ranks give one name different dtypes or shapes.
    """
    numbers: dict[str, int] = {}
    tensors: list[TensorFacts] = []
    first_rank: list[int] = []
    known: dict[int, Ints] = {}
    parts = []
    for rank, each in enumerate(held):
        # Ranks that hold the same names share one tuple after their exchange.
        if id(each.tensors) not in known:
            for facts in each.tensors:
                number = numbers.setdefault(facts.name, len(tensors))
                if number == len(tensors):
                    tensors.append(facts)
                    first_rank.append(rank)
                elif facts != tensors[number]:
                    raise _disagreement(tensors[number], first_rank[number], facts, rank)
            own = [numbers[facts.name] for facts in each.tensors]
            known[id(each.tensors)] = np.array(own, dtype=np.int64)
        common = known[id(each.tensors)]
        parts.append(Boxes(common[each.boxes.tensor], each.boxes.offsets, each.boxes.sizes))
    ranks = np.repeat(np.arange(len(held)), [len(each.boxes) for each in held])
    return Merged(tuple(tensors), Boxes.concatenated(parts), ranks)


def _disagreement(one: TensorFacts, one_rank: int, other: TensorFacts, other_rank: int) -> UsageError:
    return UsageError(
        f"Ranks disagree on {one.name!r}: {one.dtype} {list(one.shape)} on rank {one_rank},"
        f" {other.dtype} {list(other.shape)} on rank {other_rank}",
        fix="Give the tensors names of their own, or shard one tensor over the ranks as a DTensor.",
    )


def share_saving(held: Sequence[Held], options: SaveOptions) -> SharedSavePlan:
    """Decide which rank writes which box, for all ranks; `held` is in rank order."""
    merged = merge_held(held)
    groups = equal_rows(box_table(merged.boxes))
    unique = merged.boxes.take(groups.first)
    check_coverage(merged.tensors, _without_empty_strays(merged.tensors, unique), where="what the ranks hold")
    sets = rank_sets(groups.number, merged.rank, len(groups))
    shares = share_out(
        unique, item_bytes_of(merged.tensors), sets, len(held), min_cut_bytes=options.min_cut_bytes
    )
    kept = _worth_an_item(merged.tensors, shares.boxes)
    return SharedSavePlan(
        tensors=merged.tensors,
        boxes=shares.boxes.take(kept),
        rank=shares.rank[kept],
        num_ranks=len(held),
    )


def _without_empty_strays(tensors: Sequence[TensorFacts], boxes: Boxes) -> Boxes:
    """Boxes without the empty ones of ranks that hold no part of a tensor: those may lie anywhere."""
    return boxes.take(_worth_an_item(tensors, boxes))


def _worth_an_item(tensors: Sequence[TensorFacts], boxes: Boxes) -> Ints:
    """Rows to keep: every box with elements, and of an empty tensor one, so that it is on record."""
    is_empty = boxes.num_elements == 0
    tensor_is_empty = np.array([0 in facts.shape for facts in tensors], dtype=np.bool_)
    rows = np.arange(len(boxes))
    lone = np.zeros(len(boxes), dtype=np.bool_)
    candidates = rows[is_empty & tensor_is_empty[boxes.tensor]]
    _, first = np.unique(boxes.tensor[candidates], return_index=True)
    lone[candidates[first]] = True
    return np.asarray(rows[~is_empty | lone])


def rank_plans(
    shared: SharedSavePlan,
    objects: Sequence[Sequence[PlacedObject]],
    options: SaveOptions,
    *,
    only: int | None = None,
) -> list[SavePlan]:
    """What each rank writes, or `only` one of them, dealt to its files; `objects` is by rank.

    The largest piece goes first, each to the file with the fewest bytes so far.
    """
    hint = options.separation_hint
    begins = [hint is not None and facts.name.startswith(hint) for facts in shared.tensors]
    apart = np.array(begins, dtype=np.bool_)
    item_bytes = item_bytes_of(shared.tensors)
    ranks = range(shared.num_ranks) if only is None else (only,)
    order = np.argsort(shared.rank, kind="stable")
    ends = np.searchsorted(shared.rank[order], np.arange(shared.num_ranks + 1))
    plans = []
    for rank in ranks:
        boxes = shared.boxes.take(order[ends[rank] : ends[rank + 1]])
        mine = objects[rank]
        is_apart = apart[boxes.tensor]
        mine_apart = [each for each in mine if hint is not None and each.name.startswith(hint)]
        mine_together = [each for each in mine if each not in mine_apart]
        names = (f"__{rank}_", options.writers)
        buckets = _deal(boxes.take(~is_apart), item_bytes, mine_together, names)
        if hint is not None:
            names = (f"{hint}__{rank}_", options.writers)
            buckets += _deal(boxes.take(is_apart), item_bytes, mine_apart, names)
        plans.append(SavePlan(rank=rank, tensors=shared.tensors, buckets=buckets))
    return plans


def _deal(
    boxes: Boxes, item_bytes: Ints, objects: Sequence[PlacedObject], files: tuple[str, int]
) -> tuple[Bucket, ...]:
    """LPT: the load of the fullest file is at most 4/3 of the best possible."""
    prefix, num_files = files
    num_bytes = boxes.num_bytes(item_bytes)
    sizes = num_bytes.tolist() + [each.size_bytes for each in objects]
    loads = [(0, number) for number in range(num_files)]
    chosen: list[list[int]] = [[] for _ in loads]
    for row in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        load, number = heapq.heappop(loads)
        chosen[number].append(row)
        # Even nothing counts a little, or all empty tensors would go to one file.
        heapq.heappush(loads, (load + max(sizes[row], 1), number))
    filled = sorted((sorted(rows) for rows in chosen if rows), key=lambda rows: rows[0])
    return tuple(
        Bucket(
            file=f"{prefix}{number}.distcp",
            objects=tuple(objects[row - len(boxes)] for row in rows if row >= len(boxes)),
            boxes=boxes.take(np.array([row for row in rows if row < len(boxes)], dtype=np.int64)),
        )
        for number, rows in enumerate(filled)
    )
