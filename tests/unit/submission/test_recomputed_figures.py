"""Figures and times, recomputed from what epochs and ranks report."""

from datetime import timedelta
from typing import Any

import pytest
from tests.support.submission import tree_changes as do
from tests.support.submission.timed_tree import Round, valid_checkpointing, valid_training
from tests.support.submission.tree_store import TreeStore

from penstock.submission.check import read_tree
from penstock.submission.edition import load_edition
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_figures import (
    checkpoint_means,
    mib_per_second,
    num_accelerators,
    read_interval,
    recompute,
    record_bytes,
)
from penstock.submission.result_files import SubmittedResult


def read(tree: Round, store: TreeStore) -> SubmittedResult:
    (result,) = read_tree(store.write(tree), load_edition(tree.edition))
    return result


def test_a_training_is_recomputed_without_its_warm_up(store: TreeStore) -> None:
    result = read(valid_training(num_runs=3), store)
    metrics = recompute(result)
    rate = metrics["train_throughput_mean_samples_per_second"]
    assert rate == pytest.approx(328.55, rel=1e-12)
    assert metrics["train_throughput_stdev_samples_per_second"] == pytest.approx(0.05, rel=1e-9)
    assert metrics["train_throughput_mean_MB_per_second"] == pytest.approx(rate * 146_600_628 / 2**20)
    assert metrics["train_au_mean_percentage"] == pytest.approx(97.0)
    assert num_accelerators(result.runs[0]) == 8
    assert mib_per_second(result.run_dirs()[0]) == pytest.approx(328.4 * 146_600_628 / 2**20)


def test_figure_that_cannot_be_recomputed_is_absent(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    tree.summary("run", 1)["metric"].pop("train_au_percentage")
    assert "train_au_mean_percentage" not in recompute(read(tree, store))
    tree.drop("/run/2026")
    assert recompute(read(tree, store)) == {}


@pytest.mark.parametrize(
    ("dataset", "size"),
    [
        ({"record_length_bytes": 7, "record_length": 9}, 7),
        ({"record_length": 9.5}, 9.5),
        ({"parquet": {"columns": [{"dtype": "float32", "size": 10}, {"dtype": "int8"}]}}, 41),
    ],
)
def test_a_sample_is_as_long_as_the_configuration_says(
    dataset: dict[str, Any], size: float, store: TreeStore
) -> None:
    tree = valid_training(num_runs=1)
    tree.config("run")["dataset"] = dataset
    assert record_bytes(read(tree, store).run_dirs()[0]) == size


@pytest.mark.parametrize(
    ("dataset", "proof"),
    [
        ({}, r"there is no field workload\.dataset\.record_length"),
        ({"record_length": 0}, r"workload\.dataset\.record_length is not positive"),
        ({"parquet": {"columns": []}}, r"workload\.dataset\.parquet\.columns has no column"),
        ({"parquet": {"columns": [{"size": 1}]}}, r"columns\.0 is \{'size': 1\}, not a column"),
    ],
)
def test_a_sample_without_a_length_is_named(dataset: dict[str, Any], proof: str, store: TreeStore) -> None:
    tree = valid_training(num_runs=1)
    tree.config("run")["dataset"] = dataset
    with pytest.raises(MissingFact, match=proof):
        record_bytes(read(tree, store).run_dirs()[0])


def test_a_checkpoint_is_as_long_as_its_first_or_its_slowest_rank(store: TreeStore) -> None:
    tree = valid_checkpointing()
    stats = {"1": {"save_ckpt1": {"duration": 2.0}, "save_ckpt2": {"duration": 4.0}, "load_ckpt1": {}}}
    do.replace("checkpointing", 0, "0_per_epoch_stats.json", stats)(tree)
    slower = {"1": {"save_ckpt1": {"duration": 8.0}}}
    do.replace("checkpointing", 0, "1_per_epoch_stats.json", slower)(tree)
    for rank in range(2, 8):
        do.without("checkpointing", 0, f"{rank}_per_epoch_stats.json")(tree)
    tree.summary("checkpointing")["metric"]["checkpoint_size_GB"] = 16.0
    first, second = read(tree, store).run_dirs()
    assert checkpoint_means(first, "save") == {
        "save_checkpoint_io_mean_GB_per_second": (6.0, 3.0),
        "save_checkpoint_duration_mean_seconds": (3.0, 6.0),
    }
    assert checkpoint_means(second, "save") == {}
    with pytest.raises(MissingFact, match="there is no field duration"):
        checkpoint_means(first, "load")


def test_a_checkpoint_that_took_no_time_is_named(store: TreeStore) -> None:
    tree = valid_checkpointing()
    stats = {"1": {"save_ckpt1": {"duration": 0.0}}}
    do.replace("checkpointing", 0, "0_per_epoch_stats.json", stats)(tree)
    with pytest.raises(MissingFact, match="save_ckpt1 took no time"):
        checkpoint_means(read(tree, store).run_dirs()[0], "save")


def test_an_interval_is_by_the_tools_marks_else_by_the_summary(store: TreeStore) -> None:
    tree = valid_training(num_runs=2)
    do.metadata(number=0, invocation_end_time="2026-07-01T10:00:30+00:00")(tree)
    do.forget("invocation_start_time", number=1)(tree)
    first, second = read(tree, store).run_dirs()
    (begin, end), (second_begin, second_end) = read_interval(first), read_interval(second)
    assert (end - begin, second_end - second_begin) == (timedelta(seconds=30), timedelta(minutes=18))
    assert second_begin.tzinfo is not None


def test_an_interval_that_ends_before_it_begins_is_named(store: TreeStore) -> None:
    tree = valid_training(num_runs=1)
    do.metadata(number=0, invocation_end_time="2026-07-01T09:00:00")(tree)
    with pytest.raises(MissingFact, match="invocation_end_time is before invocation_start_time"):
        read_interval(read(tree, store).run_dirs()[0])
    do.metadata(number=0, invocation_end_time="late")(tree)
    with pytest.raises(MissingFact, match="invocation_end_time is 'late', not a date"):
        read_interval(read(tree, store).run_dirs()[0])
