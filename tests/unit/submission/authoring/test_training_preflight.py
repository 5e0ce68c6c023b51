"""What an edition asks of a training result before anything of it is made."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.submission.authoring.result_dir import Series
from penstock.submission.authoring.training_preflight import (
    TrainingPreflight,
    find_breaches,
    require_allowed,
)
from penstock.submission.authoring.tree_owner import claim_tree
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import Benchmark
from penstock.workload.mlperf_divisions import SubmissionDivision


def make_request(root: Path, model: str = "unet3d", **changes: Any) -> TrainingPreflight:
    series = Series(
        tree=claim_tree(root, "acme", now=datetime(2026, 7, 1, tzinfo=UTC), by="tests"),
        division=SubmissionDivision.CLOSED,
        system="fast",
        benchmark=Benchmark.TRAINING,
        model=model,
    )
    request = TrainingPreflight(
        series=series, accelerator="b200", num_accelerators=4, num_hosts=2, data="/mnt/data"
    )
    return replace(request, **changes)


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
def test_breaches_are_named_with_their_rules(
    tmp_path: Path, model: str, changes: dict[str, Any], expected: list[str]
) -> None:
    request = make_request(tmp_path / "tree", model, **changes)
    assert [str(breach) for breach in find_breaches(load_edition("v3.0"), request)] == expected


@pytest.mark.parametrize("inside", ["", "closed/data"])
def test_data_in_the_tree_of_results_is_refused(tmp_path: Path, inside: str) -> None:
    data = tmp_path / "tree" / inside
    with pytest.raises(UsageError, match=r"must be outside of the submission's tree \(rule 3.4.1\)"):
        require_allowed(load_edition("v3.0"), make_request(tmp_path / "tree", data=f"direct://{data}"))


def test_hidden_part_of_a_tree_may_hold_data(tmp_path: Path) -> None:
    data = str(tmp_path / "tree" / ".mlps" / "storage")
    require_allowed(load_edition("v3.0"), make_request(tmp_path / "tree", data=data))
