"""The report of results: our results.json, the row of published tables, the report of v1.0, and their files.

    FOLDER/report.html results.csv results.json      all results
    FOLDER/RESULT/results.json results.csv           one of them, below the same path as in its tree
    FOLDER/RESULT/mlperf_storage_report.json         of v1.0

Files are planned as paths and texts, then written, each in one step. Invariants: columns keep their names and
places; a cell is filled from the files or stays empty, never by a default; in a submitter's tree a file is
only added or, where it is our own, replaced. Bandwidths in the row are GiB/s.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from penstock.errors import printable
from penstock.progress import Progress
from penstock.results.published_files import write_text
from penstock.submission.check import CheckedResult, check_result, read_tree
from penstock.submission.edition import Edition
from penstock.submission.edition_choice import EditionChoice
from penstock.submission.find_results import V1_REPORT_FILE
from penstock.submission.finding import Verdict
from penstock.submission.parsed_file import MissingFact, ParsedFile, read_file
from penstock.submission.recomputed_metrics import mib_per_second, samples_per_second
from penstock.submission.reports import findings_export, submission_pages
from penstock.submission.reports.result_figures import CONFIDENCE, ResultFigures, compute_figures
from penstock.submission.result_files import ResultRun, SubmittedResult
from penstock.submission.system_description import provisioned_watts
from penstock.submission.tree_layout import RESULTS_FILE, Benchmark

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
_VECTORS: Final = (
    "Vector Count", "Dimension", "Index Type", "Queries per Sec", "Query Latency (ms)", "Recall Percentage",
)  # fmt: skip
_CACHE_OPTIONS: Final = (
    (1, "llama3.1-8b Storage Only"), (2, "llama3.1-8b Storage + Mem"), (3, "llama3.1-70b Storage Only"),
)  # fmt: skip
_CACHE_FIGURES: Final = (
    ("Throughput (tok/s)", "throughput"), ("Read B/W (GiB/s)", "read bandwidth"),
    ("Write B/W (GiB/s)", "write bandwidth"), ("P95 Read Latency (ms)", "largest p95 latency"),
)  # fmt: skip
_KV_CACHE: Final = tuple(f"{load} - {title}" for _, load in _CACHE_OPTIONS for title, _ in _CACHE_FIGURES)
RESULT_COLUMNS: Final = (*_COMMON, *_TRAINING, *_CHECKPOINTING, *_LAST, *_VECTORS, *_KV_CACHE)

Cell = str | int | float | None


def result_row(
    result: SubmittedResult, checked: CheckedResult, figures: ResultFigures, edition: str
) -> dict[str, Cell]:
    """The cells of one result, by column."""
    row: dict[str, Cell] = dict.fromkeys(RESULT_COLUMNS)
    row |= {
        "Public ID": _public_id(result, checked),
        "Organization": checked.organisation,
        "Division": checked.division,
        "Benchmark Type": result.location.benchmark.value,
        "Model": _model_cell(result, checked),
        "Name": checked.system,
        "Accelerator Type": checked.accelerator or None,
        "# Simulated Accelerators": checked.num_accelerators,
        "# Client Nodes": _value_or_empty(lambda: _num_clients(result)),
        "Code": _value_or_empty(
            lambda: _get_common({run_dir.pointer.text().strip() for run_dir in result.run_dirs()})
        ),
        "Logs": result.location.name,
        "Verdict": checked.verdict.value,
        "Issues": "; ".join(issues(checked)),
        "Rules Edition": edition,
        "Comparability Class": _value_or_empty(
            lambda: _get_common(
                {run_dir.provenance.text("core_config", "hash") for run_dir in result.run_dirs()}
            )
        ),
    }
    return row | _system(result) | _of_benchmark(result, figures)


def issues(checked: CheckedResult) -> list[str]:
    """The distinct rules that fail or cannot be checked."""
    bad = (Verdict.FAIL, Verdict.NOT_CHECKED)
    return list(dict.fromkeys(finding.rule for finding in checked.findings if finding.verdict in bad))


def _model_cell(result: SubmittedResult, checked: CheckedResult) -> str:
    """The model; of vector search the engine and the index, as their folders are called."""
    location = result.location
    if location.benchmark is not Benchmark.VECTOR_SEARCH:
        return checked.workload
    return f"{location.folder.parent.name}/{location.model}"


def _public_id(result: SubmittedResult, checked: CheckedResult) -> str | None:
    """The number that the round's registry gave to the result; None if it names none, or several."""
    location = result.location
    wanted = [checked.division, checked.organisation, checked.system, location.benchmark.value]
    parts = {part.lower() for part in (*_model_cell(result, checked).split("/"), checked.accelerator) if part}
    entries = result.context.public_ids.content
    assignments = entries.get("assignments") if isinstance(entries, dict) else None
    found = {
        str(entry.get("public_id"))
        for entry in (assignments if isinstance(assignments, list) else ())
        if isinstance(entry, dict)
        and [str(entry.get(key)) for key in ("category", "organization", "system", "benchmark_type")]
        == wanted
        and _has_all(entry.get("key"), parts)
    }
    return found.pop() if len(found) == 1 else None


