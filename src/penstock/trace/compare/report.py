"""The report of a comparison: report.html, report.md, tables.parquet.

Mismatches come first, then findings, figures and tables. A figure is drawn from an answer's exact rows, so
figure and table cannot disagree. `tables.parquet` has one row per cell (table, row, column, unit, the value
as text, and as a number where it is one), so tables of all shapes fit in one file that any tool can pivot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StorageError
from penstock.reports.html_page import LONG_TEXT, Cell, Table, is_page, render_page
from penstock.reports.panels import Panel, Sheet
from penstock.trace.figures.draw_histograms import Bins, draw_bins, draw_rank_bars
from penstock.trace.figures.draw_over_time import draw_bandwidth
from penstock.trace.questions.answer import Answer, Unit, as_markdown, cells, heading
from penstock.units import format_seconds

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


_CELL_SCHEMA: Final = pa.schema(
    [
        ("table", pa.string()), ("row", pa.int64()), ("column", pa.string()), ("unit", pa.string()),
        ("text", pa.string()), ("number", pa.float64()),
    ]
)  # fmt: skip
_MARKDOWN_TITLE: Final = re.compile(rb"# \d+ runs compared\n")


def is_report_file(path: Path) -> bool:
    """Whether a file is one of an earlier report."""
    if path.suffix == ".html":
        return is_page(path)
    if path.suffix == ".md":
        with path.open("rb") as file:
            return _MARKDOWN_TITLE.match(file.read(64)) is not None
    try:
        return bool(pq.read_schema(path).equals(_CELL_SCHEMA))
    except pa.ArrowInvalid:
        return False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFigure:
    """Panels with a heading, and how to read them."""

    name: str
    title: str
    says: str
    panels: Sequence[Panel]
    looks: Sequence[str] = ()
    is_grid: bool = False


def render_html(comparison: ComparisonResult) -> str:
    """The whole page; it loads nothing, so it can be mailed and read without a network."""
    num_alarms = sum(finding.weight == "alarm" for finding in comparison.findings)
    busy_times, figures = _tabulate_busy_times(comparison), draw_figures(comparison)
    return render_page(
        "trace_report.html",
        title=f"{len(comparison.runs)} runs compared",
        subtitle=(
            f"{', '.join(comparison.runs)}; against {comparison.baseline}; "
            f"{len(comparison.findings)} findings, {num_alarms} of them about misleading numbers"
        ),
        mismatches=lay_out(comparison.mismatches),
        findings=[(finding, lay_out(finding.evidence), say_lost(finding)) for finding in comparison.findings],
        finding_looks=FINDING_LOOKS,
        contents=[
            ("findings", "Findings"),
            *([("busy", "Busy time by run and tier")] if busy_times else []),
            *((figure.name, figure.title) for figure in figures),
            ("tables", "Tables"),
        ],
        busy_times=busy_times,
        figures=figures,
        tables=[lay_out(table) for table in comparison.tables],
    )


def say_lost(finding: TraceFinding) -> str:
    """What a finding costs an average rank; empty where it does not say."""
    return f"{format_seconds(finding.lost_us / 1e6)} a rank" if finding.lost_us else ""


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


def draw_figures(comparison: ComparisonResult) -> list[PageFigure]:
    """The figures of the page, those without anything to draw left out."""
    bandwidths = comparison.table("bandwidth")
    # The last bytes that moved end the axis: what comes after them is in the tables.
    span_us = max((_end_us(row) for row in bandwidths.records()), default=1)
    sheet = Sheet.of_runs(comparison.runs, span_us)
    sizes = [
        {**row, "kind": row["direction"], "to_bytes": 2 * row["from_bytes"]}
        for row in _rows(comparison, "size_histogram")
    ]
    bins = Bins("from_bytes", "to_bytes", Unit.BYTES)
    figures = [
        PageFigure(
            name="ranks",
            title="Busy with I/O by rank",
            says="The time in which a rank had at least one call under way; a rank without traces is a gap.",
            panels=draw_rank_bars(_rows(comparison, "ranks"), sheet),
            is_grid=True,
        ),
        PageFigure(
            name="bandwidth",
            title="Bandwidth over time",
            says="On one axis for all runs of a tier: reads rise from zero, writes hang from it.",
            panels=draw_bandwidth(bandwidths, sheet),
            looks=("read", "write"),
        ),
        PageFigure(
            name="sizes",
            title="Sizes of transfers",
            says="A bin is from its label to twice of that: how many calls, and which carry the bytes.",
            panels=draw_bins(sizes, sheet, bins, (("num_events", "calls"), ("total_bytes", "bytes"))),
            looks=("read", "write"),
            is_grid=True,
        ),
    ]
    return [figure for figure in figures if figure.panels]


def _rows(comparison: ComparisonResult, name: str) -> list[Mapping[str, Any]]:
    return list(comparison.table(name).records())


def _end_us(row: Mapping[str, Any]) -> int:
    return int(row["since_start_us"]) + int(row["bucket_us"])


def _tabulate_busy_times(comparison: ComparisonResult) -> Table | None:
    """The union of the busiest process on each tier, as bars: sums of threads would not be times."""
    hues = Sheet.of_runs(comparison.runs, 1).hues
    rows = [row for row in _rows(comparison, "t1_measures") if row["max_union_us"]]
    longest = max((row["max_union_us"] for row in rows), default=1)
    cells = [
        (
            Cell(row["run"], f"hue run-{hues[row['run']]}"),
            Cell(str(row["tier"])),
            Cell(
                format_seconds(row["max_union_us"] / 1e6),
                f"number bar hued run-{hues[row['run']]}",
                100 * row["max_union_us"] / longest,
            ),
            Cell("-" if row["concurrency"] is None else f"{row['concurrency']:.1f}", "number"),
        )
        for row in rows
    ]
    head = (Cell("run"), Cell("tier"), Cell("busy", "number"), Cell("calls at a time", "number"))
    return Table(head=head, rows=tuple(cells)) if cells else None


def tabulate_cells(comparison: ComparisonResult) -> pa.Table:
    """Every cell of every table, chart and finding's evidence."""
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
    return pa.Table.from_pylist(table_cells, schema=_CELL_SCHEMA)
