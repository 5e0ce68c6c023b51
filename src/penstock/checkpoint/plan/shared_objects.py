"""Finds, among the ranks of a save, which of their objects are equal, and who writes each.

The outcome is that of `find_own_tensors`, `require_same_numbering` and `assign_objects` of `save_plan`, which
get the lists of all ranks. Here each name belongs to one rank, which compares the digests of all who have it.
Invariant: every object is written by a rank that has it; all ranks return or all raise the same error.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from penstock.checkpoint.plan import save_plan
from penstock.checkpoint.plan.region_arithmetic import group_equal_rows
from penstock.checkpoint.plan.save_plan import HeldObject, Holdings, PlacedObject
from penstock.checkpoint.plan.shared_plan import Place, runs_of
from penstock.checkpoint.state.regions import Ints
from penstock.cluster import rounds
from penstock.cluster.rounds import Rounds

_OBJECT, _SMALL, _NUMBERING = range(3)


@dataclass(frozen=True, slots=True)
class SharedObjects:
    """What became of the objects that one rank holds."""

    own_tensors: frozenset[str]
    """Small tensors that differ from those of the lowest rank that has them."""
    placed: tuple[PlacedObject, ...]
    """What this rank writes."""
    compared: tuple[tuple[int, str], ...]
    """Kind and name of what several ranks have alike: while these stay equal, all of this stays."""

    def digest(self, holdings: Holdings) -> bytes:
        """Of what has to stay equal on all ranks."""
        held = {(kind, each.name): each for kind, each in _listed(holdings)}
        common = [held[key] for key in self.compared]
        return xxhash.xxh3_128_digest(
            repr([(each.name, each.size_bytes, each.digest) for each in common]).encode()
        )

    def updated(self, holdings: Holdings) -> SharedObjects:
        """The same with the sizes that objects have by now."""
        sizes = {each.name: each.size_bytes for each in holdings.objects}
        placed = tuple(
            PlacedObject(name=each.name, stored_name=each.stored_name, size_bytes=sizes[each.name])
            for each in self.placed
        )
        return SharedObjects(self.own_tensors, placed, self.compared)


def names_of_objects(holdings: Holdings) -> bytes:
    """Equal for lists of equal names."""
    return xxhash.xxh3_128_digest(repr([(kind, each.name) for kind, each in _listed(holdings)]).encode())


def _listed(holdings: Holdings) -> list[tuple[int, HeldObject]]:
    return [
        (kind, each)
        for kind, those in (
            (_OBJECT, holdings.objects),
            (_SMALL, holdings.small),
            (_NUMBERING, holdings.numbering),
        )
        for each in those
    ]


def share_objects(place: Place, holdings: Holdings) -> Rounds[SharedObjects]:
    """Compare what ranks hold under the same names, and say who writes it."""
    listed = _listed(holdings)
    together = repr([(kind, each.name, each.size_bytes, each.digest) for kind, each in listed])
    if (yield from rounds.all_equal(*place, xxhash.xxh3_128_digest(together.encode()))):
        writers = _spread([each.size_bytes for each in holdings.objects], place.size)
        placed = [
            PlacedObject(name=each.name, stored_name=each.name, size_bytes=each.size_bytes)
            for each, writer in zip(holdings.objects, writers, strict=True)
            if writer == place.rank
        ]
        compared = tuple((kind, each.name) for kind, each in listed)
        return SharedObjects(frozenset(), tuple(placed), compared)
    answers = yield from _compare(place, listed)
    return _collect(place.rank, listed, answers)


def _spread(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The writer of each object if all ranks share all: the one with the fewest bytes so far."""
    load = np.zeros(min(num_ranks, len(sizes)), dtype=np.int64)
    writers = []
    for size_bytes in sizes:
        writers.append(int(np.argmin(load)))
        load[writers[-1]] += max(size_bytes, 1)
    return writers


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """By place in a rank's list."""

    differs: Ints
    is_common: Ints
    """Whether several ranks have the same."""
    order: Ints
    """(n, 2): the lowest rank that has the name, and its place there."""
    writes: frozenset[tuple[int, int]]
    """By order: the objects shared with others, or not, that this rank writes under their plain names."""


