"""`penstock trace report`, `compare` and `expect`: draw, compare and check traced runs."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import argument, arguments, group, option, verb
from penstock.cli.parsers import FILE, NEW_FOLDER, URI
from penstock.cli.terminal import Terminal, View, bold, table
from penstock.cli.trace_options import (
    CLASSES,
    DASK,
    PHASES,
    TIERS,
    ReadOptions,
    check_output,
    parse_dimensions,
    report_losses,
    view_answer,
)
from penstock.errors import UsageError
from penstock.progress import Progress
from penstock.trace.questions.answer import document as answer_document
from penstock.units import format_seconds

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import ComparisonSpec, Study

_PAGE = "report.html"
_RUN_TEXT: Final = (
    "Run: [NAME=] and a directory, a quoted glob or a table. Files of one directory form one run."
)


@verb
def report(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    phases: tuple[str, ...] = PHASES,
    runs: tuple[str, ...] = arguments("RUN...", URI, _RUN_TEXT),
    read: ReadOptions = group(ReadOptions),
    out: Path | None = option(
        "--out", FILE, f"Write this page (default: {_PAGE}, or none with --json).", short="-o"
    ),
) -> None:
    """Write a page about the I/O of runs: calls over time, bandwidth, sizes, durations, files, overlap.

    The page is a single file that works offline. It starts with the bytes transferred, how long that took,
    what was slow, and findings, the most costly first. --json prints the data of all figures.

    Examples:

      penstock trace report traces --out report.html

      penstock trace report base.events new.events --tier ssd=/l/ssd --out both.html

      penstock trace report before=monday/traces after=friday/traces --json
    """
    from penstock.reports.page import is_page
    from penstock.trace.compare.run_report import report_runs, write_run_report

    spec = _describe_runs(runs, tiers, classes, phases, read.where)
    path = out or (None if terminal.as_json else Path(_PAGE))
    if path is not None:
        check_output(path, (), kind="an earlier report", is_kind=is_page)
    host = "" if tiers else socket.gethostname()
    opened = _open_study(spec, Path(), read.dask, terminal, strict=read.strict, host=host)
    with opened as (study, progress):
        made = report_runs(study, progress=progress)
    view = [
        *made.says,
        *(bold(f"{finding.code} {finding.title}") for finding in made.findings),
        *(
            f"{section.title}: {section.why_empty}"
            for _, section in made.figures.values()
            if not (section.charts or section.tables or section.parts)
        ),
    ]
    terminal.result({"page": str(path) if path else None, **made.document()}, view)
    if path is not None:
        write_run_report(made, path)
        terminal.note(f"wrote {path}")


def _describe_runs(
    runs: Sequence[str], tiers: Sequence[str], classes: Sequence[str], phases: tuple[str, ...], where: str
) -> ComparisonSpec:
    """Return the comparison that these options describe."""
    from penstock.trace.compare.trace_study import ComparisonSpec, name_runs
    from penstock.trace.dimensions import parse_phase

    dimensions = parse_dimensions(tiers, classes, phases)
    return ComparisonSpec(
        runs=name_runs(runs),
        tiers={name: tuple(prefixes) for name, prefixes in dimensions.tiers.items()},
        file_classes=dict(dimensions.file_classes) or "strip-digits",
        phases=tuple(map(parse_phase, phases)),
        where=where,
    )


@verb
def compare(
    terminal: Terminal,
    *,
    tiers: tuple[str, ...] = TIERS,
    classes: tuple[str, ...] = CLASSES,
    phases: tuple[str, ...] = PHASES,
    runs: tuple[str, ...] = arguments(
        "RUN...",
        URI,
        f"{_RUN_TEXT} The first run is the baseline. Or a single RUNS.yaml (see `penstock docs trace`).",
    ),
    read: ReadOptions = group(ReadOptions),
    out: Path | None = option(
        "--out", NEW_FOLDER, "Write report.html, report.md and tables.parquet into DIR.", short="-o"
    ),
) -> None:
    """Compare runs: show how they differ and what stands out.

    Prints findings and the main tables. A YAML file can describe the runs of a larger study.

    Examples:

      penstock trace compare before=monday/traces after=friday/traces

      penstock trace compare runs.yaml --out report

      penstock trace compare runs.yaml --json
    """
    from penstock.trace.compare.comparison import compare_runs
    from penstock.trace.compare.report import REPORT_FILES, is_report_file, write_comparison
    from penstock.trace.compare.trace_study import ComparisonSpec, load_document

    file, folder = Path(runs[0]), Path()
    if len(runs) == 1 and file.suffix in (".yaml", ".yml"):
        if tiers or classes or phases or read.where:
            raise UsageError(
                "The file describes tiers, classes, phases and `where` of its runs",
                where=str(file),
                fix="Write them there, or name the runs instead of the file.",
            )
        spec, folder = load_document(ComparisonSpec, file), file.parent
    else:
        spec = _describe_runs(runs, tiers, classes, phases, read.where)
        if len(spec.runs) < 2:
            raise UsageError(
                "One run has nothing to be compared with",
                where=" ".join(runs),
                fix="Name two or more, each with a name if they are files of one folder: `penstock trace "
                "compare before=a.pfw.gz after=b.pfw.gz`. `penstock trace report RUN` shows one alone.",
            )
        if not tiers:
            # The runs may come from other machines, whose mounts differ from this machine's.
            spec = spec.model_copy(update={"tiers": {"files": "/"}})
    if out is not None:
        for name in REPORT_FILES:
            check_output(out / name, (), kind="one of an earlier report", is_kind=is_report_file)
    with _open_study(spec, folder, read.dask, terminal, strict=read.strict) as (study, progress):
        comparison = compare_runs(study, progress=progress)
    if out is not None:
        terminal.notes(f"wrote {path}" for path in write_comparison(comparison, out))
    terminal.result(
        {
            "runs": list(comparison.runs),
            "baseline": comparison.baseline,
            "mismatches": answer_document(comparison.mismatches),
            "findings": [finding.document() for finding in comparison.findings],
            "tables": {
                answer.name: answer_document(answer) for answer in (*comparison.tables, *comparison.charts)
            },
        },
        _view_comparison(comparison),
    )


def _view_comparison(comparison: ComparisonResult) -> View:
    """Show mismatches, findings and the main tables; the report has the other tables."""
    yield from view_answer(comparison.mismatches)
    for finding in comparison.findings:
        yield bold(f"{finding.code} {finding.title}")
        for sentence in finding.says:
            yield f"  {sentence}"
        if finding.lost_us:
            yield f"  Lost: {format_seconds(finding.lost_us / 1e6)} a rank."
        if finding.fix:
            yield f"  {finding.fix}"
    yield ""
    for name in ("t0", "t1", "t1_measures", "t2", "t13"):
        yield from view_answer(comparison.table(name))
    yield "All tables: --out DIR, or --json."


@contextmanager
def _open_study(
    description: ComparisonSpec, folder: Path, dask: str, terminal: Terminal, *, strict: bool, host: str = ""
) -> Iterator[tuple[Study, Progress]]:
    """Load all traces of a comparison, and print what was lost."""
    from penstock.trace.compare.trace_study import open_study
    from penstock.trace.trace_set import find_clock_mismatches

    with (
        terminal.progress() as progress,
        open_study(description, folder, progress=progress, dask=dask, host=host) as study,
    ):
        accounts = [account for of_run in study.accounts.values() for account in of_run]
        report_losses(accounts, terminal, strict=strict)
        for run, of_run in study.accounts.items():
            terminal.notes(f"{run}: {mismatch}" for mismatch in find_clock_mismatches(of_run))
        yield study, progress


@verb
def expect(
    terminal: Terminal,
    *,
    file: Path = argument("CHECKS.yaml", FILE, "YAML file with runs and checks (see `penstock docs trace`)."),
    dask: str = DASK,
) -> int:
    """Check expectations about runs; if any fails, list the failed checks and exit with 1.

    Examples:

      penstock trace expect checks.yaml

      penstock trace expect checks.yaml --json
    """
    from penstock.trace.compare.expectations import Expectations, check_all
    from penstock.trace.compare.trace_study import load_document

    description = load_document(Expectations, file)
    with _open_study(description, file.parent, dask, terminal, strict=False) as (study, _):
        checks = check_all(study, description)
    failed = [check for check in checks if not check["holds"]]
    document = {"holds": not failed, "checks": checks}
    rows = [{**check, "holds": "yes" if check["holds"] else "NO"} for check in checks]
    terminal.result(document, table("Checks", rows))
    terminal.notes(f"does not hold: {check['check']} ({check['seen']})" for check in failed)
    return 1 if failed else 0
