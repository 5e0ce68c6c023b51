"""Equal rows are found by hashes, and rows that only share a hash are kept apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint.plan.region_arithmetic import find_rank_sets, group_equal_rows, scramble

SMALL = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=12)


@given(SMALL)
def test_rows_are_grouped_in_the_order_of_their_first_appearance(rows: list[tuple[int, int]]) -> None:
    groups = group_equal_rows(np.array(rows, dtype=np.int64))
    distinct = list(dict.fromkeys(rows))
    assert [rows[first] for first in groups.first] == distinct
    assert [distinct[number] for number in groups.number] == rows


def test_rows_that_share_a_hash_stay_apart() -> None:
    scrambles = scramble(np.array([1, 2], dtype=np.uint64))
    difference = np.diff(scrambles[::-1]).view(np.int64)[0]
    table = np.array([[1, 5], [2, 5 + difference], [1, 5]], dtype=np.int64)
    assert group_equal_rows(table).number.tolist() == [0, 1, 0]


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6), st.randoms())
def test_groups_of_the_same_ranks_share_a_set(groups: list[set[int]], random: object) -> None:
    pairs = [(number, rank) for number, ranks in enumerate(groups) for rank in ranks for _ in range(2)]
    random.shuffle(pairs)  # type: ignore[attr-defined] # a random.Random
    group, rank = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    sets = find_rank_sets(group, rank, len(groups))
    assert [set(sets.ranks(number).tolist()) for number in sets.of_group] == groups
    assert len(sets) == len({frozenset(ranks) for ranks in groups})
