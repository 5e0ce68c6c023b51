"""Trees on disk for the price of their differences: equal files are written once and hard-linked.

Invariant: a file in a store is never changed in place; a test that edits files calls the `write` of its tree.
"""

import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.submission.rule_trees import RuleTree

from penstock.submission.check import CheckedResult, check
from penstock.submission.edition import Edition, load_edition
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import Finding, Rule, Verdict

WORST_FIRST = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING, Verdict.PASS, Verdict.NOT_APPLICABLE)


class Tree(Protocol):
    """A tree of any edition, as values."""

    edition: str

    def paths(self) -> Mapping[str, Any]:
        """The values by the paths that they are written to."""
        ...

    def text(self, path: str, value: Any) -> str:
        """What a file of this value holds."""
        ...


class TreeStore:
    """Writes trees below a folder, each to one of its own, and checks them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[str, bytes], str] = {}
        self._numbers = itertools.count()
        self._judged: dict[tuple[str, RuleTree[Any]], list[Finding]] = {}

    def write(self, tree: Tree) -> Path:
        """The root of the tree."""
        root = self._folder / f"tree{next(self._numbers)}"
        made: set[str] = set()
        for path, value in tree.paths().items():
            target = f"{root}/{path}"
            parent = target.rpartition("/")[0]
            if parent not in made:
                os.makedirs(parent, exist_ok=True)  # noqa: PTH103 - hundreds of files for each tree
                made.add(parent)
            key = (path.rpartition(".")[2], pickle.dumps(value))
            source = self._files.get(key)
            if source is None:
                Path(target).write_text(tree.text(path, value), encoding="utf-8")
                self._files[key] = target
            else:
                os.link(source, target)
        return root

    def check(
        self, tree: Tree, *, edition: Edition | None = None, rules: Sequence[Rule] = RULES
    ) -> list[CheckedResult]:
        """All results of the tree."""
        return list(check(self.write(tree), edition or load_edition(tree.edition), rules=rules))

    def findings(self, tree: Tree, rule: Rule) -> list[Finding]:
        """What one rule finds in the tree."""
        return [finding for result in self.check(tree, rules=[rule]) for finding in result.findings]

    def judge(self, case: RuleTree[Any], rule: Rule) -> list[Finding]:
        """What one rule finds in one of its own trees, judged once."""
        key = (rule.id, case)
        if key not in self._judged:
            self._judged[key] = self.findings(case.tree(case.editions[-1]), rule)
        return self._judged[key]

    def verdict(self, tree: Tree, rule: Rule) -> Verdict:
        """The worst verdict of one rule."""
        return worst(self.findings(tree, rule))


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict of some findings, of which there must be one."""
    verdicts = {finding.verdict for finding in findings}
    assert verdicts, "the rule found nothing in this tree"
    return next(verdict for verdict in WORST_FIRST if verdict in verdicts)
