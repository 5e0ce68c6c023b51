"""What a division asks of checkpoints before they are written."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.submission.authoring.checkpoint_preflight import (
    CheckpointPreflight,
    find_breaches,
    require_allowed,
)
from penstock.submission.edition import load_edition
from penstock.workload.mlperf_divisions import SubmissionDivision

ASKED = CheckpointPreflight(
    model="llama3-8b",
    accelerator="b200",
    num_processes=8,
    num_writes=10,
    num_reads=10,
    is_subset=False,
    scale=Fraction(1),
    changed=("checkpoint.checkpoint_folder",),
    size_gib=104.7,
)


def rules_broken(division: SubmissionDivision, **changes: Any) -> list[str]:
    asked = replace(ASKED, **changes)
    return [breach.rule for breach in find_breaches(load_edition("v3.0"), division, asked)]


@pytest.mark.parametrize("division", list(SubmissionDivision))
@pytest.mark.parametrize("counts", [(10, 10), (10, 0), (0, 10)])
def test_request_that_follows_the_rules_is_allowed(
    division: SubmissionDivision, counts: tuple[int, int]
) -> None:
    assert rules_broken(division, num_writes=counts[0], num_reads=counts[1]) == []


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
def test_breach_names_its_rule(changes: dict[str, Any], closed: list[str], opened: list[str]) -> None:
    assert rules_broken(SubmissionDivision.CLOSED, **changes) == closed
    assert rules_broken(SubmissionDivision.OPEN, **changes) == opened


def test_all_breaches_are_reported_together() -> None:
    asked = replace(ASKED, num_processes=4, num_writes=1)
    with pytest.raises(UsageError, match=r"1 writes .*4\.7\.1.*4 ranks are not 8 \(rule 4\.6\.1\)"):
        require_allowed(load_edition("v3.0"), SubmissionDivision.CLOSED, asked)