def _compare(place: Place, listed: Sequence[tuple[int, HeldObject]]) -> Rounds[_Answers]:
    table = np.zeros((len(listed), 12), dtype=np.int64)
    for row, (kind, each) in enumerate(listed):
        # What is an object on one rank and a small tensor on another has one name, and differs.
        space = _NUMBERING if kind == _NUMBERING else _OBJECT
        name = xxhash.xxh3_128_digest(f"{space}{each.name}".encode(errors="surrogatepass"))
        digest = each.digest if kind == _OBJECT else bytes([kind]) + each.digest
        table[row, :8] = struct.unpack("<8i", name + xxhash.xxh3_128_digest(digest))
        table[row, 8:] = each.size_bytes, kind, place.rank, row
    seen = yield from rounds.route(*place, table[:, 0] % place.size, table)
    seen = seen[np.lexsort((seen[:, 11], seen[:, 10]))]
    names = group_equal_rows(seen[:, :4])
    first = seen[names.first]
    differs = (seen[:, 4:8] != first[names.number, 4:8]).any(axis=1)
    num_alike = np.bincount(names.number[~differs], minlength=len(names))
    yield from _require_same_numbering(place, listed, seen[differs], first[names.number[differs]])
    is_alike = num_alike[names.number] > 1
    answers = np.column_stack([seen[:, 11], differs, is_alike, first[names.number, 10:]])
    told = yield from rounds.route(*place, seen[:, 10], answers)
    told = told[np.argsort(told[:, 0])]
    is_object = first[:, 9] == _OBJECT
    messages = [
        message
        for number in np.flatnonzero(is_object).tolist()
        for message in _report(first[number], seen[names.number == number], place.size)
    ]
    report = np.array(messages, dtype=np.int64).reshape(-1, 6)
    heard = yield from rounds.route(*place, np.zeros(len(report), dtype=np.int64), report)
    to, orders = _choose_writers(heard, place.size)
    written = yield from rounds.route(*place, to, orders)
    return _Answers(told[:, 1], told[:, 2], told[:, 3:], frozenset(map(tuple, written.tolist())))


def _require_same_numbering(
    place: Place, listed: Sequence[tuple[int, HeldObject]], differing: Ints, first: Ints
) -> Rounds[None]:
    """Raise if one number means different parameters on two ranks."""
    wrong = [
        struct.pack(">3Q", *differing[row, 10:].tolist(), int(first[row, 10]))
        for row in np.flatnonzero(differing[:, 9] == _NUMBERING)
    ]
    lowest = yield from rounds.lowest_of_all(*place, min(wrong, default=b""))
    if lowest:
        rank, row, other = struct.unpack(">3Q", lowest)
        own = listed[row][1].name.encode() if rank == place.rank else b""
        name = yield from rounds.first_of_all(*place, own)
        raise save_plan.numbered_otherwise(name.decode(), rank, other)


_COMMON, _SHARERS, _OTHER = range(3)


def _report(first: Ints, those: Ints, num_ranks: int) -> list[list[int]]:
    """What rank 0 has to know of one object, row by row: order, kind of row, and three numbers."""
    order = first[10:].tolist()
    alike = (those[:, 4:8] == first[4:8]).all(axis=1)
    messages = [[*order, _COMMON, int(first[8]), 0, 0]]
    if alike.sum() < num_ranks:
        messages += [[*order, _SHARERS, *run] for run in runs_of(those[alike, 10])]
    return messages + [[*order, _OTHER, rank, size, 0] for size, rank in those[~alike][:, [8, 10]].tolist()]


