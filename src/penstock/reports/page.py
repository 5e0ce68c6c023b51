"""Render a report as one HTML document, and write it.

Jinja2 escapes every string. If the template uses a name that was not passed, rendering fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from penstock.errors import UsageError, printable
from penstock.optional_libraries import explained_imports
from penstock.reports.drawing import Drawing, assign_hues, draw
from penstock.reports.report import Cell, Chart, Look, Report, Section, Table
from penstock.storage.files.file_storage import open_local
from penstock.storage.files.local_files import open_to_read
from penstock.storage.protocol import write_object

_LONG_TEXT: Final = 36
"""Text of at least this many characters in a table cell may wrap."""
_LETTERS: Final = {"first": 34, "grid": 50, "wide": 100}
"""The number of letters that fit below a chart, for each place of a chart."""


def is_page(path: Path) -> bool:
    """Return whether Penstock wrote this file as a page."""
    try:
        with open_to_read(path) as file:
            return b'<meta name="generator" content="Penstock">' in file.read(512)
    except OSError:
        return False


def require_replaceable(path: Path) -> Path:
    """Raise `UsageError` if a page at `path` would replace a file that is not a page; return the path."""
    if path.exists() and not is_page(path):
        raise UsageError(
            "This file is not a page of Penstock, and is kept", where=str(path), fix="Choose another name."
        )
    return path


def write_report(report: Report, path: Path) -> None:
    """Write the page, replacing an earlier page; raise `UsageError` if another kind of file is there."""
    require_replaceable(path)
    text = render_report(report).encode(errors="backslashreplace")
    # Written completely or not at all, like every file in a run's folder.
    write_object(open_local(path.parent), path.name, [text])


def render_report(report: Report) -> str:
    """Return the page as HTML. The page loads nothing."""
    hues = assign_hues([*report.runs, *_runs_of(report)])
    drawn = {
        id(chart): draw(chart, hues, letters=_LETTERS[room])
        for room, chart in _charts_of(report)
    }  # fmt: skip
    with explained_imports():
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - comes with an extra
    template = Environment(
        loader=PackageLoader("penstock.reports"),
        autoescape=True,
        # File names may contain control characters; markup was already finalized when it was created.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    ).get_template("report.html")
    text: str = template.render(
        report=report,
        hues=hues,
        drawings=lambda charts: [drawn[id(chart)] for chart in charts],
        shared_legend=_shared_legend,
        lay_out=lambda table: _lay_out(table, hues),
    )
    return text


def _sections_of(sections: Sequence[Section]) -> Iterator[Section]:
    for section in sections:
        yield section
        yield from _sections_of(section.parts)


def _charts_of(report: Report) -> Iterator[tuple[str, Chart]]:
    """Yield all charts, each with its place."""
    yield from (("first", chart) for chart in report.highlights)
    for section in _sections_of(report.sections):
        for chart in section.charts:
            yield ("wide" if chart.is_wide or len(section.charts) == 1 else "grid"), chart


def _runs_of(report: Report) -> Iterator[str]:
    """Yield all names that have a color, in their order on the page."""
    for _, chart in _charts_of(report):
        yield chart.run
        yield from (one.run for one in chart.series if one.run)
    for section in _sections_of(report.sections):
        yield from filter(None, [section.run])
        for table in section.tables:
            for row in table.rows:
                yield from (cell.run for cell in row.values() if isinstance(cell, Cell) and cell.run)


def _shared_legend(drawings: Sequence[Drawing]) -> Mapping[str, str]:
    """Return one legend for all charts of a section, or none unless one chart's legend has all entries."""
    widest = max((drawing.legend for drawing in drawings), key=len, default={})
    is_shared = len(drawings) > 1 and not any("run-" in look for look in widest.values())
    return widest if is_shared and all(one.legend.items() <= widest.items() for one in drawings) else {}


def _lay_out(table: Table, hues: Mapping[str, int]) -> dict[str, Any]:
    """Return the cells of the head and the rows: text, CSS classes, length of the bar in percent, link."""
    rows = [
        {name: cell if isinstance(cell, Cell) else Cell(cell) for name, cell in row.items()}
        for row in table.rows
    ]
    columns = list(rows[0])
    right = set(table.numbers or ())
    if table.numbers is None:
        right = {name for name in columns if all(_is_number(row[name].text) for row in rows)}
    lengths = [_bar_length(row[table.bars]) for row in rows] if table.bars else [0.0] * len(rows)
    longest = max(lengths)

    def lay_out_cell(name: str, cell: Cell, length: float) -> dict[str, Any]:
        has_bar = name == table.bars and longest > 0
        is_right = name in right or name == table.bars
        looks = ["number"] if is_right else ["long"] if len(cell.text) > _LONG_TEXT else []
        looks += ["bar"] if has_bar else []
        looks += [cell.look.value] if cell.look is not Look.PLAIN else []
        looks += [f"{'hued' if has_bar else 'hue'} run-{hues[cell.run]}"] if cell.run else []
        # Quoted and below this page's folder, so that no file name becomes a URL scheme.
        link = f"./{quote(cell.link)}" if cell.link else ""
        if cell.link.startswith("#"):
            link = f"#{quote(cell.link[1:])}"
        return {
            "text": cell.text,
            "look": " ".join(looks),
            "bar": 100 * length / longest if has_bar else None,
            "link": link,
        }

    return {
        "head": [(name, "number" if name in right or name == table.bars else "") for name in columns],
        "rows": [
            [lay_out_cell(name, row[name], length) for name in columns]
            for row, length in zip(rows, lengths, strict=True)
        ],
    }


def _bar_length(cell: Cell) -> float:
    if cell.value is not None:
        return cell.value
    return float(cell.text.replace(",", "")) if _is_number(cell.text) else 0.0


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "", 1).isdecimal()
