"""The bijection: every item once, for any size; no pattern that a statistic sees; as its statement says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from hashlib import shake_256
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import MAX_SIZE, Permutation
from penstock.errors import UsageError


def whole(size: int, identity: bytes = b"a") -> np.ndarray:
    return Permutation(size, identity).items(np.arange(size, dtype=np.int64))


def items_at(permutation: Permutation, positions: Iterable[int]) -> list[int]:
    return permutation.items(np.array([*positions], dtype=np.int64)).tolist()  # type: ignore[no-any-return]


def stated_item(size: int, identity: bytes, position: int) -> int:
    """The algorithm once more, word for word from its statement, in plain integers."""
    rows = math.isqrt(size - 1) + 1
    rows += rows % 2
    columns = -(-size // rows)
    digest = shake_256(b"penstock permutation 1" + identity).digest(8 * (32 if size < 1024 else 8))
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, len(digest), 8)]

    def high(number: int) -> int:
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        return number >> 32

    item = position
    while True:
        row, column = divmod(item, columns)
        for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
            row = (row + (high((column + row_key) % 2**64) * rows >> 32)) % rows
            column = (column + (high((row + column_key) % 2**64) * columns >> 32)) % columns
        item = row * columns + column
        if item < size:
            return item


def too_far_from_even(counts: np.ndarray, expected: float, sigmas: float = 5.0) -> bool:
    """Whether chi-square lies further from its mean than chance lets it."""
    freedom = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(abs(statistic - freedom) > sigmas * math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "size", [*range(20), 63, 64, 65, 99, 100, 101, 255, 256, 257, 1022, 1023, 1024, 1025, 2**16, 99_991]
)
def test_every_item_comes_exactly_once(size: int) -> None:
    assert np.array_equal(np.sort(whole(size)), np.arange(size))


@given(st.integers(1, 20_000), st.binary(max_size=8))
def test_every_item_comes_exactly_once_for_any_size_and_key(size: int, identity: bytes) -> None:
    found = np.zeros(size, dtype=bool)
    found[whole(size, identity)] = True
    assert found.all()


@given(st.integers(1, MAX_SIZE), st.binary(max_size=8), st.data())
def test_items_are_what_the_stated_algorithm_says_at_any_size(
    size: int, identity: bytes, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    items = items_at(Permutation(size, identity), positions)
    assert items == [stated_item(size, identity, position) for position in positions]
    assert len(set(items)) == len(positions)
    assert all(0 <= item < size for item in items)


def test_positions_may_come_in_any_order_and_repeatedly() -> None:
    permutation = Permutation(70_000, b"b")
    positions = np.arange(70_000, dtype=np.int64)
    once = permutation.items(positions)
    assert np.array_equal(permutation.items(positions[::-1]), once[::-1])
    assert items_at(permutation, [5, 5, 5]) == [once[5]] * 3
    assert permutation.items(positions[:0]).size == 0


def test_the_orders_of_this_version_never_change() -> None:
    assert whole(10, b"golden").tolist() == [9, 2, 1, 8, 4, 5, 6, 7, 3, 0]
    large = Permutation(50_000_000, b"golden")
    assert items_at(large, (0, 1, 2, 49_999_999)) == [21779570, 17989594, 35058340, 11725192]


@pytest.mark.parametrize("size", [2, 3, 4, *[pytest.param(size, marks=pytest.mark.slow) for size in (5, 6)]])
def test_all_orders_of_few_items_are_equally_likely(size: int) -> None:
    num_keys = max(10 * math.factorial(size), 100)
    counts = Counter(tuple(whole(size, b"%d" % key).tolist()) for key in range(num_keys))
    all_counts = np.array([counts[order] for order in permutations(range(size))])
    assert not too_far_from_even(all_counts, num_keys / math.factorial(size))


@pytest.mark.parametrize(
    ("size", "num_keys"),
    [
        (97, 480),
        (1_000_003, 600),
        *[pytest.param(size, 3000, marks=pytest.mark.slow) for size in (97, 1023, 1024, 3000, 1_000_003)],
    ],
)
def test_items_at_a_position_are_evenly_distributed_over_keys(size: int, num_keys: int) -> None:
    drawn = np.array([items_at(Permutation(size, b"%d" % key), (0, 1, 42)) for key in range(num_keys)])
    num_cells = num_keys // 60
    cells = np.bincount(np.arange(size) * num_cells // size, minlength=num_cells)
    for items in drawn.T:
        counts = np.bincount(items * num_cells // size, minlength=num_cells)
        assert not too_far_from_even(counts * cells.mean() / cells, num_keys / num_cells)


@pytest.mark.parametrize("size", [1000, 4096, 99_991])
def test_neighbours_positions_and_keys_are_uncorrelated(size: int) -> None:
    order, other = whole(size, b"1"), whole(size, b"2")
    noise = 5 / math.sqrt(size)
    series = {
        "position": (np.arange(size), order),
        "next": (order[:-1], order[1:]),
        "next but one": (order[:-2], order[2:]),
        "a column on": (order[: -math.isqrt(size)], order[math.isqrt(size) :]),
        "another key": (order, other),
        "low bits": (order & 1, np.arange(size) & 1),
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


@pytest.mark.parametrize("size", [1000, 4000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_as_many_items_stay_in_place_as_chance_has_it(size: int) -> None:
    fixed = [int((whole(size, b"%d" % key) == np.arange(size)).sum()) for key in range(100)]
    assert abs(np.mean(fixed) - 1) < 5 / math.sqrt(100)
    assert max(fixed) < 12


def test_pairs_keep_their_sequence_in_half_of_all_orders() -> None:
    pairs = (items_at(Permutation(500_000, b"%d" % key), (7, 8)) for key in range(400))
    in_sequence = sum(first < second for first, second in pairs)
    assert abs(in_sequence - 200) < 5 * math.sqrt(100)


@pytest.mark.parametrize("size", [-1, MAX_SIZE + 1])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="cannot be ordered"):
        Permutation(size, b"")


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_out_of_range_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match="of 10"):
        items_at(Permutation(10, b""), (3, position, 4))
