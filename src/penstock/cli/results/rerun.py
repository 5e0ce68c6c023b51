"""`penstock results rerun`: a run once more, by its own command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.results.words import Parent
from penstock.cli.terminal import JsonFlag, Terminal
from penstock.environment import process_environment

if TYPE_CHECKING:
    from rich.console import Console


def rerun(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run by id, folder, or a part of its name.")],
    *,
    parent: Parent = Path("results"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be run, and where.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give a run's command once more, in the folder where it was given, and become that command.

    The command is shown first, with whatever settings (AWS_*, PENSTOCK_*) are no longer the same. Runs in the
    trash, and those whose folder is gone, can be repeated, too. --json is for --dry-run.

    Examples:

      penstock results rerun 1a2b3c --dry-run

      penstock results rerun 1a2b3c --results /mnt/results
    """
    from penstock.errors import UsageError
    from penstock.results.history.kept import kept_runs, named_run
    from penstock.results.history.replay import plan_replay
    from penstock.results.provenance import redacted_settings

    if as_json and not dry_run:
        raise UsageError("What is printed is the command's own", where="--json", fix="Use it with --dry-run.")
    terminal = Terminal(as_json=as_json)
    kept = named_run(run, kept_runs(parent).runs, where=str(parent))
    replay = plan_replay(kept, redacted_settings(process_environment()))
    for note in replay.notes:
        terminal.note(note)

    def draw(console: Console) -> None:
        console.print(f"cd {replay.working_folder}", markup=False)
        console.print(replay.shown, markup=False)

    if dry_run:
        words = {"run": kept.id, "command": replay.shown, "working_folder": replay.working_folder}
        terminal.result({**words, "notes": list(replay.notes)}, draw)
        return
    terminal.note(f"In {replay.working_folder}: {replay.shown}")
    os.chdir(replay.working_folder)
    # Signals, exit code and terminal are the command's own only if no process stands in between.
    os.execv(replay.arguments[0], replay.arguments)  # noqa: S606 - no shell is wanted
