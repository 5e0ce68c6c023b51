"""Save plans: every byte is written once, by a rank that holds it, with equal loads."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.plan.states import jobs, painted, region

from penstock.checkpoint.plan.save_plan import (
    HeldObject,
    Holdings,
    NotCovered,
    PlacedObject,
    RankRegions,
    SaveOptions,
    SavePlan,
    assign_objects,
    plan_files,
    plan_save,
)
from penstock.checkpoint.state.regions import (
    Regions,
    TensorFacts,
    element_sizes,
    find_overlaps,
    whole_regions,
)
from penstock.errors import UsageError

FINE = SaveOptions(min_cut_bytes=1)


def held_by_all(facts: TensorFacts, num_ranks: int) -> list[Holdings]:
    return [Holdings(tensors=(facts,), regions=whole_regions([facts]))] * num_ranks


@given(jobs(), st.sampled_from([1, 16, 65536]))
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    job: list[Holdings], min_cut_bytes: int
) -> None:
    shared = plan_save(job, SaveOptions(min_cut_bytes=min_cut_bytes))
    for counts in painted(shared.tensors, shared.regions):
        assert (counts == 1).all()
    for row in range(len(shared.regions)):
        number = int(shared.regions.tensor[row])
        holder = job[int(shared.rank[row])]
        place = region(shared.regions, row, len(shared.tensors[number].shape))
        (own_number,) = [i for i, t in enumerate(holder.tensors) if t == shared.tensors[number]]
        own = holder.regions.take(holder.regions.tensor == own_number)
        (count,) = painted(
            (holder.tensors[own_number],), Regions(np.zeros(len(own), dtype=np.int64), own.offsets, own.sizes)
        )
        assert (count[place] == 1).all()


@given(jobs())
def test_every_tensor_is_listed_even_an_empty_one(job: list[Holdings]) -> None:
    shared = plan_save(job, FINE)
    assert set(shared.regions.tensor.tolist()) == set(range(len(shared.tensors)))


def plans_of(
    shared: RankRegions, options: SaveOptions, objects: Sequence[PlacedObject] = ()
) -> list[SavePlan]:
    """What each rank writes; rank 0 the `objects` as well."""
    return [
        plan_files(
            rank, shared.tensors, shared.regions.take(shared.rank == rank), () if rank else objects, options
        )
        for rank in range(shared.num_ranks)
    ]


@given(jobs())
def test_the_same_job_gives_the_same_plan(job: list[Holdings]) -> None:
    one, other = plan_save(job, FINE), plan_save(job, FINE)
    assert one.tensors == other.tensors
    assert (one.rank == other.rank).all()
    assert (one.regions.offsets == other.regions.offsets).all()


@given(jobs(), st.integers(1, 3), st.sampled_from([None, "w1"]))
def test_every_region_of_a_rank_is_in_one_file(job: list[Holdings], writers: int, hint: str | None) -> None:
    options = SaveOptions(writers=writers, separation_hint=hint, min_cut_bytes=1)
    shared = plan_save(job, options)
    objects = [PlacedObject(name=name, stored_name=name, size_bytes=100) for name in ("w1.step", "lr")]
    plans = plans_of(shared, options, objects)
    files = [bucket.file for plan in plans for bucket in plan.buckets]
    assert len(set(files)) == len(files)
    written = Regions.concatenated([bucket.regions for plan in plans for bucket in plan.buckets])
    for counts in painted(shared.tensors, written):
        assert (counts == 1).all()
    assert sorted(each.name for bucket in plans[0].buckets for each in bucket.objects) == ["lr", "w1.step"]
    for bucket in (bucket for plan in plans for bucket in plan.buckets):
        names = [shared.tensors[number].name for number in bucket.regions.tensor]
        names += [each.name for each in bucket.objects]
        if hint is not None:
            assert {name.startswith(hint) for name in names} == {bucket.file.startswith(hint)}
        assert names, "a file that holds nothing is not made"


def test_replicas_write_equal_shares_of_what_they_all_hold() -> None:
    facts = TensorFacts("w", "float32", (1024, 1024), 4)
    shared = plan_save(held_by_all(facts, 4), SaveOptions())
    loads = np.bincount(shared.rank, weights=shared.regions.num_bytes(element_sizes(shared.tensors)))
    assert loads.tolist() == [1024 * 1024] * 4


def test_a_rank_that_holds_more_alone_writes_less_of_what_is_shared() -> None:
    shared_facts = TensorFacts("shared", "float32", (1000, 1024), 4)
    alone = TensorFacts("alone", "float32", (500, 1024), 4)
    both = (shared_facts, alone)
    job = [
        Holdings(tensors=both, regions=whole_regions(both)),
        Holdings(tensors=(shared_facts,), regions=whole_regions([shared_facts])),
    ]
    plan = plan_save(job, SaveOptions())
    loads = np.bincount(plan.rank, weights=plan.regions.num_bytes(element_sizes(plan.tensors)))
    assert loads.tolist() == [750 * 4096, 750 * 4096]


def test_a_small_tensor_is_not_cut() -> None:
    facts = TensorFacts("bias", "float32", (1024,), 4)
    shared = plan_save(held_by_all(facts, 4), SaveOptions())
    assert len(shared.regions) == 1


def test_a_tensor_with_leading_ones_is_cut_along_its_first_real_dimension() -> None:
    facts = TensorFacts("w", "int8", (1, 1, 8, 3), 1)
    shared = plan_save(held_by_all(facts, 2), FINE)
    assert shared.regions.sizes.tolist() == [[1, 1, 4, 3], [1, 1, 4, 3]]


def test_the_fullest_file_of_a_rank_is_nearly_as_small_as_can_be() -> None:
    tensors = tuple(TensorFacts(f"w{size}", "int8", (size,), 1) for size in (7, 6, 5, 4, 2))
    (plan,) = plans_of(plan_save([Holdings(tensors=tensors, regions=whole_regions(tensors))], FINE), FINE)
    loads = [int(bucket.regions.sizes.sum()) for bucket in plan.buckets]
    assert sorted(loads) == [11, 13]
    assert plan.num_bytes == 24


def test_an_empty_tensor_counts_as_a_byte_of_its_file() -> None:
    tensors = tuple(
        TensorFacts(f"w{number}", "int8", (size,), 1) for number, size in enumerate([3, 0, 0, 0, 0])
    )
    (plan,) = plans_of(plan_save([Holdings(tensors=tensors, regions=whole_regions(tensors))], FINE), FINE)
    assert [bucket.regions.tensor.tolist() for bucket in plan.buckets] == [[0, 4], [1, 2, 3]]


def test_a_rank_with_nothing_to_write_has_no_file() -> None:
    facts = TensorFacts("bias", "float32", (8,), 4)
    shared = plan_save(held_by_all(facts, 2), SaveOptions())
    plans = plans_of(shared, SaveOptions())
    assert sorted(len(plan.buckets) for plan in plans) == [0, 1]


def test_an_empty_object_counts_as_a_byte() -> None:
    objects = tuple(
        HeldObject(name=str(number), size_bytes=size, digest=b"")
        for number, size in enumerate([3, 0, 0, 0, 0])
    )
    held = Holdings(tensors=(), regions=Regions.from_rows(()), objects=objects)
    found = assign_objects([held, held])
    assert [[each.name for each in of_rank.placed] for of_rank in found] == [["0", "4"], ["1", "2", "3"]]


@pytest.mark.parametrize(("dtype", "shape"), [("bfloat16", (4, 4)), ("float32", (4, 5))])
def test_ranks_that_disagree_on_a_tensor_are_named(dtype: str, shape: tuple[int, ...]) -> None:
    one = TensorFacts("layer.w", "float32", (4, 4), 4)
    other = TensorFacts("layer.w", dtype, shape, 2 if dtype == "bfloat16" else 4)
    job = [Holdings(tensors=(each,), regions=whole_regions([each])) for each in (one, one, other)]
    with pytest.raises(UsageError, match=r"'layer.w': float32 \[4, 4\] on rank 0, .* on rank 2"):
        plan_save(job, SaveOptions())


def held_as(shape: tuple[int, ...], *regions: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Holdings]:
    facts = (TensorFacts("w", "float32", shape, 4),)
    return [Holdings(tensors=facts, regions=Regions.from_rows([(0, *region)])) for region in regions]


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (held_as((8, 2), ((0, 0), (3, 2)), ((4, 0), (4, 2))), "2 elements of 'w' .* belong to no region"),
        (held_as((8, 2), ((0, 0), (5, 2)), ((4, 0), (4, 2))), "overlap"),
        (held_as((8, 2), ((0, 0), (4, 2)), ((4, 0), (5, 2))), "is outside its shape"),
        (held_as((8, 2), ((0, 0), (5, 2)), ((4, 0), (3, 2))), "overlap"),
        (held_as((8,), ((-1,), (8,))), "is outside its shape"),
        (held_as((8, 2), ((0, 0), (8, 2)), ((3, 0), (1, 2))), "overlap"),
        (held_as((8, 2), ((0, 0), (4, 2)), ((4, 0), (3, 2)), ((3, 1), (1, 1))), "overlap"),
    ],
)
def test_regions_that_do_not_cover_their_tensor_are_refused(job: list[Holdings], complaint: str) -> None:
    with pytest.raises(NotCovered, match=complaint) as caught:
        plan_save(job, SaveOptions())
    assert caught.value.tensor == "w"


BOXES = st.tuples(
    st.integers(0, 2),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
REGIONS = st.one_of(
    jobs().map(lambda job: Regions.concatenated([each.regions for each in job])),
    st.lists(BOXES, max_size=6).map(Regions.from_rows),  # nested, equal, empty ones anywhere
)


@given(REGIONS, REGIONS)
def test_overlaps_are_what_comparing_all_pairs_finds(left: Regions, right: Regions) -> None:
    width = max(left.num_dims, right.num_dims)
    left, right = left.widened(width), right.widened(width)
    expected = []
    for i in range(len(left)):
        for j in range(len(right)):
            begin = np.maximum(left.offsets[i], right.offsets[j])
            end = np.minimum(left.offsets[i] + left.sizes[i], right.offsets[j] + right.sizes[j])
            full = left.sizes[i].all() and right.sizes[j].all()
            if left.tensor[i] == right.tensor[j] and full and (end > begin).all():
                expected.append((i, j, begin.tolist(), (end - begin).tolist()))
    rows_left, rows_right, common = find_overlaps(left, right)
    found = zip(
        rows_left.tolist(),
        rows_right.tolist(),
        common.offsets.tolist(),
        common.sizes.tolist(),
        strict=True,
    )
    assert list(found) == expected
