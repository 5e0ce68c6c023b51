"""All rules, in the order in which findings are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.errors import UsageError
from penstock.submission.rules.means import ReportedMeans, RunMeans
from penstock.submission.rules.parameters import AllowedParameters, Configuration
from penstock.submission.rules.sizing import EnoughForMemory, EnoughSteps
from penstock.submission.rules.structure import (
    Description,
    Folders,
    KnownWorkload,
    NumRuns,
    RunFiles,
    SameInAllRuns,
    StrayFiles,
)
from penstock.submission.rules.utilization import StatedSuccess, Utilization

if TYPE_CHECKING:
    from penstock.submission.rules.base import Rule

RULES: Final[tuple[Rule, ...]] = (
    Folders(),
    StrayFiles(),
    Description(),
    NumRuns(),
    RunFiles(),
    KnownWorkload(),
    SameInAllRuns(),
    EnoughSteps(),
    EnoughForMemory(),
    Utilization(),
    StatedSuccess(),
    RunMeans(),
    ReportedMeans(),
    AllowedParameters(),
    Configuration(),
)


def rule_by_id(name: str) -> Rule:
    """The rule called `name`."""
    found = next((rule for rule in RULES if rule.id == name), None)
    if found is None:
        raise UsageError(f"There is no rule {name!r}", fix=f"Rules are: {', '.join(r.id for r in RULES)}.")
    return found
