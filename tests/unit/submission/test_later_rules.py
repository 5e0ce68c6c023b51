"""Every rule of v2.0 and v3.0 on trees that keep it, and on trees that break it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.support.submission.tampered import TAMPERED, Tampered
from tests.support.submission.timed_tree import Round, valid_round

from penstock.submission.check import check
from penstock.submission.edition import load_edition
from penstock.submission.finding import Validity, Verdict
from penstock.submission.rules import RULES, rule_by_id

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.submission.check import CheckedResult

EDITIONS: Final = ("v2.0", "v3.0")
ORDER: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING, Verdict.PASS, Verdict.NOT_APPLICABLE)


@pytest.fixture(scope="module", params=EDITIONS)
def valid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, CheckedResult]:
    """A valid training and a valid checkpointing of an edition, judged once."""
    edition: str = request.param
    root = valid_round(edition).write(tmp_path_factory.mktemp("valid"))
    return {each.workload: each for each in check(root, load_edition(edition))}


def worst(rule: str, tree: Round, root: Path) -> Verdict:
    """The worst verdict of one rule."""
    judged = check(tree.write(root), load_edition(tree.edition), rules=[rule_by_id(rule)])
    found = {finding.verdict for each in judged for finding in each.findings}
    return next(verdict for verdict in ORDER if verdict in found)


def test_every_rule_passes_on_a_valid_tree(valid: dict[str, CheckedResult]) -> None:
    assert {each.verdict for each in valid.values()} == {Validity.VALID}
    for name, judged in valid.items():
        verdicts: dict[str, set[Verdict]] = {}
        for finding in judged.findings:
            assert finding.proof, finding.rule
            assert finding.evidence, finding.rule
            verdicts.setdefault(finding.rule, set()).add(finding.verdict)
        assert {rule for rule, found in verdicts.items() if found != {Verdict.PASS}} == set(), name


@pytest.mark.parametrize("edition", EDITIONS)
def test_every_rule_has_a_tree_that_passes_and_one_that_fails(edition: str, tmp_path: Path) -> None:
    judged = list(check(valid_round(edition).write(tmp_path), load_edition(edition)))
    passing = {finding.rule for each in judged for finding in each.findings}
    of_edition = {rule.id for rule in RULES if edition in rule.editions}
    assert of_edition - passing == {"scope.benchmark"}
    for rule in of_edition:
        assert any(edition in case.editions for case in TAMPERED[rule]), rule
        explained = rule_by_id(rule)
        assert all((explained.title, explained.source, explained.formula, explained.passes, explained.fails))


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule}-{case.name}")
        for rule, cases in TAMPERED.items()
        for case in cases
    ],
)
def test_a_rule_finds_what_breaks_it(rule: str, case: Tampered, tmp_path: Path) -> None:
    edition = case.editions[-1]
    assert worst(rule, case.tree(edition), tmp_path) is case.verdict
