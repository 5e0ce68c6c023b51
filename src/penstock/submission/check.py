"""`penstock submission check`, from a folder to verdicts: find results, read their files, apply the rules.

    choose_edition   which edition's rules apply to each submitter, by what its tree looks like
    search_tree      the folders that are results; only names are read
    read_results     the files of one result, parsed
    apply_rule       each rule of the edition on the parsed files

Only the files of one result are in memory at a time, because a round has thousands. Invariant: an exception
inside a rule never makes a result invalid; a rule that cannot judge gives `not checked`.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from penstock.progress import Progress
from penstock.submission import result_files
from penstock.submission.edition import Edition, EditionChoice
from penstock.submission.find_results import FoundTree, Submitter, require_results, search_tree
from penstock.submission.parsed_file import MissingFact, read_description, relative
from penstock.submission.recomputed_metrics import num_accelerators, recompute
from penstock.submission.result_files import NO_POOL, CodeImagePool, SubmittedResult
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import Finding, Rule, Validity, Verdict, combine, not_checked
from penstock.submission.rules.tree_rules import REHEARSAL_RULE, judge_schema
from penstock.submission.tree_layout import find_folder, list_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedResult:
    """One result with all its findings; `None` or "" for what its files do not state."""

    name: str
    edition: str
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
        """The outcome of all findings."""
        return combine(self.findings)

    def identity(self) -> dict[str, str | int | None]:
        """The fields that identify the result in documents and tables."""
        return {
            "name": self.name,
            "org": self.organisation,
            "division": self.division,
            "system": self.system,
            "workload": self.workload,
            "accelerator": self.accelerator,
            "num_accelerators": self.num_accelerators,
        }


def check(
    root: Path,
    edition: Edition | EditionChoice,
    *,
    rules: Sequence[Rule] = RULES,
    progress: Progress | None = None,
) -> Iterator[CheckedResult]:
    """Check every result below `root`, one at a time."""
    for result in read_tree(root, edition, progress):
        yield check_result(result, edition.of(result.location.submitter.folder), rules)


def read_tree(
    root: Path, edition: Edition | EditionChoice, progress: Progress | None = None
) -> Iterator[SubmittedResult]:
    """Every result below `root` with its files; asking for the next one drops the last."""
    progress = progress or Progress()
    locations = require_results(search_tree(root), root)
    progress.begin("results", len(locations))
    # Each pool of code images is hashed once. Locations are sorted by submitter, whose files are read once.
    pools: dict[Path | None, CodeImagePool] = {None: NO_POOL}
    last: Submitter | None = None
    for location in locations:
        submitter = location.submitter
        if submitter != last:
            last, pool = submitter, result_files.find_pool(submitter)
            if pool is not None and pool not in pools:
                pools[pool] = result_files.read_pool(pool, submitter, root)
            context = result_files.read_tree_context(submitter, pools[pool], root)
        num_warm_ups = edition.of(submitter.folder).count_warm_ups(len(location.run_folders))
        yield from result_files.read_results(location, context, root, num_warm_ups=num_warm_ups)
        progress.advance(1)


def check_result(result: SubmittedResult, edition: Edition, rules: Sequence[Rule] = RULES) -> CheckedResult:
    """Apply all rules to one result."""
    location = result.location
    workload, accelerator = location.model.lower(), ""
    for run_dir in reversed(result.run_dirs()):  # by the first run that states them
        try:
            workload, accelerator = run_dir.workload()
        except MissingFact:  # the rule on workloads names what is missing
            continue
    accelerators = None
    for run in reversed(result.runs):
        try:
            accelerators = num_accelerators(run)
        except MissingFact:  # the rule on equal runs names what is missing
            continue
    only_system = Path(result.systems[0].file).stem if len(result.systems) == 1 else ""
    return CheckedResult(
        name=result.name,
        edition=edition.edition,
        organisation=location.submitter.organisation,
        division=location.submitter.division.value if location.submitter.division else "",
        system=location.system or only_system,
        workload=workload,
        accelerator=accelerator,
        num_accelerators=accelerators,
        metrics=recompute(result),
        findings=tuple(
            finding
            for rule in rules
            if edition.rules in rule.editions and location.benchmark in rule.benchmarks
            for finding in apply_rule(rule, result, edition)
        ),
    )


def apply_rule(rule: Rule, result: SubmittedResult, edition: Edition) -> list[Finding]:
    """One rule's findings, including those made before it failed."""
    findings: list[Finding] = []
    try:
        findings.extend(rule.findings(result, edition))
    except MissingFact as reason:
        findings.append(not_checked(reason))
    except Exception as defect:
        logger.warning("rule %s failed on %s", rule.id, result.name, exc_info=True)
        findings.append(
            Finding(
                verdict=Verdict.NOT_CHECKED,
                evidence=result.name,
                proof=f"the rule itself failed: {type(defect).__name__}: {defect}",
                fix="This is a defect of Penstock: please report it with this result's files.",
            )
        )
    return [replace(finding, rule=rule.id) for finding in findings]


