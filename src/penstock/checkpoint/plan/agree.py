"""Lets all ranks of a job agree on a plan: rank 0 makes it, and each rank gets its own share.

    each rank: what it holds, as columns -> rank 0: `save_plan.plan_job` -> each rank: what it writes
    each rank: what it wants -> rank 0: `load_plan.plan_load` -> each rank: what it reads and exchanges

The plan of a save is kept while all ranks hold the same as when it was made: they then send rank 0 a digest
each and get one answer. Invariant: all ranks return a share or all raise the same error.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import xxhash

from penstock.checkpoint.plan.load_plan import (
    LoadOptions,
    SharedLoadPlan,
    UnreadableFile,
    divide_plan,
    plan_load,
)
from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    PlacedObject,
    SaveOptions,
    SavePlan,
    plan_files,
    plan_job,
    rename_own_tensors,
)
from penstock.checkpoint.state.regions import Bools, Ints, Regions, StoredRegions, TensorFacts
from penstock.cluster.comm import Comm, decide_on_rank0, divide_on_rank0
from penstock.errors import PenstockError

Path = tuple[str | int, ...]

NUM_KEPT_PLANS = 4
"""Enough for the few kinds of state of a trainer, as its model with and without the optimizer."""
MOST_ENTRIES_BYTES = 4 << 20
"""A longer list of the entries that ranks lack is not recorded: every rank that loads reads it."""
AWAITED = "all ranks to list what they hold"


class RankColumns(NamedTuple):
    """The holdings of one rank, as bytes and columns. Equal lists of different ranks are equal bytes."""

    tensors: bytes
    """Their names, types, shapes and places in the state."""
    regions: tuple[Ints, Ints, Ints]
    objects: bytes
    small: bytes
    numbering: bytes
    entries: bytes
    """The names for which a load may make places."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobPlan:
    """The part of a plan that rank 0 keeps, to describe the checkpoint and to check that the plan holds."""

    number: int
    """Counts the plans of a job, from 1."""
    tensors: tuple[TensorFacts, ...]
    paths: Mapping[str, Path]
    """The places of tensors in the state."""
    lists: tuple[int, ...]
    """By rank, a number for the list of what it shares with others: ranks with equal lists can compare it."""
    is_comparable: bool
    """True if digests of these lists show whether the plan holds: every shared object is common to all
    ranks, or in one list only. The opposite: of four ranks, 0 and 1 share `a` and `b`, and rank 2 `b`.
    If `b` changed on ranks 0 and 1 alone, their digests would still be equal, and nobody would write what
    rank 2 has."""
    differing_parts: tuple[str, ...]
    """The parts of the state in which not all ranks have the same entries."""
    entries: str
    """The entries that each rank lacks, as JSON; empty if none differ, or too many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShare:
    """The share of one rank; all ranks together write every byte of the state once."""

    number: int
    """The number of the plan."""
    tensors: tuple[TensorFacts, ...]
    """This rank's own, under the names they are stored as."""
    numbers: Ints
    """By own tensor, its number among the tensors of all ranks."""
    regions: Regions
    """Regions of the own tensors, in the order in which they are written."""
    placed: tuple[PlacedObject, ...]
    shared: tuple[str, ...]
    common: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AgreedSave:
    """One rank's share, divided among its files; on rank 0 with the plan of the job."""

    share: RankShare
    plan: SavePlan
    job: JobPlan | None


class _RankPart(NamedTuple):
    """The message from rank 0 to one rank; regions have the numbers of all tensors."""

    number: int
    numbers: Ints
    regions: tuple[Ints, Ints, Ints]
    own_tensors: frozenset[str]
    placed: tuple[PlacedObject, ...]
    shared: tuple[str, ...]
    common: tuple[str, ...]


