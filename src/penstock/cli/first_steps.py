"""`penstock doctor`, `demo` and `docs`: what this machine lacks, a tour of a minute, and where to read on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import option, optional_argument, verb
from penstock.cli.parsers import FOLDER, Parser
from penstock.cli.terminal import Terminal, TextTable, View, bold, table
from penstock.environment import process_environment
from penstock.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from penstock.cluster.doctor import Diagnosis
    from penstock.workflows.demo_page import Tour

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs")
"""Where pages are: in an installed package, and in a checkout."""


@dataclass(frozen=True, kw_only=True)
class _DoctorOptions:
    at: Path = option("--at", FOLDER, "Examine the file system of this directory.", default=".")


@verb(_DoctorOptions)
def doctor(options: _DoctorOptions, terminal: Terminal) -> None:
    """Report what is installed and usable on this machine, with a fix for everything that is missing.

    Exits with 0 even if something is missing: that is a fact about this machine, not a failure.

    Examples:

      penstock doctor

      penstock doctor --at /mnt/pfs --json
    """
    from penstock.cluster.doctor import examine

    if not options.at.is_dir():
        raise UsageError(f"Directory {options.at} does not exist", where="--at", fix="Name a directory.")
    diagnoses = list(examine(options.at, process_environment()))
    terminal.result(
        {"diagnoses": [asdict(diagnosis) for diagnosis in diagnoses]},
        _view_diagnoses(diagnoses),
    )


def _view_diagnoses(diagnoses: list[Diagnosis]) -> View:
    """Diagnoses by area, each fix below what it is for."""
    width = max(len(diagnosis.subject) for diagnosis in diagnoses)
    for area, members in groupby(diagnoses, key=lambda diagnosis: diagnosis.area):
        yield bold(area)
        for diagnosis in members:
            state = (f"{diagnosis.state:<8}", _COLOURS[diagnosis.state])
            yield ["  ", state, f" {diagnosis.subject:<{width}}  {diagnosis.found}"]
            if diagnosis.fix:
                yield [" " * (width + 13), (diagnosis.fix, "italic")]
    states: list[str] = [diagnosis.state for diagnosis in diagnoses]
    yield ", ".join(f"{states.count(state)} {state}" for state in _COLOURS)


@dataclass(frozen=True, kw_only=True)
class _DemoOptions:
    out: Path = option(
        "--out", FOLDER, "Work in this directory, and leave report.html in it.", default="penstock-demo"
    )


@verb(_DemoOptions)
def demo(options: _DemoOptions, terminal: Terminal) -> None:
    """Run a short tour of all benchmarks on this machine's disk, and write a report.

    Examples:

      penstock demo

      penstock demo --out /mnt/pfs/demo --json
    """
    from penstock.workflows.demo import tour

    terminal.note(f"A tour at {options.out.resolve()}: storage limits, training, and checkpoints ...")
    with terminal.progress() as progress:
        results = tour(options.out, environment=process_environment(), progress=progress)
    terminal.notes(results.probe.notes)
    terminal.result(results.document(), _view_tour(results))
    terminal.note(f"The whole report: {results.report}")


def _view_tour(results: Tour) -> View:
    from penstock.bench.probe.probe_run import headline_rows
    from penstock.workflows.demo_page import checkpoint_rows, training_rows

    yield from results.sentences()
    yield TextTable(f"The limits of {results.probe.uri}", headline_rows(results.probe.measurements))
    yield TextTable(f"Training {results.training.workload}, small", training_rows(results.training))
    yield TextTable(
        f"Checkpoints of {results.checkpoints.model}, small", checkpoint_rows(results.checkpoints)
    )


def _find_pages() -> Mapping[str, Path]:
    """The pages by topic: the names of their files."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    if folder is None:
        raise Unavailable("This installation has no pages", fix="Install Penstock from its wheel.")
    return {page.stem: page for page in sorted(folder.glob("*.md"))}


_TOPIC = Parser("TEXT", str, list_names=lambda _: _find_pages())


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
    pages = _find_pages()
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
