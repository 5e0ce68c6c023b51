"""The trees that break rules are the table of ways to tamper: enough of them, and none of a valid tree."""

from tests.support.submission.cross_check_trees import NUMBERED_CROSS_CHECKS, TIMED_CROSS_CHECKS
from tests.support.submission.numbered_rule_trees import NUMBERED_TREES
from tests.support.submission.tampered_folders import WAYS
from tests.support.submission.timed_rule_trees import TIMED_TREES

from penstock.submission.finding import Verdict

KEPT = {Verdict.PASS, Verdict.NOT_APPLICABLE}


def test_120_ways_to_tamper_are_found_by_a_rule_that_names_them() -> None:
    ways = {
        (rule, tree.name)
        for trees in (NUMBERED_TREES, TIMED_TREES)
        for rule, cases in trees.items()
        for tree in cases
        if tree.verdict not in KEPT
    }
    assert len(ways) >= 120
    assert len({rule for rule, _ in ways} | {way.rule for way in WAYS}) >= 60


def test_every_cross_check_is_tried_on_trees_that_break_it() -> None:
    broken = {
        rule
        for checks in (NUMBERED_CROSS_CHECKS, TIMED_CROSS_CHECKS)
        for rule, trees in checks.items()
        if any(tree.verdict not in KEPT for tree in trees)
    }
    assert broken == NUMBERED_CROSS_CHECKS.keys() | TIMED_CROSS_CHECKS.keys()
