"""`penstock results rm` and `restore`: runs into the trash, and back."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.results.words import OlderThan, Parent, Status, Workload, document, line
from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.results.history.kept import KeptRun
    from penstock.results.history.selection import Criteria, Selection

_Runs = Annotated[
    list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs by id, folder, or a part of the name.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]


def remove(
    runs: _Runs = None,
    *,
    parent: Parent = Path("results"),
    status: Status = "",
    workload: Workload = "",
    older_than: OlderThan = "",
    keep_last: Annotated[
        int, typer.Option(metavar="N", min=0, help="Spare the newest N of those that are meant.")
    ] = 0,
    empty_trash: Annotated[
        bool, typer.Option("--empty-trash", help="Delete what is in the trash, for good; needs --yes.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Yes, delete what is in the trash.")] = False,
    dry_run: _DryRun = False,
    as_json: JsonFlag = False,
) -> None:
    """Move runs into the trash of their results folder: named ones, or all that fit the options.

    Runs that go on are never taken. The whole removal is one batch, which `penstock results restore` brings
    back. Nothing is deleted until the trash is emptied.

    Examples:

      penstock results rm 1a2b3c

      penstock results rm --older-than 2w --status incomplete --keep-last 3 --results /mnt/results

      penstock results rm --empty-trash --yes
    """
    from penstock.errors import UsageError
    from penstock.results.history.selection import criteria
    from penstock.results.history.trash import remove as move_to_trash

    now = datetime.now(UTC)
    terminal = Terminal(as_json=as_json)
    wanted = criteria(status=status, workload=workload, older_than=older_than, now=now)
    if empty_trash:
        if runs:
            raise UsageError("The trash is emptied by options, not run by run", where="--empty-trash")
        _empty(parent, wanted, keep_last=keep_last, is_sure=yes and not dry_run, terminal=terminal)
        if not (yes or dry_run):
            raise UsageError("Nothing was deleted yet", fix="Say --yes: what is deleted cannot be restored.")
        return
    selection = _selection(parent, runs or [], wanted, keep_last=keep_last)
    goes = selection.taken and not dry_run
    batch = move_to_trash(parent, selection.taken, now) if goes else None
    title = f"Into the trash, batch {batch}" if goes else "Would go into the trash"
    _tell(terminal, selection, title, {"batch": batch})


def restore(
    names: Annotated[
        list[str], typer.Argument(metavar="RUN|BATCH...", help="Removed runs, or whole batches of them.")
    ],
    *,
    parent: Parent = Path("results"),
    as_json: JsonFlag = False,
) -> None:
    """Bring runs back from the trash; nothing moves where one of their names is taken.

    Examples:

      penstock results restore 1a2b3c

      penstock results restore 20260102-030405-4d5e --results /mnt/results
    """
    from penstock.results.history.kept import Where, kept_runs, named_run
    from penstock.results.history.trash import restore as bring_back

    terminal = Terminal(as_json=as_json)
    removed = kept_runs(parent).at(Where.TRASH)
    meant: dict[str, KeptRun] = {}
    for name in names:
        batch = [run for run in removed if run.batch == name]
        for run in batch or [named_run(name, removed, where=f"the trash of {parent}")]:
            meant[str(run.path)] = run
    runs = list(meant.values())
    bring_back(parent, runs, datetime.now(UTC))

    def draw(console: Console) -> None:
        for run in runs:
            console.print(f"restored {run.folder}", markup=False)

    terminal.result({"restored": [run.folder for run in runs]}, draw)


def _selection(parent: Path, names: Sequence[str], wanted: Criteria, *, keep_last: int) -> Selection:
    """What a removal takes. Names and criteria exclude each other, so that nobody guesses which counts."""
    from penstock.errors import UsageError
    from penstock.results.history.kept import Where, kept_runs, named_run
    from penstock.results.history.selection import Selection, select

    asks = wanted.ask_something or keep_last > 0
    if bool(names) == asks:
        raise UsageError(
            "Runs are named, or asked for by options" if names else "No run is meant",
            fix="Give ids, or --status, --workload, --older-than, --keep-last; not both.",
        )
    here = kept_runs(parent).at(Where.HERE)
    if not names:
        return select(here, wanted, keep_last=keep_last)
    named = {run.folder: run for run in (named_run(name, here, where=str(parent)) for name in names)}
    return Selection(taken=tuple(named.values()), spared=())


def _empty(parent: Path, wanted: Criteria, *, keep_last: int, is_sure: bool, terminal: Terminal) -> None:
    from penstock.results.history.kept import Where, kept_runs
    from penstock.results.history.selection import select
    from penstock.results.history.trash import delete

    selection = select(kept_runs(parent).at(Where.TRASH), wanted, keep_last=keep_last)
    if is_sure:
        delete(parent, selection.taken, datetime.now(UTC))
    _tell(terminal, selection, "Deleted for good" if is_sure else "Would be deleted for good", {})


def _tell(terminal: Terminal, selection: Selection, title: str, result: dict[str, Any]) -> None:
    def draw(console: Console) -> None:
        console.print(f"{title}:" if selection.taken else "Nothing is meant.", markup=False)
        for run in selection.taken:
            console.print(f"  {line(run)}", markup=False)
        for run, reason in selection.spared:
            console.print(f"  stays: {line(run)} ({reason})", markup=False)

    spared = [{**document(run), "reason": reason} for run, reason in selection.spared]
    terminal.result(
        {"title": title, "runs": [document(run) for run in selection.taken], "spared": spared, **result}, draw
    )
