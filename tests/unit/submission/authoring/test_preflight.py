"""What an edition and a division ask of a result before anything of it is made."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.submission.authoring.preflight import (
    checkpoint_breaches,
    require_none,
    training_breaches,
)
from penstock.submission.edition import load_edition
from penstock.workload.mlperf_divisions import SubmissionDivision

V3 = load_edition("v3.0")


def breaches(root: Path, model: str = "unet3d", **changes: Any) -> Iterator[str]:
    asked: dict[str, Any] = {
        "accelerator": "b200",
        "num_accelerators": 4,
        "num_hosts": 2,
        "data": "/mnt/data",
    } | changes
    return training_breaches(V3, root, model=model, **asked)


@pytest.mark.parametrize(
    ("model", "changes", "expected"),
    [
        ("unet3d", {}, []),
        ("retinanet", {"accelerator": "mi355"}, []),
        ("unet3d", {"data": "s3://bucket/data"}, []),
        ("dlrm", {}, ["dlrm is not one of unet3d, retinanet (rule 2.1.11)"]),
        ("unet3d", {"accelerator": "h100"}, ["h100 is not one of b200, mi355 (rule 2.1.11)"]),
        ("unet3d", {"accelerator": ""}, ["no accelerator is not one of b200, mi355 (rule 2.1.11)"]),
        (
            "unet3d",
            {"num_accelerators": 5},
            ["5 accelerators do not divide evenly among 2 hosts (rule 3.3.6)"],
        ),
    ],
)
def test_breaches_of_training_are_named_with_their_rules(
    tmp_path: Path, model: str, changes: dict[str, Any], expected: list[str]
) -> None:
    assert [str(breach) for breach in breaches(tmp_path / "tree", model, **changes)] == expected


@pytest.mark.parametrize("inside", ["", "closed/data"])
def test_data_in_the_tree_of_results_is_refused(tmp_path: Path, inside: str) -> None:
    data = tmp_path / "tree" / inside
    with pytest.raises(UsageError, match=r"must be outside of the submission's tree \(rule 3.4.1\)"):
        require_none(breaches(tmp_path / "tree", data=f"direct://{data}"), "v3.0")


def test_hidden_part_of_a_tree_may_hold_data(tmp_path: Path) -> None:
    data = str(tmp_path / "tree" / ".mlps" / "storage")
    assert not list(breaches(tmp_path / "tree", data=data))


ASKED: dict[str, Any] = {
    "model": "llama3-8b",
    "accelerator": "b200",
    "num_processes": 8,
    "num_writes": 10,
    "num_reads": 10,
    "is_subset": False,
    "scale": Fraction(1),
    "changed": ("checkpoint.checkpoint_folder",),
    "size_gib": 104.7,
}


def checkpoint_rules_broken(division: SubmissionDivision, **changes: Any) -> list[str]:
    return [
        breach.rpartition("(rule ")[2].rstrip(")")
        for breach in checkpoint_breaches(V3, division, **ASKED | changes)
    ]


@pytest.mark.parametrize("division", list(SubmissionDivision))
@pytest.mark.parametrize("counts", [(10, 10), (10, 0), (0, 10)])
def test_checkpointing_that_follows_the_rules_is_allowed(
    division: SubmissionDivision, counts: tuple[int, int]
) -> None:
    assert checkpoint_rules_broken(division, num_writes=counts[0], num_reads=counts[1]) == []


@pytest.mark.parametrize(
    ("changes", "closed", "opened"),
    [
        ({"model": "llama3-9b"}, ["4.3.3"], ["4.3.3"]),
        ({"num_processes": 9}, ["4.6.1"], ["4.6.4"]),
        ({"num_processes": 16}, ["4.6.1"], []),
        ({"num_writes": 1}, ["4.7.1"], []),
        ({"num_reads": 9}, ["4.7.1"], []),
        ({"scale": Fraction(1, 100)}, ["4.3.4"], ["4.3.4"]),
        ({"accelerator": ""}, ["4.3.4"], ["4.3.4"]),
        ({"accelerator": "h100"}, ["4.3.4"], ["4.3.4"]),
        ({"size_gib": 1441.0}, ["4.3.4"], ["4.3.4"]),
        ({"size_gib": 1440.0}, [], []),
        ({"changed": ("checkpoint.fsync",)}, ["4.6.3"], ["4.6.3"]),
        ({"is_subset": True}, [], []),
        ({"is_subset": True, "num_processes": 16}, ["4.3.5"], []),
        ({"is_subset": True, "model": "llama3-70b", "num_processes": 8}, ["4.3.5"], []),
    ],
)
def test_breach_of_checkpointing_names_its_rule(
    changes: dict[str, Any], closed: list[str], opened: list[str]
) -> None:
    assert checkpoint_rules_broken(SubmissionDivision.CLOSED, **changes) == closed
    assert checkpoint_rules_broken(SubmissionDivision.OPEN, **changes) == opened


def test_all_breaches_are_reported_together() -> None:
    asked = ASKED | {"num_processes": 4, "num_writes": 1}
    with pytest.raises(UsageError, match=r"1 writes .*4\.7\.1.*4 ranks are not 8 \(rule 4\.6\.1\)"):
        require_none(checkpoint_breaches(V3, SubmissionDivision.CLOSED, **asked), "--closed")
