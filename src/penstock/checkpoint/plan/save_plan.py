"""Plans which rank writes which bytes, from what all ranks hold: replicas share the work.

Pure: every rank calls `plan_save` with the same arguments and derives the same plan. Invariant: together the
ranks write every element of every tensor exactly once, or `NotCovered` says which are missing.
"""

import heapq
import math
from collections.abc import Container, Iterable, Mapping, Sequence
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
    met = find_overlaps(regions, regions)
    twice = np.flatnonzero(met.left != met.right)
    if len(twice):
        row, other = int(met.left[twice[0]]), int(met.right[twice[0]])
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
    """What one rank holds of a state: `regions` of its own `tensors`. Replicas hold equal regions."""

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
    """Of the plan's `tensors`. A region may be a part of one that the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one rank writes: regions of `tensors`, which may list more than is written."""

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
    """What all ranks write: row by row a region and the rank that writes it; every byte exactly once."""

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
) -> tuple[SharedSavePlan, list[list[PlacedObject]]]:
    """What all ranks write, tensors and objects, from what all of them hold, in rank order."""
    apart = find_own_tensors([held.small for held in holdings])
    renamed = [
        rename_own_tensors(held, names, rank)
        for rank, (held, names) in enumerate(zip(holdings, apart, strict=True))
    ]
    return plan_save(renamed, options), assign_objects([held.objects for held in holdings])


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


def plan_rank_files(
    shared: SharedSavePlan,
    objects: Sequence[Sequence[PlacedObject]],
    options: SaveOptions,
    *,
    only: int | None = None,
) -> list[SavePlan]:
    """What each rank writes, or `only` one of them, divided among its files; `objects` is by rank.

    Items are placed largest first, each in the file with the fewest bytes so far. Within a file they keep the
    order of the state, so the tensors of one layer are side by side, and equal states give equal files.
    """
    order = np.argsort(shared.rank, kind="stable")
    ends = np.searchsorted(shared.rank[order], np.arange(shared.num_ranks + 1))
    return [
        plan_files(
            rank,
            shared.tensors,
            shared.regions.take(order[ends[rank] : ends[rank + 1]]),
            objects[rank],
            options,
        )
        for rank in (range(shared.num_ranks) if only is None else (only,))
    ]


def plan_files(
    rank: int,
    tensors: tuple[TensorFacts, ...],
    regions: Regions,
    objects: Sequence[PlacedObject],
    options: SaveOptions,
) -> SavePlan:
    """What one rank writes, divided among its files."""
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
    for rows, those, prefix in ((~is_apart, objects_together, ""), (is_apart, objects_apart, hint)):
        files = [f"{prefix}{file_name(rank, number)}" for number in range(options.writers)]
        buckets += _deal(regions.take(rows), element_sizes(tensors), those, files)
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
    """Whether it is a value that a rank had of its own. Keys of a state may look like that, too.

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


def find_own_tensors(small: Sequence[Iterable[HeldObject]]) -> tuple[frozenset[str], ...]:
    """The small tensors of each rank that differ from those of the lowest rank; `small` is in rank order."""
    common: dict[str, bytes] = {}
    return tuple(
        frozenset(held.name for held in tensors if common.setdefault(held.name, held.digest) != held.digest)
        for tensors in small
    )


def require_same_numbering(numberings: Sequence[Iterable[HeldObject]]) -> None:
    """Raise `UsageError` if one number means different parameters: their states would get one name."""
    first: dict[str, tuple[int, bytes]] = {}
    for rank, numbering in enumerate(numberings):
        for held in numbering:
            other, digest = first.setdefault(held.name, (rank, held.digest))
            if digest != held.digest:
                raise numbered_otherwise(held.name, rank, other)


def numbered_otherwise(name: str, rank: int, other: int) -> UsageError:
    """The error of two ranks whose optimizers number different parameters alike."""
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


def without_own_objects(holdings: Holdings, placed: Iterable[PlacedObject]) -> Holdings:
    """Leave out the objects that differ on this rank: they are stored under names of their own."""
    own = {each.name for each in placed if each.stored_name != each.name}
    return replace(holdings, objects=tuple(each for each in holdings.objects if each.name not in own))


def find_leaf_name(stored_name: str, held: Container[str]) -> str:
    """The leaf whose tensor this rank stores under this name; `held` has the names of its leaves."""
    return stored_name if stored_name in held else stored_name.rpartition(RANK_MARK)[0]


def assign_objects(holdings: Sequence[Iterable[HeldObject]]) -> list[list[PlacedObject]]:
    """The objects that each rank writes; `holdings` is in rank order.

    The object of the lowest rank gets the plain name, which is what stock readers find. An object that ranks
    share is written by the one with the fewest bytes so far, an object that differs by its owner.
    """
    holders: dict[str, list[tuple[int, HeldObject]]] = {}
    for rank, objects in enumerate(holdings):
        for held in objects:
            holders.setdefault(held.name, []).append((rank, held))
    load = [0] * len(holdings)
    placed: list[list[PlacedObject]] = [[] for _ in holdings]
    for name, owners in holders.items():
        common = owners[0][1]
        sharers = [rank for rank, held in owners if held.digest == common.digest]
        writes = [(min(sharers, key=lambda rank: load[rank]), name, common.size_bytes)]
        writes += [
            (rank, rank_object_name(name, rank), held.size_bytes)
            for rank, held in owners
            if held.digest != common.digest
        ]
        for rank, stored_name, size_bytes in writes:
            placed[rank].append(PlacedObject(name=name, stored_name=stored_name, size_bytes=size_bytes))
            load[rank] += max(size_bytes, 1)
    return placed


def find_stored_name(name: str, rank: int, stored: Container[str]) -> str | None:
    """The one of the `stored` names that has the object of the leaf `name` for `rank`, if any."""
    own = rank_object_name(name, rank)
    if own in stored:
        return own
    return name if name in stored else None
