"""Which rank writes which bytes, from what all ranks hold: replicas share the work, no byte is written twice.

Pure: every rank calls `plan_save` with the same argument and derives the same plan. Invariant: together the
ranks write every element of every tensor, or `NotCovered` says which are missing.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.checkpoint.plan.region_arithmetic import (
    are_disjoint,
    divide_among_ranks,
    find_overlaps,
    find_rank_sets,
    group_equal_rows,
    region_table,
)
from penstock.checkpoint.state.regions import Ints, Regions, TensorFacts, element_sizes
from penstock.errors import PenstockError, UsageError


class NotCovered(PenstockError):
    """Boxes do not make up their tensor; `tensor` is its name."""

    tensor: str


def check_coverage(tensors: Sequence[TensorFacts], regions: Regions, *, where: str) -> None:
    """Raise `NotCovered` for the first tensor with a box out of bounds, two that overlap, or a gap.

    `where` says what the boxes are of: "the checkpoint at ...", "what the ranks hold".
    """
    _check_bounds(tensors, regions, where)
    shapes = [np.prod(facts.shape, dtype=np.int64) for facts in tensors]
    expected = np.array(shapes, dtype=np.int64)
    covered = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(covered, regions.tensor, regions.num_elements)
    _check_apart(tensors, regions, where)
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


def _check_bounds(tensors: Sequence[TensorFacts], regions: Regions, where: str) -> None:
    width = max((len(facts.shape) for facts in tensors), default=0)
    regions = regions.widened(max(width, regions.num_dims))
    limits = _padded_shapes(tensors, regions.num_dims)
    outside = (
        (regions.offsets < 0)
        | (regions.sizes < 0)
        | (regions.offsets + regions.sizes > limits[regions.tensor])
    )
    rows = np.flatnonzero(outside.any(axis=1))
    if len(rows):
        facts = tensors[regions.tensor[rows[0]]]
        offsets, sizes = regions.region(int(rows[0]), len(facts.shape))
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


def _check_apart(tensors: Sequence[TensorFacts], regions: Regions, where: str) -> None:
    if are_disjoint(regions):
        return
    met = find_overlaps(regions, regions)
    twice = np.flatnonzero(met.left != met.right)
    if len(twice):
        row, other = int(met.left[twice[0]]), int(met.right[twice[0]])
        facts = tensors[regions.tensor[row]]
        pieces = " and ".join(
            f"{list(offsets)} of {list(sizes)}"
            for offsets, sizes in (regions.region(each, len(facts.shape)) for each in (row, other))
        )
        raise NotCovered(
            f"Pieces of {facts.name!r} overlap: {pieces}",
            where=where,
            fix="Give each rank's piece its own place; replicas must hold equal boxes.",
            tensor=facts.name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObject:
    """A leaf that is no tensor: its name, and what tells whether other ranks hold the same."""

    name: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What one rank holds of a state: `regions` count in its own `tensors`. Replicas hold equal boxes."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    objects: tuple[HeldObject, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a user may ask of a save plan."""

    writers: int = 2
    """Files of each rank, written side by side."""
    separation_hint: str | None = None
    """Names that begin with it go to files of their own, which begin with it, too."""
    min_cut_bytes: int = 64 * 1024
    """A replicated box below twice this size is written whole by one rank."""

    def __post_init__(self) -> None:
        if self.writers < 1:
            raise UsageError(f"writers={self.writers} can write nothing", fix="Give at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedObject:
    """An object that this rank writes: `name` is the leaf's, `stored_name` the checkpoint's.

    They differ where ranks hold different objects under one name: see `plan.objects`.
    """

    name: str
    stored_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One file of one rank: its objects first, then its boxes, in this order. There are no empty ones."""

    file: str
    objects: tuple[PlacedObject, ...]
    regions: Regions
    """Count in the plan's `tensors`. A box may be a part of one that the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one rank writes. `tensors` are all of the job, the same on every rank."""

    rank: int
    tensors: tuple[TensorFacts, ...]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes of tensors; envelopes and objects come on top."""
        items = element_sizes(self.tensors)
        return sum(int(bucket.regions.num_bytes(items).sum()) for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSavePlan:
    """What all ranks write: row by row a box and the rank that writes it; every byte exactly once."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    rank: Ints
    num_ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class MergedHoldings:
    """Boxes of all ranks in common tensor numbers, with the rank that holds each."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    rank: Ints


def merge_holdings(holdings: Sequence[Holdings]) -> MergedHoldings:
    """Number the tensors of all ranks together, in the order of their first appearance.

    Raises `UsageError` where two ranks give one name different dtypes or shapes.
    """
    numbers: dict[str, int] = {}
    tensors: list[TensorFacts] = []
    first_rank: list[int] = []
    known: dict[int, Ints] = {}
    parts = []
    for rank, each in enumerate(holdings):
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
        parts.append(Regions(common[each.regions.tensor], each.regions.offsets, each.regions.sizes))
    ranks = np.repeat(np.arange(len(holdings)), [len(each.regions) for each in holdings])
    return MergedHoldings(tuple(tensors), Regions.concatenated(parts), ranks)


def _disagreement(one: TensorFacts, one_rank: int, other: TensorFacts, other_rank: int) -> UsageError:
    return UsageError(
        f"Ranks disagree on {one.name!r}: {one.dtype} {list(one.shape)} on rank {one_rank},"
        f" {other.dtype} {list(other.shape)} on rank {other_rank}",
        fix="Give the tensors names of their own, or shard one tensor over the ranks as a DTensor.",
    )


def plan_save(holdings: Sequence[Holdings], options: SaveOptions) -> SharedSavePlan:
    """Decide which rank writes which box, for all ranks; `holdings` is in rank order."""
    merged = merge_holdings(holdings)
    groups = group_equal_rows(region_table(merged.regions))
    unique = merged.regions.take(groups.first)
    check_coverage(merged.tensors, _without_empty_strays(merged.tensors, unique), where="what the ranks hold")
    sets = find_rank_sets(groups.number, merged.rank, len(groups))
    shares = divide_among_ranks(
        unique, element_sizes(merged.tensors), sets, len(holdings), min_cut_bytes=options.min_cut_bytes
    )
    kept = _worth_an_item(merged.tensors, shares.regions)
    return SharedSavePlan(
        tensors=merged.tensors,
        regions=shares.regions.take(kept),
        rank=shares.rank[kept],
        num_ranks=len(holdings),
    )


def _without_empty_strays(tensors: Sequence[TensorFacts], regions: Regions) -> Regions:
    """Boxes without the empty ones of ranks that hold no part of a tensor: those may lie anywhere."""
    return regions.take(_worth_an_item(tensors, regions))


def _worth_an_item(tensors: Sequence[TensorFacts], regions: Regions) -> Ints:
    """Rows to keep: every box with elements, and of an empty tensor one, so that it is on record."""
    is_empty = regions.num_elements == 0
    tensor_is_empty = np.array([0 in facts.shape for facts in tensors], dtype=np.bool_)
    rows = np.arange(len(regions))
    lone = np.zeros(len(regions), dtype=np.bool_)
    candidates = rows[is_empty & tensor_is_empty[regions.tensor]]
    _, first = np.unique(regions.tensor[candidates], return_index=True)
    lone[candidates[first]] = True
    return np.asarray(rows[~is_empty | lone])


def plan_rank_files(
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
    item_bytes = element_sizes(shared.tensors)
    ranks = range(shared.num_ranks) if only is None else (only,)
    order = np.argsort(shared.rank, kind="stable")
    ends = np.searchsorted(shared.rank[order], np.arange(shared.num_ranks + 1))
    plans = []
    for rank in ranks:
        regions = shared.regions.take(order[ends[rank] : ends[rank + 1]])
        mine = objects[rank]
        is_apart = apart[regions.tensor]
        mine_apart = [each for each in mine if hint is not None and each.name.startswith(hint)]
        mine_together = [each for each in mine if each not in mine_apart]
        names = (f"__{rank}_", options.writers)
        buckets = _deal(regions.take(~is_apart), item_bytes, mine_together, names)
        if hint is not None:
            names = (f"{hint}__{rank}_", options.writers)
            buckets += _deal(regions.take(is_apart), item_bytes, mine_apart, names)
        plans.append(SavePlan(rank=rank, tensors=shared.tensors, buckets=buckets))
    return plans


def _deal(
    regions: Regions, item_bytes: Ints, objects: Sequence[PlacedObject], files: tuple[str, int]
) -> tuple[Bucket, ...]:
    """LPT: the load of the fullest file is at most 4/3 of the best possible."""
    prefix, num_files = files
    num_bytes = regions.num_bytes(item_bytes)
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
            objects=tuple(objects[row - len(regions)] for row in rows if row >= len(regions)),
            regions=regions.take(np.array([row for row in rows if row < len(regions)], dtype=np.int64)),
        )
        for number, rows in enumerate(filled)
    )


RANK_MARK = "@rank"
"""Stands in a stored name between the leaf's name and the rank whose object it is: `rng@rank3`."""


def rank_object_name(name: str, rank: int) -> str:
    """What `rank`'s object is stored as where it differs from the common one."""
    return f"{name}{RANK_MARK}{rank}"


def assign_objects(holdings: Sequence[Iterable[HeldObject]]) -> list[list[PlacedObject]]:
    """What each rank writes; `holdings` is in rank order.

    The object of the lowest rank has the plain name, which is what stock readers find. Objects that all
    holders share are written by the holder with the fewest bytes so far; those that differ by their owners.
    """
    holders: dict[str, list[tuple[int, HeldObject]]] = {}
    for rank, objects in enumerate(holdings):
        for each in objects:
            holders.setdefault(each.name, []).append((rank, each))
    load = [0] * len(holdings)
    placed: list[list[PlacedObject]] = [[] for _ in holdings]
    for name, owners in holders.items():
        common = owners[0][1]
        sharers = [rank for rank, each in owners if each.digest == common.digest]
        writes = [(min(sharers, key=lambda rank: load[rank]), name, common.size_bytes)]
        writes += [
            (rank, rank_object_name(name, rank), each.size_bytes)
            for rank, each in owners
            if each.digest != common.digest
        ]
        for rank, stored_name, size_bytes in writes:
            placed[rank].append(PlacedObject(name=name, stored_name=stored_name, size_bytes=size_bytes))
            load[rank] += max(size_bytes, 1)
    return placed


def find_stored_name(name: str, rank: int, stored: Container[str]) -> str | None:
    """Under which of the `stored` names `rank` finds the object of its leaf `name`, if any."""
    own = rank_object_name(name, rank)
    if own in stored:
        return own
    return name if name in stored else None
