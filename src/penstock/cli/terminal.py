"""Output of a command: results on stdout, everything else on stderr, and all of it on rank 0 only.

With `--json`, stdout carries exactly one JSON document. `live_display` draws progress.
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
    from rich.console import Console

    from penstock.cluster.comm import RankWait
    from penstock.results.run_status import Follower

SCHEMA_VERSIONS: Mapping[str, int] = {"results-ls": 2, "results-rm": 2}
"""The versions of documents that lost a key or changed a key's meaning; all others have version 1."""

Line = str | list[str | tuple[str, str]]
"""A line of text as one string, or as parts, each plain or with a style: `["1 of 2 ", ("failed", "red")]`."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table for people. Its columns are the keys of its rows, and numbers are right-aligned."""

    title: str
    rows: Sequence[Mapping[str, str]]

    def draw(self, console: Console) -> None:
        """Print a line for each row at full width, or, on a narrower terminal, a paragraph for each row.

        Nothing is truncated or wrapped, because a truncated number is a wrong number.
        """
        from rich.cells import cell_len
        from rich.text import Text

        if not self.rows:
            console.print(f"{self.title}: none")
            return
        names = list(self.rows[0])
        lines = [[printable(text, keep="") for text in row.values()] for row in self.rows]
        columns = list(zip(*lines, strict=True))
        widths = [max(map(cell_len, (name, *texts))) for name, texts in zip(names, columns, strict=True)]
        # A column is numeric if its texts are numbers, or dashes for unknown numbers.
        are_numeric = [all(text[:1].isdecimal() or text in ("", "-") for text in texts) for texts in columns]

        def align(line: Sequence[str]) -> str:
            blanks = [" " * (width - cell_len(text)) for text, width in zip(line, widths, strict=True)]
            padded = (
                blank + text if is_numeric else text + blank
                for text, blank, is_numeric in zip(line, blanks, are_numeric, strict=True)
            )
            return f" {'   '.join(padded)}".rstrip()

        if self.title:
            console.print(self.title)
        width = sum(widths) + 3 * (len(widths) - 1)
        if console.is_terminal and width >= console.width:
            indent = max(map(cell_len, names)) + 2
            for line in lines:
                for name, text in zip(names, line, strict=True):
                    console.file.write(f"{name:<{indent}}{text}".rstrip() + "\n")
                console.file.write("\n")
            return
        console.print(Text(align(names), "bold"))
        console.print(" " + ("-" if console.options.ascii_only else "─") * width)
        # Rich would take minutes for 100,000 rows.
        console.file.writelines(f"{align(line)}\n" for line in lines)
        console.file.write("\n")


View = Iterable[Line | TextTable]
"""A result for people, from top to bottom. A generator does its work only if the result is drawn."""


def table(title: str, rows: Sequence[Mapping[str, str]]) -> View:
    """Make a view of one table."""
    return [TextTable(title, rows)]


def bold(text: str) -> Line:
    """Make a line in bold type."""
    return [(text, "bold")]


def _open_console(**settings: Any) -> Console:
    """Open a console that prints text unchanged: file names may look like markup or emoji codes."""
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

    `find_wait` returns what this rank is waiting for, if anything, and `open_followers` opens the displays
    and metrics files that show the command's progress.
    """

    as_json: bool
    speaks: bool = True
    ranks: int = 1
    find_wait: Callable[[], RankWait | None] = lambda: None
    open_followers: Callable[[], list[Follower]] | None = None

    def result(self, document: Mapping[str, Any], view: View) -> None:
        """Print the result: `document` with `--json`, otherwise `view`."""
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
        """Print each text as a separate line, on stderr."""
        for text in texts:
            self.note(str(text))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show progress to all followers; by default on stderr, as a bar or, without a terminal, in lines."""
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
    """Print one document on stdout, the name of its schema first. Raises an error for NaN, which JSON lacks.

    The schema is named after the command and a version, e.g. `checkpoint-run/1`; the documentation site has
    it under `schemas/`. A document with its own `version`, which other commands read back, names no schema.
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
    """Render a view as text for a log."""
    text = StringIO()
    _draw(view, _open_console(file=text, width=110))
    return text.getvalue()


def clear_progress() -> None:
    """Erase the progress bar that was left by an early end of the command, and show the cursor again."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[2K\x1b[?25h")
