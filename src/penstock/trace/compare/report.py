"""The report of a comparison: report.html, report.md, tables.parquet.

Mismatches come first, then findings, figures and tables. A figure shows exactly the rows of an answer, so
figures and tables cannot disagree. `tables.parquet` has one row per cell (table, row, column, unit, the value
as text, and as a number if it is one), so tables of all shapes fit in one file that any tool can pivot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.reports.page import is_page, render_report
from penstock.reports.report import Banner, Cell, Chart, Kind, Look, Report, Section, Series, Table, Tone
from penstock.results.published_files import publishing, write_text
from penstock.storage.files.system_calls import translate_os_errors
from penstock.trace.questions.answer import Answer, Unit, as_markdown, cells, count_left_out, heading
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import TraceFinding

REPORT_FILES: Final = ("report.html", "report.md", "tables.parquet")

_MARKDOWN_ROWS: Final = 60
_PAGE_ROWS: Final = 200
"""The most rows of a table on the page; tables.parquet has all of them."""
_ALL_ROWS: Final = "tables.parquet has all"
_OPEN: Final = ("t1", "t1_measures", "t2")
"""Tables that are expanded when the page opens."""
_LOOKS: Final = {"alarm": Look.BAD, "cost": Look.DOUBT, "note": Look.GOOD}
TONES: Final[Mapping[str, Tone]] = {
    "read": "full", "write": "dark", "metadata": "light", "compute": "pale",
    "checkpoint": "ink", "barrier": "bad", "wait": "doubt", "step": "faint",
}  # fmt: skip
"""The tone of each kind of call, and of each part of a program's loop."""
_MOST_TROUBLES: Final = 3

_CELL_SCHEMA: Final = pa.schema(
    [
        ("table", pa.string()), ("row", pa.int64()), ("column", pa.string()), ("unit", pa.string()),
        ("text", pa.string()), ("number", pa.float64()),
    ]
)  # fmt: skip
_MARKDOWN_TITLE: Final = re.compile(rb"# \d+ runs compared\n")

Row = Mapping[str, Any]


def is_report_file(path: Path) -> bool:
    """Return whether a file belongs to an earlier report."""
    if path.suffix == ".html":
        return is_page(path)
    if path.suffix == ".md":
        with path.open("rb") as file:
            return _MARKDOWN_TITLE.match(file.read(64)) is not None
    try:
        return bool(pq.read_schema(path).equals(_CELL_SCHEMA))
    except pa.ArrowInvalid:
        return False


def write_comparison(comparison: ComparisonResult, folder: Path) -> list[Path]:
    """Write the three files into `folder`, replacing those of an earlier report."""
    paths = [folder / name for name in REPORT_FILES]
    write_text(folder, paths[0].name, render_report(comparison_page(comparison)))
    write_text(folder, paths[1].name, render_markdown(comparison))
    with translate_os_errors("Writing", str(paths[2])), publishing(paths[2]) as (draft, _):
        pq.write_table(tabulate_cells(comparison), draft)
    return paths


def render_markdown(comparison: ComparisonResult) -> str:
    """Return mismatches, findings and tables as Markdown, for pull requests, tickets and terminals."""
    parts = [
        f"# {len(comparison.runs)} runs compared\n",
        f"{', '.join(comparison.runs)}; against {comparison.baseline}.\n",
        "## Differences between the runs\n",
        as_markdown(comparison.mismatches),
        "## Findings\n",
    ]
    for finding in comparison.findings:
        sentences = "\n".join(f"- {sentence}" for sentence in finding.says)
        evidence = as_markdown(finding.evidence.first(10), _ALL_ROWS).partition("\n")[2]
        parts.append(
            f"### {finding.code} ({finding.weight.value}): {finding.title}\n\n{sentences}\n\n"
            f"{finding.evidence.title}:\n{evidence}"
        )
    if not comparison.findings:
        parts.append("Nothing.\n")
    tables = (as_markdown(table.first(_MARKDOWN_ROWS), _ALL_ROWS) for table in comparison.tables)
    return "\n".join([*parts, "## Tables\n", *tables])


