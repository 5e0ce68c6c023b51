"""Plans a load among its ranks: each learns of the checkpoint what it reads, and with whom it shares that.

The plan of `load_plan.plan_load` is for those who know what all ranks want, and where everything is.
Here neither meets in one place:

1. Tensors and common objects have numbers, and each belongs to the rank that `Numbers.planner` says. It gets
   the places of all parts of the tensor, from whoever read them, and what every rank wants of it.
2. It checks that what is wanted is stored, and tells each rank the places of it.
3. Ranks that want the same regions form sets of at most `FAN_IN`. A set plans its own load by `plan_load`:
   all of its members know the same, so they need not talk about it.

Invariant: all ranks return a plan or all raise the same error. What a rank gets depends on what it wants, and
it exchanges bytes with no more than the other members of its sets.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.checkpoint.plan import region_arithmetic as arithmetic
from penstock.checkpoint.plan.load_plan import (
    LoadOptions,
    LoadPlan,
    Pieces,
    Requests,
    SharedLoadPlan,
    plan_load,
    plan_rank_load,
    uncovered,
)
from penstock.checkpoint.plan.shared_plan import Numbers, Place
from penstock.checkpoint.state.regions import Bools, Ints, Regions, StoredRegions, TensorFacts
from penstock.cluster import rounds
from penstock.cluster.rounds import FAN_IN, Rounds

NUM_SUM_WORDS = 4
"""A checksum of 16 bytes as numbers that can travel with others."""


@dataclass(frozen=True, slots=True, eq=False)
class DescribedRows:
    """Rows of a checkpoint's index, with the checksums of their items as `NUM_SUM_WORDS` numbers each."""

    stored: StoredRegions
    sums: Ints

    def table(self, width: int) -> Ints:
        """A row for each: tensor, place in it, file, item's offset and bytes, payload in it, packed, sum."""
        stored, regions = self.stored, self.stored.regions.widened(width)
        payload = np.where(stored.payload_offset < 0, -1, stored.payload_offset - stored.item_offset)
        return np.column_stack(
            [
                *(regions.tensor, regions.offsets, regions.sizes),
                *(stored.file, stored.item_offset, stored.item_bytes, payload, stored.packed),
                self.sums,
            ]
        )

    @classmethod
    def from_table(cls, table: Ints, width: int) -> DescribedRows:
        """The rows of `table`."""
        regions = Regions(table[:, 0], table[:, 1 : 1 + width], table[:, 1 + width : 1 + 2 * width])
        file, offset, size, payload, packed = table[:, 1 + 2 * width : 6 + 2 * width].T
        payload = np.where(payload < 0, -1, payload + offset)
        stored = StoredRegions(regions, file, offset, size, payload, packed.astype(np.bool_))
        return cls(stored, table[:, 6 + 2 * width :])


@dataclass(frozen=True, slots=True, eq=False)
class FoundRows:
    """What one rank learns of a checkpoint: the rows that its regions are in, and who wants the same."""

    described: DescribedRows
    """In the order of files and positions."""
    set_of_row: Ints
    """By wanted row, the number of its set; -1: this rank reads it for itself."""
    members: tuple[Ints, ...]
    """The ranks of each set, ascending; the sets are in an order that is the same on all of their members."""


