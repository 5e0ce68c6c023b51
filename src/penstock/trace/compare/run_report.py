"""The report of runs: what they did, in sentences, findings and figures, as one page or as its data.

    study -> overview, findings, rows of figures -> panels -> page, JSON

A figure without rows is a sentence that says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.errors import StorageError
from penstock.progress import Progress, Silent
from penstock.reports.html_page import render_page
from penstock.reports.panels import Sheet, assign_hues
from penstock.reports.report import Banner, Look
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
from penstock.units import format_rate, format_seconds


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
        banner=_answers(report),
        overview=_lay_out_overview(report) if len(report.runs) > 1 else None,
        figure_names=[[figure.name, figure.title] for figure in report.figures],
        findings=[(finding, lay_out(finding.evidence), say_lost(finding)) for finding in report.findings],
        finding_looks=FINDING_LOOKS,
    )


_MOST_TROUBLES: Final = 3


def _answers(report: RunReport) -> Banner:
    """The five answers: what was moved, what costs most, when most was moved, and what to do."""
    bandwidth = next(figure.answer for figure in report.figures if figure.name == "bandwidth")
    alarms = [finding for finding in report.findings if finding.weight is Weight.ALARM]
    costs = [finding for finding in report.findings if finding.weight is Weight.COST]
    verdict, look = ("nothing stands out", Look.GOOD)
    if alarms:
        verdict, look = ("misleading", Look.BAD)
    elif costs:
        verdict, look = ("could be faster", Look.DOUBT)
    found = [*alarms, *costs]
    dearest = max(costs, key=lambda one: one.lost_us or 0, default=None)
    held = "nothing that stands out in these traces"
    if dearest is not None:
        lost = say_lost(dearest)
        held = f"{dearest.title}, which costs {lost}" if lost else dearest.title
    fixes = [finding.fix for finding in found if finding.fix] or [
        f'Look at the finding "{finding.title}".' for finding in found
    ]
    return Banner(
        verdict=verdict,
        look=look,
        figure=report.says[0],
        limited_by=held,
        since=_say_when(bandwidth.records(), names_run=len(report.runs) > 1),
        to_do=fixes[0] if fixes else "Nothing, by these traces.",
        troubles=[finding.title for finding in found if finding is not dearest][:_MOST_TROUBLES],
    )


def _say_when(rows: Sequence[Mapping[str, Any]], *, names_run: bool) -> str:
    """When most was moved."""
    if not rows:
        return "nothing was moved"
    most = max(rows, key=lambda row: row["read_bytes"] + row["written_bytes"])
    rate = (most["read_bytes"] + most["written_bytes"]) * 1e6 / most["bucket_us"]
    of_run = f" of {most['run']}" if names_run else ""
    after = format_seconds(most["since_start_us"] / 1e6)
    return f"most was moved {after} after the start{of_run}, at {format_rate(rate)}"


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