def comparison_page(comparison: ComparisonResult) -> Report:
    """Return the page of a comparison."""
    num_alarms = sum(finding.weight == "alarm" for finding in comparison.findings)
    names = ", ".join(comparison.runs)
    return Report(
        title=f"{len(comparison.runs)} runs compared",
        subtitle=(
            f"{names}; against {comparison.baseline}; {len(comparison.findings)} findings, {num_alarms} of "
            "them about misleading numbers"
        ),
        banner=banner_of(
            comparison.findings,
            figure=f"{len(comparison.runs)} runs, compared with {comparison.baseline}",
            since="see Bandwidth over time",
        ),
        runs=comparison.runs,
        has_contents=True,
        sections=[
            Section(
                title="Differences between the runs",
                tables=answer_tables(comparison.mismatches),
                notes=comparison.mismatches.notes,
            ),
            findings_section(comparison.findings),
            *_draw_figures(comparison),
            Section(
                name="tables",
                title="Tables",
                parts=[
                    Section(
                        title=table.title,
                        tables=answer_tables(table),
                        notes=_count_hidden(table),
                        is_folded=table.name not in _OPEN,
                        why_empty="(no rows)",
                    )
                    for table in comparison.tables
                ],
            ),
        ],
    )


def banner_of(findings: Sequence[TraceFinding], *, figure: str, since: str, has_calls: bool = True) -> Banner:
    """Return what a page says first: the verdict, what costs most, its fix, and what else stands out.

    If traces have sums instead of calls, the absence of findings is not a verdict.
    """
    alarms = [finding for finding in findings if finding.weight == "alarm"]
    costs = [finding for finding in findings if finding.weight == "cost"]
    verdict, look = ("nothing stands out", Look.GOOD)
    if alarms:
        verdict, look = ("misleading", Look.BAD)
    elif costs:
        verdict, look = ("could be faster", Look.DOUBT)
    elif not has_calls:
        verdict, look = ("sums only", Look.DOUBT)
    found = [*alarms, *costs]
    dearest = max(costs, key=lambda one: one.lost_us or 0, default=None)
    limited_by = (
        "nothing that stands out in these traces"
        if has_calls
        else "unknown: these traces have sums of calls, not their order and times"
    )
    if dearest is not None:
        lost = format_lost(dearest)
        limited_by = f"{dearest.title}, which costs {lost}" if lost else dearest.title
    fixes = [finding.fix for finding in found if finding.fix] or [
        f'Look at the finding "{finding.title}".' for finding in found
    ]
    return Banner(
        verdict=verdict,
        look=look,
        figure=figure,
        limited_by=limited_by,
        since=since,
        to_do=fixes[0]
        if fixes
        else "Nothing, as far as these traces show."
        if has_calls
        else "Record single calls: Darshan with DXT, or `penstock trace record`.",
        troubles=[finding.title for finding in found if finding is not dearest][:_MOST_TROUBLES],
    )


def findings_section(findings: Sequence[TraceFinding]) -> Section:
    """Return all findings, each with its evidence."""
    return Section(
        name="findings",
        title="Findings",
        parts=[
            Section(
                title=f"{finding.code} {finding.title}",
                aside=f"{finding.weight.value}, {lost}"
                if (lost := format_lost(finding))
                else finding.weight.value,
                text=[*finding.says, *([finding.fix] if finding.fix else [])],
                tables=answer_tables(finding.evidence),
                notes=_count_hidden(finding.evidence),
                look=_LOOKS[finding.weight.value],
                is_folded=True,
            )
            for finding in findings
        ],
        why_empty="Nothing stands out.",
    )


def format_lost(finding: TraceFinding) -> str:
    """Return the cost of a finding for an average rank; empty if it is unknown."""
    return f"{format_seconds(finding.lost_us / 1e6)} a rank" if finding.lost_us else ""


