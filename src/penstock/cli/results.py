"""`penstock results`: what runs have left, listed, shown and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.terminal import View
    from penstock.results.checkpoints import CheckpointFigures
    from penstock.results.figures import PhaseFigures
    from penstock.results.overview import Comparison, Difference, RunView

app = typer.Typer(no_args_is_help=True, help="What runs have left: list, show, compare.")

_Parent = Annotated[
    Path, typer.Option("--results", metavar="FOLDER", help="Where names of runs are looked up.")
]


@app.callback()
def results() -> None:
    """Group the verbs of results."""


@app.command("ls")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The parent of runs' folders.")] = Path(
        "results"
    ),
    *,
    as_json: JsonFlag = False,
) -> None:
    """List the runs below FOLDER, newest first; DLIO's are among them.

    Folders that cannot be read are named on stderr, and the list goes on.

    Examples:

      penstock results ls

      penstock results ls /mnt/results --json
    """
    from dataclasses import asdict

    from penstock.results.overview import find_runs

    terminal = Terminal(as_json=as_json)
    found, complaints = find_runs(folder)
    for complaint in complaints:
        terminal.note(complaint)
    document = {"runs": [_without_settings(asdict(run)) for run in found], "unreadable": complaints}
    terminal.result(document, lambda console: _draw_list(console, folder, found))


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name, or a part of it.")],
    *,
    parent: _Parent = Path("results"),
    as_json: JsonFlag = False,
) -> None:
    """Show one run: how it ended, its epochs, where its time went, and the verdict.

    The figures of a run that goes on, or was cut short, are those of its complete blocks.

    Examples:

      penstock results show unet3d_h100-20260102-030405-1a2b3c

      penstock results show /mnt/results/mine --json
    """
    from dataclasses import asdict

    from penstock.results.checkpoints import read_checkpoints
    from penstock.results.layout import resolve_run
    from penstock.results.overview import view_run

    terminal = Terminal(as_json=as_json)
    folder = resolve_run(run, parent)
    view = view_run(folder)
    for note in view.notes:
        terminal.note(note)
    figures = _figures(folder, view, terminal)
    taken = read_checkpoints(folder) if view.kind == "penstock" else None
    document = {
        **asdict(view),
        "train": asdict(figures) if figures else None,
        "checkpoint": asdict(taken) if taken else None,
    }
    if taken is None:
        terminal.result(document, lambda console: _draw_run(console, view, figures))
    else:
        terminal.result(document, lambda console: _draw_checkpoints(console, view, taken))


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs.")],
    *,
    parent: _Parent = Path("results"),
    as_json: JsonFlag = False,
) -> None:
    """Set runs side by side, each against the first.

    What makes them incomparable is said first: another workload, number of ranks, data set, batch, ...
    Settings that one varies on purpose (threads, storage, folders) are listed next.

    Examples:

      penstock results compare 1a2b3c 4d5e6f

      penstock results compare /mnt/a/run1 /mnt/b/run1 --json
    """
    from dataclasses import asdict

    from penstock.errors import UsageError
    from penstock.results.layout import resolve_run
    from penstock.results.overview import compare as compare_views
    from penstock.results.overview import view_run

    if len(runs) < 2:
        raise UsageError("One run has nothing to be compared with", fix="Name at least two.")
    comparison = compare_views([view_run(resolve_run(run, parent)) for run in runs])
    document = {"is_comparable": comparison.is_comparable, **asdict(comparison)}
    document["runs"] = [_without_settings(run) for run in document["runs"]]
    Terminal(as_json=as_json).result(document, lambda console: _draw_comparison(console, comparison))


def _figures(folder: Path, view: RunView, terminal: Terminal) -> PhaseFigures | None:
    """The recorded figures, or what the step events of an unfinished run yield."""
    from penstock.errors import StorageError
    from penstock.results.record import read_record
    from penstock.results.review import review

    if view.kind != "penstock":
        return None
    record = read_record(folder)
    if record.train is not None:
        return record.train
    try:
        return review(folder, record)
    except StorageError as error:
        terminal.note(str(error))
        return None


def _without_settings(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key != "settings"}


def _draw_list(console: Console, folder: Path, found: Sequence[RunView]) -> None:
    """Two lines a run: its name and outcome, then what one looks for."""
    if not found:
        console.print(f"No runs in {folder}", markup=False)
    for run in found:
        outcome = f"{run.outcome}: {run.why}" if run.why else run.outcome
        console.print(f"{run.id}  {outcome}", style="bold", markup=False)
        started = (run.started or "unknown")[:16].replace("T", " ")
        console.print(
            f"  {run.workload}, ranks {_number(run.ranks, 'd')}, {started}, {_headline(run)}", markup=False
        )


def _headline(run: RunView) -> str:
    """What one looks for first: rates of checkpoints, or utilization."""
    if run.write_gib_per_s is not None or run.read_gib_per_s is not None:
        return (
            f"checkpoints written with {_number(run.write_gib_per_s, '.2f')} GiB/s, "
            f"read with {_number(run.read_gib_per_s, '.2f')} GiB/s"
        )
    return (
        f"AU {_number(run.au_compat_percent, '.2f')} % (strict {_number(run.au_strict_percent, '.2f')} %), "
        f"{_number(run.samples_per_s_compat, ',.1f')} samples/s"
    )


def _draw_checkpoints(console: Console, view: RunView, taken: CheckpointFigures) -> None:
    from penstock.units import format_bytes, format_seconds

    console.print(view.id, style="bold", markup=False)
    outcome = f"{view.outcome}: {view.why}" if view.why else view.outcome
    facts = {
        "model": taken.model,
        "one checkpoint": format_bytes(taken.checkpoint_bytes),
        "at": taken.target,
        "started": view.started or "-",
        "ranks": _number(view.ranks, "d"),
        "outcome": outcome,
        "verified": "all right" if taken.is_right else "WRONG BYTES: see checkpoints.json",
        "gap before reads": "-" if taken.gap_s is None else format_seconds(taken.gap_s),
        "folder": view.folder,
    }
    for what, value in facts.items():
        console.print(f"  {what:<28}{value}", markup=False)
    rows = [
        {
            "": name,
            "checkpoints": str(reached.checkpoints),
            "bytes": format_bytes(reached.bytes),
            "took": format_seconds(reached.duration_s),
            "GiB/s": _number(reached.gib_per_s, ".2f"),
            "mean of each": _number(reached.mean_gib_per_s, ".2f"),
            "p99": f"{reached.p99_ms:.1f} ms",
            "held up by": reached.bottleneck,
        }
        for name, reached in (("write", taken.write), ("read", taken.read))
        if reached is not None
    ]
    table("Checkpoints", rows)(console)


def _draw_run(console: Console, view: RunView, figures: PhaseFigures | None) -> None:
    console.print(view.id, style="bold", markup=False)
    for what, value in _facts(view):
        console.print(f"  {what:<28}{value}", markup=False)
    if figures is None:
        return
    table("Epochs", _epoch_rows(figures))(console)
    if figures.times is not None:
        _times_table(figures)(console)
    if figures.verdict is not None:
        console.print(f"Bottleneck: {figures.verdict.bottleneck}", style="bold")
        for sentence in figures.verdict.evidence:
            console.print(f"  {sentence}", markup=False)


def _facts(view: RunView) -> Sequence[tuple[str, str]]:
    from penstock.units import format_bytes, format_rate

    outcome = f"{view.outcome}: {view.why}" if view.why else view.outcome
    read = "-" if view.read_bytes is None else format_bytes(view.read_bytes)
    rate = "-" if view.read_bytes_per_s is None else format_rate(view.read_bytes_per_s)
    return (
        ("workload", view.workload),
        ("started", view.started or "-"),
        ("ranks", _number(view.ranks, "d")),
        ("outcome", outcome),
        ("AU as DLIO", _number(view.au_compat_percent, ".2f")),
        ("AU strict", _number(view.au_strict_percent, ".2f")),
        ("samples/s as DLIO", _number(view.samples_per_s_compat, ",.1f")),
        ("samples/s over all time", _number(view.samples_per_s_strict, ",.1f")),
        ("I/O as DLIO, nominal MiB/s", _number(view.io_compat_mib_per_s, ",.1f")),
        ("bytes really read", f"{read}, {rate}"),
        ("folder", view.folder),
    )


def _epoch_rows(figures: PhaseFigures) -> list[dict[str, str]]:
    from penstock.units import format_bytes, format_seconds

    return [
        {
            "epoch": str(epoch.epoch),
            "AU %": _number(epoch.au_compat_percent, ".2f"),
            "strict %": _number(epoch.au_strict_percent, ".2f"),
            "samples/s": _number(epoch.samples_per_s_compat, ",.1f"),
            "samples": f"{epoch.samples:,}",
            "read": format_bytes(epoch.read_bytes),
            "took": format_seconds(epoch.elapsed_s),
        }
        for epoch in figures.epochs
    ]


def _times_table(figures: PhaseFigures) -> View:
    from penstock.units import format_seconds

    assert figures.times is not None
    rows = [
        {
            "a step": measure,
            **{
                title: format_seconds(value)
                for title, value in (
                    ("p50", spread.p50_s), ("p90", spread.p90_s), ("p99", spread.p99_s),
                    ("max", spread.max_s),
                )
            },
            "fastest rank": f"{format_seconds(skew.fastest_s)} ({skew.fastest_rank})",
            "slowest rank": f"{format_seconds(skew.slowest_s)} ({skew.slowest_rank})",
        }
        for measure, spread in figures.times.over_ranks.items()
        for skew in (figures.times.skew[measure],)
    ]  # fmt: skip
    return table("Times over all ranks", rows)


def _draw_comparison(console: Console, comparison: Comparison) -> None:
    names = [str(number) for number, _ in enumerate(comparison.runs, start=1)]
    for name, run in zip(names, comparison.runs, strict=True):
        console.print(f"{name}: {run.id} ({run.workload}, {run.outcome}), {run.folder}", markup=False)
    if comparison.obstacles:
        console.print(
            "Not comparable: these runs differ in what they asked for or how they ended.", style="bold"
        )
        table("Asked differently", _difference_rows(comparison.obstacles, names))(console)
    if comparison.varied:
        table("Set differently", _difference_rows(comparison.varied, names))(console)
    rows = [
        {
            "figure": delta.figure,
            **{
                name: _with_change(value, change, is_first=position == 0)
                for position, (name, value, change) in enumerate(
                    zip(names, delta.values, delta.changes, strict=True)
                )
            },
        }
        for delta in comparison.deltas
    ]
    table("Figures", rows)(console)


def _difference_rows(differences: Sequence[Difference], names: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"key": each.key, **{name: str(value) for name, value in zip(names, each.values, strict=True)}}
        for each in differences
    ]


def _with_change(value: float | None, change: float | None, *, is_first: bool) -> str:
    text = _number(value, ",.2f")
    return text if is_first or change is None else f"{text} ({change:+.1%})"


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)
