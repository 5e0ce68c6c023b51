"""Panels of what happens over time, from the rows of `over_time`: a panel a run, one axis for all of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from penstock.reports.panels import (
    Panel,
    Row,
    Scale,
    Shape,
    Sheet,
    bars_path,
    group_rows,
    heat_shapes,
    steps_path,
)
from penstock.reports.ticks import Tick, byte_ticks, lane_ticks
from penstock.trace.event_schema import name_process
from penstock.trace.questions.answer import Answer
from penstock.units import format_rate, format_seconds

_HEIGHT: Final = 88
_LOW_HEIGHT: Final = 72
_DIRECTIONS: Final = (("read", "read_bytes"), ("write", "written_bytes"))

_LEAST: Final = 1.5
"""The least height of a bar, so that little is not drawn as nothing."""

_LABELLED: Final = 0.25
"""The share of a panel from which on a direction has ticks of its own."""

Cell = tuple[int, int, int, float]


def draw_bandwidth(answer: Answer, sheet: Sheet) -> list[Panel]:
    """Bytes a second in each bucket, a panel for each tier and run: reads rise, writes hang from zero."""
    panels = []
    for tier, of_tier in group_rows(answer.records(), "tier").items():
        peaks = {kind: max(_rate(row, column) for row in of_tier) for kind, column in _DIRECTIONS}
        for run, of_run in sheet.by_run(of_tier):
            title = f"{run}, {tier}" if tier is not None else run
            panels.append(_draw_rates(title, of_run, peaks, sheet))
    return panels


def _rate(row: Row, column: str) -> float:
    return float(row[column] * 1e6 / row["bucket_us"])


def _draw_rates(title: str, rows: Sequence[Row], peaks: Mapping[str, float], sheet: Sheet) -> Panel:
    """Both directions have the same scale: the one with the lower peak has the smaller part of the panel."""
    across = sheet.across()
    whole = sum(peaks.values())
    base = _HEIGHT * peaks["read"] / whole
    if 0 < base < _HEIGHT:
        base = min(max(base, _LEAST), _HEIGHT - _LEAST)
    shapes, notes = [], []
    for sign, (kind, column) in zip((-1, 1), _DIRECTIONS, strict=True):
        upwards = Scale(peaks[kind], _HEIGHT * peaks[kind] / whole)
        steps = [
            (
                across.place(row["since_start_us"]),
                across.place(row["since_start_us"] + row["bucket_us"]),
                base + sign * max(upwards.place(_rate(row, column)), _LEAST),
            )
            for row in rows
            if row[column]
        ]
        if steps:
            shapes.append(Shape(kind, steps_path(steps, base)))
            notes.append(f"{kind} at most {format_rate(max(_rate(row, column) for row in rows))}")
    ticks, unit = sheet.time_ticks()
    return Panel(
        title=title,
        run=sheet.hues[rows[0]["run"]],
        height=_HEIGHT,
        shapes=shapes,
        x_ticks=ticks,
        x_title=unit,
        y_ticks=_both_ways(peaks["read"], peaks["write"]),
        note=", ".join(notes),
    )


def _both_ways(up: float, down: float) -> list[Tick]:
    """Zero between the two directions, and the ticks of each that is high enough for labels."""
    above = up / (up + down)
    ticks = [Tick("0", 100 * above)]
    if above > _LABELLED:
        ticks += [Tick(tick.text, tick.percent * above) for tick in byte_ticks(up, "/s")[1:]]
    if 1 - above > _LABELLED:
        ticks += [Tick(tick.text, 100 - tick.percent * (1 - above)) for tick in byte_ticks(down, "/s")[1:]]
    return ticks


def draw_rank_heat(
    answer: Answer, sheet: Sheet, *, value: Callable[[Row], float], text: Callable[[float], str]
) -> list[Panel]:
    """A cell for each rank and bucket, of the tone of its `value`; `text` formats the largest."""
    rows: list[Row] = list(answer.records())
    largest = max(map(value, rows), default=0.0)
    panels = []
    for run, of_run in sheet.by_run(rows):
        names = {row["row"]: _name_rank_row(row) for row in of_run}
        # Rows of ranks that made no call, but computed, are left out: those after them move up.
        places = {row: place for place, row in enumerate(names)}
        cells = ((places[row["row"]], row["since_start_us"], row["bucket_us"], value(row)) for row in of_run)
        panels.append(_draw_heat(run, list(names.values()), cells, (largest, text(largest)), sheet))
    return panels


def _name_rank_row(row: Row) -> str:
    if row["first_rank"] is None:
        more = f" +{row['num_processes'] - 1}" if row["num_processes"] > 1 else ""
        return f"{name_process(row['pid'])}{more}"
    first, last = row["first_rank"], row["last_rank"]
    return f"rank {first}" if first == last else f"rank {first}-{last}"


def draw_metadata(answer: Answer, sheet: Sheet) -> list[Panel]:
    """Calls of each operation in each bucket, of the tone of their number."""
    rows: list[Row] = list(answer.records())
    largest = max((row["num_calls"] for row in rows), default=0)
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[row["op"]] += row["num_calls"]
    operations = sorted(totals, key=lambda op: (op == "other", -totals[op]))
    width = rows[0]["bucket_us"] if rows else 1

    text = f"{largest:,} calls in {format_seconds(width / 1e6)}"
    panels = []
    for run, of_run in sheet.by_run(rows):
        cells = (
            (operations.index(row["op"]), row["since_start_us"], row["bucket_us"], row["num_calls"])
            for row in of_run
        )
        panels.append(_draw_heat(run, operations, cells, (largest, text), sheet))
    return panels


def _draw_heat(
    run: str, names: Sequence[str], cells: Iterable[Cell], full: tuple[float, str], sheet: Sheet
) -> Panel:
    """Cells of row, start, width and value; `full` is the value of the full tone, and as a text."""
    largest, text = full
    height = 14 if len(names) <= 16 else 9 if len(names) <= 32 else 6
    across = sheet.across()
    placed = (
        (
            across.place(since),
            across.place(since + width),
            height * row + 0.5,
            height * (row + 1) - 0.5,
            value,
        )
        for row, since, width, value in cells
    )
    ticks, unit = sheet.time_ticks()
    return Panel(
        title=run,
        run=sheet.hues[run],
        height=height * len(names),
        shapes=heat_shapes(placed, largest),
        x_ticks=ticks,
        x_title=unit,
        y_ticks=lane_ticks(names, 16),
        note=f"full tone: {text}",
    )


def draw_overlap(answer: Answer, sheet: Sheet) -> list[Panel]:
    """The share of processes that compute, do both, or only I/O, stacked, over time."""
    across = sheet.across()
    ticks, unit = sheet.time_ticks()
    panels = []
    for run, rows in sheet.by_run(answer.records()):
        stacked: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        for row in rows:
            whole = row["bucket_us"] * row["num_processes"]
            left = across.place(row["since_start_us"])
            right = across.place(row["since_start_us"] + row["bucket_us"])
            top = float(_LOW_HEIGHT)
            for look, spent_us in _overlap_parts(row):
                bottom, top = top, top - _LOW_HEIGHT * spent_us / whole
                if spent_us:
                    stacked[look].append((left, right, top, bottom))
        panels.append(
            Panel(
                title=run,
                run=sheet.hues[run],
                height=_LOW_HEIGHT,
                x_ticks=ticks,
                x_title=unit,
                shapes=[
                    Shape(look, bars_path(stacked[look]))
                    for look in ("compute", "both", "alone")
                    if look in stacked
                ],
                y_ticks=[Tick("100 %", 0.0), Tick("50 %", 50.0), Tick("0", 100.0)],
                note=_overlap_note(rows),
            )
        )
    return panels


def _overlap_parts(row: Row) -> tuple[tuple[str, int], ...]:
    both = row["both_us"]
    return ("compute", row["compute_us"] - both), ("both", both), ("alone", row["io_us"] - both)


def _overlap_note(rows: Sequence[Row]) -> str:
    io_us, both_us = (sum(row[column] for row in rows) for column in ("io_us", "both_us"))
    if not io_us:
        return "no I/O in processes that compute"
    return f"{100 * both_us / io_us:.1f} % of the I/O while its process computes"
