"""Plans a save among its ranks: each tensor is planned by one of them, and each rank learns its own share.

The plan is that of `save_plan.plan_save`, which is for those who have the holdings of all ranks.
Here they never meet in one place:

1. Tensors get common numbers, and each belongs to the rank that `Numbers.planner` says.
2. Ranks send their regions to the planners, which check coverage and find who holds what; they answer only
   about regions that several ranks hold.
3. Ranks that hold the same regions form a set. Rank 0 learns the bytes of each set and divides them.
4. Each rank cuts its part out of what it holds.

Invariant: all ranks return a share or all raise the same error, and the shares are those of `plan_save`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.checkpoint.plan import region_arithmetic as arithmetic
from penstock.checkpoint.plan import save_plan
from penstock.checkpoint.plan.save_plan import HeldObject
from penstock.checkpoint.state.regions import Ints, Regions, TensorFacts, element_sizes
from penstock.cluster import rounds
from penstock.cluster.rounds import Rounds

Path = tuple[str | int, ...]
Described = tuple[tuple[TensorFacts, Path], ...]


class Place(NamedTuple):
    """A rank among `size` ranks."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The tensors of a job, numbered as ranks list them: those of one rank, and how many there are."""

    own: Ints
    total: int
    num_ranks: int

    def planner(self, number: Ints) -> Ints:
        """The rank that plans and describes a tensor: neighbours in the order go to the same or the next."""
        return number * self.num_ranks // max(self.total, 1)

    def planned_by(self, rank: int) -> range:
        """The numbers of one rank's tensors."""
        begin, end = (-(-each * self.total // self.num_ranks) for each in (rank, rank + 1))
        return range(begin, end)


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """What one rank writes: regions of its own `tensors`, in the order in which they are written."""

    tensors: tuple[TensorFacts, ...]
    numbers: Numbers
    regions: Regions
    described: Described
    """The tensors that this rank planned and describes in the checkpoint, in the order of their numbers."""


def plan_share(
    place: Place,
    holdings: save_plan.Holdings,
    paths: Mapping[str, Path],
    options: save_plan.SaveOptions,
) -> Rounds[RankShare]:
    """What one rank writes; `paths` are the places of its tensors in the state."""
    numbers, described = yield from _number_tensors(place, holdings, paths)
    (width,) = yield from rounds.largest_of_all(*place, [holdings.regions.num_dims])
    own = holdings.regions.widened(width)
    planned = yield from _let_plan(place, numbers, own, [facts for facts, _ in described])
    answers = yield from _answer(place, planned, len(own))
    element_bytes = element_sizes(holdings.tensors)
    sets = _OwnSets.of(answers, numbers.own[own.tensor], own.num_bytes(element_bytes))
    shares = yield from _share_sets(place, numbers, planned, sets)
    regions = answers.cut(own, element_bytes, shares, options.min_cut_bytes)
    return RankShare(holdings.tensors, numbers, regions, described)


def digest_tensors(tensors: Sequence[TensorFacts]) -> bytes:
    """Equal for equal lists of tensors."""
    rows = (f"{facts.name}\0{facts.dtype}\0{facts.shape}\0{facts.element_bytes}\0" for facts in tensors)
    return xxhash.xxh3_128_digest("".join(rows).encode(errors="surrogatepass"))


def _number_tensors(
    place: Place, holdings: save_plan.Holdings, paths: Mapping[str, Path]
) -> Rounds[tuple[Numbers, Described]]:
    """The numbers of this rank's tensors, and those that it plans."""
    tensors = holdings.tensors
    if place.size == 1 or (yield from rounds.all_equal(*place, digest_tensors(tensors))):
        numbers = Numbers(np.arange(len(tensors)), len(tensors), place.size)
        return numbers, _with_paths((tensors[number] for number in numbers.planned_by(place.rank)), paths)
    own = _with_paths(tensors, paths)
    listed: list[TensorFacts | HeldObject] = [*tensors, *holdings.objects]
    words = [
        struct.unpack("<6i", xxhash.xxh3_128_digest(name) + xxhash.xxh3_64_digest(kind))
        for name, kind in map(_identify, listed)
    ]
    rows = np.zeros((len(listed), 8), dtype=np.int64)
    rows[:, :6] = np.array(words, dtype=np.int64).reshape(-1, 6)
    rows[:, 6], rows[:, 7] = place.rank, np.arange(len(listed))
    is_object = np.arange(len(listed)) >= len(tensors)
    seen = yield from _require_one_kind(place, listed, is_object, rows)
    names = arithmetic.group_equal_rows(seen[:, :4])
    # Who lists a name first gives it a number; the rank of the name hands it on to all who have it.
    first = seen[names.first]
    asked = np.stack([first[:, 7], np.full(len(first), place.rank), np.arange(len(first))], axis=1)
    firsts = yield from rounds.route(*place, first[:, 6], asked)
    firsts = firsts[np.argsort(firsts[:, 0], kind="stable")]
    ((begin, total),) = yield from rounds.count_before(*place, [len(firsts)])
    given = begin + np.arange(len(firsts))
    told = yield from rounds.route(*place, firsts[:, 1], np.stack([firsts[:, 2], given], axis=1))
    number_of_name = told[np.argsort(told[:, 0]), 1]
    handed_on = np.stack([seen[:, 7], number_of_name[names.number]], axis=1)
    known = yield from rounds.route(*place, seen[:, 6], handed_on)
    numbers = Numbers(known[np.argsort(known[:, 0]), 1], total, place.size)
    described = yield from _hand_descriptions(
        place, numbers, {number: own[row] for number, row in zip(given.tolist(), firsts[:, 0], strict=True)}
    )
    return numbers, described


def _with_paths(tensors: Iterable[TensorFacts], paths: Mapping[str, Path]) -> Described:
    return tuple((facts, paths.get(facts.name, (facts.name,))) for facts in tensors)


def _identify(held: TensorFacts | HeldObject) -> tuple[bytes, bytes]:
    kind = repr((held.dtype, held.shape)) if isinstance(held, TensorFacts) else "object"
    return held.name.encode(errors="surrogatepass"), kind.encode()


def _hand_descriptions(
    place: Place, numbers: Numbers, firsts: Mapping[int, tuple[TensorFacts, Path]]
) -> Rounds[Described]:
    """Send what this rank listed first to the planners; what this rank plans."""
    by_planner: dict[int, list[tuple[int, tuple[TensorFacts, Path]]]] = {}
    for number, each in firsts.items():
        planner = int(numbers.planner(np.array(number)))
        by_planner.setdefault(planner, []).append((number, each))
    texts = [(planner, pickle.dumps(part)) for planner, part in by_planner.items()]
    received = yield from rounds.route_texts(*place, texts)
    parts = sorted((each for _, text in received for each in _unpickled(text)), key=lambda part: part[0])
    return tuple(each for _, each in parts)


def _unpickled(text: bytes) -> Any:
    # Ranks of one job trust each other: a process that can send here already runs code as this user.
    return pickle.loads(text)  # noqa: S301 - as said


def _require_one_kind(
    place: Place, listed: Sequence[TensorFacts | HeldObject], is_object: NDArray[np.bool_], rows: Ints
) -> Rounds[Ints]:
    """The rows of tensors whose names this rank sees to, by rank.

    Raises if two ranks give one name different dtypes or shapes, or if it is an object on one of them.
    """
    rows = np.column_stack([rows, is_object])
    seen = yield from rounds.route(*place, rows[:, 0] % place.size, rows)
    seen = seen[np.lexsort((seen[:, 7], seen[:, 6]))]
    names = arithmetic.group_equal_rows(seen[:, :4])
    first = seen[names.first][names.number]
    wrong = np.flatnonzero((seen[:, 4:6] != first[:, 4:6]).any(axis=1))
    pairs = [struct.pack(">4Q", *seen[row, 6:8].tolist(), *first[row, 6:8].tolist()) for row in wrong]
    lowest = yield from rounds.lowest_of_all(*place, min(pairs, default=b""))
    if lowest:
        other_rank, other, one_rank, one = struct.unpack(">4Q", lowest)
        sides = []
        for rank, row in ((one_rank, one), (other_rank, other)):
            text = pickle.dumps(listed[row]) if rank == place.rank else b""
            sides.append(_unpickled((yield from rounds.first_of_all(*place, text))))
        raise save_plan.disagreement(sides[0], one_rank, sides[1], other_rank)
    return seen[seen[:, 8] == 0, :8]


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """What a planner knows of its tensors: a row for each region that some rank holds, in their order."""

    number: Ints
    rank: Ints
    row: Ints
    """The region's place in what its rank holds."""
    region: Ints
    """Equal regions have one number."""
    first: Ints
    """By region, the row here of the lowest rank that holds it."""
    is_written: Ints
    """By region; all but the empty regions of tensors that have elements, and one of each empty tensor."""
    sets: arithmetic.RankSets

    def answers(self) -> tuple[Ints, Ints]:
        """To whom, and: row, lowest holder, its row, duty (see `_Answers`), sum and size of the set."""
        sets, first = self.sets, self.first[self.region]
        of_row = sets.of_group[self.region]
        table = np.column_stack(
            [
                self.row,
                self.rank[first],
                self.row[first],
                np.where(self._repeats(), REPEATED, self.is_written[self.region]),
                sets.sums()[of_row],
                sets.size[of_row],
            ]
        )
        told = np.flatnonzero((sets.size[of_row] > 1) | (table[:, 3] != WRITTEN))
        return self.rank[told], table[told]

    def _repeats(self) -> Ints:
        """Whether the rank of a row holds this region in an earlier row, too."""
        pairs = self.region * (int(self.rank.max(initial=0)) + 1) + self.rank
        repeats = np.ones(len(pairs), dtype=np.int64)
        repeats[np.unique(pairs, return_index=True)[1]] = 0
        return repeats

    def members(self, asked: Ints) -> list[Ints]:
        """The ranks that hold the regions in rows of number, rank and row."""
        found = []
        for number, rank, row in asked.tolist():
            begin, end = np.searchsorted(self.number, [number, number + 1])
            at = begin + np.flatnonzero((self.rank[begin:end] == rank) & (self.row[begin:end] == row))[0]
            found.append(self.sets.ranks(int(self.sets.of_group[self.region[at]])))
        return found


REPEATED, UNWRITTEN, WRITTEN = -1, 0, 1


def _let_plan(
    place: Place, numbers: Numbers, own: Regions, tensors: Sequence[TensorFacts]
) -> Rounds[_Planned]:
    """Send this rank's regions to their planners; what it plans itself: the regions of `tensors`."""
    number = numbers.own[own.tensor]
    origin = np.stack([number, np.full(len(own), place.rank), np.arange(len(own))], axis=1)
    table = yield from rounds.route(
        *place, numbers.planner(number), np.concatenate([origin, own.offsets, own.sizes], axis=1)
    )
    table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
    begin, width = numbers.planned_by(place.rank).start, own.num_dims
    regions = Regions(table[:, 0] - begin, table[:, 3 : 3 + width], table[:, 3 + width :])
    groups = arithmetic.group_equal_rows(arithmetic.region_table(regions))
    unique = regions.take(groups.first)
    written = save_plan.worth_an_item(tensors, unique)
    error = b""
    try:
        save_plan.check_coverage(tensors, unique.take(written), where="what the ranks hold")
    except save_plan.NotCovered as found:
        row = next(number for number, facts in enumerate(tensors) if facts.name == found.tensor)
        error = struct.pack(">Q", begin + row) + pickle.dumps(found)
    lowest = yield from rounds.lowest_of_all(*place, error)
    if lowest:
        raise _unpickled(lowest[8:])
    is_written = np.full(len(groups), UNWRITTEN)
    is_written[written] = WRITTEN
    sets = arithmetic.find_rank_sets(groups.number, table[:, 1], len(groups))
    return _Planned(
        table[:, 0].copy(),
        table[:, 1].copy(),
        table[:, 2].copy(),
        groups.number,
        groups.first,
        is_written,
        sets,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """What planners say of this rank's regions, row by row."""

    rank: int
    leader: Ints
    """The lowest rank that holds the region; its rows give the order of all regions of a job."""
    leader_row: Ints
    duty: Ints
    """`WRITTEN`, `UNWRITTEN` for an empty region that nobody writes, `REPEATED` for one of an earlier row."""
    holders: Ints
    """A number for the set of ranks that hold the region with this one; -1: this rank alone."""

    def cut(self, own: Regions, element_bytes: Ints, shares: Ints, min_cut_bytes: int) -> Regions:
        """What the rank holds alone, and of each set the bytes that rank 0 gave it."""
        alone = np.flatnonzero((self.holders < 0) & (self.duty == WRITTEN))
        shared = np.flatnonzero((self.holders >= 0) & (self.duty != REPEATED))
        shared = shared[np.lexsort((self.leader_row[shared], self.holders[shared]))]
        held = own.take(shared)
        rows, source, begin, end = arithmetic.cut_own_parts(
            held, element_bytes, self.holders[shared], shares, min_cut_bytes=min_cut_bytes
        )
        is_kept = self.duty[shared[source]] == WRITTEN
        source, begin, end = source[is_kept], begin[is_kept], end[is_kept]
        parts = arithmetic.slice_rows(held.take(source), rows.dim[source], begin, end)
        regions = Regions.concatenated([own.take(alone), parts])
        at = np.concatenate([alone, shared[source]])
        return regions.take(np.lexsort((self.leader_row[at], self.leader[at])))


def _answer(place: Place, planned: _Planned, num_rows: int) -> Rounds[_Answers]:
    """Answer as a planner, and collect the answers of all planners."""
    told = yield from rounds.route(*place, *planned.answers())
    columns = np.empty((num_rows, 3), dtype=np.int64)
    columns[:] = place.rank, 0, WRITTEN
    columns[:, 1] = np.arange(num_rows)
    columns[told[:, 0]] = told[:, 1:4]
    holders = np.full(num_rows, -1)
    sets = arithmetic.group_equal_rows(told[:, 4:])
    holders[told[:, 0]] = np.where(told[:, 8] > 1, sets.number, -1)
    # Numbers of sets without gaps, as lists have them.
    _, dense = np.unique(holders[holders >= 0], return_inverse=True)
    holders[holders >= 0] = dense
    return _Answers(place.rank, columns[:, 0], columns[:, 1], columns[:, 2], holders)


@dataclass(frozen=True, slots=True, eq=False)
class _OwnSets:
    """The sets of ranks that hold regions with this one; named by the lowest rank and its first such row."""

    leader: Ints
    first_row: Ints
    number: Ints
    """Of the tensor of this first region."""
    total: Ints
    """The bytes of all regions of a set."""
    alone_bytes: int
    """What this rank holds alone."""

    @classmethod
    def of(cls, answers: _Answers, number: Ints, num_bytes: Ints) -> _OwnSets:
        """From answers, and the tensor and the bytes of each row."""
        num_sets = int(answers.holders.max(initial=-1)) + 1
        once = np.flatnonzero(answers.duty != REPEATED)
        is_alone = answers.holders[once] < 0
        shared = once[~is_alone]
        shared = shared[np.lexsort((answers.leader_row[shared], answers.holders[shared]))]
        first = shared[np.searchsorted(answers.holders[shared], np.arange(num_sets))]
        total = np.zeros(num_sets, dtype=np.int64)
        np.add.at(total, answers.holders[shared], num_bytes[shared])
        alone_bytes = int(num_bytes[once[is_alone]].sum())
        return cls(answers.leader[first], answers.leader_row[first], number[first], total, alone_bytes)


_ALONE, _SET, _MEMBERS = range(3)


def _share_sets(place: Place, numbers: Numbers, planned: _Planned, own: _OwnSets) -> Rounds[Ints]:
    """For each of this rank's sets, the bytes of it that this rank writes, as `cut_own_parts` wants them."""
    shares = np.zeros((len(own.leader), 3), dtype=np.int64)
    if not (yield from rounds.any_of_all(*place, own=len(shares) > 0)):
        return shares
    # Only planners know who is in a set: the lowest rank of each asks one of them to tell rank 0.
    led = np.flatnonzero(own.leader == place.rank)
    question = np.stack([own.number[led], np.full(len(led), place.rank), own.first_row[led]], axis=1)
    asked = yield from rounds.route(*place, numbers.planner(own.number[led]), question)
    messages = [[_ALONE, place.rank, own.alone_bytes, 0, 0, 0]]
    messages += [
        [_SET, place.rank, row, total, 0, 0]
        for row, total in np.stack([own.first_row[led], own.total[led]], axis=1).tolist()
    ]
    for (_, rank, row), ranks in zip(asked.tolist(), planned.members(asked), strict=True):
        messages += [[_MEMBERS, rank, row, *run] for run in runs_of(ranks)]
    table = np.array(messages, dtype=np.int64)
    heard = yield from rounds.route(*place, np.zeros(len(table), dtype=np.int64), table)
    told = yield from rounds.route(*place, *_divide_sets(heard, place.size))
    # Both lists in the order of the sets' names.
    told = told[np.lexsort((told[:, 1], told[:, 0]))]
    shares[np.lexsort((own.first_row, own.leader))] = told[:, 2:]
    return shares


def runs_of(ranks: Ints) -> list[list[int]]:
    """Ascending numbers as runs with one distance each: (first, distance, count)."""
    steps = np.diff(ranks)
    if not len(steps) or (steps == steps[0]).all():
        return [[int(ranks[0]), int(steps[0]) if len(steps) else 1, len(ranks)]]
    begins = np.concatenate([[0], np.flatnonzero(steps != 1) + 1, [len(ranks)]])
    return [[int(ranks[begin]), 1, int(end - begin)] for begin, end in pairwise(begins.tolist())]


def _divide_sets(heard: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """On rank 0: to whom, and: name of the set, begin and end of the share, and which ends of the set it has.

    The order of the sets is that of `region_arithmetic.divide_among_ranks`, so the shares are the same.
    """
    alone, sets, runs = (heard[heard[:, 0] == kind] for kind in (_ALONE, _SET, _MEMBERS))
    load = np.zeros(num_ranks, dtype=np.int64)
    load[alone[:, 1]] = alone[:, 2]
    sets = sets[np.lexsort((sets[:, 2], sets[:, 1]))]
    runs = runs[np.lexsort((runs[:, 3], runs[:, 2], runs[:, 1]))]
    # The runs of a set follow each other, and those of all sets are in the order of the sets.
    is_first = np.ones(len(runs), dtype=np.bool_)
    is_first[1:] = (runs[1:, 1:3] != runs[:-1, 1:3]).any(axis=1)
    owner, place = arithmetic.expand_ranges(np.zeros(len(runs), dtype=np.int64), runs[:, 5])
    members = runs[owner, 3] + place * runs[owner, 4]
    of_set = (np.cumsum(is_first) - 1)[owner]
    size = np.bincount(of_set, minlength=len(sets))
    start = np.cumsum(size) - size
    rank_sets = arithmetic.RankSets(np.arange(len(sets)), start, size, members)
    begin, end = arithmetic.level_sets(rank_sets, sets[:, 3], load)
    within = np.arange(len(members)) - start[of_set]
    which_end = (within == 0) + 2 * (within == size[of_set] - 1)
    return members, np.column_stack([sets[of_set, 1], sets[of_set, 2], begin, end, which_end])
