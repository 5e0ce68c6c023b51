"""`penstock results ls`: every run that is, or was, in a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.results.words import (
    OlderThan,
    Status,
    Workload,
    document,
    line,
    number,
    without_settings,
)
from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.results.history.kept import Kept, KeptRun
    from penstock.results.overview import RunView


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The parent of runs' folders.")] = Path(
        "results"
    ),
    *,
    status: Status = "",
    workload: Workload = "",
    older_than: OlderThan = "",
    show_all: Annotated[
        bool, typer.Option("--all", help="Also runs that were deleted from the trash.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the runs below FOLDER, newest first; DLIO's are among them.

    Runs in the trash, and runs that began here and have no folder any more, are listed after the others.
    Folders and entries that cannot be read are named on stderr, and the list goes on.

    Examples:

      penstock results ls

      penstock results ls /mnt/results --status incomplete --older-than 2w

      penstock results ls /mnt/results --workload unet3d --json
    """
    from datetime import UTC, datetime

    from penstock.results.history.kept import kept_runs
    from penstock.results.history.selection import criteria, fits

    terminal = Terminal(as_json=as_json)
    wanted = criteria(status=status, workload=workload, older_than=older_than, now=datetime.now(UTC))
    kept = kept_runs(folder)
    unreadable = [run.why for run in kept.runs if run.outcome == "unreadable"]
    for complaint in (*kept.complaints, *unreadable):
        terminal.note(complaint)
    shown = [run for run in kept.runs if fits(run, wanted)]
    terminal.result(
        _document(shown, kept, unreadable),
        lambda console: _draw(console, folder, shown, kept, show_all=show_all),
    )


def _document(shown: Sequence[KeptRun], kept: Kept, unreadable: Sequence[str]) -> dict[str, Any]:
    listed: dict[str, list[dict[str, Any]]] = {"here": [], "trash": [], "gone": [], "deleted": []}
    for run in shown:
        figures = without_settings(asdict(run.view)) if run.view else {}
        if run.where.value != "here" or run.outcome != "unreadable":
            listed[run.where.value].append({**document(run), **figures})
    return {
        "runs": listed["here"],
        "removed": listed["trash"],
        "without_folder": listed["gone"],
        "deleted": listed["deleted"],
        "unreadable": list(unreadable),
        "history": list(kept.complaints),
    }


def _draw(console: Console, folder: Path, shown: Sequence[KeptRun], kept: Kept, *, show_all: bool) -> None:
    here = [run for run in shown if run.where.value == "here"]
    if not any(run.outcome != "unreadable" for run in here):
        console.print(f"No runs in {folder}", markup=False)
    for run in here:
        _draw_run(console, run, kept)
    deleted = [run for run in shown if run.where.value == "deleted"]
    sections = {
        "Removed: `penstock results restore` brings them back": [
            run for run in shown if run.where.value == "trash"
        ],
        "Begun here, without a folder": [run for run in shown if run.where.value == "gone"],
        "Deleted for good": deleted if show_all else [],
    }
    for title, runs in sections.items():
        if runs:
            console.print(f"\n{title}", markup=False)
        for run in runs:
            batch = f", batch {run.batch}" if run.batch else ""
            console.print(f"  {line(run)}{batch}", markup=False)
    if deleted and not show_all:
        console.print(f"\n{len(deleted)} more were deleted for good: --all lists them")


def _draw_run(console: Console, run: KeptRun, kept: Kept) -> None:
    """Two lines a run: its name and outcome, then what one looks for."""
    if run.outcome == "unreadable":
        return
    alien = ", not in the history" if kept.has_history and run.began is None else ""
    console.print(f"{line(run)}{alien}", style="bold", markup=False)
    if run.view is not None:
        started = (run.view.started or "unknown")[:16].replace("T", " ")
        ranks = number(run.view.ranks, "d")
        console.print(f"  {run.view.workload}, ranks {ranks}, {started}, {_headline(run.view)}", markup=False)


def _headline(run: RunView) -> str:
    """What one looks for first: rates of checkpoints, or utilization."""
    if run.write_gib_per_s is not None or run.read_gib_per_s is not None:
        return (
            f"checkpoints written with {number(run.write_gib_per_s, '.2f')} GiB/s, "
            f"read with {number(run.read_gib_per_s, '.2f')} GiB/s"
        )
    return (
        f"AU {number(run.au_compat_percent, '.2f')} % (strict {number(run.au_strict_percent, '.2f')} %), "
        f"{number(run.samples_per_s_compat, ',.1f')} samples/s"
    )
