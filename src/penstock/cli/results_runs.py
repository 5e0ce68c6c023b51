"""`penstock results ls`, `rm`, `restore` and `rerun`: the runs of a directory, its trash and its history."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.cli.option_groups import ParentOption
from penstock.cli.options import argument, arguments, flag, group, option, optional_argument, verb
from penstock.cli.parsers import FOLDER, RUN, TEXT, whole
from penstock.cli.terminal import Terminal, View, bold, format_number
from penstock.environment import process_environment
from penstock.errors import UsageError
from penstock.results.history import run_selection, trash
from penstock.results.history.rerun import plan_rerun
from penstock.results.history.run_catalog import CatalogedRun, FolderPlace, RunCatalog, find_run, read_catalog
from penstock.results.provenance import redact_settings
from penstock.results.run_comparison import RunSummary


@dataclass(frozen=True, kw_only=True)
class CriteriaOptions:
    """Which runs are selected."""

    status: str = option(
        "--status",
        TEXT,
        "Select runs by how they ended: finished, failed, interrupted, running, unreadable, unknown, or "
        "incomplete (all whose end was not recorded).",
        default="",
        metavar="OUTCOME,...",
    )
    workload: str = option("--workload", TEXT, "Select runs whose workload's name contains TEXT.", default="")
    older_than: str = option(
        "--older-than",
        TEXT,
        "Select runs that began before: 2w, 7d, 2026-01-31.",
        default="",
        metavar="AGE|DATE",
    )

    def criteria(self, now: datetime) -> run_selection.RunCriteria:
        """The criteria of these options."""
        return run_selection.parse_criteria(
            status=self.status, workload=self.workload, older_than=self.older_than, now=now
        )


@dataclass(frozen=True, kw_only=True)
class _ListOptions:
    folder: Path = optional_argument("[DIR]", FOLDER, "Results directory.", default="runs")
    selection: CriteriaOptions = group(CriteriaOptions)
    shows_deleted: bool = flag("--all", "List runs that were deleted from the trash as well.")


@verb(_ListOptions)
def list_runs(options: _ListOptions, terminal: Terminal) -> None:
    """List the runs in DIR, newest first; runs of DLIO are among them.

    Runs in the trash, and runs that began here and have no directory any more, are listed after the others.
    Directories and history entries that cannot be read are reported on stderr.

    Examples:

      penstock results ls

      penstock results ls /mnt/results --status incomplete --older-than 2w

      penstock results ls /mnt/results --workload unet3d --json
    """
    criteria = options.selection.criteria(datetime.now(UTC))
    catalog = read_catalog(options.folder)
    unreadable = [run.why for run in catalog.runs if run.outcome == "unreadable"]
    terminal.notes((*catalog.complaints, *unreadable))
    selected = [run for run in catalog.runs if run_selection.fits(run, criteria)]
    terminal.result(
        _list_document(selected, catalog, unreadable),
        _view_list(options, selected, catalog),
    )


def _list_document(
    selected: Sequence[CatalogedRun], catalog: RunCatalog, unreadable: Sequence[str]
) -> dict[str, Any]:
    by_place: dict[str, list[dict[str, Any]]] = {"here": [], "trash": [], "gone": [], "deleted": []}
    for run in selected:
        figures = asdict(run.summary) if run.summary else {}
        figures.pop("settings", None)
        if run.where.value != "here" or run.outcome != "unreadable":
            by_place[run.where.value].append({**_run_document(run), **figures})
    return {
        "runs": by_place["here"],
        "removed": by_place["trash"],
        "without_folder": by_place["gone"],
        "deleted": by_place["deleted"],
        "unreadable": list(unreadable),
        "history": list(catalog.complaints),
    }


def _view_list(options: _ListOptions, selected: Sequence[CatalogedRun], catalog: RunCatalog) -> View:
    by_place = {
        place: [run for run in selected if run.where.value == place]
        for place in ("here", "trash", "gone", "deleted")
    }
    readable = [run for run in by_place["here"] if run.outcome != "unreadable"]
    if not readable:
        yield f"No runs in {options.folder}"
    for run in readable:
        yield from _view_run(run, catalog)
    yield from _view_section("Removed: `penstock results restore` brings them back", by_place["trash"])
    yield from _view_section("Started here, without a directory", by_place["gone"])
    if options.shows_deleted:
        yield from _view_section("Deleted permanently", by_place["deleted"])
    elif by_place["deleted"]:
        yield f"\n{len(by_place['deleted'])} more were deleted permanently: --all lists them"


def _view_section(title: str, runs: Sequence[CatalogedRun]) -> View:
    if runs:
        yield f"\n{title}"
    for run in runs:
        batch = f", batch {run.batch}" if run.batch else ""
        yield f"  {_describe_run(run)}{batch}"


def _view_run(run: CatalogedRun, catalog: RunCatalog) -> View:
    """Two lines a run: its name and outcome, then its main figures."""
    is_unknown = catalog.has_history and run.began is None
    yield bold(_describe_run(run, remark=" (not in the history)" if is_unknown else ""))
    if run.summary is not None:
        started = (run.summary.started or "unknown")[:16].replace("T", " ")
        ranks = format_number(run.summary.ranks, "d")
        yield f"  {run.summary.workload}, ranks {ranks}, {started}, {_headline(run.summary)}"


def _headline(run: RunSummary) -> str:
    """The main figures of a run: the throughput of checkpoints, or accelerator utilization."""
    if run.write_gib_per_s is not None or run.read_gib_per_s is not None:
        return (
            f"checkpoints written with {format_number(run.write_gib_per_s, '.2f')} GiB/s, "
            f"read with {format_number(run.read_gib_per_s, '.2f')} GiB/s"
        )
    compat, strict = (
        "-" if percent is None else f"{percent:.2f} %"
        for percent in (run.au_compat_percent, run.au_strict_percent)
    )
    return f"AU {compat} (strict {strict}), {format_number(run.samples_per_s_compat, ',.1f')} samples/s"


def _run_document(run: CatalogedRun) -> dict[str, Any]:
    """What is known of a run beside its figures, as JSON."""
    return {
        "run": run.id,
        "folder": str(run.path) if run.path else None,
        "name": run.folder,
        "where": run.where.value,
        "batch": run.batch or None,
        "outcome": run.outcome,
        "why": run.why,
        "workload": run.workload,
        "started": run.started.isoformat() if run.started else None,
        "has_entry": run.began is not None,
        "command": list(run.began.command) if run.began else None,
        "working_folder": run.began.working_folder if run.began else None,
    }


def _describe_run(run: CatalogedRun, *, remark: str = "") -> str:
    """A run in one line: its id, unless its name ends with that, its name and its outcome."""
    name = run.folder if run.folder.endswith(run.id) else f"{run.id}  {run.folder}"
    return f"{name}  {run.outcome}{remark}" + (f": {run.why}" if run.why else "")


@dataclass(frozen=True, kw_only=True)
class _RemoveOptions:
    runs: tuple[str, ...] = arguments(
        "[RUN...]", TEXT, "Runs by id, directory, or a part of the name.", is_required=False
    )
    parent: ParentOption = group(ParentOption)
    selection: CriteriaOptions = group(CriteriaOptions)
    keep_last: int = option("--keep-last", whole(0), "Keep the newest N of the selected runs.", default="0")
    empties_trash: bool = flag("--empty-trash", "Delete the trash permanently; needs --yes.")
    is_confirmed: bool = flag("--yes", "Confirm that the trash is deleted.")
    is_dry: bool = flag("--dry-run", "Show what would be removed, and remove nothing.")


@verb(_RemoveOptions)
def remove(options: _RemoveOptions, terminal: Terminal) -> None:
    """Move runs to the trash of their results directory: named runs, or all that match the options.

    Runs that are still active are never removed. All runs of one command are a batch, which `penstock results
    restore` brings back. Nothing is deleted until the trash is emptied.

    Examples:

      penstock results rm 1a2b3c

      penstock results rm --older-than 2w --status incomplete --keep-last 3 --results /mnt/results

      penstock results rm --empty-trash --yes
    """
    now = datetime.now(UTC)
    criteria = options.selection.criteria(now)
    if options.empties_trash:
        _empty_trash(options, criteria, terminal)
        return
    selection = _select(options, criteria)
    is_removing = selection.removed and not options.is_dry
    batch = trash.move_to_trash(options.parent.path, selection.removed, now) if is_removing else None
    title = f"Moved to the trash, batch {batch}" if is_removing else "Would move to the trash"
    _report_removal(terminal, selection, title, {"batch": batch})


def _select(options: _RemoveOptions, criteria: run_selection.RunCriteria) -> run_selection.RemovalPlan:
    """The runs to remove. Names and criteria are mutually exclusive, so that neither surprises."""
    has_criteria = criteria.is_selective or options.keep_last > 0
    if bool(options.runs) == has_criteria:
        raise UsageError(
            "Runs are named and selected by options" if options.runs else "No run is named or selected",
            fix="Give names, or --status, --workload, --older-than, --keep-last; not both.",
        )
    parent = options.parent.path
    here = read_catalog(parent).at(FolderPlace.HERE)
    if not options.runs:
        return run_selection.plan_removal(here, criteria, keep_last=options.keep_last)
    named = {run.folder: run for run in (find_run(name, here, where=str(parent)) for name in options.runs)}
    return run_selection.RemovalPlan(removed=tuple(named.values()), spared=())


def _empty_trash(options: _RemoveOptions, criteria: run_selection.RunCriteria, terminal: Terminal) -> None:

    if options.runs:
        raise UsageError(
            "--empty-trash takes no runs", where="--empty-trash", fix="Select runs by --status and the like."
        )
    parent = options.parent.path
    selection = run_selection.plan_removal(
        read_catalog(parent).at(FolderPlace.TRASH), criteria, keep_last=options.keep_last
    )
    is_deleting = options.is_confirmed and not options.is_dry
    if is_deleting:
        trash.delete_from_trash(parent, selection.removed, datetime.now(UTC))
    title = "Deleted permanently" if is_deleting else "Would be deleted permanently"
    _report_removal(terminal, selection, title, {})
    if not (options.is_confirmed or options.is_dry):
        raise UsageError("Nothing was deleted", fix="Add --yes to delete permanently.")


def _report_removal(
    terminal: Terminal, selection: run_selection.RemovalPlan, title: str, result: dict[str, Any]
) -> None:
    lines = [f"{title}:" if selection.removed else "No run matches."]
    lines += [f"  {_describe_run(run)}" for run in selection.removed]
    lines += [f"  kept: {_describe_run(run)} ({reason})" for run, reason in selection.spared]
    spared = [{**_run_document(run), "reason": reason} for run, reason in selection.spared]
    runs = [_run_document(run) for run in selection.removed]
    terminal.result({"title": title, "runs": runs, "spared": spared, **result}, lines)


@dataclass(frozen=True, kw_only=True)
class _RestoreOptions:
    names: tuple[str, ...] = arguments("RUN|BATCH...", TEXT, "Removed runs, or whole batches of them.")
    parent: ParentOption = group(ParentOption)


@verb(_RestoreOptions)
def restore(options: _RestoreOptions, terminal: Terminal) -> None:
    """Restore runs from the trash; nothing is moved if one of their names is taken.

    Examples:

      penstock results restore 1a2b3c

      penstock results restore 20260102-030405-4d5e --results /mnt/results
    """
    parent = options.parent.path
    removed = read_catalog(parent).at(FolderPlace.TRASH)
    selected: dict[str, CatalogedRun] = {}
    for name in options.names:
        batch = [run for run in removed if run.batch == name]
        for run in batch or [find_run(name, removed, where=f"the trash of {parent}")]:
            selected[str(run.path)] = run
    runs = list(selected.values())
    trash.restore_from_trash(parent, runs, datetime.now(UTC))
    names = [run.folder for run in runs]
    terminal.result({"restored": names}, [f"restored {name}" for name in names])


@dataclass(frozen=True, kw_only=True)
class _RerunOptions:
    run: str = argument("RUN", RUN, "Run by id, directory, or a part of its name.")
    parent: ParentOption = group(ParentOption)
    is_dry: bool = flag("--dry-run", "Show the command and its directory, and run nothing.")


@verb(_RerunOptions)
def rerun(options: _RerunOptions, terminal: Terminal) -> None:
    """Repeat a run: execute its command again in the directory where it was started.

    The command is printed first, with the settings (AWS_*, PENSTOCK_*) that have changed since. Runs in the
    trash, and runs whose directory is gone, can be repeated as well. --json needs --dry-run.

    Examples:

      penstock results rerun 1a2b3c --dry-run

      penstock results rerun 1a2b3c --results /mnt/results
    """
    if terminal.as_json and not options.is_dry:
        raise UsageError(
            "The output is that of the repeated command", where="--json", fix="Use --json with --dry-run."
        )
    parent = options.parent.path
    run = find_run(options.run, read_catalog(parent).runs, where=str(parent))
    replay = plan_rerun(run, redact_settings(process_environment()))
    terminal.notes(replay.notes)

    if options.is_dry:
        lines = [f"cd {replay.working_folder}", replay.command]
        document = {"run": run.id, "command": replay.command, "working_folder": replay.working_folder}
        terminal.result({**document, "notes": list(replay.notes)}, lines)
        return
    terminal.note(f"In {replay.working_folder}: {replay.command}")
    os.chdir(replay.working_folder)
    # Signals, exit code and terminal are the command's own only if no process stands in between.
    os.execv(replay.arguments[0], replay.arguments)  # noqa: S606 - no shell is wanted
