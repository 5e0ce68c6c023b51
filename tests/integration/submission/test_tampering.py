"""A valid tree of v3.0, tampered with: each way brings the finding that it must."""

import shutil
from pathlib import Path

import pytest
from tests.support.submission.tampered_folders import WAYS, Lying, Tampering
from tests.support.submission.timed_tree import valid_training

from penstock.submission.check import CheckedResult, check
from penstock.submission.edition import choose_edition, load_edition
from penstock.submission.rules.rule import Validity, Verdict


def judged(root: Path) -> list[CheckedResult]:
    """All results, by the edition that the tree looks like, without what its round let pass."""
    assert choose_edition("auto", root).edition == "v3.0"
    return list(check(root, load_edition("v3.0-strict")))


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid tree, which nobody changes."""
    root = valid_training().write(tmp_path_factory.mktemp("valid"))
    (only,) = judged(root)
    assert only.verdict is Validity.VALID
    return root


@pytest.mark.parametrize(
    "tampering",
    [
        # A tree of our own runs is tampered with in all ways by the quick tests.
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, each in enumerate(WAYS)
    ],
)
def test_tampering_is_found(tampering: Tampering, valid: Path, tmp_path: Path) -> None:
    root = shutil.copytree(valid, tmp_path / "tree")
    tampering.way(Lying(root))
    results = judged(root)
    found = [f for each in results for f in each.findings if f.rule == tampering.rule]
    assert tampering.verdict in {finding.verdict for finding in found}
    assert all(f.fix for f in found if f.verdict is tampering.verdict)
    assert not any("the rule itself failed" in f.proof for each in results for f in each.findings)
    if tampering.verdict is Verdict.FAIL:
        assert {each.verdict for each in results} == {Validity.INVALID}
    let_pass = {
        f.verdict
        for each in check(root, load_edition("v3.0"))
        for f in each.findings
        if f.rule == tampering.rule
    }
    assert let_pass & {tampering.verdict, Verdict.WARNING}


def test_there_are_ways_enough() -> None:
    assert len({tampering.name for tampering in WAYS}) == len(WAYS) >= 30
