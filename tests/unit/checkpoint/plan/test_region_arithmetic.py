"""Equal rows, sets of ranks, disjoint regions and limited parts, against plain ways to find them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoint.plan.states import painted, region

from penstock.checkpoint.state.regions import (
    Regions,
    TensorFacts,
    are_disjoint,
    find_overlaps,
    find_rank_sets,
    find_rows,
    group_equal_rows,
    split_large,
    whole_regions,
)

SMALL = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=12)


@given(SMALL)
def test_rows_are_grouped_in_the_order_of_their_first_appearance(rows: list[tuple[int, int]]) -> None:
    firsts, numbers = group_equal_rows(np.array(rows, dtype=np.int64))
    once = list(dict.fromkeys(rows))
    assert [rows[first] for first in firsts] == once
    assert [once[number] for number in numbers] == rows


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6), st.randoms())
def test_groups_of_the_same_ranks_share_a_set(groups: list[set[int]], random: object) -> None:
    pairs = [(number, rank) for number, ranks in enumerate(groups) for rank in ranks for _ in range(2)]
    random.shuffle(pairs)  # type: ignore[attr-defined] # a random.Random
    group, rank = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    sets = find_rank_sets(group, rank, len(groups))
    members = [sets.members[begin : begin + size] for begin, size in zip(sets.start, sets.size, strict=True)]
    assert [set(members[number].tolist()) for number in sets.of_group] == groups
    assert len(sets) == len({frozenset(ranks) for ranks in groups})


BOXES = st.tuples(
    st.integers(0, 2),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
)


@given(st.lists(BOXES, max_size=6))
def test_regions_that_overlap_are_never_taken_for_disjoint(
    rows: list[tuple[int, tuple[int, int], tuple[int, int]]],
) -> None:
    regions = Regions.from_rows(rows)
    tensors = tuple(TensorFacts(f"w{number}", "int8", (10, 10), 1) for number in range(3))
    if any((count > 1).any() for count in painted(tensors, regions.widened(2))):
        assert not are_disjoint(regions)


def test_whole_tensors_and_slices_of_one_are_surely_disjoint() -> None:
    tensors = tuple(TensorFacts(f"w{number}", "int8", (5,), 1) for number in range(3))
    assert are_disjoint(whole_regions(tensors))
    assert are_disjoint(Regions.from_rows([(0, (begin, 0), (2, 3)) for begin in (4, 0, 2)]))
    assert are_disjoint(Regions.from_rows([(0, (0, begin), (3, 2)) for begin in (4, 0, 2)]))
    assert are_disjoint(Regions.from_rows([(0, (2,), (0,)), (0, (2,), (0,))])), "both are empty"
    assert are_disjoint(Regions.from_rows([]))


@pytest.mark.parametrize(
    ("sizes", "dim", "count", "num_bytes"),
    [
        ((), 0, 1, 4),
        ((1, 1), 0, 1, 4),
        ((6,), 0, 6, 4),
        ((1, 5, 3), 1, 5, 12),
        ((5, 1, 3), 0, 5, 12),
        ((0, 3), 0, 0, 0),
    ],
)
def test_rows_are_those_of_the_first_dimension_longer_than_one(
    sizes: tuple[int, ...], dim: int, count: int, num_bytes: int
) -> None:
    rows = find_rows(Regions.from_rows([(0, (0,) * len(sizes), sizes)]), np.array([4]))
    assert [column.tolist() for column in rows] == [[dim], [count], [num_bytes]]


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.integers(1, 40),
    st.sampled_from([1, 4]),
)
def test_parts_of_large_regions_cover_them_in_order_within_the_limit(
    shape: tuple[int, ...], limit_bytes: int, item_bytes: int
) -> None:
    facts = TensorFacts("w", "int8", shape, item_bytes)
    source, parts = split_large(whole_regions([facts]), np.array([item_bytes]), limit_bytes)
    assert set(source.tolist()) == {0}
    assert parts.num_elements.max() * item_bytes <= max(limit_bytes, item_bytes)
    places = np.arange(int(np.prod(shape))).reshape(shape)
    inside = [places[region(parts, row, len(shape))].reshape(-1) for row in range(len(parts))]
    assert np.concatenate(inside).tolist() == list(range(places.size))


@given(st.integers(1, 60), st.integers(1, 20))
def test_a_row_of_bytes_is_split_into_as_few_parts_as_the_limit_allows(length: int, limit_bytes: int) -> None:
    facts = TensorFacts("w", "int8", (length,), 1)
    _, parts = split_large(whole_regions([facts]), np.array([1]), limit_bytes)
    assert len(parts) == -(-length // limit_bytes)


def test_huge_tensors_with_high_numbers_stay_apart() -> None:
    number, extent = 1 << 20, 1 << 44  # end to end, a million of these do not fit an axis of 64 bits
    left, right, _ = find_overlaps(
        Regions.from_rows([(number, (0,), (extent,))]),
        Regions.from_rows([(0, (0,), (extent,)), (number, (extent - 1,), (1,))]),
    )
    assert (left.tolist(), right.tolist()) == ([0], [1])
