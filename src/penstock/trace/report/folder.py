"""The report's folder: report.html, report.md, tables.parquet.

`tables.parquet` has a row for each cell: table, row, column, unit, the value as text, and as a number where
it is one; so tables of all shapes stand in one file that any tool can pivot.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import StorageError
from penstock.trace.report import html, markdown

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import Compared
    from penstock.trace.questions.base import Answer

FILES = ("report.html", "report.md", "tables.parquet")


def write_report(compared: Compared, folder: Path) -> list[Path]:
    """Write the three files into `folder`, over those of an earlier report."""
    paths = [folder / name for name in FILES]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(html.render(compared), encoding="utf-8")
        paths[1].write_text(markdown.render(compared), encoding="utf-8")
        pq.write_table(cells_table(compared), paths[2])
    except OSError as error:
        raise StorageError(f"Cannot write the report: {error}", uri=str(folder), errno=error.errno) from error
    return paths


def cells_table(compared: Compared) -> pa.Table:
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
