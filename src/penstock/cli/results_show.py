"""`penstock results show`, `page` and `compare`: one run in detail, and several side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import PageOption, ParentOption
from penstock.cli.options import argument, arguments, group, option, verb
from penstock.cli.parsers import FILE, RUN
from penstock.cli.run_reports import reconciliation_lines
from penstock.cli.terminal import Terminal, TextTable, View, bold, format_number
from penstock.environment import TRACE
from penstock.errors import ObjectNotFound, StorageError, UsageError
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.reports.report import Report
    from penstock.results.phase_figures import PhaseFigures
    from penstock.results.run_comparison import RunComparison, RunSummary
    from penstock.results.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class _ShowOptions:
    run: str = argument("RUN", RUN, "Run by directory, id, or a part of its name.")
    parent: ParentOption = group(ParentOption)


@verb(_ShowOptions)
def show(options: _ShowOptions, terminal: Terminal) -> None:
    """Show one run: how it ended, its epochs, where its time went, and the bottleneck.

    The figures of a run that is active or was interrupted are those of its complete blocks.

    Examples:

      penstock results show unet3d_h100-20260102-030405-1a2b3c

      penstock results show /mnt/results/mine --json
    """
    from penstock.results.run_catalog import find_run_folder

    show_folder(find_run_folder(options.run, options.parent.path), terminal)


def show_folder(folder: Path, terminal: Terminal) -> None:
    """Show the run in this directory."""
    from penstock.results.checkpoint_files import read_checkpoints, summarize_checkpoints
    from penstock.results.run_comparison import summarize_run
    from penstock.results.run_record import read_record

    view = summarize_run(folder)
    terminal.notes(view.notes)
    figures = _read_figures(folder, view, terminal)
    record = read_record(folder) if view.kind == "penstock" else None
    activities = _read_activities(folder) if record else []
    found = read_checkpoints(folder) if view.kind == "penstock" else None
    checkpoints = summarize_checkpoints(found) if found else None
    document = {
        **asdict(view),
        "train": asdict(figures) if figures else None,
        "checkpoint": checkpoints,
        "deliveries": [asdict(delivery) for delivery in record.deliveries] if record else [],
        "preflight": asdict(record.preflight) if record and record.preflight else None,
        "trace": record.settings.get(TRACE) if record else None,
        "activity": activities,
    }

    terminal.result(document, _view_run(view, figures, checkpoints, activities, record))


def _view_run(
    view: RunSummary,
    figures: PhaseFigures | None,
    checkpoints: Mapping[str, Any] | None,
    activities: Sequence[Mapping[str, Any]],
    record: RunRecord | None,
) -> View:
    yield bold(view.id)
    if checkpoints is None:
        yield from _view_training(view, figures)
    else:
        yield from _view_checkpoints(view, checkpoints)
    if activities:
        yield TextTable("Hosts meanwhile", [_activity_row(activity) for activity in activities])
    if record is not None:
        yield from _view_facts(_context_lines(record))


def _view_facts(facts: Iterable[tuple[str, str]]) -> View:
    for what, value in facts:
        yield f"  {what:<28}{value}"


def _read_figures(folder: Path, view: RunSummary, terminal: Terminal) -> PhaseFigures | None:
    """The recorded figures, or what the step events of an unfinished run yield."""
    from penstock.results.event_files import recompute_figures
    from penstock.results.run_record import read_record

    if view.kind != "penstock":
        return None
    record = read_record(folder)
    if record.train is not None:
        return record.train
    try:
        return recompute_figures(folder, record)
    except StorageError as error:
        terminal.note(str(error))
        return None


def _read_activities(folder: Path) -> list[dict[str, Any]]:
    """The activity of hosts in each phase; nothing for a run without counters."""
    from penstock.results.counter_files import read_counters, summarize_activity
    from penstock.results.event_files import read_events

    try:
        return summarize_activity(*read_counters(folder), read_events(folder))
    except ObjectNotFound:
        return []


def _activity_row(activity: Mapping[str, Any]) -> dict[str, str]:
    return {
        "phase": activity["phase"],
        "took": format_seconds(activity["elapsed_s"]),
        "hosts": str(activity["hosts"]),
        "CPU busy": format_number(activity["cpu_busy_share"], ".0%"),
        "drives read": format_bytes(activity["drives_read_bytes"]),
        "written": format_bytes(activity["drives_written_bytes"]),
        "networks received": format_bytes(activity["networks_received_bytes"]),
        "sent": format_bytes(activity["networks_sent_bytes"]),
    }


def _context_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The trace, device bytes next to application bytes, and the gates that were closed or skipped."""
    if trace := record.settings.get(TRACE):
        yield "trace", trace
    yield from reconciliation_lines(record.deliveries)
    if record.preflight is None:
        return
    closed = ", ".join(f"{finding.gate} ({finding.verdict})" for finding in record.preflight.closed)
    if closed:
        yield "gates closed", closed
    if record.preflight.skipped:
        yield "gates skipped", ", ".join(record.preflight.skipped)


