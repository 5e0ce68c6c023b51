"""A rule as a row of a table, three kinds of rows that need no separate function, and their findings.

    limit(id=..., fact=..., compare="<=", limit=..., proof=..., fix=...)
    check(id=..., facts=..., holds=..., show=..., proof=..., fix=...)
    nothing(id=..., problems=..., proof=..., fix=...)
    Rule(id=..., judge=function)

`limit` compares one fact with one limit, `check` judges several facts together, and `nothing` passes if a
list of problems is empty. A function may yield any findings. The tables of rows are in `*_rules.py`. Unless a
row says otherwise, it applies to all editions, judges each training run, and compares with `==`. Invariant:
anything that cannot be judged is `not checked`, with the reason, and is neither valid nor invalid.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, Literal

from penstock.submission.edition import Edition, ParameterLists
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_files import ResultDir, ResultRun, SubmittedResult
from penstock.submission.tree_layout import Benchmark
from penstock.workload.mlperf_divisions import SubmissionDivision

ALL: Final = ("v1.0", "v2.0", "v3.0")
LATER: Final = ("v2.0", "v3.0")
NEWEST: Final = ("v3.0",)
FIRST: Final = ("v1.0",)
TRAINING: Final = (Benchmark.TRAINING,)
CHECKPOINTING: Final = (Benchmark.CHECKPOINTING,)
BOTH: Final = (*TRAINING, *CHECKPOINTING)
EVERY: Final = tuple(Benchmark)
_NO_RUN: Final[Any] = None
_REPORTS: Final = frozenset({"results.json", "mlperf_storage_report.json"})
_FILE_ENDINGS: Final = (".json", ".yaml", ".yml", ".log", ".csv", ".parquet")


class Verdict(StrEnum):
    """The outcome of one rule for one subject, the worst first."""

    FAIL = "fail"
    NOT_CHECKED = "not checked"
    WARNING = "warning"
    PASS = "pass"  # noqa: S105 - a verdict, no password
    NOT_APPLICABLE = "not applicable"


class Validity(StrEnum):
    """The outcome of all rules for one result."""

    VALID = "valid"
    INVALID = "invalid"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict.

    `proof` is the arithmetic, or the reason why nothing was checked; `evidence` names the file, by default
    the one that the rule is about.
    """

    verdict: Verdict
    proof: str
    evidence: str = ""
    value: str = ""
    limit: str = ""
    fix: str = ""
    rule: str = ""


