"""The engine: every rule of an edition on every result; what a rule cannot judge is `not checked`.

Place in the flow: places -> results -> judged results, one at a time: files of one at most are
in memory. Invariant: an exception inside a rule is never `invalid`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import UsageError
from penstock.progress import Progress, Silent
from penstock.submission.edition import Edition, load_edition
from penstock.submission.find_results import Place, Submitter, edition_of, find_places, find_submitters
from penstock.submission.finding import Finding, Validity, Verdict, validity
from penstock.submission.parsed_file import Unknown
from penstock.submission.recomputed_metrics import num_accelerators, recompute
from penstock.submission.result_files import Result, read_results
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import Rule, not_checked
from penstock.submission.tree_context import Pool, Surroundings, pool_folder, read_pool, read_surroundings

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


def choose_edition(asked: str, root: Path) -> Edition:
    """The edition to judge by; `auto` is the one that the tree at `root` looks like."""
    if asked != AUTO:
        return load_edition(asked)
    found: dict[str, str] = {}
    for submitter in find_submitters(root):
        found.setdefault(edition_of(submitter), submitter.organisation)
    if len(found) > 1:
        raise UsageError(
            f"Trees of several editions are here: {', '.join(f'{e} ({who})' for e, who in found.items())}",
            where=str(root),
            fix="Check each by itself, or name one with --edition.",
        )
    return load_edition(next(iter(found), "v1.0"))


def check(
    root: Path, edition: Edition, *, rules: Sequence[Rule] = RULES, progress: Progress | None = None
) -> Iterator[Judged]:
    """Judge every result below `root`."""
    for result in read_all(root, edition, progress):
        yield judge(result, edition, rules)


def read_all(root: Path, edition: Edition, progress: Progress | None = None) -> Iterator[Result]:
    """Every result below `root`, one at a time; who asks for the next one is done with the last."""
    told = progress or Silent()
    places = list(find_places(root))
    told.begin("results", len(places))
    shared = _Shared(root)
    for place in places:
        yield from read_results(
            place, shared.around(place), root, num_warm_ups=edition.num_warm_ups_of(len(place.run_folders))
        )
        told.advance(1)


class _Shared:
    """What results of one submitter, and submitters of one tree, have in common: the last of each."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pools: dict[Path | None, Pool] = {None: Pool()}
        self._submitter: Submitter | None = None
        self._around = Surroundings(name="")

    def around(self, place: Place) -> Surroundings:
        """What lies around a place."""
        if place.submitter != self._submitter:
            self._submitter = place.submitter
            folder = pool_folder(place.submitter)
            if folder not in self._pools and folder is not None:
                self._pools[folder] = read_pool(folder, place.submitter, self._root)
            self._around = read_surroundings(place.submitter, self._pools[folder], self._root)
        return self._around


def judge(result: Result, edition: Edition, rules: Sequence[Rule] = RULES) -> Judged:
    """All rules on one result."""
    submitter = result.place.submitter
    family, accelerator = _workload(result)
    return Judged(
        name=result.name,
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
            if edition.edition in rule.editions and result.place.benchmark in rule.benchmarks
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
        _log.warning("rule %s failed on %s", rule.id, result.name, exc_info=True)
        findings.append(
            Finding(
                verdict=Verdict.NOT_CHECKED,
                evidence=result.name,
                proof=f"the rule itself failed: {type(defect).__name__}: {defect}",
                fix="This is a defect of Penstock: please report it with this result's files.",
            )
        )
    return [_named(finding, rule) for finding in findings]


def _named(finding: Finding, rule: Rule) -> Finding:
    """The finding with its rule's id; `replace` would take longer than most rules."""
    return Finding(
        verdict=finding.verdict,
        proof=finding.proof,
        evidence=finding.evidence,
        value=finding.value,
        limit=finding.limit,
        fix=finding.fix,
        rule=rule.id,
    )


def _workload(result: Result) -> tuple[str, str]:
    for job in result.jobs():
        try:
            return job.workload()
        except Unknown:  # the rule on workloads names what is missing
            continue
    return result.place.model.lower(), ""


def _num_accelerators(result: Result) -> int | None:
    for run in result.runs:
        try:
            return num_accelerators(run)
        except Unknown:  # the rule on equal runs names what is missing
            continue
    return None


def _only_system(result: Result) -> str:
    return Path(result.systems[0].file).stem if len(result.systems) == 1 else ""
