"""Windows: blocks are read one after another, samples come shuffled within a bound, and can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.order import RankOrder, Shard
from penstock.bench.windows import Run, Window, WindowOrder, whole_blocks, windowed
from penstock.errors import UsageError
from penstock.workload.choices import Shuffle

Sample = tuple[int, int]

lengths = st.lists(st.integers(0, 30), max_size=12)
sizes = st.integers(1, 64)


def runs_of(blocks: Sequence[int]) -> list[Run]:
    """Blocks of these lengths, numbered from 100 downwards."""
    return [Run(100 - number, 0, length) for number, length in enumerate(blocks)]


def stream_of(runs: Sequence[Run]) -> list[Sample]:
    return [(run.block, run.first_sample + at) for run in runs for at in range(run.num_samples)]


def order_of(size: int, shuffle: Shuffle = Shuffle.SEED, *, epoch: int = 0, rank: int = 0) -> WindowOrder:
    return WindowOrder(shuffle_size=size, seed=1, epoch=epoch, rank=rank, shuffle=shuffle)


def samples_of(windows: Iterator[Window]) -> list[Sample]:
    found: list[Sample] = []
    for window in windows:
        blocks, samples = window.samples()
        found.extend(zip(blocks.tolist(), samples.tolist(), strict=True))
    return found


@given(lengths, sizes, st.sampled_from(Shuffle))
def test_every_sample_comes_once_and_within_the_window_it_lies_in(
    blocks: list[int], size: int, shuffle: Shuffle
) -> None:
    stream = stream_of(runs_of(blocks))
    found = samples_of(windowed(runs_of(blocks), order_of(size, shuffle)))
    assert len(found) == len(stream)
    for start in range(0, len(stream), size):
        assert sorted(found[start : start + size]) == sorted(stream[start : start + size])


@given(lengths, sizes)
def test_what_is_to_be_read_is_the_stream_as_it_lies_and_at_most_a_window_at_once(
    blocks: list[int], size: int
) -> None:
    windows = list(windowed(runs_of(blocks), order_of(size)))
    assert stream_of([run for window in windows for run in window.runs]) == stream_of(runs_of(blocks))
    assert all(sum(run.num_samples for run in window.runs) == size for window in windows[:-1])
    assert all(run.num_samples for window in windows for run in window.runs)
    assert [window.position for window in windows] == [size * number for number in range(len(windows))]


@given(lengths, sizes, st.integers(0, 400))
def test_a_stream_resumed_at_any_sample_goes_on_as_it_would_have(
    blocks: list[int], size: int, start: int
) -> None:
    whole = samples_of(windowed(runs_of(blocks), order_of(size)))
    resumed = list(windowed(runs_of(blocks), order_of(size), start=start))
    assert samples_of(iter(resumed)) == whole[start:]
    if resumed:
        assert resumed[0].position == start


@given(lengths, sizes)
def test_without_shuffling_samples_come_as_they_lie(blocks: list[int], size: int) -> None:
    found = samples_of(windowed(runs_of(blocks), order_of(size, Shuffle.OFF)))
    assert found == stream_of(runs_of(blocks))


def test_each_window_epoch_and_rank_is_shuffled_in_its_own_way() -> None:
    runs = list(whole_blocks(range(8), 50))
    orders = {
        tuple(window.picks.tolist())
        for epoch in range(3)
        for rank in range(3)
        for window in windowed(runs, order_of(100, epoch=epoch, rank=rank))
    }
    assert len(orders) == 3 * 3 * 4


def test_a_window_knows_nothing_of_others() -> None:
    runs = list(whole_blocks(range(8), 50))
    all_windows = list(windowed(runs, order_of(100)))
    (last,) = windowed(runs, order_of(100), start=300)
    assert np.array_equal(last.picks, all_windows[3].picks)
    assert np.array_equal(order_of(100).picks(3, 100), last.picks)


def test_only_as_many_blocks_are_asked_for_as_the_windows_so_far_need() -> None:
    asked: list[int] = []

    def blocks() -> Iterator[int]:
        for block in range(1000):
            asked.append(block)
            yield block

    windows = windowed(whole_blocks(blocks(), 10), order_of(25))
    next(windows)
    assert asked == [0, 1, 2]
    next(windows)
    assert asked == [0, 1, 2, 3, 4]


def test_a_block_larger_than_the_window_is_read_in_pieces() -> None:
    windows = list(windowed([Run(7, 0, 25)], order_of(10)))
    assert [window.runs for window in windows] == [(Run(7, 0, 10),), (Run(7, 10, 10),), (Run(7, 20, 5),)]


def test_ranks_that_share_files_read_every_sample_once() -> None:
    found: list[Sample] = []
    for rank in range(4):
        files = RankOrder(Shard(20, 4, rank), seed=3, epoch=1, shuffle=Shuffle.SEED)
        found += samples_of(windowed(whole_blocks(files.iterate(), 30), order_of(64, rank=rank)))
    assert sorted(found) == [(file, sample) for file in range(20) for sample in range(30)]


def test_a_stream_larger_than_its_window_is_mixed_over_all_of_the_window() -> None:
    picks = order_of(10_000).picks(0, 10_000)
    assert abs(np.corrcoef(np.arange(10_000), picks)[0, 1]) < 0.05


@pytest.mark.parametrize("size", [0, -5])
def test_windows_that_hold_nothing_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="holds nothing"):
        order_of(size)
