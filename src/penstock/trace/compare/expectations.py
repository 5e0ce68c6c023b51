"""Checks of a study, for CI: a slower checkpoint fails the build.

A check compares numbers, as `new.ssd.union_us <= 1.1 * base.ssd.union_us` or `findings.F1 == 0`, or is a
query whose first value must be true. Invariant: expressions are walked as syntax trees, never evaluated as
Python.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.errors import UsageError
from penstock.trace.compare.findings import FINDING_RULES, find_all
from penstock.trace.compare.study_tables import APP_TIER, load_report, measures
from penstock.trace.compare.trace_study import ComparisonSpec, QueryCheck, Study
from penstock.trace.questions.events_view import answer_query

_UNUSED_TIER: Final = ("max_sum_us", "max_union_us", "max_thread_us", "run_union_us", "total_bytes")

APP: Final = "app"
"""The name of the application's own event among the tiers."""


class Expectations(ComparisonSpec):
    """A comparison's description that has checks."""

    checks: Annotated[tuple[str | QueryCheck, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check: whether it holds, and the figures it was evaluated with."""

    check: str
    holds: bool
    seen: str


def check_all(study: Study, expectations: Expectations) -> list[CheckResult]:
    """Evaluate every check, in order. Raises UsageError for one with an unknown name."""
    figures = _collect_figures(study)
    return [
        _run_query_check(study, check)
        if isinstance(check, QueryCheck)
        else _Comparison(check, figures).evaluate()
        for check in expectations.checks
    ]


def _run_query_check(study: Study, check: QueryCheck) -> CheckResult:
    """`events` has the columns of `trace sql` and the derived ones."""
    with_events = f"WITH events AS (SELECT * FROM {study.events.relation})"
    rows = answer_query(
        study.events.connection, f"{with_events} SELECT * FROM ({check.sql.rstrip().rstrip(';')})"
    ).rows
    value = rows[0][0] if rows and rows[0] else None
    return CheckResult(check=check.name, holds=value is True, seen=f"the query returned {value}")


def _collect_figures(study: Study) -> dict[str, Any]:
    tree: dict[str, Any] = {run: {} for run in study.runs}
    for row in load_report(study).records():
        tree[str(row.pop("run"))].update(row)
    for row in measures(study).records():
        tier = str(row.pop("tier"))
        tree[str(row.pop("run"))][APP if tier == APP_TIER else tier] = dict(row)
    for run in study.runs:
        for tier in (*study.tiers, APP):
            tree[run].setdefault(tier, dict.fromkeys(_UNUSED_TIER, 0))
    findings = find_all(study)
    tree["findings"] = {code: sum(finding.code == code for finding in findings) for code in FINDING_RULES}
    return tree


class _Comparison:
    """One comparison, walked as a syntax tree."""

    def __init__(self, text: str, figures: Mapping[str, Any]) -> None:
        self._text = text
        self._figures = figures
        self._seen: dict[str, Any] = {}

    def evaluate(self) -> CheckResult:
        """Whether it holds."""
        try:
            body = ast.parse(self._text.strip(), mode="eval").body
        except SyntaxError as error:
            raise self._refused("is not a comparison") from error
        if not isinstance(body, ast.Compare):
            raise self._refused("has no comparison operator")
        values = [self._number(operand) for operand in (body.left, *body.comparators)]
        holds = all(
            self._comparison(op)(a, b) for op, a, b in zip(body.ops, values[:-1], values[1:], strict=True)
        )
        seen = ", ".join(f"{name} = {value:,.10g}" for name, value in self._seen.items())
        return CheckResult(check=self._text, holds=holds, seen=seen)

    def _comparison(self, op: ast.cmpop) -> Callable[[Any, Any], Any]:
        if type(op) not in _COMPARISONS:
            raise self._refused("uses a comparison other than <, <=, >, >=, ==, !=")
        return _COMPARISONS[type(op)]

    def _number(self, node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return float(_ARITHMETIC[type(op)](self._number(left), self._number(right)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.Attribute() | ast.Name() | ast.Subscript():
                return self._figure(_steps(node))
        raise self._refused(f"uses {ast.unparse(node)!r}")

    def _figure(self, steps: list[str]) -> float:
        here: Any = self._figures
        for number, step in enumerate(steps):
            if not isinstance(here, Mapping) or step not in here:
                known = ", ".join(here) if isinstance(here, Mapping) else "nothing below it"
                raise self._refused(f"names {'.'.join(steps[: number + 1])!r}; known: {known}")
            here = here[step]
        if isinstance(here, Mapping):
            raise self._refused(f"needs one of {', '.join(here)} after {'.'.join(steps)!r}")
        self._seen[".".join(steps)] = here = 0 if here is None else here
        return float(here)

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"The check {self._text!r} {why}",
            fix="Example: new.ssd.max_union_us <= 1.1 * base.ssd.max_union_us.",
        )


def _steps(node: ast.expr) -> list[str]:
    """`base.ssd.max_sum_us`, `base["my tier"].max_sum_us` as names."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*_steps(value), name]
        case ast.Subscript(value=value, slice=ast.Constant(value=str() as name)):
            return [*_steps(value), name]
    return [ast.unparse(node)]


_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