def _has_all(key: object, parts: set[str]) -> bool:
    """Whether an entry's key has all parts of a result's identity."""
    return isinstance(key, list) and parts <= {str(part).lower() for part in key}


_PROTOCOLS: Final = MappingProxyType({"file": "POSIX", "object": "S3"})


def _system(result: SubmittedResult) -> dict[str, Cell]:
    """The cells about the system; capacities and rack units as they are written in its description."""
    if len(result.systems) != 1:
        return {}
    (described,) = result.systems

    def cell(*path: str) -> Cell:
        return _value_or_empty(lambda: _as_written(described.value("system_under_test", *path)))

    api = _value_or_empty(lambda: described.text(*_SOLUTION, "architecture", "benchmark_API"))
    watts = _value_or_empty(lambda: provisioned_watts(described))
    is_whole = isinstance(watts, float) and watts.is_integer()
    return {
        "Description": cell("solution", "friendly_description"),
        "Type": _value_or_empty(lambda: _type_of_system(described)),
        "Access Protocol": _PROTOCOLS.get(str(api)),
        "Availability": cell("solution", "availability"),
        "RU's": cell("total_rack_units"),
        "Integrated Client Storage (TiB)": cell("solution", "int_client_store_tib"),
        "Usable Capacity (TiB)": cell("solution", "usable_capacity_tib"),
        "Provisioned Power (W)": int(watts) if is_whole and watts is not None else watts,
    }


_SOLUTION: Final = ("system_under_test", "solution")


def _as_written(value: object) -> Cell:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _type_of_system(described: ParsedFile) -> str:
    """What hosts may do at once, where the storage is, and what it speaks: `Shared remote and local file`."""
    is_shared = described.boolean(*_SOLUTION, "capabilities", "simultaneous_write")
    place = described.text(*_SOLUTION, "architecture", "storage_location").replace("_", " ")
    api = described.text(*_SOLUTION, "architecture", "product_API")
    return f"{'Shared' if is_shared else 'Failover'} {place} {api}"


def _of_benchmark(result: SubmittedResult, figures: ResultFigures) -> dict[str, Cell]:
    if result.location.benchmark is Benchmark.CHECKPOINTING:
        modes = (run_dir.config.text("workload", "checkpoint", "mode") for run_dir in result.run_dirs())
        return {
            "Checkpoint Mode": _value_or_empty(lambda: _get_common(set(modes))),
            "Checkpoint Write B/W (GiB/s)": figures.mean("write bandwidth"),
            "Checkpoint Write Duration (s)": figures.mean("write duration"),
            "Checkpoint Read B/W (GiB/s)": figures.mean("read bandwidth"),
            "Checkpoint Read Duration (s)": figures.mean("read duration"),
        }
    if result.location.benchmark is Benchmark.KV_CACHE:
        return {
            f"{load} - {title}": figures.mean(f"option {number}: {name}")
            for number, load in _CACHE_OPTIONS
            for title, name in _CACHE_FIGURES
        }
    if result.location.benchmark is Benchmark.VECTOR_SEARCH:
        return _of_vectors(result, figures)
    bandwidth = figures.mean("read bandwidth")
    return {"Read B/W (GiB/s)": None if bandwidth is None else bandwidth / 1024}


