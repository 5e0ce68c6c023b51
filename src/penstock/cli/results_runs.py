"""`penstock results ls` and `rm`: the runs of a directory, and its history."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from penstock.cli.option_groups import ParentOption
from penstock.cli.options import arguments, flag, group, option, optional_argument, verb
from penstock.cli.parsers import FOLDER, TEXT, whole
from penstock.cli.terminal import Terminal, View, bold, format_number
from penstock.errors import UsageError
from penstock.results.history import HistoryFile
from penstock.results.run_catalog import (
    CatalogedRun,
    RunCriteria,
    delete_runs,
    describe,
    find_run,
    plan_removal,
    read_catalog,
)
from penstock.results.run_comparison import RunSummary


@dataclass(frozen=True, kw_only=True)
class CriteriaOptions:
    """Options that select runs."""

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

    def criteria(self) -> RunCriteria:
        """The criteria of these options."""
        return RunCriteria.parse(
            status=self.status, workload=self.workload, older_than=self.older_than, now=datetime.now(UTC)
        )


@dataclass(frozen=True, kw_only=True)
class _ListOptions:
    folder: Path = optional_argument("[DIR]", FOLDER, "Results directory.", default="runs")
    selection: CriteriaOptions = group(CriteriaOptions)


@verb(_ListOptions)
def list_runs(options: _ListOptions, terminal: Terminal) -> None:
    """List the runs in DIR, newest first, including runs of DLIO.

    Runs that began here and have no directory any more are listed after the others. Directories and history
    entries that cannot be read are reported on stderr.

    Examples:

      penstock results ls

      penstock results ls /mnt/results --status incomplete --older-than 2w

      penstock results ls /mnt/results --workload unet3d --json
    """
    criteria = options.selection.criteria()
    catalog, complaints = read_catalog(options.folder)
    unreadable = [run.why for run in catalog if run.outcome == "unreadable"]
    terminal.notes((*complaints, *unreadable))
    selected = [run for run in catalog if criteria.fit(run) and run.outcome != "unreadable"]
    here, gone, deleted = ([run for run in selected if run.where == w] for w in ("here", "gone", "deleted"))
    runs = []
    for run in here:
        figures = asdict(run.summary) if run.summary else {}
        figures.pop("settings", None)
        runs.append({**describe(run), **figures})
    document = {
        "runs": runs,
        "without_folder": list(map(describe, gone)),
        "deleted": list(map(describe, deleted)),
        "unreadable": unreadable,
        "history": complaints,
    }
    terminal.result(document, _view_list(options.folder, here, gone))


def _view_list(folder: Path, here: Sequence[CatalogedRun], gone: Sequence[CatalogedRun]) -> View:
    """Two lines a run: its name and outcome, then its main figures."""
    if not here:
        yield f"No runs in {folder}"
    has_history = HistoryFile(folder).exists()
    for run in here:
        is_unknown = has_history and run.began is None
        yield bold(_describe_run(run, remark=" (not in the history)" if is_unknown else ""))
        if run.summary is not None:
            started = (run.summary.started or "unknown")[:16].replace("T", " ")
            ranks = format_number(run.summary.ranks, "d")
            yield f"  {run.summary.workload}, ranks {ranks}, {started}, {_headline(run.summary)}"
    if gone:
        yield "\nStarted here, without a directory"
        yield from (f"  {_describe_run(run)}" for run in gone)


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
    is_confirmed: bool = flag("--yes", "Confirm the deletion.")
    is_dry: bool = flag("--dry-run", "Show what would be deleted, and delete nothing.")


@verb(_RemoveOptions)
def remove(options: _RemoveOptions, terminal: Terminal) -> None:
    """Delete runs from a results directory: named runs, or all that match the options.

    Without --yes the runs are only listed. Runs that are still active are never deleted. The history keeps
    what is known of deleted runs.

    Examples:

      penstock results rm 1a2b3c --yes

      penstock results rm --older-than 2w --status incomplete --keep-last 3 --results /mnt/results --dry-run
    """
    criteria, parent = options.selection.criteria(), options.parent.path
    # Names and criteria are mutually exclusive, so that neither surprises.
    if bool(options.runs) == (criteria.is_selective or options.keep_last > 0):
        raise UsageError(
            "Runs are named and selected by options" if options.runs else "No run is named or selected",
            fix="Give names, or --status, --workload, --older-than, --keep-last; not both.",
        )
    here = [run for run in read_catalog(parent)[0] if run.where == "here"]
    removed, spared = plan_removal(here, criteria, keep_last=options.keep_last)
    if options.runs:
        named = (find_run(name, here, where=str(parent)) for name in options.runs)
        removed, spared = list({run.folder: run for run in named}.values()), []
    is_deleting = options.is_confirmed and not options.is_dry
    if is_deleting:
        delete_runs(parent, removed)
    title = "Deleted" if is_deleting else "Would be deleted"
    lines = [f"{title}:" if removed else "No run matches."]
    lines += [f"  {_describe_run(run)}" for run in removed]
    lines += [f"  kept: {_describe_run(run)} ({reason})" for run, reason in spared]
    kept = [{**describe(run), "reason": reason} for run, reason in spared]
    terminal.result({"title": title, "runs": list(map(describe, removed)), "spared": kept}, lines)
    if removed and not (options.is_confirmed or options.is_dry):
        raise UsageError("Nothing was deleted", fix="Add --yes to delete these runs.")
