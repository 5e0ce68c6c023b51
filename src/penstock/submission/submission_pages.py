"""Pages of a submission: the verdicts on its results with their findings, and the figures of its results."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.errors import printable
from penstock.reports.page import render_report
from penstock.reports.report import Banner, Cell, Chart, Kind, Look, Report, Row, Section, Series, Table, Tone
from penstock.submission.check import WORST_FIRST, CheckedResult, count_verdicts, group_findings
from penstock.submission.find_results import V1_REPORT_FILE
from penstock.submission.result_figures import CONFIDENCE, ResultFigure
from penstock.submission.result_report import (
    CSV_FILE,
    ResultReport,
    format_json,
    format_rows,
    report_document,
)
from penstock.submission.rules.rule import Validity, Verdict
from penstock.submission.tree_layout import RESULTS_FILE
from penstock.units import format_count

_LOOK: Final[Mapping[str, Look]] = {
    Validity.VALID: Look.GOOD,
    Validity.INVALID: Look.BAD,
    Validity.NOT_CHECKED: Look.DOUBT,
    Verdict.PASS: Look.GOOD,
    Verdict.FAIL: Look.BAD,
    Verdict.WARNING: Look.DOUBT,
    Verdict.NOT_APPLICABLE: Look.PLAIN,
}
_SHOWN_AT_FIRST: Final = WORST_FIRST[:3]
_GRAVITY: Final = (Validity.INVALID, Validity.NOT_CHECKED, Validity.VALID)


def verdicts_page(
    checked: Sequence[CheckedResult], edition: str, for_the_reviewer: Sequence[str], empty: Sequence[str] = ()
) -> Report:
    """Build the page of verdicts and all findings; `empty` names the submitters without results."""
    present = {finding.verdict for result in checked for finding in result.findings}
    rows = [_verdict_row(number, result) for number, result in enumerate(checked)]
    sections = [
        Section(title="Results", tables=[Table(rows, numbers={"accelerators", "samples/s"})]),
        *([Section(title="Without results", items=empty)] if empty else []),
        Section(title="Findings", parts=[_verdict_section(*numbered) for numbered in enumerate(checked)]),
    ]
    if for_the_reviewer:
        sections.append(Section(title="For the reviewer", items=for_the_reviewer))
    return Report(
        title=f"Results judged by the rules of {edition}",
        subtitle=", ".join(f"{count} {verdict}" for verdict, count in count_verdicts(checked).items()),
        banner=_answer(checked),
        sections=sections,
        filters={
            "result": {verdict.value: True for verdict in Validity},
            "finding": {each.value: each in _SHOWN_AT_FIRST for each in WORST_FIRST if each in present},
        },
    )


def _answer(checked: Sequence[CheckedResult]) -> Banner:
    """Return the summary at the top: the worst verdict, its rules, where each first fails, and a fix."""
    counts = Counter(result.verdict for result in checked)
    by_verdict = [f"{counts[one]} {one.value}" for one in reversed(_GRAVITY) if counts[one]]
    gravest = next((one for one in _GRAVITY if counts[one]), Validity.NOT_CHECKED)
    wanted = {Validity.INVALID: Verdict.FAIL, Validity.NOT_CHECKED: Verdict.NOT_CHECKED}.get(gravest)
    found = [(result, each) for result in checked for each in result.findings if each.verdict is wanted]
    rules = Counter(each.rule for _, each in found)
    shown = ", ".join(f"{rule} ({num})" if num > 1 else rule for rule, num in rules.most_common(4))
    return Banner(
        verdict=gravest.value,
        look=_LOOK[gravest],
        figure=f"{format_count(len(checked), 'result')}: {', '.join(by_verdict)}",
        limited_by=(shown + (" ..." if len(rules) > 4 else "")) or "no rule",
        since=(
            f"{found[0][0].name}: {found[0][1].proof}" if found else "every rule that can be checked is kept"
        ),
        to_do=next((each.fix for _, each in found if each.fix), "")
        or "See what is left for the reviewer, at the end of this page.",
    )


def _verdict_row(number: int, result: CheckedResult) -> Row:
    verdict = Cell(result.verdict.value, look=_LOOK[result.verdict])
    return {"result": Cell(result.name, link=f"#r{number}"), **result.row(), "verdict": verdict}


def _verdict_section(number: int, result: CheckedResult) -> Section:
    """Return one result's findings, worst first. Rules that cannot read the same file share one entry."""
    parts = []
    for group in group_findings(result.findings):
        first, times = group[0], len(group)
        places = [finding.evidence for finding in group]
        if first.verdict is Verdict.NOT_CHECKED:
            others = [rule for rule in dict.fromkeys(each.rule for each in group) if rule != first.rule]
            places, times = [first.evidence, f"also {', '.join(others)}" if others else ""], 1
        stated = (("value", first.value), ("limit", first.limit))
        figures = "; ".join(f"{name} {text}" for name, text in stated if text)
        parts.append(
            Section(
                title=first.rule + (f", {times} times" if times > 1 else ""),
                mark=first.verdict.value,
                look=_LOOK[first.verdict],
                text=[first.proof, *([f"To do: {first.fix}"] if first.fix else [])],
                notes=[text for text in (figures, *places) if text],
            )
        )
    return Section(
        title=result.name,
        name=f"r{number}",
        mark=result.verdict.value,
        look=_LOOK[result.verdict],
        parts=parts,
        why_empty="No finding is among those that are shown.",
    )


