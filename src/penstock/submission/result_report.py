"""Result reports: results.json, rows in the format of the published tables, and the report of v1.0.

    FOLDER/report.html results.csv results.json      all results
    FOLDER/RESULT/results.json results.csv           one result, under its path in the tree
    FOLDER/RESULT/mlperf_storage_report.json         v1.0 only

Files are planned as paths and contents, then written, each atomically. Invariants: columns keep their names
and positions, and new columns come last; a cell is filled from the files or stays empty, and has no default;
in a submitter's tree, a file is only added or, if Penstock wrote it, replaced. Bandwidths in the row are in
GiB/s.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.errors import csv_cell
from penstock.progress import Progress
from penstock.results.published_files import write_text
from penstock.submission.check import CheckedResult, check_result, read_tree
from penstock.submission.edition import Edition, EditionChoice
from penstock.submission.find_results import V1_REPORT_FILE
from penstock.submission.parsed_file import MissingFact, ParsedFile, read_file
from penstock.submission.result_figures import (
    CONFIDENCE,
    OF_TRAINING,
    ResultFigure,
    compute_figures,
    num_accelerators,
)
from penstock.submission.result_files import ResultDir, ResultRun, SubmittedResult
from penstock.submission.rules.rule import Verdict
from penstock.submission.system_description import provisioned_watts
from penstock.submission.tree_layout import RESULTS_FILE, Benchmark

FINDING_COLUMNS: Final = (
    "name", "org", "division", "system", "workload", "accelerator", "num_accelerators", "result", "rule",
    "verdict", "value", "limit", "evidence", "proof", "fix", "edition",
)  # fmt: skip
_KV_CACHE: Final = {
    f"{load} - {title}": f"option {number}: {figure}"
    for number, load in (
        (1, "llama3.1-8b Storage Only"), (2, "llama3.1-8b Storage + Mem"), (3, "llama3.1-70b Storage Only"),
    )
    for title, figure in (
        ("Throughput (tok/s)", "throughput"), ("Read B/W (GiB/s)", "read bandwidth"),
        ("Write B/W (GiB/s)", "write bandwidth"), ("P95 Read Latency (ms)", "largest p95 latency"),
    )
}  # fmt: skip
"""The columns for key-value caches, each with the figure that it shows."""
RESULT_COLUMNS: Final = (
    "Public ID", "Organization", "Division", "Benchmark Type", "Model", "Name", "Description", "Type",
    "Access Protocol", "Availability", "RU's", "Integrated Client Storage (TiB)", "Usable Capacity (TiB)",
    "Provisioned Power (W)", "# Client Nodes", "Code", "Logs",
    "Accelerator Type", "# Simulated Accelerators", "Read B/W (GiB/s)",
    "Checkpoint Mode", "DP Instances", "Checkpoint Write B/W (GiB/s)", "Checkpoint Write Duration (s)",
    "Checkpoint Read B/W (GiB/s)", "Checkpoint Read Duration (s)",
    "Verdict", "Issues", "Rules Edition", "Comparability Class",
    "Vector Count", "Dimension", "Index Type", "Queries per Sec", "Query Latency (ms)", "Recall Percentage",
    *_KV_CACHE,
)  # fmt: skip
FORMAT_VERSION: Final = 1
"""The version of our results.json, incremented whenever a key is renamed or changes its meaning."""
CSV_FILE: Final = "results.csv"
_ISSUE_VERDICTS: Final = (Verdict.FAIL, Verdict.NOT_CHECKED, Verdict.WARNING)
_SOLUTION: Final = ("system_under_test", "solution")

Distinct = TypeVar("Distinct")
Cell = str | int | float | None
PlannedFile = tuple[Path, str]
"""The path and the content of a file to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReport:
    """One result. `path` is where its report belongs in the tree; `v1` is its report in the format of v1.0.

    `missing` has a sentence for each figure that cannot be recomputed.
    """

    checked: CheckedResult
    benchmark: Benchmark
    path: Path
    figures: tuple[ResultFigure, ...]
    missing: tuple[str, ...]
    row: dict[str, Cell]
    v1: dict[str, Any] | None


def report_all(
    root: Path, editions: Edition | EditionChoice, progress: Progress | None = None
) -> Iterator[ResultReport]:
    """Recompute and check every result below `root`."""
    for result in read_tree(root, editions, progress):
        location = result.location
        edition = editions.of(location.submitter.folder)
        checked, (figures, missing) = check_result(result, edition), compute_figures(result)
        if location.model:
            above = location.run_folders[0].parent if location.run_folders else location.folder
            path, v1 = above / RESULTS_FILE, None
        else:
            path, v1 = location.folder / V1_REPORT_FILE, _build_v1_report(result, checked)
        yield ResultReport(
            checked=checked,
            benchmark=location.benchmark,
            path=path,
            figures=figures,
            missing=missing,
            row=result_row(result, checked, figures),
            v1=v1,
        )


