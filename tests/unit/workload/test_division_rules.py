"""What the closed and the open division let a run change, and how a refusal reads."""

import pytest

from penstock.errors import UsageError
from penstock.workload.dlio_keys import canonical_path
from penstock.workload.mlperf_divisions import (
    CLOSED_KEYS,
    OPEN_KEYS,
    PLACE_KEYS,
    SubmissionDivision,
    find_breaches,
    require_allowed,
)
from penstock.workload.settings import dotted
from penstock.workload.spec import KeyPath, known_paths

CLOSED, OPEN = SubmissionDivision.CLOSED, SubmissionDivision.OPEN


def keys(*texts: str) -> list[KeyPath]:
    return [tuple(text.split(".")) for text in texts]


@pytest.mark.parametrize("key", sorted(CLOSED_KEYS | PLACE_KEYS))
def test_both_divisions_leave_free_what_the_closed_one_does(key: str) -> None:
    for division in SubmissionDivision:
        assert find_breaches(division, keys(key), workload="unet3d") == ()


@pytest.mark.parametrize("key", sorted(OPEN_KEYS - CLOSED_KEYS))
def test_only_the_open_division_lets_the_workload_be_adapted(key: str) -> None:
    assert find_breaches(OPEN, keys(key), workload="unet3d") == ()
    (breach,) = find_breaches(CLOSED, keys(key), workload="unet3d")
    assert "(rule 3.6.2)" in breach


@pytest.mark.parametrize("key", ["reader.batch_size", "train.computation_time", "metric.au", "new.key"])
def test_whatever_no_rule_names_is_forbidden(key: str) -> None:
    for division, rule in ((CLOSED, "3.6.2"), (OPEN, "3.6.3")):
        (breach,) = find_breaches(division, keys(key), workload="unet3d")
        assert breach.endswith(f"(rule {rule})")


def test_a_key_counts_once_and_by_whatever_word() -> None:
    assert (
        len(find_breaches(CLOSED, keys("data_reader.batch_size", "reader.batch_size"), workload="unet3d"))
        == 1
    )
    assert find_breaches(CLOSED, keys("data_reader.read_threads"), workload="unet3d") == ()


def test_reading_past_the_page_cache_is_for_one_workload() -> None:
    (breach,) = find_breaches(CLOSED, keys("reader.odirect"), workload="retinanet")
    assert "unet3d alone" in breach


def test_a_refusal_names_every_key_its_rule_and_what_is_free() -> None:
    with pytest.raises(UsageError) as refused:
        require_allowed(CLOSED, keys("reader.batch_size", "train.epochs"), workload="unet3d")
    text = str(refused.value)
    for said in (
        "reader.batch_size must stay",
        "train.epochs",
        "rule 3.6.2",
        "reader.read_threads",
        "--closed",
    ):
        assert said in text


def test_every_key_that_the_rules_name_exists() -> None:
    known = {dotted(path) for path in known_paths()}
    explained = {"dataset.num_files_generated", "dataset.total_disk_bytes"}
    assert {dotted(canonical_path(path)) for path in keys(*(OPEN_KEYS | PLACE_KEYS))} <= known | explained
