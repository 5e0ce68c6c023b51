"""How a rule is declared: `limit_rule` for one value against one limit, a decorated function for the others.

    limit_rule(RunCase, id=..., editions=..., value=..., compare="<=", limit=..., ...)
    @run_rule(id=..., editions=..., ...)       a generator of findings for each run, given a `RunCase`
    @result_rule(id=..., editions=..., ...)    the same for each result, given a `ResultCase`

A declaration registers its rule; nothing else lists it. Invariant: a rule that says too little about itself
raises while its module is imported, so that no rule is silently left out of an edition.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NotRequired, TypedDict, TypeVar, Unpack

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
BOTH: Final = (Benchmark.TRAINING, Benchmark.CHECKPOINTING)
CHECKPOINTING: Final = (Benchmark.CHECKPOINTING,)
EVERY: Final = tuple(Benchmark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule. `passes` and `fails` are examples in words; the tests hold trees for both.

    `judge` yields the findings, or raises `MissingFact` where a fact is missing.
    """

    id: str
    title: str
    editions: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]
    source: str
    formula: str
    passes: str
    fails: str
    judge: Callable[[SubmittedResult, Edition], Iterator[Finding]]


class Scope(TypedDict):
    """What a rule applies to: to training unless it names other benchmarks."""

    editions: tuple[str, ...]
    benchmarks: NotRequired[tuple[Benchmark, ...]]


class Description(Scope):
    """What every rule says about itself."""

    id: str
    title: str
    source: str
    formula: str
    passes: str
    fails: str


@dataclass(frozen=True, slots=True)
class ResultCase:
    """One result under the rules of one edition."""

    result: SubmittedResult
    edition: Edition

    @property
    def name(self) -> str:
        """What is judged, relative to the checked folder."""
        return self.result.name

    @property
    def timed(self) -> TimedTree:
        """The edition's limits for a tree whose runs are named by time."""
        return self.edition.require_timed()

    @property
    def checkpoints(self) -> CheckpointLimits:
        """The edition's limits for checkpointing."""
        return self.edition.require_checkpoints()

    @property
    def kv_cache(self) -> KvCacheLimits:
        """The edition's limits for key-value caches."""
        return self.edition.require_kv_cache()

    @property
    def vectors(self) -> VectorLimits:
        """The edition's limits for vector search."""
        return self.edition.require_vectors()

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
    def verdict_of_round(self) -> Verdict:
        """What a broken rule comes to that the edition's round let pass with a warning."""
        return Verdict.WARNING if self.edition.is_softened else Verdict.FAIL

    @property
    def is_closed(self) -> bool:
        """Whether the result is in CLOSED."""
        return self.division is SubmissionDivision.CLOSED


@dataclass(frozen=True, slots=True)
class RunCase(ResultCase):
    """One result directory of a run; of v1.0, one client's share of it."""

    run: ResultDir

    @property
    def name(self) -> str:
        """The run's directory, relative to the checked folder."""
        return self.run.name

    @property
    def is_warm_up(self) -> bool:
        """Whether the run counts in no mean."""
        return any(run.is_warm_up and self.run in run.dirs for run in self.result.runs)

    @property
    def is_query(self) -> bool:
        """Whether the run is one of vector search or of a key-value cache."""
        return self.run.benchmark not in BOTH

    @property
    def is_checkpointing(self) -> bool:
        """Whether the run is one of checkpointing."""
        return self.run.benchmark is Benchmark.CHECKPOINTING

    @property
    def parameters(self) -> ParameterLists:
        """The keys that the run may set."""
        return self.checkpoints.parameters if self.is_checkpointing else self.edition.parameters


_registry: dict[str, Rule] = {}


def registered_rules() -> tuple[Rule, ...]:
    """All rules that were declared so far, in the order of their declarations."""
    return tuple(_registry.values())


def declare(judge: Callable[[SubmittedResult, Edition], Iterator[Finding]], description: Description) -> Rule:
    """Register a rule; `TypeError` or `ValueError` where its description is incomplete or taken."""
    name = f"Rule {description.get('id')!r}"
    # A type checker would see this, too, but a rule without editions would silently never be applied.
    missing = sorted(
        key for key in Description.__annotations__.keys() - {"benchmarks"} if not description.get(key)
    )
    if missing:
        raise TypeError(f"{name} lacks {', '.join(missing)}. Add it to the declaration.")
    if unknown := sorted(set(description["editions"]) - set(ALL)):
        raise ValueError(f"{name} names unknown editions {', '.join(unknown)}. Known: {', '.join(ALL)}.")
    if description["id"] in _registry:
        raise ValueError(f"{name} is declared twice. Give each rule an id of its own.")
    rule = Rule(judge=judge, **({"benchmarks": (Benchmark.TRAINING,)} | description))
    _registry[rule.id] = rule
    return rule


