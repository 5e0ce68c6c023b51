"""Shared bytes are divided so that the highest load is as low as possible, and cut at the nearest row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.plan.save_plan import Holdings, NotCovered, SaveOptions, plan_save
from penstock.checkpoint.state.regions import Regions, TensorFacts, element_sizes, level_loads, whole_regions


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 300))
def test_no_other_division_has_a_lower_maximum(loads: list[int], amount: int) -> None:
    share = level_loads(np.array(loads, dtype=np.int64), amount)
    assert share.sum() == amount
    assert (share >= 0).all()
    total = np.array(loads) + share
    receivers = share > 0
    if amount:
        assert total[receivers].max() - total[receivers].min() <= 1
        assert (total[~receivers] >= total[receivers].max() - 1).all()


def test_a_remainder_goes_to_the_first_of_the_lowest() -> None:
    assert level_loads(np.array([5, 1, 1, 9]), 9).tolist() == [0, 5, 4, 0]
    assert level_loads(np.array([0, 0, 0]), 2).tolist() == [1, 1, 0]


def bytes_by_rank(shape: tuple[int, ...], num_ranks: int, min_cut_bytes: int) -> list[int]:
    facts = TensorFacts("w", "int8", shape, 1)
    plan = plan_save(
        [Holdings(tensors=(facts,), regions=whole_regions([facts]))] * num_ranks,
        SaveOptions(min_cut_bytes=min_cut_bytes),
    )
    weights = plan.regions.num_bytes(element_sizes(plan.tensors))
    counts: list[int] = np.bincount(plan.rank, weights=weights, minlength=num_ranks).astype(int).tolist()
    return counts


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((10, 7), [35, 35]),
        ((5, 4), [12, 8]),  # the middle is half a row further: rounded up
        ((3, 4), [8, 4]),
        ((2, 1), [1, 1]),
        ((1, 9), [5, 4]),
    ],
)
def test_a_cut_is_at_the_row_nearest_to_the_middle(shape: tuple[int, ...], parts: list[int]) -> None:
    assert bytes_by_rank(shape, 2, 1) == parts


def test_a_cut_that_moves_to_an_earlier_row_takes_the_owner_with_it() -> None:
    # 40 bytes are 14, 13 and 13; the cuts at 14 and 27 move to the rows that begin at 10 and 30.
    assert bytes_by_rank((4, 10), 3, 1) == [10, 20, 10]


@pytest.mark.parametrize(("lengths", "row_bytes"), [((11, 9), 1), ((9, 11), 1), ((11, 9), 4), ((9, 11), 4)])
def test_a_cut_near_an_end_of_a_region_moves_there(lengths: tuple[int, int], row_bytes: int) -> None:
    facts = tuple(TensorFacts(f"w{length}", "int8", (length, row_bytes), 1) for length in lengths)
    options = SaveOptions(min_cut_bytes=4 * row_bytes)
    plan = plan_save([Holdings(tensors=facts, regions=whole_regions(facts))] * 2, options)
    loads = np.bincount(plan.rank, weights=plan.regions.num_elements)
    assert loads.tolist() == [length * row_bytes for length in lengths]


def test_a_region_that_is_not_cut_goes_to_the_side_that_its_middle_is_on() -> None:
    facts = tuple(TensorFacts(f"w{length}", "int8", (length,), 1) for length in (6, 10, 4))
    plan = plan_save(
        [Holdings(tensors=facts, regions=whole_regions(facts))] * 2, SaveOptions(min_cut_bytes=6)
    )
    assert np.bincount(plan.rank, weights=plan.regions.num_elements).tolist() == [6, 14]


def test_groups_of_replicas_share_each_their_own() -> None:
    facts = tuple(TensorFacts(name, "int8", (8,), 1) for name in ("left", "right"))
    job = [Holdings(tensors=(own,), regions=whole_regions([own])) for own in facts for _ in range(2)]
    plan = plan_save(job, SaveOptions(min_cut_bytes=1))
    assert np.bincount(plan.rank, weights=plan.regions.num_elements).tolist() == [4, 4, 4, 4]


def test_an_empty_tensor_is_written_by_a_rank_that_holds_it_though_a_cut_of_others_is_beside_it() -> None:
    empty, shared, alone = (
        TensorFacts(name, "int8", (length,), 1)
        for name, length in (("empty", 0), ("shared", 8), ("alone", 100))
    )
    held = [(empty,), (empty,), (shared, alone), (shared,)]
    plan = plan_save(
        [Holdings(tensors=facts, regions=whole_regions(facts)) for facts in held],
        SaveOptions(min_cut_bytes=1),
    )
    writers = {
        plan.tensors[tensor].name: rank for tensor, rank in zip(plan.regions.tensor, plan.rank, strict=True)
    }
    assert writers["empty"] in (0, 1)
    assert (writers["shared"], writers["alone"]) == (3, 2)


def test_no_part_is_smaller_than_worth_an_item() -> None:
    assert sorted(bytes_by_rank((20, 1), 2, 10)) == [10, 10]
    assert sorted(bytes_by_rank((20, 1), 2, 11)) == [0, 20]
    assert bytes_by_rank((10, 4), 2, 12) == [20, 20]


def test_the_pieces_that_overlap_are_both_named() -> None:
    facts = (TensorFacts("w", "float32", (8,), 4),)
    rows = [((0,), (3,)), ((3,), (3,)), ((5,), (3,))]
    job = [Holdings(tensors=facts, regions=Regions.from_rows([(0, *row)])) for row in rows]
    with pytest.raises(
        NotCovered, match=r"\[3\] of \[3\] and \[5\] of \[3\]|\[5\] of \[3\] and \[3\] of \[3\]"
    ):
        plan_save(job, SaveOptions())
