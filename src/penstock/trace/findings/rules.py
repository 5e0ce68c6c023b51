"""All rules, in the order in which reports show their findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from penstock.trace.findings.calls import extra_calls, redundant_lookups, small_writes
from penstock.trace.findings.missing import missing_ranks
from penstock.trace.findings.stragglers import stragglers
from penstock.trace.findings.threads import summed_threads
from penstock.trace.findings.tiers import cache_read_by_flush, slower_tier, unserved_reads

if TYPE_CHECKING:
    from penstock.trace.compare.study import Study
    from penstock.trace.findings.base import Finding, Rule

RULES: Final[Mapping[str, Rule]] = {
    "F1": missing_ranks,
    "F2": extra_calls,
    "F3": summed_threads,
    "F4": cache_read_by_flush,
    "F5": slower_tier,
    "F6": small_writes,
    "F7": redundant_lookups,
    "F8": stragglers,
    "F9": unserved_reads,
}


def find(study: Study) -> list[Finding]:
    """What every rule finds."""
    return [finding for rule in RULES.values() for finding in rule(study)]
