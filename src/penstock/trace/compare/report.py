"""The report of a comparison: report.html, report.md, tables.parquet.

Mismatches come first, then findings, plots and tables. A plot is drawn from an answer's exact rows, so plot
and table cannot disagree. `tables.parquet` has one row per cell (table, row, column, unit, the value as text,
and as a number where it is one), so tables of all shapes fit in one file that any tool can pivot.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from plotly.offline import get_plotlyjs

from penstock.errors import StorageError
from penstock.trace.questions.answer import Answer, Unit, as_markdown, cells, heading
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import ComparisonResult
    from penstock.trace.compare.trace_study import TraceFinding


MARKDOWN_ROWS = 60


def render_markdown(compared: ComparisonResult) -> str:
    """Mismatches, findings, tables: in the order in which they are to be read."""
    parts = [
        f"# {len(compared.runs)} runs compared\n",
        f"{', '.join(compared.runs)}; against {compared.baseline}.\n",
        "## What the runs differ in\n",
        as_markdown(compared.mismatches),
        "## What stands out\n",
        *(map(_markdown_finding, compared.findings)),
        *([] if compared.findings else ["Nothing.\n"]),
        "## Tables\n",
        *(as_markdown(table, most_rows=MARKDOWN_ROWS) for table in compared.tables),
    ]
    return "\n".join(parts)


def _markdown_finding(finding: TraceFinding) -> str:
    said = "\n".join(f"- {sentence}" for sentence in finding.says)
    head = f"### {finding.code} ({finding.weight.value}): {finding.title}\n\n{said}\n"
    evidence = as_markdown(finding.evidence, most_rows=10).partition("\n")[2]
    return f"{head}\n{finding.evidence.title}:\n{evidence}"


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


def figures(compared: ComparisonResult) -> list[Figure]:
    """All plots, empty ones left out."""
    drawn = [bars(compared), rank_map(compared), size_histogram(compared), *timelines(compared)]
    return [figure for figure in drawn if figure.traces]


def bars(compared: ComparisonResult) -> Figure:
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


def rank_map(compared: ComparisonResult) -> Figure:
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


def size_histogram(compared: ComparisonResult) -> Figure:
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


def timelines(compared: ComparisonResult) -> list[Figure]:
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


HTML_ROWS: Final = 200
"""Rows of a table on the page; all are in tables.parquet."""

_OPEN: Final = ("t1", "t1_measures", "t2")
"""Tables that are not folded away."""

_PAGE: Final = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b2430; --paper: #fbfbf9; --faint: #5f6b77; --line: #dcdfe3;
        --alarm: #b3261e; --cost: #8a5a00; --note: #2f6f4f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --paper: #14181d; --faint: #97a1ac; --line: #2d343c;
          --alarm: #ff8a80; --cost: #e8b04b; --note: #7fc8a0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.25rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { margin-bottom: 0; font-size: 1.6rem; } h2 { margin: 2rem 0 .4rem; font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .3rem; font-size: 1rem; } .faint { color: var(--faint); margin-top: .2rem; }
.finding { border-left: .3rem solid var(--line); padding: .1rem .8rem; margin: .8rem 0; }
.finding.alarm { border-color: var(--alarm); } .finding.cost { border-color: var(--cost); }
.finding.note { border-color: var(--note); } .finding p { margin: .2rem 0; }
.code { color: var(--faint); font-weight: 400; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
         white-space: nowrap; }
.long { min-width: 17rem; white-space: normal; }
th { color: var(--faint); } .number { text-align: right; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.plot { width: 100%; height: 26rem; }
@media (max-width: 640px) { .plot { height: 30rem; } }
</style>
</head>
<body>
<h1>$title</h1>
<p class="faint">$subtitle</p>
$body
<script>$plotly</script>
<script>
const figures = $figures;
const dark = matchMedia('(prefers-color-scheme: dark)');
function look() {
  const ink = dark.matches ? '#e3e7ec' : '#1b2430', line = dark.matches ? '#2d343c' : '#dcdfe3';
  const narrow = window.innerWidth < 640;
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line};
  return {ink, narrow, axis};
}
function draw() {
  const {ink, narrow, axis} = look();
  figures.forEach((figure, number) => {
    const layout = Object.assign({}, figure.layout, {
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      font: {color: ink, size: narrow ? 10 : 12},
      margin: {l: narrow ? 48 : 64, r: 12, t: 8, b: 48}, showlegend: figure.traces.length > 1,
      legend: {orientation: 'h', yref: 'container', yanchor: 'bottom', y: 0},
      xaxis: Object.assign({automargin: true}, axis, figure.layout.xaxis),
      yaxis: Object.assign({automargin: true}, axis, figure.layout.yaxis),
    });
    const config = {responsive: true, displayModeBar: false};
    Plotly.react('plot' + number, figure.traces, layout, config);
  });
}
dark.addEventListener('change', draw);
draw();
</script>
</body>
</html>
""")


