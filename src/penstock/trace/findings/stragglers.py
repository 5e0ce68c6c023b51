"""F8: ranks that are busy with I/O much longer than the others of their run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.trace.compare.mismatches import spans
from penstock.trace.findings.base import Finding, Weight
from penstock.trace.questions.base import Answer
from penstock.trace.questions.ranks import STRAGGLER_RATIO, ranks
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.trace.compare.study import Study


def stragglers(study: Study) -> list[Finding]:
    """One finding for all runs; a checkpoint takes as long as its slowest rank."""
    answer = ranks(study.events)
    late = [row for row, seen in zip(answer.rows, answer.records(), strict=True) if seen["is_straggler"]]
    if not late:
        return []
    evidence = Answer(name="f8", title="Stragglers", columns=answer.columns, rows=late)
    says = []
    for run in study.runs:
        seen = [row for row in evidence.records() if row["run"] == run]
        if seen:
            says.append(_sentence(run, seen))
    runs = [run for run in study.runs if any(row["run"] == run for row in evidence.records())]
    return [
        Finding(code="F8", weight=Weight.COST, title="Stragglers", runs=runs, says=says, evidence=evidence)
    ]


def _sentence(run: str, seen: Sequence[Mapping[str, Any]]) -> str:
    worst = max(seen, key=lambda row: row["to_median"])
    late = spans(row["rank"] for row in seen if row["rank"] is not None)
    return (
        f"{run}: busy with I/O more than {STRAGGLER_RATIO:g} times the median: rank {late}; longest "
        f"rank {worst['rank']}, {format_seconds(worst['union_us'] / 1e6)} ({worst['to_median']:.2f} times)."
    )
