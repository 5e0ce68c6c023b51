"""HTML pages: the verdicts of checked results with their findings, and the figures of reported results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from penstock.reports.html_page import Cell, make_table, render_page
from penstock.reports.plots import DotPlot, plan_dot_plot
from penstock.reports.report import Banner, Look
from penstock.submission.check import CheckedResult, count_verdicts
from penstock.submission.finding import Finding, Validity, Verdict
from penstock.submission.reports.result_figures import CONFIDENCE, ResultFigure

if TYPE_CHECKING:
    from penstock.submission.reports.result_report import ResultReport


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
"""The style of a verdict; the word is always shown, too."""

_ORDER: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING, Verdict.PASS, Verdict.NOT_APPLICABLE)
_SHOWN_AT_FIRST: Final = frozenset({Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING})
_COLUMNS: Final = (
    "result", "verdict", "organisation", "division", "system", "workload", "accelerators", "samples/s",
)  # fmt: skip


def verdicts_page(
    checked: Sequence[CheckedResult], edition: str, for_the_reviewer: Sequence[str], empty: Sequence[str] = ()
) -> str:
    """Render the verdicts; `empty` names the submitters without results."""
    present = {finding.verdict for result in checked for finding in result.findings}
    ticks: list[tuple[str, Validity | Verdict, bool]] = [("result", verdict, True) for verdict in Validity]
    ticks += [("finding", verdict, verdict in _SHOWN_AT_FIRST) for verdict in _ORDER if verdict in present]
    return render_page(
        "submission_verdicts.html",
        title=f"Results judged by the rules of {edition}",
        subtitle=", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(checked).items()),
        banner=_answer(checked),
        boxes=[
            {"group": group, "verdict": verdict.value, "is_ticked": tick} for group, verdict, tick in ticks
        ],
        columns=_COLUMNS,
        numbers=("accelerators", "samples/s"),
        results=list(map(_lay_out_verdicts, checked)),
        without_results=empty,
        for_the_reviewer=for_the_reviewer,
    )


_GRAVITY: Final = (Validity.INVALID, Validity.NOT_CHECKED, Validity.VALID)


def _count(results: Sequence[object]) -> str:
    return f"{len(results)} result{'s' * (len(results) != 1)}"


def _answer(checked: Sequence[CheckedResult]) -> Banner:
    """What the page says first: the gravest verdict, the rules behind it, where they fail first, the fix."""
    counts = Counter(result.verdict for result in checked)
    by_verdict = [f"{counts[one]} {one.value}" for one in reversed(_GRAVITY) if counts[one]]
    gravest = next((one for one in _GRAVITY if any(r.verdict is one for r in checked)), Validity.NOT_CHECKED)
    wanted = {Validity.INVALID: Verdict.FAIL, Validity.NOT_CHECKED: Verdict.NOT_CHECKED}.get(gravest)
    found = [(result, each) for result in checked for each in result.findings if each.verdict is wanted]
    rules = Counter(each.rule for _, each in found)
    shown = ", ".join(f"{rule} ({num})" if num > 1 else rule for rule, num in rules.most_common(4))
    return Banner(
        verdict=gravest.value,
        look=Look(_LOOK[gravest]),
        figure=f"{_count(checked)}: {', '.join(by_verdict)}",
        limited_by=(shown + (" ..." if len(rules) > 4 else "")) or "no rule",
        since=f"{found[0][0].name}: {found[0][1].proof}"
        if found
        else "every rule that can be checked is kept",
        to_do=next((each.fix for _, each in found if each.fix), "")
        or "See what is left for the reviewer, at the end of this page.",
    )


def _answer_figures(reports: Sequence["ResultReport"]) -> Banner:
    """The same of figures: what was recomputed, and which of them scatter or are missing."""
    banner = _answer([report.checked for report in reports])
    outliers = [
        f"{report.checked.name}: {figure.name} of {outlier.run}"
        for report in reports
        for figure in report.figures.computed
        for outlier in figure.spread.outliers
    ]
    missing = [f"{report.checked.name}: {text}" for report in reports for text in report.figures.missing]
    num_figures = sum(len(report.figures.computed) for report in reports)
    return replace(
        banner,
        figure=f"{banner.figure}; {num_figures} figures recomputed from their runs",
        troubles=[
            *([f"{len(outliers)} outliers, the first {outliers[0]}"] if outliers else []),
            *([f"{len(missing)} figures could not be recomputed, the first {missing[0]}"] if missing else []),
        ],
    )


def _lay_out_verdicts(result: CheckedResult) -> dict[str, Any]:
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
            (
                finding,
                _LOOK[finding.verdict],
                {"times": _times(finding, places), "lines": _facts(finding, places)},
            )
            for finding, places in _group_alike(result.findings)
        ],
    }


def _group_alike(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Merge findings of one cause; the worst verdicts first.

    The same violation in several files is one, and so is a file that several rules cannot read: it is told of
    by the first of them, with the others beside it.
    """
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        alike = replace(finding, evidence="")
        if finding.verdict is Verdict.NOT_CHECKED:
            alike = Finding(verdict=finding.verdict, proof=finding.proof, evidence=finding.evidence)
        groups.setdefault(alike, []).append(finding)
    merged = [(replace(group[0], evidence=""), _list_places(group)) for group in groups.values()]
    return sorted(merged, key=lambda entry: _ORDER.index(entry[0].verdict))


