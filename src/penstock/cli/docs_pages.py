"""`penstock docs`: the pages of the documentation, which the wheel carries, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.options import optional_argument, verb
from penstock.cli.parsers import Parser
from penstock.cli.terminal import Terminal, table
from penstock.errors import Unavailable, UsageError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs")
"""Where pages are: in an installed package, and in a checkout."""


def find_pages() -> Mapping[str, Path]:
    """The pages by topic: the names of their files."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    if folder is None:
        raise Unavailable("This installation has no pages", fix="Install Penstock from its wheel.")
    return {page.stem: page for page in sorted(folder.glob("*.md"))}


_TOPIC = Parser("TEXT", str, list_names=lambda _: find_pages())


@dataclass(frozen=True, kw_only=True)
class _DocsOptions:
    topic: str | None = optional_argument("[TOPIC]", _TOPIC, "Page to show (default: list them).")


@verb(_DocsOptions)
def docs(options: _DocsOptions, terminal: Terminal) -> None:
    """Show a page of the documentation, or list the pages. Error messages name them.

    Examples:

      penstock docs

      penstock docs workloads | less
    """
    pages = find_pages()
    if options.topic is None:
        titles = {topic: _title(page) for topic, page in pages.items()}
        rows = [{"topic": topic, "page": title} for topic, title in titles.items()]
        terminal.result({"pages": titles}, table("Pages; `penstock docs TOPIC` shows one", rows))
        return
    if options.topic not in pages:
        from penstock.did_you_mean import did_you_mean

        hint = did_you_mean(options.topic, pages, form="`penstock docs {}`")
        raise UsageError(f"No page is called {options.topic!r}", fix=f"{hint}`penstock docs` lists them.")
    text = pages[options.topic].read_text(encoding="utf-8")
    if sys.stdout.isatty() and terminal.speaks and not terminal.as_json:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
        return
    terminal.result({"topic": options.topic, "text": text}, text.splitlines())


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((line.removeprefix("# ").strip() for line in lines if line.startswith("# ")), page.stem)
