"""`penstock results compare`: runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.results.words import Parent, number, without_settings
from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.results.overview import Comparison, Difference


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Two or more runs.")],
    *,
    parent: Parent = Path("results"),
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
    from penstock.results.history.kept import run_folder
    from penstock.results.overview import compare as compare_views
    from penstock.results.overview import view_run

    if len(runs) < 2:
        raise UsageError("One run has nothing to be compared with", fix="Name at least two.")
    comparison = compare_views([view_run(run_folder(run, parent)) for run in runs])
    document = {"is_comparable": comparison.is_comparable, **asdict(comparison)}
    document["runs"] = [without_settings(run) for run in document["runs"]]
    Terminal(as_json=as_json).result(document, lambda console: _draw_comparison(console, comparison))


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
    text = number(value, ",.2f")
    return text if is_first or change is None else f"{text} ({change:+.1%})"