def _of_vectors(result: SubmittedResult, figures: ResultFigures) -> dict[str, Cell]:
    def shared(name: str) -> Cell:
        return _value_or_empty(
            lambda: _get_common({str(run_dir.summary.value(name)) for run_dir in result.run_dirs()})
        )

    recall = figures.mean("recall")
    return {
        "Vector Count": shared("num_vectors"),
        "Dimension": shared("dimension"),
        "Index Type": shared("index_type"),
        "Queries per Sec": figures.mean("throughput"),
        "Query Latency (ms)": figures.mean("p99 latency"),
        "Recall Percentage": None if recall is None else 100 * recall,
    }


def _num_clients(result: SubmittedResult) -> int | None:
    if result.location.benchmark is Benchmark.VECTOR_SEARCH:
        counts = {run_dir.metadata.integer("args", "num_client_hosts") for run_dir in result.run_dirs()}
    else:
        name = "host_count" if result.location.benchmark is Benchmark.KV_CACHE else "num_hosts"
        counts = {sum(run_dir.summary.integer(name) for run_dir in run.dirs) for run in result.runs}
    return counts.pop() if len(counts) == 1 else None


def _get_common(values: set[str]) -> str | None:
    """The value that all runs state; None if they differ."""
    return values.pop() if len(values) == 1 else None


def _value_or_empty(read_cell: Callable[[], Cell]) -> Cell:
    try:
        return read_cell()
    except MissingFact:  # the cell stays empty, and the rule that needs the field says what is missing
        return None


FORMAT_VERSION: Final = 1
"""Of our results.json; raised whenever a key is renamed or means something else."""
CSV_FILE: Final = "results.csv"
_ISSUE_VERDICTS: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """One result. `path` is where its report belongs in the tree; `v1` is a report of v1.0."""

    checked: CheckedResult
    benchmark: Benchmark
    edition: str
    path: Path
    figures: ResultFigures
    row: dict[str, Cell]
    v1: dict[str, Any] | None


def report_all(
    root: Path, editions: Edition | EditionChoice, progress: Progress | None = None
) -> Iterator[ResultReport]:
    """Every result below `root`, recomputed and checked."""
    for result in read_tree(root, editions, progress):
        edition = editions.of(result.location.submitter.folder)
        checked, figures = check_result(result, edition), compute_figures(result)
        yield ResultReport(
            checked=checked,
            benchmark=result.location.benchmark,
            edition=edition.edition,
            path=_find_report_path(result),
            figures=figures,
            row=result_row(result, checked, figures, edition.edition),
            v1=_build_v1_report(result, checked) if not result.location.model else None,
        )


def report_document(report: ResultReport) -> dict[str, Any]:
    """Our results.json of one result."""
    checked = report.checked
    return {
        "format": FORMAT_VERSION,
        "edition": report.edition,
        "name": checked.name,
        "org": checked.organisation,
        "division": checked.division,
        "system": checked.system,
        "benchmark": report.benchmark.value,
        "workload": checked.workload,
        "accelerator": checked.accelerator,
        "num_accelerators": checked.num_accelerators,
        "verdict": checked.verdict.value,
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
            for figure in report.figures.computed
        ],
        "not_recomputed": list(report.figures.missing),
        "metrics": checked.metrics,
        "issues": [asdict(finding) for finding in checked.findings if finding.verdict in _ISSUE_VERDICTS],
        "columns": report.row,
    }


def reports_document(reports: Sequence[ResultReport], edition: Edition | EditionChoice) -> dict[str, Any]:
    """All results as one document."""
    return {"edition": edition.edition, "results": [report_document(report) for report in reports]}


def _find_report_path(result: SubmittedResult) -> Path:
    """The path of a result's report, in the folder of its runs."""
    if not result.location.model:
        return result.location.folder / V1_REPORT_FILE
    above = result.location.run_folders[0].parent if result.location.run_folders else result.location.folder
    return above / RESULTS_FILE


def _build_v1_report(result: SubmittedResult, checked: CheckedResult) -> dict[str, Any] | None:
    """The report that the benchmark of v1.0 would have written; None if a field is unknown."""
    try:
        runs = {run.name: _build_v1_run(run) for run in result.runs}
    except (MissingFact, ArithmeticError):  # the report says what is missing
        return None
    figures = {name: value for name, value in checked.metrics.items() if name.startswith("train_throughput")}
    if not runs or len(figures) != 4:
        return None
    first = next(iter(runs.values()))
    shared = ("model", "accelerator", "train_num_accelerators", "num_files_train", "num_samples_per_file")
    same = {name: first[name] for name in shared}
    return {"overall": {**same, "num_benchmark_runs": len(runs), **figures}, "runs": runs}


