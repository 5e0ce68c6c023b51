"""Reported results as one HTML page: the table of all, then each with its figures, plots and issues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.reports.html_page import make_table, render_page
from penstock.reports.plots import DotPlot, plan_dot_plot
from penstock.submission.finding import Verdict
from penstock.submission.reports.result_figures import CONFIDENCE

if TYPE_CHECKING:
    from penstock.submission.reports.result_figures import ResultFigure
    from penstock.submission.reports.result_report import ResultReport

_FIGURE_NUMBERS: Final = ("number", "mean", "deviation", f"{CONFIDENCE:.0%} from", "to", "outliers")
_REPORTED: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


def figures_page(reports: Sequence[ResultReport], edition: str) -> str:
    """The page."""
    return render_page(
        "submission_figures.html",
        title="Figures of a submission",
        subtitle=f"{len(reports)} results, {edition}",
        summary=make_table([summary_row(report) for report in reports], numbers=("accelerators",)),
        sections=list(map(_lay_out, reports)),
        confidence=f"{CONFIDENCE:.0%}",
    )


def summary_row(report: ResultReport) -> dict[str, str]:
    """A result in the table of all, with the means that one looks for first."""
    checked = report.judged
    number = "?" if checked.num_accelerators is None else str(checked.num_accelerators)
    means = {figure.name: value_text(figure, figure.spread.mean) for figure in report.figures.found}
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


def _lay_out(report: ResultReport) -> dict[str, Any]:
    """What the template shows of one result."""
    checked, figures = report.judged, report.figures
    outliers = [
        f"{figure.name}, {outlier.run}: {value_text(figure, outlier.value)}, {outlier.rule}"
        for figure in figures.found
        for outlier in figure.spread.outliers
    ]
    return {
        "title": f"{checked.name}: {checked.verdict.value}",
        "figures": make_table([figure_row(figure) for figure in figures.found], numbers=_FIGURE_NUMBERS),
        "plots": list(map(_plot, figures.found)),
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


def _findings(report: ResultReport) -> list[str]:
    texts = [
        f"{finding.verdict.value}: {finding.rule}: {finding.proof}"
        for verdict in _REPORTED
        for finding in report.judged.findings
        if finding.verdict is verdict
    ]
    return list(dict.fromkeys(texts))