def result_rule(
    **description: Unpack[Description],
) -> Callable[[Callable[[ResultCase], Iterator[Finding]]], Rule]:
    """Declare a rule that is judged once for a result."""

    def decorate(judge: Callable[[ResultCase], Iterator[Finding]]) -> Rule:
        return declare(lambda result, edition: judge(ResultCase(result, edition)), description)

    return decorate


def always_applicable(_case: ResultCase) -> str:
    """Apply a rule wherever its edition and benchmark are."""
    return ""


def free_in_open(case: ResultCase) -> str:
    """Apply a rule in CLOSED alone."""
    return "" if case.is_closed else "OPEN leaves this free"


def run_rule(
    *, not_applicable_if: Callable[[RunCase], str] = always_applicable, **description: Unpack[Description]
) -> Callable[[Callable[[RunCase], Iterator[Finding]]], Rule]:
    """Declare a rule that is judged for each run, unless `not_applicable_if` says why it is not.

    A missing fact of one run does not hide findings about other runs.
    """

    def decorate(judge: Callable[[RunCase], Iterator[Finding]]) -> Rule:
        def judge_runs(result: SubmittedResult, edition: Edition) -> Iterator[Finding]:
            require_runs(result)
            for run in result.run_dirs():
                case = RunCase(result, edition, run)
                try:
                    if reason := not_applicable_if(case):
                        yield not_applicable(case.name, reason)
                    else:
                        yield from judge(case)
                except MissingFact as missing:
                    yield not_checked(missing)

        return declare(judge_runs, description)

    return decorate


Operator = Literal["==", "<=", ">=", ">"]
_COMPARE: Final[Mapping[Operator, tuple[Callable[[Any, Any], bool], str]]] = MappingProxyType(
    {"==": (operator.eq, "!="), "<=": (operator.le, ">"), ">=": (operator.ge, "<"), ">": (operator.gt, "<=")}
)
"""Each comparison, and the sign that proofs show where it does not hold."""

Case = TypeVar("Case", bound=ResultCase)


def limit_rule(  # noqa: PLR0913 - the parts of one declaration
    kind: type[Case],
    *,
    value: Callable[[Case], Any],
    compare: Operator,
    limit: Callable[[Case], Any] | float | str,
    evidence: Callable[[Case], str],
    proof: str | Callable[[Case, Any, Any], str],
    fix: str,
    show: str | tuple[str, str] = "{}",
    otherwise: Verdict | Callable[[Any, Any], Verdict] = Verdict.FAIL,
    not_applicable_if: Callable[[Case], str] = always_applicable,
    lenient_in_warm_up: bool = False,
    **description: Unpack[Description],
) -> Rule:
    """Declare a rule that compares one value with one limit, for each run or for each result.

    `proof` and `fix` may name {value}, {limit} and {sign}; `show` formats the value and the limit of the
    finding; `otherwise` is the verdict where the rule is broken, by value and limit.
    """
    show_value, show_limit = (show, show) if isinstance(show, str) else show
    holds, sign_if_broken = _COMPARE[compare]

    def judge(case: Case) -> Iterator[Finding]:
        if reason := not_applicable_if(case):
            yield not_applicable(case.name, reason)
            return
        # The value is read before the limit: of two missing facts, the value's is reported.
        measured = value(case)
        bound = limit(case) if callable(limit) else limit
        is_kept = holds(measured, bound)
        facts = {"value": measured, "limit": bound, "sign": compare if is_kept else sign_if_broken}
        finding = pass_if(
            is_kept,
            evidence=evidence(case),
            value=show_value.format(measured),
            limit=show_limit.format(bound),
            proof=proof(case, measured, bound) if callable(proof) else proof.format(**facts),
            fix=fix.format(**facts),
            otherwise=otherwise(measured, bound) if callable(otherwise) else otherwise,
        )
        yield _excuse_warm_up(finding, case) if lenient_in_warm_up else finding

    decorate: Any = run_rule if issubclass(kind, RunCase) else result_rule
    rule: Rule = decorate(**description)(judge)
    return rule


def _excuse_warm_up(finding: Finding, case: ResultCase) -> Finding:
    """A warm-up counts in no mean: a failure in it is a warning."""
    if isinstance(case, RunCase) and case.is_warm_up and finding.verdict is Verdict.FAIL:
        return replace(finding, verdict=Verdict.WARNING, proof=f"{finding.proof} (in the warm-up)")
    return finding


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
