"""`penstock results ls`, `rm`, `show`, `page` and `compare`: the runs of a results directory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.option_groups import PAGE, RUNS_FOLDER, write_page
from penstock.cli.options import argument, arguments, flag, group, option, optional_argument, verb
from penstock.cli.parsers import FOLDER, NEW_PAGE, RUN, TEXT, whole
from penstock.cli.run_reports import PAGES, reconciliation_lines
from penstock.cli.terminal import Line, Terminal, TextTable, View, bold
from penstock.environment import TRACE
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.results.history import (
    CatalogedRun,
    HistoryFile,
    delete_runs,
    describe,
    find_run,
    find_run_folder,
    plan_removal,
    read_catalog,
    select_runs,
)
from penstock.results.run_comparison import RunSummary
from penstock.units import format_bytes, format_number, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.results.phase_figures import PhaseFigures
    from penstock.results.run_comparison import RunComparison
    from penstock.results.run_record import RunRecord

_RUN: Final = argument("RUN", RUN, "Run, given by its directory, its id, or part of its name.")


@dataclass(frozen=True, kw_only=True)
class CriteriaOptions:
    """Options that select runs."""

    status: str = option(
        "--status",
        TEXT,
        "Select runs by outcome: finished, failed, interrupted, running, unreadable, unknown, or incomplete "
        "(all whose end was not recorded).",
        default="",
        metavar="OUTCOME,...",
    )
    workload: str = option("--workload", TEXT, "Select runs whose workload's name contains TEXT.", default="")
    older_than: str = option(
        "--older-than",
        TEXT,
        "Select runs that began before this age or date: 2w, 7d, 2026-01-31.",
        default="",
        metavar="AGE|DATE",
    )

    def select(self, runs: Sequence[CatalogedRun]) -> list[CatalogedRun]:
        """Select the runs that meet these options."""
        return select_runs(runs, **asdict(self), now=datetime.now(UTC))


@verb
def list_runs(
    terminal: Terminal,
    *,
    folder: Path = optional_argument("[DIR]", FOLDER, "Results directory.", default="runs"),
    selection: CriteriaOptions = group(CriteriaOptions),
) -> None:
    """List the runs in DIR, newest first, including DLIO's.

    Runs in this machine's history whose directory no longer exists come last. Directories and history entries
    that cannot be read are reported on stderr.

    Examples:

      penstock results ls

      penstock results ls /mnt/results --status incomplete --older-than 2w

      penstock results ls /mnt/results --workload unet3d --json
    """
    catalog, complaints = read_catalog(folder)
    unreadable = [run.why for run in catalog if run.outcome == "unreadable"]
    terminal.notes((*complaints, *unreadable))
    selected = [run for run in selection.select(catalog) if run.outcome != "unreadable"]
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
    # Two lines for each run: its name and outcome, then its main figures.
    lines: list[Line] = [] if here else [f"No runs in {folder}"]
    has_history = HistoryFile(folder).exists()
    for run in here:
        is_unknown = has_history and run.began is None
        lines.append(bold(_describe_run(run, remark=" (not in the history)" if is_unknown else "")))
        if run.summary is not None:
            started = (run.summary.started or "unknown")[:16].replace("T", " ")
            ranks = format_number(run.summary.ranks, "d")
            lines.append(f"  {run.summary.workload}, ranks {ranks}, {started}, {_headline(run.summary)}")
    if gone:
        lines += ["\nStarted here, without a directory", *(f"  {_describe_run(run)}" for run in gone)]
    terminal.result(document, lines)


def _headline(run: RunSummary) -> str:
    """Return the main figures of a run: accelerator utilization, or the rates of writing and reading."""
    rates = _say_rates(run)
    if run.au_compat_percent is None:
        return rates or f"details: `penstock results show {shlex.quote(run.folder)}`"
    compat, strict = (
        "-" if percent is None else f"{percent:.2f} %"
        for percent in (run.au_compat_percent, run.au_strict_percent)
    )
    rate, whose = run.samples_per_s_strict, ""
    if rate is None:
        rate, whose = run.samples_per_s_compat, " by DLIO's formula"
    trained = f"AU {compat} (strict {strict}), {format_number(rate, ',.1f')} samples/s{whose}"
    return f"{trained}; checkpoints {rates}" if rates else trained


def _say_rates(run: RunSummary) -> str:
    rates = (("written", run.write_gib_per_s), ("read", run.read_gib_per_s))
    return ", ".join(f"{done} at {rate:.2f} GiB/s" for done, rate in rates if rate is not None)


def _describe_run(run: CatalogedRun, *, remark: str = "") -> str:
    """Describe a run in one line: its id (unless its name ends with it), its name and its outcome."""
    name = run.folder if run.folder.endswith(run.id) else f"{run.id}  {run.folder}"
    return f"{name}  {run.outcome}{remark}" + (f": {run.why}" if run.why else "")


@verb
def remove(
    terminal: Terminal,
    *,
    runs: tuple[str, ...] = arguments(
        "[RUN...]", TEXT, "Runs, each given by its directory, its id, or part of its name.", is_required=False
    ),
    parent: Path = RUNS_FOLDER,
    selection: CriteriaOptions = group(CriteriaOptions),
    keep_last: int = option("--keep-last", whole(0), "Keep the newest N of the selected runs.", default="0"),
    is_confirmed: bool = flag("--yes", "Confirm the deletion."),
) -> None:
    """Delete runs from a results directory: those named, or all that match the options.

    Without --yes, only lists what it would delete. Never deletes an active run. The history keeps a record
    of deleted runs.

    Examples:

      penstock results rm 1a2b3c --yes

      penstock results rm --older-than 2w --status incomplete --keep-last 3 --results /mnt/results
    """
    # Names and criteria are mutually exclusive, so that their combination surprises nobody.
    if bool(runs) == (any(asdict(selection).values()) or keep_last > 0):
        raise UsageError(
            "Runs are named and selected by options" if runs else "No run is named or selected",
            fix="Give names, or --status, --workload, --older-than, --keep-last; not both.",
        )
    here = [run for run in read_catalog(parent)[0] if run.where == "here"]
    removed, spared = plan_removal(selection.select(here), keep_last)
    if runs:
        named = (find_run(name, here, where=str(parent)) for name in runs)
        removed, spared = list({run.folder: run for run in named}.values()), []
    if is_confirmed:
        delete_runs(parent, removed)
    title = "Deleted" if is_confirmed else "Would be deleted"
    lines = [f"{title}:" if removed else "No run matches."]
    lines += [f"  {_describe_run(run)}" for run in removed]
    lines += [f"  kept: {_describe_run(run)} ({reason})" for run, reason in spared]
    kept = [{**describe(run), "reason": reason} for run, reason in spared]
    terminal.result({"title": title, "runs": list(map(describe, removed)), "spared": kept}, lines)
    if removed and not is_confirmed:
        terminal.note("Nothing was deleted: add --yes to delete these runs.")


@verb
def show(
    terminal: Terminal,
    *,
    run: str = _RUN,
    parent: Path = RUNS_FOLDER,
) -> None:
    """Show one run: how it ended, its epochs, where its time went, and the bottleneck.

    If the run is active or was interrupted, the figures cover its complete blocks: epochs, or parts of epochs
    that end with a checkpoint.

    Examples:

      penstock results show unet3d_h100-20260102-030405-1a2b3c

      penstock results show /mnt/results/mine --json
    """
    show_folder(find_run_folder(run, parent), terminal)


def show_folder(folder: Path, terminal: Terminal) -> None:
    """Show the run in this directory."""
    from penstock.results.checkpoint_files import read_checkpoints, summarize_checkpoints
    from penstock.results.counter_files import read_counters, summarize_activity
    from penstock.results.event_files import read_events, recompute_figures
    from penstock.results.run_comparison import summarize_run
    from penstock.results.run_record import RunOutcome, read_record

    summary = summarize_run(folder)
    terminal.notes(summary.notes)
    record: RunRecord | None = None
    figures: PhaseFigures | None = None
    checkpoints: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    activities: list[dict[str, Any]] = []
    if summary.kind == "penstock":
        record = read_record(folder)
        figures = record.train
        if record.plan.get("kind") in PAGES:  # the run neither trains nor writes checkpoints
            try:
                measured, view = _read_measured(folder, record.plan["kind"])
                if record.outcome is not RunOutcome.FINISHED:
                    terminal.note("This run has not finished; these are the parts that have.")
            except StorageError as error:  # the run did not finish, or another version wrote its figures
                terminal.note(str(error))
        elif figures is None:  # show what the step events of an unfinished run yield
            try:
                figures = recompute_figures(folder, record)
            except StorageError as error:
                terminal.note(str(error))
        with suppress(ObjectNotFound):  # the run has no counters
            activities = summarize_activity(*read_counters(folder), read_events(folder))
        found = read_checkpoints(folder)
        checkpoints = summarize_checkpoints(found) if found else None
    document = {
        **asdict(summary),
        "train": asdict(figures) if figures else None,
        "checkpoint": checkpoints,
        "measured": measured,
        "deliveries": [asdict(delivery) for delivery in record.deliveries] if record else [],
        "preflight": asdict(record.preflight) if record and record.preflight else None,
        "trace": record.settings.get(TRACE) if record else None,
        "activity": activities,
    }
    if measured is None:
        view = (
            _view_training(summary, figures)
            if checkpoints is None
            else _view_checkpoints(summary, checkpoints)
        )
    terminal.result(document, _view_run(summary, view, activities, record))


def _read_measured(folder: Path, kind: str) -> tuple[Mapping[str, Any], View]:
    """Read the figures of a probe or of a key-value cache run, as data and as text."""
    if kind == "probe":
        from penstock.bench.probe import read_probe
        from penstock.cli.storage_probe import view_probe

        probed = read_probe(folder)
        return asdict(probed), view_probe(probed)
    from penstock.cli.kvcache_benchmark import view_cache_run
    from penstock.kvcache.cache_figures import read_cache_run

    document = read_cache_run(folder)
    return document, view_cache_run(document)


def _view_run(
    summary: RunSummary,
    view: View,
    activities: Sequence[Mapping[str, Any]],
    record: RunRecord | None,
) -> View:
    yield bold(summary.id)
    yield from view
    if activities:
        yield TextTable(
            "Hosts meanwhile",
            [
                {
                    "phase": activity["phase"],
                    "took": format_seconds(activity["elapsed_s"]),
                    "hosts": str(activity["hosts"]),
                    "CPU busy": format_number(activity["cpu_busy_share"], ".0%"),
                    "drives read": format_bytes(activity["drives_read_bytes"]),
                    "written": format_bytes(activity["drives_written_bytes"]),
                    "networks received": format_bytes(activity["networks_received_bytes"]),
                    "sent": format_bytes(activity["networks_sent_bytes"]),
                }
                for activity in activities
            ],
        )
    if record is None:
        return
    # The trace, device bytes next to application bytes, and the gates that failed or were skipped.
    facts = [("trace", record.settings.get(TRACE, "")), *reconciliation_lines(record.deliveries)]
    if record.preflight is not None:
        closed = ", ".join(f"{finding.gate} ({finding.verdict})" for finding in record.preflight.closed)
        facts += [("failed gates", closed), ("skipped gates", ", ".join(record.preflight.skipped))]
    yield from (f"  {what:<28}{value}" for what, value in facts if value)


def _view_checkpoints(summary: RunSummary, checkpoints: Mapping[str, Any]) -> View:
    facts = {
        "model": checkpoints["model"],
        "one checkpoint": format_bytes(checkpoints["checkpoint_bytes"]),
        "at": checkpoints["target"],
        **_usual_facts(summary),
        "verified": "all right" if checkpoints["is_right"] else "WRONG BYTES: see checkpoints.json",
        "gap before reads": "-" if checkpoints["gap_s"] is None else format_seconds(checkpoints["gap_s"]),
        "folder": summary.folder,
    }
    yield from (f"  {what:<28}{value}" for what, value in facts.items())
    rows = [
        {
            "": name,
            "checkpoints": str(direction["checkpoints"]),
            "bytes": format_bytes(direction["bytes"]),
            "took": format_seconds(direction["duration_s"]),
            "GiB/s": format_number(direction["gib_per_s"], ".2f"),
            "mean of each": format_number(direction["mean_gib_per_s"], ".2f"),
            "p99": f"{direction['p99_ms']:.1f} ms",
            "held up by": direction["bottleneck"],
        }
        for name, direction in (("write", checkpoints["write"]), ("read", checkpoints["read"]))
        if direction is not None
    ]
    yield TextTable("Checkpoints", rows)


def _view_training(summary: RunSummary, figures: PhaseFigures | None) -> View:
    from penstock.results.phase_figures import epoch_rows, time_rows

    read = "-" if summary.read_bytes is None else format_bytes(summary.read_bytes)
    rate = "-" if summary.read_bytes_per_s is None else format_rate(summary.read_bytes_per_s)
    facts = {
        "workload": summary.workload,
        **_usual_facts(summary),
        "AU as DLIO": format_number(summary.au_compat_percent, ".2f"),
        "AU strict": format_number(summary.au_strict_percent, ".2f"),
        "samples/s as DLIO": format_number(summary.samples_per_s_compat, ",.1f"),
        "samples/s over all time": format_number(summary.samples_per_s_strict, ",.1f"),
        "I/O as DLIO, nominal MiB/s": format_number(summary.io_compat_mib_per_s, ",.1f"),
        "bytes really read": f"{read}, {rate}",
        "folder": summary.folder,
    }
    if figures is None:  # DLIO's runs may have only checkpoints
        facts |= {"checkpoints": _say_rates(summary) or "-"}
    for what, value in facts.items():
        if figures is not None or not value.startswith("-"):
            yield f"  {what:<28}{value}"
    if figures is None:
        return
    yield TextTable("Epochs", epoch_rows(figures.epochs))
    if figures.times is not None:
        yield TextTable("Times over all ranks", time_rows(figures.times))
    if figures.verdict is not None:
        yield bold(f"Bottleneck: {figures.verdict.bottleneck}")
        yield from (f"  {sentence}" for sentence in figures.verdict.evidence)


def _usual_facts(summary: RunSummary) -> dict[str, str]:
    return {
        "started": summary.started or "-",
        "ranks": format_number(summary.ranks, "d"),
        "outcome": f"{summary.outcome}: {summary.why}" if summary.why else summary.outcome,
    }


@verb
def page(
    terminal: Terminal,
    *,
    run: str = _RUN,
    parent: Path = RUNS_FOLDER,
    out: Path | None = option(
        "--out", NEW_PAGE, "Write this page (default: report.html in the run's directory).", short="-o"
    ),
) -> None:
    """Write a run's HTML report: whether it passed, what limited it and since when, with charts.

    A run writes its report when it ends, unless it belongs to a submission or you chose the exact path of its
    directory. Use this command for such a run, for one that is still active or was killed, or to write the
    report again.

    Examples:

      penstock results page unet3d_h100-20260102-030405-1a2b3c

      penstock results page 1a2b3c --results /mnt/results -o run.html
    """
    from penstock.reports.page import write_report
    from penstock.results.run_folder import PAGE_FILE
    from penstock.results.run_page import draw_run

    folder = find_run_folder(run, parent)
    path = out or folder / PAGE_FILE
    write_report(draw_run(folder, PAGES), path)
    terminal.result({"page": str(path)}, [f"wrote {path}"])


@verb
def compare(
    terminal: Terminal,
    *,
    runs: tuple[str, ...] = arguments("RUN RUN...", RUN, "Two or more runs, as for `penstock results show`."),
    parent: Path = RUNS_FOLDER,
    page: Path | None = PAGE,
) -> None:
    """Compare runs side by side, each with the first.

    Starts with differences that make the comparison invalid, e.g. in workload, number of ranks, data set or
    batch size. Settings that are usually varied on purpose (threads, storage, directories) follow.

    Examples:

      penstock results compare 1a2b3c 4d5e6f

      penstock results compare /mnt/a/run1 /mnt/b/run1 --page compared.html
    """
    from penstock.results.run_comparison import compare_runs, make_comparison_page, summarize_run

    if len(runs) < 2:
        raise UsageError("A comparison needs at least two runs", fix="Name another run.")
    comparison = compare_runs([summarize_run(find_run_folder(run, parent)) for run in runs])
    document = {"is_comparable": not comparison.obstacles, **asdict(comparison)}
    for run in document["runs"]:
        del run["settings"]
    terminal.result(document, _view_comparison(comparison))
    write_page(page, lambda: make_comparison_page(comparison), terminal)


def _view_comparison(comparison: RunComparison) -> View:
    from penstock.results.run_comparison import difference_rows, figure_rows

    names = [str(position) for position, _ in enumerate(comparison.runs, start=1)]
    for name, run in zip(names, comparison.runs, strict=True):
        yield f"{name}: {run.id} ({run.workload}, {run.outcome}), {run.folder}"
    if comparison.obstacles:
        yield bold("Not comparable: these runs differ in their request or their outcome.")
    for title, differences in (
        ("Requested differently", comparison.obstacles),
        ("Set differently", comparison.varied),
    ):
        if differences:
            yield TextTable(title, difference_rows(differences, names))
    yield TextTable("Figures", figure_rows(comparison, names))
