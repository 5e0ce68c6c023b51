"""The frame and the parts of this room's HTML pages: self-contained, light and dark, wide and narrow.

Place in the flow: below the pages of verdicts and of figures. Invariant: texts come in as they are and are
escaped here; what is called `body` or `parts` is HTML already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Final

from penstock.results.page import STYLE

LONG_TEXT: Final = 36
"""Characters from which on a cell may break its lines."""

_PAGE: Final = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style
:root { --good: #2f6f4f; --bad: #b3261e; --doubt: #8a5a00; }
@media (prefers-color-scheme: dark) {
  :root { --good: #7fc8a0; --bad: #ff8a80; --doubt: #e8b04b; }
}
* { box-sizing: border-box; }
body { max-width: 76rem; overflow-wrap: break-word; }
h3 { margin: 1.4rem 0 .3rem; font-size: 1rem; } p { margin: .25rem 0; } a { color: inherit; }
.faint { color: var(--faint); }
.good { color: var(--good); } .bad { color: var(--bad); } .doubt { color: var(--doubt); }
.controls { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin: .8rem 0; padding: .6rem .8rem;
            border: 1px solid var(--line); border-radius: .4rem; }
.controls label { white-space: nowrap; } .controls input[type=search] { flex: 1 1 12rem; font: inherit; }
.finding { border-left: .25rem solid var(--line); padding: .1rem .8rem; margin: .6rem 0; }
.finding.good { border-color: var(--good); } .finding.bad { border-color: var(--bad); }
.finding.doubt { border-color: var(--doubt); } .finding * { color: var(--ink); }
.finding .mark { font-weight: 600; } .finding.good .mark { color: var(--good); }
.finding.bad .mark { color: var(--bad); } .finding.doubt .mark { color: var(--doubt); }
.finding .faint { color: var(--faint); }
section { content-visibility: auto; contain-intrinsic-size: auto 9rem; }
[hidden] { display: none; }
.plots { display: flex; flex-wrap: wrap; gap: .5rem 2rem; }
figure { flex: 1 1 18rem; max-width: 27rem; margin: .6rem 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .faint { fill: var(--faint); } svg .grid { stroke: var(--line); }
svg .point { fill: var(--bar); } svg .outlier { fill: var(--bad); }
svg .band { fill: var(--bar); opacity: .22; } svg .mean { stroke: var(--bar); stroke-width: 2; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="subtitle">$subtitle</p>
$body
$script</body>
</html>
""")


def render_page(*, title: str, subtitle: str, parts: Sequence[str], script: str = "") -> str:
    """A whole page of `parts`, and a script of its own."""
    return _PAGE.substitute(
        style=STYLE,
        title=escape(title),
        subtitle=escape(subtitle),
        body="\n".join(parts),
        script=f"<script>{script}</script>\n" if script else "",
    )


def heading(text: str) -> str:
    """A heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{attribute('class', kind)}>{escape(text)}</p>"


def listing(texts: Sequence[str]) -> str:
    """A list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def grid(rows: Sequence[Mapping[str, str]], numbers: frozenset[str] = frozenset()) -> str:
    """A table of plain texts; columns of `numbers` stand to the right."""
    if not rows:
        return paragraph("None.")
    head = "".join(cell(column, "number" if column in numbers else "", tag="th") for column in rows[0])
    body = "\n".join(
        "<tr>" + "".join(cell(text, _kind(column, text, numbers)) for column, text in row.items()) + "</tr>"
        for row in rows
    )
    return table(head, body)


def table(head: str, body: str) -> str:
    """A table that scrolls sideways by itself, never with the page."""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )


def cell(text: str, kind: str = "", *, tag: str = "td") -> str:
    """One cell of a plain text."""
    return f"<{tag}{attribute('class', kind)}>{escape(text)}</{tag}>"


def attribute(name: str, text: str) -> str:
    """An attribute with its leading space, or nothing for an empty text."""
    return f' {name}="{escape(text)}"' if text else ""


def _kind(column: str, text: str, numbers: frozenset[str]) -> str:
    return "number" if column in numbers else "long" if len(text) > LONG_TEXT else ""