def _build_v1_run(run: ResultRun) -> dict[str, Any]:
    first = run.dirs[0]
    model, accelerator = first.workload()
    return {
        "train_throughput_samples_per_second": sum(samples_per_second(run_dir) for run_dir in run.dirs),
        "train_throughput_MB_per_second": sum(mib_per_second(run_dir) for run_dir in run.dirs),
        "train_num_accelerators": str(
            sum(run_dir.summary.integer("num_accelerators") for run_dir in run.dirs)
        ),
        "model": model,
        "accelerator": accelerator,
        "num_files_train": first.summary.integer("num_files_train"),
        "num_samples_per_file": first.summary.integer("num_samples_per_file"),
    }


PAGE_FILE: Final = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that is to be written."""

    path: Path
    text: str


def plan_folder(
    folder: Path, reports: Sequence[ResultReport], edition: Edition | EditionChoice
) -> Iterator[PlannedFile]:
    """Plan all files of a report in a separate folder."""
    yield PlannedFile(path=folder / PAGE_FILE, text=submission_pages.figures_page(reports, edition.edition))
    yield PlannedFile(path=folder / CSV_FILE, text=_format_rows(reports))
    yield PlannedFile(path=folder / RESULTS_FILE, text=_format_json(reports_document(reports, edition)))
    for report in reports:
        here = folder / printable(report.checked.name, keep="")
        yield PlannedFile(path=here / CSV_FILE, text=_format_rows([report]))
        yield PlannedFile(path=here / RESULTS_FILE, text=_format_json(report_document(report)))
        if report.v1 is not None:
            yield PlannedFile(path=here / V1_REPORT_FILE, text=_format_json(report.v1))


def plan_tree(reports: Sequence[ResultReport]) -> tuple[list[PlannedFile], list[str]]:
    """Plan the files in the tree itself, and a sentence for each report that is left as it is."""
    planned: list[PlannedFile] = []
    unchanged: list[str] = []
    by_place: dict[Path, list[ResultReport]] = {}
    for report in reports:
        by_place.setdefault(report.path, []).append(report)
    for path, here in by_place.items():
        content = _build_content(here)
        if content is None or not any(report.figures.computed for report in here):
            unchanged.append(
                f"{here[0].checked.name}: its report cannot be written: {'; '.join(_list_missing(here))}"
            )
        elif path.exists() and not _is_ours(path):
            unchanged.append(f"{path}: another tool wrote this file; it is left as it is")
        else:
            planned.append(PlannedFile(path=path, text=_format_json(content)))
            if path.name == RESULTS_FILE:
                planned.append(PlannedFile(path=path.with_name(CSV_FILE), text=_format_rows(here)))
    return planned, unchanged


def write_files(files: Sequence[PlannedFile]) -> list[str]:
    """Write the files; returns their paths."""
    for file in files:
        write_text(file.path.parent, file.path.name, file.text)
    return [str(file.path) for file in files]


def _build_content(here: Sequence[ResultReport]) -> Mapping[str, Any] | None:
    """The content of one file, which may have the results of several accelerators."""
    if here[0].path.name == V1_REPORT_FILE:
        return here[0].v1
    if len(here) == 1:
        return report_document(here[0])
    return {"format": FORMAT_VERSION, "results": [report_document(report) for report in here]}


def _list_missing(here: Sequence[ResultReport]) -> list[str]:
    return [text for report in here for text in report.figures.missing] or ["a field of a summary is missing"]


def _is_ours(path: Path) -> bool:
    """Whether Penstock wrote the file. A report of v1.0 does not name its writer, so it is never replaced."""
    content = read_file(path, path.parent).content
    return isinstance(content, dict) and content.get("format") == FORMAT_VERSION


def _format_rows(reports: Sequence[ResultReport]) -> str:
    return findings_export.to_csv(RESULT_COLUMNS, (report.row for report in reports))


def _format_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"
