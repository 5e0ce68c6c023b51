"""Plans which rank writes which bytes, from what all ranks hold: replicas share the work.

Pure: `agree` gathers the arguments on rank 0. Invariant: together the ranks write every element of every
tensor exactly once, or `NotCovered` says which are missing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.checkpoint.plan.region_arithmetic import (
    are_disjoint,
    divide_among_ranks,
    find_overlaps,
    find_rank_sets,
    group_equal_rows,
    region_table,
)
from penstock.checkpoint.state.regions import Ints, Regions, TensorFacts, element_sizes, pad_rows
from penstock.errors import PenstockError, UsageError


class NotCovered(PenstockError):
    """Regions do not cover their tensor exactly once; `tensor` is its name."""

    tensor: str


def check_coverage(tensors: Sequence[TensorFacts], regions: Regions, *, where: str) -> None:
    """Raise `NotCovered` for the first tensor with a region out of bounds, an overlap or a gap.

    `where` describes the regions: "the checkpoint at ...", "what the ranks hold".
    """
    _check_bounds(tensors, regions, where)
    expected = np.array([math.prod(facts.shape) for facts in tensors], dtype=np.int64)
    covered = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(covered, regions.tensor, regions.num_elements)
    _check_apart(tensors, regions, where)
    short = np.flatnonzero(covered != expected)
    if len(short):
        name = tensors[short[0]].name
        missing = int(expected[short[0]] - covered[short[0]])
        raise NotCovered(
            f"{missing} elements of {name!r} {list(tensors[short[0]].shape)} belong to no region",
            where=where,
            fix="Let every rank that holds a part of it take part, with the same mesh and placements.",
            tensor=name,
        )


def _check_bounds(tensors: Sequence[TensorFacts], regions: Regions, where: str) -> None:
    limits = pad_rows([facts.shape for facts in tensors], 1, least_width=regions.num_dims)
    regions = regions.widened(limits.shape[1])
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
            f"A region of {facts.name!r} at {list(offsets)} of {list(sizes)} is outside its shape"
            f" {list(facts.shape)}",
            where=where,
            fix="Give the tensor its true global shape on all ranks.",
            tensor=facts.name,
        )


def _check_apart(tensors: Sequence[TensorFacts], regions: Regions, where: str) -> None:
    if are_disjoint(regions):
        return
    overlaps = find_overlaps(regions, regions)
    twice = np.flatnonzero(overlaps.left != overlaps.right)
    if len(twice):
        row, other = int(overlaps.left[twice[0]]), int(overlaps.right[twice[0]])
        facts = tensors[regions.tensor[row]]
        pieces = " and ".join(
            f"{list(offsets)} of {list(sizes)}"
            for offsets, sizes in (regions.region(number, len(facts.shape)) for number in (row, other))
        )
        raise NotCovered(
            f"Regions of {facts.name!r} overlap: {pieces}",
            where=where,
            fix="Give each rank its own region; replicas must hold equal regions.",
            tensor=facts.name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldObject:
    """A leaf that is not a tensor.

    `digest` is of its packed bytes: ranks with equal digests hold the same.
    """

    name: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The holdings of one rank: `regions` of its own `tensors`. Replicas hold equal regions."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    objects: tuple[HeldObject, ...] = ()
    small: tuple[HeldObject, ...] = ()
    """Those of the tensors that may differ from rank to rank, as the states of random generators do."""
    numbering: tuple[HeldObject, ...] = ()
    """By optimizer a digest of its parameters, in the order of the numbers in the names of its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options for planning saves."""

    writers: int = 2
    """Files of each rank that are written in parallel."""
    separation_hint: str | None = None
    """Leaves whose names begin with it go to separate files, whose names begin with it as well."""
    min_cut_bytes: int = 64 * 1024
    """A replicated region below twice this size is written whole by one rank."""

    def __post_init__(self) -> None:
        if self.writers < 1:
            raise UsageError(f"writers={self.writers} is too few", fix="Use at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedObject:
    """An object that a rank writes: `name` is the leaf's, `stored_name` the name in the checkpoint.

    They differ where ranks hold different objects under one name: see `assign_objects`.
    """

    name: str
    stored_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One file of one rank: its objects first, then its regions, in this order.

    Empty buckets are left out.
    """

    file: str
    objects: tuple[PlacedObject, ...]
    regions: Regions
    """Regions of the plan's `tensors`. A region may be a part of one that the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The share of one rank: regions of `tensors`, which may list more than is written."""

    rank: int
    tensors: tuple[TensorFacts, ...]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Payload bytes of tensors, without envelopes and objects."""
        items = element_sizes(self.tensors)
        return sum(int(bucket.regions.num_bytes(items).sum()) for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSavePlan:
    """The shares of all ranks: row by row a region and the rank that writes it; every byte exactly once."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    rank: Ints
    num_ranks: int


