"""The answer to a question: a table with exact numbers, and its rendering as JSON, CSV, Markdown and cells.

    EventsView -> question -> Answer -> terminal, CSV, JSON, Markdown, report

Invariants: an answer holds microseconds, bytes and counts as integers, and only rendering rounds them;
seconds are printed to the microsecond, so printed sums can be checked by hand.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

from penstock.errors import csv_cell
from penstock.units import format_bytes, format_rate

Value = int | float | str | bool | None

MOST_ROWS: Final = 1_000
"""The rows of a table that are shown to a person; traces of strangers may have millions."""


def count_left_out(num_rows: int, all_rows: str) -> list[str]:
    """Return the line below a table that was cut: how many rows it leaves out, and where all of them are."""
    return [f"... and {num_rows:,} more; {all_rows}"] if num_rows else []


class Unit(StrEnum):
    """The unit of a column's numbers, which determines how they are rendered."""

    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    GIB = "GiB"
    NUMBER = "number"
    MICROSECONDS = "us"
    RATE = "bytes/s"
    RATIO = "ratio"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an answer. Its name carries the unit, as in `union_us`; `head` is a heading for people."""

    name: str
    unit: Unit = Unit.TEXT
    head: str = ""


def make_columns(*columns: str | Column) -> list[Column]:
    """Make columns from names that carry their unit, such as `num_events` and `union_us`, or from columns."""
    made = []
    for column in columns:
        if isinstance(column, str):
            unit = next((unit for suffix, unit in _SUFFIXES.items() if column.endswith(suffix)), Unit.TEXT)
            made.append(Column(column, Unit.COUNT if column.startswith("num_") else unit))
        else:
            made.append(column)
    return made


_SUFFIXES: Final = {
    "_us": Unit.MICROSECONDS,
    "_bytes": Unit.BYTES,
    "_gib": Unit.GIB,
    "_rate": Unit.RATE,
    "_share": Unit.SHARE,
    "concurrency": Unit.RATIO,
    "to_median": Unit.RATIO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A table. `name` is for files; `title`, `notes` and the text of a `missing` value are for people.

    `num_left_out` counts further rows, which the table does not have.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    notes: Sequence[str] = ()
    missing: str = "-"
    num_left_out: int = 0

    def first(self, most_rows: int) -> Self:
        """Return the first rows; all others are only counted."""
        return replace(
            self, rows=self.rows[:most_rows], num_left_out=self.num_left_out + len(self.rows[most_rows:])
        )

    def records(self) -> list[dict[str, Value]]:
        """Return one mapping for each row."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def without(self, *names: str) -> Self:
        """Return the same rows without the columns `names`."""
        kept = [place for place, column in enumerate(self.columns) if column.name not in names]
        return replace(
            self,
            columns=[self.columns[place] for place in kept],
            rows=[[row[place] for place in kept] for row in self.rows],
        )


def document(answer: Answer) -> dict[str, Any]:
    """Return the answer as a JSON document, in which `rows` are objects."""
    return {
        "name": answer.name,
        "title": answer.title,
        "units": {column.name: column.unit.value for column in answer.columns},
        "rows": answer.records(),
        "notes": list(answer.notes),
    }


def as_csv(answer: Answer) -> str:
    """Return a header and rows; missing values are empty, and no text is a formula to a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in answer.columns])
    for row in answer.rows:
        writer.writerow(map(csv_cell, row))
    return text.getvalue()


def as_markdown(answer: Answer, all_rows: str = "") -> str:
    """Return a heading, the table and the notes. `all_rows` says where all rows are."""
    lines = [f"### {answer.title}", ""]
    if answer.rows:
        rules = ["---" if column.unit is Unit.TEXT else "---:" for column in answer.columns]
        texts = [[text.replace("|", "\\|") for text in cells(answer, row)] for row in answer.rows]
        heads = [heading(column) for column in answer.columns]
        lines += [f"| {' | '.join(line)} |" for line in (heads, rules, *texts)]
    else:
        lines.append("(no rows)")
    notes = [*answer.notes, *count_left_out(answer.num_left_out, all_rows)]
    return "\n".join([*lines, *(line for note in notes for line in ("", note))]) + "\n"


def as_records(answer: Answer) -> list[dict[str, str]]:
    """Return readable cells by heading, for a table on a terminal."""
    heads = [heading(column) for column in answer.columns]
    return [dict(zip(heads, cells(answer, row), strict=True)) for row in answer.rows]


def heading(column: Column) -> str:
    """Return the heading of a column for people, without any unit that the cells show themselves."""
    if column.head:
        return column.head
    if column.unit is Unit.MICROSECONDS:
        return f"{column.name.removesuffix('_us').replace('_', ' ')} s"
    if column.unit is Unit.GIB:
        return f"{column.name.removesuffix('_gib').replace('_', ' ')} GiB"
    return column.name.removesuffix("_bytes").removeprefix("num_").replace("_", " ")


def cells(answer: Answer, row: Sequence[Value]) -> list[str]:
    """Return the readable texts of one row."""
    return [
        answer.missing if value is None else _FORMATS[column.unit](value)
        for column, value in zip(answer.columns, row, strict=True)
    ]


_FORMATS: Final[Mapping[Unit, Callable[[Any], str]]] = {
    Unit.TEXT: lambda value: ("yes" if value else "no") if isinstance(value, bool) else str(value),
    Unit.COUNT: lambda value: f"{value:,}",
    Unit.BYTES: format_bytes,
    Unit.GIB: lambda value: f"{value:.6f}",
    Unit.NUMBER: lambda value: f"{value:,.2f}" if isinstance(value, float) else f"{value:,}",
    Unit.MICROSECONDS: lambda value: f"{value / 1e6:.6f}",
    Unit.RATE: format_rate,
    Unit.RATIO: lambda value: f"{value:.2f}",
    Unit.SHARE: lambda value: f"{100 * value:.1f} %",
}
