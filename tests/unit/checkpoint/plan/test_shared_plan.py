"""Ranks that plan together, each a few tensors, get the plan of one who sees everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.simulated_ranks import simulate
from tests.unit.checkpoint.plan.states import jobs

from penstock.checkpoint.plan.save_plan import Holdings, SaveOptions, plan_save
from penstock.checkpoint.plan.shared_plan import Place, RankShare, plan_share
from penstock.checkpoint.state.regions import Regions, TensorFacts

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
@settings(max_examples=150)
def test_ranks_plan_together_what_one_would_plan_alone(job: list[Holdings], min_cut_bytes: int) -> None:
    assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))


@given(job=jobs_of_own_lists(), min_cut_bytes=st.sampled_from([1, 16]))
@settings(max_examples=150)
def test_ranks_that_list_different_tensors_plan_alike(job: list[Holdings], min_cut_bytes: int) -> None:
    listed_somewhere = {facts.name for held in job for facts in held.tensors}
    covered = {held.tensors[number].name for held in job for number in held.regions.tensor.tolist()}
    if listed_somewhere == covered:
        assert_planned_alike(job, SaveOptions(min_cut_bytes=min_cut_bytes))