def check_lone_descriptions(
    found: FoundTree, edition: Edition | EditionChoice, root: Path
) -> dict[str, list[Finding]]:
    """Judge descriptions whose system has no results by their schema; only v3.0 has one."""
    base, judged = root.resolve(), {}
    for submitter in found.submitters:
        if edition.of(submitter.folder).rules != "v3.0":
            continue
        described = {location.system for location in found.results if location.submitter == submitter}
        for path in list_folder(find_folder(submitter.folder, "systems")):
            if path.suffix.lower() == ".yaml" and path.stem not in described:
                try:
                    findings = list(judge_schema(read_description(path, base)))
                except MissingFact as reason:
                    findings = [not_checked(reason)]
                judged[relative(path, base)] = [replace(each, rule="system.schema") for each in findings]
    return judged


def check_document(
    checked: Sequence[CheckedResult],
    edition: Edition | EditionChoice,
    found: FoundTree,
    alone: dict[str, list[Finding]],
) -> dict[str, Any]:
    """The document of `--json`; `found` names folders that are no results, `alone` lone descriptions."""
    return {
        "edition": edition.edition,
        "results": [
            result.identity()
            | {
                "edition": result.edition,
                "verdict": result.verdict.value,
                "metrics": result.metrics,
                "findings": [asdict(finding) for finding in result.findings],
            }
            for result in checked
        ],
        "summary": {
            **count_verdicts(checked),
            "without_results": list(found.without_results),
            "leftovers": list(found.leftovers),
            "unreadable": list(found.unreadable),
            "descriptions": [
                {"name": name, "findings": [asdict(finding) for finding in findings]}
                for name, findings in alone.items()
            ],
            "for_the_reviewer": list(edition.for_the_reviewer),
        },
    }


def count_verdicts(checked: Sequence[CheckedResult]) -> dict[str, Any]:
    """The number of results by verdict."""
    counts = Counter(result.verdict for result in checked)
    return {"results": len(checked)} | {verdict.value: counts[verdict] for verdict in Validity}


def exit_code(checked: Sequence[CheckedResult]) -> int:
    """0 valid, 1 something invalid, 3 something not checked (and nothing invalid)."""
    verdicts = {result.verdict for result in checked}
    if Validity.INVALID in verdicts:
        return 1
    return 3 if Validity.NOT_CHECKED in verdicts else 0


_EXCUSES: Final = {
    "size": frozenset({"sizing.steps", "sizing.memory", "checkpoint.size", "checkpoint.ratio"}),
    # A rehearsal may keep data and results in one folder.
    "place": frozenset({"paths.filesystems"}),
    # The start of an epoch weighs more where an epoch has a few steps.
    "utilization": frozenset({"utilization.minimum", "utilization.stated"}),
}
"""The rules that a rehearsal may break because of its scale, its place, and its few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalAssessment:
    """The findings against a rehearsal: excused by size, place or utilization, or by nothing (`other`)."""

    excused: dict[str, tuple[Finding, ...]]
    other: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, the excused ones first."""
        return (*chain.from_iterable(self.excused.values()), *self.other)

    @property
    def summary(self) -> str:
        """The assessment as a phrase."""
        parts = ["size", *(name for name in ("place", "utilization") if self.excused[name])]
        excuse = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
        if not self.other:
            return f"valid but for {excuse}"
        broken = ", ".join(dict.fromkeys(finding.rule for finding in self.other))
        return f"not valid, whatever its {excuse}: {broken}"


def assess_rehearsal(findings: Iterable[Finding]) -> RehearsalAssessment | None:
    """Assess the findings of one result; None if it is no rehearsal."""
    open_verdicts = (Verdict.FAIL, Verdict.NOT_CHECKED)
    # One finding for each rule and proof, however many runs it concerns.
    against = {(each.rule, each.proof): each for each in findings if each.verdict in open_verdicts}.values()
    if not any(finding.rule == REHEARSAL_RULE for finding in against):
        return None
    excusable = {REHEARSAL_RULE}.union(*_EXCUSES.values())
    return RehearsalAssessment(
        excused={
            name: tuple(finding for finding in against if finding.rule in rules)
            for name, rules in _EXCUSES.items()
        },
        other=tuple(finding for finding in against if finding.rule not in excusable),
    )