def combine(findings: Iterable[Finding]) -> Validity:
    """Combine verdicts: invalid if any rule fails, else not checked if one cannot be judged, else valid."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return Validity.INVALID
    if Verdict.NOT_CHECKED in verdicts or not verdicts:
        return Validity.NOT_CHECKED
    return Validity.VALID


def pass_if(
    is_kept: bool,  # noqa: FBT001 - the condition that the call is about
    *,
    evidence: str = "",
    proof: str,
    value: object = "",
    limit: object = "",
    fix: str = "",
    otherwise: Verdict = Verdict.FAIL,
) -> Finding:
    """Return a pass if the rule is kept, otherwise a finding with the verdict `otherwise` and the fix."""
    return Finding(
        verdict=Verdict.PASS if is_kept else otherwise,
        evidence=evidence,
        value=str(value),
        limit=str(limit),
        proof=proof,
        fix="" if is_kept else fix,
    )


def or_pass(findings: Iterable[Finding], *, evidence: str, proof: str) -> Iterable[Finding]:
    """Return the findings, or a pass if there are none."""
    return tuple(findings) or (Finding(verdict=Verdict.PASS, evidence=evidence, proof=proof),)


def not_applicable(evidence: str, reason: str) -> Finding:
    """Return the finding of a rule that does not apply."""
    return Finding(verdict=Verdict.NOT_APPLICABLE, evidence=evidence, proof=reason)


def not_checked(reason: MissingFact) -> Finding:
    """Return the finding of a rule that lacks a fact, with the missing field and its file."""
    return Finding(
        verdict=Verdict.NOT_CHECKED,
        proof=reason.what,
        evidence=reason.where,
        fix=reason.fix or _usual_fix(reason.where),
    )


def _usual_fix(where: str) -> str:
    """Return the fix for a missing fact, depending on who usually writes the file."""
    name = where.rpartition("/")[2]
    if "systems" in where.split("/"):
        return "Correct the description, which people write."
    if name in _REPORTS:
        return "Write the report again with `penstock submission report --write`."
    if name.startswith(".") or name.endswith(_FILE_ENDINGS):
        return "Restore the file as the benchmark wrote it."
    return "Submit the whole folder, with every file of the benchmark."


@dataclass(frozen=True, slots=True)
class Case:
    """The subject of a rule: one result, or one result directory `run` (in v1.0, one client's share)."""

    result: SubmittedResult
    edition: Edition
    run: ResultDir = _NO_RUN

    @property
    def name(self) -> str:
        """The folder that is judged, relative to the checked folder."""
        return self.result.name if self.run is _NO_RUN else self.run.name

    @property
    def parameters(self) -> ParameterLists:
        """The keys that a run of this benchmark may set."""
        return (self.edition.checkpoints if self.is_checkpointing else self.edition).parameters

    @property
    def division(self) -> SubmissionDivision:
        """The result's division. Raises `MissingFact` if the path does not name one."""
        division = self.result.location.submitter.division
        if division is None:
            raise MissingFact(
                "the path does not say which division this is",
                where=self.result.name,
                fix="Keep the submitter's folder below closed/ or open/.",
            )
        return division

    @property
    def is_closed(self) -> bool:
        return self.division is SubmissionDivision.CLOSED

    @property
    def is_checkpointing(self) -> bool:
        return self.result.location.benchmark is Benchmark.CHECKPOINTING

    @property
    def whole_run(self) -> ResultRun:
        """The run with all directories, of which `run` is one."""
        return next(run for run in self.result.runs if self.run in run.dirs)

    @property
    def verdict_of_round(self) -> Verdict:
        """The verdict on a breach that the edition's round accepted with a warning."""
        return Verdict.WARNING if self.edition.is_softened else Verdict.FAIL


Judge = Callable[[Case], Iterable[Finding]]
Read = Callable[[Case], Any]
Facts = SimpleNamespace
"""The facts of a row, and the `case`, as attributes."""
Text = str | Callable[[Facts], str]
"""A string that names facts ("{hosts} hosts"), or a function of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `passes` and `fails` are examples in words; the tests have trees for both.

    `unless` returns the reason why the rule does not apply to a case, or "". `judge` yields findings, or
    raises `MissingFact`; a fact that one run lacks does not hide findings on the others. If the rule
    `is_lenient_in_warm_up`, a failure in a warm-up, which no mean includes, is only a warning. `at` returns
    the file that is the evidence of findings that name none: the result's folder, or the summary of the run.
    """

    id: str
    title: str
    editions: tuple[str, ...] = ALL
    benchmarks: tuple[Benchmark, ...] = TRAINING
    each: Literal["run", "run together", "datagen", "directory", "result"] = "run"
    source: str
    formula: str
    passes: str
    fails: str
    unless: Callable[[Case], str] = lambda _: ""
    is_lenient_in_warm_up: bool = False
    at: Read = lambda case: case.name if case.run is _NO_RUN else case.run.summary.file
    judge: Judge

    def findings(self, result: SubmittedResult, edition: Edition) -> Iterator[Finding]:
        """Judge each subject: runs are judged by directory, or `together` if clients shared a data set."""
        subjects = {
            "run": result.run_dirs(),
            "run together": tuple(run.dirs[0] for run in result.runs),
            "datagen": result.datagen,
            "directory": result.all_dirs(),
            "result": (_NO_RUN,),
        }
        if self.each.startswith("run") and not result.runs:
            yield not_checked(MissingFact("there are no runs", where=result.name))
        for subject in subjects[self.each]:
            try:
                yield from self._judge(Case(result, edition, subject))
            except MissingFact as missing:
                yield not_checked(missing)

    def _judge(self, case: Case) -> Iterator[Finding]:
        if reason := self.unless(case):
            yield not_applicable(case.name, reason)
            return
        for found in self.judge(case):
            finding = found if found.evidence else replace(found, evidence=self.at(case))
            is_failure = finding.verdict is Verdict.FAIL
            if self.is_lenient_in_warm_up and is_failure and case.whole_run.is_warm_up:
                yield replace(finding, verdict=Verdict.WARNING, proof=f"{finding.proof} (in the warm-up)")
            else:
                yield finding


NAME: Final[Read] = attrgetter("name")
CONFIG: Final[Read] = attrgetter("run.config.file")
OVERRIDES: Final[Read] = attrgetter("run.overrides.file")
METADATA: Final[Read] = attrgetter("run.metadata.file")
"""Files that several rows use as evidence."""

_SIGNS: Final[Mapping[str, tuple[Callable[[Any, Any], bool], str]]] = {
    "==": (operator.eq, "!="),
    "<=": (operator.le, ">"),
    ">=": (operator.ge, "<"),
    ">": (operator.gt, "<="),
    "in": (lambda fact, limit: fact in limit, "not in"),
}
"""Each comparison, with the sign that proofs show if it does not hold."""


def check(
    *,
    facts: Callable[[Case], Mapping[str, Any] | Iterable[Mapping[str, Any]]],
    holds: Callable[[Facts], bool],
    show: tuple[Text, Text],
    proof: Text,
    fix: Text,
    otherwise: Verdict | Callable[[Facts], Verdict] = Verdict.FAIL,
    **about: Any,
) -> Rule:
    """Make a rule that judges several facts together, once for each mapping of `facts`.

    check(facts=lambda case: {"hosts": ..., "ranks": ...}, holds=lambda it: it.ranks >= it.hosts, ...)

    The evidence is the fact `file`, if there is one. `show` has the texts of the finding's value and limit.
    `otherwise` is the verdict if the facts do not hold. `about` has the other fields of `Rule`.
    """

    def judge(case: Case) -> Iterator[Finding]:
        found = facts(case)
        for known in (found,) if isinstance(found, Mapping) else found:
            it = Facts(**known, case=case)
            value, limit, proved, remedy = (
                text(it) if callable(text) else text.format(**known) for text in (*show, proof, fix)
            )
            yield pass_if(
                holds(it),
                evidence=known.get("file", ""),
                value=value,
                limit=limit,
                proof=proved,
                fix=remedy,
                otherwise=otherwise(it) if callable(otherwise) else otherwise,
            )

    return Rule(judge=judge, **about)


def limit(
    *,
    fact: Read,
    compare: Literal["==", "<=", ">=", ">", "in"] = "==",
    limit: Read | float | str,
    show: tuple[Text, Text] = ("{fact}", "{limit}"),
    **row: Any,
) -> Rule:
    """Make a rule that compares a fact with a limit: a `check` with the facts {fact}, {limit} and {sign}."""
    compares, sign_if_broken = _SIGNS[compare]

    def facts(case: Case) -> Mapping[str, Any]:
        # The fact is read before the limit, so that if both are missing, the fact is reported.
        value = fact(case)
        bound = limit(case) if callable(limit) else limit
        return {
            "fact": value,
            "limit": ", ".join(bound) if isinstance(bound, list) else bound,
            "sign": compare if compares(value, bound) else sign_if_broken,
        }

    return check(facts=facts, holds=lambda it: it.sign == compare, show=show, **row)


def nothing(
    *,
    problems: Callable[[Case], Iterable[str]],
    proof: Text,
    bad: str = "{}",
    join: Callable[[list[str]], str] = "; ".join,
    show: tuple[Text, Text] = ("{number}", "0"),
    **row: Any,
) -> Rule:
    """Make a rule that passes if there are no problems: a `check` with the facts {number} and {problems}.

    `proof` is the proof of a pass, `bad` the format of the problems ("unknown: {}").
    """

    def facts(case: Case) -> Mapping[str, Any]:
        found = list(problems(case))
        return {"number": len(found), "problems": join(found)}

    def prove(it: Facts) -> str:
        if it.number:
            return bad.format(it.problems)
        return proof(it) if callable(proof) else proof

    return check(facts=facts, holds=lambda it: not it.number, show=show, proof=prove, **row)


def compare_stated(
    name: str,
    stated: float,
    recomputed: float,
    *,
    evidence: str = "",
    fix: str,
    tolerance: float,
) -> Finding:
    """Pass if the stated figure equals the recomputed one within a tolerance, which is relative above 1."""
    holds = math.isclose(stated, recomputed, rel_tol=tolerance, abs_tol=tolerance)
    return pass_if(
        holds,
        evidence=evidence,
        value=repr(stated),
        limit=repr(recomputed),
        proof=f"{name}: stated {stated!r} {'==' if holds else '!='} recomputed {recomputed!r}",
        fix=fix,
    )


def free_in_open(case: Case) -> str:
    """Return the reason why a rule does not apply in OPEN, or "" in CLOSED."""
    return "" if case.is_closed else "OPEN leaves this free"


def require_runs(result: SubmittedResult, problem: str = "there are no runs") -> tuple[ResultRun, ...]:
    if not result.runs:
        raise MissingFact(problem, where=result.name)
    return result.runs


def require_datagen(case: Case) -> ResultDir:
    """Return the result directory of the last data generation."""
    if not case.result.datagen:
        raise MissingFact("there is no result directory in datagen/", where=case.result.name)
    return case.result.datagen[-1]


def require_all_hosts(run: ResultDir) -> None:
    """Raise `MissingFact` if facts of some hosts are missing, because a sum would be a guess."""
    path = ("cluster_information", "is_partial")
    if run.metadata.has(*path) and run.metadata.boolean(*path):
        raise MissingFact(
            "the facts of some hosts are missing (cluster_information.is_partial)",
            where=run.metadata.file,
            fix="Repeat the run with facts of all hosts.",
        )


def num_hosts(run: ResultDir) -> int:
    """Return the number of hosts of a run, which is at least one."""
    count = run.summary.integer("num_hosts")
    if count < 1:
        raise MissingFact(f"num_hosts is {count}", where=run.summary.file)
    return count


def num_accelerators(case: Case) -> int:
    return case.run.summary.integer("num_accelerators")