def _describe_outcome(view: RunSummary) -> str:
    return f"{view.outcome}: {view.why}" if view.why else view.outcome


def _view_checkpoints(view: RunSummary, checkpoints: Mapping[str, Any]) -> View:
    facts = {
        "model": checkpoints["model"],
        "one checkpoint": format_bytes(checkpoints["checkpoint_bytes"]),
        "at": checkpoints["target"],
        "started": view.started or "-",
        "ranks": format_number(view.ranks, "d"),
        "outcome": _describe_outcome(view),
        "verified": "all right" if checkpoints["is_right"] else "WRONG BYTES: see checkpoints.json",
        "gap before reads": "-" if checkpoints["gap_s"] is None else format_seconds(checkpoints["gap_s"]),
        "folder": view.folder,
    }
    yield from _view_facts(facts.items())
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


def _view_training(view: RunSummary, figures: PhaseFigures | None) -> View:
    from penstock.results.phase_figures import time_rows

    facts = _training_facts(view)
    if figures is None:
        # Not every run trains: one of a cache has no figures of epochs.
        yield from _view_facts((name, value) for name, value in facts.items() if not value.startswith("-"))
        return
    yield from _view_facts(facts.items())
    yield TextTable("Epochs", _epoch_rows(figures))
    if figures.times is not None:
        yield TextTable("Times over all ranks", time_rows(figures.times))
    if figures.verdict is not None:
        yield bold(f"Bottleneck: {figures.verdict.bottleneck}")
        for sentence in figures.verdict.evidence:
            yield f"  {sentence}"


def _training_facts(view: RunSummary) -> dict[str, str]:
    read = "-" if view.read_bytes is None else format_bytes(view.read_bytes)
    rate = "-" if view.read_bytes_per_s is None else format_rate(view.read_bytes_per_s)
    return {
        "workload": view.workload,
        "started": view.started or "-",
        "ranks": format_number(view.ranks, "d"),
        "outcome": _describe_outcome(view),
        "AU as DLIO": format_number(view.au_compat_percent, ".2f"),
        "AU strict": format_number(view.au_strict_percent, ".2f"),
        "samples/s as DLIO": format_number(view.samples_per_s_compat, ",.1f"),
        "samples/s over all time": format_number(view.samples_per_s_strict, ",.1f"),
        "I/O as DLIO, nominal MiB/s": format_number(view.io_compat_mib_per_s, ",.1f"),
        "bytes really read": f"{read}, {rate}",
        "folder": view.folder,
    }


def _epoch_rows(figures: PhaseFigures) -> list[dict[str, str]]:
    return [
        {
            "epoch": str(epoch.epoch),
            "AU %": format_number(epoch.au_compat_percent, ".2f"),
            "strict %": format_number(epoch.au_strict_percent, ".2f"),
            "samples/s": format_number(epoch.samples_per_s_compat, ",.1f"),
            "samples": f"{epoch.samples:,}",
            "read": format_bytes(epoch.read_bytes),
            "took": format_seconds(epoch.elapsed_s),
        }
        for epoch in figures.epochs
    ]


