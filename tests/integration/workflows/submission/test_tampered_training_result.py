"""A training result of our own runs, tampered with: each way brings the finding that it must."""

import shutil
from pathlib import Path

import pytest
from tests.integration.workflows.submission.small_result import SmallResult
from tests.integration.workflows.submission.test_training_sequence import scaled_edition
from tests.support.submission.tampered_folders import WAYS, Lying, Tampering

from penstock.submission.check import check


@pytest.mark.parametrize("tampering", WAYS, ids=lambda tampering: tampering.name)
def test_tampering_with_our_own_runs_is_found(
    tampering: Tampering,
    made: SmallResult,
    tmp_path: Path,
) -> None:
    root = shutil.copytree(made.root, tmp_path / "tree")
    tampering.way(Lying(root))
    results = list(check(root, scaled_edition()))
    found = {f.verdict for each in results for f in each.findings if f.rule == tampering.rule}
    assert tampering.verdict in found
    assert not any("the rule itself failed" in f.proof for each in results for f in each.findings)
