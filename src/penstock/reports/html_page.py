"""Render the templates of `templates/` as self-contained HTML documents.

Every template extends `page.html`, which has the frame and the style. Jinja2 escapes every text; only what a
template marks `safe` is HTML already. A name that a template uses and nobody passed is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import printable
from penstock.optional_libraries import explained_imports

if TYPE_CHECKING:
    from jinja2 import Environment

LONG_TEXT: Final = 36
"""From this many characters on, the text of a table cell may wrap."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    `look` names CSS classes of `style.css`: number, long, good, bad, doubt. `bar_percent` is the length of
    the bar under a number.
    """

    text: str
    look: str = ""
    bar_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What the macro `table` of `parts.html` draws."""

    head: tuple[Cell, ...]
    rows: tuple[tuple[Cell, ...], ...]


def is_page(path: Path) -> bool:
    """Whether a file is a page that Penstock made."""
    try:
        with path.open("rb") as file:
            return b'<meta name="generator" content="Penstock">' in file.read(512)
    except OSError:
        return False


def render_page(template: str, *, title: str, subtitle: str, **values: Any) -> str:
    """Render one of the templates with `values`; `Unavailable` where Jinja2 is not installed."""
    text: str = _environment().get_template(template).render(title=title, subtitle=subtitle, **values)
    return text


def make_table(
    rows: Sequence[Mapping[str, str]], *, numbers: Collection[str] | None = None, bars: str = ""
) -> Table | None:
    """Lay out rows of one and the same columns; None where there are no rows.

    Columns of `numbers` are aligned right (default: those in which every text is a number). The numbers of
    the column `bars` get bars, the largest number the longest.
    """
    if not rows:
        return None
    right = _number_columns(rows) if numbers is None else frozenset(numbers)
    largest = max(_parse_number(row[bars]) for row in rows) if bars else 0.0

    def make_cell(column: str, text: str) -> Cell:
        if column == bars and largest > 0:
            return Cell(text, "number bar", 100 * _parse_number(text) / largest)
        return Cell(text, "number" if column in right else "long" if len(text) > LONG_TEXT else "")

    return Table(
        head=tuple(Cell(column, "number" if column in right else "") for column in rows[0]),
        rows=tuple(tuple(make_cell(column, row[column]) for column in rows[0]) for row in rows),
    )


@cache
def _environment() -> Environment:
    with explained_imports():
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - comes with an extra
    return Environment(
        loader=PackageLoader("penstock.reports"),
        autoescape=True,
        # Names of files may have control characters; what is markup was finalized when it was made.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def _number_columns(rows: Sequence[Mapping[str, str]]) -> frozenset[str]:
    return frozenset(column for column in rows[0] if all(_is_number(row[column]) for row in rows))


def _parse_number(text: str) -> float:
    return float(text.replace(",", ""))


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).isdecimal()
