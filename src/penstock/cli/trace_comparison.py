"""`penstock trace compare`, `expect` and `export`: sets of traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import trace_options
from penstock.cli.options import argument, arguments, group, option, required, verb
from penstock.cli.parsers import FILE, FOLDER, TEXT, URI
from penstock.cli.terminal import Terminal, View, table
from penstock.errors import UsageError
from penstock.progress import Progress

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import ComparisonSpec, Study

_DASK_TEXT = "Read with the workers of Dask: local, or a scheduler's address."


@dataclass(frozen=True, kw_only=True)
class _CompareOptions(trace_options.TracedRunOptions):
    runs: tuple[str, ...] = arguments(
        "RUN...",
        URI,
        f"{trace_options.RUN_TEXT} The first is the baseline. Or one RUNS.yaml (see `penstock docs trace`).",
    )
    out: Path | None = option(
        "--out", FOLDER, "Write report.html, report.md and tables.parquet into DIR.", short="-o"
    )

    def describe(self) -> ComparisonSpec:
        """What the file says, or the runs and options of the command."""
        if self.description is None:
            spec = super().describe()
            if not self.tiers:
                # The runs may be those of other machines, whose mounts are not this one's.
                spec = spec.model_copy(update={"tiers": {"files": "/"}})
            if len(spec.runs) > 1:
                return spec
            raise UsageError(
                "One run has nothing to be compared with",
                where=" ".join(self.runs),
                fix="Name two or more, each with a name if they are files of one folder: `penstock trace "
                "compare before=a.pfw.gz after=b.pfw.gz`. `penstock trace report RUN` shows one alone.",
            )
        if self.tiers or self.classes or self.phases or self.read.where:
            raise UsageError(
                "The file describes tiers, classes, phases and `where` of its runs",
                where=str(self.description),
                fix="Write them there, or name the runs instead of the file.",
            )
        from penstock.trace.compare.trace_study import ComparisonSpec
        from penstock.trace.yaml_documents import load_document

        return load_document(ComparisonSpec, self.description)

    @property
    def description(self) -> Path | None:
        """The file that describes the runs."""
        path = Path(self.runs[0])
        return path if len(self.runs) == 1 and path.suffix in (".yaml", ".yml") else None


@verb(_CompareOptions)
def compare(options: _CompareOptions, terminal: Terminal) -> None:
    """Compare runs: the differences between them, what stands out, and the tables of a study.

    Examples:

      penstock trace compare before=monday/traces after=friday/traces

      penstock trace compare runs.yaml --out report

      penstock trace compare runs.yaml --json
    """
    from penstock.trace.compare.comparison import compare_runs as compare_study

    spec = options.describe()
    folder = options.description.parent if options.description else Path()
    if options.out is not None:
        from penstock.trace.compare.report import REPORT_FILES, is_report_file

        for name in REPORT_FILES:
            trace_options.check_output(
                options.out / name, (), kind="one of an earlier report", is_kind=is_report_file
            )
    read = options.read
    with _open_study(spec, folder, read.dask, terminal, strict=read.strict) as (study, progress):
        comparison = compare_study(study, progress=progress)
    if options.out is not None:
        from penstock.trace.compare.report import write_comparison

        for path in write_comparison(comparison, options.out):
            terminal.note(f"wrote {path}")
    terminal.result(trace_options.comparison_document(comparison), _view(comparison))


def _view(comparison: ComparisonResult) -> View:
    """Mismatches, findings and the main tables; the others are in the report."""
    yield from trace_options.view_answer(comparison.mismatches)
    yield from trace_options.view_findings(comparison)
    yield ""
    for name in ("t0", "t1", "t1_measures", "t2", "t13"):
        yield from trace_options.view_answer(comparison.table(name))
    yield "All tables: --out DIR, or --json."


@contextmanager
def _open_study(
    description: ComparisonSpec, folder: Path, dask: str, terminal: Terminal, *, strict: bool
) -> Iterator[tuple[Study, Progress]]:
    """Load all traces of a comparison, and print what was lost of them."""
    from penstock.trace.compare.trace_study import open_study
    from penstock.trace.trace_set import find_clock_mismatches

    with (
        terminal.progress() as progress,
        open_study(description, folder, progress=progress, dask=dask) as study,
    ):
        accounts = [account for of_run in study.accounts.values() for account in of_run]
        trace_options.report_losses(accounts, terminal, strict=strict)
        for run, of_run in study.accounts.items():
            terminal.notes(f"{run}: {mismatch}" for mismatch in find_clock_mismatches(of_run))
        yield study, progress


@dataclass(frozen=True, kw_only=True)
class _ExpectOptions:
    description: Path = argument("CHECKS.yaml", FILE, "Comparison with checks (see `penstock docs trace`).")
    dask: str = option("--dask", TEXT, _DASK_TEXT, default="", metavar="ADDRESS")


@verb(_ExpectOptions)
def expect(options: _ExpectOptions, terminal: Terminal) -> int:
    """Check expectations about runs; exits with 1 and lists the failed checks if one does not hold.

    Examples:

      penstock trace expect checks.yaml

      penstock trace expect checks.yaml --json
    """
    from penstock.trace.compare.expectations import Expectations, check_all
    from penstock.trace.yaml_documents import load_document

    description = load_document(Expectations, options.description)
    folder = options.description.parent
    with _open_study(description, folder, options.dask, terminal, strict=False) as (study, _):
        checks = check_all(study, description)
    failed = [check for check in checks if not check.holds]
    document = {"holds": not failed, "checks": [asdict(check) for check in checks]}
    rows = [
        {"check": check.check, "holds": "yes" if check.holds else "NO", "seen": check.seen}
        for check in checks
    ]
    terminal.result(document, table("Checks", rows))
    for check in failed:
        terminal.note(f"does not hold: {check.check} ({check.seen})")
    return 1 if failed else 0


@dataclass(frozen=True, kw_only=True)
class _ExportOptions(trace_options.TierOptions, trace_options.DimensionOptions):
    traces: trace_options.TraceOptions = group(trace_options.TraceOptions)
    out: Path = required("--out", FILE, "Write this file: trace.json or trace.json.gz.", short="-o")


@verb(_ExportOptions)
def export(options: _ExportOptions, terminal: Terminal) -> None:
    """Export events as a Chrome trace, which ui.perfetto.dev opens.

    Examples:

      penstock trace export run.events -o run.json.gz

      penstock trace export run.events -o writes.json --where "op = 'write'"
    """
    from penstock.trace.perfetto_export import export_perfetto
    from penstock.trace.questions.events_view import view_events
    from penstock.trace.reading.find_files import is_export
    from penstock.trace.trace_set import RELATION

    out, dimensions = options.out, options.dimensions()
    trace_options.check_output(
        out, options.traces.files, kind="an earlier export of traces", is_kind=is_export
    )
    with options.traces.open(terminal) as traces, terminal.progress() as progress:
        events = view_events(traces.connection, RELATION, dimensions)
        num_events = export_perfetto(events, out, progress=progress)
    document = {"file": str(out), "num_events": num_events, "size_bytes": out.stat().st_size}
    terminal.result(document, [f"{out}: {num_events:,} events"])
