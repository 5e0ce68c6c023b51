"""`penstock submission check`, `report` and `rules`: judge results, recompute figures, explain rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.options import argument, flag, option, optional_argument, verb
from penstock.cli.parsers import EDITION, FOLDER, NEW_FILE, NEW_FOLDER, NEW_PAGE, RULE
from penstock.cli.terminal import Terminal, TextTable, View, bold, table
from penstock.errors import name_some, printable
from penstock.submission import check as judging
from penstock.submission.check import CheckedResult
from penstock.submission.edition import Edition, EditionChoice, choose_edition
from penstock.submission.find_results import search_tree
from penstock.submission.rules import RULES, rule_by_id
from penstock.submission.rules.rule import Verdict

if TYPE_CHECKING:
    from penstock.submission.result_report import ResultReport

_FOLDER: Final = argument("DIR", FOLDER, "Directory of a round, of several rounds, or of one submitter.")
_EDITION: Final = option(
    "--edition",
    EDITION,
    "Edition of the rules to apply; auto derives it from the layout of the tree.",
    default="auto",
)


@verb
def check(
    terminal: Terminal,
    *,
    folder: Path = _FOLDER,
    edition: str = _EDITION,
    csv: Path | None = option("--csv", NEW_FILE, "Write findings to this CSV file, one per row."),
    html: Path | None = option("--html", NEW_PAGE, "Write an HTML page that works offline to this file."),
) -> int:
    """Check every result below DIR against the rules of MLPerf Storage, from its files alone.

    Recomputes every mean. Reports what it cannot read as "not checked", and never assumes that it is right.
    Writes only the files that options name. Exits with 0 if everything is valid, with 1 if something is
    invalid, and with 3 if something was not checked.

    Examples:

      penstock submission check ~/storage_results_v1.0

      penstock submission check ~/storage_results_v1.0/closed/acme --edition v1.0 --json

      penstock submission check ~/storage_results_v1.0 --html verdicts.html --csv findings.csv
    """
    from penstock.reports.page import write_report
    from penstock.results.published_files import write_text
    from penstock.submission.result_report import findings_csv
    from penstock.submission.submission_pages import verdicts_page

    applied = choose_edition(edition, folder)
    with terminal.progress() as progress:
        results = list(judging.check(folder, applied, progress=progress))
    found = search_tree(folder)
    terminal.notes(f"{name}: no results are here" for name in found.without_results)
    terminal.notes(f"{name}: belongs to no result" for name in found.leftovers)
    terminal.notes(f"not checked: {reason}" for reason in found.unreadable)
    alone = judging.check_lone_descriptions(found, applied, folder)
    terminal.notes(
        f"{name}: {finding.verdict.value}: {finding.proof}"
        for name, findings in alone.items()
        for finding in findings
        if finding.verdict is not Verdict.PASS
    )
    terminal.result(judging.check_document(results, applied, found, alone), _view_verdicts(results, applied))
    if csv is not None:
        write_text(csv.parent, csv.name, findings_csv(results))
    if html is not None:
        page = verdicts_page(results, applied.edition, applied.for_the_reviewer, found.without_results)
        write_report(page, html)
    return judging.exit_code(results)


def _view_verdicts(results: Sequence[CheckedResult], edition: Edition | EditionChoice) -> View:
    rows = [result.row() for result in results]
    yield TextTable(f"Results, by the rules of {edition.edition}", rows)
    for result in results:
        yield from _view_findings(result)
    counts = ", ".join(f"{count} {what}" for what, count in judging.count_verdicts(results).items())
    yield f"\n{counts}"
    yield "For the reviewer, because files cannot show it:"
    yield from (f"  {point}" for point in edition.for_the_reviewer)


def _view_findings(result: CheckedResult) -> View:
    """Show the findings of one result that do not pass, the worst first, each only once.

    A file that cannot be read is named once, with all rules that need it.
    """
    shown = [
        finding
        for finding in result.findings
        if finding.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)
    ]
    if shown:
        yield printable(result.name, keep="")
    if (assessment := judging.assess_rehearsal(result.findings)) is not None:
        yield f"  a rehearsal: {assessment.summary}"
    for group in judging.group_findings(shown):
        first, note = group[0], f" ({len(group)} times)" if len(group) > 1 else ""
        if first.verdict is Verdict.NOT_CHECKED:
            others = list(dict.fromkeys(finding.rule for finding in group))[1:]
            also = f"also {name_some(others)}" if others else ""
            note = f" ({'; '.join(filter(None, (first.evidence, also)))})" if first.evidence or also else ""
        yield printable(f"  {first.verdict.value}: {first.rule}: {first.proof}{note}", keep="")
        yield printable(f"    {first.fix}", keep="")


@verb
def report(
    terminal: Terminal,
    *,
    folder: Path = _FOLDER,
    output: Path | None = option(
        "--output",
        NEW_FOLDER,
        "Write report.html, results.csv and results.json into this directory.",
        short="-o",
    ),
    writes_tree: bool = flag("--write", "Write each result's report into its tree, next to its runs."),
    edition: str = _EDITION,
) -> None:
    """Recompute each result's figures from its runs: mean, standard deviation, confidence interval, outliers.

    Writes nothing unless --output or --write is given. --write adds results.json and results.csv next to the
    runs (for v1.0, mlperf_storage_report.json), and keeps files that another program wrote there. Exits with
    0 whatever the verdicts are; for an exit code that depends on them, use `penstock submission check`.

    Examples:

      penstock submission report ~/storage_results_v1.0

      penstock submission report results/closed/acme -o report

      penstock submission report results --write --json
    """
    from penstock.submission import result_report, submission_pages

    applied = choose_edition(edition, folder)
    with terminal.progress() as progress:
        reports = list(result_report.report_all(folder, applied, progress))
    planned = (
        list(submission_pages.plan_folder(output, reports, applied.edition)) if output is not None else []
    )
    if writes_tree:
        in_tree, refusals = result_report.plan_tree(reports)
        planned += in_tree
        terminal.notes(refusals)
    written = result_report.write_files(planned)
    terminal.notes(
        f"{entry.checked.name}: not recomputed: {reason}" for entry in reports for reason in entry.missing
    )
    terminal.result(
        {
            "edition": applied.edition,
            "results": [result_report.report_document(entry) for entry in reports],
            "written": written,
        },
        _view_reports(reports, written),
    )


def _view_reports(reports: Sequence[ResultReport], written: Sequence[str]) -> View:
    from penstock.submission.submission_pages import figure_row, value_text

    for entry in reports:
        result, figures = entry.checked, entry.figures
        yield bold(f"\n{printable(result.name, keep='')}: {result.verdict.value}")
        yield f"  {result.workload} on {result.accelerators}"
        yield TextTable("", [figure_row(figure) for figure in figures])
        for figure in figures:
            for run, rule in figure.outliers.items():
                yield f"  outlier: {figure.name}, {run}: {value_text(figure, figure.values[run])}, {rule}"
    if written:
        yield f"\nwritten: {len(written)} files, first {written[0]}"


@verb
def rules(
    terminal: Terminal,
    *,
    rule_id: str | None = optional_argument("[ID]", RULE, "Rule to explain (default: list all)."),
) -> None:
    """List all rules, or explain one, with an example that passes and one that fails.

    Examples:

      penstock submission rules

      penstock submission rules sizing.steps
    """
    selected = RULES if rule_id is None else (rule_by_id(rule_id),)
    documents: list[dict[str, Any]] = [
        {
            "id": rule.id,
            "title": rule.title,
            "editions": list(rule.editions),
            "source": rule.source,
            "formula": rule.formula,
            "passes": rule.passes,
            "fails": rule.fails,
        }
        for rule in selected
    ]
    if rule_id is None:
        view = table("Rules", [{key: rule[key] for key in ("id", "title")} for rule in documents])
    else:
        view = [
            f"{key:>9}: {', '.join(value) if isinstance(value, list) else value}"
            for key, value in documents[0].items()
        ]
    terminal.result({"rules": documents}, view)
