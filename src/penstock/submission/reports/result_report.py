"""The report of one result: our results.json, the row of published tables, and the report of v1.0.

Invariant: columns keep their names and places; a cell is filled from the files or stays empty, never by a
default. Bandwidths in the row are GiB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.submission.check import check_result, read_tree
from penstock.submission.find_results import V1_REPORT_FILE
from penstock.submission.finding import Verdict
from penstock.submission.parsed_file import MissingFact
from penstock.submission.recomputed_metrics import mib_per_second, samples_per_second
from penstock.submission.reports.result_figures import CONFIDENCE, ResultFigures, compute_figures
from penstock.submission.tree_layout import RESULTS_FILE, Benchmark

if TYPE_CHECKING:
    from penstock.progress import Progress
    from penstock.submission.check import CheckedResult
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import SubmittedResult, SubmittedRun


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


def result_row(
    result: SubmittedResult, judged: CheckedResult, figures: ResultFigures, edition: str
) -> dict[str, Cell]:
    """The cells of one result, by column."""
    row: dict[str, Cell] = dict.fromkeys(RESULT_COLUMNS)
    row |= {
        "Organization": judged.organisation,
        "Division": judged.division,
        "Benchmark Type": result.location.benchmark.value,
        "Model": judged.workload,
        "Name": judged.system,
        "Accelerator Type": judged.accelerator or None,
        "# Simulated Accelerators": judged.num_accelerators,
        "# Client Nodes": _told(lambda: _num_clients(result)),
        "Code": _told(lambda: _only({job.pointer.text().strip() for job in result.run_dirs()})),
        "Logs": result.location.name,
        "Verdict": judged.verdict.value,
        "Issues": "; ".join(issues(judged)),
        "Rules Edition": edition,
        "Comparability Class": _told(
            lambda: _only({job.provenance.text("core_config", "hash") for job in result.run_dirs()})
        ),
    }
    return row | _system(result) | _of_benchmark(result, figures)


def issues(judged: CheckedResult) -> list[str]:
    """The rules that fail or cannot be judged, each once."""
    bad = (Verdict.FAIL, Verdict.NOT_CHECKED)
    return list(dict.fromkeys(each.rule for each in judged.findings if each.verdict in bad))


def _system(result: SubmittedResult) -> dict[str, Cell]:
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


def _of_benchmark(result: SubmittedResult, figures: ResultFigures) -> dict[str, Cell]:
    if result.location.benchmark is Benchmark.CHECKPOINTING:
        modes = (job.config.text("workload", "checkpoint", "mode") for job in result.run_dirs())
        return {
            "Checkpoint Mode": _told(lambda: _only(set(modes))),
            "Checkpoint Write B/W (GiB/s)": figures.mean("write bandwidth"),
            "Checkpoint Write Duration (s)": figures.mean("write duration"),
            "Checkpoint Read B/W (GiB/s)": figures.mean("read bandwidth"),
            "Checkpoint Read Duration (s)": figures.mean("read duration"),
        }
    bandwidth = figures.mean("read bandwidth")
    return {"Read B/W (GiB/s)": None if bandwidth is None else bandwidth / 1024}


def _num_clients(result: SubmittedResult) -> int | None:
    counts = {sum(job.summary.integer("num_hosts") for job in run.dirs) for run in result.runs}
    return counts.pop() if len(counts) == 1 else None


def _only(found: set[str]) -> str | None:
    """What all runs say alike."""
    return found.pop() if len(found) == 1 else None


def _told(ask: Callable[[], Cell]) -> Cell:
    try:
        return ask()
    except MissingFact:  # the cell stays empty, and the rule that needs the field says what is missing
        return None


FORMAT_VERSION: Final = 1
"""Of our results.json; raised whenever a key is renamed or means something else."""
CSV_FILE: Final = "results.csv"
_TOLD: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """One result. `place` is where its report belongs in its tree; `v1` that of v1.0, if there is one."""

    judged: CheckedResult
    benchmark: Benchmark
    edition: str
    place: Path
    figures: ResultFigures
    row: dict[str, Cell]
    v1: dict[str, Any] | None


def report_all(root: Path, edition: Edition, progress: Progress | None = None) -> Iterator[ResultReport]:
    """Every result below `root`, recomputed and judged."""
    for result in read_tree(root, edition, progress):
        judged, figures = check_result(result, edition), compute_figures(result)
        yield ResultReport(
            judged=judged,
            benchmark=result.location.benchmark,
            edition=edition.edition,
            place=_place(result),
            figures=figures,
            row=result_row(result, judged, figures, edition.edition),
            v1=_v1(result, judged) if not result.location.model else None,
        )


def report_document(reported: ResultReport) -> dict[str, Any]:
    """Our results.json of one result."""
    judged = reported.judged
    return {
        "format": FORMAT_VERSION,
        "edition": reported.edition,
        "name": judged.name,
        "org": judged.organisation,
        "division": judged.division,
        "system": judged.system,
        "benchmark": reported.benchmark.value,
        "workload": judged.workload,
        "accelerator": judged.accelerator,
        "num_accelerators": judged.num_accelerators,
        "verdict": judged.verdict.value,
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                "values": figure.values,
                "mean": figure.spread.mean,
                "stdev": figure.spread.deviation,
                "confidence": CONFIDENCE,
                "interval": figure.spread.interval,
                "outliers": [asdict(outlier) for outlier in figure.spread.outliers],
            }
            for figure in reported.figures.found
        ],
        "not_recomputed": list(reported.figures.missing),
        "metrics": judged.metrics,
        "issues": [asdict(finding) for finding in judged.findings if finding.verdict in _TOLD],
        "columns": reported.row,
    }


def reports_document(all_reported: Sequence[ResultReport], edition: Edition) -> dict[str, Any]:
    """All results as one document."""
    return {"edition": edition.edition, "results": [report_document(each) for each in all_reported]}


def _place(result: SubmittedResult) -> Path:
    """Where the report of a result is looked for: beside its runs."""
    if not result.location.model:
        return result.location.folder / V1_REPORT_FILE
    above = result.location.run_folders[0].parent if result.location.run_folders else result.location.folder
    return above / RESULTS_FILE


def _v1(result: SubmittedResult, judged: CheckedResult) -> dict[str, Any] | None:
    """The report that the benchmark of v1.0 would have written; None where a field of it is not known."""
    try:
        runs = {run.name: _v1_run(run) for run in result.runs}
    except (MissingFact, ArithmeticError):  # the report says what is missing
        return None
    figures = {name: value for name, value in judged.metrics.items() if name.startswith("train_throughput")}
    if not runs or len(figures) != 4:
        return None
    first = next(iter(runs.values()))
    shared = ("model", "accelerator", "train_num_accelerators", "num_files_train", "num_samples_per_file")
    same = {name: first[name] for name in shared}
    return {"overall": {**same, "num_benchmark_runs": len(runs), **figures}, "runs": runs}


def _v1_run(run: SubmittedRun) -> dict[str, Any]:
    first = run.dirs[0]
    model, accelerator = first.workload()
    return {
        "train_throughput_samples_per_second": sum(samples_per_second(job) for job in run.dirs),
        "train_throughput_MB_per_second": sum(mib_per_second(job) for job in run.dirs),
        "train_num_accelerators": str(sum(job.summary.integer("num_accelerators") for job in run.dirs)),
        "model": model,
        "accelerator": accelerator,
        "num_files_train": first.summary.integer("num_files_train"),
        "num_samples_per_file": first.summary.integer("num_samples_per_file"),
    }
