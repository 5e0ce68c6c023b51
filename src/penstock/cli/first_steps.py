"""`penstock workloads`, `doctor`, `demo` and `docs`: the first commands of a new user."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import ACCELERATOR, SETTINGS, WorkloadOptions
from penstock.cli.options import option, optional_argument, refuse_ignored, verb
from penstock.cli.parsers import FOLDER, NEW_FOLDER, WORKLOAD, Parser
from penstock.cli.terminal import Line, Terminal, TextTable, View, bold, table
from penstock.environment import process_environment
from penstock.errors import UsageError
from penstock.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from penstock.cluster.doctor import Diagnosis
    from penstock.workload.spec import Workload

_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red"}
_PACKAGE = Path(__file__).parents[1]
_MAX_LIST_CHARACTERS = 60
_FOLDERS = (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs")
"""The folders that hold the documentation's pages: in an installed package, and in a checkout."""


@verb
def workloads(
    terminal: Terminal,
    *,
    name: str | None = optional_argument(
        "[WORKLOAD]",
        WORKLOAD,
        "Workload to show, e.g. unet3d_h100, unet3d with --accelerator, or a YAML file (default: list all).",
    ),
    accelerator: str = ACCELERATOR,
    settings: tuple[str, ...] = SETTINGS,
) -> None:
    """List the shipped workloads, or show every setting of one.

    Examples:

      penstock workloads

      penstock workloads unet3d_h100

      penstock workloads my.yaml --set reader.batch_size=14 --json
    """
    from penstock.workload.load_workload import shipped
    from penstock.workload.settings import dotted, flatten, format_value
    from penstock.workload.shipped_catalog import families
    from penstock.workload.spec import write_workload

    if name is None:
        refuse_ignored(("--accelerator", "--set"), "all workloads are listed", fix="Name a WORKLOAD.")
        summaries = [_summarize(loaded.workload) for loaded in shipped()]
        lines: list[Line] = []
        for family, members in groupby(summaries, key=lambda summary: summary["family"]):
            lines += [bold(family), [(f"  {families()[family]['about']}", "italic")]]
            for each in members:
                lines.append(
                    f"  {each['accelerator'] or 'any':<6} {each['num_files_train']:,} {each['format']} "
                    f"files x {format_count(each['num_samples_per_file'], 'sample')} x "
                    f"{format_bytes(each['record_bytes'])}, batch {each['batch_size']:,}, "
                    f"{format_seconds(each['computation_s'])} a step, AU {each['au']:.2f}"
                )
        terminal.result({"workloads": summaries}, lines)
        return
    loaded = WorkloadOptions(name=name, accelerator=accelerator, settings=settings).load(terminal)
    tree = write_workload(loaded.workload)
    rows = []
    for path, value in flatten(tree):
        text = format_value(value)
        # `--json` shows long lists in full.
        is_long = isinstance(value, list) and len(text) > _MAX_LIST_CHARACTERS
        rows.append({"key": dotted(path), "value": f"{len(value)} entries" if is_long else text})
    document = {
        "name": loaded.workload.name,
        "accelerator": loaded.workload.accelerator,
        "workload": tree,
        "remarks": list(loaded.remarks),
    }
    terminal.result(document, table(loaded.workload.full_name, rows))


def _summarize(workload: Workload) -> dict[str, Any]:
    """Return the values that help to choose a workload. Sizes are means."""
    from penstock.workload.sizing import read_bytes_per_sample, record_bytes

    dataset = workload.dataset
    return {
        "name": workload.full_name,
        "family": workload.name,
        "accelerator": workload.accelerator,
        "format": dataset.format.value,
        "num_files_train": dataset.num_files_train,
        "num_samples_per_file": dataset.num_samples_per_file,
        "record_bytes": float(record_bytes(dataset)),
        "read_bytes_per_sample": float(read_bytes_per_sample(dataset)),
        "batch_size": workload.reader.batch_size,
        "computation_s": workload.train.computation_time.expected_s,
        "epochs": workload.train.epochs,
        "au": workload.metric.au,
        "framework": workload.framework.value,
    }


