"""Who gets which samples in which epoch, and that nobody gets none of them unsaid."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import Remainder
from penstock.bench.training.training_plan import (
    RankEpoch,
    SampleSet,
    Sharding,
    count_rank_share,
    eval_epochs,
    left_out_by_division,
    plan_training,
    require_steps,
    shard_evaluation,
    shard_training,
    step_counts,
    summarize_samples,
)
from penstock.cluster.comm import SoloComm
from penstock.errors import UsageError
from penstock.workload.enums import FileSharing, Shuffle
from penstock.workload.spec import Dataset, Evaluation, ReaderSection, Train, Workflow, Workload


def sharding(**fields: object) -> Sharding:
    base = Sharding(
        num_files=40, samples_per_file=1, block_samples=1, item_samples=1, group=3, batch_size=3,
        num_ranks=2, division=Remainder.ROTATE, seed=7, shuffle=Shuffle.SEED, window_samples=0,
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]  # the cases name real fields


def workload(**reader: object) -> Workload:
    return Workload(
        name="w",
        dataset=Dataset(num_files_train=10, num_files_eval=6, num_samples_per_file=8),
        reader=replace(ReaderSection(batch_size=4, batch_size_eval=2), **reader),  # type: ignore[arg-type]
        train=Train(epochs=3),
    )


def samples_of(one: Sharding, rank: int, epoch: int) -> list[int]:
    """What a rank really gets: its items' samples, as far as they fill batches."""
    order = RankEpoch(one, rank=rank, epoch=epoch)
    given_out = []
    for items in order.pieces():
        for item, size in zip(items.tolist(), one.sizes(items).tolist(), strict=True):
            given_out += [item * one.item_samples + sample for sample in range(size)]
    return given_out[: order.count_samples() // one.batch_size * one.batch_size]


def items_of(one: Sharding, epoch: int) -> set[int]:
    found = [
        RankEpoch(one, rank=rank, epoch=epoch).items(0, RankEpoch(one, rank=rank, epoch=epoch).num_items)
        for rank in range(one.num_ranks)
    ]
    return set(np.concatenate(found).tolist())


@st.composite
def deals(draw: st.DrawFn) -> Sharding:
    batch_size, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return sharding(
        num_files=draw(st.integers(batch_size * num_ranks, 90)),
        batch_size=batch_size,
        group=batch_size,
        num_ranks=num_ranks,
        seed=draw(st.integers(0, 1000)),
        shuffle=draw(st.sampled_from([Shuffle.OFF, Shuffle.SEED])),
        division=draw(st.sampled_from([Remainder.ROTATE, Remainder.DROP])),
    )


@given(one=deals(), epoch=st.integers(1, 9))
def test_no_sample_comes_twice_and_all_batches_are_full(one: Sharding, epoch: int) -> None:
    ranks = [samples_of(one, rank, epoch) for rank in range(one.num_ranks)]
    together = [sample for samples in ranks for sample in samples]
    assert len(set(together)) == len(together)
    assert len({len(samples) for samples in ranks}) == 1
    assert len(ranks[0]) % one.batch_size == 0
    assert set(together) <= set(range(one.num_samples))
    assert one.num_samples - len(together) < one.batch_size * one.num_ranks


@given(one=deals(), epoch=st.integers(1, 9))
def test_what_an_epoch_leaves_out_the_next_one_includes(one: Sharding, epoch: int) -> None:
    one = replace(one, division=Remainder.ROTATE)
    left_out = set(range(one.num_items)) - items_of(one, epoch)
    assert left_out <= items_of(one, epoch + 1)
    assert len(left_out) == one.num_items % (one.num_ranks * one.batch_size)


@given(one=deals(), epoch=st.integers(1, 9))
def test_shares_and_what_is_left_out_are_the_whole_data_set(one: Sharding, epoch: int) -> None:
    every = np.arange(one.num_items)
    total = left_out_by_division(one, epoch)
    for rank in range(one.num_ranks):
        order = RankEpoch(one, rank=rank, epoch=epoch)
        steps = order.count_samples() // one.batch_size
        taken, left_out = count_rank_share(order, num_steps=steps, full_steps=steps)
        total = total + taken + left_out
    assert total == summarize_samples(every, np.ones_like(every))


@given(
    deals().map(lambda one: replace(one, samples_per_file=7, group=1)),
    st.sampled_from([1, 3, 7]),
    st.integers(1, 3),
    st.integers(0, 60),
)
def test_files_of_some_steps_are_those_of_their_samples_and_come_once(
    one: Sharding, item_samples: int, epoch: int, num_samples: int
) -> None:
    one = replace(one, item_samples=item_samples)
    for rank in range(one.num_ranks):
        order = RankEpoch(one, rank=rank, epoch=epoch)
        numbers = [number for number, item in order.samples() for _ in item][:num_samples]
        found = [number for piece in order.file_numbers(num_samples) for number in piece.tolist()]
        assert set(found) == set(numbers)
        assert len(found) == len(set(found))


@given(
    deals().map(lambda one: replace(one, samples_per_file=7, group=1)),
    st.sampled_from([1, 3, 7]),
    st.integers(0, 9),
)
def test_a_share_of_a_few_steps_is_counted_without_the_items_between(
    one: Sharding, item_samples: int, num_steps: int
) -> None:
    order = RankEpoch(replace(one, item_samples=item_samples), rank=0, epoch=1)
    full_steps = order.count_samples() // one.batch_size
    num_steps = min(num_steps, full_steps)
    share = count_rank_share(order, num_steps=num_steps, full_steps=full_steps)
    items = np.concatenate([*order.pieces(), np.zeros(0, np.int64)])
    begins = np.cumsum(order.sharding.sizes(items)) - order.sharding.sizes(items)
    taken = np.clip(num_steps * one.batch_size - begins, 0, order.sharding.sizes(items))
    ends = begins + order.sharding.sizes(items)
    left_out = np.clip(ends - full_steps * one.batch_size, 0, order.sharding.sizes(items))
    assert share == (summarize_samples(items, taken), summarize_samples(items, left_out))


def test_where_the_division_is_even_every_sample_comes_once() -> None:
    even = sharding(num_files=42)
    together = Counter(sample for rank in range(2) for sample in samples_of(even, rank, 5))
    assert together == Counter(range(42))
    assert left_out_by_division(even, 5) == SampleSet()


def test_dropping_leaves_out_the_same_files_each_epoch() -> None:
    dropping = sharding(division=Remainder.DROP)
    assert [set(range(40)) - items_of(dropping, epoch) for epoch in (1, 2)] == [{36, 37, 38, 39}] * 2


def test_padding_reads_everything_and_some_twice() -> None:
    padded = sharding(division=Remainder.PAD)
    together = Counter(sample for rank in range(2) for sample in samples_of(padded, rank, 1))
    assert set(together) == set(range(40))
    assert sum(together.values()) == 42


def test_a_remainder_can_be_an_error() -> None:
    with pytest.raises(UsageError, match="40 items do not divide evenly: 6 go to 2 ranks at a time, 4 are"):
        require_steps(sharding(division=Remainder.ERROR), what="training")
    require_steps(sharding(division=Remainder.ERROR, num_files=42), what="training")


def test_too_few_samples_for_one_batch_each_are_an_error_with_advice() -> None:
    with pytest.raises(UsageError, match=r"5 samples are too few for 2 ranks .* training would have no step"):
        require_steps(sharding(num_files=5), what="training")
    require_steps(sharding(num_files=5, division=Remainder.PAD), what="training")
    with pytest.raises(UsageError, match=r"0 samples are too few"):
        require_steps(sharding(num_files=0, division=Remainder.PAD), what="training")


def test_with_shuffling_ranks_get_other_files_each_epoch_and_without_it_the_same() -> None:
    epochs = [set(samples_of(sharding(num_files=120), 0, epoch)) for epoch in (1, 2, 3)]
    assert all(one != other for one, other in pairwise(epochs))
    still = sharding(num_files=120, shuffle=Shuffle.OFF)
    assert samples_of(still, 0, 1) == samples_of(still, 0, 2)


def test_an_order_that_shall_not_change_stays() -> None:
    still = sharding(num_files=42, new_order_each_epoch=False)
    assert samples_of(still, 1, 1) == samples_of(still, 1, 2)
    assert samples_of(still, 1, 1) != samples_of(sharding(num_files=42, shuffle=Shuffle.OFF), 1, 1)


def test_of_larger_items_the_end_that_fills_no_batch_is_left_out_and_counted() -> None:
    files = sharding(
        num_files=4, samples_per_file=10, block_samples=10, item_samples=10, group=1, batch_size=7
    )
    orders = [RankEpoch(files, rank=rank, epoch=1) for rank in range(2)]
    shares = [count_rank_share(order, num_steps=2, full_steps=2) for order in orders]
    assert [taken.samples for taken, _ in shares] == [14, 14]
    assert [left_out.samples for _, left_out in shares] == [6, 6]


def test_a_shorter_last_block_of_a_file_is_counted_as_it_is() -> None:
    short = sharding(num_files=4, samples_per_file=10, block_samples=4, item_samples=4, group=1, batch_size=1)
    assert short.items_per_file == 3
    assert short.sizes(np.arange(6)).tolist() == [4, 4, 2, 4, 4, 2]
    assert sum(RankEpoch(short, rank=rank, epoch=1).count_samples() for rank in range(2)) == 40


def test_digests_tell_lots_apart_and_add_up() -> None:
    items = np.arange(1000)
    ones = np.ones_like(items)
    whole = summarize_samples(items, ones)
    assert whole == summarize_samples(items[::-1], ones)
    assert whole == summarize_samples(items[:300], ones[:300]) + summarize_samples(items[300:], ones[300:])
    assert whole.digest != summarize_samples(items + 1, ones).digest
    assert summarize_samples(items, ones * 2).digest != whole.digest
    assert SampleSet(samples=3, digest=255).document() == {"samples": 3, "digest": "00000000000000ff"}


def test_items_are_samples_where_they_are_shuffled_and_files_where_they_stay_in_turn() -> None:
    def dealt(block_samples: int, num_ranks: int = 2, **reader: object) -> Sharding:
        return shard_training(
            workload(**reader),
            block_samples=block_samples,
            num_ranks=num_ranks,
            division=Remainder.ROTATE,
            seed=1,
        )

    shuffled: dict[str, Any] = {"file_shuffle": Shuffle.SEED, "sample_shuffle": Shuffle.SEED}
    assert (dealt(1, **shuffled).item_samples, dealt(1, **shuffled).group) == (1, 4)
    assert (dealt(4, **shuffled).item_samples, dealt(4, **shuffled).group) == (4, 1)
    assert dealt(4, **shuffled, shuffle_size=99).window_samples == 99
    assert dealt(1, **shuffled).window_samples == 0
    by_file = dealt(4, file_shuffle=Shuffle.SEED)
    assert (by_file.item_samples, by_file.window_samples, by_file.shuffle) == (8, 0, Shuffle.SEED)
    assert dealt(4, num_ranks=11).item_samples == 4
    assert dealt(4).shuffle is Shuffle.OFF


def test_evaluation_takes_its_own_files_in_turn() -> None:
    evaluation = shard_evaluation(workload(), block_samples=8, num_ranks=2, seed=1)
    assert (evaluation.num_files, evaluation.batch_size) == (6, 2)
    assert (evaluation.shuffle, evaluation.division) == (Shuffle.OFF, Remainder.DROP)


def test_steps_stop_at_their_total() -> None:
    assert step_counts([5, 5, 5], None) == [5, 5, 5]
    assert step_counts([5, 5, 5], 7) == [5, 2]
    assert step_counts([5, 5], 100) == [5, 5]


def test_evaluations_come_when_they_were_asked_for() -> None:
    asked = replace(workload(), workflow=Workflow(evaluation=True))
    assert eval_epochs(asked, 3) == {1, 2, 3}
    later = replace(asked, evaluation=Evaluation(eval_after_epoch=2, epochs_between_evals=2))
    assert eval_epochs(later, 7) == {2, 4, 6}
    assert eval_epochs(workload(), 3) == frozenset()
    assert eval_epochs(replace(asked, dataset=Dataset(num_files_train=9)), 3) == frozenset()


def test_a_plan_says_all_that_is_done_and_left_out() -> None:
    asked = replace(
        workload(), workflow=Workflow(evaluation=True), train=Train(epochs=3, total_training_steps=30)
    )
    plan = plan_training(asked, block_samples=8, seed=5, division=Remainder.ROTATE, comm=SoloComm())
    document = plan.document()
    assert [epoch["steps"] for epoch in document["epochs"]] == [20, 10]
    assert [epoch["steps_without_limit"] for epoch in document["epochs"]] == [20, 20]
    assert [epoch["ranks"][0]["samples"] for epoch in document["epochs"]] == [80, 40]
    assert all(epoch["left_out"] == SampleSet().document() for epoch in document["epochs"])
    assert (document["eval_steps"], document["eval_epochs"]) == (24, [1, 2])
    assert (
        document
        == plan_training(
            asked, block_samples=8, seed=5, division=Remainder.ROTATE, comm=SoloComm()
        ).document()
    )


def test_items_too_small_for_a_batch_are_an_error() -> None:
    asked = replace(workload(), reader=ReaderSection(batch_size=100))
    with pytest.raises(UsageError, match="fewer samples than a batch of 100"):
        plan_training(asked, block_samples=8, seed=5, division=Remainder.ROTATE, comm=SoloComm())


def test_any_position_of_a_huge_data_set_is_found_at_once() -> None:
    huge = sharding(num_files=50_000_000, num_ranks=1024, group=24, batch_size=24)
    last = RankEpoch(huge, rank=1023, epoch=3)
    seen = last.items(last.num_items - 24, last.num_items)
    assert len(set(seen.tolist())) == 24
    assert 0 <= seen.min() <= seen.max() < 50_000_000


@pytest.mark.parametrize("shuffle", [Shuffle.OFF, Shuffle.SEED])
def test_ranks_that_share_files_read_parts_of_the_same_one_at_the_same_time(shuffle: Shuffle) -> None:
    asked = workload(file_access=FileSharing.SHARED, file_shuffle=shuffle)
    one = shard_training(asked, block_samples=2, num_ranks=2, division=Remainder.ROTATE, seed=1)
    first, second = (list(RankEpoch(one, rank=rank, epoch=1).samples()) for rank in range(2))
    assert [number for number, _ in first] == [number for number, _ in second]
    assert [samples.stop for _, samples in first] == [samples.start for _, samples in second]
    files = [number for number, _ in first[::2]]
    assert sorted(files) == list(range(10))
    assert (files == list(range(10))) is (shuffle is Shuffle.OFF)
    alone = shard_training(
        workload(file_shuffle=shuffle), block_samples=2, num_ranks=2, division=Remainder.ROTATE, seed=1
    )
    mine, others = (
        {number for number, _ in RankEpoch(alone, rank=rank, epoch=1).samples()} for rank in range(2)
    )
    assert not mine & others
