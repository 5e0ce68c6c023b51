"""`penstock results show`: one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.delivery import delivery_lines
from penstock.cli.results.words import Parent, number
from penstock.cli.terminal import JsonFlag, Terminal, table

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.terminal import View
    from penstock.results.activity import Activity
    from penstock.results.checkpoints import CheckpointFigures
    from penstock.results.figures import PhaseFigures
    from penstock.results.overview import RunView
    from penstock.results.record import RunRecord


def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its id, or a part of its name.")],
    *,
    parent: Parent = Path("results"),
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
    from penstock.results.history.kept import run_folder
    from penstock.results.overview import view_run
    from penstock.results.record import read_record

    terminal = Terminal(as_json=as_json)
    folder = run_folder(run, parent)
    view = view_run(folder)
    for note in view.notes:
        terminal.note(note)
    figures = _figures(folder, view, terminal)
    record = read_record(folder) if view.kind == "penstock" else None
    active = _activities(folder) if record else ()
    taken = read_checkpoints(folder) if view.kind == "penstock" else None
    document = {
        **asdict(view),
        "train": asdict(figures) if figures else None,
        "checkpoint": asdict(taken) if taken else None,
        "deliveries": [asdict(each) for each in record.deliveries] if record else [],
        "preflight": asdict(record.preflight) if record and record.preflight else None,
        "activity": [asdict(each) for each in active],
    }

    def draw(console: Console) -> None:
        if taken is None:
            _draw_run(console, view, figures)
        else:
            _draw_checkpoints(console, view, taken)
        if active:
            table("Hosts meanwhile", [_activity_row(each) for each in active])(console)
        for title, line in _surroundings(record) if record else ():
            console.print(f"  {title:<28}{line}", markup=False)

    terminal.result(document, draw)


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


def _activities(folder: Path) -> tuple[Activity, ...]:
    """What hosts did in each phase; nothing where nobody counted, or nothing was begun."""
    from penstock.errors import ObjectNotFound
    from penstock.results.activity import activities
    from penstock.results.counters import read_counters
    from penstock.results.tables import read_events

    try:
        return activities(*read_counters(folder), read_events(folder))
    except ObjectNotFound:
        return ()


def _activity_row(activity: Activity) -> dict[str, str]:
    from penstock.units import format_bytes, format_seconds

    return {
        "phase": activity.phase,
        "took": format_seconds(activity.elapsed_s),
        "hosts": str(activity.hosts),
        "CPU busy": "-" if activity.cpu_busy_share is None else f"{activity.cpu_busy_share:.0%}",
        "drives read": format_bytes(activity.drives_read_bytes),
        "written": format_bytes(activity.drives_written_bytes),
        "networks received": format_bytes(activity.networks_received_bytes),
        "sent": format_bytes(activity.networks_sent_bytes),
    }


def _surroundings(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Devices beside the application, and gates that did not stand open."""
    yield from delivery_lines(record.deliveries)
    if record.preflight is None:
        return
    closed = ", ".join(f"{each.gate} ({each.verdict})" for each in record.preflight.closed)
    skipped = ", ".join(record.preflight.skipped)
    if closed:
        yield "gates closed", closed
    if skipped:
        yield "gates left out", skipped


def _draw_checkpoints(console: Console, view: RunView, taken: CheckpointFigures) -> None:
    from penstock.units import format_bytes, format_seconds

    console.print(view.id, style="bold", markup=False)
    outcome = f"{view.outcome}: {view.why}" if view.why else view.outcome
    facts = {
        "model": taken.model,
        "one checkpoint": format_bytes(taken.checkpoint_bytes),
        "at": taken.target,
        "started": view.started or "-",
        "ranks": number(view.ranks, "d"),
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
            "GiB/s": number(reached.gib_per_s, ".2f"),
            "mean of each": number(reached.mean_gib_per_s, ".2f"),
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
        ("ranks", number(view.ranks, "d")),
        ("outcome", outcome),
        ("AU as DLIO", number(view.au_compat_percent, ".2f")),
        ("AU strict", number(view.au_strict_percent, ".2f")),
        ("samples/s as DLIO", number(view.samples_per_s_compat, ",.1f")),
        ("samples/s over all time", number(view.samples_per_s_strict, ",.1f")),
        ("I/O as DLIO, nominal MiB/s", number(view.io_compat_mib_per_s, ",.1f")),
        ("bytes really read", f"{read}, {rate}"),
        ("folder", view.folder),
    )


def _epoch_rows(figures: PhaseFigures) -> list[dict[str, str]]:
    from penstock.units import format_bytes, format_seconds

    return [
        {
            "epoch": str(epoch.epoch),
            "AU %": number(epoch.au_compat_percent, ".2f"),
            "strict %": number(epoch.au_strict_percent, ".2f"),
            "samples/s": number(epoch.samples_per_s_compat, ",.1f"),
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
