"""A self-contained HTML page from plain records: it loads nothing; mail it, print it, read it on a phone.

Pure: records in, text out. Invariant: every text is escaped here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, some prose, and maybe a table; the numbers of `bars` are also drawn, longest = largest."""

    title: str
    prose: Sequence[str] = ()
    rows: Sequence[Mapping[str, str]] = ()
    bars: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole page: what it is about, where and when it was made, and its sections."""

    title: str
    subtitle: str
    sections: Sequence[Section]


STYLE: Final = """\
:root { color-scheme: light dark; --ink: #1b2430; --paper: #fbfbf9; --faint: #6b7682; --line: #dcdfe3;
        --bar: #3f86c4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --paper: #14181d; --faint: #97a1ac; --line: #2d343c; --bar: #4c8fc9; }
}
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.55 system-ui, sans-serif; }
h1 { margin-bottom: 0; font-size: 1.6rem; } h2 { margin: 2.2rem 0 .4rem; font-size: 1.15rem; }
.subtitle { margin-top: .2rem; color: var(--faint); } p { max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: left;
         white-space: nowrap; }
.long { min-width: 17rem; white-space: normal; }
th { color: var(--faint); font-weight: 600; } .number { text-align: right; }
.bar { min-width: 7rem;
       background: linear-gradient(var(--bar), var(--bar)) no-repeat left bottom / var(--share) .28rem; }
"""
"""The look of all pages that are made of text and tables, light and dark."""

_DOCUMENT: Final = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
<p class="subtitle">$subtitle</p>
$sections
</body>
</html>
""")


_LONG_TEXT: Final = 36
"""Characters from which on a cell may break its lines."""


def render(page: Page) -> str:
    """The page as one HTML document."""
    return _DOCUMENT.substitute(
        style=STYLE,
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        sections="\n".join(_section(section) for section in page.sections),
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts.extend(f"<p>{escape(paragraph)}</p>" for paragraph in section.prose)
    if section.rows:
        parts.append(_table(section))
    return "\n".join(parts)


def _table(section: Section) -> str:
    columns = list(section.rows[0])
    numeric = {column for column in columns if all(_is_number(row[column]) for row in section.rows)}
    largest = max(_number(row[section.bars]) for row in section.rows) if section.bars else 0.0

    def cell(column: str, text: str) -> str:
        kind = "number" if column in numeric else "long" if len(text) > _LONG_TEXT else ""
        if column != section.bars or largest <= 0:
            return _cell("td", text, kind)
        share = 100 * _number(text) / largest
        return f'<td class="number bar" style="--share: {share:.1f}%">{escape(text)}</td>'

    head = "".join(_cell("th", column, "number" if column in numeric else "") for column in columns)
    lines = [
        "<tr>" + "".join(cell(column, row[column]) for column in columns) + "</tr>" for row in section.rows
    ]
    body = "\n".join(lines)
    rows = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="scroll"><table>\n{rows}\n</table></div>'


def _cell(tag: str, text: str, kind: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<{tag}{attribute}>{escape(text)}</{tag}>"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).isdecimal()
