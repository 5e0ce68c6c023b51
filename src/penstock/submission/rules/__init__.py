"""The rules of all editions: the tables of this package's modules, in one table."""

from typing import Final

from penstock.errors import UsageError
from penstock.submission.rules import (
    checkpoint_rules,
    dataset_rules,
    figure_rules,
    query_rules,
    run_rules,
    tree_rules,
)
from penstock.submission.rules.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    *tree_rules.RULES,
    *run_rules.RULES,
    *dataset_rules.RULES,
    *figure_rules.RULES,
    *checkpoint_rules.RULES,
    *query_rules.RULES,
)
"""All rules, in the order in which their findings are listed."""


def rule_by_id(name: str) -> Rule:
    rule = next((rule for rule in RULES if rule.id == name), None)
    if rule is None:
        raise UsageError(f"There is no rule {name!r}", fix=f"Rules are: {', '.join(r.id for r in RULES)}.")
    return rule
