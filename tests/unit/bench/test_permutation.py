"""The bijection: every item once, for any size; no pattern that a statistic sees; one by one as at once."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.permutation import MAX_SIZE, InTurn, Permutation
from penstock.errors import UsageError


def whole(size: int, identity: bytes = b"a") -> np.ndarray:
    return Permutation(size, identity).items(np.arange(size, dtype=np.int64))


def too_far_from_even(counts: np.ndarray, expected: float, sigmas: float = 5.0) -> bool:
    """Whether chi-square lies further from its mean than chance lets it."""
    freedom = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(abs(statistic - freedom) > sigmas * math.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [*range(130), 255, 256, 257, 1000, 1022, 1023, 1024, 1025, 2**16, 99_991])
def test_every_item_comes_exactly_once(size: int) -> None:
    assert np.array_equal(np.sort(whole(size)), np.arange(size))


@given(st.integers(1, 200_000), st.binary(max_size=8))
def test_every_item_comes_exactly_once_for_any_size_and_key(size: int, identity: bytes) -> None:
    seen = np.zeros(size, dtype=bool)
    seen[whole(size, identity)] = True
    assert seen.all()


@given(st.integers(1, MAX_SIZE), st.binary(max_size=8), st.data())
def test_one_position_gives_the_same_as_many_at_any_size(
    size: int, identity: bytes, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    permutation = Permutation(size, identity)
    one_by_one = [permutation.item(position) for position in positions]
    assert permutation.items(np.array(positions, dtype=np.int64)).tolist() == one_by_one
    assert len(set(one_by_one)) == len(positions)
    assert all(0 <= item < size for item in one_by_one)


def test_many_positions_may_come_in_any_order_and_more_than_once() -> None:
    permutation = Permutation(70_000, b"b")
    positions = np.arange(70_000, dtype=np.int64)
    once = permutation.items(positions)
    assert np.array_equal(permutation.items(positions[::-1]), once[::-1])
    assert permutation.items(np.array([5, 5, 5], dtype=np.int64)).tolist() == [once[5]] * 3
    assert permutation.items(positions[:0]).size == 0


def test_the_orders_of_this_version_never_change() -> None:
    assert whole(10, b"golden").tolist() == [9, 2, 1, 8, 4, 5, 6, 7, 3, 0]
    large = Permutation(50_000_000, b"golden")
    assert [large.item(position) for position in (0, 1, 2, 49_999_999)] == [
        21779570,
        17989594,
        35058340,
        11725192,
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_few_items_are_equally_likely(size: int) -> None:
    num_keys = max(5 * math.factorial(size), 1000)
    counts = Counter(
        tuple(Permutation(size, b"%d" % key).item(position) for position in range(size))
        for key in range(num_keys)
    )
    all_counts = np.array([counts[order] for order in permutations(range(size))])
    assert not too_far_from_even(all_counts, num_keys / math.factorial(size))


@pytest.mark.parametrize("size", [97, 1023, 1024, 3000, 1_000_003])
@pytest.mark.parametrize("position", [0, 1, 42])
def test_what_comes_first_is_evenly_distributed_over_keys(size: int, position: int) -> None:
    num_keys = 3000
    drawn = np.array([Permutation(size, b"%d" % key).item(position) for key in range(num_keys)])
    counts = np.bincount(drawn * 50 // size, minlength=50)
    cells = np.bincount(np.arange(size) * 50 // size, minlength=50)
    assert not too_far_from_even(counts * cells.mean() / cells, num_keys / 50)


@pytest.mark.parametrize("size", [1000, 4096, 65_536, 99_991])
def test_neighbours_positions_and_keys_are_uncorrelated(size: int) -> None:
    one, other = whole(size, b"1"), whole(size, b"2")
    noise = 5 / math.sqrt(size)
    series = {
        "position": (np.arange(size), one),
        "next": (one[:-1], one[1:]),
        "next but one": (one[:-2], one[2:]),
        "a column on": (one[: -math.isqrt(size)], one[math.isqrt(size) :]),
        "another key": (one, other),
        "low bits": (one & 1, np.arange(size) & 1),
    }
    for name, (left, right) in series.items():
        assert abs(np.corrcoef(left, right)[0, 1]) < noise, name


@pytest.mark.parametrize("size", [4096, 99_991])
def test_steps_between_neighbours_have_no_favourites(size: int) -> None:
    order = whole(size, b"steps")
    steps = (order[1:] - order[:-1]) % size
    counts = np.bincount(steps * 64 // size, minlength=64)
    assert not too_far_from_even(counts, (size - 1) / 64)
    assert np.bincount(steps).max() < 15  # Poisson of mean 1: ten sigmas


@pytest.mark.parametrize("size", [1000, 50_000])
def test_as_many_items_stay_in_place_as_chance_has_it(size: int) -> None:
    fixed = [int((whole(size, b"%d" % key) == np.arange(size)).sum()) for key in range(200)]
    assert abs(np.mean(fixed) - 1) < 5 / math.sqrt(200)
    assert max(fixed) < 12


def test_pairs_keep_their_sequence_in_half_of_all_orders() -> None:
    kept = sum(
        permutation.item(7) < permutation.item(8)
        for permutation in (Permutation(500_000, b"%d" % key) for key in range(3000))
    )
    assert abs(kept - 1500) < 5 * math.sqrt(750)


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="cannot be ordered"):
        Permutation(size, b"")


@pytest.mark.parametrize("order", [Permutation(10, b""), InTurn(10)])
def test_positions_out_of_range_are_refused_one_by_one_and_among_many(order: Permutation | InTurn) -> None:
    for position in (-1, 10):
        with pytest.raises(IndexError, match="of 10"):
            order.item(position)
        with pytest.raises(IndexError, match="of 10"):
            order.items(np.array([3, position, 4], dtype=np.int64))


def test_in_turn_changes_nothing_and_shares_no_memory() -> None:
    positions = np.array([4, 0, 9], dtype=np.int64)
    items = InTurn(10).items(positions)
    items[0] = 77
    assert positions.tolist() == [4, 0, 9]
    assert InTurn(10).item(6) == 6
    assert InTurn(0).items(positions[:0]).size == 0