class JobPlanner:
    """Plans the saves of one communicator's ranks, and keeps the last few plans."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._shares: OrderedDict[bytes, RankShare] = OrderedDict()
        self._jobs: dict[int, JobPlan] = {}
        self._last_number = 0
        self.num_planned = 0
        """The number of plans that had to be made."""

    def find(self, hold: Callable[[], Holdings], options: SaveOptions) -> AgreedSave | None:
        """Collective: return this rank's share of a plan that still holds on all ranks, if there is one.

        `hold` lists what this rank holds; if that fails on any rank, all raise.
        """
        held: list[Holdings] = []

        def look() -> bytes:
            held.append(hold())
            share = self._shares.get(_digest_holdings(held[0], options))
            return b"" if share is None else summarize(share, held[0])

        if not decide_on_rank0(self._comm, look, self._still_holds, awaiting=AWAITED):
            return None
        key = _digest_holdings(held[0], options)
        sizes = {each.name: each.size_bytes for each in held[0].objects}
        placed = tuple(replace(each, size_bytes=sizes[each.name]) for each in self._shares[key].placed)
        return self._keep(key, replace(self._shares[key], placed=placed), options)

    def plan(
        self,
        holdings: Holdings,
        options: SaveOptions,
        paths: Mapping[str, Path],
        entries: Collection[str] = (),
    ) -> AgreedSave:
        """Collective: make a plan. `paths` are the places of this rank's tensors in the state.

        `entries` are the names for which a load may make places that a rank did not have.
        """
        part = divide_on_rank0(
            self._comm,
            lambda: pack_holdings(holdings, paths, entries),
            lambda columns: self._divide(columns, options),
            awaiting="all ranks to describe what they hold",
        )
        if isinstance(part, PenstockError):
            raise part
        self.num_planned += 1
        share = unpack_part(part, holdings, self._comm.rank)
        return self._keep(_digest_holdings(holdings, options), share, options)

    def _still_holds(self, summaries: list[bytes]) -> bool:
        """On rank 0: return True if all ranks have one plan, and what they share is still equal."""
        plans = {summary[:8] for summary in summaries}
        job = self._jobs.get(int.from_bytes(next(iter(plans)), "big"))
        if len(plans) > 1 or job is None or not job.is_comparable:
            return False
        common = {summary[8:16] for summary in summaries}
        shared = {(number, summary[16:]) for number, summary in zip(job.lists, summaries, strict=True)}
        return len(common) == 1 and len(shared) == len(set(job.lists))

    def _divide(
        self, columns: list[RankColumns], options: SaveOptions
    ) -> Sequence[_RankPart | PenstockError]:
        """On rank 0: plan for all ranks. What is wrong with the state is the same error on all of them."""
        try:
            job, parts = plan_shares(columns, options, self._last_number + 1)
        except PenstockError as error:
            return [error] * len(columns)
        self._last_number = job.number
        self._jobs[job.number] = job
        while len(self._jobs) > NUM_KEPT_PLANS + 1:
            del self._jobs[min(self._jobs)]
        return parts

    def _keep(self, key: bytes, share: RankShare, options: SaveOptions) -> AgreedSave:
        self._shares[key] = share
        self._shares.move_to_end(key)
        while len(self._shares) > NUM_KEPT_PLANS:
            self._shares.popitem(last=False)
        plan = plan_files(self._comm.rank, share.tensors, share.regions, share.placed, options)
        return AgreedSave(share=share, plan=plan, job=self._jobs.get(share.number))


def pack_holdings(
    holdings: Holdings, paths: Mapping[str, Path], entries: Collection[str] = ()
) -> RankColumns:
    """Describe what one rank holds in few bytes."""
    rows = [
        [facts.name, facts.dtype, facts.shape, facts.element_bytes, paths.get(facts.name)]
        for facts in holdings.tensors
    ]
    regions = holdings.regions
    return RankColumns(
        tensors=_pack(rows),
        regions=_narrow((regions.tensor, regions.offsets, regions.sizes)),
        objects=_pack_held(holdings.objects),
        small=_pack_held(holdings.small),
        numbering=_pack_held(holdings.numbering),
        entries=_pack(sorted(entries)),
    )


def plan_shares(
    columns: Sequence[RankColumns], options: SaveOptions, number: int
) -> tuple[JobPlan, list[_RankPart]]:
    """Plan a save from what all ranks hold, in rank order; each rank's part, with the plan's `number`."""
    # Equal lists are unpacked once, and are then one tuple: what compares lists needs to look at it once.
    tables = {packed: _unpack_tensors(packed) for packed in {each.tensors for each in columns}}
    lists = {
        packed: _unpack_held(packed)
        for each in columns
        for packed in (each.objects, each.small, each.numbering)
    }
    holdings = [
        Holdings(
            tensors=tables[each.tensors][0],
            regions=_wide(each.regions),
            objects=lists[each.objects],
            small=lists[each.small],
            numbering=lists[each.numbering],
        )
        for each in columns
    ]
    shared, objects = plan_job(holdings, options)
    paths = {name: path for _, of_table in tables.values() for name, path in of_table.items()}
    number_of = {facts.name: at for at, facts in enumerate(shared.tensors)}
    numbers: dict[tuple[int, frozenset[str]], Ints] = {}
    order = np.argsort(shared.rank, kind="stable")
    ends = np.searchsorted(shared.rank[order], np.arange(len(columns) + 1))
    parts = []
    for rank, (own, found) in enumerate(zip(holdings, objects, strict=True)):
        regions = shared.regions.take(order[ends[rank] : ends[rank + 1]])
        key = (id(own.tensors), found.own_tensors)
        if key not in numbers or found.own_tensors:
            renamed = rename_own_tensors(own, found.own_tensors, rank).tensors
            numbers[key] = np.array([number_of[facts.name] for facts in renamed], dtype=np.int64)
        parts.append(
            _RankPart(
                number=number,
                numbers=numbers[key],
                regions=_narrow((regions.tensor, regions.offsets, regions.sizes)),
                own_tensors=found.own_tensors,
                placed=found.placed,
                shared=found.shared,
                common=found.common,
            )
        )
    of_list: dict[tuple[str, ...], int] = {}
    for part in parts:
        of_list.setdefault(part.shared, len(of_list))
    differing, text = _compare_entries([each.entries for each in columns])
    job = JobPlan(
        number=number,
        tensors=shared.tensors,
        paths={facts.name: paths.get(facts.name, (facts.name,)) for facts in shared.tensors},
        lists=tuple(of_list[part.shared] for part in parts),
        is_comparable=_are_comparable(list(of_list), parts[0].common),
        differing_parts=differing,
        entries=text,
    )
    return job, parts


def _are_comparable(lists: Sequence[tuple[str, ...]], common: Collection[str]) -> bool:
    """Return True if every name is common to all ranks or in one list only."""
    known = set(common)
    partly = [name for names in lists for name in names if name not in known]
    return len(partly) == len(set(partly))


def unpack_part(part: _RankPart, holdings: Holdings, rank: int) -> RankShare:
    numbers, regions = np.asarray(part.numbers, dtype=np.int64), _wide(part.regions)
    # What is written is a part of what this rank holds, so each number is among its own.
    order = np.argsort(numbers)
    own = order[np.searchsorted(numbers, regions.tensor, sorter=order)] if len(regions) else regions.tensor
    return RankShare(
        number=part.number,
        tensors=rename_own_tensors(holdings, part.own_tensors, rank).tensors,
        numbers=numbers,
        regions=Regions(own, regions.offsets, regions.sizes),
        placed=part.placed,
        shared=part.shared,
        common=part.common,
    )


def summarize(share: RankShare, holdings: Holdings) -> bytes:
    """The number of the plan, and digests of what must still be equal on all ranks, and on some."""
    digests = {each.name: each.digest for each in (*holdings.objects, *holdings.small)}
    digests |= {f"{each.name}\0": each.digest for each in holdings.numbering}
    sums = (
        xxhash.xxh3_64_digest(b"".join(digests[name] for name in names))
        for names in (share.common, share.shared)
    )
    return share.number.to_bytes(8, "big") + b"".join(sums)


def _digest_holdings(holdings: Holdings, options: SaveOptions) -> bytes:
    """Equal for holdings that differ at most in the contents of objects."""
    rows = (
        f"{facts.name}\0{facts.dtype}\0{facts.shape}\0{facts.element_bytes}\0" for facts in holdings.tensors
    )
    digest = xxhash.xxh3_128("".join(rows).encode(errors="surrogatepass"))
    names = [[each.name for each in held] for held in (holdings.objects, holdings.small, holdings.numbering)]
    digest.update(f"{options!r}{names!r}".encode())
    regions = holdings.regions
    for column in (regions.tensor, regions.offsets, regions.sizes):
        digest.update(repr(column.shape).encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.digest()


def _pack(rows: object) -> bytes:
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def _pack_held(held: Sequence[HeldObject]) -> bytes:
    return _pack([[each.name, each.size_bytes, each.digest.hex()] for each in held]) if held else b""


def _unpack_held(packed: bytes) -> tuple[HeldObject, ...]:
    return tuple(
        HeldObject(name=name, size_bytes=size_bytes, digest=bytes.fromhex(digest))
        for name, size_bytes, digest in (json.loads(zlib.decompress(packed)) if packed else ())
    )


def _unpack_tensors(packed: bytes) -> tuple[tuple[TensorFacts, ...], dict[str, Path]]:
    rows = json.loads(zlib.decompress(packed))
    tensors = tuple(
        TensorFacts(name, dtype, tuple(shape), element_bytes) for name, dtype, shape, element_bytes, _ in rows
    )
    return tensors, {name: tuple(path) for name, _, _, _, path in rows if path is not None}


def _narrow(columns: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """The columns in four bytes a number where all of them fit."""
    limit = 1 << 31
    if all(int(column.max(initial=0)) < limit for column in columns):
        tensor, offsets, sizes = (column.astype(np.int32) for column in columns)
        return cast("tuple[Ints, Ints, Ints]", (tensor, offsets, sizes))
    return columns


def _wide(columns: tuple[Ints, Ints, Ints]) -> Regions:
    tensor, offsets, sizes = (column.astype(np.int64) for column in columns)
    return Regions(tensor, offsets, sizes)


def _compare_entries(packed: Sequence[bytes]) -> tuple[tuple[str, ...], str]:
    """The parts of the state whose entries differ between ranks, and which rank lacks which, as JSON.

        rank 0: a.x    rank 1: a.x, a.y
        ("'a'",), {"names": ["a.y"], "lacking": {"0": [0], "1": []}}

    No text if it would be too long for every rank that loads to read.
    """
    if len(set(packed)) < 2:
        return (), ""
    known = {each: frozenset(json.loads(zlib.decompress(each))) for each in set(packed)}
    names = [known[each] for each in packed]
    some = sorted(frozenset().union(*names) - frozenset.intersection(*names))
    numbers = {name: number for number, name in enumerate(some)}
    lacking = {
        str(rank): sorted(numbers[name] for name in numbers.keys() - own) for rank, own in enumerate(names)
    }
    text = json.dumps({"names": some, "lacking": lacking}, separators=(",", ":"))
    parts = tuple(sorted({repr(name.partition(".")[0]) for name in some}))
    return parts, text if len(text) <= MOST_ENTRIES_BYTES else ""


class LoadWish(NamedTuple):
    """The part of a checkpoint that one rank wants."""

    regions: Regions
    readable: Bools | None
    """By file of the checkpoint, whether this rank can open it; None: all ranks can open all of them."""
    host: str
    """Equal for ranks that can share memory; empty if that is unknown."""


class LoadShare(NamedTuple):
    """The part of a load's plan that one rank gets."""

    part: SharedLoadPlan | None
    """None if no rank wants anything that it has to read from storage."""
    near: Ints
    """The ranks of this one's host."""
    may_share_on_host: bool
    """True if ranks of one host may want the same bytes; equal on all ranks."""