def find_rows(
    place: Place,
    *,
    tensors: Sequence[TensorFacts],
    num_objects: int,
    described: DescribedRows,
    wanted: Regions,
    shares: Callable[[DescribedRows], Bools],
    where: str,
) -> Rounds[FoundRows]:
    """Where this rank's regions are, and which ranks want the same ones.

    `described` has what this rank read of the checkpoint's description, which may be nothing or any part.
    `num_objects` that all ranks know are numbered after the tensors, with one region each. `shares` says,
    once the rows are found, which wanted regions other ranks may read for this one.
    """
    numbers = Numbers(np.zeros(0, dtype=np.int64), len(tensors) + num_objects, place.size)
    (width,) = yield from rounds.largest_of_all(
        *place, [max(wanted.num_dims, described.stored.regions.num_dims)]
    )
    # What has been sent is kept by no name here: all ranks of a host have as much of it at the same time.
    rows = yield from rounds.route(*place, *_to_planners(numbers, described.table(width)))
    del described
    own = wanted.widened(width)
    origin = np.column_stack([own.tensor, np.full(len(own), place.rank), np.arange(len(own))])
    # What only this rank knows has no planner.
    is_common = own.tensor < numbers.total
    wants = yield from rounds.route(
        *place, *_to_planners(numbers, np.column_stack([origin, own.offsets, own.sizes])[is_common])
    )
    planner = _Planner.of(rows, wants, width, len(tensors))
    del rows, wants
    yield from _require_stored(place, planner, tensors, where)
    found = _without_repeats((yield from rounds.route(*place, *planner.places()))[:, 1:], width)
    shared = origin[is_common & ~_repeats(wanted) & shares(found)]
    sharing = _Sharing.of(
        planner, (yield from rounds.route(*place, numbers.planner(shared[:, 0]), shared[:, 1:]))
    )
    del planner, origin, shared
    set_of_row, members = yield from _find_sets(place, numbers, sharing, own)
    return FoundRows(found, set_of_row, members)


def _to_planners(numbers: Numbers, table: Ints) -> tuple[Ints, Ints]:
    """To whom, and the rows of a table that begins with the number of a tensor."""
    return numbers.planner(table[:, 0]), table


def _repeats(regions: Regions) -> Bools:
    """Whether an earlier row is equal."""
    repeats = np.ones(len(regions), dtype=np.bool_)
    repeats[arithmetic.group_equal_rows(arithmetic.region_table(regions)).first] = False
    return repeats


def _without_repeats(table: Ints, width: int) -> DescribedRows:
    """Each row once, in the order of files and positions."""
    at = 1 + 2 * width
    table = table[np.lexsort((table[:, at + 2], table[:, at + 1], table[:, at]))]
    is_first = np.ones(len(table), dtype=np.bool_)
    is_first[1:] = (table[1:] != table[:-1]).any(axis=1)
    return DescribedRows.from_table(table[is_first], width)


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """What the planner of some tensors knows: where their parts are, and the wishes of ranks, in order."""

    rows: Ints
    """Of the table of `DescribedRows`, in the order of tensors, files and positions."""
    rank: Ints
    row: Ints
    region: Ints
    """Equal wanted regions have one number."""
    regions: Regions
    met: arithmetic.Overlaps
    """Of `regions` and `rows`."""

    @classmethod
    def of(cls, rows: Ints, wants: Ints, width: int, num_tensors: int) -> _Planner:
        at = 1 + 2 * width
        rows = rows[np.lexsort((rows[:, at + 1], rows[:, at], rows[:, 0]))]
        wants = wants[np.lexsort((wants[:, 2], wants[:, 1]))]
        wanted = Regions(wants[:, 0], wants[:, 3 : 3 + width], wants[:, 3 + width :])
        groups = arithmetic.group_equal_rows(arithmetic.region_table(wanted))
        regions = wanted.take(groups.first)
        # Objects have one place, which all know.
        of_tensors = np.flatnonzero(regions.tensor < num_tensors)
        stored = Regions(rows[:, 0], rows[:, 1 : 1 + width], rows[:, 1 + width : at])
        met = arithmetic.find_overlaps(regions.take(of_tensors), stored)
        return cls(
            rows,
            wants[:, 1].copy(),
            wants[:, 2].copy(),
            groups.number,
            regions,
            arithmetic.Overlaps(of_tensors[met.left], met.right, met.regions),
        )

    def missing(self, num_tensors: int) -> Ints:
        """How many elements of each region are not stored; negative if some are stored twice."""
        missing = np.where(self.regions.tensor < num_tensors, self.regions.num_elements, 0)
        np.subtract.at(missing, self.met.left, self.met.regions.num_elements)
        return missing

    def places(self) -> tuple[Ints, Ints]:
        """To whom, and: the wish, and the row of the table that it is in."""
        begin = np.searchsorted(self.met.left, self.region)
        count = np.searchsorted(self.met.left, self.region, side="right") - begin
        owner, at = arithmetic.expand_ranges(begin, count)
        return self.rank[owner], np.column_stack([self.row[owner], self.rows[self.met.right[at]]])

    def regions_of(self, wishes: Ints) -> Ints:
        """The numbers of the regions of wishes, by rank and row."""
        return self.region[np.searchsorted(self.rank << 32 | self.row, wishes[:, 0] << 32 | wishes[:, 1])]