def result_row(
    result: SubmittedResult, checked: CheckedResult, figures: Sequence[ResultFigure]
) -> dict[str, Cell]:
    """Return the cells of one result by column. A cell is empty if its value is missing or varies by run."""
    location, benchmark = result.location, result.location.benchmark

    def common(read: Callable[[ResultDir], object]) -> Callable[[], Cell]:
        """Return a function that returns the value in which all runs agree, or None if they differ."""
        return lambda: _only({str(read(run_dir)) for run_dir in result.run_dirs()})

    means = {figure.name: figure.mean for figure in figures}
    # The model of vector search consists of the engine and the index, named like their folders.
    is_vectors = benchmark is Benchmark.VECTOR_SEARCH
    model = f"{location.folder.parent.name}/{location.model}" if is_vectors else checked.workload
    cells: dict[str, Cell | Callable[[], Cell]] = {
        "Public ID": _public_id(result, checked, model),
        "Organization": checked.organisation,
        "Division": checked.division,
        "Benchmark Type": benchmark.value,
        "Model": model,
        "Name": checked.system,
        "Accelerator Type": checked.accelerator or None,
        "# Simulated Accelerators": checked.num_accelerators,
        "# Client Nodes": lambda: _num_clients(result),
        "Code": common(lambda run_dir: run_dir.pointer.text().strip()),
        "Logs": location.name,
        "Verdict": checked.verdict.value,
        "Issues": "; ".join(issues(checked)),
        "Rules Edition": checked.edition,
        "Comparability Class": common(lambda run_dir: run_dir.provenance.text("core_config", "hash")),
        **(_system(result.systems[0]) if len(result.systems) == 1 else {}),
    }
    if benchmark is Benchmark.TRAINING:
        bandwidth = means.get("read bandwidth")
        cells["Read B/W (GiB/s)"] = None if bandwidth is None else bandwidth / 1024
    elif benchmark is Benchmark.CHECKPOINTING:
        cells["Checkpoint Mode"] = common(lambda each: each.config.text("workload", "checkpoint", "mode"))
        for way in ("write", "read"):
            cells[f"Checkpoint {way.capitalize()} B/W (GiB/s)"] = means.get(f"{way} bandwidth")
            cells[f"Checkpoint {way.capitalize()} Duration (s)"] = means.get(f"{way} duration")
    elif benchmark is Benchmark.KV_CACHE:
        cells |= {column: means.get(figure) for column, figure in _KV_CACHE.items()}
    else:
        cells["Vector Count"] = common(lambda run_dir: run_dir.summary.value("num_vectors"))
        cells["Dimension"] = common(lambda run_dir: run_dir.summary.value("dimension"))
        cells["Index Type"] = common(lambda run_dir: run_dir.summary.value("index_type"))
        recall = means.get("recall")
        cells["Queries per Sec"] = means.get("throughput")
        cells["Query Latency (ms)"] = means.get("p99 latency")
        cells["Recall Percentage"] = None if recall is None else 100 * recall
    row: dict[str, Cell] = dict.fromkeys(RESULT_COLUMNS)
    for column, cell in cells.items():
        try:
            row[column] = cell() if callable(cell) else cell
        except MissingFact:  # the rule that needs the field reports what is missing
            continue
    return row


def issues(checked: CheckedResult) -> list[str]:
    """Return the distinct rules that fail or cannot be checked."""
    bad = (Verdict.FAIL, Verdict.NOT_CHECKED)
    return list(dict.fromkeys(finding.rule for finding in checked.findings if finding.verdict in bad))


def _public_id(result: SubmittedResult, checked: CheckedResult, model: str) -> str | None:
    """Return the number of the result in the round's registry, or None if files name none or several."""
    wanted = [checked.division, checked.organisation, checked.system, result.location.benchmark.value]
    parts = {part.lower() for part in (*model.split("/"), checked.accelerator) if part}
    content = result.context.public_ids.content
    assignments = content.get("assignments") if isinstance(content, dict) else None
    found = set()
    for entry in assignments if isinstance(assignments, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("key"), list):
            named = [str(entry.get(key)) for key in ("category", "organization", "system", "benchmark_type")]
            if named == wanted and parts <= {str(part).lower() for part in entry["key"]}:
                found.add(str(entry.get("public_id")))
    return _only(found)


def _system(described: ParsedFile) -> dict[str, Cell | Callable[[], Cell]]:
    """Return the cells about the system, with capacities and rack units as its description states them."""
    architecture = (*_SOLUTION, "architecture")

    def as_written(*path: str) -> Cell:
        value = described.value("system_under_test", *path)
        return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None

    def kind() -> Cell:
        """Describe access by hosts, the place of the storage, and its API: `Shared remote and local file`."""
        is_shared = described.boolean(*_SOLUTION, "capabilities", "simultaneous_write")
        place = described.text(*architecture, "storage_location").replace("_", " ")
        api = described.text(*architecture, "product_API")
        return f"{'Shared' if is_shared else 'Failover'} {place} {api}"

    watts = provisioned_watts(described)
    return {
        "Description": partial(as_written, "solution", "friendly_description"),
        "Type": kind,
        "Access Protocol": lambda: {"file": "POSIX", "object": "S3"}.get(
            described.text(*architecture, "benchmark_API")
        ),
        "Availability": partial(as_written, "solution", "availability"),
        "RU's": partial(as_written, "total_rack_units"),
        "Integrated Client Storage (TiB)": partial(as_written, "solution", "int_client_store_tib"),
        "Usable Capacity (TiB)": partial(as_written, "solution", "usable_capacity_tib"),
        "Provisioned Power (W)": int(watts) if watts is not None and watts.is_integer() else watts,
    }


