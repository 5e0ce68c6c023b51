"""Planning for all ranks on rank 0: objects that differ, names of two kinds, and what ranks exchange."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.plan.states import jobs

from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    NotCovered,
    SaveOptions,
    assign_objects,
    pack_holdings,
    plan_save,
    plan_shares,
    unpack_share,
)
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.checkpoint.state.walk import (
    OWN_ENTRIES,
    Path,
    find_stored_name,
    rank_object_name,
    read_entries,
)
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[TensorFacts, Any]


def lists_of(names: list[str]) -> st.SearchStrategy[tuple[HeldObject, ...]]:
    held = st.builds(
        lambda name, content: HeldObject(name=name, size_bytes=len(content), digest=content),
        name=st.sampled_from(names),
        content=st.sampled_from([b"", b"a", b"bcd"]),
    )
    return st.lists(held, unique_by=lambda each: each.name, max_size=4).map(tuple)


lists = lists_of(["rng", "step", "lr", "loader"])


@given(job=st.lists(lists, min_size=1, max_size=5), data=st.data())
def test_each_rank_finds_its_own_whether_it_is_a_tensor_or_an_object(
    job: list[tuple[HeldObject, ...]], data: st.DataObject
) -> None:
    kinds = [{each.name: data.draw(st.booleans()) for each in held} for held in job]
    holdings = [
        Holdings(
            tensors=(),
            regions=Regions.from_rows([]),
            objects=tuple(each for each in held if not is_tensor[each.name]),
            compared=tuple(each for each in held if is_tensor[each.name]),
        )
        for held, is_tensor in zip(job, kinds, strict=True)
    ]
    shared = assign_objects(holdings)
    stored: dict[str, set[tuple[bool, bytes]]] = {}
    for rank, (own, found) in enumerate(zip(holdings, shared, strict=True)):
        contents = {each.name: each.digest for each in own.objects}
        for placed in found.placed:
            assert placed.stored_name not in stored
            stored[placed.stored_name] = {(False, contents[placed.name])}
        for each in own.compared:
            name = rank_object_name(each.name, rank) if each.name in found.own_tensors else each.name
            stored.setdefault(name, set()).add((True, each.digest))
    for rank, held in enumerate(job):
        for each in held:
            known = find_stored_name(each.name, rank, stored)
            assert known is not None
            assert stored[known] == {(kinds[rank][each.name], each.digest)}


def listed(tensors: Sequence[TensorFacts], regions: Regions) -> list[Row]:
    return [
        (tensors[number], regions.region(row, len(tensors[number].shape)))
        for row, number in enumerate(regions.tensor.tolist())
    ]


@given(job=jobs(), min_cut_bytes=st.sampled_from([1, 16, 64 * 1024]))
def test_each_rank_gets_its_part_of_the_plan(job: list[Holdings], min_cut_bytes: int) -> None:
    options = SaveOptions(min_cut_bytes=min_cut_bytes)
    whole = plan_save(job, options)
    plan, parts = plan_shares([pack_holdings(held) for held in job], options, 1)
    assert plan.tensors == whole.tensors
    for rank, (part, held) in enumerate(zip(parts, job, strict=True)):
        share = unpack_share(part, held, rank)
        expected = listed(whole.tensors, whole.regions.take(whole.rank == rank))
        assert listed(share.tensors, share.regions) == expected
        assert [whole.tensors[number] for number in share.numbers] == list(share.tensors)


def shards(num_ranks: int) -> list[Holdings]:
    """Three tensors that are sharded by rows."""
    tensors = tuple(TensorFacts(f"t{number}", "float32", (num_ranks, 4), 4) for number in range(3))
    return [
        Holdings(
            tensors=tensors, regions=Regions.from_rows([(n, (rank, 0), (1, 4)) for n in range(len(tensors))])
        )
        for rank in range(num_ranks)
    ]


def test_a_gap_is_the_error_of_the_planner() -> None:
    job = shards(5)
    one = replace(job[0].tensors[1], shape=(99, 4))
    gap = [replace(held, tensors=(held.tensors[0], one, held.tensors[2])) for held in job]
    with pytest.raises(NotCovered, match="376 elements of 't1'"):
        plan_shares([pack_holdings(held) for held in gap], SaveOptions(), 1)


def test_a_name_that_is_a_tensor_on_one_rank_and_an_object_on_another_is_refused() -> None:
    job = shards(5)
    name = job[0].tensors[1].name
    without = job[3].regions.take(np.flatnonzero(job[3].regions.tensor == 0))
    none = HeldObject(name=name, size_bytes=4, digest=bytes(16))
    job[3] = replace(job[3], tensors=job[3].tensors[:1], regions=without, objects=(none,))
    # Rank 3 lacks its part of two tensors, which would be the first error.
    job = [replace(held, regions=held.regions.take(slice(0, 1))) for held in job]
    job = [replace(held, tensors=held.tensors[:2]) if rank != 3 else held for rank, held in enumerate(job)]
    whole = Regions.from_rows([(0, (0, 0), (1, 4)), (1, (0, 0), (5, 4))])
    job[0] = replace(job[0], regions=whole)
    sides = ".* on rank 0, not a tensor on rank 3"
    with pytest.raises(UsageError, match=f"Ranks disagree on '{re.escape(name)}': {sides}"):
        plan_shares([pack_holdings(held) for held in job], SaveOptions(), 1)


def test_a_number_with_two_meanings_is_refused() -> None:
    job = [
        replace(held, numbering=(HeldObject(name="optimizer", size_bytes=0, digest=bytes([rank // 2])),))
        for rank, held in enumerate(shards(3))
    ]
    with pytest.raises(UsageError, match="'optimizer' numbers different parameters on rank 2 than on rank 0"):
        plan_shares([pack_holdings(held) for held in job], SaveOptions(), 1)


def name_at(path: Path) -> str:
    return ".".join(map(str, path))


PLACES: list[Path] = [("a", "b"), ("a", 0), ("a", "0"), ("d",), ("e", "\ud800")]
structures = st.lists(
    st.lists(st.sampled_from(PLACES), unique_by=name_at),
    min_size=1,
    max_size=6,
)


@given(job=structures)
def test_rank_0_learns_which_places_each_rank_has_and_their_order(job: list[list[Path]]) -> None:
    held = [
        replace(
            shard,
            paths={name_at(path): path for path in paths},
            entries=tuple(map(name_at, paths)),
            key_types={f"{len(paths)}": "text"},
        )
        for shard, paths in zip(shards(len(job)), job, strict=True)
    ]
    plan, _ = plan_shares([pack_holdings(each) for each in held], SaveOptions(), 1)
    found = read_entries(plan.facts.get(OWN_ENTRIES, ""))
    parts = {path[0] for paths in job for path in paths}
    differing = {
        part for part in parts if len({tuple(path for path in paths if path[0] == part) for paths in job}) > 1
    }
    if differing or len({len(paths) for paths in job}) > 1:
        for each, (places, key_types) in zip(held, found, strict=True):
            own = [(name, path) for name, path in each.paths.items() if path[0] in differing]
            for part in differing:
                assert [entry for entry in places.items() if entry[1][0] == part] == [
                    entry for entry in own if entry[1][0] == part
                ]
            assert places.keys() == dict(own).keys()
            assert key_types == each.key_types
    else:
        assert not found
    assert set(map(repr, differing)) <= set(plan.differing_parts)
