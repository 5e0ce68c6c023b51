"""Ranks that compare their objects, name by name, find what one finds who sees all lists."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tests.support.simulated_ranks import simulate

from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    assign_objects,
    find_own_tensors,
    find_stored_name,
    rank_object_name,
    require_same_numbering,
)
from penstock.checkpoint.plan.shared_objects import compare_entries, share_objects
from penstock.checkpoint.plan.shared_plan import Place
from penstock.checkpoint.state.regions import Regions
from penstock.checkpoint.state.walk import names_lacking
from penstock.errors import UsageError


def lists_of(names: list[str]) -> st.SearchStrategy[tuple[HeldObject, ...]]:
    held = st.builds(
        lambda name, content: HeldObject(name=name, size_bytes=len(content), digest=content),
        name=st.sampled_from(names),
        content=st.sampled_from([b"", b"a", b"bcd"]),
    )
    return st.lists(held, unique_by=lambda each: each.name, max_size=4).map(tuple)


lists = lists_of(["rng", "step", "lr", "loader"])
small_lists = lists_of(["order", "weights", "seed"])


@st.composite
def jobs_with_objects(draw: st.DrawFn) -> list[Holdings]:
    """Ranks that all hold the same, or lists of their own."""
    num_ranks = draw(st.integers(1, 6))
    common, small = draw(lists), draw(small_lists)
    return [
        Holdings(
            tensors=(),
            regions=Regions.from_rows([]),
            objects=draw(st.one_of(st.just(common), lists)),
            small=draw(st.one_of(st.just(small), small_lists)),
        )
        for _ in range(num_ranks)
    ]


@given(job=jobs_with_objects())
def test_ranks_share_objects_as_one_would_assign_them(job: list[Holdings]) -> None:
    shared = simulate(len(job), lambda rank: share_objects(Place(rank, len(job)), job[rank]))
    assert [list(each.placed) for each in shared] == assign_objects([each.objects for each in job])
    assert tuple(each.own_tensors for each in shared) == find_own_tensors([each.small for each in job])


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
            small=tuple(each for each in held if is_tensor[each.name]),
        )
        for held, is_tensor in zip(job, kinds, strict=True)
    ]
    shared = simulate(len(job), lambda rank: share_objects(Place(rank, len(job)), holdings[rank]))
    stored: dict[str, set[tuple[bool, bytes]]] = {}
    for rank, (own, found) in enumerate(zip(holdings, shared, strict=True)):
        contents = {each.name: each.digest for each in own.objects}
        for placed in found.placed:
            assert placed.stored_name not in stored
            stored[placed.stored_name] = {(False, contents[placed.name])}
        for each in own.small:
            name = rank_object_name(each.name, rank) if each.name in found.own_tensors else each.name
            stored.setdefault(name, set()).add((True, each.digest))
    for rank, held in enumerate(job):
        for each in held:
            known = find_stored_name(each.name, rank, stored)
            assert known is not None
            assert stored[known] == {(kinds[rank][each.name], each.digest)}


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


names_of_ranks = st.lists(
    st.frozensets(st.sampled_from(["a.b", "a.c", "d", "e.\ud800"])), min_size=1, max_size=6
)


@given(job=names_of_ranks)
def test_rank_0_learns_which_rank_lacks_which_entry(job: list[frozenset[str]]) -> None:
    found = simulate(len(job), lambda rank: compare_entries(Place(rank, len(job)), job[rank]))
    differing = frozenset().union(*job) - frozenset.intersection(*job)
    lacking = {rank: differing - names for rank, names in enumerate(job)} if differing else {}
    assert names_lacking(found[0].text) == lacking
    assert found[0].parts == tuple(sorted({repr(name.partition(".")[0]) for name in differing}))
    assert not any(each.text or each.parts for each in found[1:])