@dataclass(frozen=True, slots=True, eq=False)
class MergedHoldings:
    """Regions of all ranks in common tensor numbers, with the rank that holds each."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    rank: Ints


def merge_holdings(holdings: Sequence[Holdings]) -> MergedHoldings:
    """Number the tensors of all ranks in the order of their first appearance.

    Raises `UsageError` where two ranks give one name different dtypes or shapes.
    """
    numbers: dict[str, int] = {}
    tensors: list[TensorFacts] = []
    first_rank: list[int] = []
    known: dict[int, Ints] = {}
    parts = []
    for rank, own in enumerate(holdings):
        # Ranks with the same names share one tuple after the exchange, so each tuple is numbered once.
        if id(own.tensors) not in known:
            for facts in own.tensors:
                number = numbers.setdefault(facts.name, len(tensors))
                if number == len(tensors):
                    tensors.append(facts)
                    first_rank.append(rank)
                elif facts != tensors[number]:
                    raise disagreement(tensors[number], first_rank[number], facts, rank)
            own_numbers = [numbers[facts.name] for facts in own.tensors]
            known[id(own.tensors)] = np.array(own_numbers, dtype=np.int64)
        common = known[id(own.tensors)]
        parts.append(Regions(common[own.regions.tensor], own.regions.offsets, own.regions.sizes))
    ranks = np.repeat(np.arange(len(holdings)), [len(own.regions) for own in holdings])
    return MergedHoldings(tuple(tensors), Regions.concatenated(parts), ranks)


def disagreement(
    one: TensorFacts | HeldObject, one_rank: int, other: TensorFacts | HeldObject, other_rank: int
) -> UsageError:
    """The error of two ranks that give one name different dtypes or shapes, or a tensor and an object."""
    kinds = [
        f"{held.dtype} {list(held.shape)}" if isinstance(held, TensorFacts) else "not a tensor"
        for held in (one, other)
    ]
    return UsageError(
        f"Ranks disagree on {one.name!r}: {kinds[0]} on rank {one_rank}, {kinds[1]} on rank {other_rank}",
        fix="Give them different names, or shard one tensor over the ranks as a DTensor.",
    )


def plan_save(holdings: Sequence[Holdings], options: SaveOptions) -> SharedSavePlan:
    """Decide which rank writes which region, for all ranks; `holdings` is in rank order."""
    merged = merge_holdings(holdings)
    groups = group_equal_rows(region_table(merged.regions))
    unique = merged.regions.take(groups.first)
    check_coverage(merged.tensors, _without_empty_strays(merged.tensors, unique), where="what the ranks hold")
    sets = find_rank_sets(groups.number, merged.rank, len(groups))
    shares = divide_among_ranks(
        unique, element_sizes(merged.tensors), sets, len(holdings), min_cut_bytes=options.min_cut_bytes
    )
    rows = worth_an_item(merged.tensors, shares.regions)
    return SharedSavePlan(
        tensors=merged.tensors,
        regions=shares.regions.take(rows),
        rank=shares.rank[rows],
        num_ranks=len(holdings),
    )


def plan_job(
    holdings: Sequence[Holdings], options: SaveOptions
) -> tuple[SharedSavePlan, tuple[RankObjects, ...]]:
    """Decide what all ranks write, tensors and objects, from what all of them hold, in rank order."""
    objects = assign_objects(holdings)
    renamed = [
        rename_own_tensors(held, found.own_tensors, rank)
        for rank, (held, found) in enumerate(zip(holdings, objects, strict=True))
    ]
    shared = plan_save(renamed, options)
    names = {facts.name for facts in shared.tensors}
    for placed in (placed for found in objects for placed in found.placed):
        if placed.stored_name in names:
            raise _kinds_disagree(placed.stored_name, renamed)
    return shared, objects


def _kinds_disagree(name: str, holdings: Sequence[Holdings]) -> UsageError:
    sides: list[tuple[int, TensorFacts | HeldObject]] = []
    for rank, own in enumerate(holdings):
        sides += [(rank, facts) for facts in own.tensors if facts.name == name]
        sides += [(rank, held) for held in own.objects if held.name == name]
    first = sides[0]
    other = next(side for side in sides if type(side[1]) is not type(first[1]))
    return disagreement(first[1], first[0], other[1], other[0])


def _without_empty_strays(tensors: Sequence[TensorFacts], regions: Regions) -> Regions:
    """Regions without the empty ones of ranks that hold no part of a tensor, which have arbitrary offsets."""
    return regions.take(worth_an_item(tensors, regions))


def worth_an_item(tensors: Sequence[TensorFacts], regions: Regions) -> Ints:
    """Rows to write: every region with elements, and one of each empty tensor, so that it is listed."""
    is_empty = regions.num_elements == 0
    tensor_is_empty = np.array([0 in facts.shape for facts in tensors], dtype=np.bool_)
    rows = np.arange(len(regions))
    lone = np.zeros(len(regions), dtype=np.bool_)
    candidates = rows[is_empty & tensor_is_empty[regions.tensor]]
    _, first = np.unique(regions.tensor[candidates], return_index=True)
    lone[candidates[first]] = True
    return np.asarray(rows[~is_empty | lone])


def plan_files(
    rank: int,
    tensors: tuple[TensorFacts, ...],
    regions: Regions,
    objects: Sequence[PlacedObject],
    options: SaveOptions,
) -> SavePlan:
    """Divide what one rank writes among its files.

    Items are placed largest first, each in the file with the fewest bytes so far. Within a file they keep the
    order of the state, so the tensors of one layer are side by side, and equal states give equal files.
    """
    hint = options.separation_hint
    if hint is None:
        files = [file_name(rank, number) for number in range(options.writers)]
        return SavePlan(
            rank=rank, tensors=tensors, buckets=_deal(regions, element_sizes(tensors), objects, files)
        )
    apart = np.array([facts.name.startswith(hint) for facts in tensors], dtype=np.bool_)
    is_apart = apart[regions.tensor]
    objects_apart = [placed for placed in objects if placed.name.startswith(hint)]
    objects_together = [placed for placed in objects if not placed.name.startswith(hint)]
    buckets: tuple[Bucket, ...] = ()
    for rows, chosen, prefix in ((~is_apart, objects_together, ""), (is_apart, objects_apart, hint)):
        files = [f"{prefix}{file_name(rank, number)}" for number in range(options.writers)]
        buckets += _deal(regions.take(rows), element_sizes(tensors), chosen, files)
    return SavePlan(rank=rank, tensors=tensors, buckets=buckets)


def file_name(rank: int, number: int) -> str:
    """The name of a file that this rank writes."""
    return f"__{rank}_{number}.distcp"


def _deal(
    regions: Regions, element_bytes: Ints, objects: Sequence[PlacedObject], files: Sequence[str]
) -> tuple[Bucket, ...]:
    """Longest processing time first: the fullest file has at most 4/3 of the bytes in the best division."""
    num_bytes = regions.num_bytes(element_bytes)
    sizes = num_bytes.tolist() + [placed.size_bytes for placed in objects]
    loads = [(0, number) for number in range(len(files))]
    chosen: list[list[int]] = [[] for _ in loads]
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        load, number = heapq.heappop(loads)
        chosen[number].append(row)
        # An empty item counts as one byte, or all empty tensors would go to one file.
        heapq.heappush(loads, (load + max(sizes[row], 1), number))
    filled = sorted((sorted(rows) for rows in chosen if rows), key=lambda rows: rows[0])
    return tuple(
        Bucket(
            file=file,
            objects=tuple(objects[row - len(regions)] for row in rows if row >= len(regions)),
            regions=regions.take(np.array([row for row in rows if row < len(regions)], dtype=np.int64)),
        )
        for file, rows in zip(files, filled, strict=False)
    )


RANK_MARK = "@rank"
"""In a stored name, it separates the leaf's name from the rank whose object it is: `rng@rank3`."""