@verb
def doctor(
    terminal: Terminal,
    *,
    at: Path = option("--at", FOLDER, "Examine the file system of this directory.", default="."),
) -> None:
    """Report what is installed and usable on this machine, with a fix for everything that is missing.

    Exits with 0 even if something is missing.

    Examples:

      penstock doctor

      penstock doctor --at /mnt/pfs --json
    """
    from penstock.cluster.doctor import examine

    if not at.is_dir():
        raise UsageError(f"Directory {at} does not exist", where="--at", fix="Name a directory.")
    diagnoses = list(examine(at, process_environment()))
    terminal.result(
        {"diagnoses": [asdict(diagnosis) for diagnosis in diagnoses]},
        _view_diagnoses(diagnoses),
    )


def _view_diagnoses(diagnoses: list[Diagnosis]) -> View:
    """Show diagnoses by area, each fix below the problem that it solves."""
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


@verb
def demo(
    terminal: Terminal,
    *,
    out: Path = option(
        "--out", NEW_FOLDER, "Work in this directory, and leave report.html in it.", default="penstock-demo"
    ),
) -> None:
    """Run a short tour of all benchmarks on this machine's disk, and write a report.

    Examples:

      penstock demo

      penstock demo --out /mnt/pfs/demo --json
    """
    from penstock.bench.checkpoint.checkpoint_result import direction_rows
    from penstock.bench.probe.probe_run import headline_rows
    from penstock.results.phase_figures import epoch_rows
    from penstock.storage.volumes import locked_folder
    from penstock.workflows.demo import tour

    terminal.note(f"A tour at {out.resolve()}: storage limits, training, and checkpoints ...")
    with locked_folder(out.resolve()), terminal.progress() as progress:
        results = tour(out, environment=process_environment(), progress=progress)
    probe, training, checkpoints = results.probe, results.training, results.checkpoints
    terminal.notes(probe.notes)
    view: View = [
        *results.sentences(),
        TextTable(f"The limits of {probe.uri}", headline_rows(probe.measurements)),
        TextTable(f"Training {training.workload}, small", epoch_rows(training.train.epochs)),
        TextTable(f"Checkpoints of {checkpoints.model}, small", direction_rows(checkpoints)),
    ]
    terminal.result(results.document(), view)
    terminal.note(f"Full report: {results.report}")


def _find_pages() -> Mapping[str, Path]:
    """Map each topic to its page. A topic is the name of the page's file, without suffix."""
    folder = next(filter(Path.is_dir, _FOLDERS))
    return {page.stem: page for page in sorted(folder.glob("*.md"))}


_TOPIC = Parser("TEXT", str, list_names=lambda _: _find_pages())


@verb
def docs(
    terminal: Terminal,
    *,
    topic: str | None = optional_argument("[TOPIC]", _TOPIC, "Page to show (default: list them)."),
) -> None:
    """Show a page of the documentation, or list the pages.

    Examples:

      penstock docs

      penstock docs workloads | less
    """
    pages = _find_pages()
    if topic is None:
        titles = {
            name: page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            for name, page in pages.items()
        }
        rows = [{"topic": name, "page": title} for name, title in titles.items()]
        terminal.result({"pages": titles}, table("Pages; `penstock docs TOPIC` shows one", rows))
        return
    if topic not in pages:
        from penstock.did_you_mean import did_you_mean

        hint = did_you_mean(topic, pages, form="`penstock docs {}`")
        raise UsageError(f"No page is called {topic!r}", fix=f"{hint}`penstock docs` lists them.")
    text = pages[topic].read_text(encoding="utf-8")
    if sys.stdout.isatty() and terminal.speaks and not terminal.as_json:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
        return
    terminal.result({"topic": topic, "text": text}, text.splitlines())