@dataclass(frozen=True, slots=True, eq=False)
class _Sharing:
    """What a planner knows of ranks that want the same."""

    wishes: Ints
    """Rank and row, in this order; of one rank none for the same region."""
    sets: arithmetic.RankSets
    """By wish; of at most `FAN_IN` ranks each."""

    @classmethod
    def of(cls, planner: _Planner, wishes: Ints) -> _Sharing:
        wishes = wishes[np.lexsort((wishes[:, 1], wishes[:, 0]))]
        region = planner.regions_of(wishes)
        order = np.argsort(region, kind="stable")
        within = np.empty(len(wishes), dtype=np.int64)
        within[order] = np.arange(len(wishes)) - np.searchsorted(region[order], region[order])
        parts = arithmetic.group_equal_rows(np.column_stack([region, within // FAN_IN]))
        sets = arithmetic.find_rank_sets(parts.number, wishes[:, 0], len(parts))
        return cls(wishes, sets.of_rows(parts.number))

    def answers(self) -> tuple[Ints, Ints]:
        """To whom, and: the wish, and sum and size of its set, if there are others in it."""
        size = self.sets.size[self.sets.of_group]
        told = np.flatnonzero(size > 1)
        sums = self.sets.sums()[self.sets.of_group[told]]
        return self.wishes[told, 0], np.column_stack([self.wishes[told, 1], sums, size[told]])

    def members(self, asked: Ints) -> tuple[Ints, Ints]:
        """To whom, and: the wish that was asked about, and one rank of its set."""
        keys = self.wishes[:, 0] << 32 | self.wishes[:, 1]
        of_set = self.sets.of_group[np.searchsorted(keys, asked[:, 0] << 32 | asked[:, 1])]
        owner, place = arithmetic.expand_ranges(self.sets.start[of_set], self.sets.size[of_set])
        return asked[owner, 0], np.column_stack([asked[owner, 1], self.sets.members[place]])


def _require_stored(
    place: Place, planner: _Planner, tensors: Sequence[TensorFacts], where: str
) -> Rounds[None]:
    """Raise the same `DataDamaged` on all ranks if something that is wanted is not stored exactly once."""
    missing = planner.missing(len(tensors))
    bad = np.flatnonzero(missing)
    own = b""
    if len(bad):
        row = bad[np.lexsort(arithmetic.region_table(planner.regions)[bad].T[::-1])[0]]
        number = int(planner.regions.tensor[row])
        own = struct.pack(">Q", number) + pickle.dumps(
            uncovered(tensors[number], planner.regions, int(row), int(missing[row]), where)
        )
    lowest = yield from rounds.lowest_of_all(*place, own)
    if lowest:
        # Ranks of one job trust each other: a process that can send here already runs code as this user.
        raise pickle.loads(lowest[8:])  # noqa: S301 - as said


def _find_sets(
    place: Place, numbers: Numbers, sharing: _Sharing, own: Regions
) -> Rounds[tuple[Ints, tuple[Ints, ...]]]:
    """The set of each wanted row, and the ranks of each set."""
    answers = yield from rounds.route(*place, *sharing.answers())
    set_of_row = np.full(len(own), -1)
    if not (yield from rounds.any_of_all(*place, own=len(answers) > 0)):
        return set_of_row, ()
    # In the order of the sums, which is the same on all members of a set.
    answers = answers[np.lexsort(answers.T[::-1][:-1])]
    sets = arithmetic.group_equal_rows(answers[:, 1:])
    set_of_row[answers[:, 0]] = sets.number
    first = answers[sets.first, 0]
    question = np.column_stack([np.full(len(first), place.rank), first])
    asked = yield from rounds.route(*place, numbers.planner(own.tensor[first]), question)
    told = yield from rounds.route(*place, *sharing.members(asked))
    return set_of_row, tuple(np.sort(told[told[:, 0] == row, 1]) for row in first.tolist())


def plan_own_load(
    rank: int,
    stored: StoredRegions,
    element_bytes: Ints,
    wanted: Regions,
    *,
    found: FoundRows,
    options: LoadOptions,
    near: Ints,
) -> LoadPlan:
    """What one rank does: each of its sets loads what its members want, one set after another.

    `stored` has the rows that were found and those of objects. The ranks `near` see what this rank reads, and
    it what they read, without messages.
    """
    parts = []
    for number in range(-1, len(found.members)):
        rows = np.flatnonzero(found.set_of_row == number)
        members = np.array([rank]) if number < 0 else found.members[number]
        # All members list what they want in one order, whatever that of their states is.
        rows = rows[np.lexsort(arithmetic.region_table(wanted.take(rows)).T[::-1])]
        shared = plan_load(stored, element_bytes, [wanted.take(rows)] * len(members), options)
        parts.append(_for_members(shared, members, rows, rank))
    # Sets come before what this rank reads for itself, as others wait for them.
    return plan_rank_load(_one_after_another([*parts[1:], parts[0]]), element_bytes, rank, options, near=near)


def _for_members(shared: SharedLoadPlan, members: Ints, rows: Ints, rank: int) -> SharedLoadPlan:
    """A plan for the ranks 0, 1, 2... as one for `members`; `rows` are those of `rank`."""
    requests = shared.requests
    ranks = members[requests.rank]
    own_rows = np.where(ranks == rank, rows[requests.row] if len(rows) else requests.row, requests.row)
    return replace(
        shared,
        share_rank=members[shared.share_rank],
        requests=Requests(requests.want, ranks, own_rows),
    )


def _one_after_another(parts: Sequence[SharedLoadPlan]) -> SharedLoadPlan:
    """Plans of different regions as one whose rounds, too, come one after another.

    All ranks have their sets in one order, so no two ranks wait for each other in different rounds.
    """
    if len(parts) == 1:
        return parts[0]
    units = np.cumsum([0, *(int(part.pieces.unit.max(initial=-1)) + 1 for part in parts)])
    wants = np.cumsum([0, *(int(part.requests.want.max(initial=-1)) + 1 for part in parts)])
    in_rounds = np.cumsum([0, *(int(part.share_round.max(initial=-1)) + 1 for part in parts)])

    def joined(columns: Sequence[Ints], starts: Ints | None = None) -> Ints:
        shifted = columns if starts is None else [c + s for c, s in zip(columns, starts[:-1], strict=True)]
        return np.concatenate(list(shifted))

    return SharedLoadPlan(
        stored=parts[0].stored,
        share_unit=joined([part.share_unit for part in parts], units),
        share_row=joined([part.share_row for part in parts]),
        share_regions=Regions.concatenated([part.share_regions for part in parts]),
        share_rank=joined([part.share_rank for part in parts]),
        share_round=joined([part.share_round for part in parts], in_rounds),
        pieces=Pieces(
            joined([part.pieces.want for part in parts], wants),
            joined([part.pieces.unit for part in parts], units),
            Regions.concatenated([part.pieces.regions for part in parts]),
        ),
        requests=Requests(
            joined([part.requests.want for part in parts], wants),
            joined([part.requests.rank for part in parts]),
            joined([part.requests.row for part in parts]),
        ),
    )