def answer_tables(answer: Answer) -> list[Table]:
    """Return the first rows of an answer as a table for people; none if it has no rows."""
    if not answer.rows:
        return []
    heads = [heading(column) for column in answer.columns]
    rows = [dict(zip(heads, cells(answer, row), strict=True)) for row in answer.rows[:_PAGE_ROWS]]
    numbers = [
        head for head, column in zip(heads, answer.columns, strict=True) if column.unit is not Unit.TEXT
    ]
    return [Table(rows, title=answer.title, numbers=numbers)]


def _count_hidden(answer: Answer) -> list[str]:
    return [*answer.notes, *count_left_out(answer.first(_PAGE_ROWS).num_left_out, _ALL_ROWS)]


def _draw_figures(comparison: ComparisonResult) -> list[Section]:
    """Return the figures of the page that have anything to draw."""
    busy = [row for row in comparison.table("t1_measures").records() if row["max_union_us"]]
    # The union of the busiest process on each tier, because sums over threads would not be times.
    busy_rows: list[Mapping[str, str | Cell]] = [
        {
            "run": Cell(str(row["run"]), run=str(row["run"])),
            "tier": str(row["tier"]),
            "busy": Cell(
                format_seconds(float(row["max_union_us"] or 0) / 1e6), value=float(row["max_union_us"] or 0)
            ),
            "calls at a time": "-" if row["concurrency"] is None else f"{row['concurrency']:.1f}",
        }
        for row in busy
    ]
    ranks: list[Row] = [
        row for row in comparison.table("ranks").records() if row["rank"] is not None and row["union_us"]
    ]
    num_ranks = max((row["rank"] for row in ranks), default=0) + 1
    longest_s = max((row["union_us"] for row in ranks), default=0) / 1e6
    sizes = comparison.table("size_bins").records()
    counted = (("num_calls", "calls"), ("total_bytes", "bytes"))
    sections = [
        Section(
            name="busy",
            title="Busy time by run and tier",
            tables=[Table(busy_rows, bars="busy", numbers={"calls at a time"})] if busy_rows else [],
        ),
        Section(
            name="ranks",
            title="Busy with I/O by rank",
            text=["The time in which at least one call of a rank ran; a rank without traces is a gap."],
            charts=[
                Chart(
                    kind=Kind.BARS, title=run, run=run, unit="s", x_title="rank", y_end=longest_s,
                    names=[str(rank) for rank in range(num_ranks)],
                    # For a rank with several processes, the busiest one.
                    series=[Series(x=list(by_rank), y=list(by_rank.values()))],
                )
                for run, rows in by_run(comparison.runs, ranks)
                for by_rank in [
                    {
                        row["rank"]: row["union_us"] / 1e6
                        for row in sorted(rows, key=lambda one: one["union_us"])
                    }
                ]
            ],
        ),
        Section(
            name="bandwidth",
            title="Bandwidth over time",
            text=["All runs of a tier share one axis: reads rise from zero, writes hang from it."],
            charts=bandwidth_charts(comparison.runs, comparison.table("bandwidth").records()),
        ),
        Section(
            name="sizes",
            title="Sizes of transfers",
            text=["A bin extends from its label to twice that size: how many calls it has, how many bytes."],
            charts=bin_charts(comparison.runs, sizes, "from_bytes", "to_bytes", counted),
        ),
    ]  # fmt: skip
    return [section for section in sections if section.charts or section.tables]


