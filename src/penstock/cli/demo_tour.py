"""`penstock demo`: a tour of the benchmarks on this machine's disk, in about a minute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import option, verb
from penstock.cli.parsers import FOLDER
from penstock.cli.terminal import Terminal, TextTable, View
from penstock.environment import process_environment

if TYPE_CHECKING:
    from penstock.workflows.demo_page import Tour


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
    terminal.result(results.document(), _view(results))
    terminal.note(f"The whole report: {results.report}")


def _view(results: Tour) -> View:
    from penstock.bench.probe.probe_run import headline_rows
    from penstock.workflows.demo_page import checkpoint_rows, training_rows

    yield from results.sentences()
    yield TextTable(f"The limits of {results.probe.uri}", headline_rows(results.probe.measurements))
    yield TextTable(f"Training {results.training.workload}, small", training_rows(results.training))
    yield TextTable(
        f"Checkpoints of {results.checkpoints.model}, small", checkpoint_rows(results.checkpoints)
    )
