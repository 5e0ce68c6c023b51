"""Every finding of every rule tree, word for word: verdict, value, limit, proof, fix and evidence.

With PENSTOCK_WRITE_GOLDEN=1 in the environment the files are written anew; read the difference.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.submission.numbered_rule_trees import NUMBERED_TREES
from tests.support.submission.numbered_tree import valid_submission
from tests.support.submission.query_tree import valid_cache, valid_vectors
from tests.support.submission.timed_rule_trees import TIMED_TREES
from tests.support.submission.timed_tree import valid_checkpointing, valid_training

from penstock.submission.finding import Verdict
from penstock.submission.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.submission.rule_trees import RuleTree
    from tests.support.submission.tree_store import Tree, TreeStore

    from penstock.submission.finding import Finding
    from penstock.submission.rules.rule import Rule

RUN_NAME = re.compile(r"\b(run\d+|\d{8}_\d{6})\b")
"""Runs that share a finding are written down once."""
GOLDEN = Path(__file__).parents[3] / "golden" / "submission"


def findings_of(
    rule: Rule, family: str, store: TreeStore, valid: Mapping[str, Sequence[Finding]]
) -> Iterator[tuple[str, list[Finding]]]:
    if ("v1.0" if family == "numbered" else "v3.0") in rule.editions:
        for name, findings in valid.items():
            yield name, [finding for finding in findings if finding.rule == rule.id]
    cases: Mapping[str, tuple[RuleTree[Any], ...]] = NUMBERED_TREES if family == "numbered" else TIMED_TREES
    for case in cases.get(rule.id, ()):
        yield case.name, store.judge(case, rule)


def valid_trees(family: str) -> Mapping[str, Tree]:
    if family == "numbered":
        return {"valid": valid_submission()}
    return {
        "valid training": valid_training(num_runs=2),
        "valid checkpointing": valid_checkpointing(),
        "valid cache": valid_cache(),
        "valid vectors": valid_vectors(),
    }


def lines(store: TreeStore, family: str) -> Iterator[str]:
    valid = {
        name: [finding for result in store.check(tree) for finding in result.findings]
        for name, tree in valid_trees(family).items()
    }
    for rule in RULES:
        for name, findings in findings_of(rule, family, store, valid):
            shown = [finding for finding in findings if finding.verdict is not Verdict.PASS] or findings
            if shown:
                yield f"{rule.id}: {name}"
            yield from dict.fromkeys(
                f"    {finding.verdict.value} [{finding.value}] [{finding.limit}] {finding.proof} | "
                f"{finding.fix}".rstrip(" |")
                + f" ({RUN_NAME.sub('RUN', finding.evidence)})"
                for finding in shown
            )


@pytest.mark.parametrize("family", ["numbered", "timed"])
def test_findings_are_worded_as_written_down(family: str, store: TreeStore) -> None:
    path = GOLDEN / f"findings_{family}.txt"
    text = "\n".join(lines(store, family)) + "\n"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines(), (
        "findings are worded otherwise than written down; where that is meant, set PENSTOCK_WRITE_GOLDEN=1, "
        "run this again and read the difference"
    )
