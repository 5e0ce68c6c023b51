"""The preview of a plan: the order of the run itself, at once, for any size."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.epoch_order import Remainder
from penstock.bench.training.training_plan import preview_order
from penstock.errors import UsageError
from penstock.workload.enums import DataFormat, Shuffle
from penstock.workload.spec import Dataset, ReaderSection, Workload

WORKLOAD = Workload(
    name="small",
    dataset=Dataset(format=DataFormat.NPZ, num_files_train=48, record_length_bytes=Fraction(1000)),
    reader=ReaderSection(batch_size=2, file_shuffle=Shuffle.SEED, sample_shuffle=Shuffle.SEED),
)


def _preview(workload: Workload = WORKLOAD, **asked: int) -> tuple[list[tuple[int, str]], int]:
    values = {"num_ranks": 1, "rank": 0, "epoch": 1, "head": 10**6, "seed": 5, **asked}
    return preview_order(workload, division=Remainder.ROTATE, **values)


@given(st.integers(1, 12), st.integers(1, 4))
def test_all_ranks_together_get_every_sample_once_where_the_division_is_even(ranks: int, epoch: int) -> None:
    workload = replace(WORKLOAD, dataset=replace(WORKLOAD.dataset, num_files_train=2 * ranks * 3))
    seen = [_preview(workload, num_ranks=ranks, rank=rank, epoch=epoch) for rank in range(ranks)]
    assert sorted(index for samples, _ in seen for index, _ in samples) == list(range(6 * ranks))
    assert {num_samples for _, num_samples in seen} == {6}


def test_each_epoch_has_an_order_of_its_own_and_each_seed_too() -> None:
    orders = [
        tuple(index for index, _ in _preview(epoch=epoch, seed=seed)[0])
        for epoch in (1, 2)
        for seed in (5, 6)
    ]
    assert len(set(orders)) == 4


def test_samples_of_one_file_share_its_name() -> None:
    dataset = replace(
        WORKLOAD.dataset, format=DataFormat.TFRECORD, num_samples_per_file=10, num_files_train=4
    )
    workload = replace(WORKLOAD, dataset=dataset, reader=ReaderSection(batch_size=2))
    samples, _ = _preview(workload)
    assert [index for index, _ in samples] == list(range(40))
    assert samples[19][1] == "train/img_1_of_4.tfrecord"


def test_a_head_is_as_long_as_asked_for_and_the_count_is_of_all() -> None:
    samples, num_samples = _preview(num_ranks=4, rank=3, head=5)
    assert len(samples) == 5
    assert num_samples == 12


@pytest.mark.timeout(20)
def test_fifty_million_files_cost_no_more_than_fifty() -> None:
    workload = replace(WORKLOAD, dataset=replace(WORKLOAD.dataset, num_files_train=50_000_000))
    samples, num_samples = _preview(workload, num_ranks=1024, rank=1023, head=3)
    assert num_samples == 50_000_000 // 2048 * 2
    assert all(0 <= index < 50_000_000 for index, _ in samples)


@pytest.mark.parametrize("wrong", [{"rank": 1}, {"rank": -1}, {"epoch": 0}, {"head": -1}])
def test_a_rank_or_epoch_that_is_not_there_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        _preview(WORKLOAD, **wrong)


def test_a_workload_without_training_files_has_no_plan() -> None:
    with pytest.raises(UsageError, match="no training files"):
        _preview(replace(WORKLOAD, dataset=replace(WORKLOAD.dataset, num_files_train=0)))
