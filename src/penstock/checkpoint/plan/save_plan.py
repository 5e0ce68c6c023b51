"""Plans which rank writes which bytes of what all ranks hold: replicas share the work.

    each rank: what it holds, as columns -> rank 0: `plan_job` -> each rank: what it writes

`plan_job` and what it calls are pure; `JobPlanner` gathers its arguments on rank 0 and divides its result. A
plan is kept as long as all ranks hold what they held when it was made: for each save, every rank only sends
rank 0 a digest and receives an answer. Invariants: together, the ranks write every element of every tensor
exactly once, or `NotCovered` names the missing ones; all ranks return a share, or all raise the same error.
"""

from __future__ import annotations

import heapq
import json
import math
import pickle
import zlib
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.checkpoint.state.regions import (
    Ints,
    Regions,
    TensorFacts,
    are_disjoint,
    divide_among_ranks,
    element_sizes,
    find_overlaps,
    find_rank_sets,
    group_equal_rows,
    region_table,
    rows_outside,
)
from penstock.checkpoint.state.walk import KEY_TYPES, OWN_ENTRIES, Path, rank_object_name, require_unmarked
from penstock.cluster.comm import Comm, decide_on_rank0, divide_on_rank0
from penstock.errors import PenstockError, UsageError


class NotCovered(PenstockError):
    """Regions do not cover their tensor exactly once; `tensor` is its name."""

    tensor: str


def check_coverage(tensors: Sequence[TensorFacts], regions: Regions, *, where: str) -> None:
    """Raise `NotCovered` for the first tensor with a region out of bounds, an overlap or a gap.

    `where` describes the regions: "the checkpoint at ...", "what the ranks hold".
    """

    def describe(row: int) -> str:
        offsets, sizes = regions.region(row, len(tensors[regions.tensor[row]].shape))
        return f"{list(offsets)} of {list(sizes)}"

    for row in rows_outside(tensors, regions)[:1].tolist():
        facts = tensors[regions.tensor[row]]
        raise NotCovered(
            f"A region of {facts.name!r} at {describe(row)} is outside its shape {list(facts.shape)}",
            where=where,
            fix="Give the tensor its true global shape on all ranks.",
            tensor=facts.name,
        )
    if not are_disjoint(regions):
        left, right, _ = find_overlaps(regions, regions)
        for pair in np.flatnonzero(left != right)[:1]:
            name = tensors[regions.tensor[left[pair]]].name
            raise NotCovered(
                f"Regions of {name!r} overlap: {describe(left[pair])} and {describe(right[pair])}",
                where=where,
                fix="Give each rank its own region; replicas must hold equal regions.",
                tensor=name,
            )
    missing = np.array([math.prod(facts.shape) for facts in tensors], dtype=np.int64)
    np.subtract.at(missing, regions.tensor, regions.num_elements)
    for number in np.flatnonzero(missing)[:1].tolist():
        facts = tensors[number]
        raise NotCovered(
            f"{missing[number]} elements of {facts.name!r} {list(facts.shape)} belong to no region",
            where=where,
            fix="Let every rank that holds a part of it take part, with the same mesh and placements.",
            tensor=facts.name,
        )


