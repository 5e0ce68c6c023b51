"""The report of runs: what they did, in sentences, findings and figures, as one page or as its data.

    study -> overview, findings, rows of figures -> panels -> page, JSON

A figure without rows is a sentence that says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import StorageError
from penstock.progress import Progress, Silent
from penstock.reports.html_page import render_page
from penstock.reports.panels import Sheet, assign_hues
from penstock.trace.compare.comparison import find_all, rank_findings
from penstock.trace.compare.report import FINDING_LOOKS, PageTable, lay_out, say_lost
from penstock.trace.compare.run_figures import FIGURES, Drawing, Figure
from penstock.trace.compare.run_overview import overview, say_answer
from penstock.trace.compare.single_run_findings import RUN_RULES
from penstock.trace.compare.trace_study import Study, TraceFinding, Weight
from penstock.trace.figures.over_time import rank_cells
from penstock.trace.figures.placed_calls import place_calls
from penstock.trace.figures.time_axis import measure_axis
from penstock.trace.questions.answer import Answer, document


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The parts of a report, in their order on the page."""

    runs: Sequence[str]
    losses: Sequence[str]
    says: Sequence[str]
    overview: Answer
    findings: Sequence[TraceFinding]
    figures: Sequence[Figure]

    def document(self) -> dict[str, Any]:
        """The report as JSON: sentences, findings, and the data of all figures."""
        return {
            "runs": list(self.runs),
            "says": list(self.says),
            "losses": list(self.losses),
            "overview": document(self.overview),
            "findings": [
                {
                    "code": finding.code,
                    "weight": finding.weight.value,
                    "title": finding.title,
                    "runs": list(finding.runs),
                    "lost_us": finding.lost_us,
                    "says": list(finding.says),
                    "fix": finding.fix,
                    "evidence": document(finding.evidence),
                }
                for finding in self.findings
            ],
            "figures": {
                figure.name: {**document(figure.answer), "why_empty": figure.why_empty}
                for figure in self.figures
            },
        }


def report_runs(study: Study, *, progress: Progress | None = None) -> RunReport:
    """Ask a study all that its report shows."""
    progress = progress or Silent()
    progress.begin("drawing the report", len(FIGURES) + 4)
    axis = measure_axis(study.events, study.runs)
    progress.advance(1)
    alone = [finding for rule in RUN_RULES.values() for finding in rule(study)]
    findings = rank_findings([*find_all(study), *alone])
    progress.advance(1)
    first = overview(study.events, study.runs, findings)
    progress.advance(1)
    placed = place_calls(study.events, axis)
    drawing = Drawing(study, placed, Sheet.of_runs(study.runs, axis.span_us), rank_cells(placed))
    progress.advance(1)
    figures = []
    for make in FIGURES:
        figures.append(make(drawing))
        progress.advance(1)
    overlap = next(figure.answer for figure in figures if figure.name == "overlap")
    losses = [
        line for run in study.runs for account in study.accounts.get(run, ()) for line in account.losses()
    ]
    return RunReport(
        runs=study.runs,
        losses=losses,
        says=say_answer(first, overlap),
        overview=first,
        findings=findings,
        figures=figures,
    )


def render_run_report(report: RunReport) -> str:
    """The whole page; it loads nothing and runs no script, so it can be mailed and read without a network."""
    num_alarms = sum(finding.weight is Weight.ALARM for finding in report.findings)
    names = ", ".join(report.runs)
    return render_page(
        "trace_runs.html",
        title=f"I/O of {names}" if len(report.runs) <= 3 else f"I/O of {len(report.runs)} runs",
        subtitle=(
            f"{names}; findings: {len(report.findings)}, of which {num_alarms} are about misleading numbers"
        ),
        report=report,
        overview=_lay_out_overview(report) if len(report.runs) > 1 else None,
        figure_names=[[figure.name, figure.title] for figure in report.figures],
        findings=[(finding, lay_out(finding.evidence), say_lost(finding)) for finding in report.findings],
        finding_looks=FINDING_LOOKS,
    )


def _lay_out_overview(report: RunReport) -> PageTable:
    """The table of runs, each with its hue."""
    page_table = lay_out(report.overview)
    assert page_table.table is not None
    hues = assign_hues(report.runs)
    rows = tuple(
        (replace(first, look=f"hue run-{hues[first.text]}"), *others)
        for first, *others in page_table.table.rows
    )
    return replace(page_table, table=replace(page_table.table, rows=rows))


def write_run_report(report: RunReport, path: Path) -> None:
    """Write the page, over an earlier one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_run_report(report), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"Cannot write the report: {error}", uri=str(path), errno=error.errno) from error
