"""A result under the fixed columns of published tables: what files tell of it, empty cells for the rest.

Pure. Invariant: columns keep their names and places; a cell is filled from the files or left empty, never by
a default. Bandwidths are GiB/s; of a training's, MiB/s / 1024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.submission.facts import Unknown
from penstock.submission.finding import Verdict
from penstock.submission.names import Benchmark

if TYPE_CHECKING:
    from penstock.submission.check import Judged
    from penstock.submission.reading import Result
    from penstock.submission.reports.figures import Figures

_COMMON: Final = (
    "Public ID", "Organization", "Division", "Benchmark Type", "Model", "Name", "Description", "Type",
    "Access Protocol", "Availability", "RU's", "Integrated Client Storage (TiB)", "Usable Capacity (TiB)",
    "Provisioned Power (W)", "# Client Nodes", "Code", "Logs",
)  # fmt: skip
_TRAINING: Final = ("Accelerator Type", "# Simulated Accelerators", "Read B/W (GiB/s)")
_CHECKPOINTING: Final = (
    "Checkpoint Mode", "DP Instances", "Checkpoint Write B/W (GiB/s)", "Checkpoint Write Duration (s)",
    "Checkpoint Read B/W (GiB/s)", "Checkpoint Read Duration (s)",
)  # fmt: skip
_LAST: Final = ("Verdict", "Issues", "Rules Edition", "Comparability Class")
RESULT_COLUMNS: Final = (*_COMMON, *_TRAINING, *_CHECKPOINTING, *_LAST)

Cell = str | int | float | None


def result_row(result: Result, judged: Judged, figures: Figures, edition: str) -> dict[str, Cell]:
    """The cells of one result, by column."""
    row: dict[str, Cell] = dict.fromkeys(RESULT_COLUMNS)
    row |= {
        "Organization": judged.organisation,
        "Division": judged.division,
        "Benchmark Type": result.place.benchmark.value,
        "Model": judged.workload,
        "Name": judged.system,
        "Accelerator Type": judged.accelerator or None,
        "# Simulated Accelerators": judged.num_accelerators,
        "# Client Nodes": _told(lambda: _num_clients(result)),
        "Code": _told(lambda: _only({job.pointer.text().strip() for job in result.jobs()})),
        "Logs": result.place.name,
        "Verdict": judged.verdict.value,
        "Issues": "; ".join(issues(judged)),
        "Rules Edition": edition,
        "Comparability Class": _told(
            lambda: _only({job.provenance.text("core_config", "hash") for job in result.jobs()})
        ),
    }
    return row | _system(result) | _of_benchmark(result, figures)


def issues(judged: Judged) -> list[str]:
    """The rules that fail or cannot be judged, each once."""
    bad = (Verdict.FAIL, Verdict.NOT_CHECKED)
    return list(dict.fromkeys(each.rule for each in judged.findings if each.verdict in bad))


def _system(result: Result) -> dict[str, Cell]:
    if len(result.systems) != 1:
        return {}
    (described,) = result.systems

    def text(*path: str) -> Cell:
        return _told(lambda: described.text("system_under_test", *path))

    return {
        "Description": text("solution", "friendly_description"),
        "Type": text("deployment"),
        "Access Protocol": text("solution", "architecture", "benchmark_API"),
        "RU's": _told(lambda: described.number("system_under_test", "total_rack_units")),
    }


def _of_benchmark(result: Result, figures: Figures) -> dict[str, Cell]:
    if result.place.benchmark is Benchmark.CHECKPOINTING:
        modes = (job.config.text("workload", "checkpoint", "mode") for job in result.jobs())
        return {
            "Checkpoint Mode": _told(lambda: _only(set(modes))),
            "Checkpoint Write B/W (GiB/s)": figures.mean("write bandwidth"),
            "Checkpoint Write Duration (s)": figures.mean("write duration"),
            "Checkpoint Read B/W (GiB/s)": figures.mean("read bandwidth"),
            "Checkpoint Read Duration (s)": figures.mean("read duration"),
        }
    bandwidth = figures.mean("read bandwidth")
    return {"Read B/W (GiB/s)": None if bandwidth is None else bandwidth / 1024}


def _num_clients(result: Result) -> int | None:
    counts = {sum(job.summary.whole("num_hosts") for job in run.jobs) for run in result.runs}
    return counts.pop() if len(counts) == 1 else None


def _only(found: set[str]) -> str | None:
    """What all runs say alike."""
    return found.pop() if len(found) == 1 else None


def _told(ask: Callable[[], Cell]) -> Cell:
    try:
        return ask()
    except Unknown:  # the cell stays empty, and the rule that needs the field says what is missing
        return None