class HeldObject(NamedTuple):
    """A leaf that is not a tensor, or a tensor that is compared.

    Quick to pickle, because ranks exchange many. `digest` covers the bytes: ranks with equal digests hold the
    same bytes.
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
    compared: tuple[HeldObject, ...] = ()
    """The tensors that this rank has as a whole and whose values may differ between ranks."""
    numbering: tuple[HeldObject, ...] = ()
    """For each optimizer, a digest of its parameters in the order of the numbers that name its state."""
    paths: dict[str, Path] = field(default_factory=dict)
    """The place of each leaf, in the order of the state."""
    entries: tuple[str, ...] = ()
    """The leaves for which a load may create places that this rank did not have."""
    key_types: dict[str, str] = field(default_factory=dict)
    """The type of the keys of a dict, by the dict's name: see `walk`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options for planning saves."""

    writers: int = 2
    """The number of files that each rank writes in parallel."""
    separation_hint: str | None = None
    """Leaves whose names begin with this text go to separate files, whose names begin with it as well."""
    min_cut_bytes: int = 64 * 1024
    """A replicated region smaller than twice this size is written by one rank as a whole."""

    def __post_init__(self) -> None:
        if self.writers < 1:
            raise UsageError(f"writers={self.writers} is too few", fix="Use at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedObject:
    """An object that a rank writes: `name` is the leaf's, `stored_name` the name in the checkpoint.

    The names differ if ranks hold different objects under one name: see `assign_objects`.
    """

    name: str
    stored_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One file of one rank: first its objects, then its regions.

    Empty buckets are left out.
    """

    file: str
    objects: tuple[PlacedObject, ...]
    regions: Regions
    """Regions of the plan's `tensors`. Each may be a part of a region that the rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The share of one rank: regions of `tensors`, which may list more than is written."""

    rank: int
    tensors: tuple[TensorFacts, ...]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """The payload of all tensors, without envelopes and objects."""
        items = element_sizes(self.tensors)
        return sum(int(bucket.regions.num_bytes(items).sum()) for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRegions:
    """Regions of all ranks, with common tensor numbers: in each row, a region and the rank that has it."""

    tensors: tuple[TensorFacts, ...]
    regions: Regions
    rank: Ints
    num_ranks: int


def merge_holdings(holdings: Sequence[Holdings]) -> RankRegions:
    """Merge the regions that all ranks hold; tensors are in the order of their first appearance.

    Raises `UsageError` if two ranks give one name different dtypes or shapes.
    """
    numbers: dict[str, int] = {}
    tensors: list[TensorFacts] = []
    first_rank: list[int] = []
    known: dict[int, Ints] = {}
    parts = []
    for rank, own in enumerate(holdings):
        # Ranks with the same names share one tuple after the exchange, so each tuple is numbered only once.
        if id(own.tensors) not in known:
            for facts in own.tensors:
                number = numbers.setdefault(facts.name, len(tensors))
                if number == len(tensors):
                    tensors.append(facts)
                    first_rank.append(rank)
                elif facts != tensors[number]:
                    raise _disagreement(tensors[number], first_rank[number], facts, rank)
            own_numbers = [numbers[facts.name] for facts in own.tensors]
            known[id(own.tensors)] = np.array(own_numbers, dtype=np.int64)
        common = known[id(own.tensors)]
        parts.append(Regions(common[own.regions.tensor], own.regions.offsets, own.regions.sizes))
    ranks = np.repeat(np.arange(len(holdings)), [len(own.regions) for own in holdings])
    regions = Regions.concatenated(parts)
    return RankRegions(tensors=tuple(tensors), regions=regions, rank=ranks, num_ranks=len(holdings))


def _disagreement(
    one: TensorFacts | HeldObject, one_rank: int, other: TensorFacts | HeldObject, other_rank: int
) -> UsageError:
    """Return the error for ranks that give one name different dtypes or shapes, or a tensor and an object."""
    kinds = [
        f"{held.dtype} {list(held.shape)}" if isinstance(held, TensorFacts) else "not a tensor"
        for held in (one, other)
    ]
    return UsageError(
        f"Ranks disagree on {one.name!r}: {kinds[0]} on rank {one_rank}, {kinds[1]} on rank {other_rank}",
        fix="Give them different names, or shard one tensor over the ranks as a DTensor.",
    )


def plan_save(holdings: Sequence[Holdings], options: SaveOptions) -> RankRegions:
    """Decide which rank writes which region, each byte once; `holdings` is in rank order."""
    held = merge_holdings(holdings)
    first, number = group_equal_rows(region_table(held.regions))
    unique = held.regions.take(first)
    # Ranks that hold no part of a tensor have empty regions at arbitrary offsets.
    check_coverage(
        held.tensors, unique.take(worth_an_item(held.tensors, unique)), where="what the ranks hold"
    )
    sets = find_rank_sets(number, held.rank, len(first))
    _, regions, rank = divide_among_ranks(
        unique, element_sizes(held.tensors), sets, len(holdings), min_cut_bytes=options.min_cut_bytes
    )
    rows = worth_an_item(held.tensors, regions)
    return replace(held, regions=regions.take(rows), rank=rank[rows])


def plan_job(
    holdings: Sequence[Holdings], options: SaveOptions
) -> tuple[RankRegions, tuple[RankObjects, ...]]:
    """Decide what each rank writes, tensors and objects, from what all ranks hold, in rank order."""
    # Ranks with equal lists have one in common.
    lists = {id(held): held for own in holdings for held in (own.tensors, own.objects)}
    require_unmarked(dict.fromkeys(each.name for held in lists.values() for each in held))
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
    return _disagreement(first[1], first[0], other[1], other[0])


def worth_an_item(tensors: Sequence[TensorFacts], regions: Regions) -> Ints:
    """Return the rows to write: all regions with elements, and one of each empty tensor to list it."""
    is_empty = regions.num_elements == 0
    tensor_is_empty = np.array([0 in facts.shape for facts in tensors], dtype=np.bool_)
    candidates = np.flatnonzero(is_empty & tensor_is_empty[regions.tensor])
    _, first = np.unique(regions.tensor[candidates], return_index=True)
    return np.sort(np.concatenate([np.flatnonzero(~is_empty), candidates[first]]))


def plan_files(
    rank: int,
    tensors: tuple[TensorFacts, ...],
    regions: Regions,
    objects: Sequence[PlacedObject],
    options: SaveOptions,
) -> SavePlan:
    """Divide what one rank writes among its files.

    Items are assigned largest first, each to the file with the fewest bytes so far. Within a file they keep
    the order of the state, so the tensors of one layer are adjacent, and equal states give equal files.
    """
    hint = options.separation_hint

    def is_apart(name: str) -> bool:
        return hint is not None and name.startswith(hint)

    rows_apart = np.array([is_apart(facts.name) for facts in tensors], dtype=np.bool_)[regions.tensor]
    buckets: tuple[Bucket, ...] = ()
    for apart, prefix in ((False, ""), (True, hint or "")):
        buckets += _deal(
            regions.take(rows_apart == apart),
            element_sizes(tensors),
            [placed for placed in objects if is_apart(placed.name) == apart],
            [f"{prefix}{file_name(rank, number)}" for number in range(options.writers)],
        )
    return SavePlan(rank=rank, tensors=tensors, buckets=buckets)


def file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def _deal(
    regions: Regions, element_bytes: Ints, objects: Sequence[PlacedObject], files: Sequence[str]
) -> tuple[Bucket, ...]:
    """Deal items to files, largest first.

    The fullest file has at most 4/3 of the bytes that it would have in the best division.
    """
    num_bytes = regions.num_bytes(element_bytes)
    sizes = num_bytes.tolist() + [placed.size_bytes for placed in objects]
    loads = [(0, number) for number in range(len(files))]
    chosen: list[list[int]] = [[] for _ in loads]
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        load, number = heapq.heappop(loads)
        chosen[number].append(row)
        # An empty item counts as one byte; otherwise, all empty tensors would go to one file.
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


def rename_own_tensors(holdings: Holdings, own: frozenset[str], rank: int) -> Holdings:
    """Rename the tensors whose values differ on this rank, so that all versions are kept."""
    if not own:
        return holdings
    renamed = tuple(
        replace(facts, name=rank_object_name(facts.name, rank)) if facts.name in own else facts
        for facts in holdings.tensors
    )
    return replace(holdings, tensors=renamed)


@dataclass(frozen=True, slots=True)
class RankObjects:
    """The decision about the objects and compared tensors that one rank holds."""

    own_tensors: frozenset[str]
    """Compared tensors that differ from what the lowest rank has under the same name."""
    placed: tuple[PlacedObject, ...]
    """The objects that this rank writes."""
    shared: tuple[str, ...]
    """Names of what other ranks hold as well. As long as the values stay equal on all of them, the plan is
    kept.
    """
    common: tuple[str, ...]
    """The `shared` names that all ranks hold."""


def assign_objects(holdings: Sequence[Holdings]) -> tuple[RankObjects, ...]:
    """Compare what ranks hold under the same names, and decide which rank writes it.

    `holdings` is in rank order. What the lowest rank has under a name gets the plain name, which is what
    stock readers find. An object that ranks share is written by the rank with the fewest bytes of objects so
    far; one that differs, by its owner:

        rank 0: rng = A    rank 1: rng = B    rank 2: rng = A
        rank 0 writes `rng`, rank 1 `rng@rank1`, rank 2 nothing

    Raises `UsageError` if a number in an optimizer's state means different parameters on two ranks.
    """
    first: dict[str, tuple[str, bytes]] = {}
    numbering: dict[str, tuple[int, bytes]] = {}
    sharers: dict[str, list[int]] = {}
    writes: dict[str, list[tuple[int | None, HeldObject]]] = {}
    own_tensors: list[frozenset[str]] = []
    judged: dict[int, frozenset[str]] = {}
    """Own tensors by the identity of `compared`: after the exchange, ranks with equal lists share one."""
    equal: list[list[str]] = []
    """For each rank, the names of objects that equal those of the lowest rank."""
    for rank, own in enumerate(holdings):
        equal.append([])
        for held in own.objects:
            if first.setdefault(held.name, ("object", held.digest)) != ("object", held.digest):
                writes.setdefault(held.name, []).append((rank, held))
                continue
            if held.name not in sharers:
                writes.setdefault(held.name, []).append((None, held))
            sharers.setdefault(held.name, []).append(rank)
            equal[rank].append(held.name)
        if id(own.compared) not in judged:
            judged[id(own.compared)] = frozenset(
                held.name
                for held in own.compared
                if first.setdefault(held.name, ("tensor", held.digest)) != ("tensor", held.digest)
            )
        own_tensors.append(judged[id(own.compared)])
        equal[rank] += [held.name for held in own.compared if held.name not in own_tensors[rank]]
        for held in own.numbering:
            other, digest = numbering.setdefault(held.name, (rank, held.digest))
            if digest != held.digest:
                raise UsageError(
                    f"{held.name!r} numbers different parameters on rank {rank} than on rank {other}: their"
                    " states would be mixed",
                    fix="Save get_optimizer_state_dict(model, optimizer) of torch, which names them.",
                )
            equal[rank].append(f"{held.name}\0")

    load = [0] * len(holdings)
    placed: list[list[PlacedObject]] = [[] for _ in holdings]
    for name, contents in writes.items():
        for owner, held in contents:
            writer = min(sharers[name], key=lambda sharer: load[sharer]) if owner is None else owner
            stored_name = name if owner is None else rank_object_name(name, owner)
            placed[writer].append(
                PlacedObject(name=name, stored_name=stored_name, size_bytes=held.size_bytes)
            )
            load[writer] += max(held.size_bytes, 1)
    num_holders = Counter(chain.from_iterable(equal))
    found = []
    for rank, names in enumerate(equal):
        shared = tuple(sorted(name for name in names if num_holders[name] > 1))
        common = tuple(name for name in shared if num_holders[name] == len(holdings))
        found.append(RankObjects(own_tensors[rank], tuple(placed[rank]), shared, common))
    return tuple(found)


MOST_ENTRIES_BYTES = 4 << 20
"""A longer list of the entries that ranks lack is not recorded, because every rank that loads reads it."""
AWAITED = "all ranks to list what they hold"


class RankColumns(NamedTuple):
    """The holdings of one rank, with packed lists: rank 0 unpacks equal lists of many ranks only once."""

    tensors: bytes
    """The tensors, and their places in the state."""
    regions: Regions
    held: tuple[bytes, bytes, bytes]
    """The other lists of `Holdings`: objects, compared tensors, numbering."""
    entries: Mapping[str, bytes]
    """For each part of the state, the places of its entries, as JSON, which is equal for equal places."""
    key_types: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobPlan:
    """The part of a plan that rank 0 keeps, to describe the checkpoint and to check that the plan holds."""

    number: int
    """The number of the plan; a job counts its plans from 1."""
    tensors: tuple[TensorFacts, ...]
    paths: dict[str, Path]
    """The places of tensors in the state."""
    lists: tuple[int, ...]
    """For each rank, a number for the list of names that it shares with others. Ranks with equal lists
    compare digests.
    """
    is_comparable: bool
    """True if digests of these lists show whether the plan still holds: every shared object is common to all
    ranks, or occurs in only one list. Counterexample: of four ranks, 0 and 1 share `a` and `b`, and rank 2
    has `b`. If `b` changed on ranks 0 and 1 alone, their digests would still be equal, and no rank would
    write what rank 2 has.
    """
    differing_parts: tuple[str, ...]
    """The parts of the state in which not all ranks have the same entries."""
    facts: Mapping[str, str]
    """The facts for the manifest about the structure of the state."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShare:
    """The share of one rank; all ranks together write every byte of the state once."""

    number: int
    """The number of the plan."""
    tensors: tuple[TensorFacts, ...]
    """This rank's own tensors, under the names by which they are stored."""
    numbers: Ints
    """For each own tensor, its number among the tensors of all ranks."""
    regions: Regions
    """Regions of the own tensors, in the order in which they are written."""
    objects: RankObjects


class JobPlanner:
    """Plans the saves of one communicator's ranks, and keeps the last plan as long as it holds."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._kept: tuple[bytes, RankShare] | None = None
        """A digest of what this rank held when the plan was made, and its share."""
        self.job: JobPlan | None = None
        """The plan; None except on rank 0."""
        self.num_planned = 0
        """The number of plans that had to be made."""

    def find(self, hold: Callable[[], Holdings], options: SaveOptions) -> RankShare | None:
        """Return this rank's share of the last plan if that still holds on all ranks, or else None.

        Collective. `hold` lists what this rank holds; if it fails on any rank, all ranks raise.
        """
        found: list[Holdings] = []

        def look() -> bytes:
            found.append(hold())
            is_same = self._kept is not None and self._kept[0] == _digest_holdings(found[0], options)
            return summarize(self._kept[1], found[0]) if self._kept is not None and is_same else b""

        if not decide_on_rank0(self._comm, look, self._still_holds, awaiting=AWAITED) or self._kept is None:
            return None
        key, share = self._kept
        sizes = {each.name: each.size_bytes for each in found[0].objects}
        placed = tuple(replace(each, size_bytes=sizes[each.name]) for each in share.objects.placed)
        if placed != share.objects.placed:
            share = replace(share, objects=replace(share.objects, placed=placed))
            self._kept = key, share
        return share

    def plan(self, holdings: Holdings, options: SaveOptions) -> RankShare:
        """Make a plan. Collective."""
        share = divide_on_rank0(
            self._comm,
            lambda: pack_holdings(holdings),
            lambda columns: self._divide(columns, options),
            awaiting="all ranks to describe what they hold",
        )
        if isinstance(share, PenstockError):
            raise share
        self.num_planned += 1
        own = unpack_share(share, holdings, self._comm.rank)
        self._kept = _digest_holdings(holdings, options), own
        return own

    def _still_holds(self, summaries: list[bytes]) -> bool:
        """On rank 0: return True if all ranks have the same plan, and what they share is still equal."""
        job = self.job
        if (
            job is None
            or not job.is_comparable
            or {summary[:8] for summary in summaries} != {job.number.to_bytes(8, "big")}
        ):
            return False
        common = {summary[8:16] for summary in summaries}
        shared = {(number, summary[16:]) for number, summary in zip(job.lists, summaries, strict=True)}
        return len(common) == 1 and len(shared) == len(set(job.lists))

    def _divide(
        self, columns: list[RankColumns], options: SaveOptions
    ) -> Sequence[RankShare | PenstockError]:
        """On rank 0: plan for all ranks. If the state has a fault, all ranks get the same error."""
        try:
            self.job, parts = plan_shares(columns, options, 1 if self.job is None else self.job.number + 1)
        except PenstockError as error:
            return [error] * len(columns)
        return parts


def pack_holdings(holdings: Holdings) -> RankColumns:
    """Describe what one rank holds in few bytes."""
    paths = holdings.paths
    parts: dict[str, list[Path]] = {}
    for name in holdings.entries:
        parts.setdefault(name.partition(".")[0], []).append(paths[name])
    return RankColumns(
        tensors=_pack(
            (
                holdings.tensors,
                {facts.name: paths.get(facts.name, (facts.name,)) for facts in holdings.tensors},
            )
        ),
        regions=holdings.regions,
        held=(_pack(holdings.objects), _pack(holdings.compared), _pack(holdings.numbering)),
        entries={part: zlib.compress(json.dumps(places).encode(), 1) for part, places in parts.items()},
        key_types=holdings.key_types,
    )


def _pack(value: object) -> bytes:
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)


def _unpack(packed: bytes) -> Any:
    return pickle.loads(zlib.decompress(packed))  # noqa: S301 - another rank of this job packed it


def plan_shares(
    columns: Sequence[RankColumns], options: SaveOptions, number: int
) -> tuple[JobPlan, list[RankShare]]:
    """Plan a save from what all ranks hold, in rank order; return the plan and each rank's share of it.

    In these shares, regions have the numbers of all tensors, and a rank's own tensors are left out:
    `unpack_share` adds what the rank itself knows.
    """
    # Equal lists are unpacked once and are then one tuple, so comparisons need to look at it only once.
    distinct = {packed for each in columns for packed in (each.tensors, *each.held)}
    lists = {packed: _unpack(packed) for packed in distinct}
    holdings = []
    for each in columns:
        objects_held, compared, numbering = (lists[packed] for packed in each.held)
        holdings.append(
            Holdings(
                tensors=lists[each.tensors][0],
                regions=each.regions,
                objects=objects_held,
                compared=compared,
                numbering=numbering,
            )
        )
    shared, objects = plan_job(holdings, options)
    number_of = {facts.name: at for at, facts in enumerate(shared.tensors)}
    numbers: dict[tuple[int, frozenset[str]], Ints] = {}
    order = np.argsort(shared.rank, kind="stable")
    ends = np.searchsorted(shared.rank[order], np.arange(len(columns) + 1))
    shares = []
    for rank, (own, found) in enumerate(zip(holdings, objects, strict=True)):
        key = (id(own.tensors), found.own_tensors)
        if found.own_tensors or key not in numbers:
            renamed = rename_own_tensors(own, found.own_tensors, rank).tensors
            numbers[key] = np.array([number_of[facts.name] for facts in renamed], dtype=np.int64)
        shares.append(
            RankShare(
                number=number,
                tensors=(),
                numbers=numbers[key],
                regions=shared.regions.take(order[ends[rank] : ends[rank + 1]]),
                objects=found,
            )
        )
    list_numbers: dict[tuple[str, ...], int] = {}
    for found in objects:
        list_numbers.setdefault(found.shared, len(list_numbers))
    common = set(objects[0].common)
    in_some = [name for names in list_numbers for name in names if name not in common]
    paths = dict(ChainMap(*(lists[packed][1] for packed in dict.fromkeys(each.tensors for each in columns))))
    differing, facts = _describe_structure(columns)
    job = JobPlan(
        number=number,
        tensors=shared.tensors,
        paths={facts.name: paths.get(facts.name, (facts.name,)) for facts in shared.tensors},
        lists=tuple(list_numbers[found.shared] for found in objects),
        is_comparable=len(in_some) == len(set(in_some)),
        differing_parts=differing,
        facts=facts,
    )
    return job, shares


def unpack_share(share: RankShare, holdings: Holdings, rank: int) -> RankShare:
    """Complete a share on its rank: add the rank's tensors, and let the regions refer to them by number."""
    # A rank writes only parts of what it holds, so each number is among its own.
    order = np.argsort(share.numbers)
    own = order[np.searchsorted(share.numbers, share.regions.tensor, sorter=order)]
    return replace(
        share,
        tensors=rename_own_tensors(holdings, share.objects.own_tensors, rank).tensors,
        regions=replace(share.regions, tensor=own),
    )


def summarize(share: RankShare, holdings: Holdings) -> bytes:
    """Return the plan's number, and digests of what must still be equal on all ranks, and on some."""
    digests = {each.name: each.digest for each in (*holdings.objects, *holdings.compared)}
    digests |= {f"{each.name}\0": each.digest for each in holdings.numbering}
    sums = (
        xxhash.xxh3_64_digest(b"".join(digests[name] for name in names))
        for names in (share.objects.common, share.objects.shared)
    )
    return share.number.to_bytes(8, "big") + b"".join(sums)


def _digest_holdings(holdings: Holdings, options: SaveOptions) -> bytes:
    """Return a digest that is equal for holdings that differ at most in the contents of objects.

    It covers all that describes the checkpoint, including the structure of the state.
    """
    names = [
        [each.name for each in held] for held in (holdings.objects, holdings.compared, holdings.numbering)
    ]
    described = (options, holdings.tensors, names, holdings.paths, holdings.entries, holdings.key_types)
    digest = xxhash.xxh3_128(repr(described).encode())
    regions = holdings.regions
    for column in (regions.tensor, regions.offsets, regions.sizes):
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def _describe_structure(columns: Sequence[RankColumns]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the parts of the state whose structure differs between ranks, and facts about the structure.

        rank 0: a.x    rank 1: a.y, a.x
        ("'a'",), {"own_entries": '{"places": [["a", "x"], ["a", "y"]],
                                    "structures": [[[0], {}], [[1, 0], {}]], "ranks": [0, 1]}'}

    Own entries are left out if their JSON would be too long, because every rank that loads reads it.
    """
    of_ranks = [frozenset(chain(each.entries.items(), each.key_types.items())) for each in columns]
    known = dict(zip(of_ranks, columns, strict=True))
    types = ChainMap(*(each.key_types for each in known.values()))
    facts = {KEY_TYPES: json.dumps({name: kind for name, kind in types.items() if kind != "number"})}
    differing = {
        name.partition(".")[0] for name, _ in frozenset().union(*known) - frozenset.intersection(*known)
    }
    numbers: dict[Path, int] = {}
    structures = []
    for each in known.values():
        paths = (
            tuple(path)
            for part in sorted(differing & each.entries.keys())
            for path in json.loads(zlib.decompress(each.entries[part]))
        )
        structures.append(([numbers.setdefault(path, len(numbers)) for path in paths], each.key_types))
    index = {each: number for number, each in enumerate(known)}
    noted = {"places": list(numbers), "structures": structures, "ranks": [index[each] for each in of_ranks]}
    text = json.dumps(noted, separators=(",", ":"))
    if differing and len(text) <= MOST_ENTRIES_BYTES:
        facts[OWN_ENTRIES] = text
    return tuple(sorted(map(repr, differing))), facts
