"""`penstock trace compare`, `expect`, `export`, `synthesize`: what makes or needs whole sets of traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.trace.asking import Tiers, asked, draw_answer, make_lens
from penstock.cli.trace.opening import Dask, Files, Strict, Where, tell_losses

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.expectations import CheckResult


def compare(
    description: Annotated[
        Path, typer.Argument(metavar="RUNS.yaml", help="Runs, tiers, baseline: docs/trace.md.")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Leave report.html, report.md, tables.parquet."),
    ] = None,
    dask: Dask = "",
    strict: Strict = False,
    as_json: JsonFlag = False,
) -> None:
    """Set runs side by side: what they differ in, what stands out, and the tables of a study.

    Examples:

      penstock trace compare runs.yaml --out report

      penstock trace compare runs.yaml --json
    """
    from penstock.trace.compare.comparison import compare as compare_study
    from penstock.trace.compare.trace_study import ComparisonSpec, open_study
    from penstock.trace.yaml_documents import read_document

    terminal = Terminal(as_json=as_json)
    wanted = read_document(ComparisonSpec, description)
    with (
        terminal.progress() as progress,
        open_study(wanted, description.parent, progress=progress, dask=dask) as study,
    ):
        tell_losses([each for some in study.accounts.values() for each in some], terminal, strict=strict)
        compared = compare_study(study, progress=progress)
    if out is not None:
        from penstock.trace.compare.report import write_report

        for path in write_report(compared, out):
            terminal.note(f"left {path}")
    terminal.result(comparison_document(compared), lambda console: _draw(console, compared))


def expect(
    checks: Annotated[
        Path, typer.Argument(metavar="CHECKS.yaml", help="A comparison with checks: docs/trace.md.")
    ],
    *,
    dask: Dask = "",
    as_json: JsonFlag = False,
) -> None:
    """Check what is expected of runs; exit code 1, and the lines that fail, if it does not hold.

    Examples:

      penstock trace expect checks.yaml

      penstock trace expect checks.yaml --json
    """
    from penstock.trace.compare.expectations import Expectations, check_all
    from penstock.trace.compare.trace_study import open_study
    from penstock.trace.yaml_documents import read_document

    terminal = Terminal(as_json=as_json)
    wanted = read_document(Expectations, checks)
    with (
        terminal.progress() as progress,
        open_study(wanted, checks.parent, progress=progress, dask=dask) as study,
    ):
        tell_losses([each for some in study.accounts.values() for each in some], terminal, strict=False)
        checked = check_all(study, wanted)
    failed = [each for each in checked if not each.holds]
    document = {"holds": not failed, "checks": [asdict(each) for each in checked]}
    terminal.result(document, table("Checks", [_check_row(each) for each in checked]))
    for each in failed:
        terminal.note(f"does not hold: {each.check} ({each.seen})")
    if failed:
        raise typer.Exit(1)


def export(
    files: Files,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="As trace.json or trace.json.gz.")],
    tier: Tiers = None,
    where: Where = "",
    dask: Dask = "",
    strict: Strict = False,
    as_json: JsonFlag = False,
) -> None:
    """Write events as a Chrome trace, which ui.perfetto.dev opens.

    Examples:

      penstock trace export run.events -o run.json.gz

      penstock trace export run.events -o writes.json --where "op = 'write'"
    """
    from penstock.trace.perfetto_export import export_perfetto

    terminal = Terminal(as_json=as_json)
    lens = make_lens(tier, None, None)
    with (
        asked(files, terminal, lens, where=where, dask=dask, strict=strict) as events,
        terminal.progress() as progress,
    ):
        num_events = export_perfetto(events, out, progress=progress)
    document = {"file": str(out), "num_events": num_events, "size_bytes": out.stat().st_size}
    terminal.result(document, lambda console: console.print(f"{out}: {num_events:,} events", markup=False))


def synthesize(
    description: Annotated[
        str, typer.Argument(metavar="SPEC", help="A YAML file, or a shipped name: seven_runs.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="A new folder for the traces.")],
    generation: Annotated[
        int | None, typer.Option("--generation", min=1, max=3, help="Of the format, whatever SPEC says.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make traces from a description: ranks, checkpoints, files, calls, sizes, durations, damage.

    `seven_runs` is a published study of seven ways to write the same checkpoints; compare it afterwards.

    Examples:

      penstock trace synthesize seven_runs -o study

      penstock trace synthesize spec.yaml -o traces --generation 3
    """
    from penstock.trace.synthesize import read_description
    from penstock.trace.synthesize import synthesize as make

    terminal = Terminal(as_json=as_json)
    wanted = read_description(description)
    if generation is not None:
        wanted = wanted.model_copy(update={"generation": generation})
    with terminal.progress() as progress:
        made = make(wanted, out, progress=progress)
    rows = [
        {"run": run, "files": str(made.num_files[run]), "events": f"{num:,}"}
        for run, num in made.num_events.items()
    ]
    document = {
        "folder": str(made.folder),
        "runs_yaml": str(made.runs_yaml) if made.runs_yaml else None,
        "num_events": made.num_events,
        "num_files": made.num_files,
    }
    terminal.result(document, table(f"Traces in {made.folder}", rows))
    if made.runs_yaml:
        terminal.note(f"Compare them: penstock trace compare {made.runs_yaml} --out report")


def comparison_document(compared: ComparisonResult) -> dict[str, Any]:
    """A comparison as JSON."""
    from penstock.trace.questions.answer import document

    return {
        "runs": list(compared.runs),
        "baseline": compared.baseline,
        "mismatches": document(compared.mismatches),
        "findings": [
            {
                "code": each.code,
                "weight": each.weight.value,
                "title": each.title,
                "runs": list(each.runs),
                "says": list(each.says),
                "evidence": document(each.evidence),
            }
            for each in compared.findings
        ],
        "tables": {each.name: document(each) for each in (*compared.tables, *compared.charts)},
    }


def _draw(console: Console, compared: ComparisonResult) -> None:
    """Mismatches, findings, and the tables that one looks at first; the others are in the report."""
    draw_answer(console, compared.mismatches)
    for finding in compared.findings:
        console.print(f"{finding.code} {finding.title}", style="bold", markup=False)
        for sentence in finding.says:
            console.print(f"  {sentence}", markup=False)
    console.print()
    for name in ("t0", "t1", "t1_measures", "t2", "t13"):
        draw_answer(console, compared.table(name))
    console.print("All tables: --out FOLDER, or --json.")


def _check_row(checked: CheckResult) -> dict[str, str]:
    return {"check": checked.check, "holds": "yes" if checked.holds else "NO", "seen": checked.seen}
