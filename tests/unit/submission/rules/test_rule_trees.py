"""Every rule on trees that keep it, and on trees that break it."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.submission.numbered_rule_trees import NUMBERED_TREES
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.query_tree import valid_cache, valid_vectors
from tests.support.submission.rule_trees import RuleTree
from tests.support.submission.timed_rule_trees import TIMED_TREES
from tests.support.submission.timed_tree import valid_round
from tests.support.submission.tree_store import TreeStore, worst

from penstock.submission.check import CheckedResult
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import ALL, Rule, Validity, Verdict

HOMES = {"v1.0": "NUMBERED_TREES in numbered_rule_trees.py"} | dict.fromkeys(
    ("v2.0", "v3.0"), "TIMED_TREES in timed_rule_trees.py"
)
OF_OTHER_BENCHMARKS = {"scope.benchmark"}


def trees_of(rule: str, edition: str) -> list[RuleTree[Any]]:
    trees = NUMBERED_TREES if edition == "v1.0" else TIMED_TREES
    return [tree for tree in trees.get(rule, ()) if edition in tree.editions]


@pytest.fixture(scope="module", params=ALL)
def valid(request: pytest.FixtureRequest, store: TreeStore) -> tuple[str, list[CheckedResult]]:
    """An edition, and a valid submission of it: in v2.0 and v3.0 a training and a checkpointing."""
    edition: str = request.param
    trees = [valid_submission() if edition == "v1.0" else valid_round(edition)]
    trees += [valid_cache(), valid_vectors()] if edition == "v3.0" else []
    return edition, [result for tree in trees for result in store.check(tree)]


def test_every_rule_passes_on_a_valid_tree_and_proves_it(valid: tuple[str, list[CheckedResult]]) -> None:
    edition, results = valid
    findings = [finding for result in results for finding in result.findings]
    assert [finding for finding in findings if finding.verdict is not Verdict.PASS] == []
    assert {result.verdict for result in results} == {Validity.VALID}
    assert [finding for finding in findings if not (finding.proof and finding.evidence)] == []
    assert [finding for finding in findings if finding.fix] == []
    rules = {rule.id for rule in RULES if edition in rule.editions} - OF_OTHER_BENCHMARKS
    assert {finding.rule for finding in findings} == rules


@pytest.mark.parametrize("edition", ALL)
def test_every_rule_has_a_tree_that_breaks_it(edition: str) -> None:
    lacking = [
        f"Rule {rule.id} has no tree of {edition} that breaks it: add one to {HOMES[edition]}."
        for rule in RULES
        if edition in rule.editions
        and all(tree.verdict in (Verdict.PASS, Verdict.NOT_APPLICABLE) for tree in trees_of(rule.id, edition))
    ]
    assert not lacking, "\n".join(lacking)


def test_the_page_on_submissions_has_a_row_for_every_rule() -> None:
    page = (Path(__file__).parents[4] / "docs" / "submission.md").read_text(encoding="utf-8")
    listed = set()
    for cell in re.findall(r"^\| (`[a-z_]+\.[^|]*)\|", page, re.MULTILINE):
        group = ""
        for name in re.findall(r"`([a-z_.]+)`", cell):
            group = name.partition(".")[0] or group  # `runs.number`, `.files`
            listed.add(f"{group}.{name.partition('.')[2]}")
    assert sorted({rule.id for rule in RULES} - listed) == []


def test_every_tree_is_of_a_rule() -> None:
    ids = {rule.id for rule in RULES}
    strangers = sorted({*NUMBERED_TREES, *TIMED_TREES} - ids)
    assert not strangers, f"Trees are listed for rules that do not exist: {', '.join(strangers)}"


@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        pytest.param(rule, tree, id=f"{rule.id}-{edition}-{tree.name}")
        for rule in RULES
        for edition in ("v1.0", "v3.0", "v3.0-strict", "v2.0")
        for tree in trees_of(rule.id, edition)
        if edition == tree.editions[-1]
    ],
)
def test_a_rule_gives_its_verdict_with_a_fix_where_it_is_broken(
    rule: Rule, tree: RuleTree[Any], store: TreeStore
) -> None:
    findings = store.judge(tree, rule)
    assert worst(findings) is tree.verdict
    assert all(finding.proof for finding in findings)
    assert all(
        bool(finding.fix) == (finding.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE))
        for finding in findings
    )