def _only(values: set[Distinct]) -> Distinct | None:
    return values.pop() if len(values) == 1 else None


def _num_clients(result: SubmittedResult) -> int | None:
    if result.location.benchmark is Benchmark.VECTOR_SEARCH:
        counts = {run_dir.metadata.integer("args", "num_client_hosts") for run_dir in result.run_dirs()}
    else:
        name = "host_count" if result.location.benchmark is Benchmark.KV_CACHE else "num_hosts"
        counts = {sum(run_dir.summary.integer(name) for run_dir in run.dirs) for run in result.runs}
    return _only(counts)


def report_document(report: ResultReport) -> dict[str, Any]:
    """Build Penstock's results.json for one result."""
    checked = report.checked
    return {
        "format": FORMAT_VERSION,
        "edition": checked.edition,
        **checked.identity(),
        "benchmark": report.benchmark.value,
        "verdict": checked.verdict.value,
        "figures": [
            {
                "name": figure.name,
                "unit": figure.unit,
                "values": figure.values,
                "mean": figure.mean,
                "stdev": figure.deviation,
                "confidence": CONFIDENCE,
                "interval": figure.interval,
                "outliers": [
                    {"run": run, "value": figure.values[run], "rule": rule}
                    for run, rule in figure.outliers.items()
                ],
            }
            for figure in report.figures
        ],
        "not_recomputed": list(report.missing),
        "metrics": checked.metrics,
        "issues": [asdict(finding) for finding in checked.findings if finding.verdict in _ISSUE_VERDICTS],
        "columns": report.row,
    }


def _build_v1_report(result: SubmittedResult, checked: CheckedResult) -> dict[str, Any] | None:
    """Build the report that the benchmark of v1.0 would have written; return None if a field is unknown."""
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
        "train_throughput_samples_per_second": OF_TRAINING["throughput"](run),
        "train_throughput_MB_per_second": OF_TRAINING["read bandwidth"](run),
        "train_num_accelerators": str(num_accelerators(run)),
        "model": model,
        "accelerator": accelerator,
        "num_files_train": first.summary.integer("num_files_train"),
        "num_samples_per_file": first.summary.integer("num_samples_per_file"),
    }


def plan_tree(reports: Sequence[ResultReport]) -> tuple[list[PlannedFile], list[str]]:
    """Plan the files in the tree itself, with a sentence for each report that is not written."""
    planned: list[PlannedFile] = []
    unchanged: list[str] = []
    by_place: dict[Path, list[ResultReport]] = {}
    for report in reports:
        by_place.setdefault(report.path, []).append(report)
    for path, here in by_place.items():  # results with several accelerators share a file
        documents = [report_document(report) for report in here]
        content: Mapping[str, Any] | None = {"format": FORMAT_VERSION, "results": documents}
        if path.name == V1_REPORT_FILE:
            content = here[0].v1
        elif len(here) == 1:
            content = documents[0]
        if content is None or not any(report.figures for report in here):
            missing = [text for report in here for text in report.missing]
            why = "; ".join(missing) or "a field of a summary is missing"
            unchanged.append(f"{here[0].checked.name}: its report cannot be written: {why}")
        elif path.exists() and not _is_ours(path):
            unchanged.append(f"{path}: another tool wrote this file; it is left as it is")
        else:
            planned.append((path, format_json(content)))
            if path.name == RESULTS_FILE:
                planned.append((path.with_name(CSV_FILE), format_rows(here)))
    return planned, unchanged


def _is_ours(path: Path) -> bool:
    """Check whether Penstock wrote the file. A report of v1.0 names no writer, so it is never replaced."""
    content = read_file(path, path.parent).content
    return isinstance(content, dict) and content.get("format") == FORMAT_VERSION


def write_files(files: Iterable[PlannedFile]) -> list[str]:
    """Write the files; return their paths."""
    written = []
    for path, text in files:
        write_text(path.parent, path.name, text)
        written.append(str(path))
    return written


def format_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def format_rows(reports: Sequence[ResultReport]) -> str:
    """Return a CSV table with a row for each result."""
    return to_csv(RESULT_COLUMNS, (report.row for report in reports))


def findings_csv(checked: Sequence[CheckedResult]) -> str:
    """Return a CSV table with a row for each finding; `result` is the verdict on the whole result."""
    rows = (
        result.identity() | {"result": result.verdict.value, "edition": result.edition} | asdict(finding)
        for result in checked
        for finding in result.findings
    )
    return to_csv(FINDING_COLUMNS, rows)


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Format rows under fixed columns, by RFC 4180. None is an empty cell; an unknown column is an error.

    Cells are printed on terminals and opened as sheets, so they have no control characters or formulas.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="raise", lineterminator="\r\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: csv_cell(cell) for key, cell in row.items()})
    return text.getvalue()