def _list_places(group: Sequence[Finding]) -> list[str]:
    first = group[0]
    others = list(dict.fromkeys(finding.rule for finding in group if finding.rule != first.rule))
    if first.verdict is Verdict.NOT_CHECKED:
        return [first.evidence, *([f"also {', '.join(others)}"] if others else [])]
    return [finding.evidence for finding in group]


def _times(finding: Finding, places: Sequence[str]) -> int:
    return 1 if finding.verdict is Verdict.NOT_CHECKED else len(places)


def _facts(finding: Finding, places: Sequence[str]) -> list[str]:
    figures = [
        f"{name} {text}" for name, text in (("value", finding.value), ("limit", finding.limit)) if text
    ]
    return [text for text in ("; ".join(figures), *places) if text]


_FIGURE_NUMBERS: Final = ("number", "mean", "deviation", f"{CONFIDENCE:.0%} from", "to", "outliers")
_REPORTED: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


def figures_page(reports: Sequence["ResultReport"], edition: str) -> str:
    """Render the figures of all results."""
    return render_page(
        "submission_figures.html",
        title="Figures of a submission",
        subtitle=f"{_count(reports)}, {edition}",
        banner=_answer_figures(reports),
        summary=make_table([summary_row(report) for report in reports], numbers=("accelerators",)),
        sections=list(map(_lay_out_figures, reports)),
        confidence=f"{CONFIDENCE:.0%}",
    )


def summary_row(report: "ResultReport") -> dict[str, str]:
    """A result in the table of all, with its main figures."""
    checked = report.checked
    number = "?" if checked.num_accelerators is None else str(checked.num_accelerators)
    means = {figure.name: value_text(figure, figure.spread.mean) for figure in report.figures.computed}
    return {
        "result": checked.name,
        "verdict": checked.verdict.value,
        "accelerators": f"{number} {checked.accelerator}".strip(),
        "read": means.get("read bandwidth", "-"),
        "write": means.get("write bandwidth", "-"),
        "utilization": means.get("utilization", "-"),
    }


def figure_row(figure: ResultFigure) -> dict[str, str]:
    """A figure in the table of one result."""
    low, high = figure.spread.interval or (None, None)
    return {
        "figure": f"{figure.name}, {figure.unit}",
        "number": str(figure.spread.num),
        "mean": f"{figure.spread.mean:,.6g}",
        "deviation": f"{figure.spread.deviation:,.4g}",
        f"{CONFIDENCE:.0%} from": "-" if low is None else f"{low:,.6g}",
        "to": "-" if high is None else f"{high:,.6g}",
        "outliers": str(len(figure.spread.outliers)),
    }


def value_text(figure: ResultFigure, value: float) -> str:
    """A value with its unit."""
    return f"{value:,.6g} {figure.unit}"


def _lay_out_figures(report: "ResultReport") -> dict[str, Any]:
    """What the template shows of one result."""
    checked, figures = report.checked, report.figures
    outliers = [
        f"{figure.name}, {outlier.run}: {value_text(figure, outlier.value)}, {outlier.rule}"
        for figure in figures.computed
        for outlier in figure.spread.outliers
    ]
    return {
        "title": f"{checked.name}: {checked.verdict.value}",
        "figures": make_table([figure_row(figure) for figure in figures.computed], numbers=_FIGURE_NUMBERS),
        "plots": list(map(_plot, figures.computed)),
        "lists": (
            ("Outliers", outliers),
            ("Not recomputed", figures.missing),
            ("Findings", _findings(report)),
        ),
    }


def _plot(figure: ResultFigure) -> DotPlot:
    return plan_dot_plot(
        figure.values,
        title=f"{figure.name}, {figure.unit}",
        unit=figure.unit,
        mean=figure.spread.mean,
        interval=figure.spread.interval,
        outliers={outlier.run for outlier in figure.spread.outliers},
    )


def _findings(report: "ResultReport") -> list[str]:
    texts = [
        f"{finding.verdict.value}: {finding.rule}: {finding.proof}"
        for verdict in _REPORTED
        for finding in report.checked.findings
        if finding.verdict is verdict
    ]
    return list(dict.fromkeys(texts))
