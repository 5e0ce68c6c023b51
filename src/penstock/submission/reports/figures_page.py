"""Reported results as one HTML page: the table of all, then each with its figures, plots, spread and issues.

Pure: reported results in, text out. Invariant: table and plot of a figure are drawn from the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Verdict
from penstock.submission.reports.dot_plot import dot_plot
from penstock.submission.reports.page import grid, heading, listing, paragraph, render_page
from penstock.submission.reports.result_figures import CONFIDENCE

if TYPE_CHECKING:
    from penstock.submission.reports.result_figures import ResultFigure
    from penstock.submission.reports.result_report import ResultReport

_SUMMARY_NUMBERS: Final = frozenset({"accelerators"})
_FIGURE_NUMBERS: Final = frozenset(
    {"number", "mean", "deviation", f"{CONFIDENCE:.0%} from", "to", "outliers"}
)
_TOLD: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


def figures_page(reported: Sequence[ResultReport], edition: str) -> str:
    """The page."""
    parts = [
        heading("Results"),
        grid([summary_row(each) for each in reported], _SUMMARY_NUMBERS),
        *(part for each in reported for part in _section(each)),
        heading("How to read the figures"),
        paragraph(
            "Every figure is recomputed from what each epoch and rank reports; warm-ups count in none. A "
            "training's are by run, a checkpointing's by checkpoint, each as long as its slowest rank."
        ),
        paragraph(
            f"The deviation is the population's, as reports state it. The interval has the mean with "
            f"{CONFIDENCE:.0%} confidence, by Student's t of the sample. In plots the line is the mean, the "
            "band its interval, and an outlier stands out in red; axes begin where the values begin."
        ),
    ]
    return render_page(
        title="Figures of a submission", subtitle=f"{len(reported)} results, {edition}", parts=parts
    )


def summary_row(reported: ResultReport) -> dict[str, str]:
    """A result in the table of all, with the means that one looks for first."""
    judged = reported.judged
    number = "?" if judged.num_accelerators is None else str(judged.num_accelerators)
    means = {figure.name: value_text(figure, figure.spread.mean) for figure in reported.figures.found}
    return {
        "result": judged.name,
        "verdict": judged.verdict.value,
        "accelerators": f"{number} {judged.accelerator}".strip(),
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


def _section(reported: ResultReport) -> Iterator[str]:
    judged, figures = reported.judged, reported.figures
    yield heading(f"{judged.name}: {judged.verdict.value}")
    if figures.found:
        yield grid([figure_row(figure) for figure in figures.found], _FIGURE_NUMBERS)
        yield f'<div class="plots">{"".join(map(dot_plot, figures.found))}</div>'
    outliers = [
        f"{figure.name}, {outlier.run}: {value_text(figure, outlier.value)}, {outlier.rule}"
        for figure in figures.found
        for outlier in figure.spread.outliers
    ]
    for title, texts in (
        ("Outliers", outliers),
        ("Not recomputed", list(figures.missing)),
        ("Findings", _findings(reported)),
    ):
        if texts:
            yield f"<h3>{escape(title)}</h3>{listing(texts)}"


def _findings(reported: ResultReport) -> list[str]:
    told = [
        f"{finding.verdict.value}: {finding.rule}: {finding.proof}"
        for verdict in _TOLD
        for finding in reported.judged.findings
        if finding.verdict is verdict
    ]
    return list(dict.fromkeys(told))
