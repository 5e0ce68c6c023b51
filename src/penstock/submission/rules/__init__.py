"""The rules of all editions: a module registers its rules when it is imported."""

from importlib import import_module
from typing import Final

from penstock.errors import UsageError
from penstock.submission.rules.rule import Rule, registered_rules

MODULES: Final = (
    "structure_rules",
    "system_rules",
    "provenance_rules",
    "run_rules",
    "dataset_rules",
    "host_rules",
    "metric_rules",
    "parameter_rules",
    "checkpoint_rules",
    "kv_cache_rules",
    "vector_rules",
    "agreement_rules",
    "plausibility_rules",
    "rehearsal_rules",
    "sample_order_rules",
)
"""In the order in which findings are listed, which import statements lose to a sorter."""

for _module in MODULES:
    import_module(f"{__name__}.{_module}")

RULES: Final[tuple[Rule, ...]] = registered_rules()


def rule_by_id(name: str) -> Rule:
    """The rule called `name`."""
    rule = next((rule for rule in RULES if rule.id == name), None)
    if rule is None:
        raise UsageError(f"There is no rule {name!r}", fix=f"Rules are: {', '.join(r.id for r in RULES)}.")
    return rule
