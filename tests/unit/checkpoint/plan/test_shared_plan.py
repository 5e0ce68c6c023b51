"""Ranks that plan together, each a few tensors, get the plan of one who sees everything."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_ranks import simulate
from tests.unit.checkpoint.plan.states import jobs

from penstock.checkpoint.plan.save_plan import HeldObject, Holdings, NotCovered, SaveOptions, plan_save
from penstock.checkpoint.plan.shared_plan import Place, RankShare, plan_share
from penstock.checkpoint.state.regions import Regions, TensorFacts
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = tuple[TensorFacts, Any]


def shares_of(job: Sequence[Holdings], options: SaveOptions) -> list[RankShare]:
    return simulate(len(job), lambda rank: plan_share(Place(rank, len(job)), job[rank], {}, options))


def listed(tensors: Sequence[TensorFacts], regions: Regions) -> list[Row]:
    return [
        (tensors[number], regions.region(row, len(tensors[number].shape)))
        for row, number in enumerate(regions.tensor.tolist())
    ]


def assert_planned_alike(job: Sequence[Holdings], options: SaveOptions) -> None:
    whole = plan_save(job, options)
    shares = shares_of(job, options)
    for rank, share in enumerate(shares):
        expected = listed(whole.tensors, whole.regions.take(whole.rank == rank))
        assert listed(share.tensors, share.regions) == expected
        assert [whole.tensors[number] for number in share.numbers.own] == list(share.tensors)
    described = [facts for share in shares for facts, _ in share.described]
    assert described == list(whole.tensors)


@st.composite
def jobs_of_own_lists(draw: st.DrawFn) -> list[Holdings]:
    """Jobs whose ranks list only what they hold, in orders of their own, some regions twice."""
    job = draw(jobs())
    listings = []
    for held in job:
        order = draw(st.permutations(range(len(held.tensors))))
        is_listed = [number for number in order if draw(st.booleans()) or number in held.regions.tensor]
        place = {number: at for at, number in enumerate(is_listed)}
        rows = draw(st.permutations(range(len(held.regions))))
        rows += draw(st.lists(st.sampled_from(rows), max_size=2)) if rows else []
        regions = held.regions.take(np.array(rows, dtype=np.int64))
        tensor = np.array([place[number] for number in regions.tensor.tolist()], dtype=np.int64)
        listings.append(
            Holdings(
                tensors=tuple(held.tensors[number] for number in is_listed),
                regions=Regions(tensor, regions.offsets, regions.sizes),
            )
        )
    return listings


@given(job=jobs(), min_cut_bytes=st.sampled_from([1, 16, 64 * 1024]))
def test_ranks_plan_together_what_one_would_plan_alone(job: list[Holdings], min_cut_bytes: int) -> None:
    assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))


@given(job=jobs_of_own_lists(), min_cut_bytes=st.sampled_from([1, 16]))
def test_ranks_that_list_different_tensors_plan_alike(job: list[Holdings], min_cut_bytes: int) -> None:
    if all_are_held(job):
        assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))


def all_are_held(job: list[Holdings]) -> bool:
    """Whether every tensor that a rank lists has a region on some rank: others are not covered."""
    held = {each.tensors[number].name for each in job for number in each.regions.tensor.tolist()}
    return held == {facts.name for each in job for facts in each.tensors}


@pytest.mark.slow
@given(job=st.one_of(jobs(), jobs_of_own_lists()), min_cut_bytes=st.sampled_from([1, 16, 64, 64 * 1024]))
@settings(max_examples=1000, deadline=None)
def test_a_thousand_random_layouts_are_planned_alike(job: list[Holdings], min_cut_bytes: int) -> None:
    if all_are_held(job):
        assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))


def meshes(size: int, num_tensors: int, random: np.random.Generator) -> list[Holdings]:
    """Tensors that are sharded by rows over some of `size` ranks and replicated over the rest of a mesh."""
    rows: list[list[tuple[int, tuple[int, int], tuple[int, int]]]] = [[] for _ in range(size)]
    tensors = []
    for number in range(num_tensors):
        shards = int(random.choice([shards for shards in range(1, size + 1) if size % shards == 0]))
        extent, columns = int(random.integers(0, 3 * shards)), int(random.integers(1, 9))
        tensors.append(TensorFacts(f"t{number}", "float32", (extent, columns), 4))
        for rank in range(size):
            shard = rank % shards if number % 2 else rank // (size // shards)
            begin, end = (extent * edge // shards for edge in (shard, shard + 1))
            rows[rank].append((number, (begin, 0), (end - begin, columns)))
    return [Holdings(tensors=tuple(tensors), regions=Regions.from_rows(each)) for each in rows]


@pytest.mark.parametrize("size", [3, 66])
def test_meshes_of_more_ranks_than_one_hop_serves_are_planned_alike(size: int) -> None:
    job = meshes(size, 12, np.random.default_rng(size))
    for min_cut_bytes in (1, 64):
        assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))


def test_a_gap_and_a_disagreement_are_raised_as_by_one_planner() -> None:
    job = meshes(5, 3, np.random.default_rng(1))
    one = replace(job[0].tensors[1], shape=(99, job[0].tensors[1].shape[1]))
    gap = [replace(held, tensors=(held.tensors[0], one, held.tensors[2])) for held in job]
    other = [*job[:3], gap[3], job[4]]
    for wrong in (gap, other):
        with pytest.raises((NotCovered, UsageError)) as expected:
            plan_save(wrong, SaveOptions())
        with pytest.raises(type(expected.value)) as caught:
            shares_of(wrong, SaveOptions())
        assert str(caught.value) == str(expected.value)


def test_a_name_that_is_a_tensor_on_one_rank_and_an_object_on_another_is_refused() -> None:
    job = meshes(5, 3, np.random.default_rng(1))
    name = job[0].tensors[1].name
    without = job[3].regions.take(np.flatnonzero(job[3].regions.tensor == 0))
    none = HeldObject(name=name, size_bytes=4, digest=bytes(16))
    job[3] = replace(job[3], tensors=job[3].tensors[:1], regions=without, objects=(none,))
    sides = ".* on rank 0, not a tensor on rank 3"
    with pytest.raises(UsageError, match=f"Ranks disagree on '{re.escape(name)}': {sides}"):
        shares_of(job, SaveOptions())
