"""Checked results as one HTML page: the table of all results, then their findings, which can be filtered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.reports.html_page import Cell, render_page
from penstock.submission.finding import Finding, Validity, Verdict
from penstock.submission.reports.findings_export import count_verdicts

if TYPE_CHECKING:
    from penstock.submission.check import CheckedResult

_LOOK: Final[Mapping[str, str]] = MappingProxyType(
    {
        Validity.VALID: "good",
        Validity.INVALID: "bad",
        Validity.NOT_CHECKED: "doubt",
        Verdict.PASS: "good",
        Verdict.FAIL: "bad",
        Verdict.WARNING: "doubt",
        Verdict.NOT_APPLICABLE: "",
    }
)
"""The colour of a verdict, on a result or in a finding; the word is always beside it."""

_ORDER: Final = (
    Verdict.FAIL,
    Verdict.NOT_CHECKED,
    Verdict.WARNING,
    Verdict.PASS,
    Verdict.NOT_APPLICABLE,
)
_SHOWN_AT_FIRST: Final = frozenset({Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING})
_COLUMNS: Final = (
    "result", "verdict", "organisation", "division", "system", "workload", "accelerators", "samples/s",
)  # fmt: skip


def verdicts_page(
    checked: Sequence[CheckedResult], edition: str, for_the_reviewer: Sequence[str], empty: Sequence[str] = ()
) -> str:
    """The page; `empty` names the submitters without results."""
    present = {finding.verdict for result in checked for finding in result.findings}
    ticks: list[tuple[str, Validity | Verdict, bool]] = [("result", verdict, True) for verdict in Validity]
    ticks += [("finding", verdict, verdict in _SHOWN_AT_FIRST) for verdict in _ORDER if verdict in present]
    return render_page(
        "submission_verdicts.html",
        title=f"Results judged by the rules of {edition}",
        subtitle=", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(checked).items()),
        boxes=[
            {"group": group, "verdict": verdict.value, "is_ticked": tick} for group, verdict, tick in ticks
        ],
        columns=_COLUMNS,
        numbers=("accelerators", "samples/s"),
        results=list(map(_lay_out, checked)),
        without_results=empty,
        for_the_reviewer=for_the_reviewer,
    )


def _lay_out(result: CheckedResult) -> dict[str, Any]:
    """What the template shows of one result."""
    throughput = result.metrics.get("train_throughput_mean_samples_per_second")
    accelerators = "?" if result.num_accelerators is None else str(result.num_accelerators)
    return {
        "name": result.name,
        "verdict": result.verdict.value,
        "look": _LOOK[result.verdict],
        "cells": [
            Cell(result.verdict.value, _LOOK[result.verdict]),
            Cell(result.organisation),
            *(Cell(text or "-") for text in (result.division, result.system, result.workload)),
            Cell(f"{accelerators} {result.accelerator}".strip(), "number"),
            Cell("-" if throughput is None else f"{throughput:,.1f}", "number"),
        ],
        "findings": [
            (finding, _LOOK[finding.verdict], {"times": len(places), "lines": _facts(finding, places)})
            for finding, places in _group_alike(result.findings)
        ],
    }


def _group_alike(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings that differ only in their evidence, once, with all of it; the worst verdicts first."""
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, evidence=""), []).append(finding.evidence)
    return sorted(places.items(), key=lambda group: _ORDER.index(group[0].verdict))


def _facts(finding: Finding, places: Sequence[str]) -> list[str]:
    figures = [
        f"{name} {text}" for name, text in (("value", finding.value), ("limit", finding.limit)) if text
    ]
    return [text for text in ("; ".join(figures), *places) if text]
