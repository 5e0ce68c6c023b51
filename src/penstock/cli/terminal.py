"""Output of a command: results on stdout, everything else on stderr, and all of it on rank 0 only.

With `--json` stdout carries exactly one JSON document. `live_display` draws progress.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from click import get_current_context

from penstock.errors import UsageError, printable
from penstock.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod
    from rich.table import Table

    from penstock.cluster.comm import RankWait
    from penstock.results.run_status import Follower

_WIDE = 1000
_MANY_ROWS = 500
SCHEMA_VERSIONS: Mapping[str, int] = {"results-ls": 2, "results-rm": 2}
"""Versions of documents that lost a key or changed its meaning; all others are at 1."""

Line = str | list[str | tuple[str, str]]
"""A line of text, or its pieces, each plain or with a style: `["1 of 2 ", ("failed", "red")]`."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table for people; its columns are the keys of its rows, and numbers are right-aligned."""

    title: str
    rows: Sequence[Mapping[str, str]]
    is_wide: bool = False
    """Allows it to be wider than the terminal, where no number may be cut."""

    def draw(self, console: Console) -> None:
        """Print the table; its title alone if it has no rows."""
        if not self.rows:
            console.print(f"{self.title}: none")
            return
        if len(self.rows) > _MANY_ROWS:
            self._print_lines(console)
            return
        if self.is_wide:
            console = _open_console(file=console.file, width=_WIDE, color_system=None)
        grid = self._grid(str)
        if console.measure(grid, options=console.options.update(width=_WIDE)).maximum > console.width:
            grid = self._grid(_fold)
        with console.capture() as drawn:
            console.print(grid)
        # Rich ends what it cuts with an ellipsis, and a number that is cut is a wrong number.
        had_one = any("…" in text for row in self.rows for text in (self.title, *row, *row.values()))
        if "…" not in drawn.get() or had_one:
            console.print(grid)
        else:
            self._list(console)

    def _grid(self, name_column: Callable[[str], str]) -> Table:
        from rich import box
        from rich.table import Table

        grid = Table(
            title=self.title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for column in self.rows[0]:
            is_numeric = self._is_numeric(column)
            justify: JustifyMethod = "right" if is_numeric else "left"
            grid.add_column(name_column(column), justify=justify, no_wrap=is_numeric)
        for row in self.rows:
            grid.add_row(*(printable(text, keep="") for text in row.values()))
        return grid

    def _is_numeric(self, column: str) -> bool:
        """Check for a column of numbers, which is right-aligned with its dashes for unknown values."""
        texts = (row[column] for row in self.rows)
        return all(text[:1].isdecimal() or text in ("", "-") for text in texts)

    def _print_lines(self, console: Console) -> None:
        """Print one line per row at full width: rich would take minutes for 100,000 rows."""
        from rich.cells import cell_len

        names = list(self.rows[0])
        lines = [names, *([printable(text, keep="") for text in row.values()] for row in self.rows)]
        widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
        are_numeric = [self._is_numeric(name) for name in names]
        lines.insert(1, [("-" if console.options.ascii_only else "─") * width for width in widths])
        console.print(self.title)
        for line in lines:
            padded = (
                " " * (width - cell_len(text)) + text if is_right else text + " " * (width - cell_len(text))
                for text, width, is_right in zip(line, widths, are_numeric, strict=True)
            )
            console.file.write("  ".join(padded).rstrip() + "\n")

    def _list(self, console: Console) -> None:
        """Print each row as a paragraph, where the terminal is too narrow for a table."""
        console.print(self.title)
        indent = max(len(column) for column in self.rows[0]) + 2
        for row in self.rows:
            console.print()
            for column, text in row.items():
                console.print(f"{column:<{indent}}{printable(text, keep='')}".rstrip())


def _fold(name: str) -> str:
    """Split a name into two lines, as narrow as its words allow."""
    words = name.split(" ")
    lines = ((" ".join(words[:at]), " ".join(words[at:])) for at in range(1, len(words)))
    return "\n".join(min(lines, key=lambda pair: max(map(len, pair)), default=(name,)))


View = Iterable[Line | TextTable]
"""A result for people, from top to bottom. A generator does its work only if the result is drawn."""


def table(title: str, rows: Sequence[Mapping[str, str]], *, is_wide: bool = False) -> View:
    """A view of one table."""
    return [TextTable(title, rows, is_wide)]


def bold(text: str) -> Line:
    """A line in bold type."""
    return [(text, "bold")]


def _open_console(**settings: Any) -> Console:
    """A console that prints texts unchanged: names of files may look like markup or emoji codes."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, **settings)


def _draw(view: View, console: Console) -> None:
    from rich.text import Text

    for block in view:
        if isinstance(block, TextTable):
            block.draw(console)
        else:
            pieces = [block] if isinstance(block, str) else block
            styled = [(piece, "") if isinstance(piece, str) else piece for piece in pieces]
            console.print(Text.assemble(*((printable(text), style) for text, style in styled)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The output of one command on one rank; `speaks` is true on rank 0 only.

    `find_wait` says what this rank waits for, `open_followers` opens what follows the command.
    """

    as_json: bool
    speaks: bool = True
    ranks: int = 1
    find_wait: Callable[[], RankWait | None] = lambda: None
    open_followers: Callable[[], list[Follower]] | None = None

    def result(self, document: Mapping[str, Any], view: View) -> None:
        """Print the result: `document` with `--json`, else `view`."""
        if not self.speaks:
            return
        if self.as_json:
            print_json(document)
            return
        _draw(view, _open_console())

    def note(self, text: str) -> None:
        """Print one line for people, on stderr."""
        if self.speaks:
            print(printable(text), file=sys.stderr)

    def notes(self, texts: Iterable[object]) -> None:
        """Print each text as a line of its own, on stderr."""
        for text in texts:
            self.note(str(text))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress on stderr, as a bar on a terminal, else a line every 30 s, and to monitoring."""
        if not self.speaks:
            yield Progress()
            return
        from penstock.cli.live_display import make_display
        from penstock.results.run_status import Meter

        followers = self.open_followers() if self.open_followers else [make_display(shows_figures=False)]
        name = f"process-{os.getpid()}"
        with Meter(followers, name=name, ranks=self.ranks, find_wait=self.find_wait) as meter:
            yield meter


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document on stdout, with its schema first. NaN is an error, because it is no JSON.

    The schema names the running verb's document, as `checkpoint-run/1`; the site has it under `schemas/`. A
    document with a `version` of its own, which other commands read again, has none.
    """
    if sys.stdout is None:
        raise UsageError("The standard output is closed", fix="Write the document to a file or a pipe.")
    context = get_current_context(silent=True)
    words = context.command_path.split()[1:] if context is not None and "version" not in document else []
    if verb := "-".join(words):
        document = {"schema": f"{verb}/{SCHEMA_VERSIONS.get(verb, 1)}", **document}
    json.dump(document, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def render_text(view: View) -> str:
    """A view as text for a log."""
    text = StringIO()
    _draw(view, _open_console(file=text, width=110))
    return text.getvalue()


def format_number(value: float | None, style: str) -> str:
    """A number in a format's style, or a dash."""
    return "-" if value is None else format(value, style)


def clear_progress() -> None:
    """Erase the progress bars that a process left when it ended early, and show the cursor again."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")