@dataclass(frozen=True, kw_only=True)
class _PageOptions(_ShowOptions):
    out: Path | None = option(
        "--out", FILE, "Write this page (default: report.html in the run's directory).", short="-o"
    )


@verb(_PageOptions)
def page(options: _PageOptions, terminal: Terminal) -> None:
    """Draw the page of a run: whether it passed, what limits it, since when, and the charts that show it.

    Every run leaves its page when it ends; this makes it again, also of a run that was killed or is active.

    Examples:

      penstock results page unet3d_h100-20260102-030405-1a2b3c

      penstock results page 1a2b3c --results /mnt/results -o run.html
    """
    from penstock.reports.page import write_report
    from penstock.results.run_catalog import find_run_folder
    from penstock.results.run_folder import PAGE_FILE
    from penstock.results.run_page import draw_run

    folder = find_run_folder(options.run, options.parent.path)
    path = options.out or folder / PAGE_FILE
    write_report(draw_run(folder), path)
    terminal.result({"page": str(path)}, [f"wrote {path}"])


@dataclass(frozen=True, kw_only=True)
class _CompareOptions:
    runs: tuple[str, ...] = arguments("RUN RUN...", RUN, "Two or more runs, as for `penstock results show`.")
    parent: ParentOption = group(ParentOption)
    page: PageOption = group(PageOption)


@verb(_CompareOptions)
def compare(options: _CompareOptions, terminal: Terminal) -> None:
    """Compare runs side by side, each with the first.

    What makes them incomparable is listed first: another workload, number of ranks, data set, batch, ...
    Settings that one varies on purpose (threads, storage, directories) follow.

    Examples:

      penstock results compare 1a2b3c 4d5e6f

      penstock results compare /mnt/a/run1 /mnt/b/run1 --page compared.html
    """
    from penstock.results.run_catalog import find_run_folder
    from penstock.results.run_comparison import compare_runs as compare_views
    from penstock.results.run_comparison import summarize_run

    if len(options.runs) < 2:
        raise UsageError("A comparison needs at least two runs", fix="Name another run.")
    comparison = compare_views(
        [summarize_run(find_run_folder(run, options.parent.path)) for run in options.runs]
    )
    options.page.write(lambda: _draw_comparison(comparison), terminal)
    document = {"is_comparable": comparison.is_comparable, **asdict(comparison)}
    for run in document["runs"]:
        del run["settings"]
    terminal.result(document, _view_comparison(comparison))


def _draw_comparison(comparison: RunComparison) -> Report:
    from penstock.results.run_comparison import make_comparison_page

    return make_comparison_page(comparison)


def _view_comparison(comparison: RunComparison) -> View:
    names = [str(position) for position, _ in enumerate(comparison.runs, start=1)]
    for name, run in zip(names, comparison.runs, strict=True):
        yield f"{name}: {run.id} ({run.workload}, {run.outcome}), {run.folder}"
    if comparison.obstacles:
        yield bold("Not comparable: these runs differ in their request or their outcome.")
        yield TextTable("Requested differently", _difference_rows(comparison.obstacles, names))
    if comparison.varied:
        yield TextTable("Set differently", _difference_rows(comparison.varied, names))
    rows = []
    for delta in comparison.deltas:
        first, *others = zip(delta["values"], delta["changes"], strict=True)
        texts = [format_number(first[0], ",.2f"), *(_with_change(*other) for other in others)]
        rows.append({"figure": delta["figure"], **dict(zip(names, texts, strict=True))})
    yield TextTable("Figures", rows)


def _difference_rows(differences: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"key": difference["key"], **dict(zip(names, map(str, difference["values"]), strict=True))}
        for difference in differences
    ]


def _with_change(value: float | None, change: float | None) -> str:
    text = format_number(value, ",.2f")
    return text if change is None else f"{text} ({change:+.1%})"
