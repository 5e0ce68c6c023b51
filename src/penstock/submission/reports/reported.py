"""One reported result, and the documents that it becomes: our results.json, and the report of v1.0.

Place in the flow: results -> reported, one at a time -> files, table, page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.submission.check import judge, read_all
from penstock.submission.facts import Unknown
from penstock.submission.finding import Verdict
from penstock.submission.metrics import mib_per_second, samples_per_second
from penstock.submission.names import RESULTS_FILE, Benchmark
from penstock.submission.reports.figures import Figures, figures_of
from penstock.submission.reports.result_row import Cell, result_row
from penstock.submission.reports.spread import CONFIDENCE
from penstock.submission.tree import REPORT

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.progress import Progress
    from penstock.submission.check import Judged
    from penstock.submission.edition import Edition
    from penstock.submission.reading import Result, Run

FORMAT_VERSION: Final = 1
"""Of our results.json; raised whenever a key is renamed or means something else."""
CSV_FILE: Final = "results.csv"
_TOLD: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One result. `place` is where its report belongs in its tree; `v1` that of v1.0, if there is one."""

    judged: Judged
    benchmark: Benchmark
    edition: str
    place: Path
    figures: Figures
    row: dict[str, Cell]
    v1: dict[str, Any] | None


def report_all(root: Path, edition: Edition, progress: Progress | None = None) -> Iterator[Reported]:
    """Every result below `root`, recomputed and judged."""
    for result in read_all(root, edition, progress):
        judged, figures = judge(result, edition), figures_of(result)
        yield Reported(
            judged=judged,
            benchmark=result.place.benchmark,
            edition=edition.edition,
            place=_place(result),
            figures=figures,
            row=result_row(result, judged, figures, edition.edition),
            v1=_v1(result, judged) if not result.place.model else None,
        )


def document(reported: Reported) -> dict[str, Any]:
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


def documents(all_reported: Sequence[Reported], edition: Edition) -> dict[str, Any]:
    """All results as one document."""
    return {"edition": edition.edition, "results": [document(each) for each in all_reported]}


def _place(result: Result) -> Path:
    """Where the report of a result is looked for: beside its runs."""
    if not result.place.model:
        return result.place.folder / REPORT
    above = result.place.run_folders[0].parent if result.place.run_folders else result.place.folder
    return above / RESULTS_FILE


def _v1(result: Result, judged: Judged) -> dict[str, Any] | None:
    """The report that the benchmark of v1.0 would have written; None where a field of it is not known."""
    try:
        runs = {run.name: _v1_run(run) for run in result.runs}
    except (Unknown, ArithmeticError):  # the report says what is missing
        return None
    figures = {name: value for name, value in judged.metrics.items() if name.startswith("train_throughput")}
    if not runs or len(figures) != 4:
        return None
    first = next(iter(runs.values()))
    shared = ("model", "accelerator", "train_num_accelerators", "num_files_train", "num_samples_per_file")
    same = {name: first[name] for name in shared}
    return {"overall": {**same, "num_benchmark_runs": len(runs), **figures}, "runs": runs}


def _v1_run(run: Run) -> dict[str, Any]:
    first = run.jobs[0]
    model, accelerator = first.workload()
    return {
        "train_throughput_samples_per_second": sum(samples_per_second(job) for job in run.jobs),
        "train_throughput_MB_per_second": sum(mib_per_second(job) for job in run.jobs),
        "train_num_accelerators": str(sum(job.summary.whole("num_accelerators") for job in run.jobs)),
        "model": model,
        "accelerator": accelerator,
        "num_files_train": first.summary.whole("num_files_train"),
        "num_samples_per_file": first.summary.whole("num_samples_per_file"),
    }
