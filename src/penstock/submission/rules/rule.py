"""The row of a rule, and the two comparisons by which most rules judge.

    Rule(id=..., editions=..., judge=limit(fact, "<=", bound, at=SUMMARY, proof=..., fix=...))
    Rule(id=..., editions=..., judge=nothing(problems, at=SUMMARY, proof=..., fix=...))
    Rule(id=..., editions=..., judge=function)

`limit` compares one fact with one limit, `nothing` passes if a list of problems is empty, and a function is
for rules that yield several findings or need more than that. The tables of rows are in `*_rules.py`.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Final, Literal, Required, TypedDict

from penstock.submission.edition import (
    CheckpointLimits,
    Edition,
    KvCacheLimits,
    ParameterLists,
    TimedTree,
    VectorLimits,
)
from penstock.submission.finding import Finding, Verdict, not_applicable, not_checked, pass_if
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_files import ResultDir, SubmittedResult
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


@dataclass(frozen=True, slots=True)
class Case:
    """The subject of a rule: one result, or one result directory of a run (in v1.0 one client's share)."""

    result: SubmittedResult
    edition: Edition
    directory: ResultDir | None = None

    @property
    def run(self) -> ResultDir:
        """The result directory, in a rule that is judged for each run."""
        assert self.directory is not None
        return self.directory

    @property
    def name(self) -> str:
        """The folder that is judged, relative to the checked one."""
        return self.directory.name if self.directory else self.result.name

    @property
    def timed(self) -> TimedTree:
        """The edition's limits for a tree whose runs are named by time."""
        return self.edition.require(self.edition.timed)

    @property
    def checkpoints(self) -> CheckpointLimits:
        """The edition's limits for checkpointing."""
        return self.edition.require(self.edition.checkpoints)

    @property
    def kv_cache(self) -> KvCacheLimits:
        """The edition's limits for key-value caches."""
        return self.edition.require(self.edition.kv_cache)

    @property
    def vectors(self) -> VectorLimits:
        """The edition's limits for vector search."""
        return self.edition.require(self.edition.vectors)

    @property
    def parameters(self) -> ParameterLists:
        """The keys that a run of this benchmark may set."""
        return self.checkpoints.parameters if self.is_checkpointing else self.edition.parameters

    @property
    def division(self) -> SubmissionDivision:
        """The result's division; `MissingFact` where the path does not name one."""
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
        """Check whether the result is in CLOSED."""
        return self.division is SubmissionDivision.CLOSED

    @property
    def is_checkpointing(self) -> bool:
        """Check whether the result is one of checkpointing."""
        return self.result.location.benchmark is Benchmark.CHECKPOINTING

    @property
    def is_warm_up(self) -> bool:
        """Check whether the run counts in no mean."""
        return any(run.is_warm_up and self.directory in run.dirs for run in self.result.runs)

    @property
    def verdict_of_round(self) -> Verdict:
        """The verdict on a breach that the edition's round let pass with a warning."""
        return Verdict.WARNING if self.edition.is_softened else Verdict.FAIL


class Scope(TypedDict, total=False):
    """The scope of rules, shared by several rows: Rule(id=..., **SCOPE, ...)."""

    editions: Required[tuple[str, ...]]
    benchmarks: tuple[Benchmark, ...]
    each: Literal["run", "result"]


Judge = Callable[[Case], Iterator[Finding]]
Read = Callable[[Case], Any]


def free_in_open(case: Case) -> str:
    """Apply a rule in CLOSED alone."""
    return "" if case.is_closed else "OPEN leaves this free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row. `passes` and `fails` are examples in words; the tests have trees for both.

    `unless` returns the reason why the rule does not apply to a case, or "". `judge` yields findings, or
    raises `MissingFact`; a fact that one run lacks hides nothing about the other runs.
    """

    id: str
    title: str
    editions: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...] = TRAINING
    each: Literal["run", "result"] = "run"
    source: str
    formula: str
    passes: str
    fails: str
    unless: Callable[[Case], str] = lambda _: ""
    judge: Judge

    def findings(self, result: SubmittedResult, edition: Edition) -> Iterator[Finding]:
        """Judge a result, or each of its runs."""
        if self.each == "result":
            yield from self._judge(Case(result, edition))
            return
        require_runs(result)
        for run in result.run_dirs():
            try:
                yield from self._judge(Case(result, edition, run))
            except MissingFact as missing:
                yield not_checked(missing)

    def _judge(self, case: Case) -> Iterator[Finding]:
        if reason := self.unless(case):
            yield not_applicable(case.name, reason)
        else:
            yield from self.judge(case)


NAME: Final[Read] = attrgetter("name")
SUMMARY: Final[Read] = attrgetter("run.summary.file")
CONFIG: Final[Read] = attrgetter("run.config.file")
OVERRIDES: Final[Read] = attrgetter("run.overrides.file")
METADATA: Final[Read] = attrgetter("run.metadata.file")
"""The files that are usual evidence."""

Operator = Literal["==", "<=", ">=", ">", "in"]
_COMPARE: Final[Mapping[Operator, tuple[Callable[[Any, Any], bool], str]]] = {
    "==": (operator.eq, "!="),
    "<=": (operator.le, ">"),
    ">=": (operator.ge, "<"),
    ">": (operator.gt, "<="),
    "in": (lambda fact, bound: fact in bound, "not in"),
}
"""Each comparison, and the sign that proofs show where it does not hold."""


def limit(
    fact: Read,
    compare: Operator,
    bound: Read | float | str,
    *,
    at: Read,
    proof: str | Callable[[Case, Any, Any], str],
    fix: str,
    show: str | tuple[str, str] = "{}",
    otherwise: Verdict | Callable[[Any, Any], Verdict] = Verdict.FAIL,
    lenient_in_warm_up: bool = False,
) -> Judge:
    """Compare a fact with its limit. `at` returns the file that is the evidence.

    `proof` and `fix` may name {fact}, {limit} and {sign}; `show` formats the fact and the limit of the
    finding, e.g. ("{} entries", "{} epochs"); `otherwise` is the verdict where the comparison does not hold.
    A failure in a warm-up, which counts in no mean, may be `lenient_in_warm_up`: a warning.
    """
    show_fact, show_limit = (show, show) if isinstance(show, str) else show
    holds, sign_if_broken = _COMPARE[compare]

    def judge(case: Case) -> Iterator[Finding]:
        # The fact is read before the limit: if both are missing, the fact is reported.
        value = fact(case)
        most = bound(case) if callable(bound) else bound
        is_kept = holds(value, most)
        texts = {"fact": value, "limit": most, "sign": compare if is_kept else sign_if_broken}
        finding = pass_if(
            is_kept,
            evidence=at(case),
            value=show_fact.format(value),
            limit=show_limit.format(", ".join(most) if isinstance(most, list) else most),
            proof=proof(case, value, most) if callable(proof) else proof.format(**texts),
            fix=fix.format(**texts),
            otherwise=otherwise(value, most) if callable(otherwise) else otherwise,
        )
        if lenient_in_warm_up and case.is_warm_up and finding.verdict is Verdict.FAIL:
            finding = replace(finding, verdict=Verdict.WARNING, proof=f"{finding.proof} (in the warm-up)")
        yield finding

    return judge


def check(
    facts: Callable[..., Mapping[str, Any]],
    holds: Callable[[Any], bool],
    *,
    over: Callable[[Case], Iterable[Any]] | None = None,
    at: Read | str,
    show: tuple[str, str],
    proof: str | Callable[[Any], str],
    fix: str | Callable[[Any], str],
    otherwise: Verdict | Callable[[Any], Verdict] = Verdict.FAIL,
) -> Judge:
    """Judge several facts together: `holds` and other functions get them as attributes, texts by {name}.

    check(lambda case: {"hosts": ..., "ranks": ...}, lambda it: it.ranks >= it.hosts, proof="{ranks} ranks")

    With `over`, each of these items is judged, and `facts` gets it as a second argument. If `at` is a text,
    it names the fact that is the evidence.
    """

    def judge(case: Case) -> Iterator[Finding]:
        for item in over(case) if over else (None,):
            known = facts(case, item) if over else facts(case)
            it = SimpleNamespace(**known, case=case)
            yield pass_if(
                holds(it),
                evidence=known[at] if isinstance(at, str) else at(case),
                value=show[0].format(**known),
                limit=show[1].format(**known),
                proof=proof(it) if callable(proof) else proof.format(**known),
                fix=fix(it) if callable(fix) else fix.format(**known),
                otherwise=otherwise(it) if callable(otherwise) else otherwise,
            )

    return judge


def nothing(
    problems: Callable[[Case], Iterable[str]],
    *,
    at: Read,
    proof: str | Read,
    fix: str,
    show: str | tuple[str | Read, str | Read] = "{}",
    bad: str = "{}",
    separator: str = "; ",
    otherwise: Verdict | Read = Verdict.FAIL,
) -> Judge:
    """Pass if nothing is wrong. `proof` is the text of a pass, `bad` the one of the problems ("unknown: {}").

    `show` formats the number of problems for the value and for the limit, which is 0; functions of the case
    return other texts.
    """
    shown = (show, show) if isinstance(show, str) else show

    def judge(case: Case) -> Iterator[Finding]:
        found = list(problems(case))
        value, none = (
            text(case) if callable(text) else text.format(number)
            for text, number in zip(shown, (len(found), 0), strict=True)
        )
        yield pass_if(
            not found,
            evidence=at(case),
            value=value,
            limit=none,
            proof=bad.format(separator.join(found)) if found else proof(case) if callable(proof) else proof,
            fix=fix,
            otherwise=otherwise(case) if callable(otherwise) else otherwise,
        )

    return judge


def require_runs(result: SubmittedResult) -> None:
    """Raise `MissingFact` if there are no runs."""
    if not result.runs:
        raise MissingFact("there are no runs", where=result.name)


def require_all_hosts(run: ResultDir) -> None:
    """Raise `MissingFact` if facts of some hosts are missing: a sum would be a guess."""
    path = ("cluster_information", "is_partial")
    if run.metadata.has(*path) and run.metadata.boolean(*path):
        raise MissingFact(
            "the facts of some hosts are missing (cluster_information.is_partial)",
            where=run.metadata.file,
            fix="Repeat the run with facts of all hosts.",
        )


def num_hosts(run: ResultDir) -> int:
    """The hosts of a run; at least one."""
    count = run.summary.integer("num_hosts")
    if count < 1:
        raise MissingFact(f"num_hosts is {count}", where=run.summary.file)
    return count


def num_accelerators(case: Case) -> int:
    """The accelerators that the summary of a run states."""
    return case.run.summary.integer("num_accelerators")
