"""The engine: every rule of an edition on every result; what a rule cannot judge is `not checked`.

Place in the flow: places -> results -> judged results, one at a time: files of one at most are
in memory. Invariant: an exception inside a rule is never `invalid`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from penstock.progress import Progress, Silent
from penstock.submission.edition import Edition, load_edition
from penstock.submission.facts import Unknown
from penstock.submission.finding import Finding, Validity, Verdict, validity
from penstock.submission.metrics import num_accelerators, recompute
from penstock.submission.reading import Result, read_result
from penstock.submission.rules import RULES
from penstock.submission.rules.base import Rule, not_checked
from penstock.submission.tree import find_places

AUTO: Final = "auto"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One result with all its findings; `None` or "" where the files do not say."""

    name: str
    organisation: str
    division: str
    system: str
    workload: str
    accelerator: str
    num_accelerators: int | None
    metrics: dict[str, float]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Validity:
        """What all findings come to."""
        return validity(self.findings)


def choose_edition(asked: str) -> Edition:
    """The edition to judge by; `auto` is v1.0, whose trees alone are read: others are refused."""
    return load_edition("v1.0" if asked == AUTO else asked)


def check(
    root: Path, edition: Edition, *, rules: Sequence[Rule] = RULES, progress: Progress | None = None
) -> Iterator[Judged]:
    """Judge every result below `root`."""
    told = progress or Silent()
    places = list(find_places(root))
    told.begin("results", len(places))
    for place in places:
        yield judge(read_result(place, root), edition, rules)
        told.advance(1)


def judge(result: Result, edition: Edition, rules: Sequence[Rule] = RULES) -> Judged:
    """All rules on one result."""
    submitter = result.place.submitter
    family, accelerator = _workload(result)
    return Judged(
        name=result.place.name,
        organisation=submitter.organisation,
        division=submitter.division.value if submitter.division else "",
        system=result.place.system or _only_system(result),
        workload=family,
        accelerator=accelerator,
        num_accelerators=_num_accelerators(result),
        metrics=recompute(result),
        findings=tuple(
            finding
            for rule in rules
            if edition.edition in rule.editions
            for finding in apply(rule, result, edition)
        ),
    )


def apply(rule: Rule, result: Result, edition: Edition) -> list[Finding]:
    """One rule's findings. What it found before it failed is kept."""
    findings: list[Finding] = []
    try:
        findings.extend(rule.judge(result, edition))
    except Unknown as reason:
        findings.append(not_checked(reason))
    except Exception as defect:  # noqa: BLE001 - a defect of a rule must not become somebody's "invalid"
        _log.warning("rule %s failed on %s", rule.id, result.place.name, exc_info=True)
        findings.append(
            Finding(
                verdict=Verdict.NOT_CHECKED,
                evidence=result.place.name,
                proof=f"the rule itself failed: {type(defect).__name__}: {defect}",
                fix="This is a defect of Penstock: please report it with this result's files.",
            )
        )
    return [replace(finding, rule=rule.id) for finding in findings]


def _workload(result: Result) -> tuple[str, str]:
    for job in result.jobs():
        try:
            return job.workload()
        except Unknown:  # the rule on workloads names what is missing
            continue
    return "", ""


def _num_accelerators(result: Result) -> int | None:
    for run in result.runs:
        try:
            return num_accelerators(run)
        except Unknown:  # the rule on equal runs names what is missing
            continue
    return None


def _only_system(result: Result) -> str:
    return Path(result.systems[0].file).stem if len(result.systems) == 1 else ""
