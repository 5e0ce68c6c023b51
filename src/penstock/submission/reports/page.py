"""The frame and the parts of this room's HTML pages: self-contained, light and dark, wide and narrow.

Place in the flow: below the pages of verdicts and of figures. Invariant: texts come in as they are and are
escaped here; what is called `body` or `parts` is HTML already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from penstock.reports import html_page

LONG_TEXT: Final = 36
"""Characters from which on a cell may break its lines."""


def render_page(*, title: str, subtitle: str, parts: Sequence[str], script: str = "") -> str:
    """A whole page of `parts`, and a script of its own."""
    return html_page.render_page(
        "raw.html", title=title, subtitle=subtitle, body="\n".join(parts), script=script
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
