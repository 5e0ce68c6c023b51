"""Ranks that compare their objects, name by name, find what one finds who sees all lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulated_ranks import simulate

from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    assign_objects,
    find_own_tensors,
    require_same_numbering,
)
from penstock.checkpoint.plan.shared_objects import share_objects
from penstock.checkpoint.plan.shared_plan import Place
from penstock.checkpoint.state.regions import Regions
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

held = st.builds(
    lambda name, content: HeldObject(name=name, size_bytes=len(content), digest=content),
    name=st.sampled_from(["rng", "step", "lr", "loader"]),
    content=st.sampled_from([b"", b"a", b"bcd"]),
)
lists = st.lists(held, unique_by=lambda each: each.name, max_size=4).map(tuple)


@st.composite
def jobs_with_objects(draw: st.DrawFn) -> list[Holdings]:
    """Ranks that all hold the same, or lists of their own."""
    num_ranks = draw(st.integers(1, 6))
    common, small = draw(lists), draw(lists)
    return [
        Holdings(
            tensors=(),
            regions=Regions.from_rows([]),
            objects=draw(st.one_of(st.just(common), lists)),
            small=draw(st.one_of(st.just(small), lists)),
        )
        for _ in range(num_ranks)
    ]


@given(job=jobs_with_objects())
def test_ranks_share_objects_as_one_would_assign_them(job: list[Holdings]) -> None:
    shared = simulate(len(job), lambda rank: share_objects(Place(rank, len(job)), job[rank]))
    assert [list(each.placed) for each in shared] == assign_objects([each.objects for each in job])
    assert tuple(each.own_tensors for each in shared) == find_own_tensors([each.small for each in job])


@given(numberings=st.lists(lists, min_size=2, max_size=5))
def test_a_number_with_two_meanings_is_the_same_error(numberings: list[tuple[HeldObject, ...]]) -> None:
    job = [Holdings(tensors=(), regions=Regions.from_rows([]), numbering=each) for each in numberings]
    errors = [
        refusal(lambda: simulate(len(job), lambda rank: share_objects(Place(rank, len(job)), job[rank]))),
        refusal(lambda: require_same_numbering(numberings)),
    ]
    assert errors[0] == errors[1]


def refusal(work: Callable[[], object]) -> str | None:
    try:
        work()
    except UsageError as error:
        return str(error)
    return None