def render_html(compared: ComparisonResult) -> str:
    """The whole page."""
    drawn = figures(compared)
    body = [
        "<h2>What the runs differ in</h2>",
        _table(compared.mismatches),
        "<h2>What stands out</h2>",
        *([_html_finding(finding) for finding in compared.findings] or ["<p>Nothing.</p>"]),
        "<h2>Plots</h2>",
        *(_plot(number, figure) for number, figure in enumerate(drawn)),
        "<h2>Tables</h2>",
        *map(_folded, compared.tables),
    ]
    num_alarms = sum(finding.weight == "alarm" for finding in compared.findings)
    return _PAGE.substitute(
        title=escape(f"{len(compared.runs)} runs compared"),
        subtitle=escape(
            f"{', '.join(compared.runs)}; against {compared.baseline}; "
            f"{len(compared.findings)} findings, {num_alarms} of them about misleading numbers"
        ),
        body="\n".join(body),
        plotly=plotly_script(),
        figures=_as_script(drawn),
    )


def _as_script(drawn: Sequence[Figure]) -> str:
    """JSON that cannot end the script it stands in."""
    text = json.dumps([{"traces": figure.traces, "layout": figure.layout} for figure in drawn])
    return text.replace("<", "\\u003c")


def _plot(number: int, figure: Figure) -> str:
    return f'<h3>{escape(figure.title)}</h3>\n<div class="plot" id="plot{number}"></div>'


def _html_finding(finding: TraceFinding) -> str:
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in finding.says)
    return (
        f'<div class="finding {finding.weight.value}"><h3>{escape(finding.title)} '
        f'<span class="code">{escape(finding.code)}, {finding.weight.value}</span></h3>{said}'
        f"<details><summary>{escape(finding.evidence.title)}</summary>{_table(finding.evidence)}</details></div>"
    )


def _folded(answer: Answer) -> str:
    is_open = " open" if answer.name in _OPEN else ""
    return f"<details{is_open}><summary>{escape(answer.title)}</summary>{_table(answer)}</details>"


def _table(answer: Answer) -> str:
    notes = "".join(f'<p class="faint">{escape(note)}</p>' for note in answer.notes)
    if not answer.rows:
        return notes or "<p>No rows.</p>"
    kinds = ["" if column.unit is Unit.TEXT else "number" for column in answer.columns]
    head = "".join(
        _cell("th", heading(column), kind) for column, kind in zip(answer.columns, kinds, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(map(_data_cell, cells(answer, row), kinds)) + "</tr>"
        for row in answer.rows[:HTML_ROWS]
    )
    left = len(answer.rows) - HTML_ROWS
    more = f'<p class="faint">{left:,} more rows in tables.parquet.</p>' if left > 0 else ""
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll"><table>\n{body}\n</table></div>{more}{notes}'


def _data_cell(text: str, kind: str) -> str:
    return _cell("td", text, kind or ("long" if len(text) > 36 else ""))


def _cell(tag: str, text: str, kind: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


FILES = ("report.html", "report.md", "tables.parquet")


def write_report(compared: ComparisonResult, folder: Path) -> list[Path]:
    """Write the three files into `folder`, over those of an earlier report."""
    paths = [folder / name for name in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(render_html(compared), encoding="utf-8")
        paths[1].write_text(render_markdown(compared), encoding="utf-8")
        pq.write_table(cells_table(compared), paths[2])
    except OSError as error:
        raise StorageError(f"Cannot write the report: {error}", uri=str(folder), errno=error.errno) from error
    return paths


def cells_table(compared: ComparisonResult) -> pa.Table:
    """Every cell of every table, finding's evidence and chart."""
    answers = [
        compared.mismatches,
        *compared.tables,
        *compared.charts,
        *(finding.evidence for finding in compared.findings),
    ]
    columns: dict[str, list[object]] = {
        name: [] for name in ("table", "row", "column", "unit", "text", "number")
    }
    for answer in answers:
        _add_cells(answer, columns)
    types = [pa.string(), pa.int64(), pa.string(), pa.string(), pa.string(), pa.float64()]
    return pa.table(
        {name: pa.array(values, kind) for (name, values), kind in zip(columns.items(), types, strict=True)}
    )


def _add_cells(answer: Answer, columns: dict[str, list[object]]) -> None:
    for number, row in enumerate(answer.rows):
        for column, value in zip(answer.columns, row, strict=True):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            columns["table"].append(answer.name)
            columns["row"].append(number)
            columns["column"].append(column.name)
            columns["unit"].append(column.unit.value)
            columns["text"].append(None if value is None else str(value))
            columns["number"].append(value if is_number else None)
