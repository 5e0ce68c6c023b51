"""`penstock submission check`, from a folder to verdicts: find results, read their files, apply the rules.

    choose_edition   which edition's rules apply to each submitter, by what its tree looks like
    search_tree      the folders that are results; only names are read
    read_results     the files of one result, parsed
    apply_rule       each rule of the edition on the parsed files

Only the files of one result are in memory at a time, because a round has thousands. Invariant: an exception
inside a rule never makes a result invalid; what a rule cannot judge is `not checked`.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.progress import Progress, Silent
from penstock.submission import tree_context
from penstock.submission.edition import Edition
from penstock.submission.edition_choice import EditionChoice
from penstock.submission.find_results import FoundTree, Submitter, require_results, search_tree
from penstock.submission.finding import Finding, Validity, Verdict, combine, not_checked
from penstock.submission.folder_listing import find_folder, list_folder
from penstock.submission.parsed_file import MissingFact, read_description, relative
from penstock.submission.recomputed_metrics import num_accelerators, recompute
from penstock.submission.result_files import SubmittedResult, read_results
from penstock.submission.rules import RULES
from penstock.submission.rules.rule import Rule
from penstock.submission.rules.system_rules import judge_schema

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
    progress = progress or Silent()
    locations = require_results(search_tree(root), root)
    progress.begin("results", len(locations))
    contexts = _ContextReader(root)
    for location in locations:
        chosen = edition.of(location.submitter.folder)
        num_warm_ups = chosen.count_warm_ups(len(location.run_folders))
        yield from read_results(location, contexts.read(location.submitter), root, num_warm_ups=num_warm_ups)
        progress.advance(1)


def check_result(result: SubmittedResult, edition: Edition, rules: Sequence[Rule] = RULES) -> CheckedResult:
    """Apply all rules to one result."""
    location = result.location
    workload, accelerator = _find_workload(result)
    only_system = Path(result.systems[0].file).stem if len(result.systems) == 1 else ""
    return CheckedResult(
        name=result.name,
        edition=edition.edition,
        organisation=location.submitter.organisation,
        division=location.submitter.division.value if location.submitter.division else "",
        system=location.system or only_system,
        workload=workload,
        accelerator=accelerator,
        num_accelerators=_count_accelerators(result),
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
        findings.extend(rule.judge(result, edition))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneDescription:
    """The description of a system without results, of which no result's findings speak."""

    name: str
    findings: tuple[Finding, ...]


def check_lone_descriptions(
    found: FoundTree, edition: Edition | EditionChoice, root: Path
) -> Iterator[LoneDescription]:
    """Judge descriptions whose system has no results by their schema; only v3.0 has one."""
    base = root.resolve()
    for submitter in found.submitters:
        if edition.of(submitter.folder).rules != "v3.0":
            continue
        described = {location.system for location in found.results if location.submitter == submitter}
        for path in list_folder(find_folder(submitter.folder, "systems")):
            if path.suffix.lower() == ".yaml" and path.stem not in described:
                yield LoneDescription(name=relative(path, base), findings=tuple(_judge_alone(path, base)))


def _judge_alone(path: Path, base: Path) -> Iterator[Finding]:
    try:
        for finding in judge_schema(read_description(path, base)):
            yield replace(finding, rule="system.schema")
    except MissingFact as reason:
        yield replace(not_checked(reason), rule="system.schema")


class _ContextReader:
    """Reads the shared files of each submitter, and hashes each pool of code images, once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pools: dict[Path | None, tree_context.CodeImagePool] = {None: tree_context.CodeImagePool()}
        self._submitter: Submitter | None = None
        self._context = tree_context.TreeContext(name="")

    def read(self, submitter: Submitter) -> tree_context.TreeContext:
        """The shared files of a submitter; only the last are cached, as locations are sorted by submitter."""
        if submitter != self._submitter:
            self._submitter = submitter
            folder = tree_context.find_pool(submitter)
            if folder not in self._pools and folder is not None:
                self._pools[folder] = tree_context.read_pool(folder, submitter, self._root)
            self._context = tree_context.read_tree_context(submitter, self._pools[folder], self._root)
        return self._context


def _find_workload(result: SubmittedResult) -> tuple[str, str]:
    """Workload and accelerator by the first run that states them."""
    for run in result.run_dirs():
        try:
            return run.workload()
        except MissingFact:  # the rule on workloads names what is missing
            continue
    return result.location.model.lower(), ""


def _count_accelerators(result: SubmittedResult) -> int | None:
    """The accelerators of the first run that states them."""
    for run in result.runs:
        try:
            return num_accelerators(run)
        except MissingFact:  # the rule on equal runs names what is missing
            continue
    return None
