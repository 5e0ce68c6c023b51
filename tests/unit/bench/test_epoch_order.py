"""The order of epochs: nothing twice, nothing lost for long, the same from anywhere, all ranks alike."""

import tracemalloc
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import EpochOrder, EvenDivision, Remainder
from penstock.workload.enums import Shuffle

shuffles = st.sampled_from(Shuffle)
epochs = st.integers(0, 10_000)
seeds = st.integers(-(2**70), 2**70)


@st.composite
def divisible(draw: st.DrawFn, most: int = 400) -> tuple[int, int]:
    """Items and ranks, at least an item for each rank."""
    num_ranks = draw(st.integers(1, 40))
    return draw(st.integers(num_ranks, most)), num_ranks


def epoch_of(division: EvenDivision, *, seed: int, epoch: int, shuffle: Shuffle) -> list[list[int]]:
    """What each rank reads."""
    order = EpochOrder(division.num_items, seed, epoch, shuffle, left_out=division.left_out(epoch))
    positions = np.arange(division.num_per_place * division.num_places, dtype=np.int64)
    by_rank: list[list[int]] = order.items(positions).reshape(-1, division.num_places).T.tolist()
    return by_rank


@given(divisible(), st.sampled_from([Remainder.ROTATE, Remainder.DROP]), seeds, epochs, shuffles)
def test_no_item_comes_twice_in_an_epoch_and_the_missing_ones_are_known(
    counts: tuple[int, int], remainder: Remainder, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    num_items, num_ranks = counts
    division = EvenDivision(num_items, num_ranks, remainder)
    ranks = epoch_of(division, seed=seed, epoch=epoch, shuffle=shuffle)
    left_out = [item for hole in division.left_out(epoch) for item in hole]
    assert len(left_out) == division.num_left_out == num_items % num_ranks
    assert left_out == sorted(left_out)
    assert sorted([*chain(*ranks), *left_out]) == list(range(num_items))
    assert {len(rank) for rank in ranks} == {division.num_per_place}


@given(st.tuples(st.integers(1, 12), st.integers(1, 30)), st.sampled_from(Remainder), seeds, epochs, shuffles)
def test_every_item_comes_exactly_once_where_the_division_is_even(
    counts: tuple[int, int], remainder: Remainder, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    num_ranks, items_per_rank = counts
    division = EvenDivision(num_ranks * items_per_rank, num_ranks, remainder)
    ranks = epoch_of(division, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(chain(*ranks)) == list(range(num_ranks * items_per_rank))
    assert (division.num_left_out, division.num_repeated, division.left_out(epoch)) == (0, 0, ())


@given(divisible(most=2000), epochs)
def test_what_rotate_leaves_out_of_an_epoch_the_next_includes(counts: tuple[int, int], epoch: int) -> None:
    division = EvenDivision(*counts)
    now, then = ({i for hole in division.left_out(e) for i in hole} for e in (epoch, epoch + 1))
    assert not now & then
    assert len(now) == len(then) == division.num_left_out


@given(divisible(most=200))
def test_rotate_leaves_out_every_item_equally_often(counts: tuple[int, int]) -> None:
    num_items, _ = counts
    division = EvenDivision(*counts)
    times_out = np.zeros(num_items, dtype=int)
    for epoch in range(num_items):
        for hole in division.left_out(epoch):
            times_out[hole.start : hole.stop] += 1
    assert (times_out == division.num_left_out).all()


def test_drop_leaves_out_the_last_items_of_every_epoch() -> None:
    division = EvenDivision(10, 4, Remainder.DROP)
    assert [division.left_out(epoch) for epoch in (0, 1, 99)] == [(range(8, 10),)] * 3
    assert division.num_per_place == 2


@given(st.integers(1, 300), st.integers(1, 50), seeds, epochs, shuffles)
def test_pad_reads_everything_and_repeats_only_what_it_counts(
    num_items: int, num_ranks: int, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    division = EvenDivision(num_items, num_ranks, Remainder.PAD)
    ranks = epoch_of(division, seed=seed, epoch=epoch, shuffle=shuffle)
    everything = list(chain(*ranks))
    assert set(everything) == set(range(num_items))
    assert len(everything) - num_items == division.num_repeated < num_ranks
    assert {len(rank) for rank in ranks} == {division.num_per_place}
    assert division.left_out(epoch) == ()


@given(st.integers(1, 400), seeds, epochs, shuffles, st.data())
def test_a_part_of_the_positions_has_the_items_that_it_has_in_the_whole(
    num_items: int, seed: int, epoch: int, shuffle: Shuffle, data: st.DataObject
) -> None:
    order = EpochOrder(num_items, seed, epoch, shuffle)
    positions = data.draw(st.lists(st.integers(0, num_items - 1), max_size=20))
    whole = order.items(np.arange(num_items, dtype=np.int64))
    again = EpochOrder(num_items, seed, epoch, shuffle).items(np.array(positions, dtype=np.int64))
    assert again.tolist() == whole[positions].tolist()


def test_ranks_take_turns_without_shuffling() -> None:
    ranks = epoch_of(EvenDivision(12, 3), seed=1, epoch=5, shuffle=Shuffle.OFF)
    assert ranks == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_rotate_skips_and_keeps_the_sequence_without_shuffling() -> None:
    streams = [
        tuple(
            chain(*zip(*epoch_of(EvenDivision(7, 3), seed=1, epoch=epoch, shuffle=Shuffle.OFF), strict=True))
        )
        for epoch in range(8)
    ]
    assert streams[0] == (1, 2, 3, 4, 5, 6)
    assert streams[3] == (0, 1, 2, 4, 5, 6)
    assert streams[7] == streams[0]
    wrapped = EvenDivision(5, 3)
    assert wrapped.left_out(2) == (range(1), range(4, 5))
    assert epoch_of(wrapped, seed=1, epoch=2, shuffle=Shuffle.OFF) == [[1], [2], [3]]


@pytest.mark.parametrize("shuffle", [Shuffle.SEED, Shuffle.RANDOM])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(shuffle: Shuffle) -> None:
    positions = np.arange(1000, dtype=np.int64)
    orders = {
        tuple(EpochOrder(1000, seed, epoch, shuffle).items(positions).tolist())
        for seed in (-1, 0, 1, 11, 2**64)
        for epoch in (0, 1, 2, 11, 111)
    }
    assert len(orders) == 25


def test_a_ranks_items_change_from_epoch_to_epoch_when_shuffling() -> None:
    division = EvenDivision(10_000, 10)
    epoch_items = [
        set(epoch_of(division, seed=1, epoch=epoch, shuffle=Shuffle.SEED)[3]) for epoch in range(4)
    ]
    for first in range(4):
        for second in range(first):
            assert 50 < len(epoch_items[first] & epoch_items[second]) < 150  # a tenth, by chance


def test_an_epoch_is_the_same_stream_for_any_number_of_ranks() -> None:
    streams = []
    for num_ranks in (1, 2, 4):
        ranks = epoch_of(EvenDivision(64, num_ranks), seed=9, epoch=1, shuffle=Shuffle.SEED)
        streams.append([ranks[step % num_ranks][step // num_ranks] for step in range(64)])
    assert streams[0] == streams[1] == streams[2]


@given(st.integers(1, 300), st.integers(1, 12), seeds, epochs)
def test_runs_are_shuffled_whole_and_stay_in_turn_within(
    num_items: int, run_items: int, seed: int, epoch: int
) -> None:
    order = EpochOrder(num_items, seed, epoch, Shuffle.SEED, run_items=run_items)
    items = order.items(np.arange(num_items, dtype=np.int64)).tolist()
    assert sorted(items) == list(range(num_items))
    whole = num_items // run_items * run_items
    for begin in range(0, whole, run_items):
        run = items[begin : begin + run_items]
        assert run[0] % run_items == 0
        assert run == list(range(run[0], run[0] + run_items))
    assert items[whole:] == list(range(whole, num_items))


def test_the_orders_of_this_version_are_the_same_in_any_process() -> None:
    order = EpochOrder(1_000_003, 5, 6, Shuffle.SEED, left_out=(range(10, 12),))
    assert order.items(np.array([0, 1, 500_000, 1_000_000], dtype=np.int64)).tolist() == [
        253487,
        888369,
        307640,
        843253,
    ]


def test_a_part_of_fifty_million_items_takes_little_memory() -> None:
    tracemalloc.start()
    order = EpochOrder(50_000_007, 1, 4, Shuffle.SEED, left_out=(range(7),))
    items = order.items(np.arange(0, 50_000_000, 1024, dtype=np.int64))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(items.tolist())) == len(items) == 48_829
    assert peak_bytes < 8 << 20