def rank_object_name(name: str, rank: int) -> str:
    """The stored name of `rank`'s object if it differs from the common one."""
    return f"{name}{RANK_MARK}{rank}"


def is_of_one_rank(stored_name: str, paths: Mapping[str, tuple[str | int, ...]]) -> bool:
    """Return whether it is a rank's own value. Keys of a state may look like one, too.

    `paths` are the places of a checkpoint's names in the state: such a value has none of its own.
    """
    return RANK_MARK in stored_name and paths.get(stored_name, (stored_name,)) == (stored_name,)


def require_unmarked(names: Sequence[str]) -> None:
    """Raise `UsageError` for a name that a rank's own value of another one would get, too."""
    marked = [name for name in names if RANK_MARK in name]
    known = set(names) if marked else set()
    for name in marked:
        of, _, rank = name.rpartition(RANK_MARK)
        if of in known and rank.isdecimal():
            raise UsageError(
                f"The state has {of!r} and {name!r}, the name of rank {rank}'s own value of the first",
                fix="Rename one of them.",
            )


def numbered_otherwise(name: str, rank: int, other: int) -> UsageError:
    """The error of two ranks whose optimizers give different parameters one number."""
    return UsageError(
        f"{name!r} numbers other parameters on rank {rank} than on rank {other}: their states would be mixed",
        fix="Save get_optimizer_state_dict(model, optimizer) of torch, which names them.",
    )


