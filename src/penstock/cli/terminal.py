"""Output of a command: results on stdout, everything else on stderr, and all of it on rank 0 only.

With `--json` stdout carries exactly one JSON document. Progress is drawn only on a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, Self

from penstock.environment import PROGRESS_COLUMNS, process_environment
from penstock.progress import Progress, Silent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


View = Callable[["Console"], None]
"""Draws a result for people on a console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The output of one command on one rank; `speaks` is true on rank 0 only."""

    as_json: bool
    speaks: bool = True

    def result(self, document: Mapping[str, Any], view: View) -> None:
        """Print the result: `document` with `--json`, else what `view` draws."""
        if not self.speaks:
            return
        if self.as_json:
            print_json(document)
            return
        from rich.console import Console

        view(Console(highlight=False, soft_wrap=True))

    def note(self, text: str) -> None:
        """Print one line for people, on stderr."""
        if self.speaks:
            print(text, file=sys.stderr)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Draw progress on stderr where that is a terminal: this process's, or the launching process's."""
        columns = process_environment().get(PROGRESS_COLUMNS)
        # Rich takes a tenth of a second to import, which only a terminal is worth.
        if not self.speaks or not (columns or sys.stderr.isatty()):
            yield Silent()
            return
        from rich.console import Console

        console = Console(stderr=True, force_terminal=columns is not None or None)
        if columns is not None:
            console.width = int(columns)
        with _Bars(console) as bars:
            yield bars


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document on stdout. NaN is an error, because it is no JSON."""
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def render_text(view: View) -> str:
    """What a view draws, as text for a log."""
    from rich.console import Console

    text = StringIO()
    view(Console(file=text, width=110, highlight=False, soft_wrap=True))
    return text.getvalue()


def format_number(value: float | None, style: str) -> str:
    """A number in a format's style, or a dash."""
    return "-" if value is None else format(value, style)


def progress_columns() -> str | None:
    """The width of this process's stderr, for ranks that draw progress on it; None if not a terminal."""
    return str(get_terminal_size().columns) if sys.stderr.isatty() else None


def clear_progress() -> None:
    """Erase the progress bars that a process left when it ended early, and show the cursor again."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")


class _Bars:
    """Progress as one bar a phase: share, time spent, time left. Finished phases vanish."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        times = (TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
        self._display = Progress(*columns, *times, console=console, transient=True)
        self._phase: TaskID | None = None

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.stop()

    def begin(self, phase: str, total: float) -> None:
        """Replace the bar of the phase before."""
        if self._phase is not None:
            self._display.remove_task(self._phase)
        self._phase = self._display.add_task(phase, total=total)

    def advance(self, amount: float) -> None:
        """Move the bar; rich is safe for threads."""
        if self._phase is not None:
            self._display.advance(self._phase, amount)


def table(title: str, rows: Sequence[Mapping[str, str]]) -> View:
    """A view of `rows` as a table; its columns are their keys, and numbers are right-aligned."""

    def draw(console: Console) -> None:
        from rich import box
        from rich.table import Table

        if not rows:
            console.print(f"{title}: none")
            return
        grid = Table(
            title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column in rows[0]:
            grid.add_column(column, justify="right" if _is_numeric(rows, column) else "left")
        for row in rows:
            grid.add_row(*row.values())
        console.print(grid)

    return draw


def _is_numeric(rows: Sequence[Mapping[str, str]], column: str) -> bool:
    return all(row[column][:1].isdecimal() or row[column] in ("", "-") for row in rows)
