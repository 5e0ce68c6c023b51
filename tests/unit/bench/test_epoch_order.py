"""The order of epochs: nothing twice, nothing lost for long, the same from anywhere, all ranks alike."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import EpochOrder, RankOrder, Remainder, Shard
from penstock.errors import UsageError
from penstock.workload.choices import Shuffle

shuffles = st.sampled_from(Shuffle)
epochs = st.integers(0, 10_000)
seeds = st.integers(-(2**70), 2**70)


@st.composite
def divisible(draw: st.DrawFn, most: int = 400) -> tuple[int, int]:
    """Items and ranks, at least an item for each rank."""
    num_ranks = draw(st.integers(1, 40))
    return draw(st.integers(num_ranks, most)), num_ranks


def epoch_of(
    num_items: int, num_ranks: int, division: Remainder, *, seed: int, epoch: int, shuffle: Shuffle
) -> list[list[int]]:
    """What each rank reads."""
    shards = [Shard(num_items, num_ranks, rank, division) for rank in range(num_ranks)]
    return [list(RankOrder(shard, seed=seed, epoch=epoch, shuffle=shuffle).iterate()) for shard in shards]


@given(divisible(), st.sampled_from([Remainder.ROTATE, Remainder.DROP]), seeds, epochs, shuffles)
def test_no_item_comes_twice_in_an_epoch_and_what_is_missing_was_said(
    counts: tuple[int, int], division: Remainder, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    num_items, num_ranks = counts
    ranks = epoch_of(num_items, num_ranks, division, seed=seed, epoch=epoch, shuffle=shuffle)
    shard = Shard(num_items, num_ranks, 0, division)
    said = [item for hole in shard.left_out(epoch) for item in hole]
    assert len(said) == shard.num_left_out == num_items % num_ranks
    assert said == sorted(said)
    assert sorted([*chain(*ranks), *said]) == list(range(num_items))
    assert {len(rank) for rank in ranks} == {shard.num_per_rank}


@given(st.tuples(st.integers(1, 12), st.integers(1, 30)), st.sampled_from(Remainder), seeds, epochs, shuffles)
def test_where_the_division_is_even_every_item_comes_exactly_once_whatever_the_policy(
    counts: tuple[int, int], division: Remainder, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    num_ranks, each = counts
    ranks = epoch_of(num_ranks * each, num_ranks, division, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(chain(*ranks)) == list(range(num_ranks * each))
    shard = Shard(num_ranks * each, num_ranks, 0, division)
    assert (shard.num_left_out, shard.num_repeated, shard.left_out(epoch)) == (0, 0, ())


@given(divisible(most=2000), epochs)
def test_what_rotate_leaves_out_of_an_epoch_the_next_includes(counts: tuple[int, int], epoch: int) -> None:
    shard = Shard(*counts, rank=0)
    now, then = ({i for hole in shard.left_out(e) for i in hole} for e in (epoch, epoch + 1))
    assert not now & then
    assert len(now) == len(then) == shard.num_left_out


@given(divisible(most=200))
def test_rotate_leaves_nobody_out_more_often_than_others(counts: tuple[int, int]) -> None:
    num_items, _ = counts
    shard = Shard(*counts, rank=0)
    times_out = np.zeros(num_items, dtype=int)
    for epoch in range(num_items):
        for hole in shard.left_out(epoch):
            times_out[hole.start : hole.stop] += 1
    assert (times_out == shard.num_left_out).all()


def test_drop_leaves_out_the_last_items_of_every_epoch() -> None:
    shard = Shard(10, 4, 0, Remainder.DROP)
    assert [shard.left_out(epoch) for epoch in (0, 1, 99)] == [(range(8, 10),)] * 3
    assert shard.num_per_rank == 2


@given(st.integers(1, 300), st.integers(1, 50), seeds, epochs, shuffles)
def test_pad_reads_everything_and_repeats_only_what_it_counts(
    num_items: int, num_ranks: int, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    ranks = epoch_of(num_items, num_ranks, Remainder.PAD, seed=seed, epoch=epoch, shuffle=shuffle)
    shard = Shard(num_items, num_ranks, 0, Remainder.PAD)
    everything = list(chain(*ranks))
    assert set(everything) == set(range(num_items))
    assert len(everything) - num_items == shard.num_repeated < num_ranks
    assert {len(rank) for rank in ranks} == {shard.num_per_rank}
    assert shard.left_out(epoch) == ()


@given(
    divisible(), st.sampled_from([Remainder.ROTATE, Remainder.DROP, Remainder.PAD]), seeds, epochs, shuffles
)
def test_a_position_alone_is_the_same_as_in_a_sequence_or_a_part_of_it(
    counts: tuple[int, int], division: Remainder, seed: int, epoch: int, shuffle: Shuffle
) -> None:
    num_items, num_ranks = counts
    shard = Shard(num_items, num_ranks, num_ranks - 1, division)
    order = RankOrder(shard, seed=seed, epoch=epoch, shuffle=shuffle)
    sequence = list(order.iterate())
    assert [order.item(position) for position in range(len(order))] == sequence
    middle = len(order) // 2
    assert order.items(middle, len(order)).tolist() == sequence[middle:] == list(order.iterate(middle))


def test_iterating_goes_on_beyond_one_step() -> None:
    order = RankOrder(Shard(20_001, 2, 1), seed=1, epoch=2, shuffle=Shuffle.SEED)
    assert list(order.iterate()) == order.items(0, 10_000).tolist()
    assert list(order.iterate(9_999)) == [order.item(9_999)]
    assert list(order.iterate(10_000)) == []


def test_without_shuffling_ranks_take_turns_and_every_epoch_is_the_same() -> None:
    ranks = epoch_of(12, 3, Remainder.ROTATE, seed=1, epoch=5, shuffle=Shuffle.OFF)
    assert ranks == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_without_shuffling_rotate_skips_and_keeps_the_sequence() -> None:
    epochs_seen = (
        epoch_of(7, 3, Remainder.ROTATE, seed=1, epoch=epoch, shuffle=Shuffle.OFF) for epoch in range(8)
    )
    seen = [tuple(chain(*zip(*ranks, strict=True))) for ranks in epochs_seen]
    assert seen[0] == (1, 2, 3, 4, 5, 6)
    assert seen[3] == (0, 1, 2, 4, 5, 6)
    assert seen[7] == seen[0]
    wrapped = epoch_of(5, 3, Remainder.ROTATE, seed=1, epoch=2, shuffle=Shuffle.OFF)
    assert Shard(5, 3, 0).left_out(2) == (range(1), range(4, 5))
    assert wrapped == [[1], [2], [3]]


@pytest.mark.parametrize("shuffle", [Shuffle.SEED, Shuffle.RANDOM])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(shuffle: Shuffle) -> None:
    positions = np.arange(1000, dtype=np.int64)
    orders = {
        tuple(EpochOrder(1000, seed, epoch, shuffle).items(positions).tolist())
        for seed in (-1, 0, 1, 11, 2**64)
        for epoch in (0, 1, 2, 11, 111)
    }
    assert len(orders) == 25


def test_a_ranks_files_change_from_epoch_to_epoch_when_shuffling() -> None:
    shard = Shard(10_000, 10, 3)
    sets = [set(RankOrder(shard, seed=1, epoch=epoch, shuffle=Shuffle.SEED).iterate()) for epoch in range(4)]
    for one in range(4):
        for other in range(one):
            assert 50 < len(sets[one] & sets[other]) < 150  # a tenth, by chance


def test_an_epoch_of_a_number_of_ranks_is_the_same_stream_for_another_number() -> None:
    streams = []
    for num_ranks in (1, 2, 4):
        ranks = epoch_of(64, num_ranks, Remainder.ROTATE, seed=9, epoch=1, shuffle=Shuffle.SEED)
        streams.append([ranks[step % num_ranks][step // num_ranks] for step in range(64)])
    assert streams[0] == streams[1] == streams[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 4, 4, Remainder.ROTATE), "no rank 4 of 4"),
        ((10, 4, -1, Remainder.ROTATE), "no rank -1 of 4"),
        ((10, 0, 0, Remainder.ROTATE), "no rank 0 of 0"),
        ((0, 1, 0, Remainder.PAD), "nothing to read"),
        ((3, 4, 0, Remainder.ROTATE), "3 / 4 ranks = 0 each"),
        ((3, 4, 0, Remainder.DROP), "Too few items"),
        ((10, 4, 0, Remainder.ERROR), "10 / 4 ranks = 2 each, 2 left over"),
    ],
)
def test_shards_that_make_no_sense_are_refused_with_their_arithmetic(
    arguments: tuple[int, int, int, Remainder], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Shard(*arguments)


def test_positions_out_of_range_are_refused() -> None:
    order = RankOrder(Shard(10, 2, 0), seed=1, epoch=0, shuffle=Shuffle.SEED)
    for position in (-1, 5):
        with pytest.raises(IndexError, match="of 5"):
            order.item(position)
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(IndexError, match="of 5"):
            order.items(start, stop)


def test_an_order_is_the_same_in_another_process() -> None:
    shard = Shard(1_000_003, 7, 3)
    order = RankOrder(shard, seed=5, epoch=6, shuffle=Shuffle.SEED)
    program = (
        "import pickle, sys\n"
        "from penstock.bench.epoch_order import RankOrder\n"
        "from penstock.workload.choices import Shuffle\n"
        f"shard = pickle.loads({pickle.dumps(shard)!r})\n"
        "order = RankOrder(shard, seed=5, epoch=6, shuffle=Shuffle.SEED)\n"
        "sys.stdout.write(' '.join(str(order.item(position)) for position in range(0, len(order), 999)))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert [int(word) for word in said.stdout.split()] == order.items(0, len(order))[::999].tolist()


AT_SCALE = """
import sys
from penstock.bench.epoch_order import RankOrder, Shard
from penstock.workload.choices import Shuffle
order = RankOrder(Shard(50_000_000 + 7, 1024, 1023), seed=1, epoch=4, shuffle=Shuffle.SEED)
picked = [order.item(position) for position in range(0, len(order), 7)]
part = order.items(0, len(order))
assert part[::7].tolist() == picked
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
sys.stdout.write(f"{peak.split()[1]} {len(order)}")
"""


def test_fifty_million_items_on_a_thousand_ranks_take_little_memory() -> None:
    said = subprocess.run(
        [sys.executable, "-c", AT_SCALE], check=True, capture_output=True, text=True, timeout=60
    )
    peak_kib, num_positions = said.stdout.split()
    assert int(peak_kib) < 100 << 10
    assert int(num_positions) == 48_828


@given(st.integers(1, 300), st.integers(1, 12), seeds, epochs)
def test_runs_are_shuffled_whole_and_stay_in_turn_within(
    num_items: int, run_items: int, seed: int, epoch: int
) -> None:
    order = EpochOrder(num_items, seed, epoch, Shuffle.SEED, run_items=run_items)
    items = order.items(np.arange(num_items, dtype=np.int64)).tolist()
    assert items == [order.item(position) for position in range(num_items)]
    assert sorted(items) == list(range(num_items))
    whole = num_items // run_items * run_items
    for begin in range(0, whole, run_items):
        run = items[begin : begin + run_items]
        assert run[0] % run_items == 0
        assert run == list(range(run[0], run[0] + run_items))
    assert items[whole:] == list(range(whole, num_items))