def rename_own_tensors(holdings: Holdings, own: Container[str], rank: int) -> Holdings:
    """Give the tensors that differ on this rank names of their own, so that all of them are kept."""
    if not any(held.name in own for held in holdings.small):
        return holdings
    renamed = tuple(
        replace(facts, name=rank_object_name(facts.name, rank)) if facts.name in own else facts
        for facts in holdings.tensors
    )
    return replace(holdings, tensors=renamed)


def find_leaf_name(stored_name: str, held: Container[str]) -> str:
    """The leaf whose tensor this rank stores under this name; `held` has the names of its leaves."""
    return stored_name if stored_name in held else stored_name.rpartition(RANK_MARK)[0]


@dataclass(frozen=True, slots=True)
class RankObjects:
    """The decision about the objects, and the small tensors, that one rank holds."""

    own_tensors: frozenset[str]
    """Small tensors that differ from what the lowest rank has under their name."""
    placed: tuple[PlacedObject, ...]
    """The objects that this rank writes."""
    shared: tuple[str, ...]
    """Names of what others hold as well: while it stays equal on all of them, the plan stays."""
    common: tuple[str, ...]
    """Those of them that all ranks hold."""


def assign_objects(holdings: Sequence[Holdings]) -> tuple[RankObjects, ...]:
    """Compare what ranks hold under the same names, and decide who writes it; `holdings` is in rank order.

    What the lowest rank has under a name gets the plain name, which is what stock readers find. An object
    that ranks share is written by the one with the fewest bytes so far, one that differs by its owner:

        rank 0: rng = A    rank 1: rng = B    rank 2: rng = A
        rank 0 writes `rng`, rank 1 `rng@rank1`, rank 2 nothing

    Raises `UsageError` if a number of an optimizer's state means other parameters on two ranks.
    """
    # Ranks with equal lists of small tensors, which may be long, share one tuple: each is compared once.
    first: dict[str, tuple[str, bytes]] = {}
    numbering: dict[str, tuple[int, bytes]] = {}
    sharers: dict[str, list[int]] = {}
    writes: list[tuple[str, int, HeldObject]] = []
    num_holders: Counter[str] = Counter()
    lists: dict[int, tuple[frozenset[str], tuple[str, ...]]] = {}
    equal_objects: list[list[str]] = []
    for rank, own in enumerate(holdings):
        equal_objects.append([])
        for held in own.objects:
            if first.setdefault(held.name, ("object", held.digest)) != ("object", held.digest):
                writes.append((held.name, rank, held))
                continue
            if held.name not in sharers:
                writes.append((held.name, -1, held))
            sharers.setdefault(held.name, []).append(rank)
            equal_objects[rank].append(held.name)
        if id(own.small) not in lists:
            is_own = {
                held.name: first.setdefault(held.name, ("tensor", held.digest)) != ("tensor", held.digest)
                for held in own.small
            }
            different = frozenset(name for name, differs in is_own.items() if differs)
            lists[id(own.small)] = different, tuple(name for name, differs in is_own.items() if not differs)
        for held in own.numbering:
            other, digest = numbering.setdefault(held.name, (rank, held.digest))
            if digest != held.digest:
                raise numbered_otherwise(held.name, rank, other)
    for own, equal in zip(holdings, equal_objects, strict=True):
        num_holders.update(equal)
        num_holders.update(lists[id(own.small)][1])
        num_holders.update(f"{held.name}\0" for held in own.numbering)
    placed = _place_objects(writes, sharers, len(holdings))
    found = []
    for rank, own in enumerate(holdings):
        different, same = lists[id(own.small)]
        equal = [*equal_objects[rank], *same, *(f"{held.name}\0" for held in own.numbering)]
        shared = tuple(sorted(name for name in equal if num_holders[name] > 1))
        common = tuple(name for name in shared if num_holders[name] == len(holdings))
        found.append(RankObjects(different, tuple(placed[rank]), shared, common))
    return tuple(found)


def _place_objects(
    writes: Sequence[tuple[str, int, HeldObject]], sharers: Mapping[str, Sequence[int]], num_ranks: int
) -> list[list[PlacedObject]]:
    """Choose what each rank writes; an object that ranks share (-1) goes to the one with the fewest bytes."""
    by_name: dict[str, list[tuple[int, HeldObject]]] = {}
    for name, rank, held in writes:
        by_name.setdefault(name, []).append((rank, held))
    load = [0] * num_ranks
    placed: list[list[PlacedObject]] = [[] for _ in range(num_ranks)]
    for name, of_name in by_name.items():
        for rank, held in of_name:
            is_shared = rank < 0
            writer = min(sharers[name], key=lambda sharer: load[sharer]) if is_shared else rank
            stored_name = name if is_shared else rank_object_name(name, rank)
            placed[writer].append(
                PlacedObject(name=name, stored_name=stored_name, size_bytes=held.size_bytes)
            )
            load[writer] += max(held.size_bytes, 1)
    return placed


def find_stored_name(name: str, rank: int, stored: Container[str]) -> str | None:
    """The one of the `stored` names that has the object of the leaf `name` for `rank`, if any."""
    own = rank_object_name(name, rank)
    if own in stored:
        return own
    return name if name in stored else None
