"""`penstock trace report`: what runs did, as one page of sentences, findings and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import arguments, option, verb
from penstock.cli.parsers import FILE, URI
from penstock.cli.terminal import Terminal, View, bold
from penstock.cli.trace_options import RUN_TEXT, TracedRunOptions, check_output, report_losses

if TYPE_CHECKING:
    from penstock.trace.compare.run_report import RunReport

_PAGE = "report.html"


@dataclass(frozen=True, kw_only=True)
class _ReportOptions(TracedRunOptions):
    runs: tuple[str, ...] = arguments("RUN...", URI, RUN_TEXT)
    out: Path | None = option(
        "--out", FILE, f"Write this page (default: {_PAGE}, or none with --json).", short="-o"
    )


@verb(_ReportOptions)
def report(options: _ReportOptions, terminal: Terminal) -> None:
    """Draw what runs did: who called when, bandwidth, sizes, durations, files, overlap with computation.

    The page is one file that loads nothing. It begins with what moved, how long it took and what was slow,
    and with findings, those that cost most time first. --json prints the data of all figures.

    Examples:

      penstock trace report traces --out report.html

      penstock trace report base.events new.events --tier ssd=/l/ssd --out both.html

      penstock trace report before=monday/traces after=friday/traces --json
    """
    from penstock.reports.html_page import is_page
    from penstock.trace.compare.run_report import report_runs, write_run_report
    from penstock.trace.compare.trace_study import open_study

    description = options.describe()
    out = options.out or (None if terminal.as_json else Path(_PAGE))
    if out is not None:
        check_output(out, (), kind="an earlier report", is_kind=is_page)
    with (
        terminal.progress() as progress,
        open_study(description, Path(), progress=progress, dask=options.read.dask) as study,
    ):
        accounts = [account for of_run in study.accounts.values() for account in of_run]
        report_losses(accounts, terminal, strict=options.read.strict)
        made = report_runs(study, progress=progress)
    if out is not None:
        write_run_report(made, out)
        terminal.note(f"wrote {out}")
    terminal.result({"page": str(out) if out else None, **made.document()}, _view(made))


def _view(made: RunReport) -> View:
    """The first sentences, and the findings by their titles."""
    yield from made.says
    for finding in made.findings:
        yield bold(f"{finding.code} {finding.title}")
    yield from _say_empty(made)


def _say_empty(made: RunReport) -> Sequence[str]:
    return [
        f"{figure.title}: {figure.why_empty}"
        for figure in made.figures
        if not (figure.panels or figure.tables)
    ]
