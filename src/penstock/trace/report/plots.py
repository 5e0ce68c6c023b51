"""The plots of a report as plain figures: what to draw, without colours of the page. Plotly draws them.

Place in the flow: comparison -> figures (JSON) -> page. One invariant: a figure is drawn from an answer's
exact rows, so that plot and table cannot say different things.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import Compared


Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One plot: its traces and layout in Plotly's words."""

    title: str
    traces: Sequence[Row]
    layout: Row


def plotly_script() -> str:
    """The whole of plotly.js, to stand in a page that loads nothing."""
    return str(get_plotlyjs())


def figures(compared: Compared) -> list[Figure]:
    """All plots, empty ones left out."""
    drawn = [bars(compared), rank_map(compared), size_histogram(compared), *timelines(compared)]
    return [figure for figure in drawn if figure.traces]


def bars(compared: Compared) -> Figure:
    """T1: seconds by run, a bar for each kind of time; logarithmic, because sums of threads are far apart."""
    table = compared.table("t1")
    traces = [
        {
            "type": "bar",
            "name": str(row[0]),
            "x": list(compared.runs),
            "y": [None if value is None else value / 1e6 for value in row[1:]],  # type: ignore[operator]
        }
        for row in table.rows
    ]
    layout = {"barmode": "group", "yaxis": {"type": "log", "title": {"text": "seconds (log)"}}}
    return Figure(title="Times by run (T1)", traces=traces, layout=layout)


def rank_map(compared: Compared) -> Figure:
    """Busy time of each rank in each run; a missing rank is a hole."""
    busy: dict[str, dict[int, float]] = defaultdict(dict)
    for row in compared.table("ranks").records():
        if isinstance(row["rank"], int) and isinstance(row["union_us"], int):
            busy[str(row["run"])][row["rank"]] = row["union_us"] / 1e6
    everyone = sorted({rank for ranks in busy.values() for rank in ranks})
    if not everyone:
        return Figure(title="Busy with I/O by rank", traces=[], layout={})
    runs = list(reversed(compared.runs))
    trace = {
        "type": "heatmap",
        "x": everyone,
        "y": runs,
        "colorscale": "Viridis",
        "z": [[busy[run].get(rank) for rank in everyone] for run in runs],
        "colorbar": {"title": {"text": "s"}, "thickness": 12},
        "hovertemplate": "rank %{x}, %{y}: %{z:.3f} s<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "rank"}}, "yaxis": {"automargin": True}}
    return Figure(title="Busy with I/O by rank, seconds", traces=[trace], layout=layout)


def size_histogram(compared: Compared) -> Figure:
    """Calls by size, between powers of two."""
    counted: dict[str, list[Row]] = defaultdict(list)
    for row in compared.table("size_histogram").records():
        counted[f"{row['run']}, {row['direction']}"].append(row)
    sizes = sorted({row["from_bytes"] for rows in counted.values() for row in rows})
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [format_bytes(row["from_bytes"]) for row in rows],
            "y": [row["num_events"] for row in rows],
        }
        for name, rows in counted.items()
    ]
    layout = {
        "xaxis": {
            "title": {"text": "bytes of a call, from"},
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [format_bytes(size) for size in sizes],
        },
        "yaxis": {"type": "log", "title": {"text": "calls (log)"}},
    }
    return Figure(title="Sizes of transfers", traces=traces, layout=layout)


def timelines(compared: Compared) -> list[Figure]:
    """Bandwidth over time, a plot for each tier, a line for each run and direction."""
    lines: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    bucket_us = 1
    for row in compared.table("timeline").records():
        for direction in ("read", "write"):
            rate, since, width = row[f"{direction}_rate"], row["since_start_us"], row["bucket_us"]
            if isinstance(rate, float) and isinstance(since, int) and isinstance(width, int) and rate > 0:
                bucket_us = width
                lines[str(row["tier"])][f"{row['run']}, {direction}"][since] = rate / 2**20
    return [
        Figure(
            title=f"Bandwidth of {tier} over time",
            traces=[_steps(name, rates, bucket_us) for name, rates in sorted(named.items())],
            layout={
                "xaxis": {"title": {"text": "s since the run's first event"}},
                "yaxis": {"title": {"text": "MiB/s"}},
            },
        )
        for tier, named in sorted(lines.items())
    ]


def _steps(name: str, rates: Mapping[int, float], bucket_us: int) -> Row:
    """A line that keeps its height over each bucket, and falls to zero where nothing went on."""
    edges = sorted({edge for since in rates for edge in (since, since + bucket_us)})
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv"},
        "name": name,
        "x": [edge / 1e6 for edge in edges],
        "y": [rates.get(edge, 0.0) for edge in edges],
    }
