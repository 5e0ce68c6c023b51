"""`penstock submission report`: the figures of a submission, with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.submission.reports.result_report import ResultReport


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A round's folder, or one submitter's.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Write report.html, results.csv and results.json there."
        ),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write each result's report into its tree, beside its runs.")
    ] = False,
    edition: Annotated[
        str, typer.Option(metavar="auto|v1.0|v2.0|v3.0", help="Whose rules to judge by.")
    ] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Recompute every result's figures, run by run: mean, deviation, interval of confidence, outliers.

    Without --output and --write nothing is written. --write adds results.json and results.csv beside the runs
    (of v1.0, mlperf_storage_report.json); a file there that is not Penstock's own stays as it is. What is
    valid is judged by `penstock submission check`; here the exit code is 0 whatever the verdicts are.

    Examples:

      penstock submission report ~/storage_results_v1.0

      penstock submission report results/closed/acme -o report

      penstock submission report results --write --json
    """
    from penstock.submission.check import choose_edition
    from penstock.submission.reports.report_files import plan_folder, plan_tree, write_files
    from penstock.submission.reports.result_report import report_all, reports_document

    terminal = Terminal(as_json=as_json)
    chosen = choose_edition(edition, folder)
    with terminal.progress() as progress:
        reported = list(report_all(folder, chosen, progress))
    planned = list(plan_folder(output, reported, chosen)) if output is not None else []
    if write:
        beside, kept = plan_tree(reported)
        planned += beside
        for sentence in kept:
            terminal.note(sentence)
    written = write_files(planned)
    for each in reported:
        for reason in each.figures.missing:
            terminal.note(f"{each.judged.name}: not recomputed: {reason}")
    terminal.result(
        {**reports_document(reported, chosen), "written": written},
        lambda console: _draw(console, reported, written),
    )


def _draw(console: Console, reported: Sequence[ResultReport], written: Sequence[str]) -> None:
    from penstock.submission.reports.figures_page import figure_row, value_text

    for each in reported:
        judged = each.judged
        number = "?" if judged.num_accelerators is None else str(judged.num_accelerators)
        console.print(f"\n{judged.name}: {judged.verdict.value}", style="bold", markup=False)
        console.print(f"  {judged.workload} on {number} {judged.accelerator}".rstrip(), markup=False)
        table("", [figure_row(figure) for figure in each.figures.found])(console)
        for figure in each.figures.found:
            for outlier in figure.spread.outliers:
                text = f"{figure.name}, {outlier.run}: {value_text(figure, outlier.value)}, {outlier.rule}"
                console.print(f"  outlier: {text}", markup=False)
    if written:
        console.print(f"\nwritten: {len(written)} files, first {written[0]}", markup=False)
