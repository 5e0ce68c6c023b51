"""Checks of a study, for CI, where a slower checkpoint should fail the build.

A check compares numbers, as in `new.ssd.union_us <= 1.1 * base.ssd.union_us` or `findings.F1 == 0`, or is a
query whose first value must be true. Invariant: expressions are walked as syntax trees, and are never
evaluated as Python.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.errors import UsageError
from penstock.trace.compare.comparison import APP_TIER, load_report, measures
from penstock.trace.compare.findings import FINDING_RULES, find_all
from penstock.trace.compare.trace_study import ComparisonSpec, QueryCheck, Study
from penstock.trace.questions.sql import QUERY_FIX, require_one_query
from penstock.trace.trace_set import bound_query

_UNUSED_TIER: Final = ("max_sum_us", "max_union_us", "max_thread_us", "run_union_us", "total_bytes")

APP: Final = "app"
"""The name of the application's own event among the tiers."""


class Expectations(ComparisonSpec):
    """The description of a comparison, with checks."""

    checks: Annotated[tuple[str | QueryCheck, ...], Field(min_length=1)]


CheckResult = dict[str, Any]
"""A `check`, whether it `holds`, and the figures `seen` when it was evaluated."""


def check_all(study: Study, expectations: Expectations) -> list[CheckResult]:
    """Evaluate every check, in order. Raises `UsageError` for a check with an unknown name."""
    figures = _collect_figures(study)
    results = []
    for check in expectations.checks:
        if isinstance(check, str):
            results.append(_evaluate(check, figures))
            continue
        # `events` has the columns of `trace sql`, and the derived columns.
        require_one_query(study.events.connection, check.sql)
        query = check.sql.rstrip().rstrip(";")
        sql = f"WITH events AS (SELECT * FROM {study.events.relation}) SELECT * FROM ({query}\n) LIMIT 1"
        with bound_query(study.events.connection, query, f"the check {check.name}", QUERY_FIX):
            row = study.events.connection.execute(sql).fetchone()
        value = row[0] if row else None
        result = f"the query returned {value!s:.200}"
        results.append({"check": check.name, "holds": value is True, "seen": result})
    return results


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


def _evaluate(text: str, figures: Mapping[str, Any]) -> CheckResult:
    """Evaluate one comparison by walking its syntax tree."""
    used: dict[str, Any] = {}

    def number(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as value):
                return value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return float(_ARITHMETIC[type(op)](number(left), number(right)))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -number(operand)
            case ast.Attribute() | ast.Name() | ast.Subscript():
                steps = _steps(node)
                here: Any = figures
                for count, step in enumerate(steps, 1):
                    if not isinstance(here, Mapping) or step not in here:
                        known = ", ".join(here) if isinstance(here, Mapping) else "nothing below it"
                        raise _refuse(text, f"names {'.'.join(steps[:count])!r}; known: {known}")
                    here = here[step]
                if isinstance(here, Mapping):
                    raise _refuse(text, f"needs one of {', '.join(here)} after {'.'.join(steps)!r}")
                used[".".join(steps)] = 0 if here is None else here
                return float(here or 0)
        raise _refuse(text, f"uses {ast.unparse(node)!r}")

    try:
        body = ast.parse(text.strip(), mode="eval").body
        if not isinstance(body, ast.Compare):
            raise _refuse(text, "has no comparison operator")
        if any(type(op) not in _COMPARISONS for op in body.ops):
            raise _refuse(text, "uses a comparison other than <, <=, >, >=, ==, !=")
        values = [number(operand) for operand in (body.left, *body.comparators)]
    except SyntaxError as error:
        raise _refuse(text, "is not a comparison") from error
    except (RecursionError, MemoryError) as error:
        raise _refuse(text, "is nested too deeply") from error
    except ArithmeticError as error:
        raise _refuse(text, f"has no value: {error}") from error
    holds = all(_COMPARISONS[type(op)](a, b) for op, (a, b) in zip(body.ops, pairwise(values), strict=True))
    figures_used = ", ".join(f"{name} = {value:,.10g}" for name, value in used.items())
    return {"check": text, "holds": holds, "seen": figures_used}


def _refuse(check: str, why: str) -> UsageError:
    return UsageError(
        f"The check {check!r:.200} {why:.400}",
        fix="Example: new.ssd.max_union_us <= 1.1 * base.ssd.max_union_us.",
    )


def _steps(node: ast.expr) -> list[str]:
    """Return the names in an expression such as `base.ssd.max_sum_us` or `base["my tier"].max_sum_us`."""
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