def figures_page(reports: Sequence[ResultReport], edition: str) -> Report:
    """Build the page of all figures, which also shows which of them scatter or are missing."""
    outliers = [
        f"{report.checked.name}: {figure.name} of {run}"
        for report in reports
        for figure in report.figures
        for run in figure.outliers
    ]
    missing = [f"{report.checked.name}: {text}" for report in reports for text in report.missing]
    banner = _answer([report.checked for report in reports])
    num_figures = sum(len(report.figures) for report in reports)
    troubles = [f"{len(outliers)} outliers, the first {outliers[0]}"] if outliers else []
    troubles += [f"{len(missing)} figures could not be recomputed, the first {missing[0]}"] if missing else []
    reading = Section(
        title="How to read the figures",
        text=[
            (
                "Every figure is recomputed from the reports of epochs and ranks; warm-ups count in none. A "
                "training has figures for each run, checkpointing for each checkpoint, by the first rank and "
                "by the slowest."
            ),
            (
                "The deviation is the population's, as reports state it. The interval contains the mean with "
                f"{CONFIDENCE:.0%} confidence, by Student's t of the sample. In charts the line is the mean, "
                "the band its interval, and an outlier is red; axes begin where the values begin."
            ),
        ],
    )
    return Report(
        title="Figures of a submission",
        subtitle=f"{format_count(len(reports), 'result')}, {edition}",
        banner=replace(
            banner,
            figure=f"{banner.figure}; {num_figures} figures recomputed from their runs",
            troubles=troubles,
        ),
        sections=[
            Section(
                title="Results",
                tables=[Table([_summary_row(report) for report in reports], numbers={"accelerators"})],
            ),
            *map(_figures_section, reports),
            reading,
        ],
    )


def plan_folder(folder: Path, reports: Sequence[ResultReport], edition: str) -> Iterator[tuple[Path, str]]:
    """Plan all files of a report in a separate folder, as paths and contents."""
    yield folder / "report.html", render_report(figures_page(reports, edition))
    yield folder / CSV_FILE, format_rows(reports)
    yield (
        folder / RESULTS_FILE,
        format_json({"edition": edition, "results": [report_document(report) for report in reports]}),
    )
    for report in reports:
        here = folder / printable(report.checked.name, keep="")
        yield here / CSV_FILE, format_rows([report])
        yield here / RESULTS_FILE, format_json(report_document(report))
        if report.v1 is not None:
            yield here / V1_REPORT_FILE, format_json(report.v1)


def _summary_row(report: ResultReport) -> Row:
    means = {figure.name: value_text(figure, figure.mean) for figure in report.figures}
    return {
        "result": report.checked.name,
        "verdict": report.checked.verdict.value,
        "accelerators": report.checked.accelerators,
        "read": means.get("read bandwidth", "-"),
        "write": means.get("write bandwidth", "-"),
        "utilization": means.get("utilization", "-"),
    }


def figure_row(figure: ResultFigure) -> dict[str, str]:
    """Return the row of a figure in the table of one result."""
    low, high = figure.interval or (None, None)
    return {
        "figure": f"{figure.name}, {figure.unit}",
        "number": str(len(figure.values)),
        "mean": f"{figure.mean:,.6g}",
        "deviation": f"{figure.deviation:,.4g}",
        f"{CONFIDENCE:.0%} from": "-" if low is None else f"{low:,.6g}",
        "to": "-" if high is None else f"{high:,.6g}",
        "outliers": str(len(figure.outliers)),
    }


def value_text(figure: ResultFigure, value: float) -> str:
    return f"{value:,.6g} {figure.unit}"


def _figures_section(report: ResultReport) -> Section:
    rows = [figure_row(figure) for figure in report.figures]
    outliers = [
        f"{figure.name}, {run}: {value_text(figure, figure.values[run])}, {rule}"
        for figure in report.figures
        for run, rule in figure.outliers.items()
    ]
    findings = dict.fromkeys(
        f"{finding.verdict.value}: {finding.rule}: {finding.proof}"
        for verdict in _SHOWN_AT_FIRST
        for finding in report.checked.findings
        if finding.verdict is verdict
    )
    return Section(
        title=f"{report.checked.name}: {report.checked.verdict.value}",
        tables=[Table(rows, numbers={*rows[0]} - {"figure"})] if rows else [],
        charts=[_chart(figure, report.checked.name) for figure in report.figures],
        parts=[
            Section(title=title, items=list(texts))
            for title, texts in (
                ("Outliers", outliers),
                ("Not recomputed", report.missing),
                ("Findings", findings),
            )
            if texts
        ],
    )


def _chart(figure: ResultFigure, run: str) -> Chart:
    names = list(figure.values)

    def series(runs: Iterable[str], tone: Tone) -> Series:
        x = [float(names.index(run)) for run in runs]
        return Series(y=[figure.values[names[int(row)]] for row in x], x=x, tone=tone)

    usual = [name for name in names if name not in figure.outliers]
    return Chart(
        kind=Kind.DOTS,
        title=f"{figure.name}, {figure.unit}",
        run=run,
        unit=figure.unit,
        names=names,
        series=[series(usual, "full"), series(figure.outliers, "bad")],
        limits={"mean": figure.mean},
        interval=figure.interval,
    )
