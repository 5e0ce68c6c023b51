"""What a command says, and where: results on stdout, everything else on stderr, nothing but on rank 0.

With `--json` stdout carries exactly one JSON document. Progress is drawn only on a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The way out of one command on one rank; `speaks` on rank 0 alone."""

    as_json: bool
    speaks: bool = True

    def result(self, document: Mapping[str, Any], *, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Print the result: `document` as JSON, or `rows` as a table whose columns are their keys."""
        if not self.speaks:
            return
        if self.as_json:
            json.dump(document, sys.stdout, indent=2, allow_nan=False)
            sys.stdout.write("\n")
            return
        self._print_table(title, rows)

    def _print_table(self, title: str, rows: Sequence[Mapping[str, str]]) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", header_style="bold")
        for column in rows[0] if rows else ():
            table.add_column(column, justify="right" if _is_numeric(rows, column) else "left")
        for row in rows:
            table.add_row(*row.values())
        Console().print(table)

    def note(self, text: str) -> None:
        """One line for people, on stderr."""
        if self.speaks:
            print(text, file=sys.stderr)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress display on stderr that stays silent where stderr is no terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (self.speaks and console.is_terminal),
        ) as progress:
            yield progress


def _is_numeric(rows: Sequence[Mapping[str, str]], column: str) -> bool:
    return all(row[column][:1].isdecimal() or row[column] in ("", "-") for row in rows)