def by_run(runs: Sequence[str], rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each run that has any, in the order of runs."""
    found = [(run, [row for row in rows if row["run"] == run]) for run in runs]
    return [(run, of_run) for run, of_run in found if of_run]


def bandwidth_charts(runs: Sequence[str], rows: Sequence[Row], x_end: float = 0.0) -> list[Chart]:
    """Return a chart of bytes per second for each tier and run: reads rise from zero, writes hang from it."""
    # The axis ends with the last transfer of bytes; the tables show what comes after it.
    x_end = x_end or max((row["since_start_us"] + row["bucket_us"] for row in rows), default=1) / 1e6
    charts = []
    for tier in dict.fromkeys(row["tier"] for row in rows):
        of_tier = [row for row in rows if row["tier"] == tier]
        peaks = {
            column: max(_rate(row, column) for row in of_tier) for column in ("read_bytes", "written_bytes")
        }
        for run, of_run in by_run(runs, of_tier):
            series, notes = [], []
            for kind, column, sign in (("read", "read_bytes", 1), ("write", "written_bytes", -1)):
                moving = [row for row in of_run if row[column]]
                if moving:
                    x, ends = times_of(moving)
                    y = [sign * _rate(row, column) for row in moving]
                    series.append(Series(name=kind, tone=TONES[kind], x=x, ends=ends, y=y))
                    notes.append(f"{kind} at most {format_rate(max(map(abs, y)))}")
            charts.append(
                Chart(
                    kind=Kind.AREA, title=run if tier is None else f"{run}, {tier}", run=run, unit="B/s",
                    series=series, x_end=x_end, y_end=peaks["read_bytes"], y_begin=-peaks["written_bytes"],
                    note=", ".join(notes),
                )
            )  # fmt: skip
    return charts


def _rate(row: Row, column: str) -> float:
    return float(row[column] * 1e6 / row["bucket_us"])


def times_of(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Return when rows begin and end, in seconds; a bucket ends after its width, other rows have an end."""
    ends = [
        row["until_us"] if "until_us" in row else row["since_start_us"] + row["bucket_us"] for row in rows
    ]
    return [row["since_start_us"] / 1e6 for row in rows], [end / 1e6 for end in ends]


def bin_charts(
    runs: Sequence[str], rows: Sequence[Row], begins: str, ends: str, counted: Sequence[tuple[str, str]]
) -> list[Chart]:
    """Return histograms, stacked by kind: a chart for each run and each column of `counted`, with its title.

    The bins are adjacent, from the first to the last that any run has; bins without calls are gaps.
    """
    if not rows:
        return []
    first, last = min(row[begins] for row in rows), max(row[ends] for row in rows)
    is_bytes = begins.endswith("_bytes")
    ladder = (
        [0, *(2**power for power in range(63))]
        if is_bytes
        else [0, *(step * 10**power for power in range(19) for step in (1, 2, 5))]
    )
    edges = [edge for edge in ladder if first <= edge < last]
    places = {edge: place for place, edge in enumerate(edges)}
    charts = []
    for run, of_run in by_run(runs, rows):
        for column, title in counted:
            unit = "B" if column.endswith("_bytes") else "s" if column.endswith("_us") else ""
            scale = 1e6 if unit == "s" else 1.0
            totals = [
                sum(row[column] for row in rows if row["run"] == other and row[begins] == edge)
                for other in runs
                for edge in edges
            ]
            series = [
                Series(
                    name=kind, tone=TONES[kind],
                    x=[places[row[begins]] for row in of_kind], y=[row[column] / scale for row in of_kind],
                )
                for kind in ("read", "write", "metadata")
                if (of_kind := [row for row in of_run if row["kind"] == kind])
            ]  # fmt: skip
            charts.append(
                Chart(
                    kind=Kind.BARS, title=f"{run}: {title}", run=run, unit=unit, series=series,
                    names=[format_bytes(edge) if is_bytes else _format_us(edge) for edge in edges],
                    y_end=max(totals) / scale,
                )
            )  # fmt: skip
    return charts


def _format_us(edge: int) -> str:
    scale, name = next(
        ((scale, name) for scale, name in ((10**6, "s"), (1000, "ms")) if edge >= scale), (1, "us")
    )
    return f"{edge // scale} {name}"


def tabulate_cells(comparison: ComparisonResult) -> pa.Table:
    """Return every cell of every table, chart and finding's evidence."""
    answers = [
        comparison.mismatches,
        *comparison.tables,
        *comparison.charts,
        *(finding.evidence for finding in comparison.findings),
    ]
    return pa.Table.from_pylist(
        [
            {
                "table": answer.name,
                "row": number,
                "column": column.name,
                "unit": column.unit.value,
                "text": None if value is None else str(value),
                "number": value if isinstance(value, int | float) and not isinstance(value, bool) else None,
            }
            for answer in answers
            for number, row in enumerate(answer.rows)
            for column, value in zip(answer.columns, row, strict=True)
        ],
        schema=_CELL_SCHEMA,
    )