def _choose_writers(heard: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """On rank 0: the writer of each common object, and the object's order."""
    heard = heard[np.lexsort((heard[:, 3], heard[:, 2], heard[:, 1], heard[:, 0]))]
    load = np.zeros(num_ranks, dtype=np.int64)
    begins = np.flatnonzero(heard[:, 2] == _COMMON)
    to = []
    for begin, end in zip(begins, [*begins, len(heard)][1:], strict=True):
        rows = heard[begin:end]
        runs = rows[rows[:, 2] == _SHARERS, 3:].tolist()
        listed = [first + step * np.arange(count) for first, step, count in runs]
        sharers = np.concatenate(listed) if listed else np.arange(num_ranks)
        writer = int(sharers[np.argmin(load[sharers])])
        to.append(writer)
        load[writer] += max(int(rows[0, 3]), 1)
        others = rows[rows[:, 2] == _OTHER]
        np.add.at(load, others[:, 3], np.maximum(others[:, 4], 1))
    return np.array(to, dtype=np.int64), heard[begins, :2]


def _collect(rank: int, listed: Sequence[tuple[int, HeldObject]], answers: _Answers) -> SharedObjects:
    own_tensors, compared = set(), []
    placed: list[tuple[tuple[int, int], PlacedObject]] = []
    for row, (kind, each) in enumerate(listed):
        differs, order = bool(answers.differs[row]), tuple(answers.order[row].tolist())
        if answers.is_common[row] and not differs:
            compared.append((kind, each.name))
        if kind == _SMALL and differs:
            own_tensors.add(each.name)
        if kind == _OBJECT and (differs or order in answers.writes):
            stored_name = save_plan.rank_object_name(each.name, rank) if differs else each.name
            one = PlacedObject(name=each.name, stored_name=stored_name, size_bytes=each.size_bytes)
            placed.append((order, one))
    placed.sort(key=lambda pair: pair[0])
    return SharedObjects(frozenset(own_tensors), tuple(one for _, one in placed), tuple(compared))


MOST_ENTRIES_BYTES = 4 << 20
"""More is not written down, as all ranks read it."""


@dataclass(frozen=True, slots=True)
class ComparedEntries:
    """Which entries not all ranks have: the parts of the state that they are in, and whose they are as JSON.

    Nothing on other ranks than 0, and no text of too many.
    """

    parts: tuple[str, ...] = ()
    text: str = ""


def compare_entries(place: Place, names: frozenset[str]) -> Rounds[ComparedEntries]:
    """Find out on rank 0 which of the names, of which each rank has its own, some ranks lack."""
    own = "\0".join(sorted(names)).encode(errors="surrogatepass")
    if (yield from rounds.all_equal(*place, xxhash.xxh3_128_digest(own))):
        return ComparedEntries()
    packed = yield from rounds.first_of_all(*place, b"" if place.rank else b"1" + zlib.compress(own))
    others = zlib.decompress(packed[1:]).decode(errors="surrogatepass")
    names0 = frozenset(others.split("\0")) if others else frozenset[str]()
    differing = sorted(names - names0), sorted(names0 - names)
    parts = sorted({name.partition(".")[0] for some in differing for name in some})
    is_short = sum(len(name) for some in differing for name in some) <= MOST_ENTRIES_BYTES // place.size
    told = json.dumps([parts, *(differing if is_short else ())]).encode()
    heard = yield from rounds.route_texts(*place, [(0, told)])
    if place.rank:
        return ComparedEntries()
    found = [json.loads(text) for _, text in heard]
    text = _describe_entries([(more, less) for _, more, less in found]) if all(map(_is_whole, found)) else ""
    in_parts = tuple(sorted({repr(part) for parts, *_ in found for part in parts}))
    return ComparedEntries(in_parts, text if len(text) <= MOST_ENTRIES_BYTES else "")


def _is_whole(told: list[list[str]]) -> bool:
    return len(told) > 1


def _describe_entries(found: Sequence[tuple[list[str], list[str]]]) -> str:
    """From what each rank has more and less than rank 0."""
    some = sorted({name for names in found for part in names for name in part})
    numbers = {name: number for number, name in enumerate(some)}
    added = {name for more, _ in found for name in more}
    lacking = {
        str(rank): sorted(numbers[name] for name in added.difference(more).union(less))
        for rank, (more, less) in enumerate(found)
    }
    return json.dumps({"names": some, "lacking": lacking}, separators=(",", ":"))
