"""The report as one HTML file that loads nothing: mail it, open it without a network, read it on a phone.

Pure but for plotly's own script. Invariant: every text is escaped here. The order is that of understanding:
what the runs differ in, then what stands out, then plots, then tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from string import Template
from typing import TYPE_CHECKING, Final

from penstock.trace.questions.base import Answer, Unit
from penstock.trace.questions.render import cells, heading
from penstock.trace.report.plots import Figure, figures, plotly_script

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import Compared
    from penstock.trace.findings.base import Finding

MOST_ROWS: Final = 200
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


def render(compared: Compared) -> str:
    """The whole page."""
    drawn = figures(compared)
    body = [
        "<h2>What the runs differ in</h2>",
        _table(compared.mismatches),
        "<h2>What stands out</h2>",
        *([_finding(finding) for finding in compared.findings] or ["<p>Nothing.</p>"]),
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


def _finding(finding: Finding) -> str:
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
        for row in answer.rows[:MOST_ROWS]
    )
    left = len(answer.rows) - MOST_ROWS
    more = f'<p class="faint">{left:,} more rows in tables.parquet.</p>' if left > 0 else ""
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll"><table>\n{body}\n</table></div>{more}{notes}'


def _data_cell(text: str, kind: str) -> str:
    return _cell("td", text, kind or ("long" if len(text) > 36 else ""))


def _cell(tag: str, text: str, kind: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"
