"""The report of a comparison: report.html, report.md, tables.parquet.

Mismatches come first, then findings, plots and tables. A plot is drawn from an answer's exact rows, so plot
and table cannot disagree. `tables.parquet` has one row per cell (table, row, column, unit, the value as text,
and as a number where it is one), so tables of all shapes fit in one file that any tool can pivot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StorageError
from penstock.reports.html_page import LONG_TEXT, Cell, Table, render_page
from penstock.reports.plots import InteractivePlot, plotly_script
from penstock.trace.questions.answer import Answer, Unit, as_markdown, cells, heading
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import TraceFinding

REPORT_FILES: Final = ("report.html", "report.md", "tables.parquet")

_MARKDOWN_ROWS: Final = 60
_HTML_ROWS: Final = 200
"""Rows of a table on the page; all are in tables.parquet."""
_OPEN: Final = ("t1", "t1_measures", "t2")
"""Tables that are unfolded when the page opens."""
FINDING_LOOKS: Final = {"alarm": "bad", "cost": "doubt", "note": "good"}


def write_report(comparison: ComparisonResult, folder: Path) -> list[Path]:
    """Write the three files into `folder`, over those of an earlier report."""
    paths = [folder / name for name in REPORT_FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(render_html(comparison), encoding="utf-8")
        paths[1].write_text(render_markdown(comparison), encoding="utf-8")
        pq.write_table(tabulate_cells(comparison), paths[2])
    except OSError as error:
        raise StorageError(f"Cannot write the report: {error}", uri=str(folder), errno=error.errno) from error
    return paths


def render_markdown(comparison: ComparisonResult) -> str:
    """Mismatches, findings, tables: for pull requests, tickets and terminals."""
    parts = [
        f"# {len(comparison.runs)} runs compared\n",
        f"{', '.join(comparison.runs)}; against {comparison.baseline}.\n",
        "## Differences between the runs\n",
        as_markdown(comparison.mismatches),
        "## Findings\n",
        *(map(_finding_markdown, comparison.findings)),
        *([] if comparison.findings else ["Nothing.\n"]),
        "## Tables\n",
        *(as_markdown(table, most_rows=_MARKDOWN_ROWS) for table in comparison.tables),
    ]
    return "\n".join(parts)


def _finding_markdown(finding: TraceFinding) -> str:
    sentences = "\n".join(f"- {sentence}" for sentence in finding.says)
    head = f"### {finding.code} ({finding.weight.value}): {finding.title}\n\n{sentences}\n"
    evidence = as_markdown(finding.evidence, most_rows=10).partition("\n")[2]
    return f"{head}\n{finding.evidence.title}:\n{evidence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """An answer as the template draws it."""

    title: str
    table: Table | None
    num_hidden: int
    notes: Sequence[str]
    is_open: bool


def render_html(comparison: ComparisonResult) -> str:
    """The whole page; it loads nothing, so it can be mailed and read without a network."""
    num_alarms = sum(finding.weight == "alarm" for finding in comparison.findings)
    return render_page(
        "trace_report.html",
        title=f"{len(comparison.runs)} runs compared",
        subtitle=(
            f"{', '.join(comparison.runs)}; against {comparison.baseline}; "
            f"{len(comparison.findings)} findings, {num_alarms} of them about misleading numbers"
        ),
        mismatches=lay_out(comparison.mismatches),
        findings=[(finding, lay_out(finding.evidence)) for finding in comparison.findings],
        finding_looks=FINDING_LOOKS,
        plots=draw_plots(comparison),
        plotly_script=plotly_script(),
        tables=[lay_out(table) for table in comparison.tables],
    )


def lay_out(answer: Answer) -> PageTable:
    """An answer as a table of cells, of which a page shows so many rows."""
    looks = ["" if column.unit is Unit.TEXT else "number" for column in answer.columns]
    head = tuple(Cell(heading(column), look) for column, look in zip(answer.columns, looks, strict=True))
    rows = tuple(tuple(map(_make_cell, cells(answer, row), looks)) for row in answer.rows[:_HTML_ROWS])
    return PageTable(
        title=answer.title,
        table=Table(head=head, rows=rows) if rows else None,
        num_hidden=max(len(answer.rows) - _HTML_ROWS, 0),
        notes=answer.notes,
        is_open=answer.name in _OPEN,
    )


def _make_cell(text: str, look: str) -> Cell:
    return Cell(text, look or ("long" if len(text) > LONG_TEXT else ""))


def draw_plots(comparison: ComparisonResult) -> list[InteractivePlot]:
    """All plots, empty ones left out."""
    plots = [
        _draw_times(comparison),
        _draw_ranks(comparison),
        _draw_sizes(comparison),
        *_draw_timelines(comparison),
    ]
    return [plot for plot in plots if plot.traces]


def _draw_times(comparison: ComparisonResult) -> InteractivePlot:
    """Busy seconds by run, a bar for each tier: unions, as sums would compare many threads with one."""
    busy: dict[str, dict[str, float]] = defaultdict(dict)
    for row in comparison.table("t1_measures").records():
        if isinstance(row["max_union_us"], int):
            busy[str(row["tier"])][str(row["run"])] = row["max_union_us"] / 1e6
    traces = [
        {
            "type": "bar",
            "name": tier,
            "x": list(comparison.runs),
            "y": [by_run.get(run) for run in comparison.runs],
        }
        for tier, by_run in sorted(busy.items())
    ]
    layout = {"barmode": "group", "yaxis": {"title": {"text": "seconds"}}}
    title = "Busy time of the longest process by run (T1, unions)"
    return InteractivePlot(title=title, traces=traces, layout=layout)


def _draw_ranks(comparison: ComparisonResult) -> InteractivePlot:
    """Busy time of each rank in each run; a missing rank is a hole."""
    busy: dict[str, dict[int, float]] = defaultdict(dict)
    for row in comparison.table("ranks").records():
        if isinstance(row["rank"], int) and isinstance(row["union_us"], int):
            busy[str(row["run"])][row["rank"]] = row["union_us"] / 1e6
    all_ranks = sorted({rank for ranks in busy.values() for rank in ranks})
    runs = list(reversed(comparison.runs))
    trace = {
        "type": "heatmap",
        "x": all_ranks,
        "y": runs,
        "colorscale": "Viridis",
        "z": [[busy[run].get(rank) for rank in all_ranks] for run in runs],
        "colorbar": {"title": {"text": "s"}, "thickness": 12},
        "hovertemplate": "rank %{x}, %{y}: %{z:.3f} s<extra></extra>",
    }
    layout = {"xaxis": {"title": {"text": "rank"}}}
    return InteractivePlot(
        title="Busy with I/O by rank, seconds", traces=[trace] if all_ranks else [], layout=layout
    )


def _draw_sizes(comparison: ComparisonResult) -> InteractivePlot:
    """Calls by size, between powers of two."""
    counts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in comparison.table("size_histogram").records():
        counts[f"{row['run']}, {row['direction']}"].append(row)
    sizes = sorted({row["from_bytes"] for rows in counts.values() for row in rows})
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [format_bytes(row["from_bytes"]) for row in rows],
            "y": [row["num_events"] for row in rows],
        }
        for name, rows in counts.items()
    ]
    layout = {
        "xaxis": {
            "title": {"text": "bytes per call, from"},
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [format_bytes(size) for size in sizes],
        },
        "yaxis": {"type": "log", "title": {"text": "calls (log)"}},
    }
    return InteractivePlot(title="Sizes of transfers", traces=traces, layout=layout)


def _draw_timelines(comparison: ComparisonResult) -> list[InteractivePlot]:
    """Bandwidth over time, a plot for each tier, a line for each run and direction."""
    lines: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    bucket_us = 1
    for row in comparison.table("timeline").records():
        for direction in ("read", "write"):
            rate, since_us, width_us = row[f"{direction}_rate"], row["since_start_us"], row["bucket_us"]
            if (
                isinstance(rate, float)
                and isinstance(since_us, int)
                and isinstance(width_us, int)
                and rate > 0
            ):
                bucket_us = width_us
                lines[str(row["tier"])][f"{row['run']}, {direction}"][since_us] = rate / 2**20
    layout = {
        "xaxis": {"title": {"text": "s since the run's first event"}},
        "yaxis": {"title": {"text": "MiB/s"}},
    }
    return [
        InteractivePlot(
            title=f"Bandwidth of {tier} over time",
            traces=[_draw_line(name, rates, bucket_us) for name, rates in sorted(by_name.items())],
            layout=layout,
        )
        for tier, by_name in sorted(lines.items())
    ]


def _draw_line(name: str, rates: Mapping[int, float], bucket_us: int) -> dict[str, Any]:
    """A line that keeps its height over each bucket, and falls to zero between buckets without I/O."""
    edges = sorted({edge for since_us in rates for edge in (since_us, since_us + bucket_us)})
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv"},
        "name": name,
        "x": [edge / 1e6 for edge in edges],
        "y": [rates.get(edge, 0.0) for edge in edges],
    }


def tabulate_cells(comparison: ComparisonResult) -> pa.Table:
    """Every cell of every table, chart and finding's evidence."""
    schema = pa.schema(
        [
            ("table", pa.string()), ("row", pa.int64()), ("column", pa.string()), ("unit", pa.string()),
            ("text", pa.string()), ("number", pa.float64()),
        ]
    )  # fmt: skip
    answers = [
        comparison.mismatches,
        *comparison.tables,
        *comparison.charts,
        *(finding.evidence for finding in comparison.findings),
    ]
    table_cells = []
    for answer in answers:
        for number, row in enumerate(answer.rows):
            for column, value in zip(answer.columns, row, strict=True):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                table_cells.append(
                    {
                        "table": answer.name,
                        "row": number,
                        "column": column.name,
                        "unit": column.unit.value,
                        "text": None if value is None else str(value),
                        "number": value if is_number else None,
                    }
                )
    return pa.Table.from_pylist(table_cells, schema=schema)
