"""Panels of histograms, from the rows of `histograms`, and of the busy time of ranks."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.reports.panels import WIDTH, Panel, Row, Scale, Shape, Sheet, bars_path, group_rows
from penstock.reports.ticks import Tick, byte_ticks, value_ticks
from penstock.trace.questions.answer import Unit
from penstock.units import format_bytes

_HEIGHT: Final = 72
_KINDS: Final = ("read", "write", "metadata")


@dataclass(frozen=True, slots=True)
class Bins:
    """The columns of rows in which bins begin and end, and what these are."""

    begins: str
    ends: str
    unit: Unit


def draw_bins(
    rows: Sequence[Row], sheet: Sheet, bins: Bins, counted: Sequence[tuple[str, str]]
) -> list[Panel]:
    """Histograms, stacked by kind: a panel for each run and each of the columns `counted`, with its title.

    Bins are side by side from the first to the last that any run has; those without calls are gaps.
    """
    edges = _every_bin([(row[bins.begins], row[bins.ends]) for row in rows])
    tops = {
        column: max(
            sum(row[column] for row in of_bin)
            for _, of_run in sheet.by_run(rows)
            for of_bin in group_rows(of_run, bins.begins).values()
        )
        for column, _ in counted
        if rows
    }
    return [
        Panel(
            title=f"{run}: {title}",
            run=sheet.hues[run],
            height=_HEIGHT,
            shapes=_stack_bins(
                [(row["kind"], row[bins.begins], row[column]) for row in of_run], edges, tops[column]
            ),
            x_ticks=_bin_ticks(edges, bins.unit),
            y_ticks=_bin_heights(tops[column], column),
        )
        for run, of_run in sheet.by_run(rows)
        for column, title in counted
    ]


def _every_bin(found: Sequence[tuple[int, int]]) -> list[int]:
    """The beginnings of all bins from the first to the last, with those that no row has."""
    if not found:
        return []
    begin, end = min(found)[0], max(found)[1]
    ladder = [0, *(2**power for power in range(63))]
    known = {begins for begins, _ in found}
    if not known <= set(ladder):
        ladder = [0, *(step * 10**power for power in range(18) for step in (1, 2, 5))]
    return [edge for edge in ladder if begin <= edge < end]


def _stack_bins(counts: Sequence[tuple[str, int, float]], edges: Sequence[int], most: float) -> list[Shape]:
    """Bars of kind, bin and number, on top of one another where several kinds share a bin."""
    across, upwards = Scale(len(edges), WIDTH), Scale(most, _HEIGHT - 2)
    places = {edge: number for number, edge in enumerate(edges)}
    filled: dict[int, float] = defaultdict(float)
    stacked: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for kind, begins, number in sorted(counts, key=lambda count: _KINDS.index(count[0])):
        if not number:
            continue
        place = places[begins]
        bottom = _HEIGHT - filled[place]
        # A bin that has calls is never drawn as if it had none.
        height = max(upwards.place(number), 1.5)
        filled[place] += height
        left, right = across.place(place + 0.06), across.place(place + 0.94)
        stacked[kind].append((left, right, max(bottom - height, 0), bottom))
    return [Shape(kind, bars_path(bars)) for kind, bars in stacked.items()]


def _bin_ticks(edges: Sequence[int], unit: Unit) -> list[Tick]:
    """The edges between bins; of many bins, some of them."""
    every = -(-len(edges) // 8)
    return [
        Tick(format_edge(edge, unit), 100 * number / len(edges))
        for number, edge in enumerate(edges)
        if number % every == 0
    ]


def format_edge(edge: int, unit: Unit) -> str:
    """Where a bin begins, in bytes or microseconds."""
    if unit is Unit.BYTES:
        return format_bytes(edge)
    scale, name = next(
        ((scale, name) for scale, name in ((10**6, "s"), (1000, "ms")) if edge >= scale), (1, "us")
    )
    return f"{edge // scale} {name}"


def _bin_heights(most: float, column: str) -> list[Tick]:
    if column.endswith("_bytes"):
        return byte_ticks(most)
    if column.endswith("_us"):
        return value_ticks(most, "{:,.6g} s", step=1e6)
    return value_ticks(most, "{:,.6g}")


def draw_rank_bars(rows: Sequence[Row], sheet: Sheet) -> list[Panel]:
    """Busy time of each rank, a bar each, a panel a run; a rank without traces is a gap."""
    known = [row for row in rows if row["rank"] is not None and row["union_us"]]
    num_ranks = max((row["rank"] for row in known), default=0) + 1
    longest = max((row["union_us"] for row in known), default=0)
    upwards, width = Scale(longest, _HEIGHT - 2), WIDTH / num_ranks
    every = -(-num_ranks // 16)
    return [
        Panel(
            title=run,
            run=sheet.hues[run],
            height=_HEIGHT,
            shapes=[Shape("read", bars_path(_rank_bars(of_run, width, upwards)))],
            x_ticks=[Tick(str(rank), 100 * (rank + 0.5) / num_ranks) for rank in range(0, num_ranks, every)],
            x_title="rank",
            y_ticks=value_ticks(longest, "{:,.6g} s", step=1e6),
        )
        for run, of_run in sheet.by_run(known)
    ]


def _rank_bars(
    rows: Sequence[Row], width: float, upwards: Scale
) -> Iterator[tuple[float, float, float, float]]:
    """Of a rank with several processes, the busiest."""
    for rank, of_rank in group_rows(rows, "rank").items():
        height = max(upwards.place(max(row["union_us"] for row in of_rank)), 1.0)
        yield width * (rank + 0.06), width * (rank + 0.94), _HEIGHT - height, _HEIGHT
