"""One changed tree and the verdict that a rule must give to it.

The trees themselves, those that keep a rule beside those that break it, are in `numbered_rule_trees` (v1.0)
and `timed_rule_trees` (v2.0 and v3.0).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.submission.rules.rule import Verdict

TreeT = TypeVar("TreeT")


@dataclass(frozen=True, kw_only=True)
class RuleTree(Generic[TreeT]):
    """A valid tree after one change, and the worst verdict that the rule must give to it."""

    name: str
    make: Callable[[str], TreeT]
    change: Callable[[TreeT], object]
    verdict: Verdict
    editions: tuple[str, ...]

    def tree(self, edition: str) -> TreeT:
        """The tree after the change."""
        tree = self.make(edition)
        self.change(tree)
        return tree
