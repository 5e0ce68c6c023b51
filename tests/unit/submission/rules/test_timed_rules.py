"""Rules of v2.0 and v3.0 where several facts meet: subsets by edition, and data sets with columns."""

from typing import Any

import pytest
from tests.support.submission import tree_changes as do
from tests.support.submission.timed_tree import NUM_FILES, Round, valid_checkpointing, valid_training
from tests.support.submission.tree_store import TreeStore

from penstock.bench.state_layout import plan_layout
from penstock.submission.rules import rule_by_id
from penstock.submission.rules.rule import Verdict
from penstock.workload.load_workload import load_model

PASS, FAIL, UNKNOWN = Verdict.PASS, Verdict.FAIL, Verdict.NOT_CHECKED


def with_columns(**summary: Any) -> Round:
    """A sample of 1,000 x 4 + 8 bytes, no length of a record, and hosts with as little memory."""
    tree = valid_training()
    for number in range(len(tree.leaves("run"))):
        tree.summary("run", number)["host_memory_GB"] = [0.01, 0.01]
        dataset = tree.config("run", number)["dataset"]
        del dataset["record_length_bytes"]
        columns = [{"name": "x", "dtype": "float32", "size": 1_000}, {"name": "y", "dtype": "int64"}]
        dataset |= {"format": "parquet", "parquet": {"columns": columns}}
    do.summary(**summary)(tree)
    return tree


@pytest.mark.parametrize(
    ("edition", "model", "verdict"),
    [
        ("v2.0", "llama3-8b", PASS),
        ("v2.0", "llama3-70b", PASS),
        ("v2.0", "llama3-1t", PASS),
        ("v3.0", "llama3-8b", PASS),
        ("v3.0", "llama3-70b", FAIL),
    ],
)
def test_subset_mode_is_judged_by_its_edition(
    edition: str, model: str, verdict: Verdict, store: TreeStore
) -> None:
    tree = valid_checkpointing(edition, num_invocations=1)
    tree.rename_model(model)
    tree.config("checkpointing")["checkpoint"]["mode"] = "subset"
    tree.overrides("checkpointing").append("++workload.checkpoint.mode=subset")
    assert store.verdict(tree, rule_by_id("checkpoint.subset")) is verdict
    for rule in ("checkpoint.processes", "parameters.allowed"):
        assert store.verdict(tree, rule_by_id(rule)) is PASS


def test_parquet_without_a_record_length_is_judged_by_its_columns_and_samples(store: TreeStore) -> None:
    memory, steps = rule_by_id("sizing.memory"), rule_by_id("sizing.steps")
    # 5 x 0.02 GiB / 4,008 B are 26,790.8 samples.
    for gib, verdict in ((0.02, PASS), (0.03, FAIL)):
        assert store.verdict(with_columns(host_memory_GB=[gib, 0.0]), memory) is verdict
    assert store.verdict(with_columns(), steps) is PASS
    assert store.verdict(with_columns(num_files_train=NUM_FILES - 1), steps) is FAIL


def test_parquet_without_length_and_columns_is_not_checked_and_named(store: TreeStore) -> None:
    tree = with_columns()
    tree.config("run", 2)["dataset"].pop("parquet")
    assert store.verdict(tree, rule_by_id("sizing.steps")) is PASS
    found = store.findings(tree, rule_by_id("sizing.memory"))
    reasons = {finding.proof for finding in found if finding.verdict is UNKNOWN}
    assert reasons == {"there is no field workload.dataset.record_length"}


def test_no_rank_of_the_largest_model_has_the_whole_of_it() -> None:
    layout = plan_layout(load_model("llama3-405b"))
    # Its 512 ranks have 10.3 GiB each on average; rank 0 with the whole model would have 764.
    assert layout.bytes_of_processes().max() < 20 << 30
