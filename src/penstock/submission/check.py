"""`penstock submission check`, from a folder to verdicts: find results, read their files, apply the rules.

    choose_edition   which edition's rules apply to each submitter, by the layout of its tree
    search_tree      the folders that are results; only names are read
    read_results     the files of one result, parsed
    apply_rule       each rule of the edition on the parsed files

A round has thousands of results, so only the files of one result are in memory at a time. Invariant: an
exception inside a rule never makes a result invalid; a rule that cannot judge yields `not checked`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.progress import Progress
from penstock.submission import result_files
from penstock.submission.edition import Edition, EditionChoice
from penstock.submission.find_results import FoundTree, Submitter, require_results, search_tree
from penstock.submission.parsed_file import MissingFact, read_description, relative
from penstock.submission.result_figures import num_accelerators, recompute
from penstock.submission.result_files import NO_POOL, CodeImagePool, ResultDir, SubmittedResult
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import Finding, Rule, Validity, Verdict, combine, not_checked
from penstock.submission.rules.tree_rules import REHEARSAL_RULE, judge_schema
from penstock.submission.tree_layout import find_folder, list_folder
from penstock.units import format_number

Source = TypeVar("Source")
Fact = TypeVar("Fact")
logger = logging.getLogger(__name__)
WORST_FIRST: Final = tuple(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedResult:
    """One result with all its findings. Facts that its files do not state are None or ""."""

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
        return combine(self.findings)

    @property
    def accelerators(self) -> str:
        """The number of accelerators and their name, as far as they are known."""
        number = "?" if self.num_accelerators is None else self.num_accelerators
        return f"{number} {self.accelerator}".strip()

    def identity(self) -> dict[str, str | int | None]:
        """Return the fields that identify the result in documents and tables."""
        return {
            "name": self.name,
            "org": self.organisation,
            "division": self.division,
            "system": self.system,
            "workload": self.workload,
            "accelerator": self.accelerator,
            "num_accelerators": self.num_accelerators,
        }

    def row(self) -> dict[str, str]:
        """Return the result's row in a table of verdicts."""
        throughput = self.metrics.get("train_throughput_mean_samples_per_second")
        return {
            "organisation": self.organisation,
            "division": self.division or "-",
            "system": self.system or "-",
            "workload": self.workload or "-",
            "accelerators": self.accelerators,
            "samples/s": format_number(throughput, ",.1f"),
            "verdict": self.verdict.value,
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
    """Yield every result below `root` with its files, which are dropped when the next result is requested."""
    progress = progress or Progress()
    locations = require_results(search_tree(root), root)
    progress.begin("results", len(locations))
    # Each pool of code images is hashed once. Locations are sorted by submitter, so each submitter's files
    # are read once.
    pools: dict[Path | None, CodeImagePool] = {None: NO_POOL}
    last: Submitter | None = None
    for location in locations:
        submitter = location.submitter
        if submitter != last:
            last, pool = submitter, result_files.find_pool(submitter)
            if pool is not None and pool not in pools:
                pools[pool] = result_files.read_pool(pool, submitter, root)
            context = result_files.read_tree_context(submitter, pools[pool], root)
        own = edition.of(submitter.folder)
        num_warm_ups = 0 if own.is_without_warm_ups(len(location.run_folders)) else own.num_warm_ups
        yield from result_files.read_results(location, context, root, num_warm_ups=num_warm_ups)
        progress.advance(1)


def check_result(result: SubmittedResult, edition: Edition, rules: Sequence[Rule] = RULES) -> CheckedResult:
    location = result.location
    named = _first_stated(ResultDir.workload, result.run_dirs())
    workload, accelerator = named or (location.model.lower(), "")
    only_system = Path(result.systems[0].file).stem if len(result.systems) == 1 else ""
    return CheckedResult(
        name=result.name,
        edition=edition.edition,
        organisation=location.submitter.organisation,
        division=location.submitter.division.value if location.submitter.division else "",
        system=location.system or only_system,
        workload=workload,
        accelerator=accelerator,
        num_accelerators=_first_stated(num_accelerators, result.runs),
        metrics=recompute(result),
        findings=tuple(
            finding
            for rule in rules
            if edition.rules in rule.editions and location.benchmark in rule.benchmarks
            for finding in apply_rule(rule, result, edition)
        ),
    )


def _first_stated(read: Callable[[Source], Fact], sources: Iterable[Source]) -> Fact | None:
    """Return the fact from the first run that states it. If other runs lack it, a rule reports them."""
    for source in sources:
        with suppress(MissingFact):
            return read(source)
    return None


def apply_rule(rule: Rule, result: SubmittedResult, edition: Edition) -> list[Finding]:
    """Apply one rule; return its findings, including those made before it failed."""
    findings: list[Finding] = []
    try:
        findings.extend(rule.findings(result, edition))
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
    """Judge descriptions of systems that have no results, by the schema, which only v3.0 has."""
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
    """Build the document of `--json`.

    `found` names the folders that are not results; `alone` has the findings on descriptions without results.
    """
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
    """Count the results by verdict."""
    counts = Counter(result.verdict for result in checked)
    return {"results": len(checked)} | {verdict.value: counts[verdict] for verdict in Validity}


def exit_code(checked: Sequence[CheckedResult]) -> int:
    """Return 1 if anything is invalid, otherwise 3 if anything was not checked, otherwise 0."""
    verdicts = {result.verdict for result in checked}
    if Validity.INVALID in verdicts:
        return 1
    return 3 if Validity.NOT_CHECKED in verdicts else 0


def group_findings(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Group findings with the same cause, the worst first.

    A violation in several files is one group, and so is a file that several rules cannot read.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: WORST_FIRST.index(finding.verdict)):
        is_unread = finding.verdict is Verdict.NOT_CHECKED
        cause = (finding.evidence,) if is_unread else (finding.rule, finding.fix)
        groups.setdefault((finding.verdict, finding.proof, *cause), []).append(finding)
    return list(groups.values())


_EXCUSES: Final = {
    "sizing.steps": "size",
    "sizing.memory": "size",
    "checkpoint.ratio": "size",
    "checkpoint.size": "size",
    "paths.filesystems": "place",  # a rehearsal may keep data and results in one folder
    "utilization.minimum": "utilization",  # with few steps in an epoch, the start of the epoch weighs more
    "utilization.stated": "utilization",
}
"""The rules that a rehearsal may break, each with the excuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalAssessment:
    """The findings against a rehearsal, excused ones first; `other` has the ones without an excuse.

    `summary` is the assessment as a phrase.
    """

    summary: str
    findings: tuple[Finding, ...]
    excuses: tuple[str, ...]
    other: tuple[Finding, ...]


def assess_rehearsal(findings: Iterable[Finding]) -> RehearsalAssessment | None:
    """Assess the findings of one result; return None unless the result is a rehearsal."""
    open_verdicts = (Verdict.FAIL, Verdict.NOT_CHECKED)
    # Keep one finding for each rule and proof, however many runs it concerns.
    against = {(each.rule, each.proof): each for each in findings if each.verdict in open_verdicts}.values()
    if not any(finding.rule == REHEARSAL_RULE for finding in against):
        return None
    excused = [finding for rule in _EXCUSES for finding in against if finding.rule == rule]
    other = tuple(finding for finding in against if finding.rule not in {REHEARSAL_RULE, *_EXCUSES})
    excuses = tuple(dict.fromkeys(["size", *(_EXCUSES[finding.rule] for finding in excused)]))
    excuse = " and ".join([*filter(None, [", ".join(excuses[:-1])]), excuses[-1]])
    broken = ", ".join(dict.fromkeys(finding.rule for finding in other))
    return RehearsalAssessment(
        summary=f"not valid, whatever its {excuse}: {broken}" if other else f"valid but for {excuse}",
        findings=(*excused, *other),
        excuses=excuses,
        other=other,
    )
