"""`penstock submission check`: judge a submitter's or a round's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.submission.check import CheckedResult
    from penstock.submission.edition import Edition


def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A round's folder, or one submitter's.")],
    *,
    edition: Annotated[
        str, typer.Option(metavar="auto|v1.0|v2.0|v3.0", help="Whose rules to judge by; auto: by the tree.")
    ] = "auto",
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="Write SARIF 2.1.0, for viewers of code.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a row for each finding.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that needs no network.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Judge every result below DIR by the rules of MLPerf Storage, from its files alone.

    Every mean is recomputed. What cannot be read is "not checked" and named, never taken for granted.
    Nothing is written but the files that options name. Exit codes: 0 all valid; 1 something invalid; 3
    something not checked.

    Examples:

      penstock submission check ~/storage_results_v1.0

      penstock submission check ~/storage_results_v1.0/closed/acme --edition v1.0 --json

      penstock submission check ~/storage_results_v1.0 --html verdicts.html --csv findings.csv
    """
    from penstock.submission.check import check as check_tree
    from penstock.submission.check import choose_edition
    from penstock.submission.find_results import submitters_without_results
    from penstock.submission.reports.findings_export import check_document, exit_code

    terminal = Terminal(as_json=as_json)
    chosen = choose_edition(edition, folder)
    with terminal.progress() as progress:
        judged = list(check_tree(folder, chosen, progress=progress))
    empty = submitters_without_results(folder)
    for name in empty:
        terminal.note(f"{name}: no results are here")
    _write(_Files(sarif=sarif, csv=csv, html=html), judged, chosen, folder=folder, empty=empty)
    terminal.result(check_document(judged, chosen, empty), lambda console: _draw(console, judged, chosen))
    raise typer.Exit(exit_code(judged))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What is to be written, and where."""

    sarif: Path | None
    csv: Path | None
    html: Path | None


def _write(
    files: _Files, judged: Sequence[CheckedResult], edition: Edition, *, folder: Path, empty: Sequence[str]
) -> None:
    from penstock.results.durable import write_json, write_text
    from penstock.submission.reports.findings_export import findings_csv
    from penstock.submission.reports.sarif import sarif
    from penstock.submission.reports.verdicts_page import verdicts_page
    from penstock.submission.rules import RULES

    if files.sarif is not None:
        rules = [rule for rule in RULES if edition.edition in rule.editions]
        write_json(files.sarif.parent, files.sarif.name, sarif(judged, rules, folder))
    if files.csv is not None:
        write_text(files.csv.parent, files.csv.name, findings_csv(judged))
    if files.html is not None:
        page = verdicts_page(judged, edition.edition, edition.for_the_reviewer, empty)
        write_text(files.html.parent, files.html.name, page)


def _draw(console: Console, judged: Sequence[CheckedResult], edition: Edition) -> None:
    from penstock.submission.finding import Verdict
    from penstock.submission.reports.findings_export import count_verdicts

    table(f"Results, by the rules of {edition.edition}", [_row(each) for each in judged])(console)
    shown = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)
    for each in judged:
        told = Counter(
            (finding.verdict.value, finding.rule, finding.proof, finding.fix)
            for verdict in shown
            for finding in each.findings
            if finding.verdict is verdict
        )
        if told:
            console.print(each.name, markup=False)
        for (said, rule, proof, fix), times in told.items():
            often = f" ({times} times)" if times > 1 else ""
            console.print(f"  {said}: {rule}: {proof}{often}", markup=False)
            console.print(f"    {fix}", markup=False)
    counts = ", ".join(f"{count} {what}" for what, count in count_verdicts(judged).items())
    console.print(f"\n{counts}")
    console.print("For the reviewer, because files cannot show it:")
    for each_point in edition.for_the_reviewer:
        console.print(f"  {each_point}", markup=False)


def _row(judged: CheckedResult) -> dict[str, str]:
    throughput = judged.metrics.get("train_throughput_mean_samples_per_second")
    number = "?" if judged.num_accelerators is None else str(judged.num_accelerators)
    return {
        "organisation": judged.organisation,
        "division": judged.division or "-",
        "system": judged.system or "-",
        "workload": judged.workload or "-",
        "accelerators": f"{number} {judged.accelerator}".strip(),
        "samples/s": "-" if throughput is None else f"{throughput:,.1f}",
        "verdict": judged.verdict.value,
    }