def agree_on_load(
    comm: Comm, wish: Callable[[], LoadWish], stored: StoredRegions, element_bytes: Ints, options: LoadOptions
) -> LoadShare | UnreadableFile:
    """Plan a load on rank 0; return this rank's part, or the same error on all ranks. Collective."""

    def divide(wanted: list[LoadWish]) -> Sequence[LoadShare | UnreadableFile]:
        hosts = np.array([each.host for each in wanted])
        parts: Sequence[SharedLoadPlan | None] = [None] * len(wanted)
        may_share = False
        if any(len(each.regions) for each in wanted):
            readable = [each.readable for each in wanted if each.readable is not None]
            try:
                shared = plan_load(
                    stored,
                    element_bytes,
                    [each.regions for each in wanted],
                    options,
                    readable=np.stack(readable) if readable else None,
                )
            except UnreadableFile as error:
                return [error] * len(wanted)
            parts = divide_plan(shared, len(wanted))
            may_share = len(set(hosts.tolist())) < len(wanted) and (bool(readable) or shared.may_exchange)
        near = {host: np.flatnonzero(hosts == host) for host in set(hosts.tolist()) if host}
        nobody = np.zeros(0, dtype=np.int64)
        known: dict[tuple[int, str], LoadShare] = {}
        return [
            known.setdefault((id(part), host), LoadShare(part, near.get(host, nobody), may_share))
            for part, host in zip(parts, hosts.tolist(), strict=True)
        ]

    return divide_on_rank0(comm, wish, divide, awaiting="what all ranks want of the checkpoint")
